"""What the loop reports: the one list of numbers behind the run log, the metrics, the table and the report.

The loop hands each record as a plain dict (`model_dump(mode="json")`) to the sink that its caller gives. A
line's `type` says which model it is: `start` once for every start or resume, `step` for each optimisation
step, `event` for things worth a sentence, `finish` once. After a resume the steps behind the checkpoint are
computed again: the last line of a step is the one that counts.

Durations are seconds of wall-clock time unless said otherwise; gaps are nats; probabilities are natural
logarithms. Every number is finite: where a number is not known the field is null.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class PositionGap(_Record):
    """Gap of the generated tokens at positions start..stop-1 (0 is the first generated token)."""

    start: int
    stop: int
    tokens: int
    mean: float
    max: float


class Gap(_Record):
    """|log-prob of the trainer - log-prob of the rollout| over generated tokens, in nats."""

    mean: float
    max: float
    tokens: int
    by_position: tuple[PositionGap, ...] = ()
    """Buckets 0, 1, 2..3, 4..7, … (powers of two), so their number is bounded."""


class Reward(_Record):
    """Rewards of the trajectories of one step."""

    mean: float
    std: float
    min: float
    max: float
    groups: int
    groups_without_signal: int
    """Groups whose rewards are all equal: their advantages are zero."""


class Lengths(_Record):
    """Tokens of the trajectories of one step."""

    prompt_mean: float
    prompt_max: int
    response_mean: float
    response_max: int


class Records(_Record):
    """What the trajectories of one step brought as records."""

    bytes: int
    """Bytes of the frames as they travelled, headers and hashes included, without audits."""
    audit_bytes: int
    rows: int
    """Rows that should be there; a row is one token's forward pass, all sites together."""
    rows_missing: int
    """Rows with at least one missing site; they round to nearest."""
    missing_by_reason: dict[str, int]
    """Rows by reason: missing, checksum, version, site_table, shape."""
    bytes_per_token: float | None
    """Bytes over rows; null without rows."""
    frames: int


class Transport(_Record):
    """What the record stores hold when the step has released its frames, and how its frames were read."""

    capacity_bytes: int
    """Shared memory for frames of all stores; 0 where frames travel by the object store alone."""
    held_bytes: int
    """Bytes in the fastest tier, all of a segment counted as long as any frame in it lives."""
    frames: int
    """Frames in all tiers."""
    frame_bytes: int
    read_bytes: dict[str, int] = {}
    """Frame bytes read since the step before by where they were (ring, spill, http, object), also ahead for
    later steps."""
    read_seconds: dict[str, float] = {}
    """Time of those reads; reads that overlap count each."""
    retries: int = 0
    """Requests to stores and object stores made again since the step before."""
    waits: int = 0
    """Times since the step before that no prompts were submitted because a store had little room."""


class SiteMismatch(_Record):
    """Counts over the values of one site whose whole rollout codes are known (audited trajectories)."""

    layer: int
    kind: str
    rtn_values: int
    """Values whose code by rounding to nearest, under the trainer's own scale, was compared."""
    rtn_mismatched: int
    """Those whose code differs from the rollout's."""
    rtn_adjacent: int
    """Those of the differing ones that are the rollout's neighbours."""
    guided_values: int
    """Values whose code that the trainer used was compared: to nearest again where a site is not guided."""
    guided_mismatched: int
    guided_adjacent: int
    scales: int
    """Block scales that were rebuilt from recorded low bits."""
    scales_wrong: int
    """Those that differ from the rollout's."""


class Staleness(_Record):
    """Trainer's version when the step trained, minus a version of the rollout."""

    trajectories: dict[int, int]
    """Trajectories by difference to the version of their oldest sampled token."""
    tokens: dict[int, int]
    """Generated tokens by difference to the version that sampled them."""
    groups_dropped: int
    """Groups that became too old while generating or waiting, since the last step (`staleness: Drop`)."""


class Policy(_Record):
    """PPO's own numbers over the step's updates."""

    loss: float
    clip_fraction: float
    """Share of tokens whose ratio was clipped."""
    approx_kl: float
    """Mean of r - 1 - log r with r = exp(logp_new_guided - logp_old_guided): how far the updates moved."""
    ratio_mean: float
    ratio_max: float
    grad_norm: float
    """Mean over the step's updates, before clipping."""
    learning_rate: float
    updates: int


class StepSeconds(_Record):
    """Where the time of one step of the trainer went. `total` is wall time since the step before ended."""

    total: float
    generate_wait: float
    fetch: float
    """Waiting for rewards after the last token of the batch had come, and for word that frames are there."""
    load: float = 0.0
    """Waiting for records that were not there when a pass needed them; within the passes."""
    unpack: float
    """Batching records for the engine; within the forward passes."""
    forward_old_guided: float
    forward_old_unguided: float
    train_forward: float
    train_backward: float
    optimizer: float
    push_weights: float
    evaluate: float
    checkpoint: float
    """Of the checkpoint after the step before: a step's record is written before its checkpoint."""


class Overhead(_Record):
    """What TRACE costs, in three numbers (seconds), and their sum over the step's critical path.

    Capture, pack, put, fetch and the unpacking of fetched frames are CPU time of their threads. In the
    asynchronous mode they run beside the trainer's step, so there the ratio is an upper bound; what the
    trainer waited for is `seconds.fetch`.
    """

    records: float
    """capture + pack + put + fetch + unpack."""
    capture: float
    pack: float
    put: float
    fetch: float
    """All fetching, also what ran in the background."""
    unpack: float
    guided_kernels: float
    extra_forward: float
    """Second forward pass of the current weights, for the ratio and the unguided gap."""
    critical_path: float
    """The step's wall time without evaluation and checkpoint."""
    ratio: float
    """(records + guided_kernels + extra_forward) / critical_path."""

    @property
    def parts(self) -> dict[str, float]:
        """The timed components in seconds; their sum over the critical path is `ratio`."""
        return {
            name: getattr(self, name)
            for name in ("capture", "pack", "put", "fetch", "unpack", "guided_kernels", "extra_forward")
        }

    @property
    def part_ratios(self) -> dict[str, float]:
        """The three numbers over the critical path; their sum is `ratio`."""
        return {
            name: getattr(self, name) / self.critical_path
            for name in ("records", "guided_kernels", "extra_forward")
        }


class BaselineOverhead(_Record):
    """What a step takes with records that it does not take without, as a share of it, in CPU time or a GPU's.

    The interval is of 95 %: `tracerl.rl.intervals.ratio_of_sums` over the pairs.
    """

    ratio: float
    low: float
    high: float
    pairs: int


class Baseline(_Record):
    """A step that was also done without records, on the same prompts and weights: CPU seconds.

    They are those of rollouts, record stores and trainer; where rollout and trainer have a GPU, what their
    passes took of it. Both sides generate, score and train, and the
    update of the side without is thrown away. Neither side has evaluation and checkpoint.
    """

    recorded_seconds: float
    bare_seconds: float
    """Without records."""
    step_seconds: float
    """`recorded_seconds` and the push of weights, which only the recorded step does: the whole step."""
    bare_first: bool
    """Which side came first, in turns."""
    so_far: BaselineOverhead | None
    """Over all pairs of the run up to this one; null for the first."""


class StepRecord(_Record):
    """One optimisation step."""

    type: Literal["step"] = "step"
    run_id: str
    time: float
    """Seconds since 1970 at the end of the step."""
    step: int
    """1 for the first step."""
    steps: int
    version: int
    """Policy version that the step made; the step trained version - 1."""
    method: str
    trajectories: int
    prompt_tokens: int
    response_tokens: int
    tokens_per_second: float
    """Generated tokens that were trained on, over the step's critical path."""
    reward: Reward
    held_out_reward: float | None = None
    """Greedy reward on held-out prompts of the version that the step made; null when not evaluated."""
    gap_guided: Gap
    """|logp_old_guided - logp_rollout|. Without guidance the guided forward is the unguided one."""
    gap_unguided: Gap | None
    """|logp_old_unguided - logp_rollout| over the tokens for which the unguided forward ran."""
    gap_ratio: float | None
    """Guided over unguided mean gap, both over the tokens for which the unguided forward ran; null when the
    method does not guide."""
    rollout_corr: dict[str, float]
    """verl's metrics under verl's keys without the prefix `rollout_corr/`: kl, k3_kl, rollout_is_mean, …"""
    staleness: Staleness
    policy: Policy
    lengths: Lengths
    finish_reasons: dict[str, int]
    records: Records
    transport: Transport | None = None
    """Null where the stores could not be asked."""
    routes_missing: int
    """Rows times MoE layers whose expert choices were missing, so that the live router chose."""
    mismatch: tuple[SiteMismatch, ...] = ()
    seconds: StepSeconds
    overhead: Overhead
    baseline: Baseline | None = None
    """Of every `observe.baselineEvery`-th step; null where a rollout was restarted in the middle."""
    restarts: int
    """Rollout restarts and instance changes of the job so far."""


class StartRecord(_Record):
    """The loop starts, or continues from a checkpoint."""

    type: Literal["start"] = "start"
    run_id: str
    time: float
    resumed_from: int
    """Step of the checkpoint; 0 means from the beginning."""
    steps: int
    method: str
    parameters: int
    row_bytes: int
    """Record bytes a row by the site table, without headers."""
    whole_row_bytes: int
    """Bytes a row with whole codes and scales of every quantised layer, for comparison; 0 without any."""
    warmup_steps: int
    warmup_seconds: float
    """0 when the warm-up came from the cache."""
    held_out_reward: float | None
    """Greedy held-out reward before the first step, also after a resume; null without evaluation."""
    restarts: int = 0
    """Rollout restarts and instance changes of the job up to that checkpoint."""


class EventRecord(_Record):
    """Something that a reader of the run wants to know: a restart, a damaged checkpoint, a dropped group."""

    type: Literal["event"] = "event"
    run_id: str
    time: float
    step: int
    reason: str
    """CamelCase, one of tracerl.api.constants' reasons."""
    message: str


class Expectation(_Record):
    """One check of `expect`."""

    name: str
    """Field of `expect`, camelCase as in YAML."""
    wanted: str
    value: float | None
    met: bool


class FinishRecord(_Record):
    """The loop ended."""

    type: Literal["finish"] = "finish"
    run_id: str
    time: float
    step: int
    outcome: Literal["Complete", "Failed"]
    reason: str
    message: str
    reward_first: float | None
    """Mean training reward of the first step."""
    reward_last: float | None
    held_out_first: float | None
    held_out_last: float | None
    gap_guided_mean: float | None
    """Mean over all trained tokens of the run."""
    gap_unguided_mean: float | None
    gap_ratio: float | None
    overhead_ratio: float | None
    """Sum of the three numbers over the sum of the critical paths."""
    baseline_overhead: BaselineOverhead | None = None
    rows_missing: int
    record_bytes_per_token: float | None
    tokens_per_second: float | None
    expectations: tuple[Expectation, ...] = ()


RunRecord = Annotated[StartRecord | StepRecord | EventRecord | FinishRecord, Field(discriminator="type")]
"""Any line; `TypeAdapter(RunRecord).validate_python(line)` reads one back."""
