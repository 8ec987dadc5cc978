"""Starting, tracing and killing the processes of a record store, and what must hold afterwards.

Processes are forked from a nursery, a Python process that has imported the package and does nothing else, so
that one costs milliseconds. strace is attached while a process is stopped before its first own instruction,
hence kills can be placed at every system call of its life.
"""

from __future__ import annotations

import array
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

SECONDS = 30.0
"""Deadline for things that take milliseconds: reached only when they do not happen."""
START_SECONDS = 120.0
"""Deadline of a nursery's start and end, also where the other one is short: it imports the package."""
HERE = Path(__file__).resolve().parent
PACKAGES = HERE.parents[1] / "jobs"
KILLS = os.environ.get("TRACERL_KILLS", "some")
"""How many kills: few, as in CI; some; or all, which is at every system call instead of a sample of them."""
assert KILLS in ("few", "some", "all"), f"TRACERL_KILLS is {KILLS!r}: write few, some or all"
SAMPLE = 40 if KILLS == "few" else 100
"""At how many system calls to kill."""
NO_STRACE = (
    "strace is not installed, and kills at system calls need it: install it (Debian: apt-get install strace)"
)
needs_strace = pytest.mark.skipif(shutil.which("strace") is None, reason=NO_STRACE)


class Violation(AssertionError):  # noqa: N818  what is found is the tested system's fault, not an error here
    """Something that must hold did not: a wrong or lost frame, a leak, a traceback, a process that hangs."""


def wait_until(
    condition: Callable[[], Any], what: str | Callable[[], str], seconds: float | None = None
) -> Any:
    """Look again and again until something holds, and return it; Violation when it never does."""
    seconds = SECONDS if seconds is None else seconds
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        if time.monotonic() > deadline:
            raise Violation(f"waited {seconds:.0f} s in vain: {what() if callable(what) else what}")
        time.sleep(0.001)
    return found


@dataclass
class Actor:
    """A forked process: its pid, our end of its control socket, and where its stderr goes."""

    pid: int
    role: str
    control: socket.socket
    stderr: Path
    nursery: Nursery
    tracer: subprocess.Popen[bytes] | None = None
    trace: Path | None = None
    kill_when_stopped: bool = False

    def ask(self, op: str, **arguments: Any) -> Any:
        """Send one command and return the answer; Violation when none comes, EOFError when the actor died."""
        self.tell(op, **arguments)
        self.control.settimeout(SECONDS)
        try:
            data = self.control.recv(1 << 20)
        except ConnectionError:
            data = b""
        except TimeoutError:
            raise Violation(f"{self.role} did not answer {op} within {SECONDS:.0f} s") from None
        if not data:
            raise EOFError(f"{self.role} ended while it was asked to {op}: {self.errors()}")
        return json.loads(data)

    def tell(self, op: str, **arguments: Any) -> None:
        """Send one command; EOFError when the actor died."""
        try:
            self.control.send(json.dumps({"op": op, **arguments}).encode())
        except (BrokenPipeError, ConnectionError):
            raise EOFError(f"{self.role} is gone: {self.errors()}") from None

    def kill(self, number: int = signal.SIGKILL) -> None:
        """Send a signal; the process may be gone."""
        with suppress(ProcessLookupError):
            os.kill(self.pid, number)

    def attach(self, kill_at: Call | None = None, *, after: bool = False) -> Path:
        """Trace from now on, and kill at a call if one is given; returns the file of the trace.

        The kill comes on entering the call, or `after` it was made and before the next instruction of the
        process: a stop that is pending then ends no call, and `wait` kills what has stopped.
        """
        self.trace = self.stderr.with_suffix(".strace")
        self.trace.touch()
        self.kill_when_stopped = after
        number = "STOP" if after else "KILL"
        injection = (
            [] if kill_at is None else ["-e", f"inject={kill_at[0]}:signal={number}:when={kill_at[1]}"]
        )
        command = ["strace", "-f", "-qq", "-ttt", *injection, "-o", str(self.trace), "-p", str(self.pid)]
        with self.stderr.with_suffix(".strace-stderr").open("wb") as errors:
            self.tracer = subprocess.Popen(command, stdin=subprocess.DEVNULL, stderr=errors)
        return self.trace

    def _stopped(self) -> bool:
        assert self.trace is not None
        return "SIGSTOP {" in self.trace.read_text(errors="replace")

    @property
    def status(self) -> int | None:
        """How it ended: exit code, or minus the signal; None while it lives."""
        return self.nursery.ended().get(self.pid)

    def wait(self) -> int:
        """Wait until it ended and return how."""

        def ended() -> bool:
            if self.kill_when_stopped and self._stopped():
                self.kill()
                self.kill_when_stopped = False
            return self.status is not None

        wait_until(ended, lambda: f"{self.role} ends; {self.where()}")
        if self.tracer is not None:
            self.tracer.wait()
        self.control.close()
        return self.nursery.ended()[self.pid]

    def where(self) -> str:
        """What a hanging process is doing."""
        try:
            state = Path(f"/proc/{self.pid}/status").read_text().split("State:")[1].split("\n")[0].strip()
            call = Path(f"/proc/{self.pid}/wchan").read_text()
        except OSError:
            return "gone"
        return f"state {state}, in {call}, stderr: {self.errors()[-2000:]}"

    def errors(self) -> str:
        """What it wrote to stderr."""
        return self.stderr.read_text(errors="replace") if self.stderr.exists() else ""


_CALL = re.compile(r"^(\d+) +([0-9.]+) (\w+)\(")


Call = tuple[str, int]
"""The n-th call of one system call, counted by itself and for each thread, as strace counts."""


def calls_of(trace: Path) -> list[Call]:
    """Every call in a trace of strace, in the order in which a thread first got to it."""
    counts: Counter[tuple[str, str]] = Counter()
    calls: dict[Call, None] = {}
    with trace.open(errors="replace") as lines:
        for match in filter(None, map(_CALL.match, lines)):
            thread, _, name = match.groups()
            counts[thread, name] += 1
            calls[name, counts[thread, name]] = None
    return list(calls)


def sampled(calls: list[Call], most: int) -> list[Call]:
    """All calls with TRACERL_KILLS=all; else about so many, with all that are made once or twice."""
    if KILLS == "all" or len(calls) <= most:
        return calls
    rare = {(name, number) for name, number in calls if number <= 2}
    often = [call for call in calls if call not in rare]
    step = max(len(often) // max(most - len(rare), 1), 1)
    chosen = rare | set(often[step // 2 :: step])
    return [call for call in calls if call in chosen]


def last_call(trace: Path) -> tuple[str, int]:
    """The system call at which the traced process was killed, and when (monotonic, ns)."""
    calls = [match for line in trace.read_text(errors="replace").splitlines() if (match := _CALL.match(line))]
    if not calls:
        return "none", 0
    ago = time.time() - float(calls[-1][2])
    return calls[-1][3], time.monotonic_ns() - int(ago * 1e9)


class Nursery:
    """A process that forks actors; `packages` is the directory whose `tracerl` they run."""

    def __init__(self, directory: Path, packages: Path = PACKAGES) -> None:
        self.directory = directory
        directory.mkdir(parents=True, exist_ok=True)
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._ended: dict[int, int] = {}
        self._actors = 0
        environment = {**os.environ, "PYTHONPATH": str(packages), "PYTHONDONTWRITEBYTECODE": "1"}
        with (directory / "nursery.stderr").open("wb") as errors:
            self._process = subprocess.Popen(
                [sys.executable, str(HERE / "kill_actors.py"), str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stderr=errors,
                env=environment,
            )
        theirs.close()
        self._socket.settimeout(START_SECONDS)
        if not self._socket.recv(100):
            raise Violation(f"the actors do not start: {(directory / 'nursery.stderr').read_text()}")
        self._socket.settimeout(SECONDS)

    def close(self) -> None:
        """End the nursery, and with it all actors."""
        self._socket.close()
        self._process.wait(START_SECONDS)

    def ended(self) -> dict[int, int]:
        """How actors ended, by pid: exit code, or minus the signal."""
        self._socket.send(b'{"op": "ended"}')
        for pid, status in json.loads(self._socket.recv(1 << 20)):
            self._ended[pid] = status
        return self._ended

    def start(
        self,
        role: str,
        *,
        trace: bool = False,
        kill_at: Call | None = None,
        after: bool = False,
        **arguments: Any,
    ) -> Actor:
        """Fork an actor; it is traced, or killed at a call, from its first instruction on: see `attach`."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._actors += 1
        stderr = self.directory / f"{role}-{self._actors}.stderr"
        stopped = trace or kill_at is not None
        request = {
            "op": "start",
            "role": role,
            "stderr": str(stderr),
            "stopped": stopped,
            "arguments": arguments,
        }
        fds = array.array("i", [theirs.fileno()])
        self._socket.sendmsg(
            [json.dumps(request).encode()], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, fds.tobytes())]
        )
        theirs.close()
        actor = Actor(int(self._socket.recv(100)), role, ours, stderr, self)
        if stopped:
            # strace must have seen the stop before that ends, or it waits for it for ever.
            file = actor.attach(kill_at, after=after)
            wait_until(lambda: "stopped by SIGSTOP" in file.read_text(errors="replace"), "strace attaches")
            actor.kill(signal.SIGCONT)
        return actor


@contextmanager
def nursery(directory: Path, packages: Path = PACKAGES) -> Iterator[Nursery]:
    """A nursery for the time of a with block."""
    made = Nursery(directory, packages)
    try:
        yield made
    finally:
        made.close()


@dataclass
class Leftovers:
    """Files that existed before a test, to tell what it left behind in memory and on disk."""

    places: list[Path]
    before: set[Path] = field(init=False)

    def __post_init__(self) -> None:
        self.before = self._look()

    def _look(self) -> set[Path]:
        return {path for place in self.places if place.is_dir() for path in place.rglob("*")}

    def found(self) -> set[Path]:
        """What is there now and was not before."""
        return self._look() - self.before


@contextmanager
def small_filesystem(path: Path, size: int) -> Iterator[Path]:
    """A tmpfs of so many bytes at `path`: a full disk, a small /dev/shm; skips where mounts are forbidden."""
    path.mkdir()
    sudo = [] if os.geteuid() == 0 else ["sudo", "-n"]
    options = f"size={size},uid={os.geteuid()},gid={os.getegid()},mode=0770"
    mounted = subprocess.run(
        [*sudo, "mount", "-t", "tmpfs", "-o", options, "tracerl-test", str(path)],
        capture_output=True,
        check=False,
    )
    if mounted.returncode:
        pytest.skip(f"no small file system can be mounted here: {mounted.stderr.decode().strip()}")
    try:
        yield path
    finally:
        subprocess.run([*sudo, "umount", "--lazy", str(path)], check=True)
