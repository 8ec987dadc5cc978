"""Loading: from the entries that a trajectory carries to its records, in the process that trains on it.

Frames are borrowed from the stores, verified, paired into rows (`tracerl.records.pairing`) and given back at
once; what is kept are rows. No row counts before its loan has ended well: all that was hashed, and all that
was copied after that, was then read while the bytes were certain to stay. A pass waits for the records of its
own micro-batch alone: those of the next one are loaded by a thread while it computes.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from itertools import starmap
from typing import Generic, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from tracerl.api.errors import TraceRLError
from tracerl.api.frames import Handle, HandleError, parse_handle
from tracerl.api.job import Reprefill
from tracerl.api.model import ModelShape
from tracerl.api.resolved import ResolvedJob
from tracerl.engines.base import RecordCounts, Trajectory
from tracerl.records.frame import Frame
from tracerl.records.pairing import RecordEntry, TrajectoryRecords, assemble, count_faults
from tracerl.records.partial import EVERY_KIND, PartialFrame, Selection
from tracerl.records.sites import SiteKind, SiteTable, audit_table, site_table
from tracerl.transport.base import FrameSource, LoanError, TransportError, Wanted
from tracerl.transport.sources import open_source

_log = logging.getLogger(__name__)

CACHE_BYTES = 256 * 2**20
"""Records that a trainer process keeps beside those of the micro-batch that it computes with.

For a GPU they take up to twice that: PyTorch takes page-locked memory in powers of two.
"""
_BATCH_BYTES = 8 * 2**20
"""About how much the thread loads at once: a pass that needs one of them waits for all."""
_FRAME_BYTES = 4_096
"""What a decoded frame takes beside its bytes: some dozens of small objects."""
_LOANS = 3
"""How often frames are borrowed whose loan does not end well, until they are missing."""
LEADER = "trainer-0"
"""Name of the trainer process that runs the loop."""

K = TypeVar("K")
V = TypeVar("V")
Kinds = frozenset[SiteKind]


class RecordLoader:
    """Gives trajectories their records.

    Records are looked up and never used up: several passes of a step may need them. They are kept until their
    trajectory is dropped, as far as they fit in `cache_bytes`; the least recently used go first and are
    fetched again when they are needed. `selections` name the sites that this process needs of `table` and of
    `audit_table`, None all; records are then of a selection's table. Where a selection takes rows, those of a
    trajectory follow from `Trajectory.longest`: records that were loaded under another one are fetched again.
    `page_locked` is for engines that compute on a GPU. Use it from several threads; close it before its
    source.
    """

    def __init__(
        self,
        source: FrameSource,
        table: SiteTable,
        audit_table: SiteTable,
        *,
        job_uid: str,
        run_id: str,
        reprefill: Reprefill,
        selections: tuple[Selection | None, Selection | None] = (None, None),
        cache_bytes: int = CACHE_BYTES,
        page_locked: bool = False,
    ) -> None:
        self._source, self._page_locked = source, page_locked
        self._table, self._audit_table, self._selections = table, audit_table, selections
        self._by_rows = any(selection is not None and selection.rows is not None for selection in selections)
        self._job_uid, self._run_id, self._reprefill = job_uid, run_id, reprefill
        self._limit = cache_bytes

        # All that follows is guarded by `_changed`, which is notified when something was loaded or queued.
        self._changed = threading.Condition()
        self._ahead: _Kept[str, _Loaded] = _Kept()
        """Loaded by the thread and not yet needed by a pass: never pushed out."""
        self._used: _Kept[str, _Loaded] = _Kept()
        """Needed by a pass before."""
        self._prefixes: _Kept[tuple[Handle, Kinds], Frame] = _Kept()
        """Frames that other trajectories may name too, as copies, with the kinds of sites that were read."""
        self._queue: OrderedDict[str, tuple[Trajectory, int]] = OrderedDict()
        """What the thread is to load, and how many bytes may lie ahead then."""
        self._busy: set[str] = set()
        """What is being loaded; a trajectory that is dropped meanwhile is taken out."""
        self._announced: set[str] = set()
        self._next: dict[str, Sequence[Trajectory]] = {}
        """By the first trajectory of each announced micro-batch: the micro-batch after it."""
        self._counts = RecordCounts()
        self._counted: dict[str, NDArray[np.uint8]] = {}
        """`faults` of trajectories that were counted: loaded again, only what is new counts."""
        self._read_before: Mapping[str, int] = {}
        self._closed = False
        self._thread = threading.Thread(target=self._work, name="records", daemon=True)
        self._thread.start()

    # -- what a trainer process asks for ------------------------------------------------------------------

    def announce(self, batches: Sequence[Sequence[Trajectory]]) -> None:
        """Name the micro-batches that passes will use, in their order; those named before are dropped."""
        batches = [batch for batch in batches if batch]
        ids = {trajectory.id for batch in batches for trajectory in batch}
        self.drop(self._announced - ids)
        with self._changed:
            self._announced = ids
            # After the last micro-batch of a pass comes the first one of the next pass.
            following = zip(batches, [*batches[1:], *batches[:1]], strict=True)
            self._next = {batch[0].id: after for batch, after in following}
            if batches:
                self._enqueue(batches[0], self._limit)

    def load(self, trajectories: Sequence[Trajectory]) -> list[Trajectory]:
        """Return the trajectories with their records, and have those of the next micro-batch loaded.

        Waits until all are there. What cannot be read is missing, and counted; TransportError when the source
        as a whole is of no use.
        """
        started = time.perf_counter()
        found: dict[str, _Loaded] = {}
        while len(found) < len(trajectories):
            with self._changed:
                for trajectory in trajectories:
                    if trajectory.id not in found and (loaded := self._take(trajectory)) is not None:
                        found[trajectory.id] = loaded
                absent = [t for t in trajectories if t.id not in found]
                mine = [t for t in absent if t.id not in self._busy]
                if absent and not mine:
                    self._changed.wait()
                self._begin(mine)
            if mine:
                loaded_now = self._load(mine, self._used)
                found |= loaded_now
                with self._changed:
                    for trajectory in mine:
                        self._count(trajectory, loaded_now[trajectory.id])
        with self._changed:
            self._counts.wait_seconds += time.perf_counter() - started
            if trajectories:
                self._enqueue(self._next.get(trajectories[0].id, ()), self._limit)
        return [
            replace(t, records=found[t.id].record.records, audit=found[t.id].audit.records)
            for t in trajectories
        ]

    def upcoming(self, trajectories: Sequence[Trajectory]) -> list[Trajectory]:
        """Return the micro-batch after this one with its records, if all of them are loaded: else nothing.

        Waits for nothing, and counts nothing: a pass that needs them calls `load`.
        """
        with self._changed:
            after = self._next.get(trajectories[0].id, ()) if trajectories else ()
            found = [self._known(t) for t in after]
        loaded = [one for one in found if one is not None]
        if len(loaded) < len(after):
            return []
        return [
            replace(t, records=one.record.records, audit=one.audit.records)
            for t, one in zip(after, loaded, strict=True)
        ]

    def prefetch(self, trajectories: Sequence[Trajectory]) -> None:
        """Load in the background what a later step needs, as long as half of the cache is enough for that."""
        with self._changed:
            self._enqueue(trajectories, self._limit // 2)

    def drop(self, ids: Iterable[str]) -> None:
        """Let go of the records of trajectories: trained on, or given up."""
        with self._changed:
            for id in ids:
                self._forget(id)
                self._queue.pop(id, None)
                self._counted.pop(id, None)
                self._busy.discard(id)
            self._changed.notify_all()

    def take_counts(self) -> RecordCounts:
        """Counts since the last call, of trajectories that a pass needed; TransportError."""
        read = self._source.usage().counters
        with self._changed:
            counts, self._counts = self._counts, RecordCounts()
        counts.read.update({name: count - self._read_before.get(name, 0) for name, count in read.items()})
        self._read_before = read
        return counts

    def close(self) -> None:
        """End the thread."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join()

    # -- the thread ---------------------------------------------------------------------------------------

    def _enqueue(self, trajectories: Sequence[Trajectory], limit: int) -> None:
        absent = [t for t in trajectories if t.id not in self._busy and self._known(t) is None]
        for trajectory in absent:
            self._forget(trajectory.id)
            self._queue[trajectory.id] = (trajectory, limit)
        if limit == self._limit:
            # The next pass needs these, before all that later steps need.
            for trajectory in reversed(absent):
                self._queue.move_to_end(trajectory.id, last=False)
        if absent:
            self._changed.notify_all()

    def _work(self) -> None:
        while True:
            with self._changed:
                while not self._queue and not self._closed:
                    self._changed.wait()
                if self._closed:
                    return
                batch = self._next_batch()
                self._begin(batch)
            try:
                self._load(batch, self._ahead)
            except TransportError:
                # The pass that needs these records meets the same error, and has somebody to tell.
                continue

    def _next_batch(self) -> list[Trajectory]:
        """Take from the queue what is loaded together; for what finds no room, a pass will have to wait."""
        batch: list[Trajectory] = []
        size = 0
        while self._queue and size < _BATCH_BYTES:
            _, (trajectory, limit) = self._queue.popitem(last=False)
            size += sum(_length(entry.handle) or 0 for entry in trajectory.entries)
            if self._ahead.bytes + size > limit:
                break
            batch.append(trajectory)
        return batch

    # -- what is kept -------------------------------------------------------------------------------------

    def _begin(self, trajectories: Iterable[Trajectory]) -> None:
        for trajectory in trajectories:
            self._queue.pop(trajectory.id, None)
            self._busy.add(trajectory.id)

    def _load(self, trajectories: Sequence[Trajectory], into: _Kept[str, _Loaded]) -> dict[str, _Loaded]:
        """Load what `_begin` was called for, and keep what was not dropped since; it is busy no more."""
        loaded: dict[str, _Loaded] = {}
        try:
            loaded = self._read(trajectories)
        finally:
            with self._changed:
                for trajectory in trajectories:
                    id = trajectory.id
                    if id in loaded and id in self._busy:
                        into.put(id, loaded[id], loaded[id].size)
                    self._busy.discard(id)
                self._evict()
                self._changed.notify_all()
        return loaded

    def _known(self, trajectory: Trajectory) -> _Loaded | None:
        """Find what is kept and has the rows that are needed."""
        loaded = self._ahead.items.get(trajectory.id) or self._used.items.get(trajectory.id)
        fits = loaded is not None and (not self._by_rows or loaded.longest == trajectory.longest)
        return loaded if fits else None

    def _forget(self, id: str) -> None:
        self._ahead.pop(id)
        self._used.pop(id)

    def _take(self, trajectory: Trajectory) -> _Loaded | None:
        """Look up what a pass needs."""
        loaded = self._known(trajectory)
        if loaded is not None and trajectory.id in self._ahead.items:
            self._count(trajectory, loaded)
        self._forget(trajectory.id)
        if loaded is not None:
            self._used.put(trajectory.id, loaded, loaded.size)
        return loaded

    def _evict(self) -> None:
        while self._used.items and self._ahead.bytes + self._used.bytes > self._limit:
            self._used.pop_oldest()

    def _count(self, trajectory: Trajectory, loaded: _Loaded) -> None:
        counts, records = self._counts, loaded.record.records
        # Audits are measurements, not part of what training needs: their time is no overhead.
        counts.fetch_seconds += loaded.record.fetch_seconds
        counts.unpack_seconds += loaded.record.unpack_seconds
        faults = np.zeros(0, np.uint8) if records is None else records.faults
        before = self._counted.get(trajectory.id)
        if before is None:
            counts.rows += len(faults)
            counts.bytes += loaded.record.bytes
            counts.audit_bytes += loaded.audit.bytes
            counts.frames += len(trajectory.entries)
            before = np.zeros_like(faults)
        new = np.where(before == 0, faults, 0)
        if new.any():
            counts.missing += count_faults(new)
            counts.missing_rows.setdefault(trajectory.id, []).extend(_runs(new))
        self._counted[trajectory.id] = before | new

    # -- reading ------------------------------------------------------------------------------------------

    def _read(self, trajectories: Sequence[Trajectory]) -> dict[str, _Loaded]:
        records = self._pair(trajectories, self._table, self._selections[0])
        audited = [t for t in trajectories if any(entry.audit for entry in t.entries)]
        audits = self._pair(audited, self._audit_table, self._selections[1])
        return {
            t.id: _Loaded(records.get(t.id, _NOTHING), audits.get(t.id, _NOTHING), t.longest)
            for t in trajectories
        }

    def _pair(
        self, trajectories: Sequence[Trajectory], table: SiteTable, selection: Selection | None
    ) -> dict[str, _Paired]:
        """Pair trajectories with the frames of one table, all of which are borrowed together."""
        if not trajectories or not table.sites:
            return {}
        started = time.thread_time()
        wanted = [_Wants.of(t, table, selection) for t in trajectories]
        named: dict[Handle, _Named] = {}
        for entry, kinds in (pair for one in wanted for pair in one.entries):
            # Of a frame of several trajectories, what any of them needs.
            before = named[entry.handle].kinds if entry.handle in named else frozenset()
            named[entry.handle] = _Named(entry.part, entry.parts, kinds | before)
        with self._changed:
            known = self._prefixes.items if not table.audit else {}
            kept = {h: known[h, one.kinds] for h, one in named.items() if (h, one.kinds) in known}
        lengths = {h: length for h in named if h not in kept and (length := _length(h)) is not None}
        failure: LoanError | None = None
        for _ in range(_LOANS):
            opened = dict(kept)
            try:
                with self._borrowed(lengths, named, selection, opened) as (pieces, travelled):
                    paired = self._assemble(wanted, pieces, opened, travelled=travelled, started=started)
            except LoanError as error:
                # Other bytes may have come in place of those that were verified: nothing of it counts.
                failure = error.with_traceback(None)
                continue
            # Not before the loan has ended well.
            if not table.audit:
                self._keep_prefixes(opened, named)
            return paired
        assert failure is not None
        _log.warning("%d record frames are missing: %s", len(lengths), failure)
        absent: dict[Handle, memoryview | TraceRLError] = dict.fromkeys(lengths, failure)
        return self._assemble(wanted, absent, kept, travelled={}, started=started)

    def _assemble(
        self,
        wanted: Sequence[_Wants],
        pieces: Mapping[Handle, memoryview | TraceRLError],
        opened: dict[Handle, Frame],
        *,
        travelled: dict[Handle, int],
        started: float,
    ) -> dict[str, _Paired]:
        """Pair trajectories with frames: borrowed `pieces` or their errors, and those that are `opened`."""
        fetched = time.thread_time()

        def fetch(handle: Handle) -> memoryview:
            piece = pieces[handle]
            if isinstance(piece, TraceRLError):
                raise piece
            return piece

        paired = {}
        for one in wanted:
            begun = time.thread_time()
            trajectory, entries = one.trajectory, [entry for entry, _ in one.entries]
            records = assemble(
                entries,
                fetch,
                one.table,
                tokens=len(trajectory.tokens),
                prompt_tokens=trajectory.prompt_tokens,
                token_versions=trajectory.token_versions,
                job_uid=self._job_uid,
                run_id=self._run_id,
                trajectory=trajectory.id,
                reprefill=self._reprefill,
                opened=opened,
                needed=one.needed,
                page_locked=self._page_locked,
            )
            paired[trajectory.id] = _Paired(
                records,
                bytes=sum(travelled.pop(entry.handle, 0) for entry in entries),
                fetch_seconds=(fetched - started) / len(wanted),
                unpack_seconds=time.thread_time() - begun,
            )
        return paired

    @contextmanager
    def _borrowed(
        self,
        lengths: Mapping[Handle, int],
        named: Mapping[Handle, _Named],
        selection: Selection | None,
        opened: dict[Handle, Frame],
    ) -> Iterator[tuple[dict[Handle, memoryview | TraceRLError], dict[Handle, int]]]:
        """Borrow frames as long as the block runs: their bytes by handle, and how many of them travelled.

        With a selection, its parts of them are added to `opened` and only errors are found.
        """
        if selection is None:
            with self._source.borrow([Wanted(handle) for handle in lengths]) as borrowed:
                pieces: dict[Handle, memoryview | TraceRLError] = {
                    handle: piece if isinstance(piece, TransportError) else piece[0]
                    for handle, piece in zip(lengths, borrowed.pieces, strict=True)
                }
                travelled = {h: len(p) for h, p in pieces.items() if isinstance(p, memoryview)}
                yield pieces, travelled
                pieces.clear()
            return
        errors: dict[Handle, memoryview | TraceRLError] = {}
        reading = {
            handle: PartialFrame(selection, length, *named[handle]) for handle, length in lengths.items()
        }
        while asked := {h: part.ranges for h, part in reading.items() if part.ranges and h not in errors}:
            with self._source.borrow(list(starmap(Wanted, asked.items()))) as borrowed:
                for handle, piece in zip(asked, borrowed.pieces, strict=True):
                    try:
                        if isinstance(piece, TransportError):
                            raise piece
                        reading[handle].take(piece)
                    except TraceRLError as error:
                        errors[handle] = error.with_traceback(None)
        opened.update({h: part.frame for h, part in reading.items() if part.frame is not None})
        yield errors, {handle: part.bytes for handle, part in reading.items()}

    def _keep_prefixes(self, opened: Mapping[Handle, Frame], named: Mapping[Handle, _Named]) -> None:
        for handle, frame in opened.items():
            if frame.header.prefix is None:
                continue  # of a selection
            with self._changed:
                key = (handle, named[handle].kinds)
                self._prefixes.pop(key)
                self._prefixes.put(key, frame, frame.info.length + _FRAME_BYTES)
                while self._prefixes.bytes > self._limit // 8:
                    self._prefixes.pop_oldest()


class NoRecords:
    """The loader of trajectories that have no records."""

    def announce(self, batches: Sequence[Sequence[Trajectory]]) -> None:
        """There is nothing to load."""

    def load(self, trajectories: Sequence[Trajectory]) -> list[Trajectory]:
        """Return the trajectories as they are."""
        return list(trajectories)

    def upcoming(self, trajectories: Sequence[Trajectory]) -> list[Trajectory]:  # noqa: ARG002
        """Nothing is loaded ahead."""
        return []

    def take_counts(self) -> RecordCounts:
        """Nothing is counted."""
        return RecordCounts()


@contextmanager
def open_loader(
    resolved: ResolvedJob,
    shape: ModelShape,
    run_id: str,
    name: str,
    selections: tuple[Selection | None, Selection | None] = (None, None),
) -> Iterator[tuple[RecordLoader, FrameSource]]:
    """Open the record stores of a job for the trainer process `name`: a loader, and the source that it reads.

    `selections` are those of its engine.

    The first one of a run is trainer-0's, which ends all earlier runs.
    """
    spec = resolved.job.spec
    source = open_source(resolved, run_id, resolved.node(name), starts_run=name == LEADER)
    with closing(source):
        loader = RecordLoader(
            source,
            site_table(shape, spec),
            audit_table(shape, spec),
            job_uid=resolved.job_uid,
            run_id=run_id,
            reprefill=spec.records.reprefill,
            selections=selections,
            page_locked=bool(spec.trainer.gpus_per_node),
        )
        with closing(loader):
            yield loader, source


@dataclass(frozen=True)
class _Paired:
    """Records of one trajectory by one table, and what they took."""

    records: TrajectoryRecords | None = None
    bytes: int = 0
    fetch_seconds: float = 0.0
    unpack_seconds: float = 0.0

    @property
    def size(self) -> int:
        """Bytes of memory, nearly."""
        found = self.records
        if found is None:
            return 0
        tensors = (found.rows, found.present, found.versions, found.zero_blocks, found.tensor_scales)
        return sum(tensor.nbytes for tensor in tensors if tensor is not None)


_NOTHING = _Paired()


class _Loaded(NamedTuple):
    record: _Paired
    audit: _Paired
    longest: int | None
    """`Trajectory.longest` under which it was loaded."""

    @property
    def size(self) -> int:
        """Bytes of memory, nearly."""
        return self.record.size + self.audit.size


class _Named(NamedTuple):
    """What is wanted of a frame: part `part` of `parts`, of which sites of `kinds`."""

    part: int
    parts: int
    kinds: Kinds


class _Wants(NamedTuple):
    """What is wanted of a trajectory, as records of `table`."""

    trajectory: Trajectory
    table: SiteTable
    entries: list[tuple[RecordEntry, Kinds]]
    """Those of frames that hold anything needed, with the kinds of sites that are."""
    needed: NDArray[np.bool_] | None
    """bool [rows, sites]; None: everything."""

    @classmethod
    def of(cls, trajectory: Trajectory, table: SiteTable, selection: Selection | None) -> _Wants:
        """What a selection of `table` needs of the trajectory."""
        entries = [entry for entry in trajectory.entries if entry.audit is table.audit]
        rows = len(trajectory.tokens) - 1
        share = None if selection is None else selection.share(rows, trajectory.longest)
        if selection is None or share is None:
            own = table if selection is None else selection.table
            return cls(trajectory, own, [(entry, EVERY_KIND) for entry in entries], None)
        kinds = [(entry, share.kinds(entry.start, entry.stop)) for entry in entries]
        held = [pair for pair in kinds if selection.holds(pair[0].part, pair[0].parts, pair[1])]
        return cls(trajectory, selection.table, held, share.of(selection.table))


class _Kept(Generic[K, V]):
    """Values by key in the order in which they were put, and their bytes together."""

    def __init__(self) -> None:
        self.items: OrderedDict[K, V] = OrderedDict()
        self._sizes: dict[K, int] = {}
        self.bytes = 0

    def put(self, key: K, value: V, size: int) -> None:
        """Add a value under a key that is not there."""
        self.items[key], self._sizes[key] = value, size
        self.bytes += size

    def pop(self, key: K) -> V | None:
        """Take a value out; None when it is not there."""
        self.bytes -= self._sizes.pop(key, 0)
        return self.items.pop(key, None)

    def pop_oldest(self) -> None:
        """Take out the value that was put first."""
        self.pop(next(iter(self.items)))


def _runs(faults: NDArray[np.uint8]) -> list[tuple[int, int, int]]:
    """Runs of rows start..stop-1 with the same fault, as (start, stop, fault)."""
    edges = np.flatnonzero(np.diff(faults, prepend=np.uint8(0), append=np.uint8(0)))
    runs = itertools.pairwise(edges.tolist())
    return [(start, stop, int(faults[start])) for start, stop in runs if faults[start]]


def _length(handle: Handle) -> int | None:
    try:
        return parse_handle(handle).length
    except HandleError:
        return None
