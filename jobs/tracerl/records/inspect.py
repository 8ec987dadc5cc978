"""Looking at stored frames: what is in them, and whether they are whole.

Works on any fsspec URL and needs no job: everything but the meaning of the bits is in the frame itself.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar

import fsspec
from fsspec.implementations.local import LocalFileSystem

from tracerl.api.errors import InputError
from tracerl.api.frames import FRAME_SUFFIX
from tracerl.records.frame import Frame, FrameError, decode_frame
from tracerl.records.sites import SiteTable


@dataclass
class Verification:
    """Result of checking frames: how many are whole, and the damaged ones by reason."""

    frames: int = 0
    bytes: int = 0
    rows: int = 0
    whole: int = 0
    faults: Counter[str] = field(default_factory=Counter)
    """Frames that are not whole, by `FrameError.reason`, or ``unreadable``."""
    messages: list[tuple[str, str, str]] = field(default_factory=list)
    """Path, reason and sentence of each of them."""


@dataclass(frozen=True)
class Unreadable:
    """A file or directory that is there, or was when its directory was listed, and cannot be read."""

    message: str
    reason: ClassVar[str] = "unreadable"


def find_frames(locations: Iterable[str]) -> Iterator[tuple[str, bytes | Unreadable]]:
    """Yield (path, bytes) of every frame: a location is a file, or a directory searched for ``*.trec``.

    Paths begin as the location was given. InputError when a location does not exist, cannot be opened, or is
    a directory that holds no frame.
    """
    for location in locations:
        if not location:
            raise InputError("an empty path names no frames; give a frame or a directory of frames")
        closed: list[tuple[str, Unreadable]] = []
        try:
            filesystem, root = fsspec.core.url_to_fs(location)
            if filesystem.isfile(root):
                paths = [root]
            elif not filesystem.exists(root):
                raise InputError(
                    f"{location} does not exist; give a frame or a directory of frames, which a job keeps "
                    "with spec.transport.object.retention=Job"
                )
            else:
                paths = sorted(path for path in filesystem.find(root) if path.endswith(FRAME_SUFFIX))
                closed = _closed_directories(filesystem, root)
        except InputError:
            raise
        except Exception as error:  # noqa: BLE001  each of fsspec's many file systems has errors of its own
            raise InputError(
                f"{location} cannot be read ({_words(error)}); give a path or URL of frames"
            ) from None
        if not paths and not closed:
            raise InputError(
                f"{location} holds no record frames (with retention Trained they are deleted after use; set "
                "spec.transport.object.retention=Job)"
            )
        for path in paths:
            data: bytes | Unreadable
            try:
                data = filesystem.cat_file(path)
            except Exception as error:  # noqa: BLE001  as above; the others may be whole
                data = _unreadable(error)
            yield _as_given(location, root, path), data
        for path, problem in closed:
            yield _as_given(location, root, path), problem


def _closed_directories(filesystem: Any, root: str) -> list[tuple[str, Unreadable]]:
    """Directories of this machine that `find` passes over in silence because they cannot be listed."""
    failed: list[OSError] = []
    if isinstance(filesystem, LocalFileSystem):
        for _ in os.walk(root, onerror=failed.append):
            pass
    return [(str(error.filename), _unreadable(error)) for error in failed]


def _unreadable(error: Exception) -> Unreadable:
    return Unreadable(f"it cannot be read ({_words(error)})")


def _words(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        return error.strerror.lower()
    return (str(error).splitlines() or [type(error).__name__])[0]


def _as_given(location: str, root: str, path: str) -> str:
    """Write the path of a frame below `root` with the location that it was found in."""
    if path == root:
        return location
    if "::" in location or not path.startswith(root):
        return path
    return f"{location.rstrip('/')}/{path.removeprefix(root).lstrip('/')}"


def inspect_frames(locations: Iterable[str], table: SiteTable | None = None) -> Iterator[dict[str, Any]]:
    """Describe every frame as a dict of JSON values; sites are named where `table` is the frame's own.

    A frame that is not whole is described by ``path``, ``bytes``, ``reason`` and ``message`` alone.
    """
    for path, data in find_frames(locations):
        if isinstance(data, Unreadable):
            yield {"path": path, "bytes": 0, "reason": data.reason, "message": data.message}
            continue
        try:
            frame = decode_frame(data)
        except FrameError as error:
            yield {"path": path, "bytes": len(data), "reason": error.reason, "message": str(error)}
            continue
        yield {"path": path, "bytes": len(data), **_describe(frame, table)}


def _describe(frame: Frame, table: SiteTable | None) -> dict[str, Any]:
    header = frame.header
    known = table if table is not None and table.digest == header.table_digest else None
    sections = []
    for section in frame.info.sections:
        site = None if known is None else known.sites[section.slice.site]
        sections.append(
            {
                "site": section.slice.site,
                **({} if site is None else {"layer": site.layer, "kind": site.kind.value}),
                "groups": [section.slice.start, section.slice.stop],
                "offset": section.offset,
                "bytes": section.length,
                "bytesPerRow": section.length // header.rows,
                "xxh3": f"{section.xxh3:016x}",
                "tensorScale": section.tensor_scale,
            }
        )
    payload = sum(section.length for section in frame.info.sections)
    return {
        "jobUID": header.job_uid,
        "runID": header.run_id,
        **({"trajectory": header.trajectory} if header.prefix is None else {"prefix": header.prefix}),
        "part": header.part,
        "parts": header.parts,
        "rows": [header.row_start, header.row_stop],
        "version": header.version,
        "siteTable": header.table_digest,
        "audit": header.audit,
        "headerBytes": frame.info.header_bytes,
        "payloadBytes": payload,
        "bytesPerRow": payload // header.rows,
        "zeroBlocks": len(frame.zero_blocks),
        "sections": sections,
    }


def verify_frames(locations: Iterable[str], table: SiteTable | None = None) -> Verification:
    """Check every frame as a reader would; with `table`, also that it was written under that table."""
    result = Verification()
    for path, data in find_frames(locations):
        result.frames += 1
        if isinstance(data, Unreadable):
            result.faults[data.reason] += 1
            result.messages.append((path, data.reason, data.message))
            continue
        result.bytes += len(data)
        try:
            frame = decode_frame(data, table)
        except FrameError as error:
            result.faults[error.reason] += 1
            result.messages.append((path, error.reason, str(error)))
            continue
        result.whole += 1
        result.rows += frame.header.rows
    return result
