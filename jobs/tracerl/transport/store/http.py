"""A record store for readers on other nodes: HTTP beside the ring's socket.

Requests are POST with a JSON body, and take the job's bearer token. ``runID`` is the reader's run.

=============== ============================================= ==========================================
path            body                                          answer
=============== ============================================= ==========================================
/v1/list        cursor: null at first                         {frames: [{handle, tier, runID,
                                                              trajectory}], next: cursor or null}
/v1/read        runID, frames: [{handle, ranges}], ranges:    the stream of `tracerl.transport.store.wire`
                [[start, stop], …], or null for all of it
/v1/present     runID, handles                                {present: [true, …]}
/v1/release     runID, handles, request                       {}
/v1/forget      runID, trajectories                           {}
/v1/start_run   runID                                         {}
/v1/usage       runID                                         {capacityBytes, heldBytes, frames, …}
=============== ============================================= ==========================================

``request`` is 16 hex digits that the client makes up: what comes again with the same ones does nothing. GET
/metrics takes the token too, GET /health is open. Errors of single frames are in the stream; any other error
is ``{"error": {"message": one sentence, "fault": as of TransportError}}``, with status 400 for a body that is
not as above, 401 without the token, 413 for too long a body.

Bodies are not compressed. A connection whose first request with the token takes longer than 10 s is ended.

A list is of frames of all runs and tiers, a page at a time until ``next`` is null: of all that the store held
at the first page, but for what was released meanwhile. It keeps nothing: what it names may be gone already.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
import re
from collections import Counter, OrderedDict
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Annotated, NamedTuple, TypeVar

from aiohttp import web
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from tracerl.api.constants import Role
from tracerl.api.frames import Handle, HandleError, parse_handle
from tracerl.transport.base import Fault, TransportError
from tracerl.transport.exposition import CONTENT_TYPE, exposition
from tracerl.transport.listen import Strangers
from tracerl.transport.ring.segments import Location
from tracerl.transport.ring.server import LocalReader, RingServer
from tracerl.transport.store import wire
from tracerl.transport.store.metrics import store_values
from tracerl.transport.store.spill import SpillDirectory

_log = logging.getLogger(__name__)

INSTANCE_HEADER = "X-TraceRL-Instance"
"""Response: random id of the store process."""

_READS = 16
"""Reads that are answered at the same time; more wait."""
_WINDOW_BYTES, _WINDOW_CHUNKS = 4 * 2**20, 256
"""About how much of a read is pinned at a time, and in memory if it is not in the ring."""
_WRITE_BYTES = 2**18
_STALLED_SECONDS = 60.0
"""A reader that takes nothing for so long is cut off."""
_REMEMBERED = 4_096
"""Ids of requests."""


# -- what may be asked ------------------------------------------------------------------------------------


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class _Body(_Strict):
    run_id: Annotated[str, Field(min_length=1, max_length=256, alias="runID")]


_HandleText = Annotated[str, Field(max_length=4_096)]
_Position = Annotated[int, Field(ge=0, lt=2**63)]


_CURSOR = re.compile(r"([0-9a-f]{16})/([0-9]{1,19})/([0-9]{1,19})")
"""Instance of the store, number of the next frame, number behind the last one."""


class _List(_Strict):
    cursor: Annotated[str, Field(max_length=64)] | None = None


class _Frame(_Strict):
    handle: _HandleText
    ranges: list[Annotated[list[_Position], Field(min_length=2, max_length=2)]] | None = None


class _Read(_Body):
    frames: list[_Frame] = Field(max_length=wire.MAX_FRAMES)


class _Handles(_Body):
    handles: list[_HandleText] = Field(max_length=wire.MAX_FRAMES)


class _Release(_Handles):
    request: Annotated[str, Field(pattern=r"^[0-9a-f]{16}$")]


class _Forget(_Body):
    trajectories: list[Annotated[str, Field(max_length=1_024)]] = Field(max_length=wire.MAX_FRAMES)


_B = TypeVar("_B", bound=_Strict)


class _RefusedError(Exception):
    """An answer other than 200: HTTP status and one sentence; `reason` is counted."""

    def __init__(self, status: int, message: str, fault: Fault, reason: str = "protocol") -> None:
        super().__init__(message)
        self.status, self.fault, self.reason = status, fault, reason

    def response(self) -> web.Response:
        body = {"error": {"message": str(self), "fault": self.fault}}
        return web.json_response(body, status=self.status)


# -- the server -------------------------------------------------------------------------------------------


class StoreServer:
    """The HTTP side of one store; all of it runs on the ring's event loop."""

    def __init__(self, ring: RingServer, *, token: str, spill: SpillDirectory | None = None) -> None:
        """`spill` is the ring's tier in a directory, if it has one."""
        self._ring, self._spill = ring, spill
        self._authorization = f"Bearer {token}".encode()
        self._slots = asyncio.Semaphore(_READS)
        self._seen: OrderedDict[str, None] = OrderedDict()
        self.strangers = Strangers()
        self.refused: Counter[str] = Counter()
        """Requests that were refused, by reason: token or protocol."""

    def application(self) -> web.Application:
        """Make the application; it may be served once."""
        app = web.Application(client_max_size=wire.MAX_BODY_BYTES, middlewares=[self._guard])
        app.router.add_get("/health", self._health)
        app.router.add_get("/metrics", self._metrics)
        app.router.add_post("/v1/list", self._list)
        app.router.add_post("/v1/read", self._read)
        app.router.add_post("/v1/present", self._present)
        app.router.add_post("/v1/release", self._release)
        app.router.add_post("/v1/forget", self._forget)
        app.router.add_post("/v1/start_run", self._start_run)
        app.router.add_post("/v1/usage", self._usage)
        return app

    @web.middleware
    async def _guard(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        try:
            given = request.headers.get("Authorization", "").encode("utf-8", "surrogateescape")
            if request.path != "/health" and not hmac.compare_digest(given, self._authorization):
                message = "the bearer token is missing or wrong; use the token file of this run"
                raise _RefusedError(401, message, "foreign", "token")
            if request.path != "/health":
                self.strangers.admit(request)
            response = await handler(request)
        except _RefusedError as error:
            self.refused[error.reason] += 1
            response = error.response()
        except web.HTTPRequestEntityTooLarge:
            message = f"the body has more than {wire.MAX_BODY_BYTES >> 20} MiB; ask for fewer frames"
            self.refused["protocol"] += 1
            response = _RefusedError(413, message, "failed").response()
        except web.HTTPException as error:
            message = f"there is no {request.method} {request.path[:100]} here ({error.reason}); see the API"
            response = _RefusedError(error.status, message, "failed").response()
        except ConnectionError:  # the peer was killed or gave up: nobody will read this
            response = _RefusedError(503, "the connection was lost", "failed").response()
        except Exception:  # noqa: BLE001  a bug: the traceback goes to the log alone
            _log.exception("%s failed", request.path[:100])
            message = f"{request.path[:100]} failed; see the log of {self._ring.store}"
            response = _RefusedError(500, message, "failed").response()
        if not response.prepared:
            response.headers[INSTANCE_HEADER] = self._ring.instance
        return response

    async def _health(self, _request: web.Request) -> web.Response:
        return web.json_response({"instanceId": self._ring.instance, "store": self._ring.store})

    async def _metrics(self, _request: web.Request) -> web.Response:
        # On the loop, whose books it reads.
        text = exposition(Role.STORE, store_values(self._ring, self.refused, self._spill))
        return web.Response(body=text, headers={"Content-Type": CONTENT_TYPE})

    async def _list(self, request: web.Request) -> web.Response:
        body = await _parse(request, _List)
        first, stop = (0, None) if body.cursor is None else self._span(body.cursor)
        found, stop = self._ring.held(first, stop, wire.MAX_FRAMES)
        frames: list[str] = []
        size, following = 0, None
        for handle, held in found:
            item = {"handle": handle, "tier": held.tier, "runID": held.run_id, "trajectory": held.trajectory}
            text = json.dumps(item)
            size += len(text)
            if frames and size > wire.MAX_LIST_BYTES:
                break
            frames.append(text)
            following = f"{self._ring.instance}/{held.seq + 1}/{stop}"
        return web.json_response(text=f'{{"frames": [{", ".join(frames)}], "next": {json.dumps(following)}}}')

    def _span(self, cursor: str) -> tuple[int, int]:
        """Read a cursor that an answer of this process gave."""
        match = _CURSOR.fullmatch(cursor)
        if match is None:
            raise _RefusedError(400, "cursor: it is not the next of a list; begin with null", "failed")
        if match[1] != self._ring.instance:
            message = "the store was restarted, and what it held is gone; list again from the beginning"
            raise _RefusedError(400, message, "missing")
        return int(match[2]), int(match[3])

    async def _present(self, request: web.Request) -> web.Response:
        body = await _parse(request, _Handles)
        return web.json_response({"present": self._ring.present(map(Handle, body.handles))})

    async def _release(self, request: web.Request) -> web.Response:
        body = await _parse(request, _Release)
        # The answer may have been lost on the way: a reference is dropped once all the same.
        if body.request not in self._seen:
            self._ring.release(map(Handle, body.handles))
            self._seen[body.request] = None
            if len(self._seen) > _REMEMBERED:
                self._seen.popitem(last=False)
        return web.json_response({})

    async def _forget(self, request: web.Request) -> web.Response:
        body = await _parse(request, _Forget)
        self._ring.forget(body.run_id, body.trajectories)
        return web.json_response({})

    async def _start_run(self, request: web.Request) -> web.Response:
        body = await _parse(request, _Body)
        self._ring.start_run(body.run_id)
        return web.json_response({})

    async def _usage(self, request: web.Request) -> web.Response:
        await _parse(request, _Body)
        usage = self._ring.usage()
        return web.json_response(
            {
                "capacityBytes": usage.capacity_bytes,
                "heldBytes": usage.held_bytes,
                "frames": usage.frames,
                "frameBytes": usage.frame_bytes,
                "congested": usage.congested,
                "cpuSeconds": usage.cpu_seconds,
            }
        )

    # -- reading ------------------------------------------------------------------------------------------

    async def _read(self, request: web.Request) -> web.StreamResponse:
        body = await _parse(request, _Read)
        if sum(len(frame.ranges or ()) for frame in body.frames) > wire.MAX_RANGES:
            raise _RefusedError(400, f"a read has at most {wire.MAX_RANGES} ranges; ask for fewer", "failed")
        async with self._slots:
            response = web.StreamResponse(
                headers={"Content-Type": wire.MEDIA_TYPE, INSTANCE_HEADER: self._ring.instance}
            )
            await response.prepare(request)
            answer = _Answer(response)
            try:
                for window in _windows(_chunks(body.frames, self._ring.max_frame_bytes)):
                    await self._send(answer, body, window)
                await answer.end()
            except TimeoutError:
                _log.warning("a reader took nothing for %g s and is cut off", _STALLED_SECONDS)
                _abort(request)
            except ConnectionError:
                pass  # the reader is gone, or asks again
            except Exception:  # noqa: BLE001  a bug; what was sent so far must not pass for an answer
                _log.exception("a read failed")
                _abort(request)
        return response

    async def _send(self, answer: _Answer, body: _Read, window: Sequence[_Chunk]) -> None:
        """Send the chunks of a window, whose frames are pinned meanwhile."""
        frames = [*dict.fromkeys(chunk.frame for chunk in window)]
        with self._ring.reader(body.run_id) as reader:
            pinned = reader.pin([Handle(body.frames[frame].handle) for frame in frames])
            places = dict(zip(frames, pinned, strict=True))
            loads = [_load(reader, places[chunk.frame], chunk) for chunk in window]
            if any(isinstance(place, Location) and place.tier != "ring" for place in pinned):
                pieces = await asyncio.gather(*loads)
            else:
                pieces = [await load for load in loads]  # none of them waits
            for chunk, piece in zip(window, pieces, strict=True):
                await answer.add(chunk, piece)


class _Chunk(NamedTuple):
    """Bytes of a frame that are sent together; `frame` counts in the request."""

    frame: int
    start: int
    stop: int
    last: bool


def _chunks(frames: Sequence[_Frame], longest: int) -> Iterator[_Chunk]:
    """Cut what is asked for into chunks, at least one a frame, in the order in which they are sent."""
    for number, frame in enumerate(frames):
        length = _length(frame.handle)
        ranges = frame.ranges if frame.ranges is not None else [[0, length]]
        if length > longest or any(not start <= stop <= length for start, stop in ranges):
            yield _Chunk(number, 0, length + 1, True)  # cannot be read, and is told why
            continue
        cuts = [
            (at, min(stop, at + wire.MAX_DATA_BYTES))
            for start, stop in ranges
            for at in range(start, stop, wire.MAX_DATA_BYTES)
        ] or [(0, 0)]
        for index, (start, stop) in enumerate(cuts):
            yield _Chunk(number, start, stop, index == len(cuts) - 1)


def _length(handle: str) -> int:
    try:
        return parse_handle(handle).length
    except HandleError:
        return 0


def _windows(chunks: Iterator[_Chunk]) -> Iterator[list[_Chunk]]:
    """Group chunks so that a group has a bounded number of bytes."""
    window: list[_Chunk] = []
    size = 0
    for chunk in chunks:
        window.append(chunk)
        size += chunk.stop - chunk.start
        if size >= _WINDOW_BYTES or len(window) == _WINDOW_CHUNKS:
            yield window
            window, size = [], 0
    if window:
        yield window


async def _load(
    reader: LocalReader, place: Location | TransportError, chunk: _Chunk
) -> memoryview | bytes | TransportError:
    if isinstance(place, TransportError):
        return place
    if chunk.stop > place.length:
        return TransportError("failed", f"a range does not lie in its frame of {place.length} bytes; mend it")
    try:
        return await reader.read(place, chunk.start, chunk.stop)
    except TransportError as error:
        return error


class _Answer:
    """The stream of one read. Bytes are copied before they are sent, since a socket may hold on to them."""

    def __init__(self, response: web.StreamResponse) -> None:
        self._response = response
        self._waiting = bytearray()
        self._failed: int | None = None

    async def add(self, chunk: _Chunk, piece: memoryview | bytes | TransportError) -> None:
        """Send a chunk of a frame, or why there is none; what follows of a frame that failed is left out."""
        if chunk.frame == self._failed:
            return
        if isinstance(piece, TransportError):
            self._failed = chunk.frame
            self._waiting += wire.error_record(piece.fault, str(piece))
        else:
            if piece:
                self._waiting += wire.RECORD.pack(wire.DATA, 0, len(piece))
                self._waiting += piece
            if chunk.last:
                self._waiting += wire.RECORD.pack(wire.DONE, 0, 0)
        if len(self._waiting) >= _WRITE_BYTES:
            await self._write()

    async def end(self) -> None:
        """Send what waits and the end."""
        self._waiting += wire.RECORD.pack(wire.END, 0, 0)
        await self._write()
        await self._response.write_eof()

    async def _write(self) -> None:
        waiting, self._waiting = self._waiting, bytearray()
        async with asyncio.timeout(_STALLED_SECONDS):
            await self._response.write(waiting)


def _abort(request: web.Request) -> None:
    if request.transport is not None:
        request.transport.abort()


async def _parse(request: web.Request, kind: type[_B]) -> _B:
    try:
        return kind.model_validate_json(await request.read())
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"]) or "body"
        raise _RefusedError(400, f"{place[:200]}: {first['msg']}; see the API", "failed") from None
