"""Frames of records on their way from an engine to the store: cut, encoded and put by a thread beside it.

An engine hands in rows (`FrameRows`) and asks to be called when they can be read; it never waits.
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

from tracerl.api.frames import FrameKey, Handle
from tracerl.records.frame import FrameHeader, encode_frame, frame_bytes_bound
from tracerl.records.pairing import RecordEntry
from tracerl.records.sites import SiteTable
from tracerl.transport.base import FrameSink, TransportError, Usage
from tracerl.transport.retry import Deadline

_log = logging.getLogger(__name__)

ZeroBlocks = npt.NDArray[np.int64]
"""int64 [m, 3]: (row, site index, block) of blocks whose scale is 0, sorted by row."""
NO_ZERO_BLOCKS: ZeroBlocks = np.zeros((0, 3), np.int64)
_PUTS = 4
"""How often frames are put whose store goes, or drops them, before all their owners have references."""
_CLOSE_SECONDS = 0.5
"""How long a writer that is closed may go on with what it waits for."""


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


@dataclass
class TrajectoryFrames:
    """What the writer made of one trajectory; the scheduler only appends work and the writer only results."""

    trajectory: str
    entries: list[RecordEntry] = field(default_factory=list)
    pack_seconds: float = 0.0
    put_seconds: float = 0.0


@dataclass
class SharedFrame:
    """A frame that other trajectories may name too; what is in it is the writer's thread's alone."""

    entry: RecordEntry | None = None
    """None before it is put, or when it is gone."""


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
    shared: SharedFrame | None = None
    """Of a prefix: where its frame is found, if these rows or more were put before; else where it is kept."""


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
    part: int = 0
    """Which of `parts` tensor-parallel ranks this one is: it writes the slices that the table gives it."""
    parts: int = 1


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
            if self._reuse(sink, whole):
                continue
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
            entry = RecordEntry(
                handle,
                destination.part,
                destination.parts,
                one.start,
                one.start + len(one.rows),
                audit=one.table.audit,
            )
            if one.shared is not None:
                one.shared.entry = entry
            for owner in one.owners:
                owner.entries.append(entry)
                owner.put_seconds += cost * len(frame) / len(one.owners)

    def _reuse(self, sink: FrameSink, rows: FrameRows) -> bool:
        """Give the owners of rows a frame that has them already; False when there is none."""
        found, stop = None if rows.shared is None else rows.shared.entry, rows.start + len(rows.rows)
        if found is None or rows.shared is None or found.stop < stop:
            return False
        entry = replace(found, stop=stop)
        try:
            sink.retain([entry.handle for _ in rows.owners])
        except TransportError:
            # The trajectories that named it are gone.
            rows.shared.entry = None
            return False
        for owner in rows.owners:
            owner.entries.append(entry)
        return True

    def _put(
        self,
        sink: FrameSink,
        rows: Sequence[FrameRows],
        frames: Sequence[tuple[bytes, FrameKey]],
        patience: float,
    ) -> Sequence[Handle | TransportError]:
        """Put frames with a reference for each of their owners, all again when their store was restarted."""
        deadline, puts = Deadline(patience), 0
        while True:
            try:
                handles = sink.put_many(frames, timeout=deadline.remaining())
            except TransportError as error:
                return [error] * len(frames)
            stored = [
                (one, h) for one, h in zip(rows, handles, strict=True) if not isinstance(h, TransportError)
            ]
            more = [handle for one, handle in stored for _ in one.owners[1:]]
            if not more:
                return handles
            puts += 1
            try:
                sink.retain(more)
                return handles
            except TransportError as error:
                # Without their references, frames would go while some of their owners still need them.
                if error.fault != "missing" or puts == _PUTS or deadline.passed():
                    _release(sink, set(more))
                    return [error if len(one.owners) > 1 else h for one, h in zip(rows, handles, strict=True)]
                _release(sink, [handle for _, handle in stored])

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
        replace(whole, rows=whole.rows[:half], zero_blocks=early, shared=None),
        replace(whole, start=whole.start + half, rows=whole.rows[half:], zero_blocks=late, shared=None),
    ):
        yield from _cut(part, destination, limit)


def _encode(rows: FrameRows, destination: Destination) -> tuple[bytes, FrameKey]:
    header = FrameHeader(
        job_uid=destination.job_uid,
        run_id=destination.run_id,
        trajectory=rows.owners[0].trajectory if rows.prefix is None else "",
        part=destination.part,
        parts=destination.parts,
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
    slices = rows.table.select(destination.part, destination.parts)
    return encode_frame(header, rows.table, rows.rows, rows.zero_blocks, slices=slices), key
