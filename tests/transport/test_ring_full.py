"""Nothing left to write to: a small /dev/shm, a full ring, a full disk, a reader that does not keep up."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import xxhash
from kill_harness import Nursery, nursery, small_filesystem, wait_until
from kill_ledger import frame_bytes
from kill_products import open_sink, open_source
from kill_scene import RING, SEGMENT, Scene, scene

from tracerl.api.frames import FrameKey, Handle, parse_handle
from tracerl.transport.base import TransportError, Wanted
from tracerl.transport.ring.server import RingServer


@pytest.fixture(scope="module")
def actors(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nursery]:
    with nursery(tmp_path_factory.mktemp("nursery")) as made:
        yield made


def key(place: Scene, index: int) -> FrameKey:
    store = place.store_arguments
    return FrameKey(store["job_uid"], store["run_id"], "t", 0, 1, index, index + 1, 0)


def put_until_full(place: Scene, sink, length: int = SEGMENT) -> tuple[list[Handle], TransportError]:
    """Put frames until there is no room; the handles, and the error that said so."""
    handles: list[Handle] = []
    while len(handles) < 10_000:
        index = len(handles)
        try:
            handles.append(sink.put(frame_bytes("t", index, length), key(place, index), timeout=0.3))
        except TransportError as error:
            return handles, error
    raise AssertionError("the ring is never full")


def all_right(source, handles: list[Handle], length: int = SEGMENT) -> bool:
    with source.borrow([Wanted(handle) for handle in handles]) as borrowed:
        right = True
        for index, piece in enumerate(borrowed.pieces):
            right &= not isinstance(piece, TransportError) and piece[0] == frame_bytes("t", index, length)
        del piece
    return right


def sentence(error: TransportError) -> str:
    """One sentence for the user, of one line."""
    text = str(error)
    assert "\n" not in text
    assert len(text) < 500
    return text


def test_a_ring_that_does_not_fit_says_what_is_there_and_leaves_nothing(tmp_path: Path) -> None:
    with small_filesystem(tmp_path / "shm", 3 << 20) as memory:
        with pytest.raises(TransportError) as caught:
            RingServer(memory / "store-0", store="store-0", job_uid="j", token="t", ring_bytes=8 << 20)
        assert caught.value.fault == "full"
        text = sentence(caught.value)
        assert "8 MiB" in text
        assert "3 MiB" in text
        assert "--shm-size" in text
        assert list(memory.iterdir()) == []


def test_memory_that_fills_up_later_does_not_hurt_a_ring_that_has_its_own(
    actors: Nursery, tmp_path: Path
) -> None:
    """Someone else fills /dev/shm to the last byte: without reserved memory, the next write is a SIGBUS."""
    with (
        small_filesystem(tmp_path / "shm", 3 << 20) as memory,
        scene(actors, tmp_path / "s", memory=memory) as place,
    ):
        place.start_store()
        with (memory / "other").open("wb", buffering=0) as other:
            with suppress(OSError):
                while True:
                    other.write(bytes(4096))
            with pytest.raises(OSError, match="No space left"):
                other.write(bytes(4096))
        sink, source = open_sink(place.store_arguments, "p"), open_source(place.store_arguments, "r")
        handles, _ = put_until_full(place, sink)
        assert len(handles) == RING // SEGMENT
        assert all_right(source, handles)
        sink.close()
        source.close()
        (memory / "other").unlink()
        place.stop()


def test_a_full_ring_refuses_at_its_deadline_and_goes_on_when_frames_are_released(
    actors: Nursery, tmp_path: Path
) -> None:
    with scene(actors, tmp_path / "s") as place:
        place.start_store()
        sink, source = open_sink(place.store_arguments, "p"), open_source(place.store_arguments, "r")
        handles, error = put_until_full(place, sink)
        assert error.fault == "full"
        assert "spec.transport.ring.size" in sentence(error)
        assert len(handles) == RING // SEGMENT
        assert sink.usage().congested
        assert all_right(source, handles)
        source.release(handles[3:5])
        more = [sink.put(b"x" * SEGMENT, key(place, 99), timeout=10) for _ in range(2)]
        assert all_right(source, handles[:3])
        source.release([*handles, *more])
        sink.close()  # ends its lease of the last segment
        wait_until(lambda: source.usage().held_bytes == 0, "the ring is empty")
        assert not source.usage().congested
        source.close()
        place.stop()


def test_a_full_disk_is_said_once_in_a_while_and_is_used_again_when_there_is_room(
    actors: Nursery, tmp_path: Path
) -> None:
    """The spill's disk is full: producers wait, then are refused; nothing that was committed suffers."""
    with (
        small_filesystem(tmp_path / "disk", 2 << 20) as disk,
        scene(actors, tmp_path / "s", spill=disk, spill_bytes=1 << 30) as place,
    ):
        ballast = disk / "ballast"
        ballast.write_bytes(bytes(1 << 20))
        place.start_store()
        sink, source = open_sink(place.store_arguments, "p"), open_source(place.store_arguments, "r")
        handles, error = put_until_full(place, sink)
        assert error.fault == "full"
        sentence(error)
        # Memory, and the part of the disk that was free but for directories and inodes.
        assert RING // SEGMENT < len(handles) <= (RING + (1 << 20)) // SEGMENT
        assert all_right(source, handles)
        ballast.unlink()
        before = len(handles)
        while len(handles) < before + 8:
            index = len(handles)
            handles.append(sink.put(frame_bytes("t", index, SEGMENT), key(place, index), timeout=20))
        assert all_right(source, handles)
        source.release(handles)
        wait_until(lambda: place.audit()["frames"] == 0, "the store is empty")
        sink.close()
        source.close()
        place.stop()
        assert place.store is not None
        warnings = place.store.errors().splitlines()
        assert any("No space left" in line for line in warnings), warnings
        assert len(warnings) < 40, warnings


def test_a_limit_of_the_spill_holds(actors: Nursery, tmp_path: Path) -> None:
    with scene(actors, tmp_path / "s", spill_bytes=1 << 20) as place:
        place.start_store()
        sink, source = open_sink(place.store_arguments, "p"), open_source(place.store_arguments, "r")
        handles, error = put_until_full(place, sink)
        assert error.fault == "full"
        assert place.spill is not None
        stored = sum(path.stat().st_size for path in place.spill.rglob("*") if path.is_file())
        assert stored <= 1 << 20
        assert len(handles) == (RING + (1 << 20)) // SEGMENT
        assert all_right(source, handles)
        source.release(handles)
        sink.close()
        source.close()
        place.stop()


def test_a_reader_that_hangs_on_to_frames_keeps_them_and_nothing_else(
    actors: Nursery, tmp_path: Path
) -> None:
    """It holds two frames while 20,000 pass: the same bytes at the end, and the store has not grown."""
    with scene(actors, tmp_path / "s", largest=4096) as place:
        place.start_store()
        sink, slow = open_sink(place.store_arguments, "slow-p"), open_source(place.store_arguments, "slow")
        held = [sink.put(frame_bytes("t", index, SEGMENT), key(place, index)) for index in range(2)]
        borrowed = slow.borrow([Wanted(handle) for handle in held])
        slow.release(held)
        place.start_producer("producer", largest=4096)
        place.start_reader("reader")
        place.progress(1_000)
        before = place.audit()
        place.progress(20_000)
        after = place.audit()
        for index, (handle, piece) in enumerate(zip(held, borrowed.pieces, strict=True)):
            assert not isinstance(piece, TransportError)
            assert xxhash.xxh3_64_intdigest(piece[0]) == parse_handle(handle).xxh3
            assert piece[0] == frame_bytes("t", index, SEGMENT)
        del piece
        assert after["held_bytes"] <= RING
        assert after["descriptors"] <= before["descriptors"]
        assert after["resident_bytes"] <= before["resident_bytes"] + (4 << 20)
        borrowed.release()
        sink.close()
        slow.close()
        place.stop_producers()
        place.drained()
        place.empty(place.readers["reader"], connections=2)
        place.stop()


def test_a_store_that_hangs_is_said_to_and_nothing_is_lost_when_it_goes_on(
    actors: Nursery, tmp_path: Path
) -> None:
    """Stopped, as by a debugger or a full machine: frames that were committed meanwhile are there later."""
    with scene(actors, tmp_path / "s") as place:
        store = place.start_store()
        patience = {**place.store_arguments, "timeout": 0.5}
        sink, source = open_sink(patience, "p"), open_source(patience, "r")
        first = sink.put(frame_bytes("t", 0, SEGMENT), key(place, 0), timeout=0.5)
        store.kill(signal.SIGSTOP)
        handles, error = [first], None
        while error is None:
            index = len(handles)
            try:
                handles.append(sink.put(frame_bytes("t", index, SEGMENT), key(place, index), timeout=0.5))
            except TransportError as refusal:
                error = refusal
        assert "did not answer" in sentence(error)
        with source.borrow([Wanted(first)]) as borrowed:
            (piece,) = borrowed.pieces
            assert isinstance(piece, TransportError)
            assert piece.fault == "failed"
        with pytest.raises(TransportError):
            source.usage()
        store.kill(signal.SIGCONT)
        index = len(handles)
        handles.append(sink.put(frame_bytes("t", index, SEGMENT), key(place, index), timeout=10))
        assert all_right(source, handles)
        source.release(handles)
        sink.close()
        wait_until(lambda: place.audit()["held_bytes"] == 0, "the store is empty")
        source.close()
        place.stop()
