"""The sections of the report: charts with their legends, words and tables, from one group of runs or several.

A group is what one colour stands for: a single run, or the runs of a variant, whose lines are then means.
Alone on a page, guided and unguided (round to nearest) have a colour each; among others, a group has one.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Literal

from markupsafe import Markup

from tracerl.api.job import MethodName
from tracerl.observe import text
from tracerl.observe.charts import HALF, THIRD, WIDE, Axis, Series, grouped_bars, line_chart, stacked_bars
from tracerl.observe.metrics import position_label
from tracerl.observe.redact import redact_text
from tracerl.observe.run import Run, labels
from tracerl.observe.summary import Estimate, Summary, held_out_prompts, over_seeds, wilson
from tracerl.rl.steprecord import Gap, SiteMismatch, StepRecord

_STEP = Axis("Step")
_MAX_TABLE_ROWS = 60
_WINDOW = 5
"""Steps that a line of noisy values is averaged over."""


@dataclass(frozen=True)
class Mark:
    """One entry of a legend."""

    name: str
    style: str
    kind: Literal["line", "dashed", "faint", "box"] = "line"


@dataclass(frozen=True)
class DataTable:
    """A table; the first column is a row's heading, the others are numbers when `numeric`."""

    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    note: str = ""
    numeric: bool = True


@dataclass(frozen=True)
class Figure:
    """A chart with its legend, its words and its numbers; `svg` None says `empty` in its place."""

    title: str
    svg: Markup | None
    caption: str = ""
    legend: tuple[Mark, ...] = ()
    table: DataTable | None = None
    empty: str = "Nothing was measured."


@dataclass(frozen=True)
class Section:
    """A part of the page; `short` is its name among the links at the top, `columns` the charts in a row."""

    anchor: str
    short: str
    title: str
    intro: str = ""
    figures: tuple[Figure, ...] = ()
    tables: tuple[tuple[str, DataTable], ...] = ()
    columns: Literal[1, 2, 3] = 1


@dataclass(frozen=True)
class Group:
    """Runs shown in one colour: a single run, or the runs of one variant."""

    label: str
    style: str
    runs: tuple[Run, ...]
    summaries: tuple[Summary, ...]
    names: tuple[str, ...]
    """A short name for each run."""

    @property
    def guides(self) -> bool:
        """Whether the trainer follows records."""
        return self.summaries[0].method == MethodName.TRACE


# -- small tools ------------------------------------------------------------------------------------------


def _thin(rows: Sequence[tuple[str, ...]]) -> tuple[tuple[tuple[str, ...], ...], str]:
    """At most `_MAX_TABLE_ROWS` rows, evenly spread, always with the last; and the note that says so."""
    if len(rows) <= _MAX_TABLE_ROWS:
        return tuple(rows), ""
    stride = -(-len(rows) // _MAX_TABLE_ROWS)
    kept = list(rows[::stride])
    if kept[-1] != rows[-1]:
        kept.append(rows[-1])
    return tuple(kept), f"Every {text.ordinal(stride)} of {len(rows)} rows; all are in metrics.jsonl."


def _series_table(x: str, series: Sequence[Series], show: Callable[[float | None], str]) -> DataTable:
    """The numbers of lines over a common x: one row an x value of any of them."""
    columns = [dict(zip(one.x, one.y, strict=True)) for one in series]
    xs = sorted({at for column in columns for at in column})
    rows = [(f"{at:g}", *(show(column.get(at)) for column in columns)) for at in xs]
    kept, note = _thin(rows)
    return DataTable((x, *(one.name for one in series)), kept, note)


def _mean_over_runs(
    group: Group, value: Callable[[StepRecord], float | None]
) -> tuple[list[float], list[float]]:
    """A value by step, averaged over the runs of a group that have it."""
    found: dict[int, list[float]] = defaultdict(list)
    for run in group.runs:
        for step in run.steps:
            measured = value(step)
            if measured is not None:
                found[step.step].append(measured)
    steps = sorted(found)
    return [float(step) for step in steps], [fmean(found[step]) for step in steps]


def _mean(values: Iterable[float]) -> float | None:
    known = list(values)
    return fmean(known) if known else None


def _trailing(values: Sequence[float], window: int) -> list[float]:
    """Means over the last `window` values up to each."""
    return [fmean(values[max(0, index + 1 - window) : index + 1]) for index in range(len(values))]


def _lines(
    title: str,
    series: Sequence[Series],
    y: Axis,
    *,
    width: int,
    caption: str = "",
    empty: str = "Nothing was measured.",
    breaks: bool = True,
    show: Callable[[float | None], str] = text.number,
) -> Figure:
    shown = [one for one in series if one.x]
    return Figure(
        title=title,
        svg=line_chart(
            shown,
            _STEP,
            y,
            width=width,
            title=title,
            description=f"{y.title} by step. {caption}".strip(),
            breaks=breaks,
        ),
        caption=caption,
        legend=tuple(Mark(one.name, one.style, _kind(one)) for one in shown) if len(shown) > 1 else (),
        table=_series_table("Step", shown, show) if shown else None,
        empty=empty,
    )


def _kind(series: Series) -> Literal["line", "dashed", "faint"]:
    return "dashed" if series.dashed else "faint" if series.faint else "line"


def _alone(groups: Sequence[Group]) -> bool:
    """Whether there is one run in all."""
    return len(groups) == 1 and len(groups[0].runs) == 1


def _per_run(groups: Sequence[Group]) -> str:
    return (
        "Lines are means over the runs of a variant that reached the step. "
        if any(len(one.runs) > 1 for one in groups)
        else ""
    )


# -- sections ---------------------------------------------------------------------------------------------


def _held_out(group: Group, style: str, name: str) -> Series:
    found: dict[int, list[float]] = defaultdict(list)
    for run in group.runs:
        if run.starts and run.starts[0].held_out_reward is not None:
            found[0].append(run.starts[0].held_out_reward)
        for step in run.steps:
            if step.held_out_reward is not None:
                found[step.step].append(step.held_out_reward)
    steps = sorted(found)
    prompts = held_out_prompts(group.runs[0].job)
    estimates: list[Estimate | None] = [
        wilson(found[step][0], prompts) if len(group.runs) == 1 else over_seeds(found[step]) for step in steps
    ]
    return Series(
        name=name,
        style=style,
        x=[float(step) for step in steps],
        y=[one.mean if one else None for one in estimates],
        low=[one.low if one else None for one in estimates],
        high=[one.high if one else None for one in estimates],
    )


def reward(groups: Sequence[Group]) -> Section:
    """Training and held-out reward by step."""
    if _alone(groups):
        (group,) = groups
        xs, ys = _mean_over_runs(group, lambda step: step.reward.mean)
        window = min(_WINDOW, len(ys))
        series = [
            Series("Training, each step", "train", xs, ys, faint=True),
            Series(f"Training, mean of {window} steps", "train", xs, _trailing(ys, window)),
            _held_out(group, "heldout", "Held-out"),
        ]
        if window < 2:
            del series[1]
        figures = [
            _lines(
                "Training and held-out prompts",
                series,
                Axis("Mean reward"),
                width=WIDE,
                caption="Training: sampled answers to the prompts of a step. Held-out: one answer each to "
                "prompts kept out of training; step 0 is before the first update, bars are 95 % intervals "
                "over the prompts.",
                breaks=False,
            )
        ]
    else:
        window = min(_WINDOW, max((len(run.steps) for one in groups for run in one.runs), default=0))
        figures = [
            _lines(
                "Held-out reward",
                [_held_out(group, group.style, group.label) for group in groups],
                Axis("Mean reward"),
                width=HALF,
                caption="One answer to each prompt kept out of training. Bars are 95 % intervals, over seeds "
                "where a variant has several runs, else over prompts.",
                breaks=False,
            ),
            _lines(
                "Training reward",
                [
                    Series(group.label, group.style, xs, _trailing(ys, window))
                    for group in groups
                    for xs, ys in [_mean_over_runs(group, lambda step: step.reward.mean)]
                ],
                Axis("Mean reward"),
                width=HALF,
                caption=_per_run(groups)
                + (f"Means of {window} steps, of fewer at the start." if window > 1 else ""),
            ),
        ]
    return Section("reward", "Reward", "Reward", figures=tuple(figures), columns=2 if len(figures) > 1 else 1)


def _merged_positions(gaps: Iterable[Gap]) -> dict[tuple[int, int], float]:
    """Token-weighted mean gap a bucket of positions, over steps."""
    total: dict[tuple[int, int], float] = defaultdict(float)
    tokens: Counter[tuple[int, int]] = Counter()
    for gap in gaps:
        for bucket in gap.by_position:
            # The last bucket of a short step ends early; buckets are known by where they start.
            key = (bucket.start, max(2 * bucket.start, bucket.start + 1))
            total[key] += bucket.mean * bucket.tokens
            tokens[key] += bucket.tokens
    return {key: total[key] / tokens[key] for key in sorted(total) if tokens[key]}


def _gap_series(group: Group, *, alone: bool) -> list[Series]:
    guided = _mean_over_runs(group, lambda step: step.gap_guided.mean)
    style = ("guided" if group.guides else "unguided") if alone else group.style
    if alone:
        name = "Guided" if group.guides else "Gap"
    else:
        name = f"{group.label}, guided" if group.guides else group.label
    series = [Series(name, style, *guided)]
    if group.guides:
        unguided = _mean_over_runs(group, lambda step: step.gap_unguided.mean if step.gap_unguided else None)
        series.append(
            Series(
                "Unguided (round to nearest)" if alone else f"{group.label}, unguided",
                "unguided" if alone else group.style,
                *unguided,
                dashed=not alone,
            )
        )
    return series


def gap(groups: Sequence[Group]) -> Section:
    """The gap of log-probs between trainer and rollout, by step and by position."""
    alone = len(groups) == 1
    figures = [
        _lines(
            "Gap by step",
            [series for group in groups for series in _gap_series(group, alone=alone)],
            Axis("Mean |difference of log-probs|", "nats", log=True),
            width=HALF,
            caption=_per_run(groups)
            + "Between trainer and rollout, for the tokens that were sampled, before "
            "the step's first update.",
            empty="No step was done, so there is no gap yet.",
        )
    ]
    bars: list[tuple[str, str, dict[tuple[int, int], float]]] = []
    for group in groups:
        steps = [step for run in group.runs for step in run.steps]
        name, style = (("Guided" if group.guides else "Gap"), "guided" if group.guides else "unguided")
        if not alone:
            name, style = group.label, group.style
        bars.append((name, style, _merged_positions(step.gap_guided for step in steps)))
        if alone and group.guides:
            unguided = (step.gap_unguided for step in steps if step.gap_unguided)
            bars.append(("Unguided (round to nearest)", "unguided", _merged_positions(unguided)))
    buckets = sorted({bucket for _, _, values in bars for bucket in values})
    positions = [position_label(*bucket).replace("-", "–") for bucket in buckets]
    title = "Gap by position in the answer"
    figures.append(
        Figure(
            title=title,
            svg=grouped_bars(
                positions,
                [(name, style, [values.get(bucket) for bucket in buckets]) for name, style, values in bars],
                Axis("Position of the generated token, from 0"),
                Axis("Mean |difference of log-probs|", "nats"),
                width=HALF,
                title=title,
                description="Mean gap over the run by position of the token in the answer.",
            ),
            caption="Mean over the run" + (", guided where the method guides." if not alone else "."),
            legend=tuple(Mark(name, style, "box") for name, style, _ in bars) if len(bars) > 1 else (),
            table=DataTable(
                ("Position", *(name for name, _, _ in bars)),
                tuple(
                    (label, *(text.number(values.get(bucket)) for _, _, values in bars))
                    for label, bucket in zip(positions, buckets, strict=True)
                ),
            )
            if buckets
            else None,
        )
    )
    return Section(
        "gap",
        "Gap",
        "Gap between rollout and trainer",
        "How far the two sides are apart about a token that was sampled. The importance weight corrects what "
        "is left of it; guidance removes the part that comes from rounding.",
        tuple(figures),
        columns=2,
    )


def mismatch(group: Group) -> Section:
    """Code mismatch by layer and kind, from audited trajectories."""
    sites: dict[tuple[str, int], list[SiteMismatch]] = defaultdict(list)
    for run in group.runs:
        for step in run.steps:
            for site in step.mismatch:
                sites[site.kind, site.layer].append(site)

    def share(kind: str, layer: int, part: str, whole: str) -> float | None:
        found = sites[kind, layer]
        total = sum(getattr(site, whole) for site in found)
        return sum(getattr(site, part) for site in found) / total if total else None

    figures = []
    kinds = list(dict.fromkeys(kind for kind, _ in sorted(sites)))
    for kind in kinds:
        layers = sorted(layer for of, layer in sites if of == kind)
        rtn = [share(kind, layer, "rtn_mismatched", "rtn_values") for layer in layers]
        guided = [share(kind, layer, "guided_mismatched", "guided_values") for layer in layers]
        adjacent = [share(kind, layer, "rtn_adjacent", "rtn_mismatched") for layer in layers]
        scales = [share(kind, layer, "scales_wrong", "scales") for layer in layers]
        bars = [("Round to nearest", "unguided", rtn), ("Guided", "guided", guided)]
        title = _KIND_TITLES.get(kind, kind)
        figures.append(
            Figure(
                title=title,
                svg=grouped_bars(
                    [str(layer) for layer in layers],
                    bars,
                    Axis("Layer"),
                    Axis("Values with another code", percent=True),
                    width=THIRD if len(kinds) > 2 else HALF,
                    title=f"Code mismatch: {title}",
                    description=f"Share of audited values of {title.lower()} whose code differs, by layer.",
                ),
                legend=tuple(Mark(name, style, "box") for name, style, _ in bars),
                table=DataTable(
                    ("Layer", "Round to nearest", "of them adjacent", "Guided", "Scales rebuilt wrong"),
                    tuple(
                        (str(layer), *map(text.share, shares))
                        for layer, *shares in zip(layers, rtn, adjacent, guided, scales, strict=True)
                    ),
                ),
            )
        )
    if not figures:
        figures.append(
            Figure(
                "Code mismatch",
                None,
                empty="No trajectory was audited. Set records.auditEvery, for example to 16, to see by layer "
                "how often the two sides round to different codes.",
            )
        )
    return Section(
        "mismatch",
        "Mismatch",
        "Code mismatch by layer",
        "From audited trajectories, which carry whole codes of all layers: the share of values for which the "
        "trainer gets another FP4 code than the rollout had. Adjacent means the next code up or down.",
        tuple(figures),
        columns=3 if len(kinds) > 2 else 2 if kinds else 1,
    )


_KIND_TITLES = {
    "ExpertInput": "Experts' input",
    "Key": "Keys",
    "Value": "Values",
    "FC2Input": "Experts' second input",
}


def records(groups: Sequence[Group]) -> Section:
    """Bytes a token, and missing rows by reason."""
    figures: list[Figure] = []
    if _alone(groups):
        figures.append(_record_bytes(groups[0]))
    rows = []
    for group in groups:
        for name, one in zip(group.names, group.summaries, strict=True):
            label = "All steps" if _alone(groups) else f"{group.label}, {name}"
            ratio = one.rows_missing / one.rows if one.rows else None
            reasons = [f"{reason} {count:,}" for reason, count in one.missing_by_reason.items() if count]
            rows.append(
                (
                    label,
                    text.size(one.record_bytes_per_token),
                    f"{one.rows:,}",
                    f"{one.rows_missing:,}",
                    text.share(ratio),
                    ", ".join(sorted(reasons)) or text.UNKNOWN,
                    f"{one.routes_missing:,}",
                    text.number(one.prompt_tokens_mean),
                    text.number(one.response_tokens_mean),
                )
            )
    lengths = ("Mean prompt", "Mean response")
    table = DataTable(
        ("", "Bytes a token", "Rows", "Missing", "Share", "By reason", "Routes missing", *lengths),
        tuple(rows),
        "A row is one token's forward pass. A missing row rounds to nearest and is counted by reason; for a "
        "missing route (row times layer) the trainer's own router chooses. Mean lengths are in tokens.",
    )
    missing = [
        Series(
            group.label if len(groups) > 1 else "Missing rows",
            group.style if len(groups) > 1 else "bad",
            *_mean_over_runs(group, lambda step: float(step.records.rows_missing)),
        )
        for group in groups
    ]
    if not any(value for one in missing for value in one.y):
        missing = []
    figures.append(
        _lines(
            "Missing rows by step",
            missing,
            Axis("Rows without a usable record", "rows"),
            width=HALF if _alone(groups) else WIDE,
            caption=_per_run(groups),
            empty="No row is missing: every recorded site of every row had a usable record."
            if any(run.steps for group in groups for run in group.runs)
            else "No step was done.",
        )
    )
    travel = _travel(groups)
    return Section(
        "records",
        "Records",
        "Records",
        figures=tuple(figures),
        tables=(("Rows and bytes", table), *((("How frames travelled", travel),) if travel else ())),
        columns=2 if len(figures) > 1 else 1,
    )


_READ_PATHS = {
    "ring": "Shared memory",
    "spill": "Spilled",
    "http": "Other nodes",
    "object": "Object store",
}


def _travel(groups: Sequence[Group]) -> DataTable | None:
    """From where frames were read, and how full the stores were; None where no step says so."""
    rows = []
    for group in groups:
        for name, run in zip(group.names, group.runs, strict=True):
            told = [step.transport for step in run.steps if step.transport is not None]
            if not told:
                continue
            fullest = max(told, key=lambda one: one.held_bytes)
            share = fullest.held_bytes / fullest.capacity_bytes if fullest.capacity_bytes else None
            read = [sum(one.read_bytes.get(path, 0) for one in told) for path in _READ_PATHS]
            rows.append(
                (
                    "All steps" if _alone(groups) else f"{group.label}, {name}",
                    *(text.size(count) for count in read),
                    text.size(fullest.held_bytes) + ("" if share is None else f" ({text.share(share)})"),
                    f"{sum(one.waits for one in told):,}",
                    f"{sum(one.retries for one in told):,}",
                )
            )
    if not rows:
        return None
    return DataTable(
        ("", *_READ_PATHS.values(), "Held between steps", "Waits", "Retries"),
        tuple(rows),
        "Bytes read while the steps ran, by where they were; a step also reads ahead, for later ones. Held: "
        "the most that was in the stores' fastest tier at the end of a step, and its share of the rings. "
        "Waits: times that no prompts were submitted because a store had little room.",
    )


def _record_bytes(group: Group) -> Figure:
    one = group.summaries[0]
    bars = [
        ("As they travelled", one.record_bytes_per_token),
        ("By the site table", one.record_row_bytes),
        ("Whole codes", one.whole_code_bytes_per_token),
    ]
    known = [(name, value) for name, value in bars if value]
    title = "Bytes a token"
    return Figure(
        title,
        grouped_bars(
            [name for name, _ in known],
            [("Bytes a token", "guided", [value for _, value in known])],
            Axis(""),
            Axis("Record size", "bytes a token"),
            width=HALF,
            title=title,
            description="Record bytes a token as they travelled, by the site table, and for whole codes.",
        ),
        caption="As they travelled: with headers and hashes, without audits. By the site table: the recorded "
        "bits alone. Whole codes: every code and block scale of every quantised layer.",
        table=DataTable(("", "Bytes a token"), tuple((name, text.size(value)) for name, value in known)),
        empty="This method records nothing.",
    )


def staleness(groups: Sequence[Group]) -> Section:
    """How old trajectories were, and the importance weights."""
    figures = []
    if _alone(groups):
        steps = groups[0].runs[0].steps
        lags = sorted({lag for step in steps for lag in step.staleness.trajectories})
        title = "Staleness"
        xs = [float(step.step) for step in steps]
        layers = [
            Series(
                "current version" if lag == 0 else f"{lag} old",
                f"lag-{min(lag, 4)}",
                xs,
                [float(step.staleness.trajectories.get(lag, 0)) for step in steps],
            )
            for lag in lags
        ]
        totals = Counter[int]()
        for step in steps:
            totals.update(step.staleness.trajectories)
        dropped = sum(step.staleness.groups_dropped for step in steps)
        figures.append(
            Figure(
                title,
                stacked_bars(
                    layers,
                    _STEP,
                    Axis("Trajectories"),
                    width=HALF,
                    title=title,
                    description="Trajectories of a step by policy versions behind the trainer.",
                ),
                caption="Trainer's version minus the version of a trajectory's oldest token. "
                + (
                    f"{dropped:,} groups became too old and were dropped."
                    if dropped
                    else "No group was dropped."
                ),
                legend=tuple(Mark(one.name, one.style, "box") for one in layers),
                table=DataTable(
                    ("Versions behind", "Trajectories"),
                    tuple((str(lag), f"{totals[lag]:,}") for lag in lags),
                ),
            )
        )
    figures.append(_weights(groups))
    return Section(
        "staleness",
        "Staleness",
        "Staleness and importance weights",
        figures=tuple(figures),
        columns=2 if len(figures) > 1 else 1,
    )


def _weights(groups: Sequence[Group]) -> Figure:
    def key(name: str) -> Callable[[StepRecord], float | None]:
        return lambda step: step.rollout_corr.get(name)

    if len(groups) == 1:
        (group,) = groups
        series = [
            Series("Mean", "guided", *_mean_over_runs(group, key("rollout_is_mean"))),
            Series("Largest", "3", *_mean_over_runs(group, key("rollout_is_max"))),
            Series("Smallest", "train", *_mean_over_runs(group, key("rollout_is_min"))),
            Series(
                "Effective sample size",
                "2",
                *_mean_over_runs(group, key("rollout_is_eff_sample_size")),
                dashed=True,
            ),
        ]
        return _lines(
            "Importance weights",
            series,
            Axis("Weight, after the upper bound", log=True),
            width=HALF,
            caption="A mean near 1 says that the two sides agree; the effective sample size is a share of "
            "the tokens.",
        )
    return _lines(
        "Effective sample size of the importance weights",
        [
            Series(group.label, group.style, *_mean_over_runs(group, key("rollout_is_eff_sample_size")))
            for group in groups
        ],
        Axis("Share of the tokens", percent=True),
        width=WIDE,
        caption=_per_run(groups),
        show=text.share,
    )


@dataclass(frozen=True)
class _Part:
    """One layer of a stack: a duration of a step, in seconds."""

    label: str
    style: str
    of: Callable[[StepRecord], float]
    meaning: str = ""


def _seconds_of(name: str) -> Callable[[StepRecord], float]:
    def read(step: StepRecord) -> float:
        value: float = getattr(step.seconds, name)
        return value

    return read


_NAMED_PARTS = (
    ("generate_wait", "Waiting for trajectories"),
    ("fetch", "Waiting for rewards and records"),
    ("forward_old_guided", "Old log-probs"),
    ("forward_old_unguided", "Old log-probs, unguided"),
    ("train_forward", "Training, forward"),
    ("train_backward", "Training, backward"),
    ("optimizer", "Optimizer"),
    ("push_weights", "Pushing weights"),
    ("evaluate", "Evaluation"),
    ("checkpoint", "Checkpoint"),
)


def _everything_else(step: StepRecord) -> float:
    named = sum(_seconds_of(name)(step) for name, _ in _NAMED_PARTS)
    return max(step.seconds.total - named, 0.0)


_STEP_PARTS = (
    *(_Part(label, f"part-{name}", _seconds_of(name)) for name, label in _NAMED_PARTS),
    _Part("Everything else", "part-other", _everything_else),
)
_OVERHEAD_PARTS = (
    _Part(
        "Records",
        "cost-records",
        lambda step: step.overhead.records,
        "Capture, pack and put in the rollout, fetch and unpack in the trainer.",
    ),
    _Part(
        "Guided kernels",
        "cost-guided_kernels",
        lambda step: step.overhead.guided_kernels,
        "All of guided rounding; rounding to nearest would have cost a part of it.",
    ),
    _Part(
        "Extra forward",
        "cost-extra_forward",
        lambda step: step.overhead.extra_forward,
        "The second forward pass that the importance ratio and the unguided gap need.",
    ),
)


_RECORD_PARTS = (
    _Part(
        "– capture", "", lambda step: step.overhead.capture, "Taking codes out of the rollout's forward pass."
    ),
    _Part("– pack", "", lambda step: step.overhead.pack, "Low bits into rows, rows into frames."),
    _Part("– put", "", lambda step: step.overhead.put, "Writing frames, in a thread beside the decoding."),
    _Part(
        "– fetch",
        "",
        lambda step: step.overhead.fetch,
        "Reading and checking frames, also in the background.",
    ),
    _Part("– unpack", "", lambda step: step.overhead.unpack, "Rows into guidance for a micro-batch."),
)


def _mean_part(group: Group, of: Callable[[StepRecord], float]) -> float | None:
    """Mean seconds a step: over the steps of each run, then over the runs."""
    return _mean(fmean(of(step) for step in run.steps) for run in group.runs if run.steps)


def _stack(
    groups: Sequence[Group], parts: Sequence[_Part], title: str, *, unit: str, factor: float
) -> Figure:
    """Parts of a step on top of each other: a bar a step for one run, a bar a group for several."""
    if _alone(groups):
        steps = groups[0].runs[0].steps
        xs = [float(step.step) for step in steps]
        layers = [
            Series(part.label, part.style, xs, [part.of(step) * factor for step in steps]) for part in parts
        ]
        x, names, what = _STEP, None, "Wall time"
    else:
        xs = [float(index) for index in range(len(groups))]
        layers = []
        for part in parts:
            means = [_mean_part(group, part.of) for group in groups]
            scaled = [None if mean is None else mean * factor for mean in means]
            layers.append(Series(part.label, part.style, xs, scaled))
        x, names, what = Axis(""), [group.label for group in groups], "Mean wall time a step"
    return Figure(
        title,
        stacked_bars(
            layers,
            x,
            Axis(what, unit),
            width=WIDE,
            title=title,
            description=f"{what} by part: {', '.join(part.label.lower() for part in parts)}.",
            labels=names,
        ),
        legend=tuple(Mark(part.label, part.style, "box") for part in parts),
    )


def step_time(groups: Sequence[Group]) -> Section:
    """Where a step's time went, and what TRACE added to it."""
    used = [part for part in _STEP_PARTS if any(_mean_part(group, part.of) for group in groups)]
    rows = []
    for part in used:
        cells = []
        for group in groups:
            mean, whole = _mean_part(group, part.of), _mean_part(group, lambda step: step.seconds.total)
            share = mean / whole if mean is not None and whole else None
            cells.append(f"{text.seconds(mean)} ({text.share(share)})")
        rows.append((part.label, *cells))
    heads = ("Mean a step",) if len(groups) == 1 else tuple(group.label for group in groups)
    breakdown = replace(
        _stack(groups, used, "Time of a step by part", unit="s", factor=1.0),
        caption="Wall-clock time of the trainer. Generation runs beside it; only waiting for it shows.",
        table=DataTable(("Part", *heads), tuple(rows)),
        empty="No step was done.",
    )
    overhead = replace(
        _stack(groups, _OVERHEAD_PARTS, "Overhead of records and guidance", unit="ms", factor=1000.0),
        empty="Nothing was added to a step." if used else "No step was done.",
    )
    return Section(
        "time",
        "Time",
        "Step time and overhead",
        figures=(breakdown, overhead),
        tables=(("Overhead", _overhead_table(groups)),) if used else (),
    )


def _overhead_table(groups: Sequence[Group]) -> DataTable:
    critical = [_mean_part(group, lambda step: step.overhead.critical_path) for group in groups]

    def cells(of: Callable[[StepRecord], float]) -> Iterator[str]:
        for group, whole in zip(groups, critical, strict=True):
            mean = _mean_part(group, of)
            share = mean / whole if mean is not None and whole else None
            yield f"{text.seconds(mean)} ({text.share(share)})"

    def together(step: StepRecord) -> float:
        return sum(part.of(step) for part in _OVERHEAD_PARTS)

    records, *others = _OVERHEAD_PARTS
    parts = (records, *_RECORD_PARTS, *others)
    rows = [(part.label, *cells(part.of), part.meaning) for part in parts]
    rows.append(("Together", *cells(together), "The headline: the sum of the three."))
    heads = ("Mean a step",) if len(groups) == 1 else tuple(group.label for group in groups)
    return DataTable(
        ("", *heads, "What it is"),
        tuple(rows),
        "The share is of the step's critical path: its wall time without evaluation and checkpoint. The "
        "rollout's part of the records runs beside the trainer, so with asynchronous generation the share is "
        "an upper bound.",
        numeric=False,
    )


def events(runs: Sequence[Run]) -> Section:
    """What happened besides steps."""
    tables = []
    for run, name in zip(runs, labels(runs), strict=True):
        lines: list[tuple[float, str, str, str]] = []
        for start in run.starts:
            what = f"Resumed from step {start.resumed_from}" if start.resumed_from else "Started"
            warm = ""
            if start.warmup_steps and not start.resumed_from:
                took = (
                    f"in {text.seconds(start.warmup_seconds)}" if start.warmup_seconds else "from the cache"
                )
                warm = f", warm-up of {start.warmup_steps} steps {took}"
            detail = f"{what}: {start.parameters:,} parameters{warm}."
            lines.append((start.time, str(start.resumed_from), "Start", detail))
        lines += [(event.time, str(event.step), event.reason, event.message) for event in run.events]
        if run.finish:
            finish = run.finish
            lines.append((finish.time, str(finish.step), finish.reason or finish.outcome, finish.message))
        lines.sort(key=lambda line: line[0])
        rows = [(text.moment(at), step, reason, redact_text(said)) for at, step, reason, said in lines]
        note = ""
        if len(rows) > 300:
            rows, note = rows[-300:], f"The last 300 of {len(rows)}; all are in events.jsonl."
        if run.unreadable:
            note += f" {run.unreadable} lines of the logs could not be read (torn, or of another version)."
        title = name if len(runs) > 1 else ""
        tables.append(
            (title, DataTable(("Time", "Step", "Reason", "Message"), tuple(rows), note, numeric=False))
        )
    return Section("events", "Events", "Events", tables=tuple(tables))
