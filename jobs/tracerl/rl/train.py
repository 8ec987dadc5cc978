"""One step of training on one batch of groups: log-probs, advantages, losses, updates, and their numbers."""

from __future__ import annotations

import math
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from tracerl.api.constants import Reason
from tracerl.api.errors import JobError
from tracerl.api.job import Spec
from tracerl.engines.base import Batch, EngineStats, Trajectory
from tracerl.methods import MethodPlan
from tracerl.rl.grpo import LossSums, clipped_loss, group_advantages
from tracerl.rl.parallel import LeadingEngine
from tracerl.rl.ratio import Importance, gap, importance, rollout_corr, uses_unguided
from tracerl.rl.steprecord import Gap, Policy, Reward
from tracerl.rl.tasks import Item


@dataclass
class Sample:
    """A trajectory with what the loop knows beside it."""

    trajectory: Trajectory
    reward: float
    finish_reason: str
    rollout_seconds: Mapping[str, float]
    """What recording it cost the rollout: capture, pack, put."""

    @property
    def response_tokens(self) -> int:
        """Number of generated tokens."""
        return len(self.trajectory.token_versions)


@dataclass
class Group:
    """All samples of one prompt."""

    index: int
    item: Item
    samples: list[Sample]
    generated_at: float
    """time.perf_counter() when its last token had come; rewards follow."""

    @property
    def oldest_version(self) -> int:
        """Version of the oldest sampled token of any of its trajectories."""
        return min(min(sample.trajectory.token_versions) for sample in self.samples)


@dataclass
class Timer:
    """Seconds by part."""

    seconds: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Add the time of the block to a part."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] += time.perf_counter() - start


@dataclass(frozen=True)
class StepOutcome:
    """What one step of training gave."""

    reward: Reward
    policy: Policy
    gap_guided: Gap
    gap_unguided: Gap | None
    gap_ratio: float | None
    rollout_corr: dict[str, float]
    staleness_trajectories: Counter[int]
    staleness_tokens: Counter[int]
    engine: EngineStats


@dataclass
class _Micro:
    """A micro-batch: tensors [B, R], padded with zeros where `mask` is False; advantages [B]."""

    batch: Batch
    advantages: Tensor
    logp_rollout: Tensor
    mask: Tensor
    version_diff: Tensor
    logp_old_guided: Tensor | None = None
    logp_old_unguided: Tensor | None = None
    weights: Importance | None = None


class Learner:
    """Trains an engine on batches of groups. Holds no state of its own: versions come from the loop."""

    def __init__(self, engine: LeadingEngine, plan: MethodPlan, spec: Spec) -> None:
        self._engine = engine
        self._plan = plan
        self._algorithm = spec.algorithm
        self._optimizer = spec.trainer.optimizer
        self._micro_batch_tokens = spec.trainer.micro_batch_tokens
        self._temperature = float(spec.algorithm.temperature)
        self._upper = float(spec.algorithm.importance_sampling.upper)

    def step(self, groups: Sequence[Group], version: int, timer: Timer) -> StepOutcome:
        """Train weights of `version` on a batch; the engine then holds those of `version` + 1.

        Every mini-batch is one optimizer update; their number divides that of the trajectories. JobError when
        the loss or the gradient is not finite.
        """
        rewards = torch.tensor([[sample.reward for sample in group.samples] for group in groups])
        advantages = group_advantages(rewards, normalize=self._algorithm.normalize_advantage)
        updates = self._algorithm.mini_batches
        pairs = [
            (sample.trajectory, float(advantage))
            for group, row in zip(groups, advantages, strict=True)
            for sample, advantage in zip(group.samples, row, strict=True)
        ]
        size = len(pairs) // updates
        mini_batches = [
            self._micro_batches(pairs[number * size : (number + 1) * size], version)
            for number in range(updates)
        ]
        micros = [micro for mini_batch in mini_batches for micro in mini_batch]
        self._engine.announce([micro.batch for micro in micros])
        # Also where no weight needs it, the first micro-batch of a step measures the unguided gap.
        for number, micro in enumerate(micros):
            needed = bool((uses_unguided(self._plan.ratio_from, micro.version_diff) & micro.mask).any())
            if self._plan.guided and (needed or number == 0):
                with timer.part("forward_old_unguided"):
                    micro.logp_old_unguided = self._forward(micro, guided=False, version=version)
        # The first update starts from the old weights: its new log-probs, detached, are the old ones.
        for micro in (micro for mini_batch in mini_batches[1:] for micro in mini_batch):
            with timer.part("forward_old_guided"):
                micro.logp_old_guided = self._forward(micro, guided=self._plan.guided, version=version)

        sums: list[LossSums] = []
        norms: list[float] = []
        learning_rate = 0.0
        for number, mini_batch in enumerate(mini_batches):
            tokens = sum(int(micro.mask.sum()) for micro in mini_batch)
            for micro in mini_batch:
                sums.append(self._accumulate(micro, tokens, version, timer))
            learning_rate = self._learning_rate(version * updates + number)
            self._engine.set_learning_rate(learning_rate)
            with timer.part("optimizer"):
                norms.append(self._engine.update())
            if not math.isfinite(norms[-1]):
                raise JobError(
                    Reason.NON_FINITE,
                    f"the gradient of step {version + 1} is not finite (norm {norms[-1]}); "
                    "lower spec.trainer.optimizer.learningRate, or check the model's weights",
                )
        self._engine.announce([])
        return self._outcome(rewards, micros, _policy(sums, norms, learning_rate), version)

    def _micro_batches(self, mini_batch: Sequence[tuple[Trajectory, float]], version: int) -> list[_Micro]:
        """Cut a mini-batch into micro-batches of at most `microBatchTokens` padded tokens, like with like."""
        pairs = sorted(mini_batch, key=lambda pair: len(pair[0].tokens))
        cut: list[list[tuple[Trajectory, float]]] = [[]]
        for pair in pairs:
            # Sorted, so this trajectory is the longest of its micro-batch.
            if cut[-1] and (len(cut[-1]) + 1) * len(pair[0].tokens) > self._micro_batch_tokens:
                cut.append([])
            cut[-1].append(pair)
        return [_micro(pairs, version) for pairs in cut]

    def _forward(self, micro: _Micro, *, guided: bool, version: int) -> Tensor:
        return self._engine.forward(
            micro.batch, guided=guided, temperature=self._temperature, version=version
        )

    def _accumulate(self, micro: _Micro, tokens: int, version: int, timer: Timer) -> LossSums:
        found: list[LossSums] = []
        start = time.perf_counter()

        def loss(logp_new_guided: Tensor) -> Tensor:
            nonlocal start
            now = time.perf_counter()
            timer.seconds["train_forward"] += now - start
            if micro.logp_old_guided is None:
                micro.logp_old_guided = logp_new_guided.detach()
            if not self._plan.guided:
                micro.logp_old_unguided = micro.logp_old_guided
            micro.weights = importance(
                micro.logp_rollout,
                micro.logp_old_guided,
                micro.logp_old_unguided,
                micro.version_diff,
                micro.mask,
                ratio_from=self._plan.ratio_from,
                upper=self._upper,
            )
            value, sums = clipped_loss(
                logp_new_guided,
                micro.logp_old_guided,
                micro.advantages,
                micro.weights.weights,
                micro.mask,
                clip_low=float(self._algorithm.clip_low),
                clip_high=float(self._algorithm.clip_high),
                tokens=tokens,
            )
            found.append(sums)
            start = time.perf_counter()
            return value

        self._engine.accumulate(
            micro.batch, loss, guided=self._plan.guided, temperature=self._temperature, version=version
        )
        timer.seconds["train_backward"] += time.perf_counter() - start
        if not math.isfinite(found[0].loss):
            raise JobError(
                Reason.NON_FINITE,
                f"the loss of step {version + 1} is not finite; "
                "lower spec.trainer.optimizer.learningRate, or check the model's weights",
            )
        return found[0]

    def _learning_rate(self, updates_done: int) -> float:
        rate, warmup = float(self._optimizer.learning_rate), self._optimizer.warmup_steps
        return rate * min(1.0, (updates_done + 1) / warmup) if warmup else rate

    def _outcome(
        self, rewards: Tensor, micros: Sequence[_Micro], policy: Policy, version: int
    ) -> StepOutcome:
        width = max(micro.mask.shape[1] for micro in micros)
        every = _Joined(micros, width)
        measured = [micro for micro in micros if micro.logp_old_unguided is not None]
        gap_guided = gap(every.logp_old_guided, every.logp_rollout, every.mask)
        gap_unguided, gap_ratio = None, None
        if measured:
            same = _Joined(measured, width)
            gap_unguided = gap(same.logp_old_unguided, same.logp_rollout, same.mask)
            if self._plan.guided and gap_unguided.mean > 0:
                guided_mean = gap(same.logp_old_guided, same.logp_rollout, same.mask).mean
                gap_ratio = guided_mean / gap_unguided.mean
        trajectories = [t for micro in micros for t in micro.batch.trajectories]
        flat = rewards.double()
        return StepOutcome(
            reward=Reward(
                mean=float(flat.mean()),
                std=float(flat.std(correction=0)),
                min=float(flat.min()),
                max=float(flat.max()),
                groups=len(flat),
                groups_without_signal=int((flat.amax(dim=1) == flat.amin(dim=1)).sum()),
            ),
            policy=policy,
            gap_guided=gap_guided,
            gap_unguided=gap_unguided,
            gap_ratio=gap_ratio,
            rollout_corr=rollout_corr(every.logp_rollout, every.importance, every.mask, upper=self._upper),
            staleness_trajectories=Counter(version - min(t.token_versions) for t in trajectories),
            staleness_tokens=Counter(version - v for t in trajectories for v in t.token_versions),
            engine=self._engine.stats(),
        )


class _Joined:
    """The tensors of several micro-batches as one, padded to the same width."""

    def __init__(self, micros: Sequence[_Micro], width: int) -> None:
        def join(tensors: Sequence[Tensor | None]) -> Tensor:
            present = [tensor for tensor in tensors if tensor is not None]
            return torch.cat([torch.nn.functional.pad(t, (0, width - t.shape[1])) for t in present])

        self.mask = join([micro.mask for micro in micros])
        self.logp_rollout = join([micro.logp_rollout for micro in micros])
        self.logp_old_guided = join([micro.logp_old_guided for micro in micros])
        self.logp_old_unguided = join([micro.logp_old_unguided for micro in micros])
        weights = [micro.weights for micro in micros if micro.weights is not None]
        self.importance = Importance(
            weights=join([w.weights for w in weights]),
            raw=join([w.raw for w in weights]),
            logp_old=join([w.logp_old for w in weights]),
        )


def _micro(pairs: Sequence[tuple[Trajectory, float]], version: int) -> _Micro:
    batch = Batch([trajectory for trajectory, _ in pairs])
    shape = (len(pairs), batch.max_response)
    logp_rollout = torch.zeros(shape)
    mask = torch.zeros(shape, dtype=torch.bool)
    version_diff = torch.zeros(shape, dtype=torch.int64)
    for row, trajectory in enumerate(batch.trajectories):
        length = len(trajectory.token_versions)
        logp_rollout[row, :length] = trajectory.logp_rollout
        mask[row, :length] = True
        version_diff[row, :length] = version - torch.tensor(trajectory.token_versions)
    return _Micro(
        batch=batch,
        advantages=torch.tensor([advantage for _, advantage in pairs]),
        logp_rollout=logp_rollout,
        mask=mask,
        version_diff=version_diff,
    )


def _policy(sums: Sequence[LossSums], norms: Sequence[float], learning_rate: float) -> Policy:
    tokens = sum(part.tokens for part in sums)
    return Policy(
        loss=sum(part.loss for part in sums) / tokens,
        clip_fraction=sum(part.clipped for part in sums) / tokens,
        approx_kl=sum(part.kl for part in sums) / tokens,
        ratio_mean=sum(part.ratio for part in sums) / tokens,
        ratio_max=max(part.ratio_max for part in sums),
        grad_norm=sum(norms) / len(norms),
        learning_rate=learning_rate,
        updates=len(norms),
    )
