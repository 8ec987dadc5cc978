"""Each figure of `spec.expect` is judged alone: at its bound, beyond it, and where it was not measured."""

from __future__ import annotations

from typing import Any

import pytest

from tracerl.api.job import Expect
from tracerl.rl.account import Totals, expectations

MEASURED = {
    "held_out_first": 0.25,
    "held_out_last": 0.75,
    "gap_guided_sum": 8.0,
    "gap_guided_tokens": 64,
    "gap_unguided_sum": 16.0,
    "gap_unguided_tokens": 32,
    "gap_guided_same_sum": 4.0,
    "overhead_seconds": 3.0,
    "critical_path_seconds": 24.0,
    "rows": 1000,
    "rows_missing": 2,
}
"""Sums of a run, with figures that a float has exactly."""

FIGURES: list[tuple[str, float, str, str]] = [
    # bound of spec.expect, what the run above has, a bound that is missed by little, and a sum that is away
    ("minReward", 0.75, "0.7500001", "held_out_last"),
    ("minRewardGain", 0.5, "0.5000001", "held_out_first"),
    ("maxGap", 0.125, "0.1249999", "gap_guided_tokens"),
    ("maxGapRatio", 0.25, "0.2499999", "gap_unguided_sum"),
    ("maxOverhead", 0.125, "0.1249999", "critical_path_seconds"),
]


def judged(expect: dict[str, Any], **changes: float | None) -> dict[str, tuple[float | None, bool]]:
    sums = {name: value for name, value in (MEASURED | changes).items() if value is not None}
    found = expectations(Expect.model_validate(expect), Totals.model_validate(sums))
    return {one.name: (one.value, one.met) for one in found}


def test_nothing_is_judged_that_nobody_asked_for() -> None:
    assert judged({}) == {}


@pytest.mark.parametrize(("name", "figure", "missed", "away"), FIGURES)
def test_a_figure(name: str, figure: float, missed: str, away: str) -> None:
    assert judged({name: str(figure)}) == {name: (figure, True)}
    assert judged({name: missed}) == {name: (figure, False)}
    assert judged({name: str(figure)}, **{away: None}) == {name: (None, False)}


def test_rows_that_are_missing() -> None:
    assert judged({"maxMissingRows": 2}) == {"maxMissingRows": (2, True)}
    assert judged({"maxMissingRows": 1}) == {"maxMissingRows": (2, False)}
    assert judged({"maxMissingRows": 0}, rows_missing=0) == {"maxMissingRows": (0, True)}


def test_one_that_is_missed_does_not_hide_another() -> None:
    found = judged({"minReward": "0.9", "maxGapRatio": "0.1", "maxOverhead": "0.5", "maxMissingRows": 0})
    assert [name for name, (_, met) in found.items() if not met] == [
        "minReward",
        "maxGapRatio",
        "maxMissingRows",
    ]


def test_every_expectation_is_in_the_table() -> None:
    assert {field.alias for field in Expect.model_fields.values()} == {
        *(name for name, *_ in FIGURES),
        "maxMissingRows",
    }
