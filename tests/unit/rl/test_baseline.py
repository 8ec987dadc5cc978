"""Steps that are also done without records: what they measure, and that the run does not notice them."""

from __future__ import annotations

import math
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
from rl_harness import Log, make_job, rollout, run, trainer

from tracerl.rl.account import overhead_of
from tracerl.rl.baseline import Pair
from tracerl.rl.intervals import ratio_of_sums
from tracerl.rl.loop import run_loop


def without_baseline(log: Log) -> list[dict[str, Any]]:
    return [{key: value for key, value in step.items() if key != "baseline"} for step in log.repeatable]


async def test_a_run_with_baselines_is_the_run_without_them_bit_for_bit(tmp_path: Path) -> None:
    """Rewards, gaps, losses, records: nothing of the update without records is left, whichever came first."""
    plain = await run(make_job(tmp_path / "plain"))
    resolved = make_job(tmp_path / "paired", observe={"baselineEvery": 1})
    paired = Log()
    async with rollout(resolved) as server:
        await run_loop(resolved, trainer(resolved), paired)
        generated = server._scheduler.stats.generated_tokens
    assert without_baseline(paired) == without_baseline(plain)
    steps = paired.of("step")
    assert [step["baseline"] is not None for step in steps] == [False, True, True, True]
    assert [step["baseline"]["bare_first"] for step in steps[1:]] == [False, True, False]
    # The same tokens again, and the evaluations.
    trained = [step["response_tokens"] for step in steps]
    assert generated >= sum(trained) + sum(trained[1:])
    for step in steps[1:]:
        found = step["baseline"]
        assert found["bare_seconds"] > 0
        assert 0 < found["recorded_seconds"] < found["step_seconds"]
    assert [step["baseline"]["so_far"] is not None for step in steps[1:]] == [False, True, True]
    finish = paired.of("finish")[0]
    assert finish["baseline_overhead"] == steps[-1]["baseline"]["so_far"]
    assert finish["baseline_overhead"]["pairs"] == 3
    assert plain.of("finish")[0]["baseline_overhead"] is None


async def test_pairs_survive_a_resume(tmp_path: Path) -> None:
    resolved = make_job(tmp_path, observe={"baselineEvery": 1}, trainer={"checkpoint": {"every": 3}})

    def stop(line: Any) -> None:
        if line["type"] == "step" and line["step"] == 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        await run(resolved, Log(stop))
    resumed = await run(resolved)
    assert resumed.of("start")[0]["resumed_from"] == 3
    assert resumed.of("finish")[0]["baseline_overhead"]["pairs"] == 3


def test_the_interval_is_that_of_the_ratio_estimator() -> None:
    """By hand: 6/40; residuals -0.5, 0.5 and 0; t(2) = 4.303."""
    found = ratio_of_sums([(1.0, 10.0), (2.0, 10.0), (3.0, 20.0)])
    assert found is not None
    ratio, low, high = found
    half = 4.303 * math.sqrt(0.5 / 2 / 3) / (40 / 3)
    assert (ratio, low, high) == pytest.approx((0.15, 0.15 - half, 0.15 + half))
    assert half == pytest.approx(0.09316, abs=1e-5)


def test_what_every_pair_says_alike_is_certain_and_one_pair_says_nothing() -> None:
    assert ratio_of_sums([]) is None
    assert overhead_of([(1.0, 4.0)]) is None
    exact = overhead_of([(1.0, 4.0), (2.0, 8.0), (0.5, 2.0)])
    assert exact is not None
    assert (exact.ratio, exact.pairs) == (0.25, 3)
    assert (exact.low, exact.high) == pytest.approx((0.25, 0.25))


class Clockwork:
    """CPU time that passes as a table says, and the loop's part in a pair."""

    def __init__(self, *costs: float | None, stops: bool = False) -> None:
        self._costs, self._now, self._stops = iter(costs), 0.0, stops
        self.done: list[str] = []

    async def cpu_seconds(self) -> float | None:
        cost = next(self._costs)
        if cost is None:
            return None
        self._now += cost
        return self._now

    async def compute(self, work: Callable[[], Any]) -> Any:
        return work()

    async def unless_asked_to_stop(self, work: Coroutine[Any, Any, Any]) -> Any:
        if self._stops:
            work.close()
            return None
        return await work

    def state(self) -> dict[str, Any]:
        self.done.append("state")
        return {"of": len(self.done)}

    def load_state(self, state: dict[str, Any]) -> None:
        self.done.append(f"load {state['of']}")

    def step(self, groups: Any, version: int, timer: Any) -> None:
        self.done.append("train")

    async def groups(self, indices: Any) -> list[Any]:
        self.done.append(f"generate {list(indices)}")
        return []

    async def through(self, *, bare_first: bool) -> Any:
        around: Any = self
        pair = Pair(
            around,
            around,
            around,
            self.groups,
            self.cpu_seconds,
            version=7,
            indices=[14, 15],
            replicas=2,
            bare_first=bare_first,
        )
        await pair.begin()
        self.done.append("the step")
        await pair.trained()
        await pair.pushed()
        await pair.released()
        return pair.result([(2.0, 40.0)])


async def test_what_is_counted_when_the_bare_side_comes_first() -> None:
    # What passes before and between the sides (100s) is nobody's.
    work = Clockwork(100, 20, 100, 30, 100, 56, 100, 3, 1)
    found = await work.through(bare_first=True)
    assert work.done == ["generate [14]", "generate [15]", "state", "train", "load 3", "the step"]
    assert (found.bare_seconds, found.recorded_seconds, found.step_seconds) == (50, 57, 60)
    assert (found.so_far.ratio, found.so_far.pairs) == (pytest.approx(9 / 100), 2)


async def test_what_is_counted_when_the_step_comes_first() -> None:
    work = Clockwork(100, 56, 100, 20, 100, 30, 100, 3, 1)
    found = await work.through(bare_first=False)
    # Trained from the weights of before the step, which then has its own again.
    assert work.done == [
        *("state", "the step", "generate [14]", "generate [15]"),
        *("state", "load 1", "train", "load 5"),
    ]
    assert (found.bare_seconds, found.recorded_seconds, found.step_seconds) == (50, 57, 60)


async def test_a_process_that_does_not_say_its_time_or_a_stop_leaves_the_pair_out() -> None:
    assert await Clockwork(100, 20, 100, None, 100, 56, 100, 3, 1).through(bare_first=True) is None
    assert await Clockwork(100, 20, 100, -90, 100, 56, 100, 3, 1).through(bare_first=True) is None
    stopped = Clockwork(100, 20, 100, 56, 100, 3, 1, stops=True)
    assert await stopped.through(bare_first=True) is None
    assert "train" not in stopped.done
