"""The ring's clients: a sink for a rollout and a source for a trainer process, each for one store.

Both connect again when their store was restarted; frames of the earlier process are then missing.

After a fork only the parent may use its sinks and sources. A child that lives on keeps their connections open
should the parent be killed, and with them its lease and pins; exec closes them.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Self

import numpy as np
import xxhash

from tracerl.api.frames import FrameKey, Handle, HandleError, parse_handle
from tracerl.transport.base import Borrowed, Buffer, LoanError, TransportError, Usage, Wanted
from tracerl.transport.retry import Deadline
from tracerl.transport.ring import messages as m
from tracerl.transport.ring.channel import Channel, LostError, Session
from tracerl.transport.ring.control import Control, parts
from tracerl.transport.ring.segments import ALIGNMENT, Commit

_GRACE_SECONDS = 5.0
"""How much later than its store a sink gives up waiting for a lease."""
_CHUNK = 1 << 18
"""Bytes that are copied and then hashed while they are in the second-level cache: a tenth faster in all."""
_COMMIT_BYTES = 32
"""A commit without its name is not longer."""

_Pieces = list[memoryview] | TransportError


class StoreSink:
    """Puts frames of one run into the ring of one store; see `FrameSink`.

    Threads take turns. As long as a reservation is open, nothing else can be put.
    """

    def __init__(
        self, path: Path, *, store: str, job_uid: str, run_id: str, token: str, name: str, timeout: float
    ) -> None:
        """Connect to the store whose directory is `path`, waiting at most `timeout` seconds for it.

        retain waits as long for a store that is being restarted. `name` tells people who puts the
        frames. TransportError.
        """
        self._store, self._job_uid, self._run_id, self._timeout = store, job_uid, run_id, timeout
        # Two connections, because a put may wait long for a lease.
        self._control = Control(
            path, store=store, job_uid=job_uid, run_id=run_id, token=token, name=name, timeout=timeout
        )
        self._producer = Channel(
            path, m.Hello(job_uid, run_id, "producer", token, name), store, self._control.nudge
        )
        self._turn = threading.Lock()
        self._reserving: int | None = None
        """The thread that has a reservation open."""
        self._lease: tuple[Session, m.Leased] | None = None
        self._position = 0
        """Bytes of the leased segment that are used, aligned."""
        self._counters: Counter[str] = Counter(put_frames=0, put_bytes=0)
        try:
            deadline = Deadline(timeout)
            self._max_frame_bytes = self._producer.session(deadline).welcome.segment_bytes
            self._control.connect(deadline)
        except BaseException:
            self.close()
            raise

    @property
    def max_frame_bytes(self) -> int:
        """A longer frame cannot be put: it would not fit into a segment."""
        return self._max_frame_bytes

    def put(self, frame: Buffer, key: FrameKey, *, timeout: float | None = None) -> Handle:
        """Copy a frame into the ring; once more if the store is restarted meanwhile."""
        (result,) = self.put_many([(frame, key)], timeout=timeout)
        if isinstance(result, TransportError):
            raise result
        return result

    def put_many(
        self, frames: Sequence[tuple[Buffer, FrameKey]], *, timeout: float | None = None
    ) -> list[Handle | TransportError]:
        """Copy frames into the ring; those of one segment are committed by one message, some 60 at most."""
        results: list[Handle | TransportError | None] = [None] * len(frames)
        deadline = Deadline(timeout)
        try:
            self._take_turn(deadline)
        except TransportError as error:
            return [error] * len(frames)
        try:
            while None in results:
                try:
                    self._write(frames, results, deadline)
                except LostError as lost:
                    if deadline.passed():
                        results = [result or lost.explain() for result in results]
        finally:
            self._turn.release()
        return [result for result in results if result is not None]

    def reserve(self, nbytes: int, key: FrameKey, *, timeout: float | None = None) -> Reservation:
        """Get room for a frame of so many bytes, to be written in place. Waits like `put`. TransportError."""
        deadline = Deadline(timeout)
        self._take_turn(deadline)
        try:
            self._check(nbytes, key)
            session, seq, start = self._place_for_certain(nbytes, deadline)
        except BaseException:
            self._turn.release()
            raise
        self._reserving = threading.get_ident()
        return Reservation(
            session.memory[start : start + nbytes],
            partial(self._commit_reserved, Commit(seq, nbytes, 0, key.trajectory)),
            self._end_reservation,
        )

    def settle(self, done: Callable[[], None]) -> None:
        """Call `done` at once: what was put can be read."""
        done()

    def retain(self, handles: Iterable[Handle]) -> None:
        """Add a reference each. TransportError ``missing`` when one is gone; no reference is added then."""
        self._control.retain(handles)

    def release(self, handles: Iterable[Handle]) -> None:
        """Drop a reference each, later if the store cannot be reached now; what is gone does nothing."""
        self._control.release(handles)

    def usage(self) -> Usage:
        """Count what the store holds; the counters are this sink's. TransportError."""
        return replace(self._control.usage(), counters=dict(self._counters))

    def close(self) -> None:
        """End the lease and the connections; a put that waits in another thread fails."""
        self._producer.close()
        self._control.close()

    def _take_turn(self, deadline: Deadline) -> None:
        if self._reserving == threading.get_ident():
            raise RuntimeError("commit or abandon the reservation before putting something else")
        if not self._turn.acquire(timeout=min(deadline.remaining(), threading.TIMEOUT_MAX)):
            raise TransportError(
                "full", f"other threads' frames kept {self._store} busy; put fewer, or wait longer"
            )

    def _check(self, nbytes: int, key: FrameKey) -> None:
        if (key.job_uid, key.run_id) != (self._job_uid, self._run_id):
            raise TransportError(
                "foreign",
                f"a frame of run {key.run_id} of job {key.job_uid} was to be put by run {self._run_id} of "
                f"job {self._job_uid}; use a sink of its own run",
            )
        if len(key.trajectory.encode()) > m.MAX_NAME_BYTES:
            raise TransportError(
                "failed", f"a trajectory's name has more than {m.MAX_NAME_BYTES} bytes; use a shorter one"
            )
        if nbytes > self._max_frame_bytes:
            raise TransportError(
                "full",
                f"a frame of {nbytes:,} bytes does not fit into a segment of {self._max_frame_bytes:,} bytes "
                f"of {self._store}'s ring; raise spec.transport.ring.size, of which a segment is a 32nd "
                "part, or lower spec.records.chunkTokens",
            )

    def _write(
        self,
        frames: Sequence[tuple[Buffer, FrameKey]],
        results: list[Handle | TransportError | None],
        deadline: Deadline,
    ) -> None:
        """Put the frames that have no result yet. LostError when the store went meanwhile."""
        batch: list[tuple[int, Commit]] = []
        for index, (frame, key) in enumerate(frames):
            if results[index] is not None:
                continue
            try:
                data = memoryview(frame).cast("B")
                self._check(len(data), key)
                if not self._has_room(len(data)):
                    self._commit(batch, results, deadline)
                    batch = []
                session, seq, start = self._place(len(data), deadline)
            except TransportError as error:
                results[index] = error
                continue
            xxh3 = _copy_and_hash(session.memory[start : start + len(data)], data)
            batch.append((index, Commit(seq, len(data), xxh3, key.trajectory)))
        self._commit(batch, results, deadline)

    def _has_room(self, nbytes: int) -> bool:
        return self._lease is not None and self._position + max(1, nbytes) <= self._max_frame_bytes

    def _place(self, nbytes: int, deadline: Deadline) -> tuple[Session, int, int]:
        """Take room for a frame: its sequence number, and where in the ring it starts. LostError."""
        if not self._has_room(nbytes):
            self._lease = None
            session = self._producer.session(deadline)
            request = m.LeaseRequest(
                deadline.milliseconds(forever=m.FOREVER, most=m.FOREVER - 1),
                min(m.FOREVER, int(1000 * deadline.elapsed())),
            )
            leased = session.ask(request, m.Leased, deadline.later(_GRACE_SECONDS))
            self._lease, self._position = (session, leased), 0
            self._control.catch_up()
            self._max_frame_bytes = session.welcome.segment_bytes
            if nbytes > self._max_frame_bytes:
                raise TransportError(
                    "full",
                    f"{self._store} was restarted with segments of {self._max_frame_bytes:,} bytes, too "
                    "small for a frame; set spec.transport.ring.size as before",
                )
        assert self._lease is not None
        session, leased = self._lease
        seq = leased.first_seq + self._position // ALIGNMENT
        start = leased.segment * self._max_frame_bytes + self._position
        self._position += -(-max(1, nbytes) // ALIGNMENT) * ALIGNMENT
        return session, seq, start

    def _place_for_certain(self, nbytes: int, deadline: Deadline) -> tuple[Session, int, int]:
        """Like `_place`, but try again when the store was restarted. TransportError."""
        while True:
            try:
                return self._place(nbytes, deadline)
            except LostError as lost:
                if deadline.passed():
                    raise lost.explain() from None

    def _commit(
        self,
        batch: Sequence[tuple[int, Commit]],
        results: list[Handle | TransportError | None],
        deadline: Deadline,
    ) -> None:
        """Make frames visible, and their handles results. LostError."""
        for part in parts(batch, m.MAX_MESSAGE // (_COMMIT_BYTES + m.MAX_NAME_BYTES)):
            made: Sequence[Handle | TransportError]
            try:
                made = self._send_commits([commit for _, commit in part], deadline)
            except TransportError as error:
                made = [error] * len(part)
            for (index, _), result in zip(part, made, strict=True):
                results[index] = result

    def _send_commits(self, commits: list[Commit], deadline: Deadline) -> list[Handle]:
        assert self._lease is not None
        session, _ = self._lease
        try:
            session.tell(m.Commits(commits), deadline)
        except LostError:
            self._lease = None
            raise
        self._counters["put_frames"] += len(commits)
        self._counters["put_bytes"] += sum(commit.length for commit in commits)
        instance = session.welcome.instance
        return [m.name_frame(self._store, instance, seq, length, xxh3) for seq, length, xxh3, _ in commits]

    def _commit_reserved(self, commit: Commit, xxh3: int) -> Handle:
        try:
            (handle,) = self._send_commits([commit._replace(xxh3=xxh3)], Deadline(self._timeout))
            return handle
        except LostError as lost:
            raise lost.explain() from None
        finally:
            self._end_reservation()

    def _end_reservation(self) -> None:
        self._reserving = None
        self._turn.release()


class Reservation:
    """Room in the ring for one frame, which `commit` makes visible; a context manager that else abandons it.

    `buffer` is writable, as long as was asked for, and holds anything.
    """

    def __init__(self, room: memoryview, commit: Callable[[int], Handle], end: Callable[[], None]) -> None:
        self._room = room
        self._commit = commit
        self._end = end
        self._open = True
        self.buffer = _lend(room) if room else memoryview(bytearray())
        self._lender = weakref.ref(self.buffer.obj) if room else None

    def commit(self) -> Handle:
        """Put what was written into the buffer, which is invalid from now on.

        TransportError: when arrays over the buffer are still in use, with the reservation still open; when
        the store was restarted meanwhile, with the frame lost.
        """
        if not self._open:
            raise RuntimeError("the reservation was committed or abandoned before")
        with contextlib.suppress(BufferError):  # is found out below
            self.buffer.release()
        if self._lender is not None and self._lender() is not None:
            raise TransportError(
                "failed", "arrays over a reserved buffer are still in use; drop them before committing it"
            )
        self._open = False
        return self._commit(xxhash.xxh3_64_intdigest(self._room))

    def abandon(self) -> None:
        """Give up the room. After `commit` or `abandon` this does nothing."""
        if self._open:
            self._open = False
            self._end()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.abandon()


class StoreSource:
    """Reads the frames of one run from one store; see `FrameSource`.

    Frames in the ring are viewed in place; those that the store has moved to a lower tier are copied.
    """

    def __init__(
        self, path: Path, *, store: str, job_uid: str, run_id: str, token: str, name: str, timeout: float
    ) -> None:
        """Connect to the store whose directory is `path`, waiting at most `timeout` seconds for it.

        All methods wait as long for a store that is being restarted or has to fetch frames, but for release,
        forget and usage. `name` tells people who reads. TransportError.
        """
        self._store, self._timeout = store, timeout
        # Of its own: only what reads frames may end the connection that holds their pins.
        self._channel = Channel(path, m.Hello(job_uid, run_id, "reader", token, name), store)
        self._control = Control(
            path, store=store, job_uid=job_uid, run_id=run_id, token=token, name=name, timeout=timeout
        )
        self._lock = threading.Lock()
        self._borrowed: weakref.WeakSet[Borrowed] = weakref.WeakSet()
        self._counters: Counter[str] = Counter()
        try:
            deadline = Deadline(timeout)
            self._channel.session(deadline)
            self._control.connect(deadline)
        except BaseException:
            self.close()
            raise

    def borrow(self, wanted: Sequence[Wanted]) -> Borrowed:
        """Pin frames until the answer is released. ValueError when a range does not lie in its frame."""
        for handle, ranges in wanted:
            _check_ranges(handle, ranges or ())
        deadline = Deadline(self._timeout)
        while True:
            pins: list[int] = []
            try:
                session = self._channel.session(deadline)
                try:
                    pieces = self._read(session, wanted, pins, deadline)
                    if not session.is_alive():
                        raise LostError(self._store)  # copies may have been made after the pins were gone
                except BaseException:
                    with contextlib.suppress(LostError):  # pins end with their connection
                        _unpin(session, pins, self._timeout)
                    raise
            except LostError:
                continue  # it may come back; the handles are then missing
            except TransportError as error:
                return Borrowed([error] * len(wanted))
            borrowed = Borrowed(pieces, partial(_give_back, session, pins, self._timeout))
            with self._lock:
                self._borrowed.add(borrowed)
            self._control.catch_up()
            return borrowed

    def present(self, handles: Sequence[Handle]) -> list[bool]:
        """Tell which frames could be read now: none of a store that is down. TransportError."""
        return self._control.present(handles)

    def retain(self, handles: Iterable[Handle]) -> None:
        """Add a reference each. TransportError ``missing`` when one is gone; no reference is added then."""
        self._control.retain(handles)

    def release(self, handles: Iterable[Handle]) -> None:
        """Drop a reference each, later if the store cannot be reached now; what is gone does nothing."""
        self._control.release(handles)

    def forget(self, trajectories: Iterable[str]) -> None:
        """Drop all references of the run's frames that were put under these trajectories, like `release`."""
        self._control.forget(trajectories)

    def start_run(self) -> None:
        """Make this source's run the only one: frames of others are dropped, now and when they come later.

        For the process that leads the run, before anything of it is put. TransportError.
        """
        self._control.start_run()

    def usage(self) -> Usage:
        """Count what the store holds; the counters are this source's. TransportError."""
        usage = self._control.usage()
        with self._lock:
            return replace(usage, counters=dict(self._counters))

    def close(self) -> None:
        """End all views and pins. Arrays that were made of views must not be used any more."""
        with self._lock:
            borrowed = list(self._borrowed)
        for each in borrowed:
            with contextlib.suppress(TransportError):  # arrays are in use
                each.release()
        self._channel.close()
        self._control.close()

    def _read(
        self, session: Session, wanted: Sequence[Wanted], pins: list[int], deadline: Deadline
    ) -> list[_Pieces]:
        """Read frames; `pins` gets the sequence numbers of those that are pinned, even if this raises."""
        pieces: list[_Pieces] = [[] for _ in wanted]
        frames: list[_Frame] = []
        for index, (handle, ranges) in enumerate(wanted):
            try:
                seq, length = m.find_frame(handle, self._store, session.welcome.instance)
            except TransportError as error:
                pieces[index] = error
            else:
                frames.append(
                    _Frame(index, handle, seq, length, ((0, length),) if ranges is None else ranges)
                )
        distant: list[_Frame] = []
        for part in parts(frames, m.MAX_PINS):
            seqs = [frame.seq for frame in part]
            late = partial(_unpin_late, session, seqs, self._timeout)
            with session.asking(m.Pin(seqs), m.Pinned, deadline, late) as (answer, files):
                pinned = list(zip(part, answer.answers, strict=True))
                pins += [frame.seq for frame, pin in pinned if pin.state < m.PinState.MISSING]
                for frame, pin in pinned:
                    if pin.state >= m.PinState.MISSING:
                        pieces[frame.number] = m.not_pinned(frame.handle, pin.state)
                    elif pin.length != frame.length:
                        pieces[frame.number] = m.wrong_length(frame.handle, pin.length)
                    elif pin.state == m.PinState.RING:
                        start = pin.place * session.welcome.segment_bytes + pin.offset
                        pieces[frame.number] = self._count(
                            "ring", [_lend(session.memory[start + a : start + b]) for a, b in frame.ranges]
                        )
                    elif pin.state == m.PinState.FILE:
                        pieces[frame.number] = self._count(
                            "spill",
                            [_pread(files, pin.place, pin.offset + a, b - a) for a, b in frame.ranges],
                        )
                    else:
                        distant.append(frame)
        fetched = _fetch(session, distant, deadline)
        for frame in distant:
            pieces[frame.number] = self._count("object", list(itertools.islice(fetched, len(frame.ranges))))
        return pieces

    def _count(self, path: str, views: Sequence[memoryview | TransportError]) -> _Pieces:
        """Count what was read, or give the first error in it."""
        good: list[memoryview] = []
        for view in views:
            if isinstance(view, TransportError):
                return view
            good.append(view)
        with self._lock:
            self._counters["read_frames"] += 1
            self._counters[f"read_bytes_{path}"] += sum(len(view) for view in good)
        return good


class _Frame(NamedTuple):
    """A frame that is being read: its place in the answer, and what is wanted of it."""

    number: int
    handle: Handle
    seq: int
    length: int
    ranges: Sequence[tuple[int, int]]


def _fetch(
    session: Session, frames: Sequence[_Frame], deadline: Deadline
) -> Iterator[memoryview | TransportError]:
    """Have the store read ranges of frames that only it can reach; one answer a range."""
    wanted = [m.Piece(frame.seq, start, stop) for frame in frames for start, stop in frame.ranges]
    done = 0
    while done < len(wanted):
        ends = itertools.accumulate(piece.stop - piece.start for piece in wanted[done : done + m.MAX_FETCHES])
        count = sum(1 for _ in itertools.takewhile(lambda end: end <= session.welcome.segment_bytes, ends))
        part = wanted[done : done + count]
        done += count
        with session.asking(m.Fetch(part), m.Fetched, deadline) as (answer, files):
            offset = 0
            for piece, fault in zip(part, answer.faults, strict=True):
                if fault:
                    yield TransportError(fault, answer.message)
                else:
                    yield _pread(files, 0, offset, piece.stop - piece.start)
                    offset += piece.stop - piece.start


def _pread(files: Sequence[int], place: int, offset: int, nbytes: int) -> memoryview | TransportError:
    if place >= len(files):
        return TransportError("failed", "this process may not open more files; raise its limit (ulimit -n)")
    try:
        data = os.pread(files[place], nbytes, offset)
    except OSError as error:
        return TransportError(
            "failed",
            f"spilled frames cannot be read ({error.strerror}); check the disk of spec.transport.spillPath",
        )
    if len(data) != nbytes:
        return TransportError(
            "damaged",
            "a file of spilled frames was cut short; let nothing else write to spec.transport.spillPath",
        )
    return memoryview(data)


def _lend(memory: memoryview) -> memoryview:
    """Make a view whose lender lives as long as anything that was made of it, see `Borrowed`."""
    return np.frombuffer(memory, np.uint8).data if memory else memoryview(b"")


def _copy_and_hash(target: memoryview, source: memoryview) -> int:
    """Copy bytes and return the XXH3-64 of what was written. NumPy copies without Python's global lock."""
    size = len(source)
    if size <= _CHUNK:
        if size:
            np.frombuffer(target, np.uint8)[:] = np.frombuffer(source, np.uint8)
        return xxhash.xxh3_64_intdigest(target)
    target_array, source_array = np.frombuffer(target, np.uint8), np.frombuffer(source, np.uint8)
    hasher = xxhash.xxh3_64()
    for start in range(0, size, _CHUNK):
        target_array[start : start + _CHUNK] = source_array[start : start + _CHUNK]
        hasher.update(target[start : start + _CHUNK])
    return hasher.intdigest()


def _check_ranges(handle: Handle, ranges: Sequence[tuple[int, int]]) -> None:
    if not ranges:
        return
    try:
        length = parse_handle(handle).length
    except HandleError:
        return  # the answer will say so
    for start, stop in ranges:
        if not 0 <= start <= stop <= length:
            raise ValueError(f"{start}..{stop} is not a range of a frame of {length} bytes")


def _unpin(session: Session, seqs: Sequence[int], timeout: float) -> None:
    """LostError; TransportError, with all pins of the session gone, when the store does not take it."""
    try:
        for part in parts(seqs, m.MAX_SEQS):
            session.tell(m.Unpin(part), Deadline(timeout))
    except TransportError:
        session.lose()
        raise


def _unpin_late(session: Session, seqs: Sequence[int], timeout: float, answer: m.Message) -> None:
    """Undo a pin whose answer came when nobody waited for it any more."""
    if isinstance(answer, m.Pinned):
        pinned = [
            seq for seq, pin in zip(seqs, answer.answers, strict=True) if pin.state < m.PinState.MISSING
        ]
        _unpin(session, pinned, timeout)


def _give_back(session: Session, seqs: Sequence[int], timeout: float) -> None:
    """End a loan of whose bytes nothing will be read any more. LoanError when they were not pinned until now.

    Whether they were is looked at here, after the last read: see `Session.is_alive`.
    """
    if not seqs:
        return
    if session.is_alive():
        # The bytes were right, whatever comes now; pins that are not given back end with the connection.
        with contextlib.suppress(LostError, TransportError):
            _unpin(session, seqs, timeout)
        return
    raise LoanError(
        f"the connection to {session.welcome.store} was lost while its frames were borrowed: what was read "
        "of them since may be wrong; read them again"
    )
