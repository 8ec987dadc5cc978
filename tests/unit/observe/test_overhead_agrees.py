"""The overhead and its parts are one figure, wherever it is shown."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from sample_runs import job_of, make_step, write_run

from tracerl.api.pods import PROGRESS_KEY
from tracerl.observe.metrics import StepExporter
from tracerl.observe.run import load_run
from tracerl.observe.summary import facts, summarize
from tracerl.rl.account import Totals
from tracerl.runtime.progress import progress_of
from tracerl.transport.exposition import text
from tracerl_operator.progress import claimed

STEP = make_step(10)
PARTS = {
    "records": STEP.overhead.records / STEP.overhead.critical_path,
    "guided_kernels": STEP.overhead.guided_kernels / STEP.overhead.critical_path,
    "extra_forward": STEP.overhead.extra_forward / STEP.overhead.critical_path,
}


def of_metrics() -> tuple[float, dict[str, float]]:
    exporter = StepExporter(job_of())
    exporter.observe(STEP)
    samples = {
        (sample.name, sample.labels.get("part")): sample.value
        for family in text_string_to_metric_families(text(exporter).decode())
        for sample in family.samples
    }
    parts = {part: samples["tracerl_step_overhead_part_ratio", part] for part in PARTS}
    return samples["tracerl_step_overhead_ratio", None], parts


def of_status() -> tuple[float, dict[str, float]]:
    """Through the config map that the operator reads."""
    told = {"data": {PROGRESS_KEY: progress_of(STEP).model_dump_json(by_alias=True)}}
    shown = claimed(told, STEP.steps)
    assert shown is not None
    document: dict[str, Any] = json.loads(shown.model_dump_json(by_alias=True))
    parts = document["overheadParts"]
    return float(document["overheadRatio"]), {
        "records": float(parts["records"]),
        "guided_kernels": float(parts["guidedKernels"]),
        "extra_forward": float(parts["extraForward"]),
    }


def of_the_log() -> tuple[float, dict[str, float]]:
    overhead = json.loads(STEP.model_dump_json())["overhead"]
    return overhead["ratio"], {part: overhead[part] / overhead["critical_path"] for part in PARTS}


@pytest.mark.parametrize("read", [of_metrics, of_status, of_the_log])
def test_the_last_steps_overhead_is_the_same_everywhere(read: Any) -> None:
    whole, parts = read()
    # The status has four digits.
    assert parts == pytest.approx(PARTS, rel=1e-3)
    assert whole == pytest.approx(sum(PARTS.values()), rel=1e-3)


def test_the_runs_overhead_is_the_same_in_log_summary_and_counters(tmp_path: Path) -> None:
    """A run without its finish line, so that the summary adds up by itself."""
    run = load_run(write_run(tmp_path / "run", steps=12, done=12, end=""))
    summary, totals, exporter = summarize(run), Totals(), StepExporter(job_of())
    for step in run.steps:
        totals.add(step)
        exporter.observe(step)
    families = {f.name: f.samples for f in text_string_to_metric_families(text(exporter).decode())}
    spent = sum(sample.value for sample in families["tracerl_step_overhead_seconds"])
    (path,) = (sample.value for sample in families["tracerl_step_critical_path_seconds"])
    assert summary.overhead_ratio == pytest.approx(totals.overhead_ratio)
    assert spent / path == pytest.approx(totals.overhead_ratio)
    assert summary.seconds is not None
    parts = (summary.seconds.records, summary.seconds.guided_kernels, summary.seconds.extra_forward)
    assert sum(parts) / summary.seconds.critical_path == pytest.approx(totals.overhead_ratio)


def test_what_the_pairs_say_is_the_last_steps_in_summary_and_table(tmp_path: Path) -> None:
    directory = write_run(tmp_path / "run", steps=12, done=12, end="")
    lines = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    found = {"ratio": 0.052, "low": 0.031, "high": 0.073, "pairs": 4}
    for step, so_far in ((3, None), (9, found)):
        lines[step - 1]["baseline"] = {
            "recorded_seconds": 1.0,
            "bare_seconds": 0.9,
            "step_seconds": 1.1,
            "bare_first": True,
            "so_far": so_far,
        }
    (directory / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    summary = summarize(load_run(directory))
    assert summary.baseline_overhead is not None
    assert summary.baseline_overhead.model_dump() == found
    (shown,) = [value for name, value in facts(summary) if name == "Overhead, A/B"]
    assert (
        shown.replace("\N{NO-BREAK SPACE}", " ")
        .replace("\N{NARROW NO-BREAK SPACE}", " ")
        .startswith("5.2 % of a step's time; 95 % 3.1 % to 7.3 %, over 4 steps")
    )
