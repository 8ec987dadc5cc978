"""What a run leaves for people when it ends: the report page and its figures."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from tracerl.api.errors import InputError
from tracerl.api.job import Expect
from tracerl.api.resolved import ResolvedJob, RunLayout
from tracerl.observe.junit import Outcome
from tracerl.observe.metrics import StepExporter
from tracerl.observe.report import write_report
from tracerl.observe.run import load_run
from tracerl.observe.summary import Summary, summarize, write_summary

if TYPE_CHECKING:
    from tracerl.observe.tensorboard import EventFiles


@contextmanager
def event_files(resolved: ResolvedJob, exporter: StepExporter) -> Iterator[EventFiles | None]:
    """TensorBoard's files of a run that wants them, else None; JobError when the package is not there."""
    if not resolved.job.spec.observe.tensorboard:
        yield None
        return
    from tracerl.observe.tensorboard import EventFiles  # noqa: PLC0415

    files = EventFiles(resolved.layout.tensorboard, exporter)
    try:
        yield files
    finally:
        files.close()


def write_results(directory: Path) -> Summary | None:
    """Write report.html and summary.json of a run; None, and nothing is written, when it never started.

    InputError when the directory is of no run, JobError when it cannot be written.
    """
    layout, run = RunLayout(directory), load_run(directory)
    if not run.starts:
        return None
    summary = summarize(run)
    write_summary(summary, layout.summary)
    write_report([run], layout.report)
    return summary


def run_outcome(directory: Path) -> Outcome:
    """How a run that has ended is to be judged; InputError when the directory is of no run."""
    run = load_run(directory)
    summary = summarize(run)
    if summary.outcome == "Unfinished":
        raise InputError(
            f"{directory} has no end yet, so it cannot be judged; resume it with tracerl run --resume"
        )
    length = summary.ended - summary.started if summary.started and summary.ended else 0.0
    return Outcome(
        job=summary.name,
        complete=summary.outcome == "Complete",
        reason=summary.reason,
        message=summary.message,
        expect=run.job.spec.expect if run.job else Expect(),
        expectations=summary.expectations,
        started=summary.started,
        seconds=max(length, 0.0),
        properties={
            "method": summary.method,
            "variant": summary.variant,
            "steps": f"{summary.steps_done} of {summary.steps_wanted}",
            "restarts": str(summary.restarts + summary.store_restarts + summary.trainer_restarts),
            "report": str(RunLayout(directory).report),
        },
    )
