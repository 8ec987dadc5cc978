"""Frames in an object store: gathered into objects with an index, on any fsspec URL."""
