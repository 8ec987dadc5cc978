"""What the rollout records: codes on their way through the model, rows per request, frames put by a thread.

`CaptureHooks` quantises at the model's sites and packs what the site table wants; `RowBuffer` keeps the rows
of running requests by cache slot and decides which of two rows counts after a sequence was prefilled again;
`FrameWriter` encodes and puts frames beside the scheduler, which never waits for it.
"""

from __future__ import annotations

import itertools
import logging
import queue
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from tracerl.api.frames import Handle
from tracerl.api.job import Quantization, Reprefill, RoundingOrder
from tracerl.api.model import ModelShape
from tracerl.engines.reference.model import PlainHooks
from tracerl.methods import MethodPlan, Treatment
from tracerl.numerics import BlockFormat, Quantized, dequantize, fake_quantize, quantize
from tracerl.records.frame import FrameHeader, encode_frame
from tracerl.records.pairing import RecordEntry
from tracerl.records.rows import pack_routes, pack_rows
from tracerl.records.sites import BLOCK_FORMATS, Site, SiteKind, SiteTable
from tracerl.transport.base import Transport, TransportError

_log = logging.getLogger(__name__)

ZeroBlocks = npt.NDArray[np.int64]
"""int64 [m, 3]: (row, site index, block) of blocks whose scale is 0, sorted by row."""
NO_ZERO_BLOCKS: ZeroBlocks = np.zeros((0, 3), np.int64)


@dataclass(frozen=True)
class Captured:
    """Rows uint8 [N, table.row_bytes] of one forward pass; zero blocks count rows within it."""

    rows: Tensor
    zero_blocks: ZeroBlocks


class _Packer:
    """Collects the values of a table's sites during one forward pass and packs alike sites together.

    One call for all layers instead of one a layer: with the few rows of a decode step, calls take the time.
    """

    def __init__(self, table: SiteTable, fmt: BlockFormat, order: RoundingOrder) -> None:
        self._table, self._format, self._order = table, fmt, order
        self._columns = [slice(start := table.offset(s), start + s.row_bytes) for s in table.sites]
        groups: dict[Site, list[int]] = {}
        for index, site in enumerate(table.sites):
            # Keys and values of one width pack alike.
            kind = SiteKind.KEY if site.kind is SiteKind.VALUE else site.kind
            groups.setdefault(replace(site, layer=0, kind=kind), []).append(index)
        self._groups = list(groups.values())
        self.values: list[Quantized | Tensor | None] = [None] * len(table.sites)
        """By site: its codes, or the values [rows, dim] that codes are still to be made of; or expert ids."""

    def pack(self, rows: int) -> Captured:
        """Pack what `values` holds for `rows` rows, and forget it."""
        out = torch.empty((rows, self._table.row_bytes), dtype=torch.uint8)
        zero: list[ZeroBlocks] = []
        for members in self._groups:
            site = self._table.sites[members[0]]
            values = [self.values[index] for index in members]
            tensors = [value for value in values if isinstance(value, Tensor)]
            if site.kind is SiteKind.ROUTES:
                packed = pack_routes(site, torch.cat(tensors))
            else:
                if tensors:
                    whole = quantize(torch.cat(tensors), self._format, order=self._order)
                else:
                    whole = _joined([value for value in values if isinstance(value, Quantized)])
                packed, found = pack_rows(site, whole)
                if len(found):
                    place, block = found.numpy().T
                    zero.append(np.stack([place % rows, np.array(members)[place // rows], block], axis=1))
            for index, part in zip(members, packed.view(len(members), rows, -1), strict=True):
                out[:, self._columns[index]] = part
        self.values = [None] * len(self.values)
        return Captured(out, _by_row(np.concatenate(zero)) if zero else NO_ZERO_BLOCKS)


def _joined(parts: Sequence[Quantized]) -> Quantized:
    """Rows of one tensor scale and format one below the other."""
    codes, scales = torch.cat([part.codes for part in parts]), torch.cat([part.scales for part in parts])
    return Quantized(codes, scales, parts[0].tensor_scale, parts[0].fmt)


def _by_row(zero_blocks: ZeroBlocks) -> ZeroBlocks:
    return zero_blocks[np.argsort(zero_blocks[:, 0], kind="stable")]


@dataclass(frozen=True)
class _SiteUse:
    """What the rollout does at one site: `record` and `audit` are indices into the two tables."""

    name: str
    quantized: bool
    record: int | None
    audit: int | None


class CaptureHooks(PlainHooks):
    """Rounds to nearest where the method says so; keeps codes, scales and expert ids of recorded sites."""

    def __init__(
        self,
        shape: ModelShape,
        plan: MethodPlan,
        quantization: Quantization,
        table: SiteTable,
        audit_table: SiteTable | None,
    ) -> None:
        """`audit_table` None: no trajectory is audited."""
        super().__init__(shape)
        self._format = BLOCK_FORMATS[quantization.format]
        self._order = quantization.order
        self._extra = _share_of_recording(self._format, self._order)
        self._record = _Packer(table, self._format, self._order)
        self._audit = None if audit_table is None else _Packer(audit_table, self._format, self._order)
        self._audited: Tensor | None = None
        self.capture_seconds = 0.0
        """What recording took in addition to rounding, over all passes."""
        self.pack_seconds = 0.0

        def index(of: SiteTable | None, layer: int, kind: SiteKind) -> int | None:
            site = None if of is None else of.find(layer, kind)
            return None if of is None or site is None else of.index(site)

        self._uses = {
            (layer, kind): _SiteUse(
                name=f"layer {layer} {kind}",
                quantized=plan.site(layer, kind).rollout is Treatment.RTN,
                record=index(table, layer, kind),
                audit=index(audit_table, layer, kind),
            )
            for layer in range(shape.layers)
            for kind in SiteKind
        }
        self._rounds_fc2 = any(
            self._uses[layer, SiteKind.FC2_INPUT].quantized for layer in range(shape.layers)
        )

    def begin(self, audited: Tensor | None) -> None:
        """Start a forward pass; `audited` int64 [A] are the rows of the stream that are audited, if any."""
        self._audited = audited if self._audit is not None else None

    def finish(self, rows: int) -> tuple[Captured, Captured | None]:
        """Rows [rows, …] of the site table and, when rows are audited, [A, …] of the audit table."""
        started = time.thread_time()
        record = self._record.pack(rows)
        audit = None
        if self._audit is not None and self._audited is not None:
            audit = self._audit.pack(len(self._audited))
        self.pack_seconds += time.thread_time() - started
        return record, audit

    def expert_input(self, layer: int, x: Tensor) -> Tensor:
        """Quantise the routed experts' input."""
        return self._round(self._uses[layer, SiteKind.EXPERT_INPUT], x)

    def key(self, layer: int, k: Tensor) -> Tensor:
        """Quantise keys."""
        return self._round(self._uses[layer, SiteKind.KEY], k)

    def value(self, layer: int, v: Tensor) -> Tensor:
        """Quantise values."""
        return self._round(self._uses[layer, SiteKind.VALUE], v)

    @property
    def fc2_input(self) -> Callable[[int, Tensor], Tensor] | None:
        """Quantise the experts' second input, where the method does."""
        return self._round_fc2 if self._rounds_fc2 else None

    def _round_fc2(self, layer: int, x: Tensor) -> Tensor:
        return self._round(self._uses[layer, SiteKind.FC2_INPUT], x)

    def routes(self, layer: int, logits: Tensor) -> Tensor:
        """Choose experts."""
        ids = super().routes(layer, logits)
        use = self._uses[layer, SiteKind.ROUTES]
        if use.record is not None:
            self._record.values[use.record] = ids
        return ids

    def _round(self, use: _SiteUse, x: Tensor) -> Tensor:
        if not use.quantized:
            return x
        if use.record is None:
            out = fake_quantize(x, self._format, order=self._order, site=use.name)
        else:
            started = time.thread_time()
            quantized = quantize(x, self._format, order=self._order, site=use.name)
            out = dequantize(quantized, x.dtype)
            self._record.values[use.record] = quantized
            self.capture_seconds += self._extra * (time.thread_time() - started)
        if self._audit is not None and self._audited is not None and use.audit is not None:
            # Blocks do not look beyond their row, so a few rows alone give the codes that they had among all.
            self._audit.values[use.audit] = x[self._audited]
        return out


def _share_of_recording(fmt: BlockFormat, order: RoundingOrder) -> float:
    """Share of quantising to codes and back that rounding alone would not take, on this machine now.

    The rollout rounds with or without records, so only this share is their cost.
    """
    x = torch.linspace(-3, 3, 64 * 1024).view(-1, 16 * fmt.block)

    def best(function: Callable[[], object]) -> float:
        def once() -> float:
            started = time.thread_time()
            function()
            return time.thread_time() - started

        return min(once() for _ in range(5))

    rounding = best(lambda: fake_quantize(x, fmt, order=order))
    recording = best(lambda: dequantize(quantize(x, fmt, order=order)))
    return max(0.0, 1 - rounding / recording)


# -- rows of running requests -----------------------------------------------------------------------------


@dataclass
class SavedRows:
    """Rows of a request that lost its slot: rows uint8 [n, row_bytes], versions int32 [n]."""

    rows: Tensor
    versions: npt.NDArray[np.int32]
    zero_blocks: ZeroBlocks
    emitted: int
    """Rows 0..emitted-1 are in frames already."""


class RowBuffer:
    """Rows of one site table by cache slot; row t of a slot is the forward pass that took token t in."""

    def __init__(self, table: SiteTable, *, slots: int, capacity: int, reprefill: Reprefill) -> None:
        self.table = table
        # Memory is only used where rows are written: the system hands out zero pages on first touch.
        self._rows = torch.zeros((slots, capacity, table.row_bytes), dtype=torch.uint8)
        self._versions = torch.full((slots, capacity), -1, dtype=torch.int32)
        self._zero: dict[int, list[ZeroBlocks]] = {}
        self._reprefill = reprefill
        kv = [site.kind in {SiteKind.KEY, SiteKind.VALUE} for site in table.sites]
        widths = [site.row_bytes for site in table.sites]
        self._kv_site = np.array(kv, dtype=np.bool_)
        self._kv_column = torch.from_numpy(np.repeat(self._kv_site, widths))
        self.emitted: npt.NDArray[np.int64] = np.zeros(slots, np.int64)
        """Rows 0..emitted[slot]-1 are in frames."""

    def open(self, slot: int) -> None:
        """Start a new request in a slot."""
        self.emitted[slot] = 0
        self._zero.pop(slot, None)

    def store(self, slot_N: Tensor, position_N: Tensor, captured: Captured, version: int) -> None:
        """Write one forward pass: row i of `captured` is row position_N[i] of slot_N[i] (both int64 [N])."""
        self._rows[slot_N, position_N] = captured.rows
        self._versions[slot_N, position_N] = version
        if len(captured.zero_blocks):
            row = captured.zero_blocks[:, 0]
            found = captured.zero_blocks.copy()
            found[:, 0] = position_N.numpy()[row]
            slots = slot_N.numpy()[row]
            # The stream keeps a slot's rows together, so equal slots are neighbours.
            cuts = np.flatnonzero(np.diff(slots)) + 1
            for slot, part in zip(slots[np.r_[0, cuts]].tolist(), np.split(found, cuts), strict=True):
                self._zero.setdefault(slot, []).append(part)

    def copy(self, source: npt.NDArray[np.int64], target: npt.NDArray[np.int64], rows: int) -> None:
        """Give slots the rows 0..rows-1 of other slots, and what is known about them."""
        source_C, target_C = torch.from_numpy(source), torch.from_numpy(target)
        self._rows[target_C, :rows] = self._rows[source_C, :rows]
        self._versions[target_C, :rows] = self._versions[source_C, :rows]
        self.emitted[target] = self.emitted[source]
        for at, to in zip(source.tolist(), target.tolist(), strict=True) if self._zero else ():
            self._zero[to] = list(self._zero.get(at, ()))

    def versions(self, slot: int, stop: int) -> npt.NDArray[np.int32]:
        """Version of each row 0..stop-1 of a slot, a view."""
        versions: npt.NDArray[np.int32] = self._versions.numpy()[slot, :stop]
        return versions

    def take(self, slot: int, start: int, stop: int) -> tuple[npt.NDArray[np.uint8], ZeroBlocks]:
        """Copy rows start..stop-1; zero blocks count rows from `start`."""
        zero = NO_ZERO_BLOCKS
        if slot in self._zero:
            zero = self._zero_of(slot)
            zero = zero[(zero[:, 0] >= start) & (zero[:, 0] < stop)] - np.array([start, 0, 0])
        return self._rows.numpy()[slot, start:stop].copy(), zero

    def save(self, slot: int, rows: int) -> SavedRows:
        """Copy what a request needs to get its rows back after it was prefilled again."""
        return SavedRows(
            self._rows[slot, :rows].clone(),
            self.versions(slot, rows).copy(),
            self._zero_of(slot),
            int(self.emitted[slot]),
        )

    def restore(self, slot: int, saved: SavedRows, version: int) -> bool:
        """Merge saved rows into those of a new prefill; returns whether the frames written before still hold.

        Rows that `version` computed before: inputs keep the first row, keys and values the last, which is the
        one that later tokens attend. Rows of older versions: kept (AsSampled) or replaced (AsAttended).
        """
        n = len(saved.rows)
        new, new_versions = self._rows[slot, :n], self.versions(slot, n)
        again = saved.versions == version
        kept = ~again if self._reprefill is Reprefill.AS_SAMPLED else np.zeros(n, np.bool_)
        kept_n, again_n = torch.from_numpy(kept), torch.from_numpy(again)
        from_saved = kept_n[:, None] | (again_n[:, None] & ~self._kv_column)
        new.copy_(torch.where(from_saved, saved.rows, new))
        new_versions[kept] = saved.versions[kept]

        zero = self._zero_of(slot)
        beyond = zero[zero[:, 0] >= n]
        old, fresh = saved.zero_blocks, zero[zero[:, 0] < n]
        of_saved = kept[old[:, 0]] | (again[old[:, 0]] & ~self._kv_site[old[:, 1]])
        of_new = ~(kept[fresh[:, 0]] | (again[fresh[:, 0]] & ~self._kv_site[fresh[:, 1]]))
        self._zero[slot] = [_by_row(np.concatenate([old[of_saved], fresh[of_new], beyond]))]

        e = saved.emitted
        same = bool(torch.equal(new[:e], saved.rows[:e])) and bool(
            (new_versions[:e] == saved.versions[:e]).all()
        )
        self.emitted[slot] = e if same else 0
        return same

    def _zero_of(self, slot: int) -> ZeroBlocks:
        parts = self._zero.get(slot)
        return np.concatenate(parts) if parts else NO_ZERO_BLOCKS


def frame_ranges(
    versions: npt.NDArray[np.int32], start: int, chunk: int, *, whole_chunks: bool
) -> list[tuple[int, int]]:
    """Cut rows start..len(versions)-1 into frames of one version and at most `chunk` rows.

    `whole_chunks` leaves out a last range that may still grow.
    """
    stop, new = len(versions), versions[start:]
    changes = np.flatnonzero(new[1:] != new[:-1])
    cuts = [start, *(start + 1 + changes).tolist(), stop]
    ranges = [
        (at, min(at + chunk, last))
        for first, last in itertools.pairwise(cuts)
        for at in range(first, last, chunk)
    ]
    if whole_chunks and ranges and ranges[-1][1] - ranges[-1][0] < chunk:
        ranges.pop()
    return ranges


# -- frames -----------------------------------------------------------------------------------------------


@dataclass
class TrajectoryFrames:
    """What the writer made of one trajectory; the scheduler only appends work and the writer only results."""

    trajectory: str
    entries: list[RecordEntry] = field(default_factory=list)
    pack_seconds: float = 0.0
    put_seconds: float = 0.0


@dataclass(frozen=True)
class FrameRows:
    """Rows start..start+len(rows)-1 of a trajectory under one version; zero blocks count from `start`."""

    frames: TrajectoryFrames
    table: SiteTable
    start: int
    version: int
    rows: npt.NDArray[np.uint8]
    zero_blocks: ZeroBlocks


@dataclass(frozen=True)
class _Forget:
    """Release all frames of a trajectory's table so far (None: of both)."""

    frames: TrajectoryFrames
    table: SiteTable | None


@dataclass(frozen=True)
class _Call:
    """Call when all work before it is done."""

    done: Callable[[], None]


@dataclass(frozen=True)
class Destination:
    """Where frames go, known once a run has pushed weights."""

    transport: Transport
    job_uid: str
    run_id: str
    keep: bool
    """Whether frames that nobody released stay when the run or the server ends."""


class FrameWriter:
    """A thread that encodes frames and puts them, in the order in which they were handed in.

    A frame that cannot be put is dropped and counted: its rows are then missing, never wrong.
    """

    def __init__(self, *, limit_bytes: int) -> None:
        """`limit_bytes`: above this much waiting work, `full` asks the scheduler to admit nothing new."""
        self._limit = limit_bytes
        self._work: queue.SimpleQueue[Sequence[FrameRows] | _Forget | _Call | Destination | None] = (
            queue.SimpleQueue()
        )
        self._destination: Destination | None = None
        # Two counters with one writer each, instead of one that both threads change.
        self._bytes_in = 0
        self._bytes_out = 0
        self._failing: str | None = None
        self.written_bytes: Counter[str] = Counter()
        """Frame bytes by kind: record or audit."""
        self.dropped: Counter[str] = Counter()
        """Frames that were not written, by the transport's reason."""
        self._thread = threading.Thread(target=self._run, name="frame-writer", daemon=True)
        self._thread.start()

    @property
    def full(self) -> bool:
        """Whether more work waits than the limit."""
        return self._bytes_in - self._bytes_out > self._limit

    def held_bytes(self) -> int:
        """Bytes of frames that are written and not yet released."""
        destination = self._destination
        return 0 if destination is None else destination.transport.usage().bytes_held

    def direct(self, destination: Destination) -> None:
        """Send the frames that follow to this place; what is unreleased at the one before is deleted."""
        self._work.put(destination)

    def put(self, work: Sequence[FrameRows]) -> None:
        """Write frames; never blocks. Those of one step come together, since every hand-over costs time."""
        if work:
            self._bytes_in += sum(one.rows.nbytes for one in work)
            self._work.put(work)

    def forget(self, frames: TrajectoryFrames, table: SiteTable | None = None) -> None:
        """Release a trajectory's frames (of one table), after those handed in before were written."""
        self._work.put(_Forget(frames, table))

    def call(self, done: Callable[[], None]) -> None:
        """Call `done` on the writer's thread when everything handed in before was written."""
        self._work.put(_Call(done))

    def close(self) -> None:
        """Write what waits, then stop."""
        self._work.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            match work:
                case _Forget():
                    self._release(work)
                case _Call():
                    work.done()
                case Destination():
                    self._leave()
                    self._destination = work
                case _:
                    for one in work:
                        try:
                            self._write(one)
                        except Exception as error:  # noqa: BLE001  a bug costs these rows, not all that waits
                            self._drop("failed", f"{type(error).__name__}: {error}")
                        self._bytes_out += one.rows.nbytes
        self._leave()

    def _leave(self) -> None:
        if self._destination is None or self._destination.keep:
            return
        try:
            self._destination.transport.close()
        except TransportError as error:
            _log.warning("records are left behind: %s", error)

    def _write(self, work: FrameRows) -> None:
        destination = self._destination
        if destination is None:
            raise RuntimeError("a frame before the first weight update")
        header = FrameHeader(
            job_uid=destination.job_uid,
            run_id=destination.run_id,
            trajectory=work.frames.trajectory,
            part=0,
            parts=1,
            row_start=work.start,
            row_stop=work.start + len(work.rows),
            version=work.version,
            table_digest=work.table.digest,
            audit=work.table.audit,
        )
        started = time.thread_time()
        frame = encode_frame(header, work.table, work.rows, work.zero_blocks)
        packed = time.thread_time()
        work.frames.pack_seconds += packed - started
        try:
            handle = destination.transport.put(frame, header.key)
        except TransportError as error:
            self._drop(error.fault, str(error))
            return
        self._failing = None
        work.frames.put_seconds += time.thread_time() - packed
        self.written_bytes["audit" if work.table.audit else "record"] += len(frame)
        work.frames.entries.append(
            RecordEntry(handle, 0, 1, header.row_start, header.row_stop, audit=work.table.audit)
        )

    def _drop(self, fault: str, message: str) -> None:
        self.dropped[fault] += 1
        if self._failing != fault:  # one line for a fault that lasts, not one a frame
            _log.error("record frames are dropped: %s", message)
        self._failing = fault

    def _release(self, work: _Forget) -> None:
        keep: list[RecordEntry] = []
        for entry in work.frames.entries:
            if work.table is None or entry.audit is work.table.audit:
                self._release_one(entry.handle)
            else:
                keep.append(entry)
        work.frames.entries[:] = keep

    def _release_one(self, handle: Handle) -> None:
        if self._destination is None:
            return
        try:
            self._destination.transport.release(handle)
        except TransportError as error:
            _log.warning("a record frame was not released: %s", error)
