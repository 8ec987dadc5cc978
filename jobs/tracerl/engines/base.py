"""What the loop needs of an engine: trajectories in, log-probs, gradients and exported weights out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from torch import Tensor

from tracerl.api.model import ModelShape
from tracerl.records.pairing import RecordEntry, TrajectoryRecords
from tracerl.records.partial import Selection

GROUP_BACKENDS = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl"}
"""By type of device, what carries tensors between the processes of a trainer; messages are on the CPU."""


@dataclass
class Trajectory:
    """One sampled sequence with what the rollout recorded about it."""

    id: str
    tokens: Tensor
    """int64 [n]: prompt, then response."""
    prompt_tokens: int
    logp_rollout: Tensor
    """float32 [n - prompt_tokens], nats, of the sampling distribution at the sampling temperature."""
    token_versions: list[int]
    """Policy version that sampled each response token."""
    entries: list[RecordEntry] = field(default_factory=list)
    """Where its records are. Only the process that computes with the trajectory loads them."""
    records: TrajectoryRecords | None = None
    """None: not loaded, or nothing was recorded; every recorded site is then missing for all rows."""
    audit: TrajectoryRecords | None = None
    """Whole codes and scales of every quantised site, for an audited trajectory; loaded like `records`."""
    longest: int | None = None
    """Rows of the longest trajectory of its micro-batch, over all ranks: what it is padded with, and so which
    rows a rank of several computes. None: not known, and records of all rows are loaded."""


@dataclass
class Batch:
    """A micro-batch: trajectories that go through the model together. The engine packs or pads them."""

    trajectories: list[Trajectory]
    upcoming: Callable[[], list[Trajectory]] = list
    """What the next pass will most likely take, with its records; nothing as long as they are not loaded."""

    @property
    def max_response(self) -> int:
        """R: response tokens of the longest trajectory, the width of every log-prob tensor of this batch."""
        return max(len(t.tokens) - t.prompt_tokens for t in self.trajectories)


Loss = Callable[[Tensor], Tensor]
"""Maps float32 log-probs [B, R] (0 where there is no token) to a scalar whose gradient is accumulated."""


@dataclass
class SiteCounts:
    """Sums over the values of one site whose whole rollout codes are known (audited trajectories).

    Counted in the method's own forward passes: guided ones where it guides.
    """

    values: int = 0
    rtn_mismatched: int = 0
    """Codes that differ when the trainer rounds its values there to nearest under its own scale."""
    rtn_adjacent: int = 0
    """Those of them that are neighbours of the rollout's code."""
    guided_mismatched: int = 0
    """Codes that the trainer used and that differ; the same as above at a site that is not guided."""
    guided_adjacent: int = 0
    scales: int = 0
    """Block scales that were rebuilt from recorded low bits."""
    scales_wrong: int = 0
    """Those that differ from the rollout's."""


@dataclass
class RecordCounts:
    """What the records of trajectories were, and what it took to load them. Each trajectory counts once."""

    rows: int = 0
    """Rows that should be there."""
    missing: Counter[str] = field(default_factory=Counter)
    """Rows of which any site is absent, by reason."""
    missing_rows: dict[str, list[tuple[int, int, int]]] = field(default_factory=dict)
    """Which they are, by trajectory: runs of rows start..stop-1 and the place of their reason in
    `MISSING_REASONS`, from 1. Ranks of a unit may miss the same ones: they are put together by these."""
    bytes: int = 0
    """Bytes of frames as they travelled, without audits; a frame of several trajectories travels once."""
    audit_bytes: int = 0
    frames: int = 0
    """Entries of trajectories, audits included."""
    fetch_seconds: float = 0.0
    """CPU time of the threads that fetched, without audits."""
    unpack_seconds: float = 0.0
    """CPU time of verifying, decoding and pairing, without audits."""
    wait_seconds: float = 0.0
    """Wall time for which passes waited for records."""
    read: Counter[str] = field(default_factory=Counter)
    """How the source's counters (`Usage.counters`) grew."""


@dataclass
class EngineStats:
    """Sums since the last call of `TrainerEngine.stats`."""

    sites: dict[tuple[int, str], SiteCounts] = field(default_factory=dict)
    """By (layer, site kind)."""
    routes_rows: int = 0
    """Rows times MoE layers whose expert choice should have been replayed."""
    routes_missing: int = 0
    """Those that used the live router, because their record was missing."""
    guided_rows: int = 0
    """Rows times guided sites that should have been guided."""
    guided_missing: int = 0
    """Those that were rounded to nearest, because their record was missing or too old."""
    forward_seconds: float = 0.0
    backward_seconds: float = 0.0
    update_seconds: float = 0.0
    unpack_seconds: float = 0.0
    """Turning records into batched guides and routes."""
    guided_seconds: float = 0.0
    """All of guided rounding; what rounding the same values to nearest would take is not subtracted."""
    records: RecordCounts = field(default_factory=RecordCounts)
    """Left empty by engines: loading is not theirs."""


class Cut(NamedTuple):
    """How a tensor is cut into parts that ranks hold, one each, in their order."""

    axis: int
    parts: int


class TrainerEngine(Protocol):
    """A trainer of one policy. Versions count optimiser steps of the loop; the engine never changes them."""

    shape: ModelShape
    sharded: bool
    """Whether ranks hold parts of one model. All of them then take part in every pass, without trajectories
    too; `export` and `state` give what no rank before holds, and `load_state` takes the whole."""

    @property
    def selections(self) -> tuple[Selection | None, Selection | None]:
        """What this rank needs of trajectories' records, and of their audits; None is all.

        The records of a batch are of the selection's table.
        """
        ...

    def forward(self, batch: Batch, *, guided: bool, temperature: float, version: int) -> Tensor:
        """Log-probs float32 [B, R] of the response tokens, without gradient; 0 beyond a trajectory's end.

        `guided` False rounds to nearest wherever the method would follow a record; routes are replayed in
        both. `version` is the trainer's current one, against which the age of tokens is measured. Raises
        `NonFiniteError` (a `JobError`) that names layer and site when an activation is not finite.
        """
        ...

    def accumulate(
        self, batch: Batch, loss: Loss, *, guided: bool, temperature: float, version: int
    ) -> Tensor:
        """Forward, then add the gradient of ``loss(logp)``; returns the log-probs [B, R], detached."""
        ...

    def update(self) -> float:
        """Clip, step, clear the gradient; returns the global gradient norm before clipping."""
        ...

    def set_learning_rate(self, learning_rate: float) -> None:
        """Set the learning rate of the next updates."""
        ...

    def supervised_step(self, tokens: Tensor, loss_mask: Tensor) -> float:
        """One update on next-token cross-entropy, unquantised FP32 (warm-up); returns the mean loss in nats.

        tokens int64 [B, S]; loss_mask bool [B, S], True where predicting this token counts.
        """
        ...

    def reset_optimizer(self) -> None:
        """Forget moments and the number of updates, so that RL starts afresh after a warm-up."""
        ...

    def export(self) -> Iterator[tuple[str, Tensor]]:
        """Name (Hugging Face's) and value of every weight, exactly as the trainer computes with them.

        Of tensors on the host, which other ranks, the rollouts and the hash of a warm-up take.
        """
        ...

    def state(self) -> dict[str, Tensor]:
        """Everything a checkpoint needs, as named tensors; the caller saves and loads them."""
        ...

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Continue from `state`; raises `InputError` when it is of another model or optimizer.

        A sharded engine reads one tensor of it at a time, and of those that it does not need the names alone.
        """
        ...

    def cut(self, name: str) -> Cut | None:
        """How ranks hold a tensor of `export` or `state` apart; None where they have it whole."""
        ...

    def gpu_seconds(self) -> float:
        """Seconds that passes and updates took of this process's GPU so far; 0 where none is measured."""
        ...

    def stats(self) -> EngineStats:
        """Sums since the last call, which are cleared."""
        ...
