"""What a run leaves for people when it ends: the report page and its figures."""

from __future__ import annotations

from pathlib import Path

from tracerl.api.resolved import RunLayout
from tracerl.observe.report import write_report
from tracerl.observe.run import load_run
from tracerl.observe.summary import Summary, summarize, write_summary


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
