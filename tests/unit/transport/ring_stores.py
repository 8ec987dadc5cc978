"""A store of the ring in a thread of the test, its clients, and a bare connection for hostile ones."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import itertools
import os
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar

from tracerl.api.frames import FrameKey
from tracerl.transport.base import TransportError
from tracerl.transport.ring import messages as m
from tracerl.transport.ring.client import StoreSink, StoreSource
from tracerl.transport.ring.segments import LiveFrame, Location
from tracerl.transport.ring.server import RingServer, Tier

JOB, RUN, TOKEN, STORE = "job-uid", "run-1", "a secret", "store-0"
RING = 32 * 65_536
"""Bytes; its segments have 64 KiB."""
SEGMENT = 65_536

IDENTITY: dict[str, Any] = {"store": STORE, "job_uid": JOB, "run_id": RUN, "token": TOKEN, "timeout": 20.0}

_Result = TypeVar("_Result")


def key(trajectory: str = "t-0", run_id: str = RUN, job_uid: str = JOB) -> FrameKey:
    return FrameKey(job_uid, run_id, trajectory, 0, 1, 0, 9, 1)


def eventually(holds: Callable[[], bool]) -> None:
    """Wait until something holds that other threads and the kernel bring about."""
    end = time.monotonic() + 30
    while not holds():
        assert time.monotonic() < end, "it never held"
        time.sleep(0.002)


def open_files() -> int:
    gc.collect()  # what earlier tests' errors keep open
    return len(list(Path("/proc/self/fd").iterdir()))


class RunningStore:
    """A store whose event loop runs in a thread."""

    def __init__(self, path: Path, ring_bytes: int = RING, tiers: Sequence[Tier] = ()) -> None:
        self.path = path
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()
        self._clients = contextlib.ExitStack()
        try:
            self.server = self.call(self._open, ring_bytes, tiers)
        except BaseException:
            self._end_loop()
            raise

    async def _open(self, ring_bytes: int, tiers: Sequence[Tier]) -> RingServer:
        server = RingServer(
            self.path, store=STORE, job_uid=JOB, token=TOKEN, ring_bytes=ring_bytes, tiers=tiers
        )
        await server.start()
        return server

    def call(self, work: Callable[..., Coroutine[None, None, _Result]], *arguments: Any) -> _Result:
        """Run a coroutine on the store's loop."""
        return asyncio.run_coroutine_threadsafe(work(*arguments), self._loop).result(timeout=30)

    def do(self, work: Callable[..., _Result], *arguments: Any) -> _Result:
        """Call a method on the store's loop."""

        async def run() -> _Result:
            return work(*arguments)

        return self.call(run)

    def sink(self, name: str = "rollout-0", **changes: Any) -> StoreSink:
        return self._clients.enter_context(
            contextlib.closing(StoreSink(self.path, name=name, **{**IDENTITY, **changes}))
        )

    def source(self, name: str = "trainer-0", **changes: Any) -> StoreSource:
        return self._clients.enter_context(
            contextlib.closing(StoreSource(self.path, name=name, **{**IDENTITY, **changes}))
        )

    @contextlib.contextmanager
    def stopped(self) -> Iterator[None]:
        """Keep the store from doing anything, as SIGSTOP does with its process."""
        stands, goes_on = threading.Event(), threading.Event()

        def stand() -> None:
            stands.set()
            goes_on.wait(60)

        self._loop.call_soon_threadsafe(stand)
        assert stands.wait(20)
        try:
            yield
        finally:
            goes_on.set()

    def cut(self, role: m.Role) -> None:
        """End the connections of this role from the store's side."""

        def end() -> None:
            for each in list(self.server._connections.values()):
                if each.hello is not None and each.hello.role == role:
                    self.server._end(each)

        self.do(end)

    def counter(self, name: str) -> int:
        return self.do(self.server.status).counters[name]

    def free(self) -> int:
        return self.do(self.server.status).counts.segments["free"]

    def close(self) -> None:
        self._clients.close()
        self.stop()

    def stop(self) -> None:
        """End the store and leave its clients as they are."""
        if not self._loop.is_closed():
            self.call(self.server.close)
            self._end_loop()

    def _end_loop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


class Bare:
    """A connection that sends what it likes."""

    def __init__(self, path: Path) -> None:
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.socket.settimeout(20)
        self.socket.connect(os.fspath(path / "socket"))

    def hello(self, role: m.Role, *, token: str = TOKEN, job_uid: str = JOB, run_id: str = RUN) -> m.Message:
        self.send(m.Hello(job_uid, run_id, role, token, "bare"))
        return self.receive()

    def send(self, message: m.Message) -> None:
        self.socket.send(m.encode(message))

    def receive(self) -> m.Message:
        data, files, _, _ = socket.recv_fds(self.socket, m.MAX_MESSAGE, 253)
        for file in files:
            os.close(file)
        assert data, "the connection was ended"
        return m.decode(memoryview(data))

    def is_ended(self) -> bool:
        """Whether the store ends the connection, whatever it says before."""
        try:
            while self.socket.recv(m.MAX_MESSAGE):
                pass
        except ConnectionResetError:
            pass
        return True

    def close(self) -> None:
        self.socket.close()


class FileTier:
    """A tier of one real file a segment, which does as it is told."""

    def __init__(self, name: Literal["spill", "object"], path: Path, *, distant: bool = False) -> None:
        self._name = name
        self._path = path
        self._distant = distant
        self._files: dict[str, int] = {}
        self._numbers = itertools.count()
        self.held: dict[tuple[str, int], int] = {}
        self.full = False
        self.broken = False
        self.gate = threading.Event()
        """While it is clear, `take` waits after it has read the frames."""
        self.gate.set()
        self.taking = threading.Event()

    @property
    def name(self) -> Literal["spill", "object"]:
        return self._name

    async def take(self, frames: Sequence[tuple[LiveFrame, memoryview]]) -> dict[int, Location]:
        if self.full:
            raise TransportError("full", f"no space is left in {self._path}; free some")
        place = f"{self._name}-{next(self._numbers)}"
        descriptor, path = tempfile.mkstemp(dir=self._path)
        Path(path).unlink()
        self._files[place] = descriptor
        locations, offset = {}, 0
        for frame, view in frames:
            os.write(descriptor, view)
            locations[frame.seq] = Location(self._name, place, offset, frame.length)
            self.held[place, offset] = frame.length
            offset += frame.length
        self.taking.set()
        await asyncio.to_thread(self.gate.wait)
        return locations

    async def drop(self, locations: Sequence[Location]) -> None:
        for location in locations:
            del self.held[str(location.place), location.offset]

    def descriptor(self, location: Location) -> int | None:
        return None if self._distant else self._files[str(location.place)]

    async def read(self, location: Location, start: int, stop: int) -> bytes:
        if self.broken:
            raise TransportError("failed", "the object store answers 503; wait until it is back")
        assert 0 <= start <= stop <= location.length
        return os.pread(self._files[str(location.place)], stop - start, location.offset + start)

    def close(self) -> None:
        for descriptor in self._files.values():
            os.close(descriptor)


@contextlib.contextmanager
def running(path: Path, **arguments: Any) -> Iterator[RunningStore]:
    store = RunningStore(path, **arguments)
    try:
        yield store
    finally:
        store.close()
