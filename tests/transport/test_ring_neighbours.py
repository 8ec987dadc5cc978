"""Stores of several jobs on one node: starts, ends and cleaning at once, and what one sees of another."""

from __future__ import annotations

import os
import secrets
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from kill_harness import Nursery, nursery, wait_until
from kill_ledger import frame_bytes
from kill_products import open_remote, open_sink, open_source
from kill_scene import Scene, scene

from tracerl.api.frames import FrameKey, Handle
from tracerl.transport.base import TransportError, Wanted
from tracerl.transport.ring.file import RING, RingDirectory, create_ring, reap
from tracerl.transport.store.spill import remove_leftovers


@pytest.fixture
def memory() -> Iterator[Path]:
    path = Path("/dev/shm") / f"tracerl-neighbours-{secrets.token_hex(4)}"
    yield path
    reap(path)
    assert not path.exists()


def test_a_start_and_a_cleaning_at_once_do_not_hurt_each_other(memory: Path) -> None:
    """Another job may start, and reap, at any instant of this store's life: 20,000 of them."""
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            # The test ends it with SIGKILL, like any other start of a job may end.
            while True:
                reap(memory)
        except KeyboardInterrupt:
            status = 0
        finally:
            os._exit(status)
    try:
        for _ in range(20_000):
            directory = RingDirectory.create(memory / "store-0")
            assert (memory / "store-0").is_dir()
            directory.remove()
        directory = RingDirectory.create(memory / "store-0")
        for descriptor in create_ring(directory, 65_536):
            os.close(descriptor)
        for _ in range(1_000):
            assert (memory / "store-0" / RING).exists()
        directory.remove()
    finally:
        os.kill(pid, signal.SIGINT)
        _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == 0, "cleaning failed"


@pytest.fixture(scope="module")
def actors(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nursery]:
    with nursery(tmp_path_factory.mktemp("nursery")) as made:
        yield made


def put(place: Scene, **changed: str) -> Handle:
    """Put one frame by a sink of its own."""
    store = {**place.store_arguments, **changed}
    sink = open_sink(store, "p")
    key = FrameKey(store["job_uid"], store["run_id"], "t", 0, 1, 0, 1, 0)
    handle = sink.put(frame_bytes("t", 0, 500), key, timeout=10)
    sink.close()
    return handle


def fault(source, handle: Handle) -> str:
    """How reading a frame ends: ``right`` or the fault."""
    with source.borrow([Wanted(handle)]) as borrowed:
        (piece,) = borrowed.pieces
        if isinstance(piece, TransportError):
            assert "\n" not in str(piece)
            return piece.fault
        right = piece[0] == frame_bytes("t", 0, 500)
        del piece
        return "right" if right else "WRONG"


def test_two_jobs_on_a_node_do_not_see_each_other(actors: Nursery, tmp_path: Path) -> None:
    """Same node, user and store names: neither a client nor a handle of one job is of use at the other."""
    with scene(actors, tmp_path / "a") as a, scene(actors, tmp_path / "b") as b:
        a.start_store()
        b.start_store()
        handle = put(a)
        source = open_source(b.store_arguments, "r")
        assert fault(source, handle) == "missing"
        assert source.present([handle]) == [False]
        source.release([handle])
        source.close()
        for changed in ({"token": a.store_arguments["token"]}, {"job_uid": a.store_arguments["job_uid"]}):
            for connect in (open_sink, open_source):
                with pytest.raises(TransportError) as caught:
                    connect({**b.store_arguments, **changed}, "intruder")
                assert caught.value.fault == "foreign"
                assert b.store_arguments["token"] not in str(caught.value)
        reader = open_source(a.store_arguments, "r")
        assert fault(reader, handle) == "right"
        reader.release([handle])
        wait_until(lambda: reader.usage().frames == 0, "a is empty")
        reader.close()
        assert reap(a.memory) == []
        a.stop()
        assert (b.memory / "store-0" / RING).exists()
        b.stop()


@pytest.mark.parametrize("token", ["", "x", None])
def test_a_client_without_the_token_is_refused(actors: Nursery, tmp_path: Path, token: str | None) -> None:
    with scene(actors, tmp_path / "s") as place:
        place.start_store()
        right = place.store_arguments["token"]
        shown = right[:-1] + ("0" if right[-1] != "0" else "1") if token is None else token
        for connect in (open_sink, open_source):
            with pytest.raises(TransportError) as caught:
                connect({**place.store_arguments, "token": shown}, "intruder")
            assert caught.value.fault == "foreign"
        assert place.audit()["counters"]["refused_token"] >= 2
        place.stop()


def test_frames_of_an_earlier_run_are_refused_and_go_when_the_next_starts(
    actors: Nursery, tmp_path: Path
) -> None:
    with scene(actors, tmp_path / "s") as place:
        place.start_store()
        earlier = put(place, run_id="earlier")
        source = open_source(place.store_arguments, "r")
        assert fault(source, earlier) == "foreign"
        source.start_run()
        assert fault(source, earlier) in {"foreign", "missing"}
        # A rollout of the earlier run that still lives: what it puts is taken, and dropped at once.
        late = put(place, run_id="earlier")
        assert fault(source, late) in {"foreign", "missing"}
        assert source.usage().frames == 0
        assert fault(source, put(place)) == "right"
        source.close()
        place.stop()


def test_another_node_needs_token_and_run_too(actors: Nursery, tmp_path: Path) -> None:
    with scene(actors, tmp_path / "a") as a, scene(actors, tmp_path / "b") as b:
        a.start_store()
        b.start_store()
        handle = put(a)
        refused = ({"token": ""}, {"token": b.store_arguments["token"]}, {"run_id": "earlier"})
        for changed in refused:
            stranger = open_remote({**a.store_arguments, **changed})
            assert fault(stranger, handle) == "foreign"
            stranger.close()
        lost = open_remote(b.store_arguments)
        assert fault(lost, handle) == "missing"
        lost.release([handle])
        lost.close()
        reader = open_remote(a.store_arguments)
        assert fault(reader, handle) == "right"
        reader.release([handle])
        assert reader.usage().frames == 0
        reader.close()
        a.stop()
        b.stop()


def test_a_reader_cannot_write(actors: Nursery, tmp_path: Path) -> None:
    with scene(actors, tmp_path / "s") as place:
        place.start_store()
        handle = put(place)
        source = open_source(place.store_arguments, "r")
        with source.borrow([Wanted(handle)]) as borrowed:
            (piece,) = borrowed.pieces
            assert not isinstance(piece, TransportError)
            with pytest.raises(TypeError):
                piece[0][0] = 1
            del piece
        source.close()
        place.stop()


@pytest.mark.skipif(os.geteuid() != 0, reason="another user can be played by root alone")
def test_another_user_is_refused(actors: Nursery, tmp_path: Path) -> None:
    """Even with the token: the directory keeps it out, and behind an open directory the socket does."""
    with scene(actors, tmp_path / "s") as place:
        place.start_store()
        for opened in (False, True):
            if opened:
                place.memory.chmod(0o755)
                (place.memory / "store-0").chmod(0o777)
                (place.memory / "store-0" / "socket").chmod(0o777)
            pid = os.fork()
            if pid == 0:
                code = 1
                try:
                    os.setgroups([])
                    os.setgid(65534)
                    os.setuid(65534)
                    open_source({**place.store_arguments, "timeout": 1.0}, "intruder")
                except TransportError as error:
                    code = 10 if error.fault == "permission" else 11
                finally:
                    os._exit(code)
            assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 10
        place.stop()


def test_cleaning_takes_what_dead_stores_left_and_nothing_of_living_ones(
    actors: Nursery, tmp_path: Path
) -> None:
    """Two stores spill into one directory; one is killed, none takes its place, and another job cleans up."""
    disk = tmp_path / "disk"
    disk.mkdir()
    with (
        scene(actors, tmp_path / "dead", spill=disk, spill_bytes=8 << 20) as dead,
        scene(actors, tmp_path / "living", spill=disk, spill_bytes=8 << 20) as living,
    ):
        for place in (dead, living):
            place.start_store()
            place.start_producer("producer", turns=40, timeout=0.5)
            wait_until(lambda place=place: place.audit()["tiers"].get("spill"), "frames are spilled")
        assert dead.store is not None
        dead.kill(dead.store, *dead.producers.values())
        assert reap(dead.memory) == [dead.memory / "store-0"]
        assert reap(living.memory) == []
        assert len(remove_leftovers(disk)) == 1
        assert not dead.memory.exists()
        assert len(list(disk.iterdir())) == 1
        assert living.producers["producer"].wait() == 0
        living.start_reader("reader")
        living.drained()
        living.stop()
        assert list(disk.iterdir()) == []


def test_a_second_store_in_the_same_place_is_refused_and_the_first_goes_on(
    actors: Nursery, tmp_path: Path
) -> None:
    with scene(actors, tmp_path / "s") as place:
        first = place.start_store()
        handle = put(place)
        second = actors.start("store", **place.store_arguments)
        assert second.wait() == 1
        assert "Traceback" not in second.errors()
        assert "is running" in second.errors()
        source = open_source(place.store_arguments, "r")
        assert fault(source, handle) == "right"
        source.release([handle])
        source.close()
        assert first.status is None
        place.stop()
