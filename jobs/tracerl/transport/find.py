"""Finding stored frames, as files or in objects, on any fsspec URL."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import fsspec
import xxhash
from fsspec.implementations.local import LocalFileSystem

from tracerl.api.errors import InputError
from tracerl.api.frames import FRAME_SUFFIX, FoundFrame
from tracerl.transport.objects.backend import one_line
from tracerl.transport.objects.format import OBJECT_SUFFIX, ObjectError, decode_index

_SUFFIXES = (FRAME_SUFFIX, OBJECT_SUFFIX)


def find_frames(locations: Iterable[str]) -> Iterator[FoundFrame]:
    """Yield every frame: a location is a frame, an object of frames, or a directory searched for both.

    Any fsspec URL; credentials are those of the environment. Paths begin as the location was given; that of a
    frame in an object ends in ``#`` and its offset. InputError when a location does not exist, cannot be
    opened, or is a directory that holds no frame.
    """
    for location in locations:
        if not location:
            raise InputError("an empty path names no frames; give frames or a directory of them")
        closed: list[FoundFrame] = []
        try:
            filesystem, root = fsspec.core.url_to_fs(location)
            if filesystem.isfile(root):
                paths = [root]
            elif not filesystem.exists(root):
                raise InputError(
                    f"{location} does not exist; give frames or a directory of them, which a job keeps "
                    "with spec.transport.object.retention=Job"
                )
            else:
                paths = sorted(path for path in filesystem.find(root) if path.endswith(_SUFFIXES))
                closed = _closed_directories(filesystem, root)
        except InputError:
            raise
        except Exception as error:  # noqa: BLE001  each of fsspec's many file systems has errors of its own
            raise InputError(
                f"{location} cannot be read ({one_line(error)}); give a path or URL of frames"
            ) from None
        if not paths and not closed:
            raise InputError(
                f"{location} holds no record frames (they are deleted after use; to keep them, set "
                "spec.transport.onlyObject=true and spec.transport.object.retention=Job)"
            )
        for path in paths:
            shown = _as_given(location, root, path)
            try:
                data = filesystem.cat_file(path)
            except Exception as error:  # noqa: BLE001  as above; the others may be whole
                yield _unreadable(shown, error)
                continue
            if path.endswith(OBJECT_SUFFIX):
                yield from _frames_of_object(shown, data)
            else:
                yield FoundFrame(shown, data)
        for problem in closed:
            yield replace(problem, path=_as_given(location, root, problem.path))


def _frames_of_object(path: str, data: bytes) -> Iterator[FoundFrame]:
    try:
        index = decode_index(data, len(data))
    except ObjectError as error:
        yield FoundFrame(path, None, error.reason, f"it is not a whole object: {error}")
        return
    for frame in index.frames:
        piece = data[frame.offset : frame.offset + frame.length]
        shown = f"{path}#{frame.offset}"
        if f"{xxhash.xxh3_64_intdigest(piece):016x}" == frame.xxh3:
            yield FoundFrame(shown, piece)
        else:
            yield FoundFrame(shown, None, "checksum", "the hash in the object's index is of other bytes")


def _closed_directories(filesystem: Any, root: str) -> list[FoundFrame]:
    """Directories of this machine that `find` passes over in silence because they cannot be listed."""
    failed: list[OSError] = []
    if isinstance(filesystem, LocalFileSystem):
        for _ in os.walk(root, onerror=failed.append):
            pass
    return [_unreadable(str(error.filename), error) for error in failed]


def _unreadable(path: str, error: Exception) -> FoundFrame:
    return FoundFrame(path, None, "unreadable", f"it cannot be read ({one_line(error)})")


def _as_given(location: str, root: str, path: str) -> str:
    """Write the path of a frame below `root` with the location that it was found in."""
    if path == root:
        return location
    if "::" in location or not path.startswith(root):
        return path
    return f"{location.rstrip('/')}/{path.removeprefix(root).lstrip('/')}"
