"""`report.html`: one self-contained page of a run, or of several side by side.

The page loads nothing: no script, no font, no image from elsewhere, and its own policy forbids it. Everything
that came from a run is escaped by jinja2 or by `charts`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path

import yaml
from jinja2 import Environment, PackageLoader, StrictUndefined

from tracerl.api.constants import Reason
from tracerl.api.errors import InputError, JobError
from tracerl.api.job import MethodName
from tracerl.api.manifest import Dumper
from tracerl.api.resolved import write_atomically
from tracerl.observe import sections, text
from tracerl.observe.equal import EQUAL_WEIGHTS, EQUAL_WEIGHTS_NOTE, equal_weights
from tracerl.observe.redact import redact, redact_text
from tracerl.observe.run import Run, labels
from tracerl.observe.sections import DataTable, Group, Section
from tracerl.observe.summary import (
    COMPARISON_NOTE,
    Summary,
    Variant,
    comparison,
    differences,
    field_text,
    nothing_learned,
    summarize,
    variant_of,
    variants,
)


@dataclass(frozen=True)
class Card:
    """A key figure."""

    title: str
    value: str
    unit: str
    detail: str


@dataclass(frozen=True)
class Page:
    """Everything that the template shows."""

    title: str
    subtitle: str
    several: bool
    summaries: tuple[Summary, ...]
    banners: tuple[tuple[str, str], ...]
    cards: tuple[Card, ...]
    expectations: tuple[tuple[str, str, str, bool], ...]
    comparison: DataTable | None
    sections: tuple[Section, ...]
    configurations: tuple[tuple[str, str], ...]


def _cards(one: Summary) -> tuple[Card, ...]:
    cards = []
    first, last = one.held_out_first, one.held_out_last
    if first and last:
        detail = text.signed(one.held_out_gain)
        if last.low is not None:
            low, high = text.number(last.low, 2), text.number(last.high, 2)
            detail += f"; end {low}–{high} (95 % over {last.n} prompts)"
        cards.append(
            Card("Held-out reward", f"{text.number(first.mean)} → {text.number(last.mean)}", "", detail)
        )
    elif one.reward_first is not None:
        value = f"{text.number(one.reward_first)} → {text.number(one.reward_last_ten)}"
        span = "mean of the last ten" if one.steps_done > 10 else "mean of all"
        cards.append(Card("Training reward", value, "", f"first step → {span}"))
    if one.gap_guided is not None:
        detail = "mean |difference of log-probs|"
        if one.gap_ratio is not None:
            detail = f"{text.share(one.gap_ratio)} of the unguided {text.number(one.gap_unguided)}"
        name = "Gap, guided" if one.method == MethodName.TRACE else "Gap"
        cards.append(Card(name, text.number(one.gap_guided), "nats", detail))
    if one.rows:
        value, unit = text.value_and_unit(text.size(one.record_bytes_per_token))
        missing = f"{one.rows_missing:,} of {one.rows:,} rows missing"
        cards.append(Card("Record size", value, f"{unit} a token", missing))
    if one.seconds:
        value, unit = text.value_and_unit(text.seconds(one.seconds.critical_path))
        speed = f"{text.number(one.tokens_per_second)} generated tokens a second"
        cards.append(Card("Step time", value, unit, speed))
        added = one.seconds.records + one.seconds.guided_kernels + one.seconds.extra_forward
        value, unit = text.value_and_unit(text.share(one.overhead_ratio))
        cards.append(Card("Overhead", value, f"{unit} of a step", f"{text.seconds(added)} a step"))
    return tuple(cards)


def _banners(one: Summary) -> tuple[tuple[str, str], ...]:
    nothing = nothing_learned(one)
    return (*_outcome(one), *((("warn", nothing[:1].upper() + nothing[1:] + "."),) if nothing else ()))


def _outcome(one: Summary) -> tuple[tuple[str, str], ...]:
    where = f"after step {one.steps_done}" + (
        f" of {one.steps_wanted}" if one.steps_wanted is not None else ""
    )
    if one.outcome == "Failed":
        return (("bad", f"Failed {where}. {one.reason}: {redact_text(one.message)}"),)
    if one.outcome == "Stopped":
        return (("warn", f"Stopped {where}. {redact_text(one.message)}".strip()),)
    if one.outcome == "Unfinished":
        return (("warn", f"This run has not ended: the log reaches the end of step {one.steps_done}."),)
    return ()


def _configuration(run: Run) -> str:
    return yaml.dump(redact(run.document), Dumper=Dumper, sort_keys=False, allow_unicode=True, width=100)


def _settings(run: Run) -> DataTable | None:
    if run.job is None:
        return None
    spec, algorithm = run.job.spec, run.job.spec.algorithm
    rows = [
        ("Model", redact_text(spec.model.uri)),
        ("Task", redact_text(spec.task.name or spec.task.uri or "")),
        ("Method", variant_of(run.job)),
        (
            "Quantised",
            f"{', '.join(spec.quantization.targets)} in {spec.quantization.format.value}"
            if spec.method.name is not MethodName.BF16
            else "nothing",
        ),
        ("Batch", f"{algorithm.prompts_per_step} prompts × {algorithm.samples_per_prompt} answers a step"),
        (
            "Staleness",
            f"at most {algorithm.max_version_diff} version{'s' if algorithm.max_version_diff != 1 else ''}, "
            f"{algorithm.staleness.value}",
        ),
        ("Learning rate", str(spec.trainer.optimizer.learning_rate)),
        ("Engines", f"rollout {spec.rollout.engine.value}, trainer {spec.trainer.engine.value}"),
        ("Seed", str(algorithm.seed)),
    ]
    return DataTable(("Setting", "Value"), tuple(rows), numeric=False)


def _subtitle(run: Run, one: Summary) -> str:
    parts = [one.variant]
    if run.job:
        parts += [
            redact_text(run.job.spec.task.name or run.job.spec.task.uri or ""),
            redact_text(run.job.spec.model.uri),
        ]
    parts.append(text.moment(one.started))
    if one.started is not None and one.ended is not None:
        parts.append(f"took {text.seconds(one.ended - one.started)}")
    return " · ".join(part for part in parts if part and part != text.UNKNOWN)


_VARIANT_STYLES = {MethodName.TRACE.value: "guided", MethodName.QAT.value: "unguided"}


def _groups(runs: Sequence[Run], made: Sequence[Variant]) -> list[Group]:
    named = {run.path: (run, name) for run, name in zip(runs, labels(runs), strict=True)}
    groups, free = [], iter(range(100))
    taken: set[str] = set()
    for one in made:
        style = _VARIANT_STYLES.get(one.method, "")
        if not style or style in taken:
            style = str(next(free) % 8)
        taken.add(style)
        members = [named[summary.directory] for summary in one.runs]
        groups.append(
            Group(
                label=one.label,
                style=style,
                runs=tuple(run for run, _ in members),
                summaries=one.runs,
                names=tuple(name for _, name in members),
            )
        )
    return groups


def _one_run(run: Run) -> Page:
    one = summarize(run)
    group = Group(one.variant, "guided", (run,), (one,), (run.name,))
    settings = _settings(run)
    shown = [
        sections.reward([group]),
        sections.gap([group]),
        sections.mismatch(group),
        sections.records([group]),
        sections.staleness([group]),
        sections.step_time([group]),
        sections.events([run]),
    ]
    configuration = Section(
        "configuration",
        "Configuration",
        "Configuration",
        tables=(("", settings),) if settings else (),
    )
    return Page(
        title=run.name,
        subtitle=_subtitle(run, one),
        several=False,
        summaries=(one,),
        banners=_banners(one),
        cards=_cards(one),
        expectations=tuple(
            (check.name, check.wanted, text.number(check.value), check.met) for check in one.expectations
        ),
        comparison=None,
        sections=(*shown, configuration),
        configurations=(("The resolved job", _configuration(run)),) if run.document else (),
    )


def _several_runs(runs: Sequence[Run]) -> Page:
    made = variants(runs)
    groups = _groups(runs, made)
    heads, rows = comparison(made)
    compared = DataTable(
        ("Method", *(name for name, _ in rows)),
        tuple((head, *(cells[number] for _, cells in rows)) for number, head in enumerate(heads)),
        " ".join([*(f"{one.note}." for one in made if one.note), COMPARISON_NOTE]),
    )
    equal = DataTable(
        ("", *(one.label for one in made)),
        tuple((name, *cells) for name, cells in equal_weights(made)),
        EQUAL_WEIGHTS_NOTE,
    )
    fields = differences(runs)
    names = labels(runs)
    different = DataTable(
        ("Field", *names),
        tuple(
            (".".join(("spec", *path)), *(field_text(path[-1], value) for value in row))
            for path, row in fields.items()
        ),
        "" if fields else "The jobs are the same.",
        numeric=False,
    )
    outcomes = DataTable(
        ("Run", "Variant", "Seed", "Outcome", "Steps", "Held-out reward", "Gap, guided", "Restarts"),
        tuple(
            (
                name,
                group.label,
                str(one.seed) if one.seed is not None else text.UNKNOWN,
                one.outcome + (f": {one.reason}" if one.outcome == "Failed" else ""),
                f"{one.steps_done} of {one.steps_wanted}",
                one.held_out_last.show() if one.held_out_last else text.UNKNOWN,
                text.number(one.gap_guided),
                str(one.restarts),
            )
            for group in groups
            for name, one in zip(group.names, group.summaries, strict=True)
        ),
        numeric=False,
    )
    shown = [
        Section("runs", "Runs", "Runs", tables=(("", outcomes),)),
        sections.reward(groups),
        sections.gap(groups),
        *([Section("equal", "Equal weights", EQUAL_WEIGHTS, tables=(("", equal),))] if equal.rows else []),
        sections.records(groups),
        sections.staleness(groups),
        sections.step_time(groups),
        Section("configuration", "Configuration", "What differs between the jobs", tables=(("", different),)),
        sections.events(runs),
    ]
    return Page(
        title=f"{len(runs)} runs",
        subtitle=" · ".join(dict.fromkeys(group.label for group in groups)),
        several=True,
        summaries=tuple(one for group in groups for one in group.summaries),
        banners=(),
        cards=(),
        expectations=(),
        comparison=compared,
        sections=tuple(shown),
        configurations=tuple(
            (f"Resolved job of {name}", _configuration(run))
            for run, name in zip(runs, names, strict=True)
            if run.document
        ),
    )


def render(runs: Sequence[Run]) -> str:
    """The page of one run, or of several side by side, as HTML text. InputError without a run."""
    if not runs:
        raise InputError("there is no run to report on; give at least one run directory")
    seen = [run.path for run in runs]
    if any(left == right for left, right in pairwise(sorted(seen))):
        raise InputError("a run directory is given twice; give each once")
    page = _one_run(runs[0]) if len(runs) == 1 else _several_runs(runs)
    environment = Environment(
        loader=PackageLoader("tracerl.observe", "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template("report.html.j2").render(page=page, version=version("tracerl"))


def write_report(runs: Sequence[Run], path: Path) -> None:
    """Write the page; a reader never sees half of it. JobError when it cannot be written."""
    page = render(runs)
    try:
        write_atomically(path, page)
    except OSError as error:
        raise JobError(
            Reason.RUN_LOG_FAILED,
            f"{path} cannot be written ({error.strerror}); make room there and run tracerl report",
        ) from error
