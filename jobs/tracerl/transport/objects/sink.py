"""A sink that gathers frames into objects and uploads them in the background."""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import xxhash

from tracerl.api.frames import FrameKey, Handle
from tracerl.transport.base import Buffer, TransportError, Usage
from tracerl.transport.objects.filesystem import FileSystem
from tracerl.transport.objects.format import (
    IndexedFrame,
    ObjectBuilder,
    ObjectIndex,
    ReferenceChange,
)
from tracerl.transport.objects.names import MAX_FRAME_BYTES, FrameName, FramePlace, ObjectNames

_log = logging.getLogger(__name__)

UPLOADS = 4
"""Objects that are uploaded at a time."""
_BATCHES_IN_MEMORY = 8


@dataclass
class _Frame:
    length: int
    xxh3: int
    trajectory: str
    references: int = 1


@dataclass
class _Open:
    """The object that frames are put into now."""

    number: int
    builder: ObjectBuilder | None = None
    """None until the first frame comes."""
    capacity: int = 0
    frames: dict[int, _Frame] = field(default_factory=dict)
    """By offset; without those that were released again."""
    seal_at: float | None = None
    """Monotonic time, when someone waits for it."""


@dataclass(frozen=True)
class _Sealed:
    number: int
    data: bytearray
    frames: int
    frame_bytes: int
    changes: dict[tuple[int, int], int]


class ObjectSink:
    """Puts frames of one store of one run into objects.

    A handle is given out at once, while the frame is still in memory. An object is sealed when it has
    `batch_bytes`, or `batch_seconds` after `settle` asked for a frame in it, or by `close`. What cannot be
    uploaded within the filesystem's deadline is lost and counted. At most `memory_bytes` (by default 8
    batches) wait for their upload: `put` waits then.

    References: what was retained or released before an object is sealed is in its index; later changes are
    told by the index of a later object. Who retains a frame holds a reference to it: of a sealed frame this
    end knows only whether its object was lost.
    """

    def __init__(
        self,
        filesystem: FileSystem,
        *,
        store: str,
        job_uid: str,
        run_id: str,
        batch_bytes: int,
        batch_seconds: float,
        memory_bytes: int | None = None,
        uploads: int = UPLOADS,
    ) -> None:
        """Remove what a killed predecessor of the same store left half-done. TransportError.

        The sink owns `filesystem` and closes it.
        """
        self._filesystem = filesystem
        self._job_uid, self._run_id, self._store = job_uid, run_id, store
        self._batch_bytes, self._batch_seconds = batch_bytes, batch_seconds
        self._memory_bytes = _BATCHES_IN_MEMORY * batch_bytes if memory_bytes is None else memory_bytes
        # Numbers begin anew with every process; the writer's name keeps its objects apart from earlier ones.
        self._writer = secrets.token_hex(4)
        try:
            self._names = ObjectNames(job_uid, run_id)
            filesystem.clean(self._names.store_directory(store))
        except TransportError:
            filesystem.close()
            raise
        self._changed = threading.Condition()
        self._open = _Open(0)
        self._changes: Counter[tuple[int, int]] = Counter()
        """By object and offset: references of sealed frames that are not told yet."""
        self._queue: deque[_Sealed] = deque()
        self._unfinished: dict[int, _Sealed] = {}
        self._gone: set[int] = set()
        """Numbers of objects that were lost, or were empty before they were sealed."""
        self._waiting: list[tuple[int, Callable[[], None]]] = []
        """What to call when all objects up to a number are finished."""
        self._held = 0
        self._counters: Counter[str] = Counter()
        self._failing = False
        self._closed = False
        self._threads = [
            threading.Thread(target=self._work, name=f"upload-{index}", daemon=True)
            for index in range(uploads)
        ]
        for thread in self._threads:
            thread.start()

    @property
    def max_frame_bytes(self) -> int:
        """A longer frame cannot be put."""
        return min(self._memory_bytes // 2, MAX_FRAME_BYTES)

    def put(self, frame: Buffer, key: FrameKey, *, timeout: float | None = None) -> Handle:
        """Copy a frame into the open object; waits for memory at most `timeout` seconds."""
        data = memoryview(frame).cast("B")
        if (key.job_uid, key.run_id) != (self._job_uid, self._run_id):
            raise TransportError(
                "foreign",
                f"a frame of run {key.run_id} of job {key.job_uid} does not belong into the records of run "
                f"{self._run_id} of job {self._job_uid}; use the sink of its own run",
            )
        if len(data) > self.max_frame_bytes:
            raise TransportError(
                "full",
                f"a frame of {len(data):,} bytes is longer than the {self.max_frame_bytes:,} that fit into "
                "memory; raise spec.transport.object.batchSize or lower spec.records.chunkTokens",
            )
        frame_hash = xxhash.xxh3_64_intdigest(data)
        with self._changed:
            builder = self._wait_for_room(len(data), timeout)
            offset = builder.add(data)
            self._open.frames[offset] = _Frame(len(data), frame_hash, key.trajectory)
            number = self._open.number
            self._counters.update(put_frames=1, put_bytes=len(data))
            if builder.size >= self._batch_bytes:
                self._seal()
        return self._names.handle(FrameName(self._store, self._writer, number, offset), len(data), frame_hash)

    def put_many(
        self, frames: Sequence[tuple[Buffer, FrameKey]], *, timeout: float | None = None
    ) -> list[Handle | TransportError]:
        """Put frames one after the other; all of them together wait at most `timeout` seconds."""
        stop = None if timeout is None else time.monotonic() + timeout
        answers: list[Handle | TransportError] = []
        for frame, key in frames:
            left = None if stop is None else max(0.0, stop - time.monotonic())
            try:
                answers.append(self.put(frame, key, timeout=left))
            except TransportError as error:
                answers.append(error)
        return answers

    def settle(self, done: Callable[[], None]) -> None:
        """Call `done` when all frames put before are uploaded or lost, and references are told."""
        with self._changed:
            number = self._open.number
            if self._open.frames or self._changes:
                if self._open.seal_at is None:
                    self._open.seal_at = time.monotonic() + self._batch_seconds
                    self._changed.notify_all()
            else:
                number -= 1
            at_once = not self._is_unfinished(number)
            if not at_once:
                self._waiting.append((number, done))
        if at_once:
            done()

    def retain(self, handles: Iterable[Handle]) -> None:
        """Add a reference each. TransportError ``missing`` when one is gone; no reference is added then."""
        places = [(handle, self._names.place(handle)) for handle in handles]
        with self._changed:
            for handle, place in places:
                if not self._is_there(place):
                    raise TransportError(
                        "missing",
                        f"{handle} is not in {self._filesystem.where}: it was released, lost or put by an "
                        "earlier process; generate the trajectory again",
                    )
            for _, place in places:
                if place.name.number == self._open.number:
                    self._open.frames[place.name.offset].references += 1
                else:
                    self._change(place.name.number, place.name.offset, 1)

    def release(self, handles: Iterable[Handle]) -> None:
        """Drop a reference each; releasing what is gone does nothing."""
        places = []
        for handle in handles:
            try:
                places.append(self._names.place(handle))
            except TransportError:  # no frame of any object: gone
                continue
        with self._changed:
            for place in places:
                if not self._is_there(place):
                    continue
                if place.name.number != self._open.number:
                    self._change(place.name.number, place.name.offset, -1)
                    continue
                frame = self._open.frames[place.name.offset]
                frame.references -= 1
                if not frame.references:
                    del self._open.frames[place.name.offset]
            if self._open.builder is not None and not self._open.frames:
                # Under a new number: a handle never names a second frame.
                self._give_back(self._open.capacity)
                self._gone.add(self._open.number)
                self._open = _Open(self._open.number + 1, seal_at=self._open.seal_at)

    def usage(self) -> Usage:
        """What is in memory and not uploaded yet; what is in the object store, a source counts."""
        with self._changed:
            waiting = list(self._unfinished.values())
            lengths = [frame.length for frame in self._open.frames.values()]
            return Usage(
                capacity_bytes=0,
                held_bytes=self._held,
                frames=sum(item.frames for item in waiting) + len(lengths),
                frame_bytes=sum(item.frame_bytes for item in waiting) + sum(lengths),
                congested=self._held + self._batch_bytes > self._memory_bytes,
                counters={**self._filesystem.counters, **self._counters},
            )

    def close(self) -> None:
        """Upload what is left, as long as the deadline allows, and end all connections."""
        with self._changed:
            if self._closed:
                return
            self._closed = True
            self._seal()
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()
        self._filesystem.close()

    # -- with the lock held -------------------------------------------------------------------------------

    def _wait_for_room(self, nbytes: int, timeout: float | None) -> ObjectBuilder:
        stop = None if timeout is None else time.monotonic() + timeout
        while True:
            if self._closed:
                raise TransportError("failed", "the sink is closed; open it again")
            builder = self._open.builder
            if builder is not None and builder.room(nbytes):
                return builder
            if builder is not None:
                self._seal()
            capacity = max(self._batch_bytes, nbytes, 1)
            if self._held + capacity <= self._memory_bytes or not self._held:
                self._held += capacity
                self._open.capacity = capacity
                self._open.builder = ObjectBuilder(capacity)
                return self._open.builder
            left = None if stop is None else stop - time.monotonic()
            if left is not None and left <= 0:
                raise TransportError(
                    "full",
                    f"{self._held:,} bytes of frames wait for their upload to {self._filesystem.where}, "
                    "no more are taken; check the network and the store",
                )
            self._changed.wait(left)

    def _seal(self) -> None:
        """End the open object and queue it, when there is anything in it or to tell."""
        opened, changes = self._open, dict(self._changes)
        if not opened.frames and not changes:
            opened.seal_at = None
            return
        trajectories: dict[str, int] = {}
        frames = [
            IndexedFrame(
                offset,
                frame.length,
                f"{frame.xxh3:016x}",
                trajectories.setdefault(frame.trajectory, len(trajectories)),
                frame.references,
            )
            for offset, frame in opened.frames.items()
        ]
        index = ObjectIndex(
            job_uid=self._job_uid,
            run_id=self._run_id,
            store=self._store,
            writer=self._writer,
            number=opened.number,
            trajectories=list(trajectories),
            frames=frames,
            changes=[ReferenceChange(*place, delta) for place, delta in changes.items()],
        )
        data = (opened.builder or ObjectBuilder(0)).seal(index)
        self._held += len(data) - opened.capacity
        sealed = _Sealed(opened.number, data, len(frames), sum(frame.length for frame in frames), changes)
        self._changes.clear()
        self._unfinished[opened.number] = sealed
        self._queue.append(sealed)
        self._open = _Open(opened.number + 1)
        self._changed.notify_all()

    def _is_there(self, place: FramePlace) -> bool:
        if (place.name.store, place.name.writer) != (self._store, self._writer):
            return False
        if place.name.number == self._open.number:
            return place.name.offset in self._open.frames
        return place.name.number < self._open.number and place.name.number not in self._gone

    def _change(self, number: int, offset: int, delta: int) -> None:
        self._changes[number, offset] += delta
        if not self._changes[number, offset]:
            del self._changes[number, offset]

    def _is_unfinished(self, number: int) -> bool:
        """Whether an object up to `number` is not sealed or not finished."""
        if number == self._open.number and (self._open.frames or self._changes):
            return True
        return any(other <= number for other in self._unfinished)

    def _give_back(self, nbytes: int) -> None:
        self._held -= nbytes
        self._changed.notify_all()

    # -- threads that upload ------------------------------------------------------------------------------

    def _work(self) -> None:
        while (sealed := self._next()) is not None:
            error: str | None = None
            try:
                path = self._names.path(self._store, self._writer, sealed.number)
                self._filesystem.write(path, sealed.data)
            except TransportError as problem:
                error = str(problem)
            # A thread that died of a fault in a filesystem's library would let every settle wait for ever.
            except Exception as problem:  # noqa: BLE001
                _log.exception("an upload failed in a way that nobody foresaw")
                error = f"{type(problem).__name__}: {problem}"
            for done in self._finish(sealed, error):
                done()

    def _next(self) -> _Sealed | None:
        with self._changed:
            while True:
                left = None
                if self._open.seal_at is not None:
                    left = self._open.seal_at - time.monotonic()
                    if left <= 0:
                        self._seal()
                        left = None
                if self._queue:
                    return self._queue.popleft()
                if self._closed:
                    return None
                self._changed.wait(left)

    def _finish(self, sealed: _Sealed, error: str | None) -> list[Callable[[], None]]:
        with self._changed:
            del self._unfinished[sealed.number]
            if error is None:
                self._counters.update(uploads_ok=1, uploaded_bytes=len(sealed.data))
                if self._failing:
                    self._failing = False
                    _log.warning(
                        "objects are uploaded again; %d frames were lost so far",
                        self._counters["lost_frames"],
                    )
            else:
                self._gone.add(sealed.number)
                self._counters.update(
                    uploads_failed=1, lost_frames=sealed.frames, lost_bytes=sealed.frame_bytes
                )
                for (number, offset), delta in sealed.changes.items():
                    if number not in self._gone:
                        self._change(number, offset, delta)
                if not self._failing:
                    self._failing = True
                    _log.error("%d frames of an object are lost: %s", sealed.frames, error)
            self._give_back(len(sealed.data))
            ready = [done for number, done in self._waiting if not self._is_unfinished(number)]
            self._waiting = [item for item in self._waiting if self._is_unfinished(item[0])]
            return ready
