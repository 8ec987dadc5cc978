"""Looking at stored frames: what is in them, and whether they are whole.

Works on any fsspec URL and needs no job: everything but the meaning of the bits is in the frame itself.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import fsspec

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
    """Frames that are not whole, by `FrameError.reason`."""
    messages: list[tuple[str, str, str]] = field(default_factory=list)
    """Path, reason and sentence of each of them."""


def find_frames(locations: Iterable[str]) -> Iterator[tuple[str, bytes]]:
    """Yield (path, bytes) of every frame: a location is a file, or a directory searched for ``*.trec``.

    InputError when a location cannot be read or a directory holds no frame.
    """
    for location in locations:
        try:
            filesystem, root = fsspec.core.url_to_fs(location)
            if filesystem.isfile(root):
                paths = [root]
            else:
                paths = sorted(path for path in filesystem.find(root) if path.endswith(FRAME_SUFFIX))
        except (ImportError, OSError, ValueError) as error:
            raise InputError(f"{location} cannot be read: {error}; give a path or URL of frames") from None
        if not paths:
            raise InputError(
                f"{location} holds no record frames (*{FRAME_SUFFIX}); give a frame or a directory of frames"
            )
        for path in paths:
            try:
                data = filesystem.cat_file(path)
            except OSError as error:
                raise InputError(
                    f"{path} cannot be read: {error}; check that it still exists and may be read"
                ) from None
            yield path, data


def inspect_frames(locations: Iterable[str], table: SiteTable | None = None) -> Iterator[dict[str, Any]]:
    """Describe every frame as a dict of JSON values; sites are named where `table` is the frame's own.

    A frame that is not whole is described by ``path``, ``bytes``, ``reason`` and ``message`` alone.
    """
    for path, data in find_frames(locations):
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
