"""The whole loop with real engines: it repeats, resumes, survives restarts, and says why it stops."""

from __future__ import annotations

import asyncio
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import TypeAdapter
from rl_harness import SHAPE, Log, make_job, rollout, run, trainer

from tracerl.api.errors import JobError
from tracerl.engines.reference.trainer import ReferenceTrainer
from tracerl.rl.loading import RecordLoader
from tracerl.rl.loop import StoppedError, run_loop
from tracerl.rl.steprecord import RunRecord

LINE: TypeAdapter[RunRecord] = TypeAdapter(RunRecord)


def objects(directory: Path) -> list[Path]:
    return list((directory / "records").rglob("*.trecs"))


async def test_two_runs_repeat_exactly_and_a_resumed_one_continues_exactly(tmp_path: Path) -> None:
    first = await run(make_job(tmp_path / "a"))
    again = await run(make_job(tmp_path / "b"))
    assert [step["step"] for step in first.of("step")] == [1, 2, 3, 4]
    assert again.repeatable == first.repeatable
    for line in first.lines:
        assert LINE.validate_python(line).model_dump(mode="json") == line

    # Stopped in the middle of step 4: step 3 is logged, the newest checkpoint is of step 2.
    resolved = make_job(tmp_path / "c")
    task: asyncio.Task[Any] | None = None

    def stop(line: Mapping[str, Any]) -> None:
        if line["type"] == "step" and line["step"] == 3:
            assert task is not None
            task.cancel()

    cut = Log(stop)
    task = asyncio.create_task(run(resolved, cut))
    with pytest.raises(asyncio.CancelledError):
        await task
    assert cut.repeatable == first.repeatable[:3]
    assert not cut.of("finish")
    resumed = await run(resolved)
    assert resumed.of("start")[0]["resumed_from"] == 2
    assert resumed.repeatable == first.repeatable[2:]
    for key in ("held_out_first", "held_out_last", "reward_first", "gap_guided_mean", "rows_missing"):
        assert resumed.of("finish")[0][key] == first.of("finish")[0][key]


async def test_a_run_that_is_asked_to_stop_keeps_every_step(tmp_path: Path) -> None:
    """Though checkpoints are due every second step only, and the rollout goes at the same time."""
    whole = await run(make_job(tmp_path / "a"))
    job, asked, running = make_job(tmp_path / "b"), asyncio.Event(), asyncio.get_running_loop()

    async def serve() -> None:
        async with rollout(job):
            await asked.wait()

    class Asked(ReferenceTrainer):
        def update(self) -> float:
            """Ask in step 3, while it computes."""
            if cut.of("step")[-1:] and cut.of("step")[-1]["step"] == 2:
                running.call_soon_threadsafe(asked.set)
            return super().update()

    cut = Log()
    serving = asyncio.create_task(serve())
    with pytest.raises(StoppedError, match="stopped after step 3, which is in a checkpoint"):
        await run_loop(job, Asked(SHAPE, job.job.spec), cut, asked_to_stop=asked.wait)
    await serving
    assert cut.saved_steps == [2, 3]
    assert not cut.of("finish")
    assert cut.repeatable == whole.repeatable[:3]
    resumed = await run(job)
    assert resumed.of("start")[0]["resumed_from"] == 3
    assert resumed.repeatable == whole.repeatable[3:]


async def test_a_run_that_is_asked_to_stop_while_it_waits_stops_at_once(tmp_path: Path) -> None:
    """Nothing generates any more after step 1."""
    job, asked = make_job(tmp_path), asyncio.Event()
    cut = Log(lambda line: asked.set() if line["type"] == "step" else None)
    async with rollout(job) as server:
        server.stop()
        asked.set()
        with pytest.raises(StoppedError, match="stopped before the first step"):
            await run_loop(job, trainer(job), cut, asked_to_stop=asked.wait)
    assert cut.saved_steps == []


@pytest.mark.parametrize(("retention", "kept"), [("Trained", False), ("Job", True), ("Forever", True)])
async def test_how_long_frames_are_kept(tmp_path: Path, retention: str, kept: bool) -> None:
    transport = {"onlyObject": True, "object": {"retention": retention}}
    log = await run(make_job(tmp_path, algorithm={**ALGORITHM, "maxVersionDiff": 0}, transport=transport))
    for step in log.of("step"):
        assert step["records"]["frames"] > 0
        held = step["transport"]
        assert held["read_bytes"]["object"] >= step["records"]["bytes"]
        assert (held["frames"] > 0, held["frame_bytes"] > 0) == (kept, kept)
    assert bool(objects(tmp_path)) is kept


async def test_what_a_step_reports(tmp_path: Path) -> None:
    job = make_job(tmp_path, algorithm={**ALGORITHM, "miniBatches": 1}, records={"auditEvery": 3})
    log = await run(job)
    start, finish = log.of("start")[0], log.of("finish")[0]
    assert start["held_out_reward"] == finish["held_out_first"]
    assert finish["outcome"] == "Complete"
    assert not objects(tmp_path), "frames are released after the step that used them"
    rewards = [step["reward"]["mean"] for step in log.of("step")]
    assert len(set(rewards)) > 1, "there is something to learn from"
    for step in log.of("step"):
        assert step["trajectories"] == 6
        assert step["version"] == step["step"]
        # One update: nothing was updated before it, so the ratio is exactly 1.
        assert step["policy"]["ratio_max"] == step["policy"]["ratio_mean"] == 1.0
        assert step["policy"]["approx_kl"] == 0.0
        assert step["policy"]["grad_norm"] > 0
        # Equal weights and FP32 on both sides.
        assert step["gap_guided"]["max"] < 1e-4
        assert step["gap_unguided"]["max"] < 1e-4
        assert step["staleness"]["trajectories"] == {"0": 6}
        assert sum(step["staleness"]["tokens"].values()) == step["response_tokens"]
        rows = step["prompt_tokens"] + step["response_tokens"] - step["trajectories"]
        assert step["records"]["rows"] == rows
        assert step["records"]["rows_missing"] == step["routes_missing"] == 0
        assert step["records"]["audit_bytes"] > 0
        # Every quantised site of both layers; FP32 on both sides rounds alike.
        assert len(step["mismatch"]) == 6
        assert all(site["rtn_mismatched"] <= 0.01 * site["rtn_values"] for site in step["mismatch"])
        within = {"total", "load", "unpack"}
        parts = {name: value for name, value in step["seconds"].items() if name not in within}
        assert 0 < sum(parts.values()) <= step["seconds"]["total"]


ALGORITHM = {
    "steps": 4,
    "promptsPerStep": 2,
    "samplesPerPrompt": 3,
    "maxPromptTokens": 16,
    "maxResponseTokens": 6,
    "evaluation": {"prompts": 4},
}


@pytest.mark.parametrize("staleness", ["Wait", "Drop"])
@pytest.mark.parametrize("sync", ["Disk", "Distributed"])
async def test_asynchronous_mode_keeps_the_bound(tmp_path: Path, staleness: str, sync: str) -> None:
    algorithm = {**ALGORITHM, "maxVersionDiff": 2, "staleness": staleness, "steps": 6}
    job = make_job(tmp_path, algorithm=algorithm, trainer={"weightSync": sync})
    log = await run(job)
    steps = log.of("step")
    assert len(steps) == 6
    ages = {int(age) for step in steps for age in step["staleness"]["trajectories"]}
    assert max(ages) <= 2
    assert ages != {0}, "generation ran ahead of the trainer"
    assert all(step["records"]["rows_missing"] <= step["records"]["rows"] * 0.01 for step in steps)
    assert log.of("finish")[0]["outcome"] == "Complete"


@pytest.mark.parametrize("method", ["BF16", "Vanilla", "QAT"])
async def test_methods_without_guidance_do_one_forward(tmp_path: Path, method: str) -> None:
    log = await run(make_job(tmp_path, method={"name": method}, algorithm={**ALGORITHM, "steps": 1}))
    step = log.of("step")[0]
    assert step["seconds"]["forward_old_unguided"] == 0
    assert step["gap_guided"] == step["gap_unguided"]
    assert step["gap_ratio"] is None
    assert step["overhead"]["extra_forward"] == 0


async def restart_after_step_1(tmp_path: Path, max_restarts: int, sync: str = "Disk") -> Log:
    job = make_job(
        tmp_path,
        algorithm={**ALGORITHM, "maxVersionDiff": 1},
        failurePolicy={"maxRestarts": max_restarts},
        trainer={"weightSync": sync},
    )
    stepped = asyncio.Event()
    log = Log(lambda line: stepped.set() if line["type"] == "step" else None)

    async def servers() -> None:
        async with rollout(job):
            await stepped.wait()
        async with rollout(job):
            await asyncio.Event().wait()

    serving = asyncio.create_task(servers())
    try:
        await run_loop(job, trainer(job), log)
    finally:
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)
    return log


@pytest.mark.parametrize("sync", ["Disk", "Distributed"])
async def test_a_restarted_rollout_gets_weights_and_generates_again(tmp_path: Path, sync: str) -> None:
    log = await restart_after_step_1(tmp_path, max_restarts=1, sync=sync)
    assert log.of("finish")[0]["outcome"] == "Complete"
    assert log.of("step")[-1]["restarts"] == 1
    assert [event["reason"] for event in log.of("event")] == ["RolloutRestarted"]
    assert all(step["records"]["rows_missing"] == 0 for step in log.of("step"))
    assert not objects(tmp_path), "what was lost in flight is forgotten"


async def test_too_many_restarts_fail_the_job(tmp_path: Path) -> None:
    with pytest.raises(JobError, match=r"restarted 1 times, more than failurePolicy.maxRestarts 0") as error:
        await restart_after_step_1(tmp_path, max_restarts=0)
    assert error.value.reason == "RestartsExhausted"


async def test_records_that_never_arrive_fail_the_job(tmp_path: Path) -> None:
    job, log = make_job(tmp_path), Log()
    async with rollout(job, puts_into=job.model_copy(update={"run_dir": tmp_path / "elsewhere"})):
        with pytest.raises(JobError, match=r"step 1 lacks (\d+) of \1 record rows \(\1 missing\)") as error:
            await run_loop(job, trainer(job), log)
    assert error.value.reason == "RecordsMissing"
    finish = log.of("finish")[0]
    assert (finish["outcome"], finish["reason"]) == ("Failed", "RecordsMissing")
    assert finish["message"] == str(error.value)


async def test_groups_whose_frames_were_lost_are_generated_again(tmp_path: Path) -> None:
    job = make_job(tmp_path, algorithm={**ALGORITHM, "maxVersionDiff": 2})

    def lose(line: Mapping[str, Any]) -> None:
        if line["type"] == "step" and line["step"] == 1:
            shutil.rmtree(tmp_path / "records")

    log = await run(job, Log(lose))
    assert {event["reason"] for event in log.of("event")} == {"RecordStoreRestarted"}
    assert "are generated again" in log.of("event")[0]["message"]
    assert [step["records"]["rows_missing"] for step in log.of("step")] == [0, 0, 0, 0]
    assert log.of("finish")[0]["outcome"] == "Complete"


async def test_frames_that_are_lost_while_their_step_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Nothing is loaded before a pass needs it, and every trajectory is a pass of its own.
    monkeypatch.setattr(RecordLoader, "prefetch", lambda *_: None)
    job = make_job(tmp_path, trainer={"microBatchTokens": 16, "checkpoint": {"every": 4}})

    class Losing(ReferenceTrainer):
        def forward(self, *arguments: Any, version: int, **named: Any) -> torch.Tensor:
            if version == 1:
                shutil.rmtree(tmp_path / "records", ignore_errors=True)
            return super().forward(*arguments, version=version, **named)

    log = Log()
    async with rollout(job):
        await run_loop(job, Losing(SHAPE, job.job.spec), log)
    (event,) = log.of("event")
    assert event["reason"] == "RecordStoreRestarted"
    assert re.match(
        r"step 2 lacks \d+ of 66 record rows \(\d+ missing\), since their store", event["message"]
    )
    missing = [step["records"]["rows_missing"] for step in log.of("step")]
    assert missing[1] > 0
    assert missing[0] == missing[2] == missing[3] == 0
    assert log.of("finish")[0]["outcome"] == "Complete"


async def test_expectations(tmp_path: Path) -> None:
    expect = {
        "minReward": "0.99",
        "minRewardGain": "-1",
        "maxGap": "0.001",
        "maxGapRatio": "1e-9",
        "maxOverhead": "1000",
        "maxMissingRows": 0,
    }
    job, log = make_job(tmp_path, expect=expect, algorithm={**ALGORITHM, "steps": 1}), Log()
    with pytest.raises(
        JobError, match=r"minReward wanted >= 0.99 and got .*, maxGapRatio wanted <= 1E-9 and got"
    ) as e:
        await run(job, log)
    assert e.value.reason == "ExpectationBroken"
    met = {check["name"]: check["met"] for check in log.of("finish")[0]["expectations"]}
    assert met == {
        "minReward": False,
        "minRewardGain": True,
        "maxGap": True,
        "maxGapRatio": False,
        "maxOverhead": True,
        "maxMissingRows": True,
    }
    # The steps are done: a resumed run says the same without training again.
    again = Log()
    with pytest.raises(JobError, match="minReward wanted"):
        await run(job, again)
    assert not again.of("step")


async def test_a_prompt_that_is_too_long_is_found_before_anything_starts(tmp_path: Path) -> None:
    job = make_job(tmp_path, algorithm={**ALGORITHM, "maxPromptTokens": 3})
    with pytest.raises(
        JobError, match=r"line \d+ of .*train.jsonl has 6 tokens, more than algorithm.maxPrompt"
    ):
        await run_loop(job, trainer(job), Log())


async def test_a_checkpoint_of_another_job_is_refused(tmp_path: Path) -> None:
    job = make_job(tmp_path, algorithm={**ALGORITHM, "steps": 1})
    await run(job)
    with pytest.raises(JobError, match="is of job uid, not of other; give another run directory"):
        await run(job.model_copy(update={"job_uid": "other"}))
