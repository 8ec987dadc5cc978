"""Bookkeeping: the step record of one step, the sums over a run, and the checks of `expect`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pydantic import BaseModel, ConfigDict

from tracerl.api.constants import Reason
from tracerl.api.errors import JobError
from tracerl.api.job import Expect
from tracerl.engines.base import EngineStats, RecordCounts
from tracerl.rl.intervals import ratio_of_sums
from tracerl.rl.steprecord import (
    Baseline,
    BaselineOverhead,
    Expectation,
    Lengths,
    Overhead,
    Records,
    SiteMismatch,
    Staleness,
    StepRecord,
    StepSeconds,
    Transport,
)
from tracerl.rl.train import Group, Sample, StepOutcome
from tracerl.transport.base import Usage


class Totals(BaseModel):
    """Sums over all steps of a job, kept in checkpoints so that a resumed run ends with the same figures."""

    model_config = ConfigDict(extra="forbid")

    steps: int = 0
    gap_guided_sum: float = 0.0
    gap_guided_tokens: int = 0
    gap_unguided_sum: float = 0.0
    gap_unguided_tokens: int = 0
    gap_guided_same_sum: float = 0.0
    """Guided gap over the tokens of gap_unguided_tokens; 0 without guidance."""
    overhead_seconds: float = 0.0
    critical_path_seconds: float = 0.0
    response_tokens: int = 0
    record_bytes: int = 0
    rows: int = 0
    rows_missing: int = 0
    reward_first: float | None = None
    reward_last: float | None = None
    held_out_first: float | None = None
    held_out_last: float | None = None
    baseline_pairs: list[tuple[float, float]] = []
    """Of each step with a baseline: CPU seconds that records took, and those of the whole step."""

    def add(self, record: StepRecord) -> None:
        """Count a step."""
        self.steps += 1
        self.gap_guided_sum += record.gap_guided.mean * record.gap_guided.tokens
        self.gap_guided_tokens += record.gap_guided.tokens
        if record.gap_unguided is not None:
            unguided = record.gap_unguided.mean * record.gap_unguided.tokens
            self.gap_unguided_sum += unguided
            self.gap_unguided_tokens += record.gap_unguided.tokens
            self.gap_guided_same_sum += unguided * (record.gap_ratio or 0.0)
        overhead = record.overhead
        self.overhead_seconds += overhead.records + overhead.guided_kernels + overhead.extra_forward
        self.critical_path_seconds += overhead.critical_path
        self.response_tokens += record.response_tokens
        self.record_bytes += record.records.bytes
        self.rows += record.records.rows
        self.rows_missing += record.records.rows_missing
        if record.baseline is not None:
            self.baseline_pairs = pairs_with(self.baseline_pairs, record.baseline)
        if self.reward_first is None:
            self.reward_first = record.reward.mean
        self.reward_last = record.reward.mean
        if record.held_out_reward is not None:
            self.held_out_last = record.held_out_reward

    @property
    def gap_guided(self) -> float | None:
        """Mean guided gap over all trained tokens, in nats."""
        return _ratio(self.gap_guided_sum, self.gap_guided_tokens)

    @property
    def gap_unguided(self) -> float | None:
        """Mean unguided gap over the tokens for which it was measured, in nats."""
        return _ratio(self.gap_unguided_sum, self.gap_unguided_tokens)

    @property
    def gap_ratio(self) -> float | None:
        """Guided over unguided gap of the same tokens; None without guidance."""
        return _ratio(self.gap_guided_same_sum, self.gap_unguided_sum) if self.gap_guided_same_sum else None

    @property
    def overhead_ratio(self) -> float | None:
        """Overhead over the critical path, both summed over the run."""
        return _ratio(self.overhead_seconds, self.critical_path_seconds)

    @property
    def baseline_overhead(self) -> BaselineOverhead | None:
        """Overhead by the steps that were done without records as well; None for fewer than two."""
        return overhead_of(self.baseline_pairs)

    @property
    def bytes_per_token(self) -> float | None:
        """Record bytes a row."""
        return _ratio(self.record_bytes, self.rows)

    @property
    def tokens_per_second(self) -> float | None:
        """Trained response tokens a second of critical path."""
        return _ratio(self.response_tokens, self.critical_path_seconds)


def pairs_with(pairs: Sequence[tuple[float, float]], step: Baseline) -> list[tuple[float, float]]:
    """Add a step to pairs of what records took and what the whole step did."""
    return [*pairs, (step.recorded_seconds - step.bare_seconds, step.step_seconds)]


def overhead_of(pairs: Sequence[tuple[float, float]]) -> BaselineOverhead | None:
    """Give the overhead by such pairs."""
    found = ratio_of_sums(pairs)
    if found is None:
        return None
    ratio, low, high = found
    return BaselineOverhead(ratio=ratio, low=low, high=high, pairs=len(pairs))


def _ratio(numerator: float, denominator: float) -> float | None:
    return numerator / denominator if denominator else None


def expectations(expect: Expect, totals: Totals) -> tuple[Expectation, ...]:
    """Check the figures of a finished run; one that was not measured is not met."""
    gain = (
        None
        if totals.held_out_first is None or totals.held_out_last is None
        else totals.held_out_last - totals.held_out_first
    )
    checks = [
        ("minReward", ">=", expect.min_reward, totals.held_out_last),
        ("minRewardGain", ">=", expect.min_reward_gain, gain),
        ("maxGap", "<=", expect.max_gap, totals.gap_guided),
        ("maxGapRatio", "<=", expect.max_gap_ratio, totals.gap_ratio),
        ("maxOverhead", "<=", expect.max_overhead, totals.overhead_ratio),
        ("maxMissingRows", "<=", expect.max_missing_rows, totals.rows_missing),
    ]
    found = []
    for name, sign, bound, value in checks:
        if bound is None:
            continue
        met = value is not None and (value >= bound if sign == ">=" else value <= bound)
        found.append(Expectation(name=name, wanted=f"{sign} {bound}", value=value, met=met))
    return tuple(found)


def broken(found: Sequence[Expectation]) -> JobError | None:
    """Return the error that names every figure that was not reached, or None."""
    failed = []
    for check in found:
        if not check.met:
            value = "no value" if check.value is None else f"{check.value:.4g}"
            failed.append(f"{check.name} wanted {check.wanted} and got {value}")
    if not failed:
        return None
    return JobError(
        Reason.EXPECTATION_BROKEN,
        f"the run missed what spec.expect asks for: {', '.join(failed)}; see the report, then change the job "
        "or the expectation",
    )


def records_of(counts: RecordCounts) -> Records:
    """Say what the trajectories of a step brought as records."""
    return Records(
        bytes=counts.bytes,
        audit_bytes=counts.audit_bytes,
        rows=counts.rows,
        rows_missing=counts.missing.total(),
        missing_by_reason=dict(counts.missing),
        bytes_per_token=_ratio(counts.bytes, counts.rows),
        frames=counts.frames,
    )


def transport_of(usage: Usage, read: Mapping[str, int], waits: int) -> Transport:
    """Say what the stores hold, and how frames were read: `read` is how counters of the sources grew."""

    def by_path(prefix: str) -> dict[str, int]:
        return {k.removeprefix(prefix): n for k, n in read.items() if k.startswith(prefix) and n}

    nanoseconds = by_path("read_nanoseconds_")
    return Transport(
        capacity_bytes=usage.capacity_bytes,
        held_bytes=usage.held_bytes,
        frames=usage.frames,
        frame_bytes=usage.frame_bytes,
        read_bytes=by_path("read_bytes_"),
        read_seconds={path: count / 1e9 for path, count in nanoseconds.items()},
        retries=sum(count for name, count in read.items() if name.endswith("_retries")),
        waits=waits,
    )


@dataclass(frozen=True)
class StepContext:
    """What a step record says about the loop rather than about the batch."""

    run_id: str
    time: float
    step: int
    steps: int
    method: str
    guided: bool
    groups_dropped: int
    restarts: int
    held_out_reward: float | None
    baseline: Baseline | None


def step_record(
    context: StepContext,
    groups: Sequence[Group],
    outcome: StepOutcome,
    transport: Transport | None,
    seconds: Mapping[str, float],
) -> StepRecord:
    """Put a step's record together; `seconds` has the fields of `StepSeconds` that took any time."""
    samples = [sample for group in groups for sample in group.samples]
    prompts = [sample.trajectory.prompt_tokens for sample in samples]
    responses = [sample.response_tokens for sample in samples]
    engine = outcome.engine
    measured = {**seconds, "load": engine.records.wait_seconds, "unpack": engine.unpack_seconds}
    parts = StepSeconds(**{name: measured.get(name, 0.0) for name in StepSeconds.model_fields})
    overhead = _overhead(samples, engine, parts, guided=context.guided)
    return StepRecord(
        run_id=context.run_id,
        time=context.time,
        step=context.step,
        steps=context.steps,
        version=context.step,
        method=context.method,
        trajectories=len(samples),
        prompt_tokens=sum(prompts),
        response_tokens=sum(responses),
        tokens_per_second=sum(responses) / overhead.critical_path,
        reward=outcome.reward,
        held_out_reward=context.held_out_reward,
        gap_guided=outcome.gap_guided,
        gap_unguided=outcome.gap_unguided,
        gap_ratio=outcome.gap_ratio,
        rollout_corr=outcome.rollout_corr,
        staleness=Staleness(
            trajectories=dict(sorted(outcome.staleness_trajectories.items())),
            tokens=dict(sorted(outcome.staleness_tokens.items())),
            groups_dropped=context.groups_dropped,
        ),
        policy=outcome.policy,
        lengths=Lengths(
            prompt_mean=sum(prompts) / len(prompts),
            prompt_max=max(prompts),
            response_mean=sum(responses) / len(responses),
            response_max=max(responses),
        ),
        finish_reasons=dict(sorted(Counter(sample.finish_reason for sample in samples).items())),
        records=records_of(engine.records),
        transport=transport,
        routes_missing=engine.routes_missing,
        mismatch=tuple(
            SiteMismatch(
                layer=layer,
                kind=kind,
                rtn_values=counts.values,
                rtn_mismatched=counts.rtn_mismatched,
                rtn_adjacent=counts.rtn_adjacent,
                guided_values=counts.values,
                guided_mismatched=counts.guided_mismatched,
                guided_adjacent=counts.guided_adjacent,
                scales=counts.scales,
                scales_wrong=counts.scales_wrong,
            )
            for (layer, kind), counts in sorted(engine.sites.items())
        ),
        seconds=parts,
        overhead=overhead,
        baseline=context.baseline,
        restarts=context.restarts,
    )


def _overhead(
    samples: Sequence[Sample], engine: EngineStats, parts: StepSeconds, *, guided: bool
) -> Overhead:
    rollout = {
        name: sum(sample.rollout_seconds.get(name, 0.0) for sample in samples)
        for name in ("capture", "pack", "put")
    }
    fetch = engine.records.fetch_seconds
    unpack = engine.records.unpack_seconds + engine.unpack_seconds
    records = sum(rollout.values()) + fetch + unpack
    extra_forward = parts.forward_old_unguided if guided else 0.0
    critical_path = parts.total - parts.evaluate - parts.checkpoint
    return Overhead(
        records=records,
        **rollout,
        fetch=fetch,
        unpack=unpack,
        guided_kernels=engine.guided_seconds,
        extra_forward=extra_forward,
        critical_path=critical_path,
        ratio=(records + engine.guided_seconds + extra_forward) / critical_path,
    )
