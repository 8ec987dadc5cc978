from __future__ import annotations

import http.client
import json
import random
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from urllib.parse import urlsplit

import pytest
from record_stores import TOKEN, ThreadStore, frames_of, key, right, shared_directory, wait_until, wanted

from tracerl.api.frames import Handle, format_handle, parse_handle
from tracerl.transport.base import TransportError, Wanted
from tracerl.transport.remote import RemoteSource
from tracerl.transport.store import wire
from tracerl.transport.store.http import _READS, _WINDOW_BYTES

_SEED = 20_261_129


@pytest.fixture
def store() -> Iterator[ThreadStore]:
    with shared_directory() as directory:
        store = ThreadStore(directory / "store-0")
        yield store
        store.close()


def fault_of(piece: list[memoryview] | TransportError) -> str:
    assert isinstance(piece, TransportError)
    return piece.fault


def post(store: ThreadStore, path: str, body: object, token: str | None = TOKEN) -> tuple[int, bytes]:
    """Status and body of a request by a client that is not ours."""
    connection = http.client.HTTPConnection(urlsplit(store.url).netloc, timeout=30)
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    headers = {} if token is None else {"Authorization": f"Bearer {token}"}
    try:
        connection.request("POST", path, data, headers)
        response = connection.getresponse()
        return response.status, response.read()
    finally:
        connection.close()


def test_frames_arrive_as_they_were_put(store: ThreadStore) -> None:
    frames = frames_of(_SEED, [0, 1, 63, 64, 65, 65_535, 65_536, 1_000, 40_000, 3])
    sink, source = store.sink(), store.far()
    handles = [sink.put(frame, key(row=row)) for row, frame in enumerate(frames)]
    with source.borrow(wanted(handles)) as borrowed:
        assert [bytes(piece[0]) for piece in borrowed.pieces] == frames
        assert all(right(handle, piece) for handle, piece in zip(handles, borrowed.pieces, strict=True))
        assert borrowed.pieces[1][0].readonly
        kept = borrowed.pieces[1][0]
    with pytest.raises(ValueError, match="released"):
        bytes(kept)
    assert source.usage().counters == {
        "http_retries": 0,
        "read_bytes_http": sum(map(len, frames)),
        "read_frames": len(frames),
    }
    source.close()
    sink.close()


def test_ranges_give_exactly_their_bytes(store: ThreadStore) -> None:
    chance = random.Random(_SEED)
    frames = frames_of(_SEED, [chance.randrange(1, 60_000) for _ in range(20)])
    sink, source = store.sink(), store.far()
    handles = [sink.put(frame, key()) for frame in frames]
    asked = []
    for _ in range(300):
        index = chance.randrange(len(frames))
        # Several ranges, in any order, over one another, and empty ones.
        ranges = []
        for _ in range(chance.randrange(5)):
            start = chance.randrange(len(frames[index]) + 1)
            ranges.append((start, chance.randrange(start, len(frames[index]) + 1)))
        asked.append((index, tuple(ranges)))
    with source.borrow([Wanted(handles[index], ranges) for index, ranges in asked]) as borrowed:
        found = [[bytes(view) for view in piece] for piece in borrowed.pieces]
    assert found == [[frames[index][a:b] for a, b in ranges] for index, ranges in asked]
    with pytest.raises(ValueError, match="does not lie in a frame"):
        source.borrow([Wanted(handles[0], ((0, len(frames[0]) + 1),))])
    source.close()
    sink.close()


def test_reads_that_are_larger_than_one_request(store: ThreadStore) -> None:
    frames = frames_of(_SEED, [50_000] * 20)
    sink, source = store.sink(), store.far()
    handles = [sink.put(frame, key()) for frame in frames]
    chance = random.Random(_SEED)
    order = [chance.randrange(20) for _ in range(700)]
    with source.borrow(wanted([handles[index] for index in order])) as borrowed:
        assert all(piece[0] == frames[index] for index, piece in zip(order, borrowed.pieces, strict=True))
    source.close()
    sink.close()


def test_what_cannot_be_read_fails_alone_and_says_why(store: ThreadStore) -> None:
    sink, source = store.sink(), store.far()
    good, gone = sink.put(b"good", key()), sink.put(b"gone", key())
    sink.release([gone])
    parts = parse_handle(good)
    instance, _, seq = parts.name.partition("/")
    asked = {
        good: "",
        gone: "missing",
        format_handle("store-0", f"{instance}/999999", 4, parts.xxh3): "missing",
        format_handle("store-0", f"{'0' * 16}/{seq}", 4, parts.xxh3): "missing",
        format_handle("store-7", parts.name, 4, parts.xxh3): "missing",
        format_handle("store-0", parts.name, 3, parts.xxh3): "damaged",
        format_handle("store-0", parts.name, 2**62, parts.xxh3): "damaged",
        Handle("rec://store-0"): "missing",
    }
    with source.borrow(wanted([*asked])) as borrowed:
        assert borrowed.pieces[0][0] == b"good"
        assert [fault_of(piece) for piece in borrowed.pieces[1:]] == [*asked.values()][1:]
    assert source.present([*asked]) == [True, False, False, False, False, True, True, False]
    source.close()
    sink.close()


def test_a_reader_without_the_token_is_refused(store: ThreadStore) -> None:
    sink = store.sink()
    handle = sink.put(b"secret", key())
    body = {"runID": "run-1", "frames": [{"handle": handle}]}
    for token in (None, "", "wrong", TOKEN + "x"):
        for path in ("list", "read", "present", "release", "forget", "start_run", "usage", "nothing"):
            status, answer = post(store, f"/v1/{path}", body, token)
            assert status == 401
            assert json.loads(answer)["error"]["fault"] == "foreign"
            assert b"secret" not in answer
    source = store.far(token="wrong")
    with source.borrow(wanted([handle])) as borrowed:
        assert fault_of(borrowed.pieces[0]) == "foreign"
    with pytest.raises(TransportError, match="the bearer token is missing or wrong") as caught:
        source.release([handle])
    assert caught.value.fault == "foreign"
    assert store.far().present([handle]) == [True]
    assert store.server.refused["token"] == 4 * 8 + 2
    source.close()
    sink.close()


def test_an_earlier_run_is_refused(store: ThreadStore) -> None:
    earlier_sink, earlier = store.sink(), store.far()
    old = earlier_sink.put(b"old", key("a"))
    now = store.far("run-2")
    now.start_run()
    sink = store.sink("run-2")
    new = sink.put(b"new", key("a", "run-2"))
    late = earlier_sink.put(b"late", key("b"))
    for source, handles, faults in (
        (earlier, [old, late, new], ["foreign", "foreign", "foreign"]),
        (now, [old, late], ["missing", "missing"]),
    ):
        with source.borrow(wanted(handles)) as borrowed:
            assert [fault_of(piece) for piece in borrowed.pieces] == faults
    earlier.forget(["a"])
    with now.borrow(wanted([new])) as borrowed:
        assert borrowed.pieces[0][0] == b"new"
    for client in (earlier_sink, earlier, now, sink):
        client.close()


def test_references_go_once_each(store: ThreadStore) -> None:
    sink, source = store.sink(), store.far()
    handles = [sink.put(bytes([row]) * 10, key(f"t-{row}")) for row in range(5)]
    sink.retain(handles[:1])
    assert source.usage().frames == 5
    assert source.usage().frame_bytes == 50
    source.release(handles[:2])
    assert source.present(handles) == [True, False, True, True, True]
    # An answer that is lost on the way makes the client ask again, with the same id.
    body = {"runID": "run-1", "handles": [handles[2]], "request": "0123456789abcdef"}
    sink.retain([handles[2], handles[2]])
    for _ in range(3):
        assert post(store, "/v1/release", body)[0] == 200
    source.release([handles[2]])
    assert source.present(handles[2:3]) == [True]
    source.forget(["t-0", "t-2", "t-3", "t-9"])
    assert source.present(handles) == [False, False, False, False, True]
    source.release(handles)
    assert source.usage().frames == 0
    source.close()
    sink.close()


def silent(call: Callable[[], object]) -> bool:
    with pytest.raises(TransportError, match="did not answer") as caught:
        call()
    return caught.value.fault == "failed"


def test_a_release_that_failed_is_made_later_and_once(store: ThreadStore) -> None:
    sink, source = store.sink(), store.far()
    handles = [sink.put(b"x", key(f"t-{row}")) for row in range(5)]
    sink.retain(handles[:2])
    # The first request is carried out, but its answer is lost; later ones reach nobody for a while.
    proxy = Proxy(store.url, [0])
    urls: list[str | None] = [proxy.url]
    leaving = RemoteSource("store-0", lambda: urls[-1], token=TOKEN, run_id="run-1", timeout=0.0)
    assert silent(lambda: leaving.release(handles[:1]))
    wait_until(lambda: source.usage().frames == 5)
    urls.append(None)
    assert silent(lambda: leaving.release(handles[:3]))
    assert silent(lambda: leaving.forget(["t-3", "t-4"]))
    assert silent(leaving.usage)
    assert source.present(handles) == [True] * 5
    urls.append(proxy.url)
    with leaving.borrow(wanted(handles[4:])) as borrowed:
        assert borrowed.pieces[0][0] == b"x"
    assert source.present(handles) == [False, True, False, False, False]
    urls.append(None)
    assert silent(lambda: leaving.release(handles[1:2]))
    urls.append(store.url)
    leaving.close()
    assert source.usage().frames == 0
    proxy.close()
    source.close()
    sink.close()


def test_a_release_that_is_refused_is_not_kept(store: ThreadStore) -> None:
    source = store.far(token="wrong")
    for tell in (
        lambda: source.release([Handle("rec://store-0/0/0?len=0&xxh3=0")]),
        lambda: source.forget([""]),
    ):
        with pytest.raises(TransportError, match="store-0"):
            tell()
    assert not source._kept
    source.close()


# -- lists ------------------------------------------------------------------------------------------------


def test_a_list_has_all_runs_in_bounded_pages_and_keeps_nothing(store: ThreadStore) -> None:
    frames = [(b"x" * row, key(f"t-{row}", row=row)) for row in range(wire.MAX_FRAMES + 5)]
    sink, other, source = store.sink(), store.sink("run-2"), store.far("")
    handles = sink.put_many(frames)
    handles += other.put_many([(b"y", key("of-2", "run-2"))])
    gone = sink.put(b"gone", key())
    sink.release([gone])
    pages = list(source.pages())
    assert [len(page) for page in pages] == [wire.MAX_FRAMES, 6, 0]
    listed = [each for page in pages for each in page]
    assert [each.handle for each in listed] == handles
    assert listed[7][1:] == ("ring", "run-1", "t-7")
    assert listed[-1][1:] == ("ring", "run-2", "of-2")
    assert store.ring.status().counts.pins == 0
    sink.release(handles)
    assert [*store.far().pages()] == [[]]
    for client in (sink, other, source):
        client.close()


def test_a_list_ends_although_frames_are_put_meanwhile(store: ThreadStore) -> None:
    sink, source = store.sink(), store.far()
    more = [(b"x", key())] * (wire.MAX_FRAMES + 1)
    first = sink.put_many(more)
    listed = []
    for page in source.pages():
        listed += [each.handle for each in page]
        assert len(listed) < 4 * len(more)
        sink.put_many(more)
    assert listed[: len(first)] == first
    source.close()
    sink.close()


def test_a_list_of_long_names_is_bounded_in_bytes(store: ThreadStore) -> None:
    sink, source = store.sink(), store.far()
    handles = sink.put_many([(b"x", key("\x01" * 1_024, row=row)) for row in range(300)])
    status, answer = post(store, "/v1/list", {"cursor": None})
    assert status == 200
    assert 400 * 2**10 < len(answer) < 600 * 2**10
    assert [each.handle for page in source.pages() for each in page] == handles
    source.close()
    sink.close()


@pytest.mark.parametrize(
    ("cursor", "said"),
    [
        (5, "cursor: "),
        ([], "cursor: "),
        ("x" * 65, "cursor: "),
        ("", "begin with null"),
        ("{instance}/0", "begin with null"),
        ("{instance}/-1/5", "begin with null"),
        ("{instance}/1/5 ", "begin with null"),
        ("{instance}/1/5\n", "begin with null"),
        ("{instance}/\u0661/5", "begin with null"),
        ("{instance}/0/" + "9" * 20, "begin with null"),
        ("../../etc/passwd", "begin with null"),
        ("0123456789abcdef/0/5", "the store was restarted"),
    ],
)
def test_a_cursor_that_is_none_is_refused(store: ThreadStore, cursor: object, said: str) -> None:
    if isinstance(cursor, str):
        cursor = cursor.replace("{instance}", store.ring.instance)
    status, answer = post(store, "/v1/list", {"cursor": cursor})
    assert status == 400
    assert said in json.loads(answer)["error"]["message"]
    assert store.server.refused["protocol"] == 1


def test_cursors_that_lead_nowhere_end_the_list(store: ThreadStore) -> None:
    sink = store.sink()
    sink.put(b"x", key())
    for span in ("5/2", "0/0", "1/1", f"{'9' * 19}/{'9' * 19}"):
        status, answer = post(store, "/v1/list", {"cursor": f"{store.ring.instance}/{span}"})
        assert (status, json.loads(answer)) == (200, {"frames": [], "next": None})
    sink.close()


# -- a network that fails ---------------------------------------------------------------------------------


class Proxy:
    """Forwards to a server, and cuts the n-th connection after as many bytes as `cuts` says."""

    def __init__(self, target: str, cuts: list[int]) -> None:
        self._target = (urlsplit(target).hostname, urlsplit(target).port)
        self._cuts = list(cuts)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            left = self._cuts.pop(0) if self._cuts else None
            threading.Thread(target=self._serve, args=(client, left), daemon=True).start()

    def _serve(self, client: socket.socket, left: int | None) -> None:
        with client, socket.create_connection(self._target) as server:
            threading.Thread(target=_copy, args=(client, server), daemon=True).start()
            while data := server.recv(2**16 if left is None else max(1, min(left, 2**16))):
                if left is not None:
                    data = data[:left]
                    left -= len(data)
                try:
                    client.sendall(data)
                    if left == 0:
                        # Closing alone would wait for the other thread.
                        client.shutdown(socket.SHUT_RDWR)
                        return
                except OSError:
                    return

    def close(self) -> None:
        self._listener.close()


def _copy(source: socket.socket, target: socket.socket) -> None:
    try:
        while data := source.recv(2**16):
            target.sendall(data)
    except OSError:
        pass


def test_connections_that_are_cut_are_made_again(store: ThreadStore) -> None:
    frames = frames_of(_SEED, [60_000, 10, 5_000, 0, 30_000])
    sink = store.sink()
    handles = [sink.put(frame, key()) for frame in frames]
    # At once, in the head, in a record's head, in a frame, between two, before the end.
    proxy = Proxy(store.url, [0, 20, 220, 400, 60_300, 65_300, 95_350])
    source = RemoteSource("store-0", lambda: proxy.url, token=TOKEN, run_id="run-1", timeout=30)
    for _ in range(3):
        with source.borrow(wanted(handles)) as borrowed:
            assert [bytes(piece[0]) for piece in borrowed.pieces] == frames
    assert source.usage().counters["http_retries"] >= 5
    source.close()
    proxy.close()
    sink.close()


@pytest.mark.parametrize("answer", [b"", b"x" * 5_000, b"HTTP/1.1 200 OK\r\n\r\n", b"garbage"])
def test_a_server_that_is_none_is_given_up_with_a_sentence(answer: bytes) -> None:
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        while True:
            try:
                client, _ = listener.accept()
            except OSError:
                return
            with client:
                client.recv(2**16)
                client.sendall(answer)

    threading.Thread(target=serve, daemon=True).start()
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    source = RemoteSource("store-0", lambda: url, token=TOKEN, run_id="run-1", timeout=0.2)
    handle = format_handle("store-0", f"{'0' * 16}/0", 4, 0)
    with source.borrow(wanted([handle])) as borrowed:
        [error] = borrowed.pieces
    assert fault_of(error) == "failed"
    assert "store-0 did not answer for 0.2 s" in str(error)
    with pytest.raises(TransportError, match="did not answer"):
        source.usage()
    source.close()
    listener.close()


def test_a_store_that_is_not_there_is_waited_for_until_the_deadline() -> None:
    source = RemoteSource("store-0", lambda: None, token=TOKEN, run_id="run-1", timeout=0.1)
    with pytest.raises(TransportError, match=r"store-0 did not answer for 0\.1 s \(it is not running\)"):
        source.usage()
    source.close()


def test_a_store_that_was_started_again_elsewhere_is_found() -> None:
    with shared_directory() as directory:
        first = ThreadStore(directory / "store-0")
        urls: list[str | None] = [first.url]
        source = RemoteSource("store-0", lambda: urls[-1], token=TOKEN, run_id="run-1", timeout=30)
        sink = first.sink()
        old = sink.put(b"old", key())
        assert source.present([old]) == [True]
        sink.close()
        first.close()
        urls.append(None)
        answers: list[list[bool]] = []
        asking = threading.Thread(target=lambda: answers.append(source.present([old])))
        asking.start()
        second = ThreadStore(directory / "store-0")
        urls.append(second.url)
        asking.join()
        assert answers == [[False]]
        sink = second.sink()
        new = sink.put(b"new", key())
        with source.borrow(wanted([old, new])) as borrowed:
            assert fault_of(borrowed.pieces[0]) == "missing"
            assert "was restarted" in str(borrowed.pieces[0])
            assert borrowed.pieces[1][0] == b"new"
        source.close()
        sink.close()
        second.close()


def test_closing_ends_what_waits() -> None:
    listener = socket.create_server(("127.0.0.1", 0))  # accepts, and never answers
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    source = RemoteSource("store-0", lambda: url, token=TOKEN, run_id="run-1", timeout=600)
    handle = format_handle("store-0", f"{'0' * 16}/0", 4, 0)
    finish = source.start(wanted([handle] * 3))
    client, _ = listener.accept()
    client.recv(2**16)
    source.close()
    with finish() as borrowed:
        assert {fault_of(piece) for piece in borrowed.pieces} == {"failed"}
    client.close()
    listener.close()


# -- what others may send ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"\xff\xfe",
        {"runID": "run-1"},
        {"runID": 1, "frames": []},
        {"runID": "", "frames": []},
        {"runID": "run-1", "frames": [], "more": 1},
        {"runID": "run-1", "frames": [{"handle": 5}]},
        {"runID": "run-1", "frames": [{"handle": "x" * 5_000}]},
        {"runID": "run-1", "frames": [{"handle": "x", "ranges": [[1]]}]},
        {"runID": "run-1", "frames": [{"handle": "x", "ranges": [[-1, 2]]}]},
        {"runID": "run-1", "frames": [{"handle": "x", "ranges": [[0, 2**64]]}]},
        {"runID": "run-1", "frames": [{"handle": "x"}] * (wire.MAX_FRAMES + 1)},
        {"runID": "run-1", "frames": [{"handle": "x", "ranges": [[0, 0]] * (wire.MAX_RANGES + 1)}]},
    ],
)
def test_a_body_that_is_none_is_refused(store: ThreadStore, body: object) -> None:
    status, answer = post(store, "/v1/read", body)
    assert status == 400
    assert json.loads(answer)["error"]["message"]


def test_too_long_a_body_is_refused(store: ThreadStore) -> None:
    status, answer = post(store, "/v1/forget", b" " * (wire.MAX_BODY_BYTES + 1))
    assert status == 413
    assert "ask for fewer frames" in json.loads(answer)["error"]["message"]


def test_a_range_outside_of_its_frame_is_told_in_the_answer(store: ThreadStore) -> None:
    sink = store.sink()
    handle = sink.put(b"good", key())
    for bad in ([0, 5], [3, 2], [2**40, 2**41]):
        frames = [{"handle": handle, "ranges": [[0, 1], bad]}, {"handle": handle}]
        status, answer = post(store, "/v1/read", {"runID": "run-1", "frames": frames})
        kind, fault, length = wire.RECORD.unpack_from(answer)
        assert (status, kind, wire.FAULTS[fault]) == (200, wire.ERROR, "failed")
        head, done, end = (
            wire.RECORD.pack(k, 0, n) for k, n in [(wire.DATA, 4), (wire.DONE, 0), (wire.END, 0)]
        )
        assert answer[8 + length :] == head + b"good" + done + end
    sink.close()


@contextmanager
def stalled(store: ThreadStore, body: bytes) -> Iterator[socket.socket]:
    """A client that asks, and takes nothing of the answer."""
    target = urlsplit(store.url)
    with socket.create_connection((target.hostname, target.port)) as client:
        head = (
            f"POST /v1/read HTTP/1.1\r\nHost: store\r\nAuthorization: Bearer {TOKEN}\r\n"
            f"Content-Length: {len(body)}\r\n\r\n"
        )
        client.sendall(head.encode() + body)
        yield client


def test_readers_that_take_nothing_are_bounded_and_hold_up_nobody(store: ThreadStore) -> None:
    sink, source = store.sink(), store.far()
    handle = sink.put(bytes(64_000), key())
    body = json.dumps({"runID": "run-1", "frames": [{"handle": handle}] * wire.MAX_FRAMES}).encode()

    def readers() -> float:
        """How many reads have frames pinned: about 4 MiB each, however much was asked for."""
        return store.ring.status().counts.pins / -(-_WINDOW_BYTES // 64_000)

    with ExitStack() as stack:
        clients = [stack.enter_context(stalled(store, body)) for _ in range(_READS + 5)]
        wait_until(lambda: readers() == _READS)
        # All others wait: their turn comes when one of those goes.
        assert source.present([handle]) == [True]
        for client in clients[:_READS]:
            client.close()
        wait_until(lambda: readers() == 5)
        with source.borrow(wanted([handle])) as borrowed:
            assert right(handle, borrowed.pieces[0])
    wait_until(lambda: readers() == 0)
    source.close()
    sink.close()


def test_a_reader_that_takes_nothing_for_long_is_cut_off(
    store: ThreadStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tracerl.transport.store.http._STALLED_SECONDS", 0.05)
    sink = store.sink()
    handle = sink.put(bytes(64_000), key())
    body = json.dumps({"runID": "run-1", "frames": [{"handle": handle}] * wire.MAX_FRAMES}).encode()
    with stalled(store, body) as client:
        wait_until(lambda: store.ring.status().counters["read_bytes_http"] > 0)
        wait_until(lambda: store.ring.status().counts.pins == 0)
        answer = bytearray()
        while data := client.recv(2**20):
            answer += data
        assert len(answer) < wire.MAX_FRAMES * 64_000
    sink.close()


def test_a_frame_that_is_released_while_it_is_sent_ends_in_an_error(
    store: ThreadStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    # So that a frame is sent in several windows, as one of many MiB is.
    monkeypatch.setattr("tracerl.transport.store.http._WINDOW_BYTES", 2**15)
    monkeypatch.setattr("tracerl.transport.store.wire.MAX_DATA_BYTES", 10_000)
    [frame] = frames_of(_SEED, [60_000])
    sink, source = store.sink(), store.far()
    handle = sink.put(frame, key())
    with source.borrow(wanted([handle] * 3)) as borrowed:
        assert all(piece[0] == frame for piece in borrowed.pieces)
    body = json.dumps({"runID": "run-1", "frames": [{"handle": handle}] * wire.MAX_FRAMES}).encode()
    with stalled(store, body) as client:
        wait_until(lambda: store.ring.status().counters["read_bytes_http"] > 10 * len(frame))
        source.release([handle])
        response = http.client.HTTPResponse(client)
        response.begin()
        complete, failed, parts = 0, 0, bytearray()
        while True:
            kind, fault, length = wire.RECORD.unpack(response.read(wire.RECORD.size))
            if kind == wire.END:
                break
            if kind == wire.DATA:
                parts += response.read(length)
                assert frame.startswith(parts)
            elif kind == wire.DONE:
                assert parts == frame
                complete, parts = complete + 1, bytearray()
            else:
                assert wire.FAULTS[fault] == "missing"
                assert b"was released" in response.read(length)
                failed, parts = failed + 1, bytearray()
    assert complete + failed == wire.MAX_FRAMES
    assert min(complete, failed) > 0
    source.close()
    sink.close()
