"""A client's connection to a store, which is made again when the store was restarted."""

from __future__ import annotations

import contextlib
import os
import select
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

from tracerl.transport.base import TransportError
from tracerl.transport.retry import Deadline
from tracerl.transport.ring import messages as m
from tracerl.transport.ring.file import SOCKET, map_ring
from tracerl.transport.ring.segments import ProtocolError

_SEND_BUFFER = 1 << 20
"""Bytes. Holds some thousand commits, for a store that does not get a turn for a while."""
_MAX_DESCRIPTORS = 253
_FIRST_PAUSE, _LONGEST_PAUSE = 0.005, 0.1
"""Seconds between attempts to connect."""
_GREETING_SECONDS = 5.0

_Answer = TypeVar("_Answer", bound=m.Message)


class LostError(Exception):
    """The connection has ended: the store is gone, or will have nothing more to do with this client."""

    def __init__(self, store: str) -> None:
        super().__init__(f"the connection to {store} was lost; see {store}'s log")

    def explain(self) -> TransportError:
        """Say it to people."""
        return TransportError("failed", str(self))


class _LateError(TransportError):
    """The store may still answer, and then to a question that nobody asks any more."""


class Session:
    """One connection to one process of a store.

    Requests take turns. What needs no answer may be sent between a request and its answer. A request whose
    answer is late fails alone: the connection goes on, and the next request waits for that answer first.
    """

    def __init__(
        self,
        connection: socket.socket,
        welcome: m.Welcome,
        memory: memoryview,
        nudge: Callable[[], None] | None,
    ) -> None:
        self.welcome = welcome
        self.memory = memory
        """All bytes of the ring, writable for producers, empty for control. Unmapped with its last view."""
        self._socket = connection
        self._nudge = nudge
        self._asking = threading.Lock()
        self._sending = threading.Lock()
        self._lost = False
        self._owed: Callable[[m.Message], None] | None = None
        """Set while an answer is still to come that nobody waits for: what is to be done about it."""

    def tell(self, message: m.Message, deadline: Deadline) -> None:
        """Send what needs no answer. LostError; TransportError when the store does not take it in time."""
        with _held(self._sending, deadline, self.welcome.store):
            if self._lost:
                raise LostError(self.welcome.store)
            _send(self._socket, message, deadline, self.welcome.store, self._nudge)

    def ask(
        self,
        message: m.Message,
        kind: type[_Answer],
        deadline: Deadline,
        late: Callable[[m.Message], None] | None = None,
    ) -> _Answer:
        """Send a request and return its answer. LostError; TransportError when it is refused or late."""
        with self.asking(message, kind, deadline, late) as (answer, _):
            return answer

    @contextlib.contextmanager
    def asking(
        self,
        message: m.Message,
        kind: type[_Answer],
        deadline: Deadline,
        late: Callable[[m.Message], None] | None = None,
    ) -> Iterator[tuple[_Answer, list[int]]]:
        """Like `ask`; gives the descriptors that came with the answer too, and closes them at the end.

        `late` is called with an answer that comes when this has failed already, to undo what was done.
        """
        with _held(self._asking, deadline, self.welcome.store):
            self._receive_owed(deadline)
            self.tell(message, deadline)
            if self._nudge is not None:
                self._nudge()
            try:
                answer, files = _receive(self._socket, kind, deadline, self.welcome.store)
            except _LateError:
                self._owed = late or _ignore
                raise
            except BaseException:
                self.lose()  # nobody knows what would be received next
                raise
        try:
            if isinstance(answer, m.Refused):
                raise TransportError(answer.fault, answer.message)
            yield answer, files
        finally:
            _close_all(files)

    def receive_late(self) -> None:
        """Receive an answer that was late, if it is there by now. Does nothing when the connection ended."""
        if self._owed is None:
            return
        with contextlib.suppress(LostError, TransportError), _held(self._asking, Deadline(0), ""):
            self._receive_owed(Deadline(0))

    def _receive_owed(self, deadline: Deadline) -> None:
        """Receive the answer that came too late for its request: the store answers one after the other."""
        if self._owed is None:
            return
        try:
            answer, files = _receive_any(self._socket, deadline, self.welcome.store)
        except _LateError:
            raise
        except BaseException:
            self.lose()
            raise
        _close_all(files)
        owed, self._owed = self._owed, None
        owed(answer)

    def is_alive(self) -> bool:
        """Whether the connection has not ended on either side until now.

        The store closes its end before it lets go of what this client has pinned, and this side is marked
        as lost before its end is shut down. So what was pinned was so at least until this returned True.
        """
        if self._lost:
            return False
        poll = select.poll()
        try:
            poll.register(self._socket, 0)
        except ValueError:  # closed by another thread
            return False
        # Hang-ups and errors are always told. If another thread has closed the socket meanwhile, that was
        # about a file that has its number now.
        return not poll.poll(0) and not self._lost

    def lose(self) -> None:
        """End the connection; who waits for an answer in another thread gets LostError."""
        self._lost = True
        with contextlib.suppress(OSError):  # the other end may be gone
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """End the connection and close its socket."""
        self.lose()
        # Not while another thread uses the descriptor, whose number the next file will have.
        with self._asking, self._sending:
            self._socket.close()


class Channel:
    """Sessions with a store, one after the other."""

    def __init__(
        self, directory: Path, hello: m.Hello, store: str, nudge: Callable[[], None] | None = None
    ) -> None:
        """Prepare to connect. Producers are not listened to at all times, so they need a `nudge`."""
        self._path = directory / SOCKET
        self._hello = hello
        self._store = store
        self._nudge = nudge
        self._lock = threading.Lock()
        self._session: Session | None = None
        self._closed = threading.Event()

    def session(self, deadline: Deadline) -> Session:
        """Give the session, a new one if the last was lost.

        TransportError ``failed`` when the store does not come back in time, else if it refuses this client.
        """
        with _held(self._lock, deadline, self._store):
            if self._session is not None and not self._session.is_alive():
                self._session.close()
                self._session = None
            if self._session is None:
                self._session = self._connect(deadline)
            return self._session

    def nudge(self) -> None:
        """Have the store listen to its producers. If that does not reach it, it does so a little later."""
        session = self._session
        if session is not None:
            with contextlib.suppress(LostError, TransportError):
                session.tell(m.Nudge(), Deadline(0))

    def close(self) -> None:
        """End the session; no other can be had."""
        self._closed.set()
        with self._lock:
            if self._session is not None:
                self._session.close()
                self._session = None

    def _connect(self, deadline: Deadline) -> Session:
        pause = _FIRST_PAUSE
        while True:
            if self._closed.is_set():
                raise TransportError("failed", f"the connection to {self._store} was closed; open another")
            connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            try:
                return self._greet(connection, deadline)
            except BaseException as error:
                connection.close()
                if isinstance(error, PermissionError):
                    raise TransportError(
                        "permission",
                        f"{self._path} cannot be opened; run {self._hello.name} as the user or in the "
                        f"group of {self._store}",
                    ) from None
                if not isinstance(error, (OSError, LostError)):
                    raise
                if deadline.passed():
                    raise TransportError(
                        "failed", f"{self._store} does not listen on {self._path}; see its log"
                    ) from None
            self._closed.wait(min(pause, deadline.remaining()))
            pause = min(2 * pause, _LONGEST_PAUSE)

    def _greet(self, connection: socket.socket, deadline: Deadline) -> Session:
        connection.setblocking(False)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER)
        connection.connect(os.fspath(self._path))
        _check_peer(connection, self._path.parent, self._store)
        _send(connection, self._hello, deadline, self._store)
        # Even a put that must not wait may wait for this: whoever listens answers at once. A store that is
        # stopped still has a queue for connections: trying again would only make it longer.
        patience = Deadline(max(_GREETING_SECONDS, deadline.remaining()))
        while not _wait(connection, select.POLLIN, Deadline(min(_LONGEST_PAUSE, patience.remaining()))):
            if self._closed.is_set() or patience.passed():
                raise _late(self._store)
        welcome, files = _receive(connection, m.Welcome, patience, self._store)
        try:
            if isinstance(welcome, m.Refused):
                raise TransportError(welcome.fault, welcome.message)
            if self._hello.role == "control":
                return Session(connection, welcome, memoryview(b""), self._nudge)
            size = welcome.segments * welcome.segment_bytes
            memory = map_ring(files[0], size, writable=self._hello.role == "producer")
            return Session(connection, welcome, memory, self._nudge)
        except (OSError, ValueError, IndexError) as error:
            raise TransportError(
                "failed",
                f"the ring of {self._store} cannot be mapped ({error}); check memory and ulimit -n, -v",
            ) from None
        finally:
            _close_all(files)


def _check_peer(connection: socket.socket, directory: Path, store: str) -> None:
    """Before the token is shown: TransportError when somebody else listens there than the store."""
    _, uid, _ = struct.unpack("iII", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    trusted = {0, os.geteuid()}
    # Nobody but these can have put another directory in its place, so its owner made it.
    if {directory.parent.stat().st_uid, directory.parent.lstat().st_uid} <= trusted:
        trusted.add(directory.lstat().st_uid)
    if uid not in trusted:
        raise TransportError(
            "permission",
            f"user {uid} listens in {directory}, not {store}; remove that directory, or use another place",
        )


def _send(
    connection: socket.socket,
    message: m.Message,
    deadline: Deadline,
    store: str,
    nudge: Callable[[], None] | None = None,
) -> None:
    data = m.encode(message)
    while True:
        try:
            connection.send(data)
            return
        except BlockingIOError:
            if nudge is not None:
                nudge()
            if not _wait(connection, select.POLLOUT, deadline):
                raise TransportError(
                    "failed", f"{store} does not receive what it is sent; see whether it is stopped"
                ) from None
        except OSError:
            raise LostError(store) from None


def _receive(
    connection: socket.socket, kind: type[_Answer], deadline: Deadline, store: str
) -> tuple[_Answer | m.Refused, list[int]]:
    answer, files = _receive_any(connection, deadline, store)
    if not isinstance(answer, (kind, m.Refused)):
        _close_all(files)
        raise _no_answer(store, f"{type(answer).__name__}, which is no answer")
    return answer, files


def _receive_any(connection: socket.socket, deadline: Deadline, store: str) -> tuple[m.Message, list[int]]:
    if not _wait(connection, select.POLLIN, deadline):
        raise _late(store)
    try:
        try:
            data, files = _receive_once(connection)
        except ConnectionResetError:
            # The store left something of ours unread. What it said before is still to be received.
            data, files = _receive_once(connection)
    except OSError:
        raise LostError(store) from None
    try:
        if not data:
            raise LostError(store)
        return m.decode(memoryview(data)), files
    except ProtocolError as error:
        _close_all(files)
        raise _no_answer(store, str(error)) from None
    except BaseException:
        _close_all(files)
        raise


def _no_answer(store: str, what: str) -> TransportError:
    return TransportError(
        "failed", f"{store} answers with {what}; run the same version of tracerl on both sides"
    )


def _late(store: str) -> _LateError:
    return _LateError("failed", f"{store} did not answer in time; see whether it is stopped")


def _ignore(_answer: m.Message) -> None:
    """Do nothing about a late answer."""


@contextlib.contextmanager
def _held(lock: threading.Lock, deadline: Deadline, store: str) -> Iterator[None]:
    """Hold a lock. TransportError when other threads have it until the deadline."""
    if not lock.acquire(timeout=min(deadline.remaining(), threading.TIMEOUT_MAX)):
        raise TransportError(
            "failed", f"{store} is still busy with what other threads ask; see whether it is stopped"
        )
    try:
        yield
    finally:
        lock.release()


def _receive_once(connection: socket.socket) -> tuple[bytes, list[int]]:
    data, files, _, _ = socket.recv_fds(
        connection, m.MAX_MESSAGE + 1, _MAX_DESCRIPTORS, socket.MSG_CMSG_CLOEXEC
    )
    return data, files


def _wait(connection: socket.socket, event: int, deadline: Deadline) -> bool:
    """Wait until the socket is ready for that, or broken; False when time is up."""
    poll = select.poll()
    poll.register(connection, event)
    while True:
        milliseconds = deadline.milliseconds(forever=-1, most=2**31 - 1)
        if poll.poll(milliseconds):
            return True
        if deadline.passed():
            return False


def _close_all(files: list[int]) -> None:
    for file in files:
        os.close(file)
