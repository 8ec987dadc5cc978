"""The store's end of the ring: an asyncio server that keeps the books and says who may use which bytes.

It never copies a frame and never waits for a client: what a client does not read stays in its socket, and
when that is full the client is given up, which no correct one can bring about with its one open request.

Commits are one-way, and whoever put a frame may hand its handle on at once. So a frame that the books do not
have is looked for in all producers' sockets before it is called missing: its commit was sent before its
handle was made, and what was sent is there to be received, even if its sender is dead by now.

For the same reason commits need not wake the store, which costs more than all else that is done for a small
frame: a producer that has just committed something is left alone for some milliseconds, or until a nudge.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import hmac
import itertools
import logging
import os
import secrets
import socket
import struct
import time
from collections import Counter, deque
from collections.abc import Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Literal, Protocol, Self

from tracerl.api.frames import Handle
from tracerl.api.ring import segment_size
from tracerl.transport.base import Fault, TransportError, Usage
from tracerl.transport.ring import messages as m
from tracerl.transport.ring.file import SOCKET, RingDirectory, create_ring, map_ring
from tracerl.transport.ring.segments import (
    Counts,
    ForeignFrame,
    HeldFrame,
    LiveFrame,
    Location,
    MissingFrame,
    ProtocolError,
    Segments,
)

_log = logging.getLogger(__name__)

_MAX_CONNECTIONS = 512
_HELLO_SECONDS = 10.0
_RETRY_SECONDS = 1.0
"""Until frames are offered to the lower tiers again when none took them."""
_BATCH = 64
"""Messages of one connection that are handled before the others get a turn."""
_REST_SECONDS = 0.01
"""How long a producer's socket is left alone after a commit."""
_DRAIN = 16_384
"""More messages than a socket's buffer can hold of one connection."""
_SO_PEERGROUPS = 59
"""Of <asm-generic/socket.h>, which Python's socket module lacks."""
_GROUP_BYTES = 1_024
"""The most that Python's getsockopt takes: 256 groups."""


class Tier(Protocol):
    """Where cold frames go when the ring is short of memory."""

    @property
    def name(self) -> Literal["spill", "object"]:
        """Which tier its Locations name."""
        ...

    async def take(self, frames: Sequence[tuple[LiveFrame, memoryview]]) -> dict[int, Location]:
        """Copy the frames of one segment, all of them, and tell by sequence number where each is now.

        The views are invalid afterwards. TransportError ``full`` or ``failed``: the next tier is asked.
        """
        ...

    async def drop(self, locations: Sequence[Location]) -> None:
        """Forget frames. What fails is logged and counted."""
        ...

    def descriptor(self, location: Location) -> int | None:
        """Give an open file, which stays the tier's, with the frame at `location.offset`; or None."""
        ...

    async def read(self, location: Location, start: int, stop: int) -> bytes:
        """Read bytes `start` to `stop` of a frame. TransportError."""
        ...

    def close(self) -> None:
        """Remove what is stored."""
        ...


@dataclass(frozen=True, slots=True)
class StoreStatus:
    """What a store holds and has done, for its metrics."""

    ring_bytes: int
    segment_bytes: int
    counts: Counts
    connections: Mapping[m.Role, int]
    counters: Mapping[str, int]
    """Totals of this process by name, see `COUNTERS`."""


COUNTERS = (
    "committed_frames",
    "committed_bytes",
    "released_frames",  # their last reference was dropped
    "read_bytes_ring",  # of frames pinned through the socket
    "read_bytes_http",  # of pieces read through a LocalReader
    "relocated_bytes_spill",
    "relocated_bytes_object",
    "tier_errors_spill",
    "tier_errors_object",
    "lease_waits",
    "lease_timeouts",
    "refused_token",
    "refused_job",
    "refused_run",
    "refused_protocol",
)


@dataclass(eq=False, slots=True)
class _Connection:
    number: int
    socket: socket.socket
    hello: m.Hello | None = None
    asking: bool = False
    """Whether a request is open that is answered later."""
    timer: asyncio.TimerHandle | None = None
    """Ends the connection without a Hello, then the wait for a lease."""
    rest: asyncio.TimerHandle | None = None
    """Set while the socket is not watched."""
    waited: float = 0.0
    """Seconds that a frame has waited when its request for a lease expires."""


_ALLOWED: Mapping[m.Role, tuple[type, ...]] = {
    "producer": (m.LeaseRequest, m.Commits),
    "reader": (m.Pin, m.Unpin, m.Fetch),
    "control": (m.Nudge, m.Retain, m.Release, m.Present, m.Forget, m.StartRun, m.UsageRequest),
}
_ONE_WAY = (m.Commits, m.Nudge, m.Unpin, m.Release, m.Forget)


class RingServer:
    """One store's ring, its socket and its tiers. All methods are called on one event loop."""

    def __init__(
        self,
        path: Path,
        *,
        store: str,
        job_uid: str,
        token: str,
        ring_bytes: int,
        tiers: Sequence[Tier] = (),
    ) -> None:
        """Make the directory `path` and the ring in it. TransportError.

        `token` is the job's bearer token; `tiers` are asked in turn to take cold frames.
        """
        self.store = store
        self.instance = secrets.token_hex(8)
        self._job_uid = job_uid
        self._token = token.encode()
        self._tiers = {tier.name: tier for tier in tiers}
        segment_bytes = segment_size(ring_bytes)
        self._count = max(1, ring_bytes // segment_bytes)
        self._segments = Segments(segment_bytes, self._count)
        self._low_water = max(1, self._count // 8)
        self._directory = RingDirectory.create(path)
        try:
            size = self._count * segment_bytes
            self._writable, self._read_only = create_ring(self._directory, size)
            self._ring = map_ring(self._read_only, size, writable=False)
        except BaseException:
            self._directory.remove()
            raise
        self._counters = Counter(dict.fromkeys(COUNTERS, 0))
        self._numbers = itertools.count()
        self._connections: dict[int, _Connection] = {}
        self._waiting: deque[_Connection] = deque()
        """Producers without a lease that want one, first come first served."""
        self._buffer = memoryview(bytearray(m.MAX_MESSAGE + 1))
        self._listener: socket.socket | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._closing = False
        self._relocating = False

    @property
    def max_frame_bytes(self) -> int:
        """A longer frame cannot be committed."""
        return self._segments.segment_bytes

    async def start(self) -> None:
        """Listen. TransportError when the socket cannot be made."""
        path = self._directory.path / SOCKET
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            listener.setblocking(False)
            listener.bind(os.fspath(path))
            path.chmod(0o660)  # whatever the umask is
            listener.listen(_MAX_CONNECTIONS)
        except OSError as error:  # such as a path that is longer than 107 bytes
            listener.close()
            raise TransportError("failed", f"{path} cannot be listened on ({error}); check it") from None
        self._listener = listener
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(listener, self._accept)

    async def close(self) -> None:
        """End all connections, close the tiers, and remove the ring and its directory."""
        self._closing = True
        if self._listener is not None:
            self._loop.remove_reader(self._listener)
            self._listener.close()
        for connection in list(self._connections.values()):
            self._end(connection)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for tier in self._tiers.values():
            tier.close()
        # The memory is unmapped with the last view of it.
        os.close(self._writable)
        os.close(self._read_only)
        self._directory.remove()

    # -- what HTTP and metrics use -----------------------------------------------------------------------

    def reader(self, run_id: str) -> LocalReader:
        """Read frames in this process, without a connection."""
        return LocalReader(self, next(self._numbers), run_id)

    def retain(self, handles: Iterable[Handle]) -> None:
        """Add a reference each. TransportError ``missing`` when one is gone; no reference is added then."""
        self._retain([self._find(handle)[0] for handle in handles])

    def release(self, handles: Iterable[Handle]) -> None:
        """Drop a reference each; releasing what is gone does nothing."""
        seqs = []
        for handle in handles:
            with contextlib.suppress(TransportError):  # gone with an earlier process
                seqs.append(self._find(handle)[0])
        self._release(seqs)

    def present(self, handles: Iterable[Handle]) -> list[bool]:
        """Tell which frames could be read now."""
        found = []
        for handle in handles:
            try:
                (seq, _) = self._find(handle)
            except TransportError:
                found.append(False)
            else:
                found.extend(self._present([seq]))
        return found

    def forget(self, run_id: str, trajectories: Iterable[str]) -> None:
        """Drop all references of the frames that were put under these trajectories."""
        self._drain()
        self._counters["released_frames"] += self._segments.forget(run_id, trajectories)
        self._follow_up()

    def start_run(self, run_id: str) -> None:
        """Drop the frames of all other runs, and from now on whatever their producers still put."""
        self._drain()
        self._counters["released_frames"] += self._segments.start_run(run_id)
        self._follow_up()

    def held(self, first: int, stop: int | None, most: int) -> tuple[list[tuple[Handle, HeldFrame]], int]:
        """List frames of all runs by sequence number, from `first` until before `stop`, at most `most`.

        None stands for a `stop` behind all that the store has now; the answer has it beside the frames, so
        that whoever goes on from there comes to an end although frames are put meanwhile.
        """
        self._drain()
        stop = self._segments.next_seq if stop is None else stop
        frames = [
            (m.name_frame(self.store, self.instance, frame.seq, frame.length, frame.xxh3), frame)
            for frame in self._segments.held(first, stop, most)
        ]
        return frames, stop

    def usage(self) -> Usage:
        """Count what the store holds."""
        self._drain()
        counts = self._segments.counts()
        return Usage(
            capacity_bytes=len(self._ring),
            held_bytes=(self._count - counts.segments["free"]) * self._segments.segment_bytes,
            frames=sum(counts.frames.values()),
            frame_bytes=sum(counts.frame_bytes.values()),
            congested=bool(self._waiting) or self._segments.free < max(1, self._count // 16),
            counters=dict(self._counters),
            cpu_seconds=time.process_time(),
        )

    def status(self) -> StoreStatus:
        """Count everything, for metrics."""
        roles = Counter(each.hello.role for each in self._connections.values() if each.hello is not None)
        return StoreStatus(
            ring_bytes=len(self._ring),
            segment_bytes=self._segments.segment_bytes,
            counts=self._segments.counts(),
            connections=roles,
            counters=dict(self._counters),
        )

    # -- connections -------------------------------------------------------------------------------------

    def _accept(self) -> None:
        assert self._listener is not None
        try:
            client, _ = self._listener.accept()
        except BlockingIOError:
            return
        except OSError as error:
            if error.errno not in {errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS}:
                raise
            # The connection stays in the queue and would wake this loop at once, again and again.
            _log.warning("%s cannot accept a connection: %s", self.store, error)
            self._loop.remove_reader(self._listener)
            self._loop.call_later(1.0, self._loop.add_reader, self._listener, self._accept)
            return
        client.setblocking(False)
        connection = _Connection(next(self._numbers), client)
        self._connections[connection.number] = connection
        if len(self._connections) > _MAX_CONNECTIONS:
            self._refuse(connection, "failed", f"{self.store} has {_MAX_CONNECTIONS} clients; end some")
        elif not self._is_peer(client):
            self._refuse(
                connection, "permission", f"{self.store} serves its own user and group alone", "refused_token"
            )
        else:
            connection.timer = self._loop.call_later(_HELLO_SECONDS, self._end, connection)
            self._watch(connection)

    def _is_peer(self, client: socket.socket) -> bool:
        _, uid, gid = struct.unpack("iII", client.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        if uid in {0, os.geteuid()}:
            return True
        try:
            groups = client.getsockopt(socket.SOL_SOCKET, _SO_PEERGROUPS, _GROUP_BYTES)
        except OSError:  # more groups than that: its first one has to be the store's
            groups = b""
        return self._directory.group in {gid, *(group for (group,) in struct.iter_unpack("I", groups))}

    def _watch(self, connection: _Connection) -> None:
        connection.rest = None
        self._loop.add_reader(connection.socket, self._receive, connection, _BATCH)

    def _receive(self, connection: _Connection, most: int) -> None:
        """Handle what a client has sent, at most so many messages."""
        for _ in range(most):
            try:
                size = connection.socket.recv_into(self._buffer)
            except BlockingIOError:
                return
            except ConnectionResetError:
                # It ended with an answer unread. What it sent before is still to be received.
                continue
            except OSError as error:
                _log.warning("%s lost a client: %s", self.store, error)
                size = 0
            if not size:
                self._end(connection)
                return
            try:
                self._handle(connection, m.decode(self._buffer[:size]))
            except ProtocolError as error:
                name = connection.hello.name if connection.hello else "a client without a name"
                _log.warning("%s ends the connection of %s: %s", self.store, name, error)
                self._refuse(
                    connection, "failed", f"{self.store} does not accept {error}", "refused_protocol"
                )
            if connection.number not in self._connections:
                return

    def _drain(self) -> None:
        """Handle all that producers have sent until now."""
        for connection in list(self._connections.values()):
            if connection.hello is not None and connection.hello.role == "producer":
                self._receive(connection, _DRAIN)

    def _send(self, connection: _Connection, message: m.Message, descriptors: Sequence[int] = ()) -> None:
        if connection.number not in self._connections:
            return
        connection.asking = False
        try:
            socket.send_fds(connection.socket, [m.encode(message)], descriptors)
        except BlockingIOError:
            _log.warning("%s gives up a client that does not read its answers", self.store)
            self._end(connection)
        except (BrokenPipeError, ConnectionResetError):
            pass  # It is gone; what it sent before is still to be received.
        except OSError as error:
            _log.warning("%s cannot answer a client: %s", self.store, error)
            self._end(connection)

    def _refuse(
        self, connection: _Connection, fault: Fault, message: str, counter: str | None = None
    ) -> None:
        if counter is not None:
            self._counters[counter] += 1
        self._send(connection, m.Refused(fault, message))
        self._end(connection)

    def _end(self, connection: _Connection) -> None:
        if self._connections.pop(connection.number, None) is None:
            return
        self._loop.remove_reader(connection.socket)
        # Before its pins go: a reader that finds its connection open knows that it still has them.
        connection.socket.close()
        if connection.timer is not None:
            connection.timer.cancel()
        if connection.rest is not None:
            connection.rest.cancel()
        if connection in self._waiting:
            self._waiting.remove(connection)
        self._segments.end_lease(connection.number)
        self._segments.drop_reader(connection.number)
        # Not at once: this may be in the middle of a follow-up.
        self._loop.call_soon(self._follow_up)

    # -- messages ----------------------------------------------------------------------------------------

    def _handle(self, connection: _Connection, message: m.Message) -> None:
        hello = connection.hello
        if hello is None:
            if not isinstance(message, m.Hello):
                raise ProtocolError("a message before Hello")
            self._greet(connection, message)
            return
        if not isinstance(message, _ALLOWED[hello.role]):
            raise ProtocolError(f"{type(message).__name__} of a {hello.role}")
        if not isinstance(message, _ONE_WAY):
            if connection.asking:
                raise ProtocolError("a second request while one is open")
            connection.asking = True
        match message:
            case m.Commits(frames):
                for frame in frames:
                    self._segments.commit(connection.number, hello.run_id, frame)
                    self._counters["committed_frames"] += 1
                    self._counters["committed_bytes"] += frame.length
                    if frame.seq not in self._segments:
                        self._counters["refused_run"] += 1
                if connection.rest is None:
                    self._loop.remove_reader(connection.socket)
                    connection.rest = self._loop.call_later(_REST_SECONDS, self._watch, connection)
                return
            case m.LeaseRequest(milliseconds, waited):
                self._lease(connection, milliseconds, waited)
            case m.Nudge():
                self._drain()
            case m.Pin(seqs):
                self._pin(connection, hello.run_id, seqs)
            case m.Unpin(seqs):
                self._segments.unpin(connection.number, seqs)
            case m.Fetch(pieces):
                self._fetch(connection, pieces)
            case m.Retain(seqs):
                try:
                    self._retain(seqs)
                except TransportError as error:
                    self._send(connection, m.Refused(error.fault, str(error)))
                else:
                    self._send(connection, m.Done())
            case m.Release(seqs):
                self._release(seqs)
            case m.Present(seqs):
                self._send(connection, m.Presence([int(each) for each in self._present(seqs)]))
            case m.Forget(trajectories):
                self.forget(hello.run_id, trajectories)
            case m.StartRun():
                self.start_run(hello.run_id)
                self._send(connection, m.Done())
            case m.UsageRequest():
                self._send(connection, self.usage())
        self._follow_up()

    def _greet(self, connection: _Connection, hello: m.Hello) -> None:
        if not hmac.compare_digest(hello.token.encode(), self._token):
            self._refuse(
                connection,
                "foreign",
                f"{self.store} was not shown its job's token; start {hello.name} with its job",
                "refused_token",
            )
            return
        if hello.job_uid != self._job_uid:
            self._refuse(
                connection,
                "foreign",
                f"{self.store} belongs to job {self._job_uid}, {hello.name} to job {hello.job_uid}; "
                "give each job a ring directory of its own",
                "refused_job",
            )
            return
        assert connection.timer is not None
        connection.timer.cancel()
        connection.timer = None
        connection.hello = hello
        descriptors = {"producer": [self._writable], "reader": [self._read_only], "control": []}[hello.role]
        welcome = m.Welcome(self.store, self.instance, self._segments.segment_bytes, self._count)
        self._send(connection, welcome, descriptors)

    def _lease(self, connection: _Connection, milliseconds: int, waited: int) -> None:
        # Its old segment may be the one that it gets, so it must not hold that while it waits.
        self._segments.end_lease(connection.number)
        self._waiting.append(connection)
        self._grant()
        if connection not in self._waiting:
            return
        connection.waited = (waited + milliseconds) / 1000
        if milliseconds == 0:
            self._expire(connection)
            return
        self._counters["lease_waits"] += 1
        if milliseconds != m.FOREVER:
            connection.timer = self._loop.call_later(milliseconds / 1000, self._expire, connection)

    def _grant(self) -> None:
        while self._waiting and self._segments.free:
            connection = self._waiting.popleft()
            if connection.timer is not None:
                connection.timer.cancel()
                connection.timer = None
            lease = self._segments.lease(connection.number)
            assert lease is not None
            self._send(connection, m.Leased(*lease))

    def _expire(self, connection: _Connection) -> None:
        self._waiting.remove(connection)
        connection.timer = None
        self._counters["lease_timeouts"] += 1
        counts = self._segments.counts()
        waited = round(connection.waited, 1)
        self._send(
            connection,
            m.Refused(
                "full",
                f"the ring of {self.store} ({_size(len(self._ring))}) had no room"
                f"{f' for {waited:g} s' if waited else ''}: its {self._count} segments hold "
                f"{counts.frames['ring']} frames, {_size(counts.live_bytes)}, that are not released; raise "
                "spec.transport.ring.size, or set spec.transport.spillPath",
            ),
        )

    def _pin(self, connection: _Connection, run_id: str, seqs: Sequence[int]) -> None:
        answers: list[m.PinAnswer] = []
        descriptors: list[int] = []
        places: dict[int, int] = {}
        for location in self._pin_all(connection.number, run_id, seqs):
            if isinstance(location, m.PinState):
                answers.append(m.PinAnswer(location))
                continue
            self._counters["read_bytes_ring"] += location.length
            if location.tier == "ring":
                assert isinstance(location.place, int)
                answers.append(m.PinAnswer(m.PinState.RING, location.place, location.offset, location.length))
                continue
            descriptor = self._tiers[location.tier].descriptor(location)
            if descriptor is None:
                answers.append(m.PinAnswer(m.PinState.DISTANT, 0, 0, location.length))
                continue
            if descriptor not in places:
                places[descriptor] = len(descriptors)
                descriptors.append(descriptor)
            answers.append(m.PinAnswer(m.PinState.FILE, places[descriptor], location.offset, location.length))
        self._send(connection, m.Pinned(answers), descriptors)

    def _fetch(self, connection: _Connection, pieces: Sequence[m.Piece]) -> None:
        wanted = []
        for seq, start, stop in pieces:
            location = self._segments.location(connection.number, seq)
            if stop > location.length:
                raise ProtocolError("a piece that its frame does not have")
            wanted.append((location, start, stop))
        if sum(stop - start for _, start, stop in wanted) > self._segments.segment_bytes:
            raise ProtocolError("a fetch of more than a segment")
        self._spawn(self._answer_fetch(connection, wanted))

    async def _answer_fetch(
        self, connection: _Connection, wanted: Sequence[tuple[Location, int, int]]
    ) -> None:
        try:
            read = await asyncio.gather(*(self._read_or_fault(*piece) for piece in wanted))
            good = [piece for piece in read if not isinstance(piece, TransportError)]
            faults = [piece for piece in read if isinstance(piece, TransportError)]
            codes: list[m.PieceFault] = [
                piece.fault if isinstance(piece, TransportError) else "" for piece in read
            ]
            descriptor = await asyncio.to_thread(_memory_file, good)
        except BaseException:
            self._end(connection)  # else it would wait for its answer for ever
            raise
        try:
            message = str(faults[0])[:1000] if faults else ""
            self._send(connection, m.Fetched(codes, message), [descriptor])
        finally:
            os.close(descriptor)

    # -- frames ------------------------------------------------------------------------------------------

    def _find(self, handle: Handle) -> tuple[int, int]:
        return m.find_frame(handle, self.store, self.instance)

    def _look_for(self, seqs: Iterable[int]) -> None:
        """Receive the commits of these frames if they are not in the books yet."""
        if not all(seq in self._segments for seq in seqs):
            self._drain()

    def _pin_all(self, reader: int, run_id: str, seqs: Sequence[int]) -> list[Location | m.PinState]:
        self._look_for(seqs)
        found: list[Location | m.PinState] = []
        for seq in seqs:
            try:
                found.append(self._segments.pin(reader, seq, run_id))
            except MissingFrame:
                found.append(m.PinState.MISSING)
            except ForeignFrame:
                self._counters["refused_run"] += 1
                found.append(m.PinState.FOREIGN)
        return found

    def _retain(self, seqs: Sequence[int]) -> None:
        self._look_for(seqs)
        try:
            self._segments.retain(seqs)
        except MissingFrame:
            raise TransportError(
                "missing",
                f"a frame that was to be retained is not in {self.store}: it was released; "
                "generate its trajectory again",
            ) from None

    def _release(self, seqs: Sequence[int]) -> None:
        self._look_for(seqs)
        self._counters["released_frames"] += self._segments.release(seqs)
        self._follow_up()

    def _present(self, seqs: Sequence[int]) -> list[bool]:
        self._look_for(seqs)
        return [seq in self._segments for seq in seqs]

    def _view(self, segment: int, offset: int, length: int) -> memoryview:
        start = segment * self._segments.segment_bytes + offset
        return self._ring[start : start + length]

    async def _read(self, location: Location, start: int, stop: int) -> memoryview | bytes:
        if location.tier == "ring":
            assert isinstance(location.place, int)
            return self._view(location.place, location.offset + start, stop - start)
        return await self._tiers[location.tier].read(location, start, stop)

    async def _read_or_fault(
        self, location: Location, start: int, stop: int
    ) -> memoryview | bytes | TransportError:
        try:
            return await self._read(location, start, stop)
        except TransportError as error:
            return error

    # -- lower tiers -------------------------------------------------------------------------------------

    def _follow_up(self) -> None:
        """Do what follows when frames, pins or leases have gone."""
        if self._closing:  # the tiers are of no more use
            return
        dropped = self._segments.take_dropped()
        if dropped:
            self._spawn(self._drop(dropped))
        self._grant()
        if not self._relocating and self._has_cold():
            self._relocating = True
            self._spawn(self._relocate())

    def _has_cold(self) -> bool:
        return (
            bool(self._tiers)
            and self._segments.free < self._low_water
            and self._segments.coldest() is not None
        )

    async def _relocate(self) -> None:
        """Move the frames of cold segments to a lower tier until enough segments are free."""
        pause = _RETRY_SECONDS
        try:
            while self._has_cold():
                segment = self._segments.coldest()
                assert segment is not None
                frames = [
                    (frame, self._view(segment, frame.offset, frame.length))
                    for frame in self._segments.live(segment)
                ]
                copies = await self._take(frames)
                if copies is None:
                    return
                unused = self._segments.relocate(segment, copies)
                await self._drop(unused)
                self._grant()
            pause = 0.0
        finally:
            self._loop.call_later(pause, self._relocate_again)

    def _relocate_again(self) -> None:
        self._relocating = False
        self._follow_up()

    async def _take(self, frames: Sequence[tuple[LiveFrame, memoryview]]) -> dict[int, Location] | None:
        for tier in self._tiers.values():
            try:
                copies = await tier.take(frames)
            except TransportError as error:
                self._counters[f"tier_errors_{tier.name}"] += 1
                _log.warning("%s cannot move frames out of its ring: %s", self.store, error)
                continue
            self._counters[f"relocated_bytes_{tier.name}"] += sum(frame.length for frame, _ in frames)
            return copies
        return None

    async def _drop(self, locations: Iterable[Location]) -> None:
        by_tier: dict[str, list[Location]] = {}
        for location in locations:
            by_tier.setdefault(location.tier, []).append(location)
        for name, tier in self._tiers.items():
            if name in by_tier:
                await tier.drop(by_tier[name])

    def _spawn(self, work: Coroutine[None, None, None]) -> None:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("%s: a task failed", self.store, exc_info=error)


class LocalReader:
    """Reads frames in the store's own process; a context manager, at whose end its pins end."""

    def __init__(self, server: RingServer, number: int, run_id: str) -> None:
        self._server = server
        self._number = number
        self._run_id = run_id

    def pin(self, handles: Sequence[Handle]) -> list[Location | TransportError]:
        """Keep frames where they are; in place of each that cannot be read, tell why.

        Faults are ``missing``, ``foreign`` (of another run), ``damaged`` (not as long as the handle says).
        """
        found: list[tuple[int, int] | TransportError] = []
        for handle in handles:
            try:
                found.append(self._server._find(handle))
            except TransportError as error:
                found.append(error)
        seqs = [each[0] for each in found if not isinstance(each, TransportError)]
        pinned = iter(self._server._pin_all(self._number, self._run_id, seqs))
        answers: list[Location | TransportError] = []
        for handle, each in zip(handles, found, strict=True):
            if isinstance(each, TransportError):
                answers.append(each)
                continue
            location = next(pinned)
            if isinstance(location, m.PinState):
                answers.append(m.not_pinned(handle, location))
            elif location.length != each[1]:
                answers.append(m.wrong_length(handle, location.length))
            else:
                answers.append(location)
        return answers

    async def read(self, location: Location, start: int, stop: int) -> memoryview | bytes:
        """Read bytes `start` to `stop` of a pinned frame: a view in the ring, else a copy. TransportError."""
        piece = await self._server._read(location, start, stop)
        self._server._counters["read_bytes_http"] += len(piece)
        return piece

    def close(self) -> None:
        """Take back the pins; views are invalid from now on."""
        self._server._segments.drop_reader(self._number)
        self._server._follow_up()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _size(nbytes: int) -> str:
    """Bytes for people."""
    return f"{nbytes >> 20} MiB" if nbytes >= 1 << 20 else f"{nbytes >> 10} KiB"


def _memory_file(pieces: Iterable[memoryview | bytes]) -> int:
    """Write pieces into a new file in memory and give its descriptor. OSError."""
    descriptor = os.memfd_create("tracerl-fetched", os.MFD_CLOEXEC)
    try:
        with open(descriptor, "wb", buffering=0, closefd=False) as file:
            for piece in pieces:
                view = memoryview(piece)
                while view:
                    view = view[file.write(view) :]
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor
