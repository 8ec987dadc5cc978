"""The copy of a run in an object store, which a fresh pod continues from.

Below `ResolvedJob.output_uri` lies what is in a run directory, under the same names: checkpoints, the run
log, the leader's log, and at the end the model, the report and the ending. A checkpoint's manifest is written
last and deleted first, so that a half one is never taken for a whole one, and the run log is always as new as
the newest checkpoint.
"""

from __future__ import annotations

import logging
import mmap
import os
import shutil
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Self

from tracerl.api.constants import Reason
from tracerl.api.errors import JobError
from tracerl.api.resolved import ResolvedJob
from tracerl.rl.checkpoint import (
    MANIFEST,
    checkpoint_files,
    checkpoint_name,
    checkpoint_step,
    damage,
    is_checkpoint_file,
)
from tracerl.transport.base import Buffer, TransportError
from tracerl.transport.objects.filesystem import CredentialsError, FileSystem, Span, open_filesystem

_DEADLINE_SECONDS = 600.0
"""How long the store may be away before the job fails."""
_AFTER_FAILURE_SECONDS = 20.0
_SLOWEST_BYTES_PER_SECOND = 2**20
_PIECE_BYTES = 32 * 2**20
_CONCURRENCY = 4
_LOG_SECONDS = 60.0
"""The run log is copied so often beside every checkpoint, when it has grown."""

log = logging.getLogger(__name__)


class Output:
    """Copies a run directory to an object store on a thread of its own; use it as a context manager.

    JobError of reason CheckpointFailed when the store cannot be used, or was away for too long; of reason
    Configuration when the secret has no keys.
    """

    def __init__(
        self, resolved: ResolvedJob, leader: str, *, deadline_seconds: float = _DEADLINE_SECONDS
    ) -> None:
        """Open the store of the job, whose `leader` is the process that writes the run directory."""
        assert resolved.output_uri is not None
        self._layout = resolved.layout
        self._keep = resolved.job.spec.trainer.checkpoint.keep
        self._seconds = deadline_seconds
        self._staged = self._layout.root / ".upload"
        logs = (self._layout.metrics, self._layout.events, self._layout.log(leader))
        self._logs = {str(path.relative_to(self._layout.root)): path for path in logs}
        """What grows as long as the run goes on, by its name in the store."""
        self._sizes: dict[str, int] = {}
        """Bytes of those that are in the store."""
        self._steps: dict[int, list[str]] = {}
        """Files of the checkpoints in the store, by their steps."""
        with self._failures():
            self._store: FileSystem = open_filesystem(
                resolved.output_uri,
                endpoint_url=resolved.job.spec.output.endpoint_url,
                credentials=resolved.output_credentials_dir,
                field="spec.output",
                content="results",
                deadline_seconds=deadline_seconds,
                concurrency=_CONCURRENCY,
                part_bytes=_PIECE_BYTES,
            )
        self._changed = threading.Condition()
        self._waiting: int | None = None
        """Step of the staged checkpoint that is to be copied next."""
        self._error: JobError | None = None
        self._closing = False
        self._thread: threading.Thread | None = None

    # -- before the run -----------------------------------------------------------------------------------

    def restore(self) -> None:
        """Fetch run log and newest whole checkpoint, unless the run directory has a run already.

        Then begin to copy. JobError.
        """
        with self._failures():
            found = {entry.path: entry.size for entry in self._store.entries("")}
            checkpoints: dict[int, list[str]] = {}
            for path in found:
                parts = path.split("/")
                step = checkpoint_step(parts[1]) if parts[0] == "checkpoints" and len(parts) == 3 else None
                if step is not None and is_checkpoint_file(parts[2]):
                    checkpoints.setdefault(step, []).append(parts[2])
            self._steps = {step: names for step, names in checkpoints.items() if MANIFEST in names}
            if not self._layout.metrics.exists() and not self._layout.checkpoints.exists():
                self._fetch(found)
            for step in checkpoints.keys() - self._steps.keys():
                self._store.delete([f"{_place(step)}/{name}" for name in checkpoints[step]])
        shutil.rmtree(self._staged, ignore_errors=True)
        with self._failures():
            # Now, so that a job that may not write there fails before its first step.
            self._write("job.yaml", self._layout.job.read_bytes())
        self._thread = threading.Thread(target=self._work, name="output", daemon=True)
        self._thread.start()

    def _fetch(self, found: dict[str, int]) -> None:
        for name, path in self._logs.items():
            if name in found:
                self._read(name, path, found[name])
                self._sizes[name] = found[name]
        for step in sorted(self._steps, reverse=True):
            target = self._layout.checkpoints / checkpoint_name(step)
            partial = target.with_name(f".{target.name}.partial")
            for name in self._steps[step]:
                self._read(f"{_place(step)}/{name}", partial / name, found[f"{_place(step)}/{name}"])
            wrong = damage(partial)
            if wrong is None:
                partial.rename(target)
                log.info("the checkpoint of step %d was fetched from %s", step, self._store.where)
                return
            log.warning(
                "the checkpoint of step %d in %s is damaged (%s); it is dropped",
                step,
                self._store.where,
                wrong,
            )
            shutil.rmtree(partial)
            del self._steps[step]

    def _read(self, name: str, path: Path, size: int) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        spans = [Span(name, start, min(start + _PIECE_BYTES, size)) for start in range(0, size, _PIECE_BYTES)]
        with path.open("wb") as file:
            for first in range(0, len(spans), _CONCURRENCY):
                for piece in self._store.read(spans[first : first + _CONCURRENCY]):
                    if isinstance(piece, TransportError):
                        raise piece
                    file.write(piece)

    # -- while it runs ------------------------------------------------------------------------------------

    def saved(self, step: int) -> None:
        """Copy the checkpoint of this step, which is in the run directory, when its turn comes; JobError.

        A newer one takes the place of one that still waits.
        """
        self.check()
        source, target = (
            self._layout.checkpoints / checkpoint_name(step),
            self._staged / checkpoint_name(step),
        )
        with self._failures():
            target.mkdir(parents=True, exist_ok=True)
            for name in checkpoint_files(source):
                # The loop removes old checkpoints: what is linked here stays until it was copied.
                os.link(source / name, target / name)
        with self._changed:
            late, self._waiting = self._waiting, step
            self._changed.notify()
        if late is not None:
            log.warning(
                "the checkpoint of step %d was not copied to %s before that of step %d was there",
                late,
                self._store.where,
                step,
            )
            shutil.rmtree(self._staged / checkpoint_name(late))

    def check(self) -> None:
        """Raise why something could not be copied, if so; JobError."""
        with self._changed:
            if self._error is not None:
                raise self._error

    def _work(self) -> None:
        try:
            while True:
                with self._changed:
                    self._changed.wait_for(lambda: self._waiting is not None or self._closing, _LOG_SECONDS)
                    step, self._waiting = self._waiting, None
                    if step is None and self._closing:
                        return
                with self._failures("" if step is None else f"the checkpoint of step {step} is not kept: "):
                    self._copy_logs()
                    if step is not None:
                        self._copy_checkpoint(step)
        except JobError as error:
            log.error("%s", error)
            with self._changed:
                self._error = error

    def _copy_logs(self) -> None:
        for name, path in self._logs.items():
            # The last line may be half there.
            data = path.read_bytes() if path.exists() else b""
            data = data[: data.rfind(b"\n") + 1]
            if len(data) != self._sizes.get(name, 0):
                self._write(name, data)
                self._sizes[name] = len(data)

    def _copy_checkpoint(self, step: int) -> None:
        started = time.monotonic()
        staged, place = self._staged / checkpoint_name(step), _place(step)
        if step in self._steps:
            self._drop(step)
        files = checkpoint_files(staged)
        for name in files:
            self._write(f"{place}/{name}", _content(staged / name))
        self._steps[step] = files
        shutil.rmtree(staged)
        log.info(
            "the checkpoint of step %d is in %s after %.1f s",
            step,
            self._store.where,
            time.monotonic() - started,
        )
        for old in sorted(self._steps)[: -self._keep]:
            self._drop(old)

    def _drop(self, step: int) -> None:
        self._store.delete([f"{_place(step)}/{MANIFEST}"])
        self._store.delete([f"{_place(step)}/{name}" for name in self._steps.pop(step)])

    def _write(self, name: str, data: Buffer) -> None:
        size = memoryview(data).nbytes
        self._store.write(name, data, timeout=self._seconds + size / _SLOWEST_BYTES_PER_SECOND)

    # -- after it -----------------------------------------------------------------------------------------

    def finish(self) -> None:
        """Wait until all checkpoints are copied; copy model, report and, last, the ending. JobError.

        When the store failed before, this is tried for a short time and that failure is raised.
        """
        self._end_thread()
        if self._error is not None:
            self._seconds = min(self._seconds, _AFTER_FAILURE_SECONDS)
        with self._failures():
            self._copy_logs()
            copied = (self._layout.model, self._layout.tensorboard)
            files = [path for place in copied for path in sorted(place.rglob("*")) if path.is_file()]
            for path in (*files, self._layout.report, self._layout.summary, self._layout.result):
                if path.exists():
                    self._write(str(path.relative_to(self._layout.root)), _content(path))
        self.check()
        log.info("all results are in %s", self._store.where)

    def _end_thread(self) -> None:
        with self._changed:
            self._closing = True
            self._changed.notify()
        if self._thread is not None:
            self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end_thread()
        self._store.close()

    @contextmanager
    def _failures(self, what: str = "") -> Iterator[None]:
        """Turn what keeps results from being copied into a sentence for the user that begins with `what`."""
        try:
            yield
        except CredentialsError:
            raise
        except TransportError as error:
            there = f"; the newest checkpoint there is of step {max(self._steps)}" if self._steps else ""
            raise JobError(Reason.CHECKPOINT_FAILED, f"{what}{error}{there}") from error
        except OSError as error:
            where = error.filename or self._layout.root
            raise JobError(
                Reason.CHECKPOINT_FAILED,
                f"{what}{where} cannot be copied ({error.strerror}); make room there",
            ) from error


def _place(step: int) -> str:
    return f"checkpoints/{checkpoint_name(step)}"


def _content(path: Path) -> Buffer:
    """Give a file's bytes as far as possible without reading them: it may be larger than the memory left."""
    with path.open("rb") as file:
        if not path.stat().st_size:
            return b""
        # Not closed: parts of it may still be being sent when a write has failed.
        return memoryview(mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ))
