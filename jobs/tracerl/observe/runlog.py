"""The run log: `metrics.jsonl` (one step record a line) and `events.jsonl` (everything else that happened).

Both files are append-only JSON lines of the records of `tracerl.rl.steprecord`, told apart by their `type`;
`events.jsonl` also has `progress` lines for a display. A line is one `write(2)` on a descriptor opened with
O_APPEND, so several processes may add events and a killed process leaves at most one torn line, which readers
skip and count. Lines survive a killed process at once; they survive a killed machine once `RunLog.sync`
returned, which the trainer calls before it publishes a checkpoint, so a run that resumes finds every step up
to that checkpoint.
"""

from __future__ import annotations

import errno
import json
import math
import os
import time
from collections.abc import Callable, Mapping
from io import BufferedReader
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict

from tracerl.api.constants import Reason
from tracerl.api.errors import JobError
from tracerl.api.resolved import RunLayout, write_atomically
from tracerl.rl.steprecord import EventRecord


class Progress(BaseModel):
    """How far something that is not a step has come, for a display: the warm-up, an evaluation."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    type: Literal["progress"] = "progress"
    time: float
    """Seconds since 1970."""
    stage: str
    """One CamelCase word, for example Warmup."""
    done: int
    total: int
    values: dict[str, float]
    """Numbers to show beside the bar, for example ``{"exact": 0.12}``."""


def _clean(value: Any) -> Any:
    """What JSON and UTF-8 cannot hold: NaN and infinity become null, that is, not measured; lone surrogates
    (a file name that is not UTF-8 in a message) become question marks.
    """
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode()
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {_clean(str(key)): _clean(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_clean(item) for item in value]
    return value


class _Appender:
    """One JSON-lines file opened for append; raises JobError (reason RunLogFailed)."""

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            self._fd = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
            size = os.fstat(self._fd).st_size
            # A torn line is left where it is and closed, never cut off: another process may be appending.
            self._torn = size > 0 and os.pread(self._fd, 1, size - 1) != b"\n"
        except OSError as error:
            raise _failure(self._path, error) from error

    def append(self, document: Mapping[str, Any]) -> None:
        line = _line(document).encode()
        pending = memoryview(b"\n" + line if self._torn else line)
        self._torn = True
        try:
            while pending:
                pending = pending[os.write(self._fd, pending) :]
        except OSError as error:
            raise _failure(self._path, error) from error
        self._torn = False

    def sync(self) -> None:
        try:
            os.fsync(self._fd)
        except OSError as error:
            raise _failure(self._path, error) from error

    def close(self) -> None:
        os.close(self._fd)


def _failure(path: Path, error: OSError) -> JobError:
    if error.errno in {errno.ENOSPC, errno.EDQUOT}:
        return JobError(
            Reason.RUN_LOG_FAILED,
            f"{path} cannot be written because the disk is full; free space there and resume the run, "
            "it continues from its last checkpoint",
        )
    return JobError(
        Reason.RUN_LOG_FAILED,
        f"{path} cannot be written ({error.strerror}); give another run directory with --out",
    )


class RunLog:
    """The writing side of a run log; `write` is the sink of the loop.

    `run_dir` is made when it does not exist. Steps have one writer, the trainer process of rank 0; events may
    be written by every process of the run, each through a RunLog of its own. Errors: JobError with reason
    RunLogFailed.
    """

    def __init__(self, run_dir: Path, *, now: Callable[[], float] = time.time) -> None:
        self._now = now
        self._layout = RunLayout(run_dir)
        try:
            run_dir.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise _failure(run_dir, error) from error
        self._steps = _Appender(self._layout.metrics)
        self._events = _Appender(self._layout.events)

    def write(self, record: Mapping[str, Any]) -> None:
        """Append one record, given as plain JSON values with its `type`.

        A `start` first takes the steps after its `resumed_from` out of the log: they are computed again, and
        no step may appear twice.
        """
        if record["type"] == "step":
            self._steps.append(record)
            return
        if record["type"] == "start":
            self._steps.close()
            _drop_steps_after(self._layout.metrics, record["resumed_from"])
            self._steps = _Appender(self._layout.metrics)
        self._events.append(record)

    def event(self, reason: str, message: str, *, step: int = 0) -> None:
        """Append an event that the loop does not know of, such as a process that was started again."""
        record = EventRecord(run_id="", time=self._now(), step=step, reason=reason, message=message)
        self._events.append(record.model_dump(mode="json"))

    def progress(self, stage: str, done: int, total: int, **values: float) -> None:
        """Append how far `stage` has come."""
        record = Progress(time=self._now(), stage=stage, done=done, total=total, values=values)
        self._events.append(record.model_dump(mode="json"))

    def sync(self) -> None:
        """Return when all lines so far survive a power cut."""
        self._steps.sync()
        self._events.sync()

    def close(self) -> None:
        """Close both files; lines already written stay."""
        self._steps.close()
        self._events.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _drop_steps_after(path: Path, step: int) -> None:
    """Take the steps after `step`, and torn lines, out of a file; a crash leaves the old or the new."""
    records, torn = read_lines(path)
    kept = [record for record in records if _step_of(record) <= step]
    if len(kept) == len(records) and not torn:
        return
    try:
        write_atomically(path, "".join(_line(record) for record in kept))
    except OSError as error:
        raise _failure(path, error) from error


def _line(document: Mapping[str, Any]) -> str:
    return json.dumps(_clean(document), separators=(",", ":"), allow_nan=False) + "\n"


def _step_of(record: Mapping[str, Any]) -> int:
    step = record.get("step")
    return step if isinstance(step, int) else 0


class Tail:
    """Follow a JSON-lines file that another process appends to.

    `poll` returns the documents whose lines were completed since the last call and never blocks. The file
    need not exist yet. When it was replaced (a run that resumed) it is read from its start again, so a caller
    that counts must go by the step of a record. `torn` counts lines that are not a JSON object.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: BufferedReader | None = None
        self._rest = b""
        self.torn = 0

    def poll(self) -> list[dict[str, Any]]:
        """Documents of the lines that were completed since the last call, oldest first."""
        if self._file is not None and self._was_replaced(self._file):
            self.close()
        if self._file is None:
            try:
                self._file = self._path.open("rb")
            except FileNotFoundError:
                return []
            self._rest, self.torn = b"", 0
        *lines, self._rest = (self._rest + self._file.read()).split(b"\n")
        documents = []
        for line in lines:
            document = _parse(line)
            if document is not None:
                documents.append(document)
            elif line.strip():
                self.torn += 1
        return documents

    @property
    def unfinished(self) -> bool:
        """Whether bytes without a line end follow the last line."""
        return bool(self._rest)

    def close(self) -> None:
        """Close the file; the next poll starts from its beginning."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _was_replaced(self, file: BufferedReader) -> bool:
        # The open descriptor keeps the old inode number from being used again, so the comparison is safe.
        try:
            named = self._path.stat()
        except FileNotFoundError:
            return True
        held = os.fstat(file.fileno())
        return (named.st_dev, named.st_ino) != (held.st_dev, held.st_ino)


def _whole(digits: str) -> int:
    """A whole number of a log; ValueError for one that only damage makes so long, and no float can hold."""
    value = int(digits)
    if value.bit_length() > 128:
        raise ValueError(f"a whole number of {len(digits)} digits")
    return value


def _parse(line: bytes) -> dict[str, Any] | None:
    try:
        document = json.loads(line.decode(), parse_int=_whole)
    except (ValueError, RecursionError):
        return None
    return document if isinstance(document, dict) else None


def read_lines(path: Path) -> tuple[list[dict[str, Any]], int]:
    """All JSON objects of a file and the number of torn lines; a file that does not exist is empty."""
    tail = Tail(path)
    try:
        documents = tail.poll()
        return documents, tail.torn + int(tail.unfinished)
    finally:
        tail.close()
