"""Child processes that never outlive their parent: start, notice the end of, and stop.

Each child leads a session of its own, so a Ctrl-C in the terminal reaches the parent alone, and its process
group holds whatever it starts itself; what leaves the group is found by a mark in its environment. A child is
asked to stop with SIGTERM and killed, with all that it started, when it takes too long. When the parent is
killed, `tracerl.runtime.child` ends the child. Linux only.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Self

PARENT_VARIABLE = "TRACERL_PARENT_PID"
"""Tells a child whose death ends it; not set in containers, where nobody but the kubelet ends a process."""
NOTE_VARIABLE = "TRACERL_NOTE_FD"
"""Tells a child the pipe for its `ExitNote`: a pipe, since a full disk is a likely reason for ending."""
MARK_VARIABLE = "TRACERL_MARK"
"""Random for each start of a child and inherited by what it starts, which is found by it."""
TERMINATION_LOG = Path("/dev/termination-log")
"""File of a container from which the kubelet takes the message about its end; nowhere else is there one."""
_NOTE_BYTES = 4_096
"""A pipe takes this much at once (PIPE_BUF), and the kubelet from TERMINATION_LOG."""

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ExitNote:
    """Why a process ended: a `tracerl.api.constants.Reason` and one sentence for the user."""

    reason: str
    message: str

    def send(self) -> None:
        """Hand the note to the parent, else to the kubelet, as far as there is one.

        It is short enough for a pipe to take at once, and for the kubelet, which cuts messages. Of processes
        of a container the first one that ends says why: what others say then comes of that.
        """
        descriptor = os.environ.get(NOTE_VARIABLE)
        if descriptor is not None:
            os.write(int(descriptor), self._encoded())
        elif TERMINATION_LOG.exists():
            try:
                # Empty whenever a container starts.
                if not TERMINATION_LOG.stat().st_size:
                    TERMINATION_LOG.write_bytes(self._encoded())
            except OSError as error:
                log.warning("%s cannot be written (%s)", TERMINATION_LOG, error.strerror)

    def _encoded(self) -> bytes:
        # A name of a file or a program's output may hold what is no text (lone surrogates).
        message = self.message[:2_000].encode("utf-8", "replace").decode()
        while True:
            document = {"reason": self.reason, "message": message}
            encoded = json.dumps(document, ensure_ascii=False).encode()
            if len(encoded) <= _NOTE_BYTES:
                return encoded
            message = message[: len(message) * 9 // 10]

    @classmethod
    def receive(cls, descriptor: int) -> ExitNote | None:
        """The note of a child that ended, or None when it left none; closes the descriptor."""
        os.set_blocking(descriptor, False)
        try:
            document = json.loads(os.read(descriptor, _NOTE_BYTES))
            return cls(str(document["reason"]), str(document["message"]))
        except (BlockingIOError, ValueError):
            # Nothing was written: end of file reads as empty text, which is no JSON.
            return None
        finally:
            os.close(descriptor)


@dataclass(frozen=True)
class ProcessSpec:
    """What to start.

    `log` gets stdout and stderr, appended; `env` is added to this process's environment. `leaves` are files
    that are removed when the process has ended, should it not have done so itself. Processes of one `group`
    cannot go on without each other.
    """

    name: str
    group: str
    arguments: Sequence[str]
    log: Path
    env: Mapping[str, str]
    leaves: Sequence[Path] = ()


@dataclass(frozen=True)
class Ended:
    """A child that ended by itself. `status` is its exit code, or minus the signal that killed it."""

    name: str
    status: int
    note: ExitNote | None = None

    @property
    def killed(self) -> bool:
        """Whether a signal ended it, so that starting it again may help; an exit code would come back."""
        return self.status < 0

    def __str__(self) -> str:
        """Say how it ended, for a sentence."""
        if self.killed:
            number = -self.status
            try:
                name = signal.Signals(number).name
            except ValueError:
                name = f"signal {number}"
            hint = ", as the kernel does when memory is short" if number == signal.SIGKILL else ""
            return f"{self.name} was killed ({name}{hint})"
        return f"{self.name} ended with exit code {self.status}"


class Children:
    """The children of one run. Use as a context manager: leaving it stops and reaps all of them.

    Stopping is SIGTERM, then SIGKILL after `grace_seconds` or as soon as `hurry` is set. `keep_open` is a
    descriptor that every child inherits; a lock on it is held until the last child is gone.
    """

    def __init__(self, *, grace_seconds: float, hurry: threading.Event, keep_open: int | None = None) -> None:
        self._grace_seconds = grace_seconds
        self._hurry = hurry
        self._keep_open = keep_open
        self._running: dict[str, subprocess.Popen[bytes]] = {}
        self._notes: dict[str, int] = {}
        self._marks: dict[str, str] = {}
        self._leaves: dict[str, Sequence[Path]] = {}

    def start(self, spec: ProcessSpec) -> int:
        """Start a process and return its id. OSError when the log cannot be opened or the system is full."""
        if spec.name in self._running:
            raise ValueError(f"{spec.name} runs already")
        spec.log.parent.mkdir(parents=True, exist_ok=True)
        note, child_note = os.pipe()
        inherited = {child_note} if self._keep_open is None else {child_note, self._keep_open}
        mark = secrets.token_hex(16)
        own = {PARENT_VARIABLE: str(os.getpid()), NOTE_VARIABLE: str(child_note), MARK_VARIABLE: mark}
        try:
            with spec.log.open("ab") as log:
                process = subprocess.Popen(  # noqa: S603
                    [*spec.arguments],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env={**os.environ, **spec.env, **own},
                    start_new_session=True,
                    pass_fds=inherited,
                )
        except BaseException:
            os.close(note)
            raise
        finally:
            os.close(child_note)
        self._running[spec.name] = process
        self._notes[spec.name] = note
        self._marks[spec.name] = mark
        self._leaves[spec.name] = spec.leaves
        return process.pid

    def ended(self) -> list[Ended]:
        """Children that ended since the last call, reaped, with all that they had started killed."""
        return [self._reap(name) for name in [*self._running] if self._has_ended(name)]

    def stop(self, names: Iterable[str] | None = None) -> list[Ended]:
        """Stop and reap those of the named children that run, or all, with all that they had started."""
        running = [name for name in (self._running if names is None else names) if name in self._running]
        for name in running:
            # Popen.send_signal would reap one that has just ended, whose number could then be another's.
            os.kill(self._running[name].pid, signal.SIGTERM)
        deadline = time.monotonic() + self._grace_seconds
        while not self._hurry.is_set() and time.monotonic() < deadline:
            if all(self._has_ended(name) for name in running):
                break
            self._hurry.wait(0.02)
        return [self._reap(name) for name in running]

    def _has_ended(self, name: str) -> bool:
        # WNOWAIT leaves the zombie, which keeps the number of its process group from being given away.
        pid = self._running[name].pid
        return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None

    def _reap(self, name: str) -> Ended:
        process = self._running.pop(name)
        os.killpg(process.pid, signal.SIGKILL)
        _kill_marked(self._marks.pop(name))
        ended = Ended(name, process.wait(), ExitNote.receive(self._notes.pop(name)))
        for path in self._leaves.pop(name):
            path.unlink(missing_ok=True)
        return ended

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


def _kill_marked(mark: str) -> None:
    """Kill what a child started in a session or a process group of its own, for example in a reward."""
    entry = f"{MARK_VARIABLE}={mark}".encode()
    killed: set[int] = set()
    # What forked while it was looked for is found the next time; a process that was killed shows nothing.
    while found := {pid for pid in process_ids() if entry in _environment(pid)} - killed:
        for pid in found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        killed |= found


def process_ids() -> list[int]:
    """All processes of this machine that can be seen, but for this one."""
    found = [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdecimal()]
    return [pid for pid in found if pid != os.getpid()]


def _environment(pid: int) -> list[bytes]:
    try:
        return Path("/proc", str(pid), "environ").read_bytes().split(b"\0")
    except OSError:  # it ended, or belongs to another user
        return []


class StopSignals:
    """Ctrl-C, SIGTERM and SIGHUP as a flag instead of an exception, as long as the context lasts.

    A signal that was ignored when the process started (nohup, a background job) stays ignored.
    """

    def __init__(self) -> None:
        self.stop = threading.Event()
        """Set by the first signal."""
        self.hurry = threading.Event()
        """Set by the second: do not wait for anything."""
        self.signal: signal.Signals | None = None
        self._before: dict[signal.Signals, Any] = {}

    @property
    def why(self) -> str:
        """The signal in a user's words."""
        return "Ctrl-C" if self.signal is signal.SIGINT else self.signal.name if self.signal else "no signal"

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        if self.stop.is_set():
            self.hurry.set()
        self.signal = self.signal or signal.Signals(number)
        self.stop.set()

    def __enter__(self) -> Self:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) is not signal.SIG_IGN:
                self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)


def module_arguments(module: str, *arguments: str, python: str = sys.executable) -> list[str]:
    """Arguments that run a module with an interpreter, without the working directory on the import path."""
    return [python, "-P", "-m", module, *arguments]
