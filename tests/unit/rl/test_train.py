"""One step of training on hand-made trajectories: the gradient, the micro-batches, and the ratio of 1."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from rl_harness import SHAPE, leading, make_job

from tracerl.api.errors import JobError
from tracerl.engines.base import Batch, Trajectory
from tracerl.engines.reference.trainer import ReferenceTrainer
from tracerl.methods import plan
from tracerl.rl.tasks import Item
from tracerl.rl.train import Group, Learner, Sample, StepOutcome, Timer

REWARDS = [[0.0, 1.0, 0.0], [0.5, 0.5, 0.5], [1.0, 0.0, 2.0], [0.0, 0.0, 1.0]]
# Response lengths; the first token of each is two versions old, the others are new (version 5).
LENGTHS = [[3, 1, 4], [1, 1, 5], [2, 6, 2], [3, 3, 3]]
VERSION = 5


def groups(offset: float = 0.0) -> list[Group]:
    generator = torch.Generator().manual_seed(0)
    found = []
    for index, (rewards, lengths) in enumerate(zip(REWARDS, LENGTHS, strict=True)):
        samples = []
        for number, (reward, length) in enumerate(zip(rewards, lengths, strict=True)):
            trajectory = Trajectory(
                id=f"{index}-{number}",
                tokens=torch.randint(2, 64, (4 + length,), generator=generator),
                prompt_tokens=4,
                logp_rollout=-4.0 + offset + torch.rand(length, generator=generator),
                token_versions=[3, *[VERSION] * (length - 1)],
            )
            samples.append(Sample(trajectory, reward, "stop", {}))
        found.append(Group(index, Item(index, "here", "p", None), samples, 0.0))
    return found


class Trained:
    def __init__(self, directory: Path, batch: list[Group], **sections: dict[str, Any]) -> None:
        sections = {"method": {"name": "BF16"}, **sections}
        algorithm = {"promptsPerStep": 4, "miniBatches": 1, "routingReplay": False}
        sections["algorithm"] = {**algorithm, **sections.get("algorithm", {})}
        resolved = make_job(directory, **sections)
        spec = resolved.job.spec
        with leading(resolved) as engine:
            learner = Learner(engine, plan(spec, SHAPE), spec)
            self.outcome: StepOutcome = learner.step(batch, VERSION, Timer())


def test_the_gradient_is_that_of_weighted_reinforce(tmp_path: Path) -> None:
    batch = groups()
    trained = Trained(tmp_path, batch, trainer={"optimizer": {"gradientClip": None}})
    # Before the first update the ratio is 1, so the gradient is that of -mean over tokens of w A log p with
    # w = min(5, exp(log p - log p of the rollout)): here by plain autograd through the same model.
    engine = ReferenceTrainer(SHAPE, make_job(tmp_path, method={"name": "BF16"}).job.spec)
    tokens = sum(map(sum, LENGTHS))
    for group, rewards in zip(batch, torch.tensor(REWARDS), strict=True):
        deviation = rewards.std() + 1e-6
        for sample, advantage in zip(group.samples, (rewards - rewards.mean()) / deviation, strict=True):
            trajectory = sample.trajectory

            def loss(
                logp: torch.Tensor, a: torch.Tensor = advantage, t: Trajectory = trajectory
            ) -> torch.Tensor:
                weights = (logp.detach()[0] - t.logp_rollout).exp().clamp(max=5.0)
                return -(weights * a * logp[0]).sum() / tokens

            engine.accumulate(Batch([trajectory]), loss, guided=False, temperature=1.0, version=VERSION)
    assert trained.outcome.policy.grad_norm == pytest.approx(engine.update(), rel=1e-4)
    assert trained.outcome.policy.ratio_max == 1.0
    assert trained.outcome.staleness_trajectories == {2: 12}
    assert trained.outcome.staleness_tokens == {2: 12, 0: tokens - 12}
    assert trained.outcome.reward.groups_without_signal == 1


def test_micro_batches_change_nothing(tmp_path: Path) -> None:
    whole = Trained(tmp_path, groups()).outcome
    cut = Trained(tmp_path, groups(), trainer={"microBatchTokens": 16}).outcome
    assert cut.policy.grad_norm == pytest.approx(whole.policy.grad_norm, rel=1e-4)
    assert cut.policy.loss == pytest.approx(whole.policy.loss, rel=1e-4)
    assert cut.rollout_corr == pytest.approx(whole.rollout_corr, rel=1e-4, abs=1e-6)
    assert cut.gap_guided.mean == pytest.approx(whole.gap_guided.mean, rel=1e-5)
    assert [b.tokens for b in cut.gap_guided.by_position] == [b.tokens for b in whole.gap_guided.by_position]


@pytest.mark.parametrize("dtype", ["BFloat16", "Float32"])
def test_the_ratio_is_exactly_1_as_long_as_nothing_moved(tmp_path: Path, dtype: str) -> None:
    # Three updates too small to change any weight: old and new forward passes must agree to the last bit.
    outcome = Trained(
        tmp_path,
        groups(),
        model={"dtype": dtype},
        method={"name": "QAT"},
        algorithm={"miniBatches": 3},
        trainer={"optimizer": {"learningRate": "1e-30"}, "microBatchTokens": 16},
    ).outcome
    assert outcome.policy.updates == 3
    assert outcome.policy.ratio_max == outcome.policy.ratio_mean == 1.0
    assert outcome.policy.approx_kl == 0.0


def test_updates_move_the_ratio_and_warm_up_the_learning_rate(tmp_path: Path) -> None:
    optimizer = {"learningRate": "0.02", "warmupSteps": 40}
    outcome = Trained(
        tmp_path, groups(), algorithm={"miniBatches": 4}, trainer={"optimizer": optimizer}
    ).outcome
    assert outcome.policy.ratio_max > 1.0
    assert outcome.policy.approx_kl > 0.0
    # Version 5 with 4 updates a version: the last update is number 24 of 40.
    assert outcome.policy.learning_rate == pytest.approx(0.02 * 24 / 40)


def test_the_unguided_forward_runs_where_it_is_needed(tmp_path: Path) -> None:
    batch = groups()
    for ratio_from, expected in (("Guided", False), ("Auto", True)):
        method = {"name": "TRACE", "trace": {"ratioFrom": ratio_from}}
        trained = Trained(tmp_path, batch, method=method, trainer={"microBatchTokens": 16})
        gap = trained.outcome.gap_unguided
        assert gap is not None
        # Guided needs none: the first micro-batch alone measures the gap.
        assert (gap.tokens == trained.outcome.gap_guided.tokens) is expected
        assert gap.tokens > 0


def test_a_loss_that_is_not_finite(tmp_path: Path) -> None:
    with pytest.raises(
        JobError, match=r"the loss of step 6 is not finite; lower spec.trainer.optimizer"
    ) as error:
        Trained(tmp_path, groups(offset=math.nan))
    assert error.value.reason == "NonFinite"
