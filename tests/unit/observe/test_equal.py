"""The gap at equal weights is that of the first step; ratios are checked against hand calculations."""

from __future__ import annotations

from pathlib import Path

import pytest
from sample_runs import make_step, write_run

from tracerl.observe.equal import equal_weights, equal_weights_table
from tracerl.observe.report import render
from tracerl.observe.run import Run, load_run
from tracerl.observe.runlog import RunLog
from tracerl.observe.summary import Variant, summarize, variants
from tracerl.rl.steprecord import Gap


def first_step(directory: Path, method: str, gap: float, *, seed: int = 1) -> Run:
    """A run whose first step had a gap and whose later ones had others."""
    write_run(directory, method, seed=seed, steps=4)
    with RunLog(directory) as log:  # the last line of a step is the one that counts
        step = make_step(1, method, seed=seed, gap_guided=Gap(mean=gap, max=10 * gap, tokens=100))
        log.write(step.model_dump(mode="json"))
    return load_run(directory)


def made(tmp_path: Path) -> list[Variant]:
    runs = [
        first_step(tmp_path / "bf16", "BF16", 0.02),
        first_step(tmp_path / "qat-1", "QAT", 0.3),
        first_step(tmp_path / "qat-2", "QAT", 0.5, seed=2),
        first_step(tmp_path / "trace", "TRACE", 0.01),
    ]
    return variants(runs)


def test_ratios_are_to_bf16_and_to_qat(tmp_path: Path) -> None:
    # Two seeds of .3 and .5: t(0.975, 1) = 12.706, half-width 12.706 * 0.1 = 1.27; their mean is .4.
    assert equal_weights(made(tmp_path)) == [
        ("Mean (nats)", ["0.02", "0.4 ± 1.3", "0.01"]),
        ("Largest (nats)", ["0.2", "5", "0.1"]),
        ("Mean / BF16's", ["1", "20", "0.5"]),
        ("Mean / QAT's", ["0.05", "1", "0.025"]),
    ]


def test_there_is_no_ratio_to_a_method_that_did_not_run_or_ran_in_two_ways(tmp_path: Path) -> None:
    alike = first_step(tmp_path / "q", "QAT", 0.3), first_step(tmp_path / "t", "TRACE", 0.01)
    other = write_run(tmp_path / "other", "QAT", steps=5)
    assert [name for name, _ in equal_weights(variants(alike))] == [
        "Mean (nats)",
        "Largest (nats)",
        "Mean / QAT's",
    ]
    assert [name for name, _ in equal_weights(variants([*alike, load_run(other)]))] == [
        "Mean (nats)",
        "Largest (nats)",
    ]


@pytest.mark.parametrize("done", [0, None])
def test_a_variant_that_did_no_step_has_no_figure(tmp_path: Path, done: int | None) -> None:
    runs = [first_step(tmp_path / "q", "QAT", 0.3), first_step(tmp_path / "t", "TRACE", 0.01)]
    runs.append(load_run(write_run(tmp_path / "b", "BF16", steps=4, done=0, end="")))
    rows = equal_weights(variants(runs if done is None else runs[1:]))
    assert rows[:2] == (
        []
        if done == 0
        else [
            ("Mean (nats)", ["0.3", "0.01", "–"]),
            ("Largest (nats)", ["3", "0.1", "–"]),
        ]
    )


def test_a_log_that_lost_its_first_step_has_no_gap_at_equal_weights(tmp_path: Path) -> None:
    directory = write_run(tmp_path / "run", "TRACE", steps=4)
    log = directory / "metrics.jsonl"
    lines = log.read_text().splitlines(keepends=True)
    log.write_text("".join(line for line in lines if '"step":1,' not in line.replace(" ", "")))
    summary = summarize(load_run(directory))
    assert (summary.steps_done, summary.gap_first, summary.gap_first_max) == (4, None, None)


def test_it_is_in_the_report_of_several_runs(tmp_path: Path) -> None:
    assert equal_weights_table(made(tmp_path)) is not None
    runs = [load_run(tmp_path / name) for name in ("bf16", "qat-1", "trace")]
    page = render(runs)
    assert "Gap at equal weights" in page
    assert "Mean / QAT&#39;s" in page
    assert "Gap at equal weights" not in render(runs[:1])
    assert equal_weights_table(variants(runs[:1])) is None
