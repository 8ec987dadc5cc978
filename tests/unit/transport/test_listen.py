"""What peers without the token can do to a server, and what they cannot."""

from __future__ import annotations

import logging
import resource
import socket
import time
import zlib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from record_stores import TOKEN, ThreadStore, key, right, shared_directory, wait_until, wanted

from tracerl.transport import listen
from tracerl.transport.base import TransportError

HALF = b"POST /v1/read HTTP/1.1\r\nContent-Length: 1000000\r\n"
WITH_TOKEN = f"POST /v1/usage HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {TOKEN}\r\n".encode()
USAGE = WITH_TOKEN + b'Content-Length: 17\r\n\r\n{"runID":"run-1"}'


@pytest.fixture(autouse=True)
def nothing_was_logged_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listen._requests, "filters", [listen._Seldom()])


@contextmanager
def open_store() -> Iterator[ThreadStore]:
    with shared_directory() as directory:
        store = ThreadStore(directory / "store-0")
        try:
            yield store
        finally:
            store.close()


@contextmanager
def open_files(most: int) -> Iterator[None]:
    """Let this process have that many files open."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def connect(store: ThreadStore, data: bytes = b"") -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", urlsplit(store.url).port or 0), 20)
    connection.sendall(data)
    return connection


def is_open(connection: socket.socket) -> bool:
    connection.setblocking(False)
    try:
        return connection.recv(1) != b""
    except BlockingIOError:
        return True
    except OSError:
        return False


def answer(connection: socket.socket) -> bytes:
    """What comes until the server has nothing more to say; empty when it ended the connection."""
    connection.settimeout(20)
    try:
        return connection.recv(65_536)
    except ConnectionError:
        return b""


def number_open(connections: list[socket.socket]) -> int:
    return sum(map(is_open, connections))


def test_idle_connections_keep_nobody_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listen, "_CONNECTIONS", 16)
    with open_store() as store, ExitStack() as stack:
        idle = [stack.enter_context(connect(store, HALF)) for _ in range(50)]
        sink, far = store.sink(), store.far(timeout=10)
        handle = sink.put(b"abc" * 1000, key())
        with far.borrow(wanted([handle])) as borrowed:
            [piece] = borrowed.pieces
            assert not isinstance(piece, TransportError)
            assert right(handle, piece)
        wait_until(lambda: number_open(idle) < 16)
        # The newest ones stay for now: those that were there first had the time to show a token.
        assert is_open(idle[-1])
        sink.close()
        far.close()


def test_a_connection_ends_that_does_not_show_the_token_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listen, "_STRANGER_SECONDS", 0.5)
    with open_store() as store, ExitStack() as stack:
        guest = stack.enter_context(connect(store, USAGE))
        assert answer(guest).startswith(b"HTTP/1.1 200")
        refused = b"POST /v1/usage HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n{"
        heads = (b"", HALF, refused, b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        strangers = [stack.enter_context(connect(store, head)) for head in heads]
        assert answer(strangers[2]).startswith(b"HTTP/1.1 401")
        assert answer(strangers[3]).startswith(b"HTTP/1.1 200")
        wait_until(lambda: not number_open(strangers))
        guest.sendall(USAGE)
        assert answer(guest).startswith(b"HTTP/1.1 200")


def test_a_connection_too_many_is_closed_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listen, "_CONNECTIONS", 4)
    with open_store() as store, ExitStack() as stack:
        guests = [stack.enter_context(connect(store, USAGE)) for _ in range(4)]
        assert all(answer(guest).startswith(b"HTTP/1.1 200") for guest in guests)
        assert answer(stack.enter_context(connect(store))) == b""
        for guest in guests:
            guest.sendall(USAGE)
            assert answer(guest).startswith(b"HTTP/1.1 200")
        guests[0].close()
        wait_until(lambda: answer(stack.enter_context(connect(store, USAGE))).startswith(b"HTTP/1.1 200"))


async def processor_seconds() -> float:
    return time.thread_time()


def test_what_is_compressed_costs_nothing() -> None:
    packer = zlib.compressobj(9, zlib.DEFLATED, 31)
    bomb = b"".join(packer.compress(bytes(2**20)) for _ in range(256)) + packer.flush()
    head = b"POST /v1/usage HTTP/1.1\r\nHost: x\r\nContent-Encoding: gzip\r\nContent-Length: %d\r\n\r\n"
    with open_store() as store, ExitStack() as stack:
        before = store.on_loop(processor_seconds())
        for _ in range(12):
            bomber = stack.enter_context(connect(store, head % len(bomb) + bomb))
            # The answer comes before the body is read; closing comes after that.
            bomber.shutdown(socket.SHUT_WR)
            assert answer(bomber).startswith(b"HTTP/1.1 401")
            while answer(bomber):
                pass
        assert store.on_loop(processor_seconds()) - before < 0.3
        # Nor with the token.
        packed = zlib.compress(b'{"runID": "run-1"}', wbits=31)
        encoded = b"Content-Encoding: gzip\r\nContent-Length: %d\r\n\r\n" % len(packed)
        assert answer(stack.enter_context(connect(store, WITH_TOKEN + encoded + packed))).startswith(
            b"HTTP/1.1 400"
        )


def test_without_descriptors_connections_wait_and_the_log_stays_short(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listen, "_PAUSE_SECONDS", 0.01)
    with open_store() as store, ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(20)]
        with open_files(max(int(each.name) for each in Path("/proc/self/fd").iterdir()) + 1):
            fillers = []
            while True:  # until there is no number left below the limit
                try:
                    fillers.append(stack.enter_context(Path("/dev/null").open()))
                except OSError:
                    break
            for each in sockets:
                each.connect(("127.0.0.1", urlsplit(store.url).port))
                each.sendall(USAGE)
            time.sleep(0.5)
            said = [record for record in caplog.records if record.levelno >= logging.WARNING]
            assert 1 <= len(said) <= 10
            assert all(record.exc_info is None for record in said)
            assert "Too many open files" in said[0].getMessage()
        assert all(answer(each).startswith(b"HTTP/1.1 200") for each in sockets)


def test_malformed_requests_do_not_fill_the_log(caplog: pytest.LogCaptureFixture) -> None:
    with open_store() as store, ExitStack() as stack:
        for _ in range(40):
            connection = stack.enter_context(connect(store, b"GET / HTTP/1.1\r\nbad header\r\n\r\n"))
            assert answer(connection).startswith(b"HTTP/1.0 400")
        assert len(caplog.records) == 10
