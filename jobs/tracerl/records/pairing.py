"""Pairing: from the frames an engine names for a trajectory to the rows that its training may follow.

Row t is the forward pass that takes token t in and predicts token t+1, so n tokens have rows 0..n-2. What an
engine returns about a trajectory is a list of entries; pairing uses this list and nothing else. No record
ever changes a result silently: a row is bit-equal to what was recorded, or absent and counted by reason.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray
from torch import Tensor

from tracerl.api.errors import TraceRLError
from tracerl.api.frames import Handle, parse_handle
from tracerl.api.job import Reprefill
from tracerl.records.frame import Frame, FrameError, decode_frame
from tracerl.records.rows import impossible
from tracerl.records.sites import Site, SiteSlice, SiteTable

MISSING_REASONS = ("missing", "checksum", "version", "site_table", "shape")
_NO_ZERO_BLOCKS = np.zeros((0, 3), np.int64)
_REASON_CODE = {reason: code for code, reason in enumerate(MISSING_REASONS, start=1)}


@dataclass(frozen=True, slots=True)
class RecordEntry:
    """One entry of an engine's list: rows start..stop-1 of part `part` of `parts` are in the frame `handle`.

    The range may be shorter than the frame's own, as when only the start of a cached prefix is used.
    """

    handle: Handle
    part: int
    parts: int
    start: int
    stop: int
    audit: bool = False

    def to_json(self) -> dict[str, Any]:
        """Write the entry as an item of ``meta_info["records"]``."""
        return {
            "handle": self.handle,
            "part": self.part,
            "parts": self.parts,
            "start": self.start,
            "stop": self.stop,
            "audit": self.audit,
        }

    @classmethod
    def from_json(cls, item: object) -> RecordEntry:
        """Read an item of ``meta_info["records"]``; FrameError ``shape`` when it is not an entry."""
        if not isinstance(item, Mapping) or set(item) - {"audit"} != {
            "handle",
            "part",
            "parts",
            "start",
            "stop",
        }:
            raise FrameError("shape", "a record entry has handle, part, parts, start, stop and audit")
        numbers = [item[key] for key in ("part", "parts", "start", "stop")]
        audit = item.get("audit", False)
        if any(type(number) is not int for number in numbers) or type(audit) is not bool:
            raise FrameError("shape", "a record entry counts in integers")
        if not isinstance(item["handle"], str):
            raise FrameError("shape", "a record entry's handle is text")
        part, parts, start, stop = numbers
        return cls(Handle(item["handle"]), part, parts, start, stop, audit)


def read_entries(items: object) -> list[RecordEntry]:
    """Read ``meta_info["records"]``, leaving out what is no entry: its rows are then missing."""
    entries = []
    for item in items if isinstance(items, list) else []:
        try:
            entries.append(RecordEntry.from_json(item))
        except FrameError:
            continue
    return entries


@dataclass(frozen=True)
class TrajectoryRecords:
    """Everything that was recorded about one trajectory and may be used.

    rows uint8 [n_rows, table.row_bytes], 0 where absent; present bool [n_rows, sites]; versions int32
    [n_rows], -1 where no site is present; zero_blocks int64 [m, 3] as (row, site index, block), sorted;
    tensor_scales float32 [n_rows, sites] when the table has PerVersion sites, else None. `faults` uint8
    [n_rows] says why a row is missing, of which any site that was needed is absent: a place in
    `MISSING_REASONS`, counted from 1; 0 elsewhere. `bytes` are those of the frames fetched for it; `mixed`
    counts rows whose next token was sampled under another version than the last token, so that no single
    forward pass matches both what was sampled and what was attended.
    """

    table: SiteTable
    n_rows: int
    rows: Tensor
    present: Tensor
    versions: Tensor
    zero_blocks: Tensor
    tensor_scales: Tensor | None
    faults: NDArray[np.uint8]
    bytes: int
    mixed: int

    @property
    def missing(self) -> Counter[str]:
        """Missing rows by reason."""
        return count_faults(self.faults)


def count_faults(faults: NDArray[np.uint8]) -> Counter[str]:
    """Count `TrajectoryRecords.faults` by reason."""
    codes = np.bincount(faults, minlength=len(MISSING_REASONS) + 1).tolist()
    return Counter({reason: codes[code] for reason, code in _REASON_CODE.items() if codes[code]})


def required_versions(
    tokens: int, prompt_tokens: int, token_versions: Sequence[int], reprefill: Reprefill
) -> NDArray[np.int32]:
    """Version that each row must have, int32 [tokens - 1].

    AsSampled: a row counts when it was computed under the version that sampled its next token, a prompt row
    under that of the first sampled token. AsAttended: under the version of the last sampled token, since a
    sequence prefilled again under newer weights attends rows of those weights only.
    """
    rows = max(tokens - 1, 0)
    if not token_versions:
        return np.full(rows, -1, dtype=np.int32)
    last = token_versions[-1]
    if reprefill is Reprefill.AS_ATTENDED or token_versions.count(last) == len(token_versions):
        return np.full(rows, last, dtype=np.int32)
    next_token = np.arange(1, rows + 1) - prompt_tokens
    return np.asarray(token_versions, dtype=np.int32)[np.maximum(next_token, 0)]


def assemble(
    entries: Iterable[RecordEntry],
    fetch: Callable[[Handle], memoryview],
    table: SiteTable,
    *,
    tokens: int,
    prompt_tokens: int,
    token_versions: Sequence[int],
    job_uid: str,
    run_id: str,
    trajectory: str,
    reprefill: Reprefill = Reprefill.AS_SAMPLED,
    opened: MutableMapping[Handle, Frame] | None = None,
    needed: NDArray[np.bool_] | None = None,
    page_locked: bool = False,
) -> TrajectoryRecords:
    """Put the frames of one trajectory together; entries whose `audit` is not the table's are left out.

    `tokens` counts prompt and response; `token_versions` holds the version that sampled each response token.
    `trajectory` is the id that frames (other than prefixes) must carry. `fetch` returns the bytes of a handle
    and may raise TraceRLError or OSError when it cannot. `opened` holds frames that were verified under the
    same table before; prefixes that are fetched are added to it as copies, since other trajectories may share
    them. `needed` bool [tokens - 1, sites] says what is missing when it is absent; None: everything is. With
    `page_locked` the rows are in memory that a GPU copies from without the host. Bad records never raise:
    their rows are missing. A trajectory without a response token (aborted) needs no rows, so none are present
    and none missing. ValueError when the counts contradict each other.
    """
    if not 0 <= prompt_tokens <= tokens or len(token_versions) != tokens - prompt_tokens:
        raise ValueError(
            f"{tokens} tokens of which {prompt_tokens} are the prompt do not have {len(token_versions)} "
            "sampled versions"
        )
    if token_versions and not 0 <= min(token_versions) <= max(token_versions) < 2**31:
        raise ValueError("a policy version is a number from 0 to 2**31 - 1")
    required = required_versions(tokens, prompt_tokens, token_versions, reprefill)
    work = _Assembly(table, required, {} if opened is None else opened, page_locked=page_locked)
    if token_versions:
        for entry in entries:
            if entry.audit is table.audit:
                work.add(entry, fetch, job_uid, run_id, trajectory)
    mixed = 0
    if token_versions and token_versions.count(token_versions[-1]) < len(token_versions):
        sampled = required_versions(tokens, prompt_tokens, token_versions, Reprefill.AS_SAMPLED)
        mixed = int(np.count_nonzero(sampled != token_versions[-1]))
    if not token_versions:
        needed = np.zeros((len(required), len(table.sites)), dtype=np.bool_)
    return work.finish(needed, mixed=mixed)


class _Assembly:
    """Rows under construction.

    `fault` holds the first reason found for a row. `frames_held` counts the frames with all sites that cover
    a row, `groups_held` the parts that cover each group of a site, up to 2: of what is covered twice nobody
    can tell which is right.
    """

    def __init__(
        self,
        table: SiteTable,
        required: NDArray[np.int32],
        opened: MutableMapping[Handle, Frame],
        *,
        page_locked: bool,
    ) -> None:
        self.table = table
        self.required = required
        self.opened = opened
        n, sites = len(required), len(table.sites)
        size = n, table.row_bytes
        # NumPy's zeros take no memory before they are written to.
        self.tensor = (
            torch.zeros(size, dtype=torch.uint8, pin_memory=True)
            if page_locked
            else torch.from_numpy(np.zeros(size, dtype=np.uint8))
        )
        self.rows: NDArray[np.uint8] = self.tensor.numpy()
        self.fault = np.zeros(n, dtype=np.uint8)
        self.frames_held = np.zeros(n, dtype=np.int32)
        # Only parts need these: a frame that holds everything is the usual case.
        self.groups_held: NDArray[np.uint8] | None = None
        self.scales = np.zeros((n, sites), dtype=np.float32) if table.per_version else None
        self.conflicts = np.zeros((n, sites), dtype=np.bool_) if table.per_version else None
        self.zero_blocks: list[NDArray[np.int64]] = []
        self.bytes = 0

    def add(
        self,
        entry: RecordEntry,
        fetch: Callable[[Handle], memoryview],
        job_uid: str,
        run_id: str,
        trajectory: str,
    ) -> None:
        n = len(self.required)
        start, stop = max(entry.start, 0), min(entry.stop, n)
        if not 0 <= entry.start < entry.stop <= n:
            self.fail(slice(start, max(start, stop)), "shape")
            return
        span = slice(start, stop)
        try:
            frame = self.opened.get(entry.handle) or self.open(entry.handle, fetch)
            _check_identity(frame, entry, job_uid, run_id, trajectory)
        except FrameError as error:
            self.fail(span, "missing" if error.reason == "run" else error.reason)
            return
        except (TraceRLError, OSError):
            self.fail(span, "missing")
            return
        fits = self.required[span] == frame.header.version
        if np.count_nonzero(fits) == len(fits):
            self.take(frame, span)
            return
        self.fail(start + np.flatnonzero(~fits), "version")
        # A run of rows at a time: a slice copies several times faster than an index list.
        edges = np.flatnonzero(np.diff(fits, prepend=False, append=False))
        for first, last in edges.reshape(-1, 2).tolist():
            self.take(frame, slice(start + first, start + last))

    def open(self, handle: Handle, fetch: Callable[[Handle], memoryview]) -> Frame:
        parts = parse_handle(handle)
        data = fetch(handle)
        self.bytes += len(data)
        if len(data) != parts.length or xxhash.xxh3_64_intdigest(data) != parts.xxh3:
            raise FrameError("checksum", "the bytes are not those that the handle names")
        frame = decode_frame(data, self.table)
        if frame.header.prefix is not None:
            # Used again without being verified again, so what was verified must not depend on `data` staying.
            frame = replace(frame, payloads=tuple(payload.copy() for payload in frame.payloads))
            self.opened[handle] = frame
        return frame

    def fail(self, rows: slice | NDArray[np.intp], reason: str) -> None:
        self.fault[rows] = np.where(self.fault[rows] == 0, _REASON_CODE[reason], self.fault[rows])

    def take(self, frame: Frame, target: slice) -> None:
        if not frame.info.slices:
            return  # a rank's part of which the reader selected no site
        first = frame.header.row_start
        source = slice(target.start - first, target.stop - first)
        if self.table.layout(frame.info.slices).whole:
            self.frames_held[target] += 1
            np.concatenate(
                frame.payloads
                if source == slice(0, frame.header.rows)
                else [payload[source] for payload in frame.payloads],
                axis=1,
                out=self.rows[target],
            )
        else:
            self.take_slices(frame, target, source)
        if self.scales is not None and self.conflicts is not None:
            for piece, scale in zip(frame.info.slices, frame.info.places.tensor_scales, strict=True):
                known = self.scales[target, piece.site]
                self.conflicts[target, piece.site] |= (known != 0) & (known != scale)
                self.scales[target, piece.site] = scale
        if len(frame.zero_blocks):
            found = frame.zero_blocks + np.array([first, 0, 0])
            inside = (found[:, 0] >= target.start) & (found[:, 0] < target.stop)
            self.zero_blocks.append(found[inside])

    def take_slices(self, frame: Frame, target: slice, source: slice) -> None:
        if self.groups_held is None:
            self.groups_held = np.zeros((len(self.required), self.table.first_group[-1]), dtype=np.uint8)
        for piece, payload in zip(frame.info.slices, frame.payloads, strict=True):
            index, start, stop = piece
            site = self.table.sites[index]
            held = slice(self.table.first_group[index] + start, self.table.first_group[index] + stop)
            self.groups_held[target, held] = np.minimum(self.groups_held[target, held] + 1, 2)
            columns = slice(self.table.columns[index], self.table.columns[index + 1])
            part = payload[source]
            if stop - start < site.groups:
                part = _merge(site, piece, self.rows[target, columns], part)
            self.rows[target, columns] = part

    def finish(self, needed: NDArray[np.bool_] | None, *, mixed: int) -> TrajectoryRecords:
        # How often each site is covered, at least and at most: [n, sites], or [n, 1] where all are alike.
        least = most = self.frames_held[:, None]
        if self.groups_held is not None and self.table.sites:
            held = self.groups_held + least
            starts = self.table.first_group[:-1]
            least = np.minimum.reduceat(held, starts, axis=1)
            most = np.maximum.reduceat(held, starts, axis=1)
        once = least == 1
        wrong = impossible(self.table, self.rows)
        faults = np.zeros(len(self.required), dtype=np.uint8)
        versions = self.required
        held_once = least is most and np.count_nonzero(once) == once.size
        if held_once and self.conflicts is None and not np.count_nonzero(wrong):
            present = np.ones(wrong.shape, dtype=np.bool_)
        else:
            wrong &= once
            wrong |= most > 1
            if self.conflicts is not None:
                wrong |= self.conflicts
            if np.count_nonzero(wrong):
                self.fail(np.flatnonzero(wrong.any(axis=1)), "shape")
            present = once & ~wrong
            # What nothing was written to is 0, and takes no memory yet.
            self.erase(~present & (most > 0))
            lacking = ~present if needed is None else needed & ~present
            # Of some rows no entry spoke.
            reasons = np.where(self.fault == 0, _REASON_CODE["missing"], self.fault)
            faults = np.where(lacking.any(axis=1), reasons, 0).astype(np.uint8)
            versions = np.where(present.any(axis=1), self.required, np.int32(-1))
        zero_blocks = _NO_ZERO_BLOCKS
        if self.zero_blocks:
            zero_blocks = np.unique(np.concatenate(self.zero_blocks), axis=0)
            zero_blocks = zero_blocks[present[zero_blocks[:, 0], zero_blocks[:, 1]]]
        return TrajectoryRecords(
            table=self.table,
            n_rows=len(self.required),
            rows=self.tensor,
            present=torch.from_numpy(present),
            versions=torch.from_numpy(versions),
            zero_blocks=torch.from_numpy(zero_blocks),
            tensor_scales=None if self.scales is None else torch.from_numpy(self.scales),
            faults=faults,
            bytes=self.bytes,
            mixed=mixed,
        )

    def erase(self, absent: NDArray[np.bool_]) -> None:
        for index in np.flatnonzero(absent.any(axis=0)):
            self.rows[absent[:, index], self.table.columns[index] : self.table.columns[index + 1]] = 0
        if self.scales is not None:
            self.scales[absent] = 0


def _check_identity(frame: Frame, entry: RecordEntry, job_uid: str, run_id: str, trajectory: str) -> None:
    header = frame.header
    if (header.job_uid, header.run_id) != (job_uid, run_id):
        raise FrameError("run", f"the frame is of run {header.run_id} of job {header.job_uid}")
    if header.prefix is None and header.trajectory != trajectory:
        raise FrameError("run", f"the frame is of trajectory {header.trajectory}")
    if (header.part, header.parts) != (entry.part, entry.parts):
        raise FrameError("shape", f"the frame is part {header.part} of {header.parts}")
    if not header.row_start <= entry.start < entry.stop <= header.row_stop:
        raise FrameError("shape", f"the frame has rows {header.row_start}..{header.row_stop}")


def _merge(
    site: Site, piece: SiteSlice, whole: NDArray[np.uint8], part: NDArray[np.uint8]
) -> NDArray[np.uint8]:
    """Lay groups' rows [n, slice bytes] into whole rows [n, row_bytes]; their bits need not start a byte."""
    codes, scales, _ = site.slice_bytes(piece.start, piece.stop)
    width = site.dim // site.groups
    out = whole.copy()
    fields = (
        (0, site.code_bytes, 0, codes, width * site.code_bits),
        (
            site.code_bytes,
            site.code_bytes + site.scale_bytes,
            codes,
            codes + scales,
            width // site.block * site.scale_bits,
        ),
    )
    for to_start, to_stop, from_start, from_stop, bits_a_group in fields:
        target = np.unpackbits(out[:, to_start:to_stop], axis=1, bitorder="little")
        source = np.unpackbits(part[:, from_start:from_stop], axis=1, bitorder="little")
        first, last = bits_a_group * piece.start, bits_a_group * piece.stop
        target[:, first:last] = source[:, : last - first]
        out[:, to_start:to_stop] = np.packbits(target, axis=1, bitorder="little")
    if piece.start == 0:
        out[:, site.code_bytes + site.scale_bytes :] = part[:, codes + scales :]
    return out
