"""A run in one screen: `summary.json`, the table at its end, and the comparison of several runs.

All numbers come from the step records, so a run that was killed has a summary too. Where the loop itself gave
a figure at the end (`FinishRecord`) that figure is used: the expectations were judged by it.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from statistics import fmean, stdev
from string import ascii_uppercase
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from tracerl.api.constants import Reason, Role
from tracerl.api.errors import JobError
from tracerl.api.job import MethodName, Trace, TraceRLJob
from tracerl.api.resolved import write_atomically
from tracerl.observe import text
from tracerl.observe.redact import redact
from tracerl.observe.run import Run
from tracerl.rl.intervals import Z95, t95
from tracerl.rl.steprecord import BaselineOverhead, Expectation, StepRecord


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Estimate(_Frozen):
    """A mean with its 95 % interval; `over` says what the interval is taken over."""

    mean: float
    low: float | None
    high: float | None
    n: int
    over: Literal["prompts", "seeds"]

    def show(self, factor: float = 1.0) -> str:
        """The mean, times `factor`, with its interval: ± over seeds, from–to over prompts (not symmetric)."""
        mean = text.number(self.mean * factor)
        if self.low is None or self.high is None:
            return mean
        if self.over == "seeds":
            return f"{mean} ± {text.number((self.high - self.low) / 2 * factor, 2)}"
        return f"{mean} ({text.number(self.low * factor, 2)}–{text.number(self.high * factor, 2)})"


class MeanSeconds(_Frozen):
    """Seconds a step, means over the run."""

    total: float
    critical_path: float
    records: float
    guided_kernels: float
    extra_forward: float


class Summary(_Frozen):
    """What `summary.json` holds. Gaps are nats, durations seconds; null means not measured."""

    name: str
    directory: str
    method: str
    variant: str
    seed: int | None
    outcome: Literal["Complete", "Failed", "Stopped", "Unfinished"]
    """Unfinished: it runs, or it was killed."""
    reason: str
    message: str
    steps_done: int
    steps_wanted: int | None
    started: float | None
    ended: float | None
    reward_first: float | None
    """Mean training reward of the first step."""
    reward_last_ten: float | None
    """Mean training reward of the last ten steps (of all, when there are fewer)."""
    steps_without_signal: int
    """Steps in which no group had two different rewards."""
    held_out_first: Estimate | None
    held_out_last: Estimate | None
    held_out_gain: float | None
    gap_guided: float | None
    gap_unguided: float | None
    gap_ratio: float | None
    gap_guided_max: float | None
    gap_first: float | None
    """Mean gap of the first step, guided where the method guides: both engines then have the same weights."""
    gap_first_max: float | None
    code_mismatch_rtn: float | None
    """Mismatched over audited values when the trainer rounds to nearest under its own scale."""
    code_mismatch_rtn_adjacent: float | None
    """Those next to the rollout's code, over all mismatched."""
    code_mismatch_guided: float | None
    rebuilt_scales_wrong: float | None
    """Block scales rebuilt from their low bits that are not the rollout's, over all rebuilt."""
    prompt_tokens_mean: float | None
    """Mean tokens of a trajectory's prompt, over all that were trained on."""
    response_tokens_mean: float | None
    record_bytes_per_token: float | None
    """Bytes that the trainer read, over rows: with headers of frames, and what several ranks read each."""
    record_row_bytes: int | None
    """Bytes of a row by the site table."""
    whole_code_bytes_per_token: int | None
    """What whole codes and scales of every quantised layer would take."""
    rows: int
    rows_missing: int
    missing_by_reason: dict[str, int]
    routes_missing: int
    """Rows times MoE layers for which the live router chose."""
    tokens_per_second: float | None
    seconds: MeanSeconds | None
    overhead_ratio: float | None
    baseline_overhead: BaselineOverhead | None
    """By `observe.baselineEvery`; null without, and before the second pair."""
    restarts: int
    store_restarts: int
    """Of record stores, since the run was started or resumed last."""
    trainer_restarts: int
    """Of trainers, since the run was started or resumed last."""
    resumes: int
    """Times that the trainer went on from a checkpoint: after a restart, and with --resume."""
    expectations: tuple[Expectation, ...]
    unreadable_lines: int


def _restarts(run: Run, role: Role) -> int:
    restarts = run.ending.restarts if run.ending else {}
    return sum(count for process, count in restarts.items() if process.startswith(f"{role}-"))


def wilson(mean: float, n: int) -> Estimate:
    """95 % score interval (Wilson 1927) of the mean of n rewards of 0 or 1.

    For rewards between 0 and 1 it is too wide rather than too narrow, since 0 and 1 have the largest variance
    for a given mean; for rewards outside it does not hold, so no interval is given.
    """
    if n < 1 or not 0 <= mean <= 1:
        return Estimate(mean=mean, low=None, high=None, n=n, over="prompts")
    z2 = Z95 * Z95
    centre = (mean + z2 / (2 * n)) / (1 + z2 / n)
    half = Z95 / (1 + z2 / n) * math.sqrt(mean * (1 - mean) / n + z2 / (4 * n * n))
    return Estimate(mean=mean, low=max(centre - half, 0.0), high=min(centre + half, 1.0), n=n, over="prompts")


def over_seeds(values: Iterable[float | None]) -> Estimate | None:
    """Mean and 95 % t interval of one value a seed; None without values, no interval with one."""
    known = [value for value in values if value is not None]
    if not known:
        return None
    mean, n = fmean(known), len(known)
    if n == 1:
        return Estimate(mean=mean, low=None, high=None, n=1, over="seeds")
    half = t95(n - 1) * stdev(known) / math.sqrt(n)
    return Estimate(mean=mean, low=mean - half, high=mean + half, n=n, over="seeds")


def variant_of(job: TraceRLJob) -> str:
    """The method with what sets it apart, for example "TRACE, 1-bit codes, LastHalf"."""
    method = job.spec.method
    if method.name is not MethodName.TRACE:
        return method.name.value
    trace = method.trace or Trace()
    codes = "whole codes" if trace.code_bits == 4 else f"{trace.code_bits}-bit codes"
    return f"{method.name.value}, {codes}, {trace.layers.policy.value}"


def held_out_prompts(job: TraceRLJob | None) -> int:
    """Prompts of one evaluation; 0 when the job is not known."""
    if job is None:
        return 0
    return min(job.spec.algorithm.evaluation.prompts, job.spec.task.held_out_prompts)


def _weighted(pairs: Iterable[tuple[float, float]]) -> float | None:
    pairs = list(pairs)
    weight = sum(weight for _, weight in pairs)
    return sum(value * weight for value, weight in pairs) / weight if weight else None


def _share(part: int, whole: int) -> float | None:
    return part / whole if whole else None


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return fmean(known) if known else None


def _seconds(steps: Sequence[StepRecord]) -> MeanSeconds | None:
    if not steps:
        return None

    def mean(part: Callable[[StepRecord], float]) -> float:
        return fmean(part(step) for step in steps)

    return MeanSeconds(
        total=mean(lambda step: step.seconds.total),
        critical_path=mean(lambda step: step.overhead.critical_path),
        records=mean(lambda step: step.overhead.records),
        guided_kernels=mean(lambda step: step.overhead.guided_kernels),
        extra_forward=mean(lambda step: step.overhead.extra_forward),
    )


def summarize(run: Run) -> Summary:
    """Reduce a run to its summary."""
    steps, finish, job = run.steps, run.finish, run.job
    prompts = held_out_prompts(job)
    held_out = [start.held_out_reward for start in run.starts[:1]]
    held_out += [step.held_out_reward for step in steps]
    known = [value for value in held_out if value is not None]
    first = wilson(known[0], prompts) if known else None
    last = wilson(known[-1], prompts) if len(known) > 1 else None
    sites = [site for step in steps for site in step.mismatch]
    mismatched = sum(site.rtn_mismatched for site in sites)
    missing: Counter[str] = Counter()
    for step in steps:
        missing.update(step.records.missing_by_reason)
    rows = sum(step.records.rows for step in steps)
    seconds = _seconds(steps)
    began = steps[0] if steps and steps[0].step == 1 else None
    times = [record.time for records in (run.starts, steps, run.events) for record in records]
    gap_guided = _weighted((step.gap_guided.mean, step.gap_guided.tokens) for step in steps)
    gap_unguided = _weighted(
        (step.gap_unguided.mean, step.gap_unguided.tokens) for step in steps if step.gap_unguided
    )
    gap_ratio = _mean(step.gap_ratio for step in steps)
    bytes_per_token = sum(step.records.bytes for step in steps) / rows if rows else None
    overhead = None
    if seconds and seconds.critical_path:
        cost = seconds.records + seconds.guided_kernels + seconds.extra_forward
        overhead = cost / seconds.critical_path
    time = sum(step.overhead.critical_path for step in steps)
    if finish:
        gap_guided, gap_unguided = finish.gap_guided_mean, finish.gap_unguided_mean
        gap_ratio, overhead = finish.gap_ratio, finish.overhead_ratio
    # The processes' end is the last word: the loop may be done and a process still have failed.
    end = run.ending or finish
    outcome = run.ending.state if run.ending else finish.outcome if finish else "Unfinished"
    return Summary(
        name=run.name,
        directory=run.path,
        method=run.method,
        variant=variant_of(job) if job else run.method,
        seed=job.spec.algorithm.seed if job else None,
        outcome=outcome,
        reason=end.reason if end else "",
        message=end.message if end else "",
        steps_done=steps[-1].step if steps else 0,
        steps_wanted=job.spec.algorithm.steps if job else steps[-1].steps if steps else None,
        started=run.starts[0].time if run.starts else min(times, default=None),
        ended=finish.time if finish else max(times, default=None),
        reward_first=steps[0].reward.mean if steps else None,
        reward_last_ten=_mean(step.reward.mean for step in steps[-10:]),
        steps_without_signal=sum(step.reward.groups_without_signal == step.reward.groups for step in steps),
        held_out_first=first,
        held_out_last=last,
        held_out_gain=last.mean - first.mean if first and last else None,
        gap_guided=gap_guided,
        gap_unguided=gap_unguided,
        gap_ratio=gap_ratio,
        gap_guided_max=max((step.gap_guided.max for step in steps), default=None),
        gap_first=began.gap_guided.mean if began else None,
        gap_first_max=began.gap_guided.max if began else None,
        code_mismatch_rtn=_share(mismatched, sum(site.rtn_values for site in sites)),
        code_mismatch_rtn_adjacent=_share(sum(site.rtn_adjacent for site in sites), mismatched),
        code_mismatch_guided=_share(
            sum(site.guided_mismatched for site in sites), sum(site.guided_values for site in sites)
        ),
        rebuilt_scales_wrong=_share(
            sum(site.scales_wrong for site in sites), sum(site.scales for site in sites)
        ),
        prompt_tokens_mean=_weighted((step.lengths.prompt_mean, step.trajectories) for step in steps),
        response_tokens_mean=_weighted((step.lengths.response_mean, step.trajectories) for step in steps),
        record_bytes_per_token=bytes_per_token,
        record_row_bytes=run.starts[-1].row_bytes or None if run.starts else None,
        whole_code_bytes_per_token=run.starts[-1].whole_row_bytes or None if run.starts else None,
        rows=rows,
        rows_missing=sum(step.records.rows_missing for step in steps),
        missing_by_reason=dict(missing),
        routes_missing=sum(step.routes_missing for step in steps),
        tokens_per_second=sum(step.response_tokens for step in steps) / time if time else None,
        seconds=seconds,
        overhead_ratio=overhead,
        baseline_overhead=next((s.baseline.so_far for s in reversed(steps) if s.baseline), None),
        restarts=max((step.restarts for step in steps), default=0),
        store_restarts=_restarts(run, Role.STORE),
        trainer_restarts=_restarts(run, Role.TRAINER),
        resumes=sum(start.resumed_from > 0 for start in run.starts),
        expectations=finish.expectations if finish else (),
        unreadable_lines=run.unreadable,
    )


def write_summary(summary: Summary, path: Path) -> None:
    """Write `summary.json`; a reader never sees half of it. JobError when it cannot be written."""
    try:
        write_atomically(path, summary.model_dump_json(indent=2) + "\n")
    except OSError as error:
        raise JobError(
            Reason.RUN_LOG_FAILED,
            f"{path} cannot be written ({error.strerror}); make room there and run tracerl report",
        ) from error


# -- tables for a terminal --------------------------------------------------------------------------------

_OUTCOME_STYLE = {
    "Complete": "bold green",
    "Failed": "bold red",
    "Stopped": "bold yellow",
    "Unfinished": "bold yellow",
}


def facts(summary: Summary) -> list[tuple[str, str]]:
    """The lines of a run's table, (what, value)."""
    lines: list[tuple[str, str]] = []
    first, last = summary.held_out_first, summary.held_out_last
    if first and last:
        gain = text.signed(summary.held_out_gain)
        lines.append(
            ("Held-out reward", f"{first.show()} → {last.show()}, {gain}; 95 % over {last.n} prompts")
        )
    elif first:
        lines.append(("Held-out reward", f"{first.show()} at the start, not evaluated later"))
    if summary.reward_first is not None:
        span = "in the last 10" if summary.steps_done > 10 else "on average"
        lines.append(
            (
                "Training reward",
                f"{text.number(summary.reward_first)} in the first step → "
                f"{text.number(summary.reward_last_ten)} {span}",
            )
        )
    if nothing := nothing_learned(summary):
        lines.append(("Nothing learned", nothing))
    if summary.gap_guided is not None:
        name = "Gap, guided" if summary.method == MethodName.TRACE else "Gap"
        most = f" (largest {text.number(summary.gap_guided_max)})"
        lines.append((name, f"{text.number(summary.gap_guided)} nats{most}"))
    if summary.gap_ratio is not None:
        ratio = text.share(summary.gap_ratio)
        lines.append(("Gap, unguided", f"{text.number(summary.gap_unguided)} nats; guided is {ratio} of it"))
    if summary.code_mismatch_rtn is not None or summary.code_mismatch_guided is not None:
        lines.append(("Code mismatch", _mismatch_line(summary)))
    if summary.prompt_tokens_mean is not None:
        lengths = f"{text.number(summary.prompt_tokens_mean)} of a prompt"
        lines.append(("Mean tokens", f"{lengths}, {text.number(summary.response_tokens_mean)} of a response"))
    if summary.rows:
        read = f"{text.size(summary.record_bytes_per_token)} a token as read"
        if summary.record_row_bytes:
            read += f", {text.size(summary.record_row_bytes)} without frame headers"
        if summary.whole_code_bytes_per_token:
            read += f" (whole codes of all layers: {text.size(summary.whole_code_bytes_per_token)})"
        lines.append(("Records", read))
        reasons = ", ".join(
            f"{reason} {count:,}" for reason, count in summary.missing_by_reason.items() if count
        )
        lines.append(
            (
                "Missing rows",
                f"{summary.rows_missing:,} of {summary.rows:,}" + (f" ({reasons})" if reasons else ""),
            )
        )
    if summary.seconds:
        lines.append(
            (
                "Step time",
                f"{text.seconds(summary.seconds.critical_path)}, "
                f"{text.number(summary.tokens_per_second)} generated tokens a second",
            )
        )
        lines.append(("Overhead", overhead_line(summary)))
    if found := summary.baseline_overhead:
        interval = f"{text.share(found.low)} to {text.share(found.high)}"
        lines.append(
            (
                "Overhead, A/B",
                f"{text.share(found.ratio)} of a step's time; 95 % {interval}, over {found.pairs} steps that "
                "were done without records as well",
            )
        )
    counts = f"{summary.restarts} of rollouts, {summary.store_restarts} of record stores"
    resumed = f"; went on from a checkpoint {_times(summary.resumes)}" if summary.resumes else ""
    lines.append(("Restarts", f"{counts}, {summary.trainer_restarts} of the trainer{resumed}"))
    if summary.unreadable_lines:
        lines.append(("Unreadable log lines", f"{summary.unreadable_lines:,} (torn or of another version)"))
    return lines


def _times(number: int) -> str:
    return "once" if number == 1 else f"{number} times"


def nothing_learned(summary: Summary) -> str:
    """Say that no step had a learning signal; empty where one had, or where no step was done."""
    steps, without = summary.steps_done, summary.steps_without_signal
    if not without or without < steps:
        return ""
    solved = summary.reward_last_ten is not None and summary.reward_last_ten >= 1
    remedy = "make the task harder" if solved else "warm up, or make the task easier"
    return (
        f"no group had two different rewards in {without} of {steps} steps: "
        f"nothing could be learned; {remedy}"
    )


def _mismatch_line(summary: Summary) -> str:
    said = []
    if summary.code_mismatch_rtn is not None:
        line = f"{text.share(summary.code_mismatch_rtn)} of audited values rounded to nearest"
        if summary.code_mismatch_rtn_adjacent is not None:
            line += f" ({text.share(summary.code_mismatch_rtn_adjacent)} of them to the neighbouring code)"
        said.append(line)
    if summary.code_mismatch_guided is not None:
        said.append(f"{text.share(summary.code_mismatch_guided)} guided")
    return ", ".join(said)


def overhead_line(summary: Summary) -> str:
    """The headline and its three numbers."""
    seconds = summary.seconds
    if seconds is None:
        return text.UNKNOWN
    return (
        f"{text.share(summary.overhead_ratio)} of a step: records {text.seconds(seconds.records)}, "
        f"guided kernels {text.seconds(seconds.guided_kernels)}, "
        f"extra forward {text.seconds(seconds.extra_forward)}"
    )


def summary_table(summary: Summary) -> RenderableType:
    """The table at the end of `tracerl run`."""
    title = Text.assemble(
        (summary.name, "bold"),
        f"  {summary.variant}  ",
        (summary.outcome, _OUTCOME_STYLE.get(summary.outcome, "bold yellow")),
        f"  {summary.steps_done}"
        + (f" of {summary.steps_wanted}" if summary.steps_wanted is not None else "")
        + " steps",
    )
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(style="dim", no_wrap=True)
    table.add_column()
    for name, value in facts(summary):
        table.add_row(name, Text(value))
    for check in summary.expectations:
        mark = Text("met", "green") if check.met else Text("broken", "bold red")
        shown = Text.assemble(mark, f"  {check.name} {check.wanted}: {text.number(check.value)}")
        table.add_row("Expected", shown)
    parts: list[RenderableType] = [title, table]
    if summary.message and summary.outcome != "Complete":
        parts.insert(1, Text(f"{summary.reason}: {summary.message}"))
    return Group(*parts)


# -- several runs -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Variant:
    """Runs that differ in nothing but their seeds."""

    label: str
    method: str
    runs: tuple[Summary, ...]
    note: str = ""
    """What sets it apart from variants of the same method, as a line below a table of them."""

    def over(self, value: Callable[[Summary], float | None]) -> Estimate | None:
        """Mean and interval of a figure over the runs."""
        return over_seeds(value(run) for run in self.runs)

    @property
    def held_out(self) -> Estimate | None:
        """Held-out reward at the end: over seeds, or over prompts when there is one run."""
        if len(self.runs) == 1:
            return self.runs[0].held_out_last
        return self.over(lambda run: run.held_out_last.mean if run.held_out_last else None)


# What may differ between the runs of one variant: seeds, and what does not touch the computation.
_APART = {("algorithm", "seed"), ("task", "seed")}
_NOT_COMPUTED = {"expect", "output"}


def flatten(document: Any, at: tuple[str, ...] = ()) -> dict[tuple[str, ...], Any]:
    """Leaves of nested mappings by path; lists are leaves."""
    if not isinstance(document, dict) or not document:
        return {at: document}
    leaves: dict[tuple[str, ...], Any] = {}
    for key, value in document.items():
        leaves.update(flatten(value, (*at, str(key))))
    return leaves


def differences(runs: Sequence[Run]) -> dict[tuple[str, ...], list[Any]]:
    """Fields of `spec` that are not the same in all runs, with the value in each; None where absent."""
    specs = [flatten(run.job.spec.model_dump(mode="json", by_alias=True)) if run.job else {} for run in runs]
    paths = dict.fromkeys(path for spec in specs for path in spec)
    table = {path: [spec.get(path) for spec in specs] for path in paths}
    return {path: row for path, row in table.items() if any(value != row[0] for value in row)}


def variants(runs: Sequence[Run]) -> list[Variant]:
    """Group runs that differ in their seeds alone, in the order given.

    The label is the method's; where two groups would have the same, a letter follows, and the note says which
    fields set them apart.
    """
    fields = {
        path: row
        for path, row in differences(runs).items()
        if path not in _APART and path[0] not in _NOT_COMPUTED
    }
    groups: dict[str, list[int]] = {}
    for index, run in enumerate(runs):
        own = [row[index] for row in fields.values()] if run.job else run.path
        groups.setdefault(json.dumps(own, sort_keys=True), []).append(index)
    labels = {group[0]: _label(runs[group[0]]) for group in groups.values()}
    made, letters = [], _letters()
    for group in groups.values():
        label, note = labels[group[0]], ""
        alike = [first for first, other in labels.items() if other == label]
        if len(alike) > 1:
            apart = {
                path: row[group[0]]
                for path, row in fields.items()
                if any(row[first] != row[group[0]] for first in alike)
            }
            said = [f"{name} {field_text(name, value)}" for name, value in _by_short_path(apart).items()]
            letter = next(letters)
            label, note = f"{label}, {letter}", f"{letter}: {', '.join(said) or runs[group[0]].path}"
        members = tuple(summarize(runs[index]) for index in group)
        made.append(Variant(label=label, method=members[0].method, runs=members, note=note))
    return made


def _letters() -> Iterator[str]:
    """Give A to Z, then A2 to Z2, and so on."""
    for turn in count(1):
        for letter in ascii_uppercase:
            yield letter if turn == 1 else f"{letter}{turn}"


def _by_short_path(fields: Mapping[tuple[str, ...], Any]) -> dict[str, Any]:
    """Name each field by the end of its path: two names of it, or as many as tell it from the others."""
    named = {}
    for path, value in fields.items():
        length = 2
        while sum(other[-length:] == path[-length:] for other in fields) > 1:
            length += 1
        named[".".join(path[-length:])] = value
    return named


def field_text(path: str, value: object) -> str:
    """A value of the field at the dotted `path` as YAML would have it, without secrets."""
    name = path.rpartition(".")[2]
    shown = redact({name: value})[name]
    return shown if isinstance(shown, str) else json.dumps(shown)


def _label(run: Run) -> str:
    return variant_of(run.job) if run.job else run.name


@dataclass(frozen=True)
class Column:
    """A figure of the comparison: `estimate` of a variant, shown times `factor`."""

    name: str
    estimate: Callable[[Variant], Estimate | None]
    factor: float = 1.0
    signed: bool = False

    def show(self, one: Variant) -> str:
        """The figure of a variant."""
        estimate = self.estimate(one)
        if estimate is None:
            return text.UNKNOWN
        return f"{'+' if self.signed and estimate.mean > 0 else ''}{estimate.show(self.factor)}"

    def show_difference(self, first: Variant, second: Variant) -> str:
        """What the second has more than the first."""
        made = difference(self.estimate(first), self.estimate(second))
        return text.UNKNOWN if made is None else f"{'+' if made.mean > 0 else ''}{made.show(self.factor)}"


def _squared_error(estimate: Estimate) -> float | None:
    """Variance of a mean over seeds, from its interval."""
    if estimate.over != "seeds" or estimate.high is None:
        return None
    return ((estimate.high - estimate.mean) / t95(estimate.n - 1)) ** 2


def difference(first: Estimate | None, second: Estimate | None) -> Estimate | None:
    """The second mean minus the first, with Welch's 95 % interval where both are means over several seeds."""
    if first is None or second is None:
        return None
    mean, n = second.mean - first.mean, min(first.n, second.n)
    one, other = _squared_error(first), _squared_error(second)
    if one is None or other is None or one + other == 0:
        return Estimate(mean=mean, low=None, high=None, n=n, over="seeds")
    freedom = (one + other) ** 2 / (one**2 / (first.n - 1) + other**2 / (second.n - 1))
    half = t95(math.floor(freedom + 1e-9)) * math.sqrt(one + other)
    return Estimate(mean=mean, low=mean - half, high=mean + half, n=n, over="seeds")


def _ended(one: Variant) -> str:
    complete = sum(run.outcome == "Complete" for run in one.runs)
    return str(complete) if complete == len(one.runs) else f"{complete} of {len(one.runs)}"


COMPARISON: tuple[Column, ...] = (
    Column("Held-out reward", lambda one: one.held_out),
    Column("Gain", lambda one: one.over(lambda run: run.held_out_gain), signed=True),
    Column("Gap (nats)", lambda one: one.over(lambda run: run.gap_guided)),
    Column(
        "Gap, unguided (nats)",
        # Without guidance the two are one number.
        lambda one: one.over(lambda run: None if run.gap_ratio is None else run.gap_unguided),
    ),
    Column("Record (B/token)", lambda one: one.over(lambda run: run.record_bytes_per_token)),
    Column("Step (s)", lambda one: one.over(lambda run: run.seconds.critical_path if run.seconds else None)),
    Column("Overhead (%)", lambda one: one.over(lambda run: run.overhead_ratio), 100.0),
)
"""Figures of the comparison, in the terminal and in the report."""

COMPARISON_NOTE = (
    "± is the half-width of the 95 % interval over seeds (Student's t); a range in brackets is the 95 % "
    "interval of a single run over its held-out prompts (Wilson)."
)


DIFFERENCE = "Second − first"
"""What stands beside two variants, and no more of them."""


def comparison(made: Sequence[Variant]) -> tuple[tuple[str, ...], list[tuple[str, tuple[str, ...]]]]:
    """What is compared, and its figures by name: one a variant, and of two their difference."""
    heads = tuple(one.label for one in made)
    rows = [("Complete runs", tuple(_ended(one) for one in made))]
    rows += [(column.name, tuple(column.show(one) for one in made)) for column in COMPARISON]
    if len(made) != 2:
        return heads, rows
    differences = ("", *(column.show_difference(made[0], made[1]) for column in COMPARISON))
    return (*heads, DIFFERENCE), [
        (name, (*cells, more)) for (name, cells), more in zip(rows, differences, strict=True)
    ]


def comparison_table(made: Sequence[Variant]) -> RenderableType:
    """The table at the end of `tracerl compare`: a column a variant, so that it fits a terminal."""
    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0), header_style="bold")
    table.add_column("", style="dim", no_wrap=True)
    heads, rows = comparison(made)
    for head in heads:
        table.add_column(Text(head), justify="right", overflow="fold")
    for name, cells in rows:
        table.add_row(name, *map(Text, cells))
    notes = [Text(one.note) for one in made if one.note]
    return Group(table, *notes, Text(COMPARISON_NOTE, style="dim"))
