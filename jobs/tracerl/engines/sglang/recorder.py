"""Rows of one SGLang scheduler by KV slot, and how they become the frames of requests.

SGLang's unit of reuse is the KV slot: a cached prefix is the slots that another request filled. So rows,
their versions and zero blocks are kept by slot, and a request's rows are those of the slots that it holds.
What a retraction takes away is saved first and merged with what is prefilled again.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from tracerl.api.job import Reprefill
from tracerl.engines.capture import Captured, HeldSite, MergeRule, Rows, by_row, merge_rows
from tracerl.engines.frames import (
    NO_ZERO_BLOCKS,
    FrameRows,
    FrameWriter,
    SharedFrame,
    TrajectoryFrames,
    ZeroBlocks,
    frame_ranges,
)
from tracerl.records.pairing import RecordEntry
from tracerl.records.sites import SiteTable

_log = logging.getLogger(__name__)

Slots = npt.NDArray[np.int64]
NO_VERSION = -1
"""Of a slot whose rows nobody may use."""
_LEAST_PREFIX = 16
"""Fewer rows of a prompt are not worth a frame of their own."""
_PREFIXES = 4_096
"""Prompts whose frames may be shared, the newest."""
_REMEMBERED = 65_536
"""Requests that ended, or were given up, of which something is still known."""


class SlotRows:
    """Rows of one table by KV slot."""

    def __init__(self, table: SiteTable, held: Sequence[HeldSite], slots: int) -> None:
        self.table, self.held = table, held
        width = sum(one.site.row_bytes for one in held)
        # Memory is only used where rows are written: the system hands out zero pages on first touch.
        self._rows = np.zeros((slots, width), np.uint8)
        self.versions = np.full(slots, NO_VERSION, np.int32)
        self._has_zero = np.zeros(slots, np.bool_)
        self._zero: dict[int, ZeroBlocks] = {}

    @property
    def bytes(self) -> int:
        """Memory for all slots."""
        return self._rows.nbytes + self.versions.nbytes + self._has_zero.nbytes

    def store(self, slots: Slots, captured: Captured, version: int) -> None:
        """Write one forward pass: row i of `captured` is that of slots[i]."""
        self._rows[slots] = captured.rows.numpy()
        self.versions[slots] = version
        for slot in slots[self._has_zero[slots]].tolist():
            del self._zero[slot]
        self._has_zero[slots] = False
        zero = captured.zero_blocks
        if len(zero):
            rows, starts = np.unique(zero[:, 0], return_index=True)
            for row, part in zip(rows.tolist(), np.split(zero, starts[1:]), strict=True):
                self._zero[int(slots[row])] = part
            self._has_zero[slots[rows]] = True

    def take(self, slots: Slots) -> Rows:
        """Copy the rows of slots; zero blocks count rows from the first."""
        found = np.flatnonzero(self._has_zero[slots])
        parts = []
        for row in found.tolist():
            part = self._zero[int(slots[row])].copy()
            part[:, 0] = row
            parts.append(part)
        zero = np.concatenate(parts) if parts else NO_ZERO_BLOCKS
        return Rows(self._rows[slots], self.versions[slots], zero)

    def invalidate(self) -> None:
        """Forget all rows: the cache was flushed."""
        self.versions.fill(NO_VERSION)
        self._has_zero.fill(False)
        self._zero.clear()


@dataclass
class _Before:
    """Rows 0..n-1 of a request that do not lie in its slots alone."""

    rows: Rows
    merged: bool
    """Whether they are merged with what was prefilled again; until then slots are not looked at."""


@dataclass
class _Request:
    frames: TrajectoryFrames
    audited: bool
    complete: bool = False
    """Whether all tokens but the last are in its slots: it is not in the middle of a prefill."""
    emitted: list[int] = field(default_factory=lambda: [0, 0])
    """By table: rows 0..emitted-1 are in frames."""
    before: list[_Before | None] = field(default_factory=lambda: [None, None])
    seconds: npt.NDArray[np.float64] = field(default_factory=lambda: np.zeros(2))
    """capture and pack, of rows that lie in slots no more."""


@dataclass(frozen=True)
class _Prefix:
    """Rows of a prompt that are in frames: as long as slots hold the same rows, others may name these."""

    slots: Slots
    fills: Slots
    """Which forward pass filled each slot."""
    frames: list[tuple[int, int, SharedFrame]]
    """Rows start..stop-1 of each."""
    name: str


@dataclass
class Stats:
    """Counters since the start."""

    retracted: Counter[str] = field(default_factory=Counter)
    reprefilled_rows: Counter[str] = field(default_factory=Counter)
    unrecorded_rows: int = 0
    """Rows of forward passes that could not be captured; they are missing, never wrong."""


class Recorder:
    """Everything that is recorded by one scheduler process.

    `store`, `grow`, `retract`, `finish` and `invalidate` are called by the scheduler's thread, `forget` and
    `new_run` by any.
    """

    def __init__(
        self,
        tables: Sequence[SlotRows],
        writer: FrameWriter,
        *,
        reprefill: Reprefill,
        chunk_tokens: int,
        audit_every: int,
        instance: str,
        finished: Callable[[str, list[RecordEntry], dict[str, float]], None],
    ) -> None:
        """`tables`: the record's, then, if trajectories are audited, the audit's.

        `instance` is unique to this recorder, for the names of prefixes.
        `finished` is called, on some thread, when the frames of a request can be read.
        """
        self._tables, self._writer = list(tables), writer
        self._rules = [MergeRule.of(table.held, reprefill) for table in tables]
        self._chunk, self._audit_every = chunk_tokens, audit_every if len(tables) > 1 else 0
        self._finished = finished
        self._requests: dict[str, _Request] = {}
        self._ended: OrderedDict[str, TrajectoryFrames] = OrderedDict()
        self._given_up: OrderedDict[str, bool] = OrderedDict()
        """Whether `_seen` counts the request."""
        self._seen = 0
        """Requests of this run in the order in which a scheduler sees them: that of all its ranks."""
        self._counts_anew = False
        self._instance, self._passes = instance, 0
        self._prefixes: OrderedDict[tuple[int, int], _Prefix] = OrderedDict()
        """By table and first slot."""
        self._fills: Slots = np.zeros(len(tables[0].versions), np.int64)
        self._seconds = np.zeros((len(tables[0].versions), 2))
        """By slot: capture and pack of the row in it, until a request has counted them."""
        self._lock = threading.Lock()
        self.stats = Stats()

    @property
    def bytes(self) -> int:
        """Memory for rows of all slots."""
        return sum(table.bytes for table in self._tables) + self._seconds.nbytes + self._fills.nbytes

    # -- rows ---------------------------------------------------------------------------------------------

    def store(
        self, slots: Slots, captured: Sequence[Captured], version: int, seconds: tuple[float, float]
    ) -> None:
        """Write the rows of one forward pass, by table, and what capturing and packing all of them took."""
        for table, rows in zip(self._tables, captured, strict=True):
            table.store(slots, rows, version)
        self._filled(slots)
        self._seconds[slots] = np.array(seconds) / max(1, len(slots))

    def lose(self, slots: Slots) -> None:
        """Say that a forward pass filled slots with rows that could not be captured."""
        self.leave_out(slots)
        self.stats.unrecorded_rows += len(slots)

    def leave_out(self, slots: Slots) -> None:
        """Say that a forward pass filled slots with rows that nobody wants."""
        for table in self._tables:
            table.versions[slots] = NO_VERSION
        self._filled(slots)

    def invalidate(self) -> None:
        """Forget the rows of all slots, which hold keys and values of other weights; no request holds any."""
        for table in self._tables:
            table.invalidate()
        self._prefixes.clear()
        if self._counts_anew:
            self._seen, self._counts_anew = 0, False

    # -- requests -----------------------------------------------------------------------------------------

    def grow(
        self, id: str, tokens: int, slots_of: Callable[[int], Slots], version: int, *, prompt: int
    ) -> None:
        """Say that a request has `tokens` tokens, all but the last of which are in slots ``slots_of(rows)``.

        `prompt` of them are the prompt, whose rows go at once: requests that share its slots share frames.
        Whole chunks of rows go to the writer, unless it has more than enough: they can wait here.
        """
        with self._lock:
            request = self._request(id)
            if request is None:
                return
            request.complete = True
            rows = tokens - 1
            first = not any(request.emitted) and request.before[0] is None and prompt >= _LEAST_PREFIX
            due = first or any(rows - request.emitted[index] >= self._chunk for index in self._of(request))
            waiting = any(one is not None and not one.merged for one in request.before)
            if not due and not waiting:
                return
            slots = slots_of(rows)
            self._merge(request, slots, version)
            if due and not self._writer.full:
                prefix = self._prefix_frames(request, slots[:prompt], version)
                self._writer.put([*prefix, *self._cut(request, slots, whole_chunks=True)])

    def retract(self, id: str, tokens: int, slots_of: Callable[[int], Slots], cause: str) -> None:
        """Save the rows of a request that loses its slots; it will be prefilled again."""
        with self._lock:
            request = self._requests.get(id)
            self.stats.retracted[cause] += 1
            if request is None or not request.complete:
                return  # there is nothing new: what was saved before stays
            request.complete = False
            slots = slots_of(tokens - 1)
            for index in self._of(request):
                request.before[index] = _Before(self._rows(request, index, slots, 0), merged=False)
            self._count_seconds(request, slots)

    def finish(
        self, id: str, tokens: int, slots_of: Callable[[int], Slots], version: int, *, prompt: int
    ) -> None:
        """Hand in the last rows of a request that still holds its slots, and tell when they can be read."""
        with self._lock:
            request = self._request(id)
            if request is None:
                self._given_up.pop(id, None)
                return
            del self._requests[id]
            slots = slots_of(tokens - 1)
            self._merge(request, slots, version)
            prefix = self._prefix_frames(request, slots[:prompt], version)
            self._writer.put([*prefix, *self._cut(request, slots, whole_chunks=False)])
            self._count_seconds(request, slots)
            frames = request.frames
            self._ended[id] = frames
            while len(self._ended) > _REMEMBERED:
                self._ended.popitem(last=False)
        capture, pack = request.seconds.tolist()

        def tell() -> None:
            seconds = {"capture": capture, "pack": pack + frames.pack_seconds, "put": frames.put_seconds}
            self._finished(id, list(frames.entries), seconds)

        self._writer.settle(tell)

    def forget(self, id: str) -> None:
        """Release the frames of a request whose answer nobody waits for, and of what it still makes."""
        with self._lock:
            request = self._requests.pop(id, None)
            frames = self._ended.pop(id, None) if request is None else request.frames
            if frames is not None:
                self._writer.forget(frames)
            # One that has not ended may go on until its abort arrives.
            self._given_up[id] = frames is not None or self._given_up.get(id, False)
            while len(self._given_up) > _REMEMBERED:
                self._given_up.popitem(last=False)

    def new_run(self) -> None:
        """Forget all requests: another trainer took over."""
        with self._lock:
            self._requests.clear()
            self._ended.clear()
            self._given_up.clear()
            self._prefixes.clear()
            # At the next flush, when no rank has requests that another may have counted or not.
            self._counts_anew = True

    # -- inside -------------------------------------------------------------------------------------------

    def _request(self, id: str) -> _Request | None:
        """Give what is known of a request, from now on; None when it was given up."""
        request = self._requests.get(id)
        if request is not None or self._given_up.get(id):
            return request
        audited = bool(self._audit_every) and self._seen % self._audit_every == 0
        self._seen += 1
        if id in self._given_up:
            # Counted all the same: when it was given up is not the same moment on every rank.
            self._given_up[id] = True
            return None
        request = _Request(TrajectoryFrames(id), audited)
        self._requests[id] = request
        return request

    def _of(self, request: _Request) -> range:
        """Indices of the tables that the request has rows in."""
        return range(len(self._tables) if request.audited else 1)

    def _merge(self, request: _Request, slots: Slots, version: int) -> None:
        """Merge what a retraction saved with what was prefilled again."""
        for index in self._of(request):
            before = request.before[index]
            if before is None or before.merged:
                continue
            saved = before.rows
            again = int(np.count_nonzero(saved.versions == version))
            if index == 0:
                self.stats.reprefilled_rows["memory"] += again
                self.stats.reprefilled_rows["weights"] += len(saved.versions) - again
            new = self._tables[index].take(slots[: len(saved.rows)])
            merged = merge_rows(self._rules[index], saved, new, version)
            request.before[index] = _Before(merged, merged=True)
            e = request.emitted[index]
            if not (
                np.array_equal(merged.rows[:e], saved.rows[:e])
                and np.array_equal(merged.versions[:e], saved.versions[:e])
            ):
                self._writer.forget(request.frames, self._tables[index].table)
                request.emitted[index] = 0

    def _rows(self, request: _Request, index: int, slots: Slots, start: int) -> Rows:
        """Rows `start`.. of a request that counts as long as it holds `slots`; zero blocks from `start`."""
        before = request.before[index]
        n = 0 if before is None else len(before.rows.rows)
        late = self._tables[index].take(slots[max(start, n) :])
        if before is None or start >= n:
            return late
        early = before.rows
        zero = early.zero_blocks[early.zero_blocks[:, 0] >= start] - np.array([start, 0, 0])
        return Rows(
            np.concatenate([early.rows[start:], late.rows]),
            np.concatenate([early.versions[start:], late.versions]),
            by_row(np.concatenate([zero, late.zero_blocks + np.array([n - start, 0, 0])])),
        )

    def _filled(self, slots: Slots) -> None:
        self._passes += 1
        self._fills[slots] = self._passes

    def _prefix_frames(self, request: _Request, slots: Slots, version: int) -> Iterator[FrameRows]:
        """Cut the rows of a prompt into frames, or name those that others made of the same slots."""
        if any(request.emitted) or request.before[0] is not None or len(slots) < _LEAST_PREFIX:
            return
        for index in self._of(request):
            table, key = self._tables[index], (index, int(slots[0]))
            rows = table.take(slots)
            if not table.held or not (rows.versions == version).all():
                continue
            known = self._prefixes.get(key)
            common = 0
            if known is not None:
                n = min(len(slots), len(known.slots))
                same = (known.slots[:n] == slots[:n]) & (known.fills[:n] == self._fills[slots[:n]])
                common = n if same.all() else int(same.argmin())
            if known is None or common < _LEAST_PREFIX:
                ranges = frame_ranges(rows.versions, 0, self._chunk, whole_chunks=False)
                frames = [(first, last, SharedFrame()) for first, last in ranges]
                name = f"{self._instance}/{index}/{self._passes}/{int(slots[0])}"
                known = _Prefix(slots.copy(), self._fills[slots], frames, name)
                common = len(slots)
                self._prefixes[key] = known
                while len(self._prefixes) > _PREFIXES:
                    self._prefixes.popitem(last=False)
            for first, last, shared in known.frames:
                stop = min(last, common)
                if first >= stop:
                    break
                zero = rows.zero_blocks
                inside = zero[(zero[:, 0] >= first) & (zero[:, 0] < stop)] - np.array([first, 0, 0])
                part = rows.rows[first:stop]
                owners = [request.frames]
                yield FrameRows(owners, table.table, first, version, part, inside, known.name, shared)
                request.emitted[index] = stop

    def _cut(self, request: _Request, slots: Slots, *, whole_chunks: bool) -> Iterator[FrameRows]:
        """Cut rows that are in no frame yet into frames; those of no version are left out."""
        for index in self._of(request):
            table, start = self._tables[index], request.emitted[index]
            if not table.held:
                continue
            rows = self._rows(request, index, slots, start)
            zero = rows.zero_blocks
            for first, last in frame_ranges(rows.versions, 0, self._chunk, whole_chunks=whole_chunks):
                request.emitted[index] = start + last
                version = int(rows.versions[first])
                if version == NO_VERSION:
                    continue
                inside = zero[(zero[:, 0] >= first) & (zero[:, 0] < last)] - np.array([first, 0, 0])
                part = rows.rows[first:last]
                yield FrameRows([request.frames], table.table, start + first, version, part, inside)

    def _count_seconds(self, request: _Request, slots: Slots) -> None:
        request.seconds += self._seconds[slots].sum(axis=0)
        self._seconds[slots] = 0
