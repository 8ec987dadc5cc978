"""Which bytes of a ring hold which frames: pure bookkeeping, without files, sockets or clocks.

A ring is a number of equal segments. A segment is free, leased to one producer that appends frames to it, or
closed. It is free again when no frame is left in it: all were released, or moved to a lower tier. So a frame
that lives long holds one segment and no other.

Frames have sequence numbers that no other frame of the store ever has: a lease takes a range of them, and the
frame at byte ``offset`` of the segment has number ``first_seq + offset // ALIGNMENT``.

A frame has references and pins. It can be pinned as long as it has references; its bytes stay until both are
gone. Readers and producers are numbers that the caller chooses.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Literal, NamedTuple, get_args

ALIGNMENT = 64
"""Frames start at multiples of this many bytes."""

TierName = Literal["ring", "spill", "object"]
SegmentState = Literal["free", "leased", "closed"]


class ProtocolError(Exception):
    """A client did what a correct one never does; its connection is of no more use."""


class MissingFrame(LookupError):  # noqa: N818  an answer, not a fault
    """The frame was released or never committed."""


class ForeignFrame(LookupError):  # noqa: N818
    """The frame, or who asks for it, belongs to another run."""


class Location(NamedTuple):
    """Where a frame's bytes are."""

    tier: TierName
    place: int | str
    """Index of the segment, or whatever names a file or object of a lower tier."""
    offset: int
    length: int


class Lease(NamedTuple):
    """A whole segment for one producer to append to."""

    segment: int
    first_seq: int


class Commit(NamedTuple):
    """A frame that its producer has written; its offset follows from `seq`."""

    seq: int
    length: int
    xxh3: int
    trajectory: str


class LiveFrame(NamedTuple):
    """A frame in a segment that is to be moved; `offset` counts from the segment's start."""

    seq: int
    offset: int
    length: int
    xxh3: int
    trajectory: str


class HeldFrame(NamedTuple):
    """A frame with references, in whichever tier."""

    seq: int
    tier: TierName
    length: int
    xxh3: int
    run_id: str
    trajectory: str


@dataclass(frozen=True, slots=True)
class Counts:
    """What a ring and the tiers below it hold now."""

    segments: Mapping[SegmentState, int]
    live_bytes: int
    """Bytes of frames in the ring."""
    frames: Mapping[TierName, int]
    frame_bytes: Mapping[TierName, int]
    pins: int


@dataclass(slots=True)
class _Frame:
    location: Location
    xxh3: int
    run_id: str
    trajectory: str
    references: int = 1
    pins: int = 0


@dataclass(slots=True)
class _Segment:
    first_seq: int = 0
    producer: int | None = None
    end: int = 0
    """First byte behind the last committed frame, aligned."""
    frames: set[int] = field(default_factory=set)
    pinned: int = 0
    """Frames in it that have pins."""


class Segments:
    """The books of one store."""

    def __init__(self, segment_bytes: int, segments: int) -> None:
        if segment_bytes < ALIGNMENT or segment_bytes % ALIGNMENT or segments < 1:
            raise ValueError("a ring has at least one segment, of a multiple of 64 bytes")
        self.segment_bytes = segment_bytes
        self._segments = [_Segment() for _ in range(segments)]
        # Last in, first out: what was read a moment ago may still be in a cache.
        self._free = list(reversed(range(segments)))
        self._leases: dict[int, int] = {}
        self._next_seq = 0
        self._frames: dict[int, _Frame] = {}
        self._trajectories: dict[tuple[str, str], set[int]] = {}
        self._pins: dict[int, Counter[int]] = {}
        self._run_id: str | None = None
        self._dropped: list[Location] = []
        self._tier_frames: Counter[TierName] = Counter(dict.fromkeys(get_args(TierName), 0))
        self._tier_bytes: Counter[TierName] = Counter(dict.fromkeys(get_args(TierName), 0))

    @property
    def free(self) -> int:
        """Segments that can be leased."""
        return len(self._free)

    @property
    def next_seq(self) -> int:
        """First sequence number of the next lease: all frames until then have lower ones."""
        return self._next_seq

    def __contains__(self, seq: int) -> bool:
        """Whether the frame has references."""
        frame = self._frames.get(seq)
        return frame is not None and frame.references > 0

    # -- producers ---------------------------------------------------------------------------------------

    def lease(self, producer: int) -> Lease | None:
        """End the producer's lease and give it a free segment, None when there is none."""
        self.end_lease(producer)
        if not self._free:
            return None
        index = self._free.pop()
        segment = self._segments[index]
        segment.first_seq, segment.producer, segment.end = self._next_seq, producer, 0
        self._leases[producer] = index
        self._next_seq += self.segment_bytes // ALIGNMENT
        return Lease(index, segment.first_seq)

    def commit(self, producer: int, run_id: str, commit: Commit) -> None:
        """Take a frame into the books with one reference; a frame of another run is dropped at once.

        ProtocolError when it does not lie in the producer's lease, behind the frames before it.
        """
        index = self._leases.get(producer)
        if index is None:
            raise ProtocolError("a commit without a lease")
        segment = self._segments[index]
        offset = (commit.seq - segment.first_seq) * ALIGNMENT
        if commit.length < 0 or not segment.end <= offset <= self.segment_bytes - max(1, commit.length):
            raise ProtocolError("a commit outside of the lease, or over an earlier frame")
        # An empty frame takes a number too, so that the next one has another.
        segment.end = _aligned(offset + max(1, commit.length))
        frame = _Frame(Location("ring", index, offset, commit.length), commit.xxh3, run_id, commit.trajectory)
        self._frames[commit.seq] = frame
        segment.frames.add(commit.seq)
        self._trajectories.setdefault((run_id, commit.trajectory), set()).add(commit.seq)
        self._count(frame.location, 1)
        if not self._is_current(run_id):
            self._drop(commit.seq, frame)

    def end_lease(self, producer: int) -> None:
        """Close the producer's segment, if it has one; its frames stay."""
        index = self._leases.pop(producer, None)
        if index is not None:
            self._segments[index].producer = None
            self._free_if_empty(index)

    # -- readers -----------------------------------------------------------------------------------------

    def pin(self, reader: int, seq: int, run_id: str) -> Location:
        """Keep a frame where it is until the reader unpins it; pins of one frame add up.

        MissingFrame; ForeignFrame when `run_id` is not the frame's.
        """
        frame = self._frames.get(seq)
        if frame is None or frame.references == 0:
            raise MissingFrame if self._is_current(run_id) else ForeignFrame
        if frame.run_id != run_id:
            raise ForeignFrame
        if frame.pins == 0 and frame.location.tier == "ring":
            self._segment_of(frame).pinned += 1
        frame.pins += 1
        self._pins.setdefault(reader, Counter())[seq] += 1
        return frame.location

    def unpin(self, reader: int, seqs: Iterable[int]) -> None:
        """Take back one pin each; ProtocolError, with nothing or some taken back, when there is none."""
        pins = self._pins.get(reader, Counter())
        for seq in seqs:
            if pins[seq] < 1:
                raise ProtocolError("an unpin without a pin")
            pins[seq] -= 1
            if not pins[seq]:
                del pins[seq]
            self._unpin(seq, 1)

    def drop_reader(self, reader: int) -> None:
        """Take back all pins of a reader."""
        for seq, count in self._pins.pop(reader, Counter()).items():
            self._unpin(seq, count)

    def location(self, reader: int, seq: int) -> Location:
        """Tell where a frame is that the reader has pinned; ProtocolError when it has not."""
        if not self._pins.get(reader, Counter())[seq]:
            raise ProtocolError("a read without a pin")
        return self._frames[seq].location

    # -- references --------------------------------------------------------------------------------------

    def retain(self, seqs: Sequence[int]) -> None:
        """Add a reference each; MissingFrame, with none added, when one is gone."""
        if not all(seq in self for seq in seqs):
            raise MissingFrame
        for seq in seqs:
            self._frames[seq].references += 1

    def release(self, seqs: Iterable[int]) -> int:
        """Drop a reference each and return how many frames lost their last one; what is gone is skipped."""
        dropped = 0
        for seq in seqs:
            frame = self._frames.get(seq)
            if frame is None or frame.references == 0:
                continue
            if frame.references > 1:
                frame.references -= 1
            else:
                self._drop(seq, frame)
                dropped += 1
        return dropped

    def forget(self, run_id: str, trajectories: Iterable[str]) -> int:
        """Drop all references of the frames under these trajectories and return how many frames had one."""
        seqs: set[int] = set()
        for trajectory in trajectories:
            seqs |= self._trajectories.get((run_id, trajectory), set())
        return self._drop_all(seqs)

    def start_run(self, run_id: str) -> int:
        """Drop the frames of all other runs, now and when they are committed later; return how many."""
        self._run_id = run_id
        return self._drop_all(seq for seq, frame in self._frames.items() if frame.run_id != run_id)

    # -- lower tiers -------------------------------------------------------------------------------------

    def coldest(self) -> int | None:
        """Name the closed segment without pins that was leased first."""
        closed = (
            index
            for index, segment in enumerate(self._segments)
            if segment.frames and segment.producer is None and not segment.pinned
        )
        return min(closed, key=lambda index: self._segments[index].first_seq, default=None)

    def live(self, segment: int) -> list[LiveFrame]:
        """List the frames in a segment that have references, in the order they lie."""
        frames = ((seq, self._frames[seq]) for seq in sorted(self._segments[segment].frames))
        return [
            LiveFrame(seq, frame.location.offset, frame.location.length, frame.xxh3, frame.trajectory)
            for seq, frame in frames
            if frame.references
        ]

    def relocate(self, segment: int, moved: Mapping[int, Location]) -> list[Location]:
        """Enter the copies that a lower tier made of frames of a segment, and free it if none is left.

        Returns the copies of frames that were released, or pinned in the ring, meanwhile: they are of no use.
        """
        unused = []
        for seq, location in moved.items():
            frame = self._frames.get(seq)
            if frame is None or frame.pins or frame.location[:2] != ("ring", segment):
                unused.append(location)
                continue
            self._count(frame.location, -1)
            frame.location = location
            self._count(location, 1)
            self._segments[segment].frames.discard(seq)
        self._free_if_empty(segment)
        return unused

    def take_dropped(self) -> list[Location]:
        """Hand over, once, the places in lower tiers whose frames are gone."""
        dropped, self._dropped = self._dropped, []
        return dropped

    # -- what is held ------------------------------------------------------------------------------------

    def held(self, first: int, stop: int, most: int) -> list[HeldFrame]:
        """List frames of all runs from number `first` until before `stop`: the `most` lowest, in order."""
        # They almost are in order: a hundred thousand take some milliseconds.
        seqs = sorted(self._frames)
        held = (seq for seq in islice(seqs, bisect_left(seqs, first), bisect_left(seqs, stop)) if seq in self)
        found = ((seq, self._frames[seq]) for seq in islice(held, most))
        return [
            HeldFrame(
                seq, frame.location.tier, frame.location.length, frame.xxh3, frame.run_id, frame.trajectory
            )
            for seq, frame in found
        ]

    def counts(self) -> Counts:
        """Count segments, frames and pins; frames that only pins keep are counted too."""
        return Counts(
            segments={
                "free": len(self._free),
                "leased": len(self._leases),
                "closed": len(self._segments) - len(self._free) - len(self._leases),
            },
            live_bytes=self._tier_bytes["ring"],
            frames=dict(self._tier_frames),
            frame_bytes=dict(self._tier_bytes),
            pins=sum(pins.total() for pins in self._pins.values()),
        )

    def _is_current(self, run_id: str) -> bool:
        return self._run_id is None or run_id == self._run_id

    def _count(self, location: Location, frames: int) -> None:
        self._tier_frames[location.tier] += frames
        self._tier_bytes[location.tier] += frames * location.length

    def _segment_of(self, frame: _Frame) -> _Segment:
        assert isinstance(frame.location.place, int)
        return self._segments[frame.location.place]

    def _unpin(self, seq: int, count: int) -> None:
        frame = self._frames[seq]
        frame.pins -= count
        if frame.pins:
            return
        if frame.location.tier == "ring":
            self._segment_of(frame).pinned -= 1
        if frame.references == 0:
            self._remove(seq, frame)

    def _drop_all(self, seqs: Iterable[int]) -> int:
        found = [(seq, self._frames[seq]) for seq in seqs if seq in self]
        for seq, frame in found:
            self._drop(seq, frame)
        return len(found)

    def _drop(self, seq: int, frame: _Frame) -> None:
        frame.references = 0
        if frame.pins == 0:
            self._remove(seq, frame)

    def _remove(self, seq: int, frame: _Frame) -> None:
        del self._frames[seq]
        key = (frame.run_id, frame.trajectory)
        self._trajectories[key].discard(seq)
        if not self._trajectories[key]:
            del self._trajectories[key]
        self._count(frame.location, -1)
        if frame.location.tier == "ring":
            self._segment_of(frame).frames.discard(seq)
            assert isinstance(frame.location.place, int)
            self._free_if_empty(frame.location.place)
        else:
            self._dropped.append(frame.location)

    def _free_if_empty(self, index: int) -> None:
        segment = self._segments[index]
        if segment.producer is None and not segment.frames and index not in self._free:
            self._free.append(index)


def _aligned(offset: int) -> int:
    return (offset + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT
