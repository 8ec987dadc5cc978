"""The summary is arithmetic on step records; its numbers are checked against hand calculations."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from rich.console import Console
from sample_runs import make_finish, make_start, make_step, write_run

from tracerl.api.errors import InputError, JobError
from tracerl.api.resolved import RunLayout
from tracerl.observe.report import render
from tracerl.observe.run import Run, load_run
from tracerl.observe.runlog import RunLog
from tracerl.observe.summary import (
    Estimate,
    _by_short_path,
    comparison,
    comparison_table,
    difference,
    nothing_learned,
    over_seeds,
    summarize,
    summary_table,
    variants,
    wilson,
    write_summary,
)
from tracerl.rl.steprecord import FinishRecord, Gap, Lengths, Overhead, Records, Reward, StepRecord


def run_of(directory: Path, *steps: StepRecord, finish: FinishRecord | None = None) -> Run:
    with RunLog(directory) as log:
        log.write(make_start().model_dump(mode="json"))
        for step in steps:
            log.write(step.model_dump(mode="json"))
        if finish:
            log.write(finish.model_dump(mode="json"))
    return load_run(directory)


def shown(table: object, width: int = 100) -> str:
    console = Console(width=width, record=True, file=open("/dev/null", "w"))  # noqa: PTH123, SIM115
    console.print(table)
    return console.export_text().replace("\u00a0", " ")


@pytest.mark.parametrize(
    ("mean", "n", "low", "high"),
    [
        # Newcombe 1998, table I, method 3 (score interval without continuity correction).
        (81 / 263, 263, 0.2553, 0.3662),
        (15 / 148, 148, 0.0624, 0.1605),
        (0.0, 20, 0.0, 0.1611),
        (1 / 29, 29, 0.0061, 0.1718),
    ],
)
def test_the_interval_over_prompts_is_wilsons(mean: float, n: int, low: float, high: float) -> None:
    estimate = wilson(mean, n)
    assert (estimate.low, estimate.high) == (pytest.approx(low, abs=1e-4), pytest.approx(high, abs=1e-4))


@pytest.mark.parametrize(("mean", "n"), [(1.2, 100), (-0.1, 100), (0.5, 0)])
def test_there_is_no_interval_where_it_would_not_hold(mean: float, n: int) -> None:
    assert wilson(mean, n).low is None


def test_the_interval_over_seeds_is_students() -> None:
    # t(0.975, 2) = 4.303, sample deviation of 1, 2, 3 = 1.
    estimate = over_seeds([1.0, None, 2.0, 3.0])
    assert estimate is not None
    assert (estimate.mean, estimate.n) == (2.0, 3)
    assert estimate.high == pytest.approx(2.0 + 4.303 / 3**0.5)
    assert estimate.show() == "2 ± 2.5"


def test_one_seed_has_no_interval_and_none_has_no_mean() -> None:
    one = over_seeds([0.5])
    assert one == Estimate(mean=0.5, low=None, high=None, n=1, over="seeds")
    assert over_seeds([None]) is None


def test_sums_are_weighted_by_what_they_are_sums_of(tmp_path: Path) -> None:
    def step(number: int, *, gap: float, tokens: int, rows: int, size: int, path: float) -> StepRecord:
        cost = Overhead(
            records=0.1,
            capture=0.0,
            pack=0.0,
            put=0.0,
            fetch=0.1,
            unpack=0.0,
            guided_kernels=0.2,
            extra_forward=0.3,
            critical_path=path,
            ratio=0.6 / path,
        )
        records = Records(
            bytes=size,
            audit_bytes=0,
            rows=rows,
            rows_missing=number,
            missing_by_reason={"version": number},
            bytes_per_token=size / rows,
            frames=1,
        )
        return make_step(
            number,
            gap_guided=Gap(mean=gap, max=10 * gap, tokens=tokens),
            records=records,
            overhead=cost,
            response_tokens=tokens,
        )

    run = run_of(
        tmp_path,
        step(1, gap=0.1, tokens=100, rows=10, size=100, path=1.0),
        step(2, gap=0.4, tokens=300, rows=30, size=600, path=3.0),
    )
    summary = summarize(run)
    assert summary.gap_guided == pytest.approx((0.1 * 100 + 0.4 * 300) / 400)
    assert summary.gap_guided_max == 4.0
    assert summary.record_bytes_per_token == pytest.approx(700 / 40)
    assert summary.overhead_ratio == pytest.approx(1.2 / 4.0)
    assert summary.tokens_per_second == pytest.approx(400 / 4.0)
    assert (summary.rows, summary.rows_missing, summary.missing_by_reason) == (40, 3, {"version": 3})
    assert (summary.outcome, summary.steps_done, summary.steps_wanted) == ("Unfinished", 2, 40)


def test_the_loops_own_figures_win_because_expectations_were_judged_by_them(tmp_path: Path) -> None:
    finish = make_finish(step=1).model_copy(update={"gap_guided_mean": 0.123, "overhead_ratio": 0.4})
    summary = summarize(run_of(tmp_path, make_step(1), finish=finish))
    assert (summary.gap_guided, summary.overhead_ratio) == (0.123, 0.4)
    assert summary.expectations == finish.expectations


def test_the_end_of_the_processes_is_the_last_word(tmp_path: Path) -> None:
    directory = write_run(tmp_path / "run", done=3)
    RunLayout(directory).result.write_text(
        json.dumps(
            {
                "state": "Failed",
                "reason": "RestartsExhausted",
                "message": "m",
                "restarts": {"store-0": 2, "trainer-0": 1},
            }
        )
    )
    summary = summarize(load_run(directory))
    assert (summary.outcome, summary.reason, summary.message) == ("Failed", "RestartsExhausted", "m")
    assert (summary.store_restarts, summary.trainer_restarts, summary.resumes) == (2, 1, 0)
    assert "0 of rollouts, 2 of record stores, 1 of the trainer" in shown(summary_table(summary))


def test_a_run_that_was_taken_up_again_is_unfinished_until_its_new_end(tmp_path: Path) -> None:
    directory = write_run(tmp_path / "run", done=3, end="Failed")
    with RunLog(directory) as log:
        again = make_start(resumed_from=2).model_copy(update={"time": make_finish().time + 60})
        log.write(again.model_dump(mode="json"))
    summary = summarize(load_run(directory))
    assert (summary.outcome, summary.steps_done, summary.resumes) == ("Unfinished", 2, 1)
    assert "0 of the trainer; went on from a checkpoint once" in shown(summary_table(summary))


def test_mean_lengths_are_over_trajectories(tmp_path: Path) -> None:
    def step(number: int, trajectories: int, prompt: float, response: float) -> StepRecord:
        lengths = Lengths(prompt_mean=prompt, prompt_max=20, response_mean=response, response_max=20)
        return make_step(number, trajectories=trajectories, lengths=lengths)

    summary = summarize(run_of(tmp_path, step(1, 100, 10.0, 4.0), step(2, 300, 12.0, 6.0)))
    assert (summary.prompt_tokens_mean, summary.response_tokens_mean) == (11.5, 5.5)
    assert "11.5 of a prompt, 5.5 of a response" in shown(summary_table(summary))
    (tokens,) = re.findall(r"<td>11\.5</td>\s*<td>5\.5</td>", render([load_run(tmp_path)]))
    assert tokens


def test_summary_json_is_valid_and_written_whole(tmp_path: Path) -> None:
    summary = summarize(load_run(write_run(tmp_path / "run", done=12)))
    path = tmp_path / "summary.json"
    write_summary(summary, path)
    assert type(summary).model_validate_json(path.read_text()) == summary
    with pytest.raises(JobError, match="make room"):
        write_summary(summary, tmp_path / "missing" / "summary.json")


def test_the_table_says_what_was_measured_and_how_sure_it_is(tmp_path: Path) -> None:
    text = shown(summary_table(summarize(load_run(write_run(tmp_path / "run")))))
    assert "canary  TRACE, 1-bit codes, LastHalf  Complete  40 of 40 steps" in text
    assert "0.55 (0.49–0.61) → 0.73 (0.67–0.78), +0.18; 95 % over 256 prompts" in text
    assert "0.063 nats; guided is 7.9 % of it" in text
    assert "4 of 327,680 (missing 3, checksum 1)" in text
    assert "met  maxGapRatio at most 0.5: 0.079" in text


def test_the_table_of_a_failed_run_names_the_reason(tmp_path: Path) -> None:
    text = shown(summary_table(summarize(load_run(write_run(tmp_path / "run", done=7, end="Failed")))))
    assert "Failed  7 of 40 steps" in text
    assert "RecordsMissing: 12 % of the record rows of step 7 are missing" in text


def test_runs_that_differ_in_seeds_alone_are_one_variant(tmp_path: Path) -> None:
    runs = [
        load_run(write_run(tmp_path / f"{method}-{seed}", method, seed=seed, steps=10))
        for method in ("QAT", "TRACE")
        for seed in (1, 2, 3)
    ]
    made = variants(runs)
    assert [(one.label, len(one.runs)) for one in made] == [("QAT", 3), ("TRACE, 1-bit codes, LastHalf", 3)]
    held_out = made[0].held_out
    assert held_out is not None
    # 0.61, 0.62, 0.63 at the last evaluation.
    assert (held_out.mean, held_out.over) == (pytest.approx(0.62), "seeds")
    assert held_out.high == pytest.approx(0.62 + 4.303 * 0.01 / 3**0.5)
    text = shown(comparison_table(made), width=80)
    assert "0.62 ± 0.025" in text


def test_a_difference_has_welchs_interval() -> None:
    # Three seeds each, variance 1: 4 degrees of freedom, quantile 2.776, standard error sqrt(2 / 3).
    made = difference(over_seeds([1, 2, 3]), over_seeds([11, 12, 13]))
    assert made is not None
    assert (made.mean, made.low) == (pytest.approx(10), pytest.approx(10 - 2.776 * (2 / 3) ** 0.5))
    # Variances 1 and 0: what varies is the first alone, with its 2 degrees of freedom.
    made = difference(over_seeds([1, 2, 3]), over_seeds([5, 5, 5]))
    assert made is not None
    assert made.high == pytest.approx(3 + 4.303 / 3**0.5)
    assert difference(over_seeds([1]), over_seeds([3, 4])) == Estimate(
        mean=2.5, low=None, high=None, n=1, over="seeds"
    )
    assert difference(None, over_seeds([1])) is None


def test_two_variants_have_their_differences_beside_them(tmp_path: Path) -> None:
    runs = [load_run(write_run(tmp_path / name, name, steps=10)) for name in ("QAT", "TRACE", "BF16")]
    heads, rows = comparison(variants(runs[:2]))
    assert heads == ("QAT", "TRACE, 1-bit codes, LastHalf", "Second − first")
    # 0.063 and 0.005, each with the noise of its seed.
    gaps = [summarize(run).gap_guided or 0.0 for run in runs]
    assert float(dict(rows)["Gap (nats)"][2]) == pytest.approx(gaps[1] - gaps[0], rel=0.01)
    assert dict(rows)["Gap, unguided (nats)"][2] == "–"
    page = render(runs[:2])
    assert "Second − first" in page
    assert "Second − first" not in render(runs)


def test_variants_with_one_label_are_told_apart_by_the_fields_that_differ(tmp_path: Path) -> None:
    first = load_run(write_run(tmp_path / "a", "QAT", steps=10))
    second = load_run(write_run(tmp_path / "b", "QAT", steps=20))
    made = variants([first, second])
    assert [one.label for one in made] == ["QAT, A", "QAT, B"]
    assert [one.note for one in made] == ["A: algorithm.steps 10", "B: algorithm.steps 20"]
    assert "A: algorithm.steps 10\nB: algorithm.steps 20\n" in shown(comparison_table(made))


def test_the_path_of_a_field_is_as_short_as_it_can_be_without_being_another_fields() -> None:
    paths = ["trainer.parallelism.data", "rollout.parallelism.data", "algorithm.evaluation.every", "seed"]
    assert list(_by_short_path({tuple(path.split(".")): 1 for path in paths})) == [
        "trainer.parallelism.data",
        "rollout.parallelism.data",
        "evaluation.every",
        "seed",
    ]


@pytest.mark.parametrize(
    ("rewards", "said"),
    [
        ((0.0, 0.0), "in 2 of 2 steps: nothing could be learned; warm up, or make the task easier"),
        ((1.0, 1.0), "in 2 of 2 steps: nothing could be learned; make the task harder"),
        ((0.0, 0.5), ""),
        ((), ""),
    ],
)
def test_a_run_without_a_learning_signal_says_so(
    tmp_path: Path, rewards: tuple[float, ...], said: str
) -> None:
    steps = [
        make_step(
            number,
            reward=Reward(mean=mean, std=0, min=0, max=1, groups=4, groups_without_signal=4 - (mean == 0.5)),
        )
        for number, mean in enumerate(rewards, start=1)
    ]
    run = run_of(tmp_path, *steps)
    sentence = nothing_learned(summarize(run))
    assert sentence.endswith(said)
    assert bool(sentence) == bool(said)
    assert ("No group had two different rewards" in render([run])) == bool(said)
    assert ("Nothing learned" in shown(summary_table(summarize(run)))) == bool(said)


@pytest.mark.parametrize(("steps", "words"), [(3, "on average"), (12, "in the last 10")])
def test_the_span_of_the_training_reward(tmp_path: Path, steps: int, words: str) -> None:
    text = shown(summary_table(summarize(load_run(write_run(tmp_path / "run", steps=steps)))))
    assert re.search(rf"in the first step → \S+ {words} *\n", text)


def test_a_gain_has_its_sign(tmp_path: Path) -> None:
    runs = [load_run(write_run(tmp_path / method, method, steps=10)) for method in ("QAT", "TRACE")]
    # 0.61 at the end, 0.55 before.
    assert re.search(r"Gain +\+0\.06 +\+0\.06 +0\n", shown(comparison_table(variants(runs))))
    assert "+0.06;" in shown(summary_table(summarize(runs[0])))


def test_a_directory_without_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="is not a run directory"):
        load_run(tmp_path)
