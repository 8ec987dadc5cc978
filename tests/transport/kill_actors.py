"""The processes of the kill tests: a nursery that forks stores, producers, readers of the product's classes.

Run as ``python kill_actors.py FD``; FD is a socket to `kill_harness.Nursery`. Nothing here judges: processes
write ledgers, and the tests compare them.
"""

from __future__ import annotations

import ctypes
import json
import os
import select
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import xxhash
from kill_ledger import Ledger, Put, Tail, frame_bytes, frame_length, parse_put
from kill_products import open_objects, open_remote, open_sink, open_source, run_store

from tracerl.api.errors import TraceRLError
from tracerl.api.frames import FrameKey, Handle, parse_handle
from tracerl.transport.base import FrameSink, FrameSource, LoanError, TransportError, Wanted

_PR_SET_PDEATHSIG, _PR_SET_PTRACER = 1, 0x59616D61
_SOME_LINES = 8_000
"""Bytes of some hundred lines of a ledger."""
TURN = 12
"""Frames that a producer puts in one turn of its loop, by every way there is."""


def receive(control: socket.socket, block: bool = True) -> dict[str, Any] | None:
    """Take a command; None when there is none yet. Ends the process when the test is gone."""
    try:
        data = control.recv(1 << 20, 0 if block else socket.MSG_DONTWAIT)
    except BlockingIOError:
        return None
    if not data:
        os._exit(0)
    return json.loads(data)


def answer(control: socket.socket, value: Any) -> None:
    """Answer the command taken last."""
    control.send(json.dumps(value).encode())


# -- producer ---------------------------------------------------------------------------------------------


class Producer:
    """Puts frames in all ways that a sink has, and writes each handle into its ledger once it is there.

    `largest` bounds the frames, `turns` the turns of the loop (None: until it is told to stop). It waits
    while its store holds more than `ahead` frames.
    """

    def __init__(
        self,
        control: socket.socket,
        *,
        store: dict[str, Any],
        ledger: str,
        name: str,
        largest: int,
        turns: int | None = None,
        timeout: float = 20.0,
        ahead: int | None = None,
    ) -> None:
        self.control = control
        self.store = store
        self.ledger = Ledger(Path(ledger))
        self.name = name
        self.largest = largest
        self.turns = turns
        self.timeout = timeout
        self.ahead = ahead
        self.index = 0

    def run(self) -> int:
        sink = open_sink(self.store, self.name)
        turn = 0
        try:
            while self.turns is None or turn < self.turns:
                if not self._obey():
                    break
                if self.ahead is not None and self._is_ahead(sink, self.ahead):
                    select.select([self.control], [], [], 0.002)
                    continue
                if turn % 4 == 0:
                    trajectory = f"{self.name}.{turn // 4}"
                    self.ledger.write(f"starts {trajectory}")
                self._turn(sink, trajectory)
                turn += 1
        finally:
            sink.close()
        return 0

    def _is_ahead(self, sink: FrameSink, frames: int) -> bool:
        try:
            return sink.usage().frames > frames
        except TransportError:  # the next put will write it down
            return False

    def _obey(self) -> bool:
        """Answer what the test asks between turns; whether to go on."""
        while (command := receive(self.control, block=False)) is not None:
            if command["op"] == "stop":
                return False
            answer(self.control, {"index": self.index, "threads": threading.active_count()})
        return True

    def _turn(self, sink: FrameSink, trajectory: str) -> None:
        lengths = [frame_length(trajectory, self.index + i, self.largest) for i in range(TURN)]
        frames = [(trajectory, self.index + i, length) for i, length in enumerate(lengths)]
        self.index += TURN
        self._attempt(lambda: self._put(sink, frames[:3]))
        self._attempt(lambda: self._put_many(sink, frames[3:7]))
        self._attempt(lambda: self._fill(sink, frames[7:9]))
        self._attempt(lambda: self._retain(sink, frames[9:]))

    def _attempt(self, act: Callable[[], None]) -> None:
        # A sink's errors are the store's state: they are written down, and the next frame is tried.
        try:
            act()
        except TransportError as error:
            self.ledger.write(f"error {time.monotonic_ns()} {error.fault}: {error}")

    def _key(self, trajectory: str, index: int) -> FrameKey:
        return FrameKey(self.store["job_uid"], self.store["run_id"], trajectory, 0, 1, index, index + 1, 0)

    def _committed(self, frames: Iterable[tuple[str, int, int]], handles: Iterable[Any]) -> None:
        lines = []
        for (trajectory, index, length), handle in zip(frames, handles, strict=True):
            if isinstance(handle, TransportError):
                lines.append(f"error {time.monotonic_ns()} {handle.fault}: {handle}")
            else:
                lines.append(f"put {trajectory} {index} {length} {handle}")
        self.ledger.write(*lines)

    def _put(self, sink: FrameSink, frames: list[tuple[str, int, int]]) -> None:
        for frame in frames:
            handle = sink.put(frame_bytes(*frame), self._key(*frame[:2]), timeout=self.timeout)
            self._committed([frame], [handle])

    def _put_many(self, sink: FrameSink, frames: list[tuple[str, int, int]]) -> None:
        batch = [(frame_bytes(*frame), self._key(*frame[:2])) for frame in frames]
        self._committed(frames, sink.put_many(batch, timeout=self.timeout))

    def _fill(self, sink: Any, frames: list[tuple[str, int, int]]) -> None:
        """In place, and one reservation that is given up half filled."""
        abandoned = sink.reserve(max(frames[0][2], 2), self._key(*frames[0][:2]), timeout=self.timeout)
        abandoned.buffer[: len(abandoned.buffer) // 2] = bytes(len(abandoned.buffer) // 2)
        abandoned.abandon()
        for frame in frames:
            reservation = sink.reserve(frame[2], self._key(*frame[:2]), timeout=self.timeout)
            if frame[2]:
                reservation.buffer[:] = frame_bytes(*frame)
            self._committed([frame], [reservation.commit()])

    def _retain(self, sink: FrameSink, frames: list[tuple[str, int, int]]) -> None:
        """A second reference that is dropped again before anybody reads."""
        handles = []
        for frame in frames:
            handles.append(sink.put(frame_bytes(*frame), self._key(*frame[:2]), timeout=self.timeout))
        sink.retain(handles)
        sink.release(handles)
        self._committed(frames, handles)


def write_objects(
    _: socket.socket, *, place: dict[str, Any], ledger: str, name: str, largest: int, turns: int
) -> int:
    """Put frames into objects; what is in the ledger was settled, and may not be lost."""
    sink = open_objects(place)
    book = Ledger(Path(ledger))
    try:
        for turn in range(turns):
            trajectory = f"{name}.{turn}"
            lines = []
            for index in range(TURN):
                length = frame_length(trajectory, index, largest)
                key = FrameKey(place["job_uid"], place["run_id"], trajectory, 0, 1, index, index + 1, 0)
                handle = sink.put(frame_bytes(trajectory, index, length), key, timeout=20.0)
                lines.append(f"put {trajectory} {index} {length} {handle}")
            settled = threading.Event()
            sink.settle(settled.set)
            if not settled.wait(20.0):
                return 1
            book.write(*lines)
    finally:
        sink.close()
    return 0


# -- reader -----------------------------------------------------------------------------------------------


class Reader:
    """Reads the frames of all ledgers of a directory that are its share, and releases them.

    `start` is a file that says what earlier readers left: where to go on in the ledgers, and frames.

    Bytes are compared once when the frames are borrowed and once more after their last reference is gone and
    producers went on, since a borrowed frame must not change under its reader.
    """

    def __init__(
        self,
        control: socket.socket,
        *,
        store: dict[str, Any],
        puts: str,
        ledger: str,
        name: str,
        share: int = 0,
        shares: int = 1,
        batch: int = 16,
        hold: int = 0,
        once: bool = False,
        remote: bool = False,
        verifies: bool = True,
        start: str | None = None,
    ) -> None:
        self.control = control
        self.store = store
        self.puts = Path(puts)
        self.name = name
        self.share, self.shares = share, shares
        self.batch = batch
        self.hold = hold
        self.once = once
        self.remote = remote
        self.verifies = verifies
        self.held: dict[str, Put] = {}
        self.batches = 0
        self.tails: dict[Path, Tail] = {}
        self.waiting: dict[str, Put] = {}
        if start is not None:
            positions, puts_open = json.loads(Path(start).read_text())
            self.tails = {Path(path): Tail(Path(path), position) for path, position in positions.items()}
            for put in puts_open:
                self._take(Put(*put))
        self.ledger = Ledger(Path(ledger))

    def run(self) -> int:
        source = open_remote(self.store) if self.remote else open_source(self.store, self.name)
        try:
            while True:
                command = receive(self.control, block=False)
                if command is not None:
                    if command["op"] == "stop":
                        break
                    answer(self.control, self._obey(source, command))
                self._look()
                if not self.waiting:
                    if self.once:
                        break
                    select.select([self.control], [], [], 0.002)
                    continue
                self._read(source)
        finally:
            source.close()
        return 0

    def _look(self) -> None:
        for path in self.puts.glob("*.puts"):
            for line in self.tails.setdefault(path, Tail(path)).lines():
                put = parse_put(line)
                if put is not None:
                    self._take(put)
        # What is held back lives long, as frames of slow trajectories do.
        while self.held and (len(self.held) > self.hold or (self.once and not self.waiting)):
            handle = next(iter(self.held))
            self.waiting[handle] = self.held.pop(handle)

    def _take(self, put: Put) -> None:
        draw, share = divmod(parse_handle(put.handle).xxh3, self.shares)
        if share == self.share:
            (self.held if draw % 8 == 0 else self.waiting)[put.handle] = put

    def _obey(self, source: FrameSource, command: dict[str, Any]) -> Any:
        if command["op"] == "forget":
            source.forget(command["trajectories"])
        if command["op"] == "drain":
            self.hold = 0
        return {"waiting": len(self.waiting) + len(self.held), "threads": threading.active_count()}

    def _read(self, source: FrameSource) -> None:
        puts = list(self.waiting.values())[: self.batch]
        handles = [Handle(put.handle) for put in puts]
        lines: list[str] = []
        settled: set[str] = set()
        good: list[Put] = []
        try:
            with source.borrow([Wanted(handle) for handle in handles]) as borrowed:
                for put, piece in zip(puts, borrowed.pieces, strict=True):
                    lines += self._judge(put, piece, good, settled)
                self.ledger.write(*lines, *(f"releasing {put.handle}" for put in good))
                source.release([Handle(put.handle) for put in good])
                settled |= {put.handle for put in good}
                self._pressed()
                for put, piece in zip(puts, borrowed.pieces, strict=True):
                    if not isinstance(piece, TransportError) and not same(piece[0], put):
                        self.ledger.write(f"wrong {put.handle} {time.monotonic_ns()} while-borrowed")
                piece = None
            self.ledger.write(*(f"released {put.handle}" for put in good))
        except LoanError as error:
            # Its store was killed: what was compared was right, and the references went with the store.
            self.ledger.write(f"error {time.monotonic_ns()} {error.fault}: {error}")
            self.ledger.write(*(f"released {put.handle}" for put in good))
        except TransportError as error:
            self.ledger.write(f"error {time.monotonic_ns()} {error.fault}: {error}")
            select.select([self.control], [], [], 0.005)
        for handle in settled:
            del self.waiting[handle]

    def _judge(self, put: Put, piece: Any, good: list[Put], settled: set[str]) -> list[str]:
        now = time.monotonic_ns()
        if isinstance(piece, TransportError):
            if piece.fault in ("missing", "damaged", "foreign"):
                settled.add(put.handle)
                return [f"{'missing' if piece.fault == 'missing' else 'damaged'} {put.handle} {now}"]
            return [f"error {now} {piece.fault}: {piece}"]
        (view,) = piece
        fits = len(view) == put.length and xxhash.xxh3_64_intdigest(view) == parse_handle(put.handle).xxh3
        good.append(put)
        if self.verifies and not fits:
            return [f"damaged {put.handle} {now}"]
        if not same(view, put):
            return [f"wrong {put.handle} {now} at-first"]
        return [f"read {put.handle}"]

    def _pressed(self) -> None:
        """Now and then let producers put some more, if there are any, before the pins are given back."""
        self.batches += 1
        if self.batches % 4:
            return
        before = self._written()
        end = time.monotonic() + 0.02
        while self._written() < before + _SOME_LINES and time.monotonic() < end:
            select.select([self.control], [], [], 0.001)

    def _written(self) -> int:
        return sum(tail.path.stat().st_size for tail in self.tails.values())


def same(view: memoryview, put: Put) -> bool:
    """Whether a frame has the bytes that were put."""
    return view == frame_bytes(put.trajectory, put.index, put.length)


# -- nursery ----------------------------------------------------------------------------------------------

ROLES: dict[str, Callable[..., int]] = {
    "store": run_store,
    "producer": lambda control, **arguments: Producer(control, **arguments).run(),
    "writer": write_objects,
    "reader": lambda control, **arguments: Reader(control, **arguments).run(),
}


def act(request: dict[str, Any], control: socket.socket) -> int:
    """Be the process that was asked for; returns its exit code."""
    libc = ctypes.CDLL(None)
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    libc.prctl(_PR_SET_PTRACER, ctypes.c_ulong(2**64 - 1), 0, 0, 0)
    errors = os.open(request["stderr"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(errors, 2)
    os.close(errors)
    if request["stopped"]:
        os.kill(os.getpid(), signal.SIGSTOP)
    try:
        return ROLES[request["role"]](control, **request["arguments"])
    except TraceRLError as error:
        sys.stderr.write(f"{type(error).__name__}: {error}\n")
        return 1
    except BaseException:  # noqa: BLE001  the process ends here, and the test looks for the traceback
        traceback.print_exc()
        sys.stderr.flush()
        return 70


def main() -> None:
    """Fork actors as asked and tell how they ended, until the test closes the socket."""
    requests = socket.socket(fileno=int(sys.argv[1]))
    requests.send(b"ready")
    while True:
        data, fds, _, _ = socket.recv_fds(requests, 1 << 20, 1)
        if not data:
            return
        request = json.loads(data)
        if request["op"] == "ended":
            requests.send(json.dumps(list(reap())).encode())
            continue
        pid = os.fork()
        if pid == 0:
            requests.close()
            code = act(request, socket.socket(fileno=fds[0]))
            os._exit(code)
        os.close(fds[0])
        if request["stopped"]:
            os.waitpid(pid, os.WUNTRACED)
        requests.send(str(pid).encode())


def reap() -> Iterable[tuple[int, int]]:
    """Children that ended, with exit code or minus the signal."""
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return
        yield pid, os.waitstatus_to_exitcode(status)


if __name__ == "__main__":
    main()
