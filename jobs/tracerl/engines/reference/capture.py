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
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from tracerl.api.frames import FrameKey, Handle
from tracerl.api.job import Quantization, Reprefill, RoundingOrder
from tracerl.api.model import ModelShape
from tracerl.engines.reference.model import PlainHooks
from tracerl.methods import MethodPlan, Treatment
from tracerl.numerics import (
    BlockFormat,
    NonFiniteError,
    Quantized,
    fake_quantize,
    quantize,
    quantize_dequantize,
)
from tracerl.records.frame import FrameHeader, encode_frame, frame_bytes_bound
from tracerl.records.pairing import RecordEntry
from tracerl.records.rows import pack_routes, pack_rows
from tracerl.records.sites import BLOCK_FORMATS, Site, SiteKind, SiteTable
from tracerl.transport.base import FrameSink, TransportError, Usage

_log = logging.getLogger(__name__)

ZeroBlocks = npt.NDArray[np.int64]
"""int64 [m, 3]: (row, site index, block) of blocks whose scale is 0, sorted by row."""
NO_ZERO_BLOCKS: ZeroBlocks = np.zeros((0, 3), np.int64)
_CLOSE_SECONDS = 0.5
"""How long a writer that is closed may go on with what it waits for."""
_NO_ROW_BYTES = torch.empty((0,), dtype=torch.uint8)


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
        self._format, self._order = fmt, order
        groups: dict[Site, list[int]] = {}
        for index, site in enumerate(table.sites):
            # Keys and values of one width pack alike.
            kind = SiteKind.KEY if site.kind is SiteKind.VALUE else site.kind
            groups.setdefault(replace(site, layer=0, kind=kind), []).append(index)
        self._groups = list(groups.items())
        self.values: list[Quantized | Tensor | None] = [None] * len(table.sites)
        """By site: its codes, or the values [rows, dim] that codes are still to be made of; or expert ids."""

    def pack(self, rows: int) -> Captured:
        """Pack what `values` holds for `rows` rows, and forget it."""
        pieces: list[Tensor] = [_NO_ROW_BYTES] * len(self.values)
        zero: list[ZeroBlocks] = []
        for site, members in self._groups:
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
            for index, piece in zip(members, packed.view(len(members), rows, -1).unbind(), strict=True):
                pieces[index] = piece
        self.values = [None] * len(self.values)
        out = torch.cat(pieces, dim=1) if pieces else torch.empty((rows, 0), dtype=torch.uint8)
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

    def key_value(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Quantise keys and values, in one call: what a method does with the ones it does with the others."""
        key, value = self._uses[layer, SiteKind.KEY], self._uses[layer, SiteKind.VALUE]
        if not key.quantized:
            return k, v
        try:
            out_k, out_v = self._quantise((key, value), torch.cat([k, v])).chunk(2)
        except NonFiniteError:  # which of the two?
            return self._round(key, k), self._round(value, v)
        self._keep_audited(key, k)
        self._keep_audited(value, v)
        return out_k, out_v

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
        out = self._quantise((use,), x)
        self._keep_audited(use, x)
        return out

    def _quantise(self, uses: Sequence[_SiteUse], x: Tensor) -> Tensor:
        """Round the values of sites, one below the other in x, and keep the codes if they are recorded."""
        recorded = [use.record for use in uses if use.record is not None]
        if not recorded:
            return fake_quantize(x, self._format, order=self._order, site=uses[0].name)
        started = time.thread_time()
        quantized, out = quantize_dequantize(x, self._format, order=self._order, site=uses[0].name)
        if len(uses) == 1:
            self._record.values[recorded[0]] = quantized
        else:
            codes, scales = quantized.codes.chunk(len(uses)), quantized.scales.chunk(len(uses))
            for index, part, scale in zip(recorded, codes, scales, strict=True):
                self._record.values[index] = replace(quantized, codes=part, scales=scale)
        self.capture_seconds += self._extra * (time.thread_time() - started)
        return out

    def _keep_audited(self, use: _SiteUse, x: Tensor) -> None:
        if self._audit is not None and self._audited is not None and use.audit is not None:
            # Blocks do not look beyond their row, so a few rows alone give the codes that they had among all.
            self._audit.values[use.audit] = x[self._audited]


def _share_of_recording(fmt: BlockFormat, order: RoundingOrder) -> float:
    """Share of quantising to codes and back that rounding alone would not take, on this machine now.

    The rollout rounds with or without records, so only this share is their cost.
    """
    x = torch.linspace(-3, 3, 64 * 1024).view(-1, 16 * fmt.block)

    def seconds(function: Callable[[], object]) -> float:
        started = time.thread_time()
        function()
        return time.thread_time() - started

    # In turns, so that a machine that is busy for a while slows down both.
    pairs = [
        (
            seconds(lambda: fake_quantize(x, fmt, order=order)),
            seconds(lambda: quantize_dequantize(x, fmt, order=order)),
        )
        for _ in range(20)
    ]
    rounding, recording = min(pair[0] for pair in pairs), min(pair[1] for pair in pairs)
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
        # numpy copies rows whole, torch element by element: a factor of 20 for rows of some KiB.
        at = slot_N.numpy(), position_N.numpy()
        if self.table.row_bytes:
            self._rows.numpy()[at] = captured.rows.numpy()
        self._versions.numpy()[at] = version
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
    """Rows start..start+len(rows)-1 under one version; zero blocks count from `start`.

    They are of one trajectory, or of a cached prefix that several trajectories share and that `prefix` names.
    """

    owners: Sequence[TrajectoryFrames]
    table: SiteTable
    start: int
    version: int
    rows: npt.NDArray[np.uint8]
    zero_blocks: ZeroBlocks
    prefix: str | None = None


@dataclass(frozen=True)
class _Put:
    """Frames to write until `deadline`, a value of time.monotonic()."""

    frames: Sequence[FrameRows]
    deadline: float


@dataclass(frozen=True)
class _Forget:
    """Release all frames of a trajectory's table so far (None: of both)."""

    frames: TrajectoryFrames
    table: SiteTable | None


@dataclass(frozen=True)
class _Call:
    """Call when all work before it is done; `settled`: when others can read its frames."""

    done: Callable[[], None]
    settled: bool


@dataclass(frozen=True)
class Destination:
    """Where frames go, known once a run has pushed weights."""

    sink: FrameSink
    job_uid: str
    run_id: str


class FrameWriter:
    """A thread that encodes frames and puts them, in the order in which they were handed in.

    A frame that cannot be put is dropped and counted: its rows are then missing, never wrong.
    """

    def __init__(self, *, limit_bytes: int, deadline_seconds: float) -> None:
        """Start the thread.

        `limit_bytes`: above this much waiting work, `full` asks the scheduler to admit nothing new.
        `deadline_seconds`: how long after it was handed in a frame may wait for room.
        """
        self._limit, self._patience = limit_bytes, deadline_seconds
        self._work: queue.SimpleQueue[_Put | _Forget | _Call | Destination | None] = queue.SimpleQueue()
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

    def usage(self) -> Usage | None:
        """What the sink's store holds and what the sink counted; None without one. TransportError."""
        destination = self._destination
        return None if destination is None else destination.sink.usage()

    def direct(self, destination: Destination) -> None:
        """Send the frames that follow to this place, whose sink is closed when the next one comes."""
        self._work.put(destination)

    def put(self, work: Sequence[FrameRows]) -> None:
        """Write frames; never blocks. Those of one step come together, since every hand-over costs time."""
        if work:
            self._bytes_in += _bytes(work)
            self._work.put(_Put(work, time.monotonic() + self._patience))

    def forget(self, frames: TrajectoryFrames, table: SiteTable | None = None) -> None:
        """Release a trajectory's frames (of one table), after those handed in before were written."""
        self._work.put(_Forget(frames, table))

    def call(self, done: Callable[[], None]) -> None:
        """Call `done` on the writer's thread when everything handed in before was written."""
        self._work.put(_Call(done, settled=False))

    def settle(self, done: Callable[[], None]) -> None:
        """Call `done` on some thread when others can read everything that was handed in before."""
        self._work.put(_Call(done, settled=True))

    def close(self) -> None:
        """Write what waits, as far as there is room at once, and stop."""
        self._patience = 0.0
        self._work.put(None)
        self._thread.join(_CLOSE_SECONDS)
        if self._thread.is_alive() and (destination := self._destination) is not None:
            destination.sink.close()  # ends the wait for room
        self._thread.join()

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            match work:
                case _Put():
                    self._write(work)
                    self._bytes_out += _bytes(work.frames)
                case _Forget():
                    self._forget(work)
                case _Call(settled=True) if self._destination is not None:
                    self._destination.sink.settle(work.done)
                case _Call():
                    work.done()
                case Destination():
                    self._leave()
                    self._destination = work
        self._leave()

    def _leave(self) -> None:
        if self._destination is None:
            return
        try:
            self._destination.sink.close()
        except TransportError as error:
            _log.warning("the way to the record store was not closed: %s", error)

    def _write(self, work: _Put) -> None:
        destination = self._destination
        if destination is None:
            raise RuntimeError("a frame before the first weight update")
        sink = destination.sink
        rows: list[FrameRows] = []
        frames: list[tuple[bytes, FrameKey]] = []
        for whole in work.frames:
            for one in _cut(whole, destination, sink.max_frame_bytes):
                started = time.thread_time()
                try:
                    frames.append(_encode(one, destination))
                except Exception as error:  # noqa: BLE001  a bug costs these rows, not all that waits
                    self._drop("failed", f"{type(error).__name__}: {error}")
                    continue
                rows.append(one)
                packed = (time.thread_time() - started) / len(one.owners)
                for owner in one.owners:
                    owner.pack_seconds += packed
        if not frames:
            return
        patience = max(0.0, min(work.deadline - time.monotonic(), self._patience))
        started = time.thread_time()
        handles = self._put(sink, rows, frames, patience)
        # Every byte has the same share in what putting them together cost.
        cost = (time.thread_time() - started) / sum(len(frame) for frame, _ in frames)
        for one, (frame, _), handle in zip(rows, frames, handles, strict=True):
            if isinstance(handle, TransportError):
                self._drop(handle.fault, str(handle))
                continue
            self._failing = None
            self.written_bytes["audit" if one.table.audit else "record"] += len(frame)
            entry = RecordEntry(handle, 0, 1, one.start, one.start + len(one.rows), audit=one.table.audit)
            for owner in one.owners:
                owner.entries.append(entry)
                owner.put_seconds += cost * len(frame) / len(one.owners)

    def _put(
        self,
        sink: FrameSink,
        rows: Sequence[FrameRows],
        frames: Sequence[tuple[bytes, FrameKey]],
        patience: float,
    ) -> Sequence[Handle | TransportError]:
        """Put frames with a reference for each of their owners."""
        try:
            handles = sink.put_many(frames, timeout=patience)
        except TransportError as error:
            return [error] * len(frames)
        stored = [(one, h) for one, h in zip(rows, handles, strict=True) if not isinstance(h, TransportError)]
        more = [handle for one, handle in stored for _ in one.owners[1:]]
        if more:
            try:
                sink.retain(more)
            except TransportError as error:
                # Without their references, frames would go while some of their owners still need them.
                _release(sink, set(more))
                return [error if len(one.owners) > 1 else h for one, h in zip(rows, handles, strict=True)]
        return handles

    def _drop(self, fault: str, message: str) -> None:
        self.dropped[fault] += 1
        if self._failing != fault:  # one line for a fault that lasts, not one a frame
            _log.error("record frames are dropped: %s", message)
        self._failing = fault

    def _forget(self, work: _Forget) -> None:
        keep: list[RecordEntry] = []
        gone: list[Handle] = []
        for entry in work.frames.entries:
            if work.table is None or entry.audit is work.table.audit:
                gone.append(entry.handle)
            else:
                keep.append(entry)
        work.frames.entries[:] = keep
        if gone and self._destination is not None:
            _release(self._destination.sink, gone)


def _bytes(work: Sequence[FrameRows]) -> int:
    return sum(one.rows.nbytes for one in work)


def _release(sink: FrameSink, handles: Iterable[Handle]) -> None:
    try:
        sink.release(handles)
    except TransportError as error:
        _log.warning("record frames were not released: %s", error)


def _cut(whole: FrameRows, destination: Destination, limit: int) -> Iterator[FrameRows]:
    """Halve rows until their frame has at most `limit` bytes, or one row."""
    subject = whole.owners[0].trajectory if whole.prefix is None else whole.prefix
    names = len((destination.job_uid + destination.run_id + subject).encode())
    n = len(whole.rows)
    if n == 1 or frame_bytes_bound(whole.table, n, len(whole.zero_blocks), names=names) <= limit:
        yield whole
        return
    half, row = n // 2, whole.zero_blocks[:, 0]
    early, late = whole.zero_blocks[row < half], whole.zero_blocks[row >= half] - np.array([half, 0, 0])
    for part in (
        replace(whole, rows=whole.rows[:half], zero_blocks=early),
        replace(whole, start=whole.start + half, rows=whole.rows[half:], zero_blocks=late),
    ):
        yield from _cut(part, destination, limit)


def _encode(rows: FrameRows, destination: Destination) -> tuple[bytes, FrameKey]:
    header = FrameHeader(
        job_uid=destination.job_uid,
        run_id=destination.run_id,
        trajectory=rows.owners[0].trajectory if rows.prefix is None else "",
        part=0,
        parts=1,
        row_start=rows.start,
        row_stop=rows.start + len(rows.rows),
        version=rows.version,
        table_digest=rows.table.digest,
        prefix=rows.prefix,
        audit=rows.table.audit,
    )
    # A store forgets frames by the ids of lost trajectories, which are all that the loop knows of them. Under
    # the id of one of its owners a prefix goes with them; to the others its rows are then missing.
    key = replace(header.key, trajectory=rows.owners[0].trajectory)
    return encode_frame(header, rows.table, rows.rows, rows.zero_blocks), key
