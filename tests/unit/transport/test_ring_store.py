"""A sink, a store and a source over a real ring: a frame can be read as long as it must, and no longer."""

from __future__ import annotations

import contextlib
import os
import random
import select
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from ring_stores import (
    IDENTITY,
    RUN,
    SEGMENT,
    STORE,
    Bare,
    FileTier,
    RunningStore,
    eventually,
    key,
    open_files,
    running,
)

from tracerl.api.frames import Handle, parse_handle
from tracerl.transport.base import Borrowed, FrameSink, FrameSource, LoanError, TransportError, Wanted
from tracerl.transport.ring import messages as m
from tracerl.transport.ring.client import StoreSink, StoreSource
from tracerl.transport.ring.segments import Commit


@pytest.fixture
def store(tmp_path: Path) -> Iterator[RunningStore]:
    with running(tmp_path / STORE) as store:
        yield store


def fault(call: Callable[[], Any]) -> str:
    with pytest.raises(TransportError) as caught:
        call()
    return sentence(caught.value)


def sentence(error: object) -> str:
    assert isinstance(error, TransportError)
    assert "\n" not in str(error)
    assert ";" in str(error)  # what to do
    return error.fault


def wanted(*handles: Handle) -> list[Wanted]:
    return [Wanted(handle) for handle in handles]


def read(source: StoreSource, *handles: Handle) -> list[bytes | str]:
    """The frames' bytes, or what is wrong with them."""
    with source.borrow(wanted(*handles)) as borrowed:
        return [
            sentence(piece) if isinstance(piece, TransportError) else bytes(piece[0])
            for piece in borrowed.pieces
        ]


def frame(size: int, seed: int = 0) -> bytes:
    return random.Random(seed).randbytes(size)


# -- putting and reading ----------------------------------------------------------------------------------


def test_frames_of_all_sizes_come_back(store: RunningStore) -> None:
    sink: FrameSink = store.sink()
    source: FrameSource = store.source()
    assert sink.max_frame_bytes == SEGMENT
    frames = [frame(size, size) for size in (0, 1, 63, 64, 65, 4096, SEGMENT - 1, SEGMENT, 0)]
    handles = [sink.put(each, key()) for each in frames]
    assert len(set(handles)) == len(frames)
    for handle, each in zip(handles, frames, strict=True):
        parts = parse_handle(handle)
        assert (parts.store, parts.length, parts.xxh3) == (STORE, len(each), xxhash.xxh3_64_intdigest(each))
    assert read(store.source(), *handles) == frames
    usage = source.usage()
    assert (usage.frames, usage.frame_bytes) == (len(frames), sum(map(len, frames)))
    assert usage.capacity_bytes == 32 * SEGMENT
    assert sink.usage().counters == {"put_frames": 9, "put_bytes": usage.frame_bytes}
    assert store.source().usage().counters == {}


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview, np.array])
def test_whatever_holds_bytes_can_be_put(store: RunningStore, kind: Any) -> None:
    values = np.arange(70, dtype=np.float32)
    data = values if kind is np.array else kind(values.tobytes())
    handle = store.sink().put(memoryview(data) if kind is np.array else data, key())
    assert read(store.source(), handle) == [values.tobytes()]


def test_a_large_frame_is_hashed_as_a_whole(tmp_path: Path) -> None:
    with running(tmp_path / STORE, ring_bytes=32 << 20) as store:
        data = frame((1 << 20) - 13)
        handle = store.sink().put(data, key())
        assert parse_handle(handle).xxh3 == xxhash.xxh3_64_intdigest(data)
        assert read(store.source(), handle) == [data]


def test_ranges_are_views_of_the_frame_in_place(store: RunningStore) -> None:
    data = frame(5000)
    handle = store.sink().put(data, key())
    source = store.source()
    ranges = ((10, 20), (0, 5000), (7, 7), (4999, 5000))
    with source.borrow([Wanted(handle, ranges), Wanted(handle), Wanted(handle, ())]) as borrowed:
        first, second, third = borrowed.pieces
        assert [bytes(view) for view in first] == [data[a:b] for a, b in ranges]  # type: ignore[union-attr]
        assert third == []
        for view in [*first, *second]:  # type: ignore[misc]
            assert view.readonly
        address = np.frombuffer(first[1], np.uint8).ctypes.data  # type: ignore[index]
        assert np.frombuffer(second[0], np.uint8).ctypes.data == address  # type: ignore[index]
        assert address % 64 == 0
    for outside in ((-1, 3), (4, 3), (0, 5001)):
        with pytest.raises(ValueError, match="is not a range"):
            source.borrow([Wanted(handle, (outside,))])


def test_many_frames_are_put_together(store: RunningStore) -> None:
    frames = [frame(size, size) for size in range(0, 4000, 20)]  # more than a message and a segment hold
    frames[50] = frame(SEGMENT + 1)
    keys = [key() for _ in frames]
    keys[60] = key(run_id="another")
    results = store.sink().put_many(list(zip(frames, keys, strict=True)))
    assert sentence(results.pop(60)) == "foreign"
    assert sentence(results.pop(50)) == "full"
    assert read(store.source(), *results) == frames[:50] + frames[51:60] + frames[61:]  # type: ignore[arg-type]
    assert store.sink().put_many([]) == []


@given(st.lists(st.tuples(st.integers(0, 3000), st.sampled_from(["put", "reserve", "abandon"])), max_size=20))
@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_frames_put_and_reserved_in_any_order_do_not_touch(
    store: RunningStore, steps: list[tuple[int, str]]
) -> None:
    sink, source = StoreSink(store.path, name="a", **IDENTITY), StoreSource(store.path, name="b", **IDENTITY)
    expected: dict[Handle, bytes] = {}
    for number, (size, how) in enumerate(steps):
        data = frame(size, number)
        if how == "put":
            expected[sink.put(data, key())] = data
            continue
        with sink.reserve(size, key()) as reservation:
            reservation.buffer[:] = data
            if how == "reserve":
                expected[reservation.commit()] = data
    assert read(source, *expected) == list(expected.values())
    source.release(expected)
    assert source.usage().frames == 0
    sink.close()
    source.close()


# -- reservations -----------------------------------------------------------------------------------------


def test_a_reservation_is_written_in_place(store: RunningStore) -> None:
    sink, source = store.sink(), store.source()
    with sink.reserve(100, key()) as reservation:
        array = np.frombuffer(reservation.buffer, np.uint8)
        array[:] = 7
        assert fault(reservation.commit) == "failed"  # the array could still write
        del array
        handle = reservation.commit()
    with pytest.raises(ValueError, match="released"):
        reservation.buffer[0] = 1
    with pytest.raises(RuntimeError):
        reservation.commit()
    reservation.abandon()
    assert read(source, handle) == [b"\7" * 100]


def test_an_empty_reservation(store: RunningStore) -> None:
    with store.sink().reserve(0, key()) as reservation:
        reservation.buffer[:] = b""
        assert read(store.source(), reservation.commit()) == [b""]


def test_while_a_reservation_is_open_nothing_else_is_put(store: RunningStore) -> None:
    sink = store.sink()
    reservation = sink.reserve(10, key())
    with pytest.raises(RuntimeError, match="reservation"):
        sink.put(b"x", key())
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(fault, lambda: sink.put(b"x", key(), timeout=0)).result() == "full"
        waiting = pool.submit(sink.put, b"x", key())
        reservation.abandon()
        assert read(store.source(), waiting.result(timeout=20)) == [b"x"]
    assert fault(lambda: sink.reserve(SEGMENT + 1, key())) == "full"
    assert fault(lambda: sink.reserve(1, key(job_uid="another"))) == "foreign"
    assert read(store.source(), sink.put(b"y", key())) == [b"y"]


# -- references -------------------------------------------------------------------------------------------


def test_a_frame_goes_with_its_last_reference(store: RunningStore) -> None:
    sink, source = store.sink(), store.source()
    first, second = sink.put(b"first", key()), sink.put(b"second", key())
    sink.retain([first])
    source.retain([first, second])
    for holder in (source, sink):
        holder.release([first])
        holder.usage()  # answered after what was sent before
        assert source.present([first, second]) == [True, True]
    source.release([first])
    assert source.present([first, second]) == [False, True]
    assert read(source, first, second) == ["missing", b"second"]
    source.release([first])  # an aborted trajectory may be released again
    assert fault(lambda: sink.retain([second, first])) == "missing"
    source.release([second, second])  # of which the retain above has added none
    assert source.present([second]) == [False]
    assert source.usage().frames == 0


def test_a_release_that_overtakes_the_commit_waits_for_it(store: RunningStore) -> None:
    """The two go through different sockets of the sink, and the store may look at either first."""
    sink = store.sink()
    for _ in range(200):
        sink.release([sink.put(b"x" * 100, key())])
    assert sink.usage().frames == 0


def test_a_handle_can_be_used_at_once_by_others(store: RunningStore) -> None:
    sink, source = store.sink(), store.source()
    for number in range(200):
        data = frame(50, number)
        assert read(source, sink.put(data, key())) == [data]


def test_lost_trajectories_are_forgotten(store: RunningStore) -> None:
    sink, source = store.sink(), store.source()
    handles = [sink.put(b"x", key(name)) for name in ("a", "b", "a", "ü" * 500)]
    sink.retain(handles)
    source.forget(["ü" * 500, "a", "unknown"])
    assert source.present(handles) == [False, True, False, False]
    assert fault(lambda: sink.put(b"x", key("x" * 1025))) == "failed"


def test_thousands_of_frames_at_once(store: RunningStore) -> None:
    sink, source = store.sink(), store.source()
    handles = sink.put_many([(b"%d" % number, key()) for number in range(9000)])
    assert read(source, *handles) == [b"%d" % number for number in range(9000)]  # type: ignore[arg-type]
    sink.retain(handles)  # type: ignore[arg-type]
    source.release(handles[:1])  # type: ignore[arg-type]
    source.release(handles[:1])  # type: ignore[arg-type]
    assert fault(lambda: sink.retain(reversed(handles))) == "missing"  # type: ignore[arg-type]
    source.release(handles)  # type: ignore[arg-type]
    source.release(handles)  # type: ignore[arg-type]
    assert source.usage().frames == 0
    assert store.do(store.server.status).counts.pins == 0


# -- pins -------------------------------------------------------------------------------------------------


def test_a_released_frame_stays_as_long_as_it_is_borrowed(store: RunningStore) -> None:
    sink, source = store.sink(), store.source()
    data = frame(SEGMENT)
    handle = sink.put(data, key())
    borrowed = source.borrow(wanted(handle))
    source.release([handle])
    assert source.present([handle]) == [False]
    assert read(source, handle) == ["missing"]
    for number in range(31):  # every other segment
        sink.put(frame(SEGMENT, number), key("filler"), timeout=5)
    assert fault(lambda: sink.put(b"x", key(), timeout=0)) == "full"
    assert bytes(view_of(borrowed)) == data
    borrowed.release()
    sink.put(frame(SEGMENT, 99), key(), timeout=20)


def view_of(borrowed: Borrowed) -> memoryview:
    piece = borrowed.pieces[0]
    assert isinstance(piece, list)
    return piece[0]


def test_views_end_with_the_loan_but_not_under_an_array(store: RunningStore) -> None:
    sink, source = store.sink(), store.source()
    handle = sink.put(b"abcd", key())
    borrowed = source.borrow(wanted(handle))
    array = np.frombuffer(view_of(borrowed), np.uint8)
    assert fault(borrowed.release) == "failed"
    assert store.do(store.server.status).counts.pins == 1
    assert bytes(array) == b"abcd"
    del array
    borrowed.release()
    borrowed.release()
    with pytest.raises(ValueError, match="released"):
        bytes(view_of(borrowed))
    eventually(lambda: store.do(store.server.status).counts.pins == 0)


def test_closing_a_source_ends_its_views_and_pins(store: RunningStore) -> None:
    handle = store.sink().put(b"abcd", key())
    source = store.source()
    borrowed = source.borrow(wanted(handle))
    source.close()
    with pytest.raises(ValueError, match="released"):
        bytes(view_of(borrowed))
    borrowed.release()
    eventually(lambda: store.do(store.server.status).counts.pins == 0)
    assert sentence(source.borrow(wanted(handle)).pieces[0]) == "failed"


def test_two_readers_pin_on_their_own(store: RunningStore) -> None:
    handle = store.sink().put(b"abcd", key())
    one, two = store.source("trainer-0"), store.source("trainer-1")
    first, second = one.borrow(wanted(handle, handle)), two.borrow(wanted(handle))
    one.release([handle])
    first.release()
    assert bytes(view_of(second)) == b"abcd"
    second.release()
    eventually(lambda: store.do(store.server.status).counts.frames["ring"] == 0)


def overwrite(sink: StoreSink) -> None:
    """Put so much that all that is not pinned moves out of the ring and is written over."""
    for number in range(80):
        sink.put(frame(SEGMENT, 1000 + number), key("filler"), timeout=20)


def test_requests_that_a_stopped_store_does_not_answer_leave_the_loans(tmp_path: Path) -> None:
    """Each of them fails, and its answer comes later, to nobody."""
    with running(tmp_path / STORE, tiers=[FileTier("spill", tmp_path)]) as store:
        sink, source = store.sink(), store.source(timeout=0.2)
        frames = [frame(20_000, number) for number in range(6)]
        handles = [sink.put(each, key()) for each in frames]
        borrowed = source.borrow(wanted(*handles[:4]))
        with store.stopped(), ThreadPoolExecutor(4) as pool:
            asked = [
                pool.submit(fault, source.usage),
                pool.submit(fault, lambda: source.retain(handles)),
                pool.submit(read, source, *handles[3:]),
                pool.submit(source.present, handles),
            ]
            assert [each.result(timeout=20) for each in asked] == [
                "failed",
                "failed",
                ["failed"] * 3,
                [False] * 6,
            ]
        overwrite(sink)
        assert [bytes(piece[0]) for piece in borrowed.pieces] == frames[:4]  # type: ignore[index]
        borrowed.release()
        assert read(source, *handles) == frames
        # What they pinned and retained after all is undone: each frame has the one reference it had.
        eventually(lambda: store.do(store.server.status).counts.pins == 0)
        source.release(handles)
        eventually(lambda: not any(source.present(handles)))


def test_a_loan_that_the_store_has_ended_is_told_whenever_it_is_given_back(tmp_path: Path) -> None:
    with running(tmp_path / STORE, tiers=[FileTier("spill", tmp_path)]) as store:
        sink, source = store.sink(), store.source()
        handle = sink.put(frame(20_000), key())
        borrowed, last = source.borrow(wanted(handle)), source.borrow(wanted(handle))
        store.cut("reader")
        overwrite(sink)
        assert bytes(view_of(borrowed)) != frame(20_000)
        for _ in range(2):
            with pytest.raises(LoanError, match="read them again"):
                borrowed.release()
        with pytest.raises(ValueError, match="released"):
            bytes(view_of(borrowed))
        assert read(source, handle) == [frame(20_000)]
        source.close()  # ends the views, and is not the one who has read them
        with pytest.raises(LoanError):
            last.release()


def test_closing_a_source_under_a_reader_is_told_to_it(store: RunningStore) -> None:
    handle = store.sink().put(b"abcd", key())
    source = store.source()
    borrowed = source.borrow(wanted(handle))
    array = np.frombuffer(view_of(borrowed), np.uint8)
    source.close()
    del array
    with pytest.raises(LoanError):
        borrowed.release()


# -- a full ring ------------------------------------------------------------------------------------------


def fill(sink: StoreSink) -> list[Handle]:
    """Put frames of a segment each until there is no room."""
    handles = []
    with contextlib.suppress(TransportError):
        while True:
            handles.append(sink.put(frame(SEGMENT, len(handles)), key("filler"), timeout=0))
    return handles


def test_a_put_waits_for_room_as_long_as_it_may(store: RunningStore) -> None:
    sink, source = store.sink(), store.source()
    assert source.usage().congested is False
    handles = fill(sink)
    assert len(handles) == 32
    usage = source.usage()
    assert usage.congested
    assert usage.held_bytes == usage.capacity_bytes
    for timeout in (0, 0.05):
        assert fault(lambda timeout=timeout: sink.put(b"x", key(), timeout=timeout)) == "full"
    assert [sentence(result) for result in sink.put_many([(b"x", key())] * 3, timeout=0)] == ["full"] * 3
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(sink.put, b"late", key())
        eventually(lambda: store.counter("lease_waits") >= 2)
        sink.release(handles[5:6])  # not held up by the put that waits
        late = waiting.result(timeout=20)
    assert read(source, late, handles[6]) == [b"late", frame(SEGMENT, 6)]
    assert store.counter("lease_timeouts") > 0


def test_producers_get_room_in_the_order_they_ask(store: RunningStore) -> None:
    sinks = [store.sink(f"rollout-{number}") for number in range(3)]
    handles = fill(sinks[0])
    order: list[int] = []

    def put(number: int) -> None:
        sinks[number].put(frame(SEGMENT), key())
        order.append(number)

    with ThreadPoolExecutor(3) as pool:
        for count, number in enumerate((2, 0, 1), start=1):
            pool.submit(put, number)
            eventually(lambda count=count: store.counter("lease_waits") == count)
        for count, handle in enumerate(handles[:3], start=1):
            sinks[0].release([handle])
            eventually(lambda count=count: len(order) == count)
    assert order == [2, 0, 1]


def test_a_put_that_waits_ends_with_its_sink(store: RunningStore) -> None:
    sink = store.sink()
    fill(sink)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(fault, lambda: sink.put(b"x", key()))
        eventually(lambda: store.counter("lease_waits") == 1)
        sink.close()
        assert waiting.result(timeout=20) == "failed"


def test_a_slow_trajectory_holds_its_own_segment_alone(store: RunningStore) -> None:
    sink, source = store.sink(), store.source()
    slow = sink.put(frame(30_000), key("slow"))
    for number in range(200):
        source.release([sink.put(frame(40_000, number), key(), timeout=20)])
    assert read(source, slow) == [frame(30_000)]
    assert source.usage().held_bytes <= 3 * SEGMENT


# -- who may do what --------------------------------------------------------------------------------------


def test_strangers_are_refused(store: RunningStore) -> None:
    for make in (store.sink, store.source):
        assert fault(lambda make=make: make(token="wrong", timeout=5)) == "foreign"
        assert fault(lambda make=make: make(job_uid="another", timeout=5)) == "foreign"
    assert store.counter("refused_token") == 2
    assert store.counter("refused_job") == 2
    assert (
        fault(
            lambda: StoreSource(
                store.path / "absent", store=STORE, job_uid="", run_id="", token="", name="", timeout=0
            )
        )
        == "failed"
    )


def test_frames_of_other_runs_are_not_shown_and_go_when_a_run_starts(store: RunningStore) -> None:
    old_sink, old_source = store.sink(), store.source()
    handle = old_sink.put(b"old", key())
    source = store.source(run_id="run-2")
    assert read(source, handle) == ["foreign"]
    source.start_run()
    assert read(source, handle) == ["missing"]
    assert read(old_source, handle) == ["foreign"]
    late = old_sink.put(b"late", key())  # its producer does not know yet
    sink = store.sink(run_id="run-2")
    assert fault(lambda: sink.put(b"x", key())) == "foreign"
    assert read(source, late, sink.put(b"new", key(run_id="run-2"))) == ["missing", b"new"]
    assert source.usage().frames == 1
    assert store.counter("refused_run") == 3


def test_a_handle_that_was_changed_is_not_read(store: RunningStore) -> None:
    source = store.source()
    handle = store.sink().put(b"abcd", key())
    other = [handle.replace("len=4", "len=5"), handle.replace("/0?", "/1?"), handle.replace(STORE, "store-1")]
    assert read(source, *map(Handle, [*other, "nonsense"])) == ["damaged", "missing", "missing", "missing"]
    assert source.present([*map(Handle, [*other[1:], "nonsense"]), handle]) == [False, False, False, True]
    source.release(map(Handle, [*other[1:], "nonsense"]))
    assert read(source, handle) == [b"abcd"]
    assert store.do(store.server.status).counts.pins == 0


# -- clients that die -------------------------------------------------------------------------------------


def test_a_producer_that_dies_loses_nothing_that_it_committed(store: RunningStore) -> None:
    """It is killed with an answer unread, for which the kernel reports an error before the last commits."""
    producer = Bare(store.path)
    welcome = producer.hello("producer")
    assert isinstance(welcome, m.Welcome)
    for _ in range(20):
        producer.send(m.LeaseRequest(0))
        leased = producer.receive()
        assert isinstance(leased, m.Leased)
        producer.send(m.Commits([Commit(leased.first_seq, 5, 0, "a")]))
    handle = m.name_frame(STORE, welcome.instance, leased.first_seq, 5, 0)
    producer.send(m.LeaseRequest(0))
    assert select.select([producer.socket], [], [], 20)[0]  # the answer is there, and stays unread
    producer.send(m.Commits([Commit(leased.first_seq + 1024, 7, 0, "a")]))
    last = m.name_frame(STORE, welcome.instance, leased.first_seq + 1024, 7, 0)
    producer.close()
    source = store.source()
    assert source.present([handle, last]) == [True, True]
    source.forget(["a"])
    eventually(lambda: store.free() == 32)


def test_what_a_reader_held_is_free_when_it_dies(store: RunningStore) -> None:
    sink = store.sink()
    handle = sink.put(b"abcd", key())
    reader = Bare(store.path)
    reader.hello("reader")
    seq = m.find_frame(handle, STORE, store.server.instance)[0]
    reader.send(m.Pin([seq, seq]))
    reader.receive()
    sink.release([handle])
    sink.close()
    assert store.free() == 31
    reader.close()
    eventually(lambda: store.free() == 32)


def test_a_producer_killed_while_it_waits_leaves_the_queue(store: RunningStore) -> None:
    sink = store.sink()
    handles = fill(sink)
    for _ in range(3):
        producer = Bare(store.path)
        producer.hello("producer")
        producer.send(m.LeaseRequest(m.FOREVER))
        producer.close()
    sink.release(handles[:1])
    sink.put(b"x", key(), timeout=20)


# -- clients that lie -------------------------------------------------------------------------------------


@given(
    st.lists(st.binary(min_size=1, max_size=80), min_size=1, max_size=5),
    st.sampled_from([None, "producer", "reader", "control"]),
)
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_no_bytes_hurt_the_store(store: RunningStore, datagrams: list[bytes], role: Any) -> None:
    bare = Bare(store.path)
    if role is not None:
        bare.hello(role)
    try:
        for data in datagrams:
            bare.socket.send(data)
    except OSError:
        pass  # it was refused by then
    bare.close()
    sink, source = store.sink(), store.source()
    assert read(source, sink.put(b"abcd", key())) == [b"abcd"]
    source.forget(["t-0"])
    sink.close()
    source.close()


@pytest.mark.parametrize(
    ("role", "messages"),
    [
        (None, [m.UsageRequest()]),
        ("producer", [m.Hello("", "", "producer", "", "")]),
        ("producer", [m.Pin([0])]),
        ("producer", [m.Commits([Commit(0, 1, 0, "a")])]),
        ("producer", [m.LeaseRequest(0), m.Commits([Commit(0, 9, 0, "a"), Commit(0, 9, 0, "a")])]),
        ("producer", [m.LeaseRequest(0), m.Commits([Commit(0, SEGMENT + 1, 0, "a")])]),
        ("reader", [m.Unpin([0])]),
        ("reader", [m.Fetch([m.Piece(0, 0, 1)])]),
        ("reader", [m.Commits([])]),
        ("reader", [m.Release([])]),
        ("control", [m.Pin([0])]),
        ("control", [m.Done()]),
    ],
)
def test_a_violation_ends_the_connection(
    store: RunningStore, role: m.Role | None, messages: list[m.Message]
) -> None:
    bare = Bare(store.path)
    if role is not None:
        bare.hello(role)
    for message in messages:
        bare.send(message)
    assert bare.is_ended()
    assert store.counter("refused_protocol") == 1
    bare.close()
    eventually(lambda: store.do(store.server.status).counts.segments["leased"] == 0)


def test_a_client_that_does_not_read_is_given_up(store: RunningStore) -> None:
    bare = Bare(store.path)
    bare.hello("control")
    bare.socket.settimeout(0.2)
    with contextlib.suppress(TimeoutError, BrokenPipeError, ConnectionResetError):
        while True:
            bare.send(m.UsageRequest())
    eventually(lambda: not store.do(store.server.status).connections)
    assert store.source().usage().frames == 0
    bare.close()


def test_files_that_clients_send_are_closed(store: RunningStore) -> None:
    store.source().usage()
    bare = Bare(store.path)
    bare.hello("control")
    before = open_files()
    with Path(os.devnull).open() as file:
        for _ in range(50):
            socket.send_fds(bare.socket, [m.encode(m.UsageRequest())], [file.fileno()] * 100)
            bare.receive()
    eventually(lambda: open_files() == before)
    bare.close()


def test_connections_leave_no_files_behind(store: RunningStore) -> None:
    def come_and_go() -> None:
        sink = StoreSink(store.path, name="rollout-0", **IDENTITY)
        source = StoreSource(store.path, name="trainer-0", **IDENTITY)
        source.borrow(wanted(sink.put(b"abcd", key()))).release()
        source.forget(["t-0"])
        sink.close()
        source.close()
        with pytest.raises(TransportError):
            store.source(token="wrong")

    come_and_go()
    eventually(lambda: not store.do(store.server.status).connections)
    before = open_files()
    for _ in range(20):
        come_and_go()
    eventually(lambda: not store.do(store.server.status).connections)
    eventually(lambda: open_files() == before)


# -- a store that is restarted ----------------------------------------------------------------------------


def test_clients_go_on_when_their_store_comes_back(tmp_path: Path) -> None:
    store = RunningStore(tmp_path / STORE)
    sink, source = store.sink(), store.source()
    old = sink.put(b"old", key())
    borrowed = source.borrow(wanted(old))
    store.stop()
    assert bytes(view_of(borrowed)) == b"old"  # memory that is mapped stays
    with ThreadPoolExecutor(3) as pool:
        putting = pool.submit(sink.put, b"new", key(), timeout=20)
        reading = pool.submit(read, source, old)
        present = pool.submit(source.present, [old])
        with running(tmp_path / STORE) as store:
            new = putting.result(timeout=20)
            assert reading.result(timeout=20) == ["missing"]
            assert present.result(timeout=20) == [False]
            assert read(source, new) == [b"new"]
            assert fault(borrowed.release) == "failed"  # nobody can tell how its connection ended
            assert fault(lambda: sink.retain([new, old])) == "missing"
            sink.release([old, new])
            assert source.usage().frames == 0
            sink.close()
            source.close()


def test_a_store_that_stays_away_is_one_sentence(tmp_path: Path) -> None:
    store = RunningStore(tmp_path / STORE)
    sink, source = store.sink(timeout=0.1), store.source(timeout=0.1)
    handle = sink.put(b"old", key())
    reservation = sink.reserve(5, key())
    store.stop()
    assert fault(reservation.commit) == "failed"
    assert fault(lambda: sink.put(b"x", key(), timeout=0)) == "failed"
    assert fault(lambda: sink.put(b"x", key(), timeout=0.05)) == "failed"
    assert fault(sink.usage) == "failed"
    assert fault(lambda: sink.retain([handle])) == "failed"
    assert read(source, handle) == ["failed"]
    assert source.present([handle]) == [False]
    store.close()


def unreachable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have clients give up soon."""
    monkeypatch.setattr("tracerl.transport.ring.channel._GREETING_SECONDS", 0.1)
    monkeypatch.setattr("tracerl.transport.ring.control._TELL_SECONDS", 0.1)


@pytest.mark.parametrize("next_call", ["usage", "borrow", "present", "release", "put", "close"])
def test_what_a_stopped_store_was_not_told_it_is_told_later(
    store: RunningStore, monkeypatch: pytest.MonkeyPatch, next_call: str
) -> None:
    sink, source, other = store.sink(), store.source(), store.source()
    handles = [sink.put(b"x", key()) for _ in range(4)]
    lost = sink.put(b"x", key("lost"))
    sink.retain(handles[:1])
    client: Any = sink if next_call == "put" else source
    unreachable(monkeypatch)
    store.cut("control")
    with store.stopped():
        client.release(handles[:2])
        client.release(handles[:3])
        if next_call != "put":
            source.forget(["lost"])
    monkeypatch.undo()
    assert other.usage().frames == 5
    match next_call:
        case "borrow":
            assert read(source, handles[3]) == [b"x"]
        case "present":
            source.present([])
        case "release":
            source.release([])
        case "put":
            assert [sink.put(frame(SEGMENT), key("filler")) for _ in range(2)]
            other.forget(["filler", "lost"])
        case _:
            getattr(source, next_call)()
    eventually(lambda: other.present([*handles, lost]) == [False, False, False, True, False])


def test_what_an_earlier_store_was_not_told_is_not_told_to_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    unreachable(monkeypatch)
    store = RunningStore(tmp_path / STORE)
    sink, source = store.sink(), store.source()
    old = sink.put(b"old", key())
    store.stop()
    source.release([old])
    with running(tmp_path / STORE):
        new = sink.put(b"new", key(), timeout=20)
        assert m.find_frame(new, STORE, new.split("/")[3])[0] == 0  # the old one's number
        source.usage()
        assert read(source, new) == [b"new"]
        sink.close()
        source.close()


def test_a_retain_that_failed_after_all_adds_nothing(store: RunningStore) -> None:
    """Some of it was carried out before the store was stopped, and the rest afterwards."""
    sink, source = store.sink(timeout=0.3), store.source()
    handles = sink.put_many([(b"x", key())] * 50)
    for _ in range(3):
        with store.stopped():
            assert fault(lambda: sink.retain(handles)) == "failed"  # type: ignore[arg-type]
        sink.usage()
    source.release(handles)  # type: ignore[arg-type]
    eventually(lambda: source.usage().frames == 0)


def test_a_full_ring_says_what_it_holds_and_for_how_long_a_frame_has_waited(store: RunningStore) -> None:
    sink = store.sink()
    kept = [sink.put(b"x" * 100, key()) for _ in range(5)]
    filler = fill(sink)
    sink.release(filler)
    for number in range(31):  # a segment each
        store.sink(f"rollout-{number}").put(b"x" * 100, key(), timeout=20)
    with pytest.raises(TransportError) as caught:
        store.sink().put(b"x", key(), timeout=0)
    assert "(2 MiB) had no room: its 32 segments hold 36 frames, 3 KiB, that" in str(caught.value)
    results = sink.put_many([(b"x", key())] * 3, timeout=0.3)
    assert [result.fault for result in results] == ["full"] * 3  # type: ignore[union-attr]
    assert all("had no room for 0.3 s" in str(result) for result in results)
    assert kept


# -- lower tiers ------------------------------------------------------------------------------------------


def test_cold_frames_move_down_and_are_read_there(tmp_path: Path) -> None:
    tier = FileTier("spill", tmp_path)
    with running(tmp_path / STORE, tiers=[tier]) as store:
        sink, source = store.sink(), store.source()
        frames = [frame(30_000, number) for number in range(150)]
        handles = [sink.put(each, key(), timeout=20) for each in frames]
        usage = source.usage()
        assert (usage.frames, usage.frame_bytes) == (150, 150 * 30_000)
        eventually(lambda: store.free() >= 4)  # nothing is being moved
        before = open_files()
        assert read(source, *handles) == frames
        eventually(lambda: open_files() == before)
        counters = source.usage().counters
        assert counters["read_frames"] == 150
        assert counters["read_bytes_spill"] == 30_000 * len(tier.held)
        assert counters["read_bytes_ring"] == 30_000 * (150 - len(tier.held))
        assert store.counter("relocated_bytes_spill") == counters["read_bytes_spill"]
        with source.borrow([Wanted(handles[0], ((5, 9), (0, 30_000), (29_999, 30_000)))]) as borrowed:
            assert (
                [bytes(view) for view in borrowed.pieces[0]]
                == [  # type: ignore[union-attr]
                    frames[0][5:9],
                    frames[0],
                    frames[0][-1:],
                ]
            )
        source.release(handles[:75])
        source.forget(["t-0"])
        eventually(lambda: not tier.held)
        assert source.usage().frames == 0


def test_a_frame_that_is_pinned_or_released_while_it_moves(tmp_path: Path) -> None:
    tier = FileTier("spill", tmp_path)
    tier.gate.clear()
    with running(tmp_path / STORE, tiers=[tier]) as store:
        sink, source = store.sink(), store.source()
        small = [sink.put(frame(20_000, number), key(), timeout=20) for number in range(3)]
        others = [sink.put(frame(SEGMENT, number), key(), timeout=20) for number in range(29)]
        tier.taking.wait(20)
        borrowed = source.borrow(wanted(small[0]))
        source.release(small[1:2])
        source.present(others)
        tier.gate.set()
        eventually(lambda: store.do(store.server.status).counts.frames["spill"] >= 2)
        assert bytes(view_of(borrowed)) == frame(20_000, 0)
        assert [
            sentence(piece) if isinstance(piece, TransportError) else bytes(piece[0])[:9]
            for piece in source.borrow(wanted(*small)).pieces
        ] == [frame(20_000, 0)[:9], "missing", frame(20_000, 2)[:9]]
        counts = store.do(store.server.status).counts
        eventually(lambda: len(tier.held) == store.do(store.server.status).counts.frames["spill"])
        assert counts.frames["spill"] + counts.frames["ring"] == 31


def test_when_one_tier_is_full_the_next_is_asked(tmp_path: Path) -> None:
    spill, objects = FileTier("spill", tmp_path), FileTier("object", tmp_path, distant=True)
    spill.full = True
    with running(tmp_path / STORE, tiers=[spill, objects]) as store:
        sink, source = store.sink(), store.source()
        frames = [frame(SEGMENT - number, number) for number in range(60)]
        handles = [sink.put(each, key(), timeout=20) for each in frames]
        eventually(lambda: store.free() >= 4)  # nothing is being moved
        before = open_files()
        assert read(source, *handles) == frames  # several fetches, each of one segment
        with source.borrow([Wanted(handles[0], ((5, 9), (0, 100), (7, 7)) * 700)]) as borrowed:
            assert (
                [bytes(view) for view in borrowed.pieces[0]]
                == [  # type: ignore[union-attr]
                    frames[0][5:9],
                    frames[0][:100],
                    b"",
                ]
                * 700
            )
        objects.broken = True
        assert read(source, handles[0], handles[-1]) == ["failed", frames[-1]]
        eventually(lambda: open_files() == before)
        assert not spill.held
        assert store.counter("tier_errors_spill") > 0
        assert source.usage().counters["read_bytes_object"] > 60_000 * len(objects.held)
        assert store.do(store.server.status).counts.pins == 0


def test_when_no_tier_takes_them_frames_stay_until_one_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tracerl.transport.ring.server._RETRY_SECONDS", 0.02)
    tier = FileTier("spill", tmp_path)
    tier.full = True
    with running(tmp_path / STORE, tiers=[tier]) as store:
        sink, source = store.sink(), store.source()
        handles = fill(sink)
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(sink.put, b"late", key(), timeout=20)
            eventually(lambda: store.counter("tier_errors_spill") > 3)
            assert not waiting.done()
            tier.full = False
            assert read(source, waiting.result(timeout=20), *handles) == [
                b"late",
                *(frame(SEGMENT, number) for number in range(32)),
            ]


# -- the store's own process ------------------------------------------------------------------------------


def test_frames_are_read_in_the_stores_process(tmp_path: Path) -> None:
    tier = FileTier("spill", tmp_path)
    with running(tmp_path / STORE, tiers=[tier]) as store:
        sink = store.sink()
        frames = [frame(SEGMENT, number) for number in range(40)]
        handles = [sink.put(each, key(), timeout=20) for each in frames]

        async def read_all(run_id: str, wanted: list[Handle]) -> list[bytes | str]:
            answers: list[bytes | str] = []
            with store.server.reader(run_id) as reader:
                for location in reader.pin(wanted):
                    if isinstance(location, TransportError):
                        answers.append(sentence(location))
                    else:
                        answers.append(bytes(await reader.read(location, 1, location.length - 1)))
            return answers

        assert store.call(read_all, RUN, handles) == [each[1:-1] for each in frames]
        changed = Handle(handles[0].replace(f"len={SEGMENT}", "len=1"))
        assert store.call(read_all, RUN, [changed, Handle("nonsense")]) == ["damaged", "missing"]
        assert store.call(read_all, "run-2", handles[:1]) == ["foreign"]
        assert store.do(store.server.present, [*handles[:1], Handle("nonsense")]) == [True, False]
        store.do(store.server.retain, handles[:1])
        for there in (True, False):
            store.do(store.server.release, [*handles[:1], Handle("nonsense")])
            assert store.do(store.server.present, handles[:1]) == [there]
        store.do(store.server.forget, RUN, ["t-0"])
        assert store.do(store.server.usage).frames == 0
        status = store.do(store.server.status)
        assert status.counters["read_bytes_http"] == 40 * (SEGMENT - 2)
        assert status.connections == {"producer": 1, "control": 1}


# -- several threads and processes ------------------------------------------------------------------------


def test_many_threads_share_a_sink_and_a_source(tmp_path: Path) -> None:
    with running(tmp_path / STORE, tiers=[FileTier("spill", tmp_path)]) as store:
        sink, source = store.sink(), store.source()

        def work(number: int) -> int:
            generator = random.Random(number)
            for step in range(40):
                frames = [frame(generator.randrange(20_000), number * 1000 + step) for _ in range(3)]
                handles = sink.put_many([(each, key()) for each in frames], timeout=20)
                assert read(source, *handles) == frames  # type: ignore[arg-type]
                source.release(handles)  # type: ignore[arg-type]
            return number

        with ThreadPoolExecutor(6) as pool:
            assert list(pool.map(work, range(6))) == list(range(6))
        eventually(lambda: source.usage().frames == 0)
        assert store.do(store.server.status).counts.pins == 0


def test_a_producer_in_another_process_is_killed_in_the_middle(store: RunningStore) -> None:
    """Whatever it committed is whole; what it was writing is nowhere, and its segment comes back."""
    code = (
        "import sys; from pathlib import Path\n"
        "from tracerl.api.frames import FrameKey\n"
        "from tracerl.transport.ring.client import StoreSink\n"
        "sink = StoreSink(Path(sys.argv[1]), store='store-0', job_uid='job-uid', run_id='run-1',\n"
        "                 token='a secret', name='rollout-0', timeout=20)\n"
        "for number in range(1 << 30):\n"
        "    frame = bytes([number % 251]) * 3000\n"
        "    print(sink.put(frame, FrameKey('job-uid', 'run-1', 't', 0, 1, 0, 9, 1)), flush=True)\n"
    )
    source = store.source()
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(store.path)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    handles = [Handle(process.stdout.readline().strip()) for _ in range(50)]
    process.kill()
    rest = process.stdout.read().splitlines(keepends=True)
    process.wait()
    process.stdout.close()
    handles += [Handle(line.strip()) for line in rest if line.endswith("\n")]
    for number, data in enumerate(read(source, *handles)):
        assert data == bytes([number % 251]) * 3000
    source.forget(["t"])
    eventually(lambda: store.free() == 32)


_LISTEN = """
import os, socket, sys
os.setgid(12345), os.setuid(12345)
listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
listener.bind(sys.argv[1] + "/socket")
listener.listen()
print("listens", flush=True)
print(listener.accept()[0].recv(4096))
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as other users")
@pytest.mark.parametrize("parents_owner", [12_345, 0])
def test_the_token_is_shown_to_no_other_user(parents_owner: int) -> None:
    """Whoever owns the parent may have put the directory there; below root's own it is its maker's."""
    parent = Path(tempfile.mkdtemp(prefix="trt-", dir="/dev/shm"))
    store = parent / "store-0"
    store.mkdir()
    parent.chmod(0o1777)
    os.chown(store, 12_345, -1)
    os.chown(parent, parents_owner, -1)
    command = [sys.executable, "-c", _LISTEN, str(store)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as listener:
        assert listener.stdout is not None
        assert listener.stdout.readline() == "listens\n"
        with pytest.raises(TransportError) as caught:
            StoreSource(store, name="trainer-0", **{**IDENTITY, "timeout": 0.2})
        said = listener.stdout.read()
    shutil.rmtree(parent)
    assert (IDENTITY["token"] in said) == (parents_owner == 0)
    assert (caught.value.fault == "permission") == (parents_owner != 0)
