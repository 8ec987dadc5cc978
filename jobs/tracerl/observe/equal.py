"""The gap at equal weights: what trainer and rollout differ by before any update, of several methods.

The first batch is sampled by the very weights that train on it, and by the same ones under all methods, for
the same prompts. So this gap is of the engines' numerics alone; in later steps the policy moves as well.
"""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from tracerl.api.job import MethodName
from tracerl.observe import text
from tracerl.observe.summary import Variant

EQUAL_WEIGHTS = "Gap at equal weights"
EQUAL_WEIGHTS_NOTE = (
    "Of the first step, before any update: what trainer and rollout differ by in their numerics alone."
)


def equal_weights(made: Sequence[Variant]) -> list[tuple[str, list[str]]]:
    """Rows of the table, (what, a cell a variant); none where fewer than two variants did the first step.

    Ratios are of means over seeds, to the variants of BF16 and of QAT where there is just one of these.
    """
    means = [one.over(lambda run: run.gap_first) for one in made]
    if sum(mean is not None for mean in means) < 2:
        return []
    largest = [max(run.gap_first_max or 0.0 for run in one.runs) for one in made]
    rows = [
        ("Mean (nats)", [text.UNKNOWN if mean is None else mean.show() for mean in means]),
        (
            "Largest (nats)",
            [text.number(None if mean is None else most) for mean, most in zip(means, largest, strict=True)],
        ),
    ]
    for method in (MethodName.BF16, MethodName.QAT):
        same = [mean for one, mean in zip(made, means, strict=True) if one.method == method]
        if len(same) == 1 and same[0] is not None and same[0].mean > 0:
            base = same[0].mean
            cells = [text.number(None if mean is None else mean.mean / base) for mean in means]
            rows.append((f"Mean / {method}'s", cells))
    return rows


def equal_weights_table(made: Sequence[Variant]) -> RenderableType | None:
    """The second table at the end of `tracerl compare`; None where there is nothing to compare."""
    rows = equal_weights(made)
    if not rows:
        return None
    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0), header_style="bold")
    table.add_column(EQUAL_WEIGHTS, style="dim", no_wrap=True)
    for one in made:
        table.add_column(Text(one.label), justify="right", overflow="fold")
    for name, cells in rows:
        table.add_row(name, *map(Text, cells))
    return Group(table, Text(EQUAL_WEIGHTS_NOTE, style="dim"))
