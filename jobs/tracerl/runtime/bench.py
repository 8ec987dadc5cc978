"""`tracerl bench ring`: how fast frames pass from one process to another, beside others that do the same.

Every way gets the same work: a producer has a frame in its memory and hands it over with its hash; a consumer
in another process hashes what it got, compares, and lets go of it. The measure is one process that copies
frames into memory it has touched before and hashes the copy: what no hand-over can do without. All runs of
one repeat follow each other, so a ratio compares neighbours in time; only one way's processes live at once.

Peers that are not installed are left out. They pickle or not as they always do; nothing else here does.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import dataclasses
import importlib
import importlib.metadata
import importlib.util
import json
import math
import mmap
import multiprocessing
import os
import platform
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Protocol

import xxhash
from pydantic.alias_generators import to_camel

from tracerl.api.errors import InputError, TraceRLError
from tracerl.api.frames import FrameKey, Handle, parse_handle
from tracerl.api.job import quantity_bytes
from tracerl.observe.text import seconds, size
from tracerl.transport.base import Borrowed, TransportError, Wanted
from tracerl.transport.ring.client import StoreSink, StoreSource
from tracerl.transport.ring.server import RingServer

KIB, MIB, GIB = 2**10, 2**20, 2**30
FRAME_BYTES = (4 * KIB, 64 * KIB, MIB, 16 * MIB, 64 * MIB)
RING, SINGLY = "ring", "ring, one by one"
COPY_AND_HASH = "copyAndHash"
_SECONDS = 120.0
"""A process that says nothing for so long is stuck."""
_POOL = 64 * MIB
"""The producer's frames: what it sends is not always the same cache lines."""
_HASH_BYTES = 8
HELLO = {"store": "store-0", "job_uid": "bench", "run_id": "bench", "token": "bench"}
"""How producers and readers greet the store of `record_store`."""
_BATCH = 32
"""Most frames that a consumer asks for at once."""
_SHARED_MEMORY = "/dev/shm"  # noqa: S108  asked for its size


@dataclass(frozen=True)
class Settings:
    """What is measured: frame sizes in bytes, and how often."""

    frame_bytes: Sequence[int] = FRAME_BYTES
    repeats: int = 5
    bytes_a_run: int = GIB
    """At least so many bytes pass in one run, but no more than `most_frames` frames."""
    most_frames: int = 20_000
    latencies: int = 1_000
    """Frames that are handed over one at a time, a run; fewer of large ones."""

    @classmethod
    def quick(cls) -> Settings:
        """Seconds instead of minutes: enough to see that it works."""
        return cls((4 * KIB, MIB), repeats=1, bytes_a_run=128 * MIB, most_frames=2_000, latencies=100)

    @classmethod
    def full(cls) -> Settings:
        """At least twice the last cache in every run."""
        return cls(bytes_a_run=max(GIB, 2 * last_cache_bytes()))


def last_cache_bytes() -> int:
    """Size of the largest cache of the first CPU, as the kernel says; 0 where it does not."""
    sizes = [0]
    for file in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        with contextlib.suppress(OSError, ValueError):
            sizes.append(quantity_bytes(file.read_text().strip().replace("K", "Ki").replace("M", "Mi")))
    return max(sizes)


@dataclass(frozen=True)
class Run:
    """One measurement of one way: bytes a second, CPU seconds a GB of all its processes, latencies in s."""

    bytes_per_second: float
    cpu_seconds_per_gigabyte: float
    latencies: tuple[float, ...]


# -- the two ends -----------------------------------------------------------------------------------------


class Sender(Protocol):
    """The producer's end of a way."""

    def put(self, frames: Sequence[bytes]) -> None:
        """Hand frames that belong together over, with their hashes; waits while the consumer is behind."""
        ...

    def close(self) -> None:
        """Let go of everything, after the consumer had all frames."""
        ...


class Receiver(Protocol):
    """The consumer's end of a way."""

    def take(self) -> Sequence[tuple[memoryview, int]]:
        """Wait for frames; bytes and hash of each, valid until `done`."""
        ...

    def done(self) -> None:
        """Let go of the frames taken last."""
        ...

    def close(self) -> None:
        """Let go of everything."""
        ...


@dataclass(frozen=True)
class Wiring:
    """What both ends of a way need to find each other."""

    frame_bytes: int
    depth: int
    """Frames that may be on their way."""
    together: int
    """Frames that the producer has at once, as what one step of an engine emits."""
    directory: str
    ring_bytes: int
    queue: Any = None
    """multiprocessing.Queue's own object."""
    handles: Any = None
    """This process's end of a pipe for handles, which in a job travel with trajectories."""
    store: str = ""
    """Directory of the record store's ring and socket."""


def _hash(data: bytes | memoryview) -> int:
    return xxhash.xxh3_64_intdigest(data)


def wiring_for(frame_bytes: int, directory: str) -> Wiring:
    """Choose ring and depth for a frame size: 256 MiB, or what 32 frames take."""
    ring = max(256 * MIB, 32 * frame_bytes)
    return Wiring(
        frame_bytes,
        depth=max(2, min(128, 64 * MIB // frame_bytes)),
        together=max(1, min(_BATCH, 8 * MIB // frame_bytes)),
        directory=directory,
        ring_bytes=ring,
    )


class _QueueSender:
    def __init__(self, wiring: Wiring) -> None:
        self._queue = wiring.queue

    def put(self, frames: Sequence[bytes]) -> None:
        self._queue.put([(_hash(frame), frame) for frame in frames])

    def close(self) -> None:
        self._queue.close()


class _QueueReceiver:
    def __init__(self, wiring: Wiring) -> None:
        self._queue = wiring.queue

    def take(self) -> Sequence[tuple[memoryview, int]]:
        return [(memoryview(frame), expected) for expected, frame in self._queue.get(timeout=_SECONDS)]

    def done(self) -> None:
        pass

    def close(self) -> None:
        self._queue.close()


class _ZmqSender:
    def __init__(self, wiring: Wiring) -> None:
        zmq = importlib.import_module("zmq")
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.PUSH)
        self._socket.set_hwm(wiring.depth)
        self._socket.bind(f"ipc://{wiring.directory}/zmq")

    def put(self, frames: Sequence[bytes]) -> None:
        parts = [part for frame in frames for part in (_hash(frame).to_bytes(_HASH_BYTES, "little"), frame)]
        self._socket.send_multipart(parts, copy=False)

    def close(self) -> None:
        self._context.destroy()


class _ZmqReceiver:
    def __init__(self, wiring: Wiring) -> None:
        zmq = importlib.import_module("zmq")
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.PULL)
        self._socket.set_hwm(wiring.depth)
        self._socket.rcvtimeo = int(_SECONDS * 1000)
        self._socket.connect(f"ipc://{wiring.directory}/zmq")

    def take(self) -> Sequence[tuple[memoryview, int]]:
        parts = self._socket.recv_multipart(copy=False)
        return [
            (frame.buffer, int.from_bytes(expected.bytes, "little"))
            for expected, frame in zip(parts[::2], parts[1::2], strict=True)
        ]

    def done(self) -> None:
        pass

    def close(self) -> None:
        self._context.destroy()


class _Iceoryx:
    """Ports of one iceoryx2 service. Frames lie in its shared memory behind their hash, filled in place."""

    header = 64

    def __init__(self, wiring: Wiring) -> None:
        self.iox: Any = importlib.import_module("iceoryx2")
        self.iox.set_log_level(self.iox.LogLevel.Error)
        self.node = self.iox.NodeBuilder.new().create(self.iox.ServiceType.Ipc)
        name = Path(wiring.directory).name
        self.frames = (
            self.node.service_builder(self.iox.ServiceName.new(f"{name}/frames"))
            .publish_subscribe(self.iox.Slice[ctypes.c_uint8])
            .subscriber_max_buffer_size(wiring.depth)
            .subscriber_max_borrowed_samples(wiring.depth)
            .enable_safe_overflow(False)
            .open_or_create()
        )
        self.events = (
            self.node.service_builder(self.iox.ServiceName.new(f"{name}/events")).event().open_or_create()
        )


class _IceoryxSender:
    def __init__(self, wiring: Wiring, *, wake: bool) -> None:
        self._ports = _Iceoryx(wiring)
        iox = self._ports.iox
        self._length = self._ports.header + wiring.frame_bytes
        self._publisher = (
            self._ports.frames.publisher_builder()
            .initial_max_slice_len(self._length)
            .max_loaned_samples(1)
            .backpressure_strategy(iox.BackpressureStrategy.RetryUntilDelivered)
            .create()
        )
        self._notifier = self._ports.events.notifier_builder().create() if wake else None

    def put(self, frames: Sequence[bytes]) -> None:
        for frame in frames:
            sample = self._publisher.loan_slice_uninit(self._length)
            view = sample.payload().as_memory_view().cast("B")
            body = view[self._ports.header :]
            body[:] = frame
            view[:_HASH_BYTES] = _hash(body).to_bytes(_HASH_BYTES, "little")
            sample.assume_init().send()
        if self._notifier is not None:
            self._notifier.notify()

    def close(self) -> None:
        del self._publisher, self._notifier, self._ports


class _IceoryxReceiver:
    def __init__(self, wiring: Wiring, *, wake: bool) -> None:
        self._ports = _Iceoryx(wiring)
        self._subscriber = self._ports.frames.subscriber_builder().buffer_size(wiring.depth).create()
        self._listener = self._ports.events.listener_builder().create() if wake else None
        self._sample: Any = None

    def take(self) -> Sequence[tuple[memoryview, int]]:
        deadline = time.monotonic() + _SECONDS
        while (sample := self._subscriber.receive()) is None:
            if self._listener is not None:
                self._listener.timed_wait(self._ports.iox.Duration.from_millis(1))
            if time.monotonic() > deadline:
                raise TimeoutError("iceoryx2 delivered nothing")
        self._sample = sample
        view = sample.payload().as_memory_view().cast("B")
        return [(view[self._ports.header :], int.from_bytes(view[:_HASH_BYTES], "little"))]

    def done(self) -> None:
        self._sample.delete()
        self._sample = None

    def close(self) -> None:
        del self._subscriber, self._listener, self._ports


class _RingSender:
    def __init__(self, wiring: Wiring) -> None:
        self._sink = StoreSink(Path(wiring.store), name="producer", timeout=_SECONDS, **HELLO)
        self._handles = wiring.handles
        self._key = FrameKey(HELLO["job_uid"], HELLO["run_id"], "bench", 0, 1, 0, 1, 0)

    def put(self, frames: Sequence[bytes]) -> None:
        handles = self._sink.put_many([(frame, self._key) for frame in frames], timeout=_SECONDS)
        for handle in handles:
            if isinstance(handle, TransportError):
                raise handle
        self._handles.send_bytes("\n".join(map(str, handles)).encode())

    def close(self) -> None:
        self._sink.close()


class _RingReceiver:
    def __init__(self, wiring: Wiring) -> None:
        self._source = StoreSource(Path(wiring.store), name="consumer", timeout=_SECONDS, **HELLO)
        self._coming = wiring.handles
        self._taken: tuple[Borrowed, list[Handle]] | None = None

    def take(self) -> Sequence[tuple[memoryview, int]]:
        text = self._coming.recv_bytes()
        while text.count(b"\n") < _BATCH and self._coming.poll(0):
            text += b"\n" + self._coming.recv_bytes()
        handles = [Handle(line) for line in text.decode().split("\n")]
        borrowed = self._source.borrow([Wanted(handle) for handle in handles])
        self._taken = borrowed, handles
        frames = []
        for handle, piece in zip(handles, borrowed.pieces, strict=True):
            if isinstance(piece, TransportError):
                raise piece
            frames.append((piece[0], parse_handle(handle).xxh3))
        return frames

    def done(self) -> None:
        if self._taken is not None:
            borrowed, handles = self._taken
            borrowed.release()
            self._source.release(handles)
        self._taken = None

    def close(self) -> None:
        self._source.close()


SENDERS: dict[str, Callable[[Wiring], Sender]] = {
    RING: _RingSender,
    SINGLY: _RingSender,
    "multiprocessing.Queue": _QueueSender,
    "pyzmq": _ZmqSender,
    "iceoryx2": lambda wiring: _IceoryxSender(wiring, wake=True),
    "iceoryx2 polled": lambda wiring: _IceoryxSender(wiring, wake=False),
}
RECEIVERS: dict[str, Callable[[Wiring], Receiver]] = {
    RING: _RingReceiver,
    SINGLY: _RingReceiver,
    "multiprocessing.Queue": _QueueReceiver,
    "pyzmq": _ZmqReceiver,
    "iceoryx2": lambda wiring: _IceoryxReceiver(wiring, wake=True),
    "iceoryx2 polled": lambda wiring: _IceoryxReceiver(wiring, wake=False),
}
PEERS = (SINGLY, "iceoryx2", "iceoryx2 polled", "pyzmq", "multiprocessing.Queue", "ray")
"""Who does the same, nearest first: the ring itself with a message a frame, then others."""
_PACKAGES = {"pyzmq": "zmq", "iceoryx2": "iceoryx2", "iceoryx2 polled": "iceoryx2", "ray": "ray"}


# -- the processes ----------------------------------------------------------------------------------------


def _say(control: Connection, **answer: Any) -> None:
    control.send_bytes(json.dumps(answer).encode())


def _hear(control: Connection, who: str) -> dict[str, Any]:
    if not control.poll(_SECONDS):
        raise BenchError(
            f"the {who} said nothing for {_SECONDS:.0f} s; end what else runs here and try again"
        )
    try:
        answer: dict[str, Any] = json.loads(control.recv_bytes())
    except EOFError:
        raise BenchError(f"the {who} was killed; see whether memory is short") from None
    if "error" in answer:
        raise BenchError(f"the {who} failed: {answer['error']}")
    return answer


class BenchError(TraceRLError):
    """A way of handing frames over did not work."""


def _pool(frame_bytes: int) -> list[bytes]:
    """Frames of random bytes, all different, `_POOL` bytes or two together."""
    block = os.urandom(min(frame_bytes, MIB))
    rest = (block * math.ceil(frame_bytes / len(block)))[8:frame_bytes]
    return [number.to_bytes(8, "little") + rest for number in range(max(2, _POOL // frame_bytes))]


def _guarded(control: Connection, end: Callable[[], None]) -> None:
    try:
        end()
    except Exception as error:  # noqa: BLE001  the parent is told, and goes on with the next way
        with contextlib.suppress(OSError):
            _say(control, error=f"{type(error).__name__}: {error}")


def _producer(way: str, wiring: Wiring, control: Connection, acks: Connection) -> None:
    def end() -> None:
        sender = SENDERS[way](wiring)
        frames = _pool(wiring.frame_bytes)
        _say(control, ready=True)
        while (order := json.loads(control.recv_bytes()))["do"] != "stop":
            times = []
            for start in range(0, order["frames"], order["together"]):
                stop = min(start + order["together"], order["frames"])
                group = [frames[number % len(frames)] for number in range(start, stop)]
                times.append(time.monotonic_ns())
                sender.put(group)
                if order["do"] == "latency":
                    acks.recv_bytes()
            _say(control, times=times if order["do"] == "latency" else times[:1])
        sender.close()

    _guarded(control, end)


def _consumer(way: str, wiring: Wiring, control: Connection, acks: Connection) -> None:
    def end() -> None:
        receiver = RECEIVERS[way](wiring)
        _say(control, ready=True)
        while (order := json.loads(control.recv_bytes()))["do"] != "stop":
            _say(control, ready=True)
            times, left = [], order["frames"]
            while left:
                taken = receiver.take()
                if order["do"] == "latency":
                    times.append(time.monotonic_ns())
                for view, expected in taken:
                    if len(view) != wiring.frame_bytes or _hash(view) != expected:
                        raise BenchError("a frame is damaged")
                left -= len(taken)
                del view, taken
                receiver.done()
                if order["do"] == "latency":
                    acks.send_bytes(b"1")
            _say(control, times=times or [time.monotonic_ns()])
        receiver.close()

    _guarded(control, end)


class Way(Protocol):
    """A running way of handing frames over."""

    def throughput(self, frames: int) -> tuple[float, float]:
        """Hand so many frames over as fast as it goes; seconds, and CPU seconds of all processes."""
        ...

    def latency(self, frames: int) -> list[float]:
        """Hand frames over one at a time; seconds from `put` to bytes that the consumer can read."""
        ...


_SPAWN = multiprocessing.get_context("spawn")


class _Pair:
    """A producer and a consumer process."""

    def __init__(self, way: str, wiring: Wiring) -> None:
        self._together = 1 if way == SINGLY else wiring.together
        ours_p, theirs_p = _SPAWN.Pipe()
        ours_c, theirs_c = _SPAWN.Pipe()
        acks_in, acks_out = _SPAWN.Pipe(duplex=False)
        handles_in, handles_out = _SPAWN.Pipe(duplex=False)
        queue = _SPAWN.Queue(wiring.depth) if way == "multiprocessing.Queue" else None
        self._controls = {"producer": ours_p, "consumer": ours_c}
        to = {**vars(wiring), "queue": queue}
        self._processes = [
            _SPAWN.Process(
                target=_producer,
                args=(way, Wiring(**{**to, "handles": handles_out}), theirs_p, acks_in),
                daemon=True,
            ),
            _SPAWN.Process(
                target=_consumer,
                args=(way, Wiring(**{**to, "handles": handles_in}), theirs_c, acks_out),
                daemon=True,
            ),
        ]
        for process in self._processes:
            process.start()
        for end in (theirs_p, theirs_c, acks_in, acks_out, handles_in, handles_out):
            end.close()
        for who, control in self._controls.items():
            _hear(control, who)

    def _order(self, do: str, frames: int, together: int) -> tuple[list[int], list[int], float]:
        producer, consumer = self._controls.values()
        _say(consumer, do=do, frames=frames)
        _hear(consumer, "consumer")
        before = cpu_seconds()
        _say(producer, do=do, frames=frames, together=together)
        received = _hear(consumer, "consumer")["times"]
        used = cpu_seconds() - before
        return _hear(producer, "producer")["times"], received, used

    def throughput(self, frames: int) -> tuple[float, float]:
        sent, received, used = self._order("throughput", frames, self._together)
        return (received[-1] - sent[0]) / 1e9, used

    def latency(self, frames: int) -> list[float]:
        sent, received, _ = self._order("latency", frames, 1)
        return [(got - put) / 1e9 for put, got in zip(sent, received, strict=True)]

    def close(self) -> None:
        for control in self._controls.values():
            with contextlib.suppress(OSError):
                _say(control, do="stop")
        for process in self._processes:
            process.join(10)
            if process.is_alive():
                process.kill()
                process.join()


def _serve(wiring: Wiring, control: Connection) -> None:
    async def serve() -> None:
        server = RingServer(
            Path(wiring.store),
            store=HELLO["store"],
            job_uid=HELLO["job_uid"],
            token=HELLO["token"],
            ring_bytes=wiring.ring_bytes,
        )
        await server.start()
        _say(control, ready=True)
        await asyncio.to_thread(control.poll, None)
        await server.close()

    _guarded(control, lambda: asyncio.run(serve()))


@contextlib.contextmanager
def record_store(wiring: Wiring) -> Iterator[Wiring]:
    """A record store's process as a job has it, without tiers and HTTP."""
    with tempfile.TemporaryDirectory(prefix="tracerl-bench-", dir=_SHARED_MEMORY) as shared:
        ours, theirs = _SPAWN.Pipe()
        placed = dataclasses.replace(wiring, store=f"{shared}/store-0")
        process = _SPAWN.Process(target=_serve, args=(placed, theirs), daemon=True)
        process.start()
        theirs.close()
        try:
            _hear(ours, "record store")
            yield placed
        finally:
            with contextlib.suppress(OSError):
                _say(ours, do="stop")
            process.join(10)
            if process.is_alive():
                process.kill()
                process.join()


class _Ray:
    """A driver that puts objects and an actor that takes them; the driver starts and stops Ray."""

    def __init__(self, wiring: Wiring) -> None:
        self._control, theirs = _SPAWN.Pipe()
        self._process = _SPAWN.Process(target=_ray_driver, args=(wiring, theirs), daemon=False)
        self._process.start()
        theirs.close()
        _hear(self._control, "Ray driver")

    def throughput(self, frames: int) -> tuple[float, float]:
        before = cpu_seconds()
        _say(self._control, do="throughput", frames=frames)
        first, last = _hear(self._control, "Ray driver")["times"]
        return (last - first) / 1e9, cpu_seconds() - before

    def latency(self, frames: int) -> list[float]:
        _say(self._control, do="latency", frames=frames)
        return [nanoseconds / 1e9 for nanoseconds in _hear(self._control, "Ray driver")["times"]]

    def close(self) -> None:
        with contextlib.suppress(OSError):
            _say(self._control, do="stop")
        self._process.join(30)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()


def _ray_driver(wiring: Wiring, control: Connection) -> None:
    # Ray prints to the terminal whatever it is told; results go to stdout here.
    silent = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silent, 1)
    os.dup2(silent, 2)
    os.environ.update(RAY_USAGE_STATS_ENABLED="0", RAY_AUTH_MODE="disabled")

    def end() -> None:
        ray: Any = importlib.import_module("ray")
        numpy: Any = importlib.import_module("numpy")
        ray.init(
            num_cpus=2,
            include_dashboard=False,
            object_store_memory=max(512 * MIB, 8 * wiring.together * wiring.frame_bytes),
            log_to_driver=False,
            _temp_dir=f"{wiring.directory}/r",
        )

        class Taker:
            def take(self, expected: list[int], *frames: Any) -> int:
                import time  # noqa: PLC0415  the class travels to Ray's worker without its module

                import xxhash  # noqa: PLC0415

                now = time.monotonic_ns()
                if [xxhash.xxh3_64_intdigest(frame) for frame in frames] != expected:
                    raise ValueError("a frame is damaged")
                return now

        taker = ray.remote(Taker).remote()
        frames = [numpy.frombuffer(frame, numpy.uint8) for frame in _pool(wiring.frame_bytes)]

        def put(first: int, count: int) -> Any:
            group = [frames[number % len(frames)] for number in range(first, first + count)]
            return taker.take.remote([_hash(memoryview(frame)) for frame in group], *map(ray.put, group))

        ray.get(put(0, 1))
        _say(control, ready=True)
        while (order := json.loads(control.recv_bytes()))["do"] != "stop":
            if order["do"] == "latency":
                times = []
                for number in range(order["frames"]):
                    started = time.monotonic_ns()
                    times.append(ray.get(put(number, 1)) - started)
            else:
                times, waiting = [time.monotonic_ns()], []
                for first in range(0, order["frames"], wiring.together):
                    waiting.append(put(first, min(wiring.together, order["frames"] - first)))
                    if len(waiting) > 2:
                        ray.get(waiting.pop(0))
                ray.get(waiting)
                times.append(time.monotonic_ns())
            _say(control, times=times)
        ray.shutdown()

    _guarded(control, end)


class _CopyAndHash:
    """The measure: one process, memory that was touched before, a copy and a hash of the copy."""

    def __init__(self, wiring: Wiring) -> None:
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | mmap.MAP_POPULATE
        self._memory = mmap.mmap(-1, wiring.ring_bytes, flags)
        self._view = memoryview(self._memory)
        self._frames = _pool(wiring.frame_bytes)
        self._next = 0

    def _one(self, number: int) -> None:
        frame = self._frames[number % len(self._frames)]
        if self._next + len(frame) > len(self._view):
            self._next = 0
        place = self._view[self._next : self._next + len(frame)]
        place[:] = frame
        _hash(place)
        self._next += len(frame)

    def throughput(self, frames: int) -> tuple[float, float]:
        before, started = time.process_time(), time.perf_counter()
        for number in range(frames):
            self._one(number)
        return time.perf_counter() - started, time.process_time() - before

    def latency(self, frames: int) -> list[float]:
        times = []
        for number in range(frames):
            started = time.perf_counter()
            self._one(number)
            times.append(time.perf_counter() - started)
        return times

    def close(self) -> None:
        self._view.release()
        self._memory.close()


@contextlib.contextmanager
def _running(way: str, wiring: Wiring) -> Iterator[Way]:
    with contextlib.ExitStack() as stack:
        running: Any
        if way == COPY_AND_HASH:
            running = _CopyAndHash(wiring)
        elif way == "ray":
            running = _Ray(wiring)
        else:
            running = _Pair(
                way, stack.enter_context(record_store(wiring)) if way in {RING, SINGLY} else wiring
            )
        stack.callback(running.close)
        yield running


def cpu_seconds() -> float:
    """CPU seconds that all living descendants of this process have used, to the nanosecond."""
    parents: dict[int, int] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            parents[int(stat.parent.name)] = int(stat.read_text().rpartition(")")[2].split()[1])
    mine, waiting = set[int](), {os.getpid()}
    while waiting:
        waiting = {pid for pid, parent in parents.items() if parent in waiting} - mine
        mine |= waiting
    nanoseconds = 0
    for pid in mine:
        for schedstat in Path(f"/proc/{pid}/task").glob("*/schedstat"):
            with contextlib.suppress(OSError):
                nanoseconds += int(schedstat.read_text().split()[0])
    return nanoseconds / 1e9


# -- measuring --------------------------------------------------------------------------------------------


def installed_peers() -> list[str]:
    """Peers that can be imported here."""
    return [
        peer
        for peer in PEERS
        if peer not in _PACKAGES or importlib.util.find_spec(_PACKAGES[peer]) is not None
    ]


def bench_ring(
    settings: Settings, peers: Sequence[str] | None = None, *, say: Callable[[str], None] = lambda _: None
) -> dict[str, Any]:
    """Measure hand-over by the ring and by peers, by default all that are installed.

    Returns the document that `tracerl bench ring --json` prints: for every frame size bytes a second, ratio
    to copying and hashing in one process in the same repeat, CPU seconds a GB (10^9 bytes) and latencies in
    seconds, each a median over repeats. `say` is told what is going on. InputError when a peer is not
    installed.
    """
    installed = installed_peers()
    chosen = installed if peers is None else list(peers)
    for peer in chosen:
        if peer not in installed:
            raise InputError(f"{peer!r} cannot be measured here; choose from {', '.join(installed)}")
    results, left_out = [], []
    for frame_bytes in settings.frame_bytes:
        room = shutil.disk_usage(_SHARED_MEMORY).free
        needed = wiring_for(frame_bytes, "").ring_bytes + 4 * frame_bytes
        if needed > room:
            why = f"{_SHARED_MEMORY} has {size(room)} free of the {size(needed)} that it takes"
            left_out.append({"frameBytes": frame_bytes, "why": why})
            say(f"{size(frame_bytes)}: left out, {why}")
            continue
        pairs, faults = _measure(settings, frame_bytes, [RING, *chosen], say)
        baselines = [(base, base) for found in pairs.values() for _, base in found]
        results.append(
            {
                "frameBytes": frame_bytes,
                **_figures(pairs.pop(RING)),
                "copyAndHash": _figures(baselines),
                "peers": {peer: _figures(found) for peer, found in pairs.items()},
                "faults": faults,
            }
        )
    return {
        "results": results,
        "leftOut": left_out,
        "settings": {to_camel(name): value for name, value in vars(settings).items()},
        "machine": machine(chosen),
    }


def _measure(
    settings: Settings, frame_bytes: int, ways: Sequence[str], say: Callable[[str], None]
) -> tuple[dict[str, list[tuple[Run, Run]]], dict[str, str]]:
    """Runs of each way, each with the run of copying and hashing just before it; what went wrong by way."""
    pairs: dict[str, list[tuple[Run, Run]]] = {way: [] for way in ways}
    faults: dict[str, str] = {}
    for repeat in range(settings.repeats):
        # Another order in each repeat: what a way leaves behind does not always meet the same one.
        turn = repeat % len(ways)
        for way in (*ways[turn:], *ways[:turn]):
            if way in faults:
                continue
            say(f"{size(frame_bytes)}, repeat {repeat + 1} of {settings.repeats}: {way}")
            base = _run(settings, frame_bytes, COPY_AND_HASH)
            try:
                pairs[way].append((_run(settings, frame_bytes, way), base))
            except BenchError as error:
                if way == RING:
                    raise
                faults[way] = str(error)
                say(f"{way}: {error}")
    return {way: found for way, found in pairs.items() if found}, faults


def _run(settings: Settings, frame_bytes: int, way: str) -> Run:
    frames = max(4, min(settings.most_frames, math.ceil(settings.bytes_a_run / frame_bytes)))
    one_by_one = max(10, min(settings.latencies, settings.bytes_a_run // 4 // frame_bytes))
    if way == "ray":
        # A put of Ray takes milliseconds: as many of them would take minutes and say no more.
        frames, one_by_one = min(frames, 1_000), min(one_by_one, 200)
    with tempfile.TemporaryDirectory(prefix="tracerl-bench-") as directory:
        wiring = wiring_for(frame_bytes, directory)
        with _running(way, wiring) as running:
            # Memory is touched for the first time, connections are made.
            running.throughput(max(2, min(settings.most_frames, wiring.ring_bytes // frame_bytes)))
            seconds, cpu = running.throughput(frames)
            latencies = running.latency(one_by_one)
    moved = frames * frame_bytes
    return Run(moved / seconds, cpu / moved * 1e9, tuple(latencies))


def _figures(pairs: Sequence[tuple[Run, Run]]) -> dict[str, Any]:
    latencies = sorted(latency for run, _ in pairs for latency in run.latencies)
    ratios = [run.bytes_per_second / base.bytes_per_second for run, base in pairs]
    return {
        "bytesPerSecond": statistics.median(run.bytes_per_second for run, _ in pairs),
        "ratioToCopyAndHash": statistics.median(ratios),
        "ratios": ratios,
        "cpuSecondsPerGigabyte": statistics.median(run.cpu_seconds_per_gigabyte for run, _ in pairs),
        "latencySeconds": {
            "p50": _percentile(latencies, 0.5),
            "p99": _percentile(latencies, 0.99),
            "p999": _percentile(latencies, 0.999),
            "samples": len(latencies),
        },
    }


def _percentile(ordered: Sequence[float], share: float) -> float | None:
    """Nearest rank; None when so few samples are just their largest."""
    if len(ordered) * (1 - share) < 1:
        return None
    return ordered[math.ceil(len(ordered) * share) - 1]


def machine(packages: Sequence[str] = ()) -> dict[str, Any]:
    """Say what made the figures."""
    model = ""
    with contextlib.suppress(OSError, StopIteration):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        model = next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    versions = {}
    for package in sorted({_PACKAGES.get(name, name) for name in (*packages, "xxhash")}):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version({"zmq": "pyzmq"}.get(package, package))
    return {
        "cpu": model or platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "lastCacheBytes": last_cache_bytes(),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "packages": versions,
    }


def render_bench(document: Mapping[str, Any]) -> str:
    """Write the document as a table: a line a frame size and way."""
    lines = [
        f"{'frames of':>10}  {'way':<25}{'GB/s':>7}{'of copy + hash':>16}{'CPU s/GB':>10}"
        f"{'p50':>11}{'p99':>11}{'p99.9':>11}"
    ]
    for result in document["results"]:
        ways = {RING: result, **result["peers"], "one process, copy + hash": result["copyAndHash"]}
        for number, (way, figures) in enumerate(ways.items()):
            latency = figures["latencySeconds"]
            times = "".join(f"{seconds(latency[p]):>11}" for p in ("p50", "p99", "p999"))
            name = size(result["frameBytes"]) if number == 0 else ""
            lines.append(
                f"{name:>10}  {way:<25}{figures['bytesPerSecond'] / 1e9:>7.2f}"
                f"{figures['ratioToCopyAndHash']:>15.0%} {figures['cpuSecondsPerGigabyte']:>9.2f}{times}"
            )
    lines += [f"{size(left['frameBytes']):>10}  left out: {left['why']}" for left in document["leftOut"]]
    return "\n".join(lines).replace("\N{NO-BREAK SPACE}", " ")
