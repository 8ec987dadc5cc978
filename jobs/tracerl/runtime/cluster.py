"""What trainer 0 does on a cluster beside the loop, where no `tracerl run` is there to do it.

It says how far it is, copies results to where they are kept, writes the report at the end, and when its pod
is to go it keeps the steps that it did.
"""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import threading
import time
from collections.abc import Callable, Coroutine, Mapping
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from tracerl.api.constants import Reason
from tracerl.api.errors import JobError, TraceRLError
from tracerl.api.job import Progress, Retention
from tracerl.api.pods import progress_map
from tracerl.api.resolved import ResolvedJob
from tracerl.observe.metrics import StepExporter
from tracerl.observe.run import Ending, parse_line
from tracerl.observe.runlog import RunLog
from tracerl.rl.loop import StoppedError
from tracerl.rl.steprecord import FinishRecord, StartRecord, StepRecord
from tracerl.runtime.child import EXIT_SIGTERM, at_sigterm, log_to_file
from tracerl.runtime.display import Lines, show
from tracerl.runtime.output import Output
from tracerl.runtime.progress import ApiServer, ProgressReporter, judged, progress_of
from tracerl.runtime.results import event_files, write_results
from tracerl.runtime.rundir import remove_objects, write_ending
from tracerl.transport.base import TransportError

if TYPE_CHECKING:
    from tracerl.observe.tensorboard import EventFiles

STOP_SECONDS = 27.0
"""What a pod that is to go may take, of the 30 s until it is killed."""

log = logging.getLogger(__name__)

RunLoop = Callable[["ClusterLog", Callable[[], Coroutine[Any, Any, None]]], Coroutine[Any, Any, None]]
"""Runs the loop with a log, and with what it waits for until it is to stop."""


class Stopper:
    """SIGTERM as the end of a wait: of the loop's, or of this process when nobody waits."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: tuple[asyncio.AbstractEventLoop, asyncio.Event] | None = None
        self._kept = False
        self.asked = False

    def ask(self) -> None:
        """Do what SIGTERM is to do; called on a thread that has nothing else to do."""
        with self._lock:
            self.asked = True
            if self._waiting is not None:
                loop, event = self._waiting
                loop.call_soon_threadsafe(event.set)
            elif not self._kept:
                log.info("ended by SIGTERM before there was a step to keep")
                os._exit(EXIT_SIGTERM)
        time.sleep(STOP_SECONDS)
        log.error(
            "SIGTERM came %.0f s ago, and what was to be kept is not all there yet; it is lost", STOP_SECONDS
        )
        os._exit(EXIT_SIGTERM)

    async def wait(self) -> None:
        """Return when the process was asked to stop."""
        event = asyncio.Event()
        with self._lock:
            self._waiting, self._kept = (asyncio.get_running_loop(), event), True
        try:
            await event.wait()
        finally:
            with self._lock:
                self._waiting = None


class ClusterLog:
    """The loop's `Log` on a cluster: run log, metrics, the container's log, progress and output."""

    def __init__(
        self,
        run_log: RunLog,
        exporter: StepExporter,
        reporter: ProgressReporter | None,
        output: Output | None,
        board: EventFiles | None = None,
    ) -> None:
        self._run_log, self._exporter, self._board = run_log, exporter, board
        self._reporter, self._output = reporter, output
        self._last = Progress()
        self._display = Lines(logging.getLogger("tracerl.run").info)

    def write(self, record: Mapping[str, Any]) -> None:
        """Write a record and show it everywhere; JobError, also when results cannot be kept any more."""
        if self._output is not None and record["type"] != "finish":
            self._output.check()
        self._run_log.write(record)
        line = parse_line(dict(record))
        show(line, self._display)
        if isinstance(line, StepRecord):
            self._exporter.observe(line)
            if self._board is not None:
                self._board.step(line)
            self._report(progress_of(line))
        elif isinstance(line, StartRecord):
            self._exporter.start(line)
            if self._board is not None:
                self._board.started(line.resumed_from)
            if not line.resumed_from:
                self._report(Progress(steps=line.steps))
        elif isinstance(line, FinishRecord) and line.step == self._last.step:
            self._report(judged(self._last, line))

    def _report(self, progress: Progress) -> None:
        self._last = progress
        if self._reporter is not None:
            self._reporter.report(progress)

    def progress(self, stage: str, done: int, total: int, **values: float) -> None:
        """Write and show how far something that is not a step has come."""
        self._run_log.progress(stage, done, total, **values)
        self._display.progress(stage, done, total, values)

    def sync(self) -> None:
        """Return when everything written so far would survive a power cut."""
        self._run_log.sync()

    def saved(self, step: int) -> None:
        """Have a checkpoint copied to where it outlives the pod."""
        if self._output is not None:
            self._output.saved(step)


def lead(resolved: ResolvedJob, name: str, exporter: StepExporter, run_loop: RunLoop) -> None:
    """Run the loop to its end and leave its results where the job wants them.

    Raises what the loop raises, and JobError when results could not be kept; SystemExit when it was stopped.
    """
    layout, stopper = resolved.layout, Stopper()
    at_sigterm(stopper.ask)
    with ExitStack() as stack:
        output = None
        try:
            layout.log(name).parent.mkdir(parents=True, exist_ok=True)
            resolved.write(layout.job)
            if resolved.output_uri is not None:
                output = stack.enter_context(Output(resolved, name))
                output.restore()
            log_to_file(layout.log(name))
            layout.result.unlink(missing_ok=True)
        except OSError as error:
            raise JobError(
                Reason.CONFIGURATION,
                f"{error.filename or layout.root} cannot be written ({error.strerror}); let user "
                f"{os.getuid()} write there, and make room",
            ) from error
        run_log = stack.enter_context(RunLog(resolved.run_dir))
        board = stack.enter_context(event_files(resolved, exporter))
        reporter = _reporter(resolved, stack)
        failure: Exception | None = None
        try:
            asyncio.run(run_loop(ClusterLog(run_log, exporter, reporter, output, board), stopper.wait))
            ending = Ending(state="Complete", reason=Reason.COMPLETED, message="all steps are done")
        except StoppedError as stopped:
            ending = Ending(state="Stopped", reason=Reason.INTERRUPTED, message=str(stopped))
        except Exception as error:  # noqa: BLE001  raised below, after the report has told of it
            failure = error
            reason: str = Reason.UNEXPECTED
            if isinstance(error, TraceRLError):
                reason = error.reason if isinstance(error, JobError) else Reason.INVALID_SPEC
            ending = Ending(state="Failed", reason=reason, message=str(error))
        try:
            _conclude(resolved, ending, output)
        except JobError as error:
            if failure is None and not stopper.asked:
                raise
            log.error("%s", error)
        if failure is not None:
            raise failure
    if stopper.asked and ending.state == "Stopped":
        log.info("%s", ending.message)
        raise SystemExit(EXIT_SIGTERM)


def _tidy(resolved: ResolvedJob, *, ended: bool) -> None:
    """Remove what only a run that goes on needs; objects of records stay for nobody when it has `ended`."""
    layout = resolved.layout
    shutil.rmtree(layout.weights, ignore_errors=True)
    if not ended:
        return
    if resolved.job.spec.transport.object.retention is Retention.TRAINED:
        shutil.rmtree(layout.records, ignore_errors=True)
    try:
        remove_objects(resolved)
    except TransportError as error:
        log.warning("records may be left in %s (%s)", resolved.records_uri, error)


def _reporter(resolved: ResolvedJob, stack: ExitStack) -> ProgressReporter | None:
    server = ApiServer.of_pod()
    if server is None:
        log.warning("no API server is known here; progress is in this log alone")
        return None
    return stack.enter_context(ProgressReporter(server, progress_map(resolved.job.metadata.name)))


def _conclude(resolved: ResolvedJob, ending: Ending, output: Output | None) -> None:
    _tidy(resolved, ended=ending.state != "Stopped")
    try:
        write_ending(resolved.layout, ending)
        write_results(resolved.run_dir)
    except OSError as error:
        raise JobError(
            Reason.RUN_LOG_FAILED,
            f"{error.filename or resolved.run_dir} cannot be written ({error.strerror}); make room there",
        ) from error
    finally:
        if output is not None:
            output.finish()
