"""Charts: ticks cover what they show, gaps stay gaps, and every coordinate is inside the picture."""

from __future__ import annotations

import math
import re
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tracerl.observe.charts import (
    HALF,
    WIDE,
    Axis,
    Series,
    grouped_bars,
    line_chart,
    linear_ticks,
    log_ticks,
    stacked_bars,
    tick_label,
)

FINITE = st.floats(-1e9, 1e9)
POSITIVE = st.floats(1e-12, 1e9)
MAYBE = st.one_of(st.none(), st.just(math.nan), st.just(math.inf), FINITE)
X, Y = Axis("Step"), Axis("Gap", "nats")


@given(FINITE, st.floats(1e-6, 1e9))
def test_linear_ticks_cover_the_range_in_even_round_steps(low: float, width: float) -> None:
    ticks = linear_ticks(low, low + width)
    step = ticks[1] - ticks[0]
    slack = 1e-6 * (abs(low) + width)
    assert ticks[0] <= low + slack
    assert ticks[-1] >= low + width - slack
    assert len(ticks) <= 8
    assert all(b - a == pytest.approx(step, rel=1e-3) for a, b in pairwise(ticks))


@pytest.mark.parametrize(
    ("low", "high", "ticks"),
    [
        (0.0, 1.0, [0.0, 0.2, 0.4, 0.6, 0.8, 1.0]),
        (0.0, 0.13, [0.0, 0.05, 0.1, 0.15]),
        (3.0, 3.0, [3.0, 4.0, 5.0, 6.0]),
        (0.0, 40.0, [0.0, 10.0, 20.0, 30.0, 40.0]),
    ],
)
def test_linear_ticks_are_the_ones_a_person_would_choose(low: float, high: float, ticks: list[float]) -> None:
    assert linear_ticks(low, high) == pytest.approx(ticks)


@given(POSITIVE, st.floats(1.0, 1e6))
def test_log_ticks_cover_the_range(low: float, factor: float) -> None:
    ticks = log_ticks(low, low * factor)
    assert ticks[0] <= low * 1.00001
    assert ticks[-1] >= low * factor * 0.99999
    assert 2 <= len(ticks) <= 12
    assert ticks == sorted(set(ticks))


@pytest.mark.parametrize(
    ("value", "axis", "text"),
    [
        (0.0, Y, "0"),
        (0.002, Y, "0.002"),
        (1500.0, Y, "1,500"),
        (0.00001, Y, "1e-05"),
        (0.25, Axis("Share", percent=True), "25%"),
    ],
)
def test_tick_labels(value: float, axis: Axis, text: str) -> None:
    assert tick_label(value, axis) == text


@given(st.lists(MAYBE, min_size=1, max_size=30), st.booleans())
def test_a_line_chart_stays_inside_its_picture_and_shows_only_numbers(
    values: list[float | None], log: bool
) -> None:
    axis = Axis("Gap", "nats", log=log)
    series = Series("a", "guided", [float(at) for at in range(len(values))], values)
    svg = line_chart([series], X, axis, width=HALF, title="t", description="d")
    shown = [value for value in values if value is not None and math.isfinite(value)]
    if log:
        shown = [value for value in shown if value > 0]
    if not shown:
        assert svg is None
        return
    assert svg is not None
    assert "nan" not in svg
    assert "inf" not in svg
    assert svg.count('class="hover"') == len(shown)
    for points in re.findall(r'points="([^"]+)"', svg):
        for point in points.split():
            x, y = map(float, point.split(","))
            assert 0 <= x <= HALF
            assert 0 <= y <= 250


@pytest.mark.parametrize(
    "values", [[5e-324], [-5e-324, 5e-324], [1e308, -1e308], [1e308], [5e-324, 1e308], [10**400, 1.0]]
)
@pytest.mark.parametrize("axis", [Y, Axis("Gap", "nats", log=True), Axis("Gap", zero=False)])
def test_values_at_the_ends_of_floating_point_have_a_chart(values: list[float], axis: Axis) -> None:
    steps = [float(step) for step in range(len(values))]
    svg = line_chart([Series("TRACE", "0", steps, values)], X, axis, width=WIDE, title="t", description="d")
    assert svg is not None
    heights = [float(y) for y in re.findall(r'class="hover" cx="[^"]+" cy="([^"]+)"', svg)]
    assert heights
    assert all(0 <= height <= 290 for height in heights)


def test_a_missing_value_interrupts_a_line_unless_it_is_of_rare_events() -> None:
    series = Series("a", "guided", [1, 2, 3, 4, 5], [1.0, 2.0, None, 4.0, 5.0])
    broken = line_chart([series], X, Y, width=WIDE, title="t", description="d")
    joined = line_chart([series], X, Y, width=WIDE, title="t", description="d", breaks=False)
    assert broken is not None
    assert joined is not None
    assert broken.count("<polyline") == 2
    assert joined.count("<polyline") == 1


def test_a_single_point_is_a_dot() -> None:
    svg = line_chart([Series("a", "guided", [7], [0.5])], X, Y, width=HALF, title="t", description="d")
    assert svg is not None
    assert svg.count('class="dot"') == 1


@given(st.integers(1, 300), st.integers(1, 4))
def test_stacks_have_a_bounded_number_of_bars_whose_heights_add_up(steps: int, layers: int) -> None:
    xs = [float(step) for step in range(1, steps + 1)]
    series = [Series(str(index), str(index), xs, [1.0] * steps) for index in range(layers)]
    svg = stacked_bars(series, X, Axis("Time", "s"), width=WIDE, title="t", description="d")
    assert svg is not None
    bars = re.findall(r'<rect [^>]*y="([\d.]+)"[^>]*height="([\d.]+)"', svg)
    assert len(bars) % layers == 0
    assert len(bars) // layers <= 90
    # Every layer of every bar has the same height, as all values are 1.
    assert max(float(height) for _, height in bars) - min(float(height) for _, height in bars) < 0.3


def test_bars_without_a_value_are_left_out() -> None:
    bars = [("a", "guided", [0.5, None]), ("b", "unguided", [None, math.nan])]
    svg = grouped_bars(["0", "1"], bars, Axis("Layer"), Y, width=HALF, title="t", description="d")
    assert svg is not None
    assert svg.count("<rect") == 1
    nothing = [("a", "guided", [None])]
    assert grouped_bars(["0"], nothing, Axis("Layer"), Y, width=HALF, title="t", description="d") is None


def test_text_is_escaped_wherever_it_enters() -> None:
    evil = "<b>&"
    svgs = [
        line_chart(
            [Series(evil, evil, [1], [1.0])], Axis(evil), Axis(evil), width=HALF, title=evil, description=evil
        ),
        stacked_bars(
            [Series(evil, evil, [1], [1.0])],
            Axis(evil),
            Axis(evil, evil),
            width=HALF,
            title=evil,
            description=evil,
            labels=[evil],
        ),
        grouped_bars(
            [evil], [(evil, evil, [1.0])], Axis(evil), Axis(evil), width=HALF, title=evil, description=evil
        ),
    ]
    for svg in svgs:
        assert svg is not None
        assert "<b>" not in svg
        assert "&lt;b&gt;&amp;" in svg
