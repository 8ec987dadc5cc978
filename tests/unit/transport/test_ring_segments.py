"""The books of a ring against a model that keeps every frame's bytes in a dictionary."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tracerl.api.ring import segment_size
from tracerl.transport.ring.segments import (
    ALIGNMENT,
    Commit,
    ForeignFrame,
    Lease,
    Location,
    MissingFrame,
    ProtocolError,
    Segments,
)

SEGMENT, SEGMENTS = 4 * ALIGNMENT, 5
CLIENTS = st.integers(0, 2)
RUNS = st.sampled_from(["run-1", "run-2"])
TRAJECTORIES = st.sampled_from(["a", "b", "c"])


class Books(RuleBasedStateMachine):
    """What is held follows from what was done to each frame alone; memory is a dictionary of bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.books = Segments(SEGMENT, SEGMENTS)
        self.memory: dict[int, int] = {}  # byte of the ring -> sequence number of the frame that wrote it
        self.lower: dict[str, int] = {}  # place in the lower tier -> sequence number
        self.leases: dict[int, tuple[Lease, int]] = {}
        self.frames: dict[int, dict[str, Any]] = {}  # every one that has references or pins
        self.gone: set[int] = set()
        self.run: str | None = None
        self.places = 0

    # -- the model

    def check_bytes(self, seq: int, location: Location) -> None:
        frame = self.frames[seq]
        assert location.length == frame["length"]
        if location.tier == "ring":
            start = location.place * SEGMENT + location.offset
            assert [self.memory[start + at] for at in range(location.length)] == [seq] * location.length
        else:
            assert self.lower[location.place] == seq

    def settle(self) -> None:
        for seq, frame in list(self.frames.items()):
            if not frame["references"] and not frame["pins"].total():
                self.gone.add(seq)
                del self.frames[seq]
        for location in self.books.take_dropped():
            assert self.lower.pop(location.place) in self.gone

    def some_frame(self) -> st.SearchStrategy[int]:
        """Mostly one that lives."""
        gone = st.sampled_from(sorted({*self.gone, 999}))
        return st.one_of(*[st.sampled_from(sorted(self.frames))] * 3, gone) if self.frames else gone

    # -- producers

    @rule(producer=CLIENTS)
    def lease(self, producer: int) -> None:
        lease = self.books.lease(producer)
        self.leases.pop(producer, None)
        if lease is None:
            assert self.books.free == 0
            return
        assert lease.segment not in {each.segment for each, _ in self.leases.values()}
        self.leases[producer] = (lease, 0)

    @rule(
        producer=CLIENTS,
        frames=st.lists(
            st.tuples(st.integers(0, 2 * ALIGNMENT + 3), st.booleans(), TRAJECTORIES), min_size=1, max_size=4
        ),
        run=RUNS,
    )
    def put(self, producer: int, frames: list[tuple[int, bool, str]], run: str) -> None:
        for length, skips, trajectory in frames:
            if producer not in self.leases:
                self.lease(producer)
            if producer in self.leases:
                self.commit(producer, length, skips, trajectory, run)

    def commit(self, producer: int, length: int, skips: bool, trajectory: str, run: str) -> None:
        lease, used = self.leases[producer]
        offset = used + skips * ALIGNMENT  # behind a frame that was given up
        seq = lease.first_seq + offset // ALIGNMENT
        if offset + max(1, length) > SEGMENT:
            with pytest.raises(ProtocolError):
                self.books.commit(producer, run, Commit(seq, length, 0, trajectory))
            self.lease(producer)
            return
        assert seq not in self.frames
        assert seq not in self.gone
        for at in range(length):
            self.memory[lease.segment * SEGMENT + offset + at] = seq
        self.books.commit(producer, run, Commit(seq, length, 0, trajectory))
        self.leases[producer] = (lease, offset + -(-max(1, length) // ALIGNMENT) * ALIGNMENT)
        self.frames[seq] = {
            "references": int(self.run in {None, run}),
            "pins": Counter(),
            "length": length,
            "run": run,
            "trajectory": trajectory,
        }
        self.settle()
        with pytest.raises(ProtocolError):
            self.books.commit(producer, run, Commit(seq, 1, 0, trajectory))

    @rule(producer=CLIENTS)
    def producer_ends(self, producer: int) -> None:
        self.books.end_lease(producer)
        self.leases.pop(producer, None)

    # -- readers

    @rule(data=st.data(), reader=CLIENTS, run=RUNS)
    def pin(self, data: st.DataObject, reader: int, run: str) -> None:
        seq = data.draw(self.some_frame())
        frame = self.frames.get(seq)
        if frame is not None and data.draw(st.booleans()):
            run = frame["run"]
        if frame is None or not frame["references"]:
            expected = MissingFrame if self.run in {None, run} else ForeignFrame
        elif frame["run"] != run:
            expected = ForeignFrame
        else:
            location = self.books.pin(reader, seq, run)
            frame["pins"][reader] += 1
            self.check_bytes(seq, location)
            assert self.books.location(reader, seq) == location
            return
        with pytest.raises(expected):
            self.books.pin(reader, seq, run)

    @rule(data=st.data(), reader=CLIENTS)
    def unpin(self, data: st.DataObject, reader: int) -> None:
        pinned = [seq for seq, frame in self.frames.items() for _ in range(frame["pins"][reader])]
        seqs = data.draw(st.lists(st.sampled_from(pinned), unique=True)) if pinned else []
        self.books.unpin(reader, seqs)
        for seq in seqs:
            self.frames[seq]["pins"][reader] -= 1
        self.settle()
        if not pinned:
            with pytest.raises(ProtocolError):
                self.books.unpin(reader, [next(iter(self.frames), 999)])

    @rule(reader=CLIENTS)
    def reader_ends(self, reader: int) -> None:
        self.books.drop_reader(reader)
        for frame in self.frames.values():
            frame["pins"][reader] = 0
        self.settle()

    # -- references

    @rule(data=st.data())
    def retain(self, data: st.DataObject) -> None:
        seqs = data.draw(st.lists(self.some_frame(), max_size=3))
        if any(seq not in self.frames or not self.frames[seq]["references"] for seq in seqs):
            with pytest.raises(MissingFrame):
                self.books.retain(seqs)
            return
        self.books.retain(seqs)
        for seq in seqs:
            self.frames[seq]["references"] += 1

    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        seqs = data.draw(st.lists(self.some_frame(), max_size=5))
        self.books.release(seqs)
        for seq in seqs:
            frame = self.frames.get(seq)
            if frame is not None and frame["references"]:
                frame["references"] -= 1
        self.settle()

    @rule(run=RUNS, trajectories=st.lists(TRAJECTORIES, max_size=2))
    def forget(self, run: str, trajectories: list[str]) -> None:
        self.books.forget(run, trajectories)
        for frame in self.frames.values():
            if frame["run"] == run and frame["trajectory"] in trajectories:
                frame["references"] = 0
        self.settle()

    @rule(run=RUNS)
    def start_run(self, run: str) -> None:
        self.books.start_run(run)
        self.run = run
        for frame in self.frames.values():
            if frame["run"] != run:
                frame["references"] = 0
        self.settle()

    # -- lower tiers

    @precondition(lambda self: self.books.coldest() is not None)
    @rule(data=st.data())
    def relocate(self, data: st.DataObject) -> None:
        segment = self.books.coldest()
        assert segment is not None
        assert segment not in {lease.segment for lease, _ in self.leases.values()}
        moved = {}
        for seq, offset, length, _, trajectory in self.books.live(segment):
            frame = self.frames[seq]
            assert not frame["pins"].total()
            assert frame["trajectory"] == trajectory
            self.check_bytes(seq, Location("ring", segment, offset, length))
            place = f"place-{self.places}"
            self.places += 1
            self.lower[place] = seq
            moved[seq] = Location("spill", place, 0, length)
        # What happens while the tier is at work.
        for seq in data.draw(st.lists(st.sampled_from(sorted(moved)), max_size=1)):
            self.check_bytes(seq, self.books.pin(0, seq, self.frames[seq]["run"]))
            self.frames[seq]["pins"][0] += 1
        for step in data.draw(
            st.lists(st.sampled_from(["pin", "pin", "release", "forget", "put"]), max_size=3)
        ):
            getattr(self, step)(**_arguments(step, data))
        for unused in self.books.relocate(segment, moved):
            seq = self.lower.pop(unused.place)
            assert seq in self.gone or not self.frames[seq]["references"] or self.frames[seq]["pins"].total()
        self.settle()

    # -- what holds at all times

    @rule(data=st.data())
    def list_held(self, data: st.DataObject) -> None:
        first, stop = data.draw(st.integers(0, 99)), data.draw(st.integers(0, 99) | st.none())
        stop = self.books.next_seq if stop is None else stop
        most = data.draw(st.integers(1, 9))
        found = self.books.held(first, stop, most)
        right = [seq for seq, frame in sorted(self.frames.items()) if frame["references"]]
        assert [each.seq for each in found] == [seq for seq in right if first <= seq < stop][:most]
        for each in found:
            frame = self.frames[each.seq]
            assert each[2:] == (frame["length"], each.xxh3, frame["run"], frame["trajectory"])
            assert (each.tier == "spill") == (each.seq in self.lower.values())

    @invariant()
    def counts_agree(self) -> None:
        counts = self.books.counts()
        assert sum(counts.segments.values()) == SEGMENTS
        assert counts.segments["leased"] == len(self.leases)
        assert counts.segments["free"] == self.books.free
        assert sum(counts.frames.values()) == len(self.frames)
        assert sum(counts.frame_bytes.values()) == sum(frame["length"] for frame in self.frames.values())
        assert counts.pins == sum(frame["pins"].total() for frame in self.frames.values())
        assert counts.frames.get("spill", 0) == len(self.lower)
        for seq, frame in self.frames.items():
            assert (seq in self.books) == bool(frame["references"])
        if not self.frames:
            assert self.books.free == SEGMENTS - len(self.leases)


def _arguments(step: str, data: st.DataObject) -> dict[str, Any]:
    if step == "pin":
        return {"data": data, "reader": data.draw(CLIENTS), "run": data.draw(RUNS)}
    if step == "release":
        return {"data": data}
    if step == "put":
        return {"producer": data.draw(CLIENTS), "frames": [(9, False, "a")], "run": data.draw(RUNS)}
    return {"run": data.draw(RUNS), "trajectories": data.draw(st.lists(TRAJECTORIES, max_size=2))}


TestBooks = Books.TestCase
TestBooks.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


@pytest.mark.parametrize(
    ("ring", "segment"),
    [
        (1 << 21, 1 << 16),
        (1 << 20, 1 << 16),  # never smaller
        ((1 << 21) - 1, 1 << 16),
        (32 << 20, 1 << 20),
        ((64 << 20) - 1, 1 << 20),
        (1 << 30, 32 << 20),
        (1 << 36, 64 << 20),  # never larger
    ],
)
def test_a_ring_has_some_32_segments(ring: int, segment: int) -> None:
    assert segment_size(ring) == segment


def test_a_dead_producers_segment_comes_back_with_its_last_frame() -> None:
    books = Segments(SEGMENT, 1)
    lease = books.lease(7)
    assert lease is not None
    books.commit(7, "run", Commit(lease.first_seq, 10, 0, "a"))
    books.end_lease(7)
    assert books.lease(8) is None
    books.release([lease.first_seq])
    later = books.lease(8)
    assert later is not None
    assert later.first_seq > lease.first_seq + 3  # numbers are never used again


def test_nothing_is_committed_without_a_lease_or_outside_of_it() -> None:
    books = Segments(SEGMENT, 2)
    with pytest.raises(ProtocolError):
        books.commit(1, "run", Commit(0, 1, 0, "a"))
    lease, other = books.lease(1), books.lease(2)
    assert lease is not None
    assert other is not None
    for seq, length in [
        (other.first_seq, 1),
        (lease.first_seq, SEGMENT + 1),
        (lease.first_seq, -1),
        (2**63, 1),
    ]:
        with pytest.raises(ProtocolError):
            books.commit(1, "run", Commit(seq, length, 0, "a"))
    books.commit(1, "run", Commit(lease.first_seq, SEGMENT, 0, "a"))


def test_the_segment_leased_first_is_the_coldest() -> None:
    books = Segments(SEGMENT, 3)
    seqs = []
    for _ in range(3):
        lease = books.lease(1)
        assert lease is not None
        books.commit(1, "run", Commit(lease.first_seq, 1, 0, "a"))
        seqs.append((lease.segment, lease.first_seq))
    assert books.coldest() == seqs[0][0]
    books.pin(5, seqs[0][1], "run")
    assert books.coldest() == seqs[1][0]  # the first is pinned, the last still leased
    books.release([seqs[1][1]])
    assert books.coldest() is None
    books.drop_reader(5)
    assert books.coldest() == seqs[0][0]


def test_a_frame_that_is_pinned_while_it_is_moved_stays() -> None:
    books = Segments(SEGMENT, 1)
    lease = books.lease(1)
    assert lease is not None
    seqs = [lease.first_seq + number for number in range(3)]
    for seq in seqs:
        books.commit(1, "run", Commit(seq, 10, 0, "a"))
    books.end_lease(1)
    moved = {seq: Location("spill", "file", number * 10, 10) for number, seq in enumerate(seqs)}
    pinned = books.pin(5, seqs[0], "run")
    books.release([seqs[1]])
    assert books.relocate(0, moved) == [moved[seqs[0]], moved[seqs[1]]]
    assert books.location(5, seqs[0]) == pinned
    assert books.free == 0
    assert books.pin(5, seqs[2], "run") == moved[seqs[2]]
    books.drop_reader(5)
    assert books.relocate(0, {seqs[0]: moved[seqs[0]]}) == []
    assert books.free == 1
    books.release(seqs)
    assert books.take_dropped() == [moved[seqs[0]], moved[seqs[2]]]
    assert books.take_dropped() == []
