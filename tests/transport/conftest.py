"""Fixtures of the transport's tests with real servers and processes."""

from s3_server import s3_server

__all__ = ["s3_server"]
