"""Reads frames of a record store on another node, over HTTP.

Requests that fail on the way are made again after a growing random pause until the deadline; what may not be
done twice carries an id by which the store knows it again. Every answer's length is checked; whether the
bytes are the right ones is for the reader of the frame to verify.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import logging
import random
import secrets
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Final, NamedTuple
from urllib.parse import urlsplit

from tracerl.api.frames import Handle, HandleError, parse_handle
from tracerl.transport.base import Borrowed, Fault, TransportError, Usage, Wanted
from tracerl.transport.retry import delays
from tracerl.transport.store import wire

_log = logging.getLogger(__name__)

_BATCH_BYTES: Final = 4 * 2**20
"""About how much one request asks for, so that several requests share the work."""
_BATCH_FRAMES, _BATCH_RANGES = 256, 16_384
_CONNECT_SECONDS, _SILENCE_SECONDS = 5.0, 20.0
"""A server that says nothing for so long is asked again."""
_ANSWER_BYTES: Final = 2**20
"""Longest JSON answer."""


class _AgainError(Exception):
    """A request that did not get through, with why; it may be made again."""


class Listed(NamedTuple):
    """A frame that a store said it has."""

    handle: Handle
    tier: str
    run_id: str
    trajectory: str


@dataclass(slots=True)
class _Piece:
    """One wanted frame: where its bytes go, and how it ended."""

    index: int
    handle: Handle
    ranges: tuple[tuple[int, int], ...] | None
    size: int
    target: memoryview
    done: bool = False
    error: TransportError | None = None


class RemoteSource:
    """A `FrameSource` for one store on another node, by its HTTP address.

    `locate` gives the store's base URL, or None while it is not known, and is asked before every request,
    since a store that was started again may be elsewhere. A call gives up `timeout` seconds after its last
    progress. At most `concurrency` requests read at the same time. Only `pages` needs no `run_id`.
    """

    def __init__(
        self,
        store: str,
        locate: Callable[[], str | None],
        *,
        token: str,
        run_id: str,
        timeout: float,
        concurrency: int = 4,
    ) -> None:
        self._store, self._locate = store, locate
        self._headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
        self._run_id, self._timeout = run_id, timeout
        self._pool = ThreadPoolExecutor(concurrency, thread_name_prefix=f"read-{store}")
        self._lock = threading.Lock()
        self._idle: deque[tuple[str, http.client.HTTPConnection]] = deque()
        self._open: set[http.client.HTTPConnection] = set()
        self._closed = threading.Event()
        self._chance = random.Random()  # noqa: S311 (no secret)
        self._counters = {"http_retries": 0, "read_bytes_http": 0, "read_frames": 0}
        self._kept: deque[tuple[str, Mapping[str, Any]]] = deque()
        """Releases, with their ids, and forgets that the store has not answered yet."""

    # -- the contract -------------------------------------------------------------------------------------

    def borrow(self, wanted: Sequence[Wanted]) -> Borrowed:
        """Copy frames or parts of them; a frame that failed has its TransportError in the answer."""
        return self.start(wanted)()

    def start(self, wanted: Sequence[Wanted]) -> Callable[[], Borrowed]:
        """Begin to `borrow`; the result waits for the answer and gives it."""
        answer: list[list[memoryview] | TransportError] = []
        pieces: list[_Piece] = []
        for index, (handle, ranges) in enumerate(wanted):
            try:
                length = parse_handle(handle).length
            except HandleError as error:
                answer.append(TransportError("missing", str(error)))
                continue
            if length > wire.MAX_FRAME_BYTES:
                answer.append(TransportError("damaged", f"{handle} is longer than any frame; drop it"))
                continue
            for start, stop in ranges or ():
                if not 0 <= start <= stop <= length:
                    raise ValueError(f"range {start}:{stop} does not lie in a frame of {length} bytes")
            size = length if ranges is None else sum(stop - start for start, stop in ranges)
            pieces.append(_Piece(index, handle, ranges, size, memoryview(bytearray(size))))
            answer.append([])
        reads = [self._pool.submit(self._read, batch) for batch in _batches(pieces)]

        def finish() -> Borrowed:
            for read in reads:
                read.result()
            for piece in pieces:
                answer[piece.index] = piece.error or _views(piece)
            if any(piece.error is None for piece in pieces):
                self._catch_up()
            return Borrowed(answer)

        return finish

    def present(self, handles: Sequence[Handle]) -> list[bool]:
        """Tell which frames the store has; TransportError when it does not answer."""
        flags: list[bool] = []
        for part in _parts(handles):
            flags += self._call("present", handles=part)["present"]
        return flags

    def release(self, handles: Iterable[Handle]) -> None:
        """Drop a reference each, once even when an answer was lost.

        TransportError; if that is because the store does not answer, it is told after the next call that it
        answers, so do not call again.
        """
        parts = _parts(list(handles))
        self._tell("release", [{"handles": part, "request": secrets.token_hex(8)} for part in parts])

    def forget(self, trajectories: Iterable[str]) -> None:
        """Drop all frames put under these trajectories' keys, like `release`. TransportError."""
        self._tell("forget", [{"trajectories": part} for part in _parts(list(trajectories))])

    def start_run(self) -> None:
        """Make this source's run the store's run: frames of others are dropped. TransportError."""
        self._call("start_run")

    def usage(self) -> Usage:
        """Count what the store holds; counters are this object's. TransportError."""
        found = self._call("usage")
        with self._lock:
            counters = dict(self._counters)
        return Usage(
            capacity_bytes=found["capacityBytes"],
            held_bytes=found["heldBytes"],
            frames=found["frames"],
            frame_bytes=found["frameBytes"],
            congested=found["congested"],
            counters=counters,
            cpu_seconds=found["cpuSeconds"],
        )

    def pages(self) -> Iterator[list[Listed]]:
        """List the frames that the store has now, of all runs and tiers, a bounded number at a time.

        Nothing keeps them: one that is released before it is read is missing. TransportError.
        """
        cursor = None
        while True:
            answer = self._ask("list", {"cursor": cursor})
            yield [
                Listed(Handle(item["handle"]), item["tier"], item["runID"], item["trajectory"])
                for item in answer["frames"]
            ]
            cursor = answer["next"]
            if cursor is None:
                return

    def close(self) -> None:
        """End all connections; calls that wait end with TransportError ``failed``."""
        self._catch_up(_CONNECT_SECONDS)
        self._closed.set()
        with self._lock:
            connections = [*self._open]
        for connection in connections:
            if connection.sock is not None:
                with contextlib.suppress(OSError):  # the peer was faster
                    connection.sock.shutdown(socket.SHUT_RDWR)
        self._pool.shutdown()
        with self._lock:
            idle, self._idle = self._idle, deque()
        for _, connection in idle:
            self._discard(connection)

    # -- reading ------------------------------------------------------------------------------------------

    def _read(self, batch: Sequence[_Piece]) -> None:
        """Fill the pieces of a batch, or set their errors."""
        progress = time.monotonic()
        pauses = delays(self._chance)
        while left := [piece for piece in batch if not piece.done]:
            try:
                self._read_once(left)
            except _AgainError as problem:
                if len(left) > sum(not piece.done for piece in batch):
                    progress, pauses = time.monotonic(), delays(self._chance)
                error = self._pause(next(pauses), progress, problem)
            except TransportError as refusal:
                error = refusal
            else:
                continue
            if error is not None:
                for piece in batch:
                    if not piece.done:
                        piece.done, piece.error = True, error

    def _read_once(self, pieces: Sequence[_Piece]) -> None:
        frames = [{"handle": piece.handle, "ranges": piece.ranges} for piece in pieces]
        with self._request("read", {"runID": self._run_id, "frames": frames}) as response:
            for piece in pieces:
                self._read_piece(response, piece)
            kind, _, length = _record(response)
            if (kind, length) != (wire.END, 0):
                raise _AgainError("its answer goes on after the last frame")
            # Reads the end of the chunked body, without which the connection cannot be used again.
            response.read(1)

    def _read_piece(self, response: http.client.HTTPResponse, piece: _Piece) -> None:
        filled = 0
        while True:
            kind, fault, length = _record(response)
            if kind == wire.DATA and length <= piece.size - filled:
                target = piece.target[filled : filled + length]
                if response.readinto(target) != length:
                    raise _AgainError("its answer was cut off")
                filled += length
            elif kind == wire.ERROR and fault < len(wire.FAULTS) and length <= wire.MAX_SENTENCE_BYTES:
                text = _exactly(response, length).decode("utf-8", "replace")
                piece.error = TransportError(wire.FAULTS[fault], text)
                break
            elif kind == wire.DONE and length == 0 and filled == piece.size:
                with self._lock:
                    self._counters["read_bytes_http"] += filled
                    self._counters["read_frames"] += 1
                break
            else:
                raise _AgainError("its answer is not one")
        piece.done = True

    # -- requests -----------------------------------------------------------------------------------------

    def _call(self, name: str, **body: Any) -> Mapping[str, Any]:
        """Make a request of this source's run."""
        answer = self._ask(name, {"runID": self._run_id, **body})
        self._catch_up()
        return answer

    def _tell(self, name: str, bodies: Iterable[Mapping[str, Any]]) -> None:
        """Make requests. TransportError; those that were not answered are kept, and made later."""
        documents = deque({"runID": self._run_id, **body} for body in bodies)
        while documents:
            try:
                self._ask(name, documents[0])
            except TransportError as error:
                if error.fault == "failed":
                    with self._lock:
                        self._kept += [(name, document) for document in documents]
                raise
            documents.popleft()
        self._catch_up()

    def _catch_up(self, silence: float = _SILENCE_SECONDS) -> None:
        """Make the requests that were kept, each once, until the store does not answer one."""
        while True:
            with self._lock:
                if not self._kept:
                    return
                name, document = self._kept.popleft()
            try:
                with self._request(name, document, silence) as response:
                    while response.read(_ANSWER_BYTES):
                        pass
            except _AgainError:
                with self._lock:
                    self._kept.appendleft((name, document))
                return
            except TransportError as refusal:
                _log.warning("a %s was refused: %s", name, refusal)

    def _ask(self, name: str, document: Mapping[str, Any]) -> Mapping[str, Any]:
        """Make a request with a JSON answer, again where that may help. TransportError."""
        start, pauses = time.monotonic(), delays(self._chance)
        while True:
            try:
                with self._request(name, document) as response:
                    answer = json.loads(response.read(_ANSWER_BYTES))
                    response.read(1)
                    return answer  # type: ignore[no-any-return]
            except _AgainError as problem:
                error = self._pause(next(pauses), start, problem)
            except ValueError:
                error = self._pause(next(pauses), start, _AgainError("its answer is not JSON"))
            if error is not None:
                raise error

    def _pause(self, seconds: float, since: float, problem: _AgainError) -> TransportError | None:
        """Wait before the next attempt, or make the error that ends the call."""
        left = since + self._timeout - time.monotonic()
        if self._closed.is_set():
            return TransportError("failed", f"{self._store} was being read when its source was closed")
        if left <= 0:
            return TransportError(
                "failed",
                f"{self._store} did not answer for {self._timeout:g} s ({problem}); see its log and the "
                "network between the nodes, or raise spec.transport.deadlineSeconds",
            )
        with self._lock:
            self._counters["http_retries"] += 1
        self._closed.wait(min(seconds, left))
        return None

    @contextlib.contextmanager
    def _request(
        self, name: str, document: Mapping[str, Any], silence: float = _SILENCE_SECONDS
    ) -> Iterator[http.client.HTTPResponse]:
        """Send a request and hand out its answer of status 200; the body must be read to its end.

        _AgainError when it did not get through, TransportError when it was refused.
        """
        body = json.dumps(document).encode()
        url, connection = self._connection()
        connection.sock.settimeout(silence)
        whole = False
        try:
            connection.request("POST", f"/v1/{name}", body, self._headers)
            response = connection.getresponse()
            if response.status == http.client.OK:
                yield response
            else:
                _refused(self._store, response)
            whole = not response.will_close and response.isclosed()
        except (OSError, http.client.HTTPException) as problem:
            raise _AgainError(f"{type(problem).__name__}: {problem}"[:200]) from None
        finally:
            with self._lock:
                if whole and not self._closed.is_set():
                    self._idle.append((url, connection))
                    connection = None  # type: ignore[assignment]
            if connection is not None:
                self._discard(connection)

    def _connection(self) -> tuple[str, http.client.HTTPConnection]:
        if self._closed.is_set():
            raise _AgainError("closed")
        url = self._locate()
        if url is None:
            raise _AgainError("it is not running")
        with self._lock:
            while self._idle:
                known, connection = self._idle.pop()
                if known == url:
                    return known, connection
                self._open.discard(connection)
                connection.close()
        parts = urlsplit(url)
        connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=_CONNECT_SECONDS)
        try:
            connection.connect()
        except OSError as problem:
            raise _AgainError(f"{url}: {problem}") from None
        with self._lock:
            self._open.add(connection)
        return url, connection

    def _discard(self, connection: http.client.HTTPConnection) -> None:
        with self._lock:
            self._open.discard(connection)
        connection.close()


def _refused(store: str, response: http.client.HTTPResponse) -> None:
    """Raise what an answer other than 200 means."""
    text = response.read(_ANSWER_BYTES)
    try:
        error = json.loads(text)["error"]
        fault, message = error["fault"], str(error["message"])[: wire.MAX_SENTENCE_BYTES]
    except (ValueError, LookupError, TypeError):
        raise _AgainError(f"status {response.status}") from None
    if response.status >= http.client.INTERNAL_SERVER_ERROR:
        raise _AgainError(message)
    known: Fault = fault if fault in wire.FAULTS else "failed"
    raise TransportError(known, f"{store}: {message}")


def _record(response: http.client.HTTPResponse) -> tuple[int, int, int]:
    kind, fault, length = wire.RECORD.unpack(_exactly(response, wire.RECORD.size))
    return kind, fault, length


def _exactly(response: http.client.HTTPResponse, length: int) -> bytes:
    found = response.read(length)
    if len(found) != length:
        raise _AgainError("its answer was cut off")
    return found


def _views(piece: _Piece) -> list[memoryview]:
    whole = piece.target.toreadonly()
    if piece.ranges is None:
        return [whole]
    views, start = [], 0
    for first, stop in piece.ranges:
        views.append(whole[start : start + stop - first])
        start += stop - first
    return views


def _batches(pieces: Sequence[_Piece]) -> Iterator[list[_Piece]]:
    batch: list[_Piece] = []
    size = ranges = 0
    for piece in pieces:
        size += piece.size
        ranges += len(piece.ranges or ())
        if batch and (size > _BATCH_BYTES or ranges > _BATCH_RANGES or len(batch) == _BATCH_FRAMES):
            yield batch
            batch, size, ranges = [], piece.size, len(piece.ranges or ())
        batch.append(piece)
    if batch:
        yield batch


def _parts(items: Sequence[Any]) -> Iterator[list[Any]]:
    for start in range(0, len(items), wire.MAX_FRAMES):
        yield list(items[start : start + wire.MAX_FRAMES])
