"""A source that reads frames of objects, and deletes objects that nobody needs any more."""

from __future__ import annotations

import bisect
import logging
import threading
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from tracerl.api.frames import Handle
from tracerl.api.job import Retention
from tracerl.transport.base import Borrowed, TransportError, Usage, Wanted
from tracerl.transport.objects.backend import Entry, Tail
from tracerl.transport.objects.filesystem import PART_BYTES, FileSystem, Span
from tracerl.transport.objects.format import TAIL_BYTES, ObjectError, ObjectIndex, decode_index
from tracerl.transport.objects.names import FramePlace, ObjectNames, is_object

_log = logging.getLogger(__name__)

_GAP_BYTES = 128 * 1024
"""Ranges this near are read by one request: the bytes between cost less than another request."""


@dataclass
class _Held:
    """A frame that is listed in an index that was read."""

    length: int
    references: int
    trajectory: str


@dataclass
class _Interval:
    """Bytes of an object that are read as one."""

    path: str
    start: int
    stop: int
    spans: list[int] = field(default_factory=list)
    """Which requests read it, in order."""


class ObjectSource:
    """Reads frames of all stores of one run from below one directory.

    References are counted here, in memory, from the objects' indexes: of the processes that read a run only
    one may call `release` and `forget`. A thread of its own deletes what is no longer needed.
    """

    def __init__(self, filesystem: FileSystem, *, job_uid: str, run_id: str, retention: Retention) -> None:
        """The source owns `filesystem` and closes it; nothing is requested yet. TransportError."""
        self._filesystem = filesystem
        try:
            self._names = ObjectNames(job_uid, run_id)
        except TransportError:
            filesystem.close()
            raise
        self._job_uid, self._run_id = job_uid, run_id
        self._deletes = retention is Retention.TRAINED
        self._objects: dict[str, dict[int, _Held]] = {}
        """Frames by offset, of the objects whose index was read."""
        self._ignored: set[str] = set()
        """What is named as an object and is none of this run."""
        self._released: Counter[tuple[str, int]] = Counter()
        """By object and offset: references dropped that are not yet taken off."""
        self._forgotten: set[str] = set()
        self._counters: Counter[str] = Counter()
        self._lock = threading.Lock()
        self._sweeping = threading.Lock()
        self._wake = threading.Event()
        self._closed = False
        self._thread: threading.Thread | None = None

    def start_run(self) -> None:
        """Remove what earlier runs of this job left: unfinished uploads, and, unless they are kept, objects.

        For the one process that controls the run, before its first step. TransportError.
        """
        job, run = self._names.job_directory, self._names.run_directory
        self._filesystem.clean(job, keep=run)
        if self._deletes:
            entries = self._filesystem.entries(job)
            self._filesystem.delete([path for path, _ in entries if not path.startswith(f"{run}/")])
            self._filesystem.remove_empty_directories(job)

    def end_run(self) -> None:
        """Remove all objects of this run, unless they are kept. TransportError."""
        if self._deletes:
            self._filesystem.delete([path for path, _ in self._filesystem.entries(self._names.run_directory)])
            self._filesystem.remove_empty_directories(self._names.job_directory)

    def borrow(self, wanted: Sequence[Wanted]) -> Borrowed:
        """Read frames or ranges of them, all concurrently, near ones together."""
        places: list[FramePlace | TransportError] = []
        ranges: list[list[tuple[int, int]]] = []
        for handle, spans in wanted:
            try:
                place = self._names.place(handle)
            except TransportError as error:
                places.append(error)
                ranges.append([])
                continue
            inside = [(0, place.length)] if spans is None else list(spans)
            for start, stop in inside:
                if not 0 <= start <= stop <= place.length:
                    raise ValueError(f"{start}..{stop} is not a range of a frame of {place.length} bytes")
            places.append(TransportError("missing", _gone(handle)) if self._is_gone(place) else place)
            ranges.append(inside)
        pieces = self._read(places, ranges)
        if again := self._spoilt(places, pieces):
            read_again = self._read([places[index] for index in again], [ranges[index] for index in again])
            for index, piece in zip(again, read_again, strict=True):
                pieces[index] = piece
        read = sum(len(view) for piece in pieces if isinstance(piece, list) for view in piece)
        with self._lock:
            self._counters.update(borrowed_frames=len(pieces), read_bytes=read)
        return Borrowed(pieces)

    def present(self, handles: Sequence[Handle]) -> list[bool]:
        """Tell which frames could be read now, by one listing. TransportError."""
        sizes = dict(self._filesystem.entries(self._names.run_directory)) if handles else {}
        answers = []
        for handle in handles:
            try:
                place = self._names.place(handle)
            except TransportError:
                answers.append(False)
                continue
            size = sizes.get(place.path, -1)
            answers.append(place.name.offset + place.length <= size and not self._is_gone(place))
        return answers

    def release(self, handles: Iterable[Handle]) -> None:
        """Drop a reference each; releasing what is gone does nothing."""
        if not self._deletes:
            return
        with self._lock:
            for handle in handles:
                try:
                    place = self._names.place(handle)
                except TransportError:  # no frame of any object: gone
                    continue
                self._released[place.path, place.name.offset] += 1
        self._sweep_soon()

    def forget(self, trajectories: Iterable[str]) -> None:
        """Drop all frames put under these trajectories' keys, those that are still to come as well."""
        if not self._deletes:
            return
        with self._lock:
            names = set(trajectories)
            self._forgotten |= names
            # Not only without references: one that was added before is perhaps read later.
            for path, frames in self._objects.items():
                self._objects[path] = {
                    offset: frame for offset, frame in frames.items() if frame.trajectory not in names
                }
        self._sweep_soon()

    def usage(self) -> Usage:
        """Count objects and live frames of this run, after deleting what nobody needs. TransportError."""
        entries = self._sweep()
        with self._lock:
            live = [
                frame
                for frames in self._objects.values()
                for frame in frames.values()
                if frame.references > 0
            ]
            return Usage(
                capacity_bytes=0,
                held_bytes=sum(size for path, size in entries if is_object(path)),
                frames=len(live),
                frame_bytes=sum(frame.length for frame in live),
                counters={**self._counters, "retries": self._filesystem.counters["retries"]},
            )

    def close(self) -> None:
        """Delete what was released, as long as the deadline allows, and end all connections."""
        self._closed = True
        self._wake.set()
        if self._thread is not None:
            self._thread.join()
        self._filesystem.close()

    def _read(
        self, places: Sequence[FramePlace | TransportError], ranges: Sequence[Sequence[tuple[int, int]]]
    ) -> list[list[memoryview] | TransportError]:
        """Bytes of the ranges of each place, near ones by one request."""
        intervals, spans = _plan(
            (place.path, place.name.offset + start, place.name.offset + stop)
            for place, inside in zip(places, ranges, strict=True)
            if not isinstance(place, TransportError)
            for start, stop in inside
        )
        answers = self._filesystem.read(spans)
        found = _Intervals(
            intervals, [_joined([answers[index] for index in interval.spans]) for interval in intervals]
        )
        return [
            place if isinstance(place, TransportError) else found.cut(place, inside)
            for place, inside in zip(places, ranges, strict=True)
        ]

    def _spoilt(
        self,
        places: Sequence[FramePlace | TransportError],
        pieces: Sequence[list[memoryview] | TransportError],
    ) -> list[int]:
        """Which frames were read with one that ends beyond its object, and do not themselves."""
        damaged = {
            index: place
            for index, (place, piece) in enumerate(zip(places, pieces, strict=True))
            if isinstance(place, FramePlace)
            and isinstance(piece, TransportError)
            and piece.fault == "damaged"
        }
        if not damaged:
            return []
        paths = sorted({place.path for place in damaged.values()})
        tails = dict(zip(paths, self._filesystem.read_tails(paths, 1), strict=True))
        sizes = {path: tail.size for path, tail in tails.items() if isinstance(tail, Tail)}
        return [
            index
            for index, place in damaged.items()
            if place.name.offset + place.length <= sizes.get(place.path, -1)
        ]

    # -- deleting -----------------------------------------------------------------------------------------

    def _sweep_soon(self) -> None:
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._sweeper, name="delete-objects", daemon=True)
                self._thread.start()
        self._wake.set()

    def _sweeper(self) -> None:
        failing = False
        while not self._closed or self._wake.is_set():
            self._wake.wait()
            self._wake.clear()
            try:
                self._sweep()
                failing = False
            except TransportError as error:
                # Nothing is forgotten: the next release tries again.
                if not failing:
                    _log.warning("objects that are no longer needed stay for now: %s", error)
                failing = True

    def _sweep(self) -> list[Entry]:
        """Read new indexes, take references off, delete what has none left; returns what stays."""
        with self._sweeping:
            with self._lock:
                taken = Counter(self._released)
            entries = self._filesystem.entries(self._names.run_directory)
            paths = {entry.path for entry in entries if is_object(entry.path)}
            new = self._read_indexes(sorted(paths - self._objects.keys() - self._ignored))
            with self._lock:
                # Not before they are taken off, so that a frame that is gone stays gone.
                self._released -= taken
                released = Counter(taken)
                for path in self._objects.keys() - paths:
                    del self._objects[path]
                self._ignored &= paths
                for path, index in new.items():
                    named = [(frame, index.trajectories[frame.trajectory]) for frame in index.frames]
                    self._objects[path] = {
                        frame.offset: _Held(frame.length, frame.references, trajectory)
                        for frame, trajectory in named
                        if trajectory not in self._forgotten
                    }
                for index in new.values():
                    for number, offset, delta in index.changes:
                        released[self._names.path(index.store, index.writer, number), offset] -= delta
                for (path, offset), count in released.items():
                    frame = self._objects.get(path, {}).get(offset)
                    if frame is not None:
                        frame.references -= count
                dead = (
                    [
                        path
                        for path, frames in self._objects.items()
                        if all(frame.references <= 0 for frame in frames.values())
                    ]
                    if self._deletes
                    else []
                )
            self._filesystem.delete(dead)
            with self._lock:
                for path in dead:
                    del self._objects[path]
                self._counters.update(deleted_objects=len(dead))
            gone = set(dead)
            return [entry for entry in entries if entry.path not in gone]

    def _read_indexes(self, paths: Sequence[str]) -> dict[str, ObjectIndex]:
        """Indexes of objects; without those that were deleted meanwhile. TransportError."""
        indexes = {}
        for path, tail in zip(paths, self._filesystem.read_tails(paths, TAIL_BYTES), strict=True):
            if isinstance(tail, TransportError):
                if tail.fault == "missing":
                    continue
                raise tail
            try:
                index = self._index(path, tail)
            except ObjectError as error:
                _log.warning("%s in %s is no object: %s", path, self._filesystem.where, error)
                self._ignored.add(path)
                continue
            expected = self._names.path(index.store, index.writer, index.number)
            if (index.job_uid, index.run_id, expected) != (self._job_uid, self._run_id, path):
                _log.warning("%s in %s was written under another name", path, self._filesystem.where)
                self._ignored.add(path)
                continue
            indexes[path] = index
        return indexes

    def _index(self, path: str, tail: Tail) -> ObjectIndex:
        def fetch(start: int, stop: int) -> bytes:
            (answer,) = self._filesystem.read([Span(path, start, stop)])
            if isinstance(answer, TransportError):
                raise answer
            return answer

        return decode_index(tail.data, tail.size, fetch)

    def _is_gone(self, place: FramePlace) -> bool:
        """Whether the last reference is known to be dropped."""
        with self._lock:
            frames = self._objects.get(place.path)
            if frames is None:
                return False
            frame = frames.get(place.name.offset)
            return frame is None or frame.references <= self._released[place.path, place.name.offset]


def _gone(handle: Handle) -> str:
    return f"{handle} was released; generate its trajectory again"


def _plan(ranges: Iterable[tuple[str, int, int]]) -> tuple[list[_Interval], list[Span]]:
    """Intervals that cover all ranges (path, start, stop), and the requests that read them."""
    intervals: list[_Interval] = []
    for path, start, stop in sorted(ranges):
        if start == stop:
            continue
        last = intervals[-1] if intervals else None
        if (
            last is not None
            and last.path == path
            and (start < last.stop or (start <= last.stop + _GAP_BYTES and stop - last.start <= PART_BYTES))
        ):
            last.stop = max(last.stop, stop)
        else:
            intervals.append(_Interval(path, start, stop))
    spans: list[Span] = []
    for interval in intervals:
        step = (
            PART_BYTES if interval.stop - interval.start >= 2 * PART_BYTES else interval.stop - interval.start
        )
        for start in range(interval.start, interval.stop, step):
            interval.spans.append(len(spans))
            spans.append(Span(interval.path, start, min(start + step, interval.stop)))
    return intervals, spans


class _Intervals:
    """Intervals that were read, in the order of path and start, and what came of each."""

    def __init__(self, intervals: Sequence[_Interval], data: Sequence[memoryview | TransportError]) -> None:
        self._intervals, self._data = intervals, data
        self._starts = [(interval.path, interval.start) for interval in intervals]

    def cut(self, place: FramePlace, ranges: Sequence[tuple[int, int]]) -> list[memoryview] | TransportError:
        """Bytes of the ranges of a frame."""
        views = []
        for start, stop in ranges:
            if start == stop:
                views.append(memoryview(b""))
                continue
            first = place.name.offset + start
            index = bisect.bisect_right(self._starts, (place.path, first)) - 1
            data = self._data[index]
            if isinstance(data, TransportError):
                return data
            within = first - self._intervals[index].start
            views.append(data[within : within + stop - start])
        return views


def _joined(parts: Sequence[bytes | TransportError]) -> memoryview | TransportError:
    whole: list[bytes] = []
    for part in parts:
        if isinstance(part, TransportError):
            return part
        whole.append(part)
    return memoryview(whole[0] if len(whole) == 1 else b"".join(whole))
