"""Looking at stored frames: what is in them, and whether they are whole.

Needs no job: everything but the meaning of the bits is in the frame itself.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from tracerl.api.frames import RELEASED, FoundFrame
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
    """Frames that are not whole, by `FrameError.reason` or `FoundFrame.reason`."""
    messages: list[tuple[str, str, str]] = field(default_factory=list)
    """Path, reason and sentence of each of them."""
    released: int = 0
    """Frames that went before they were read; they are not in `frames`."""


def inspect_frames(found: Iterable[FoundFrame], table: SiteTable | None = None) -> Iterator[dict[str, Any]]:
    """Describe every frame as a dict of JSON values; sites are named where `table` is the frame's own.

    A frame that is not whole is described by ``path``, ``bytes``, ``reason`` and ``message`` alone, and so is
    one that went before it was read, with the reason `RELEASED`.
    """
    for item in found:
        path, data = item.path, item.data
        if data is None:
            yield {"path": path, "bytes": 0, "reason": item.reason, "message": item.message}
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


def verify_frames(found: Iterable[FoundFrame], table: SiteTable | None = None) -> Verification:
    """Check every frame as a reader would; with `table`, also that it was written under that table."""
    result = Verification()
    for item in found:
        path, data = item.path, item.data
        if item.reason == RELEASED:
            result.released += 1
            continue
        result.frames += 1
        if data is None:
            result.faults[item.reason] += 1
            result.messages.append((path, item.reason, item.message))
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
