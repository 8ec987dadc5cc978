"""Three charts as inline SVG: lines, stacked bars, grouped bars.

Colours are CSS classes (`s-guided`, `s-0`, …) that the page defines for light and dark: one SVG serves both.
Every chart has a title and a description for screen readers, axes with units, and a tooltip a point. Numbers
that are None or not finite are gaps, never zeros. A chart is drawn for the width that it is shown at, so that
its text has the size of the page's.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from markupsafe import Markup, escape

WIDE, HALF, THIRD = 1000, 482, 314
"""Widths of a chart in a page 1080 wide: alone, two or three in a row."""
_HEIGHT = {WIDE: 290, HALF: 250, THIRD: 215}
_LEFT, _RIGHT, _TOP, _BOTTOM = 66, 14, 12, 44
_LETTER = 6.6
_STRIDES = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000)
_TOOLTIP_LIMIT = 400
_MARKER_LIMIT = 60
_MAX_BARS = 90
_LEAST, _MOST = 1e-300, 1e300
"""Axes reach no further, so that no step between ticks is 0 or infinite; what lies beyond is at their end."""

Number = float | int | None


@dataclass(frozen=True)
class Axis:
    """Label, unit and scale of an axis. `zero` makes a linear axis start at 0; `top` fixes its end."""

    label: str
    unit: str = ""
    log: bool = False
    zero: bool = True
    top: float | None = None
    percent: bool = False

    @property
    def title(self) -> str:
        """Label with its unit in brackets."""
        unit = "%" if self.percent else self.unit
        return f"{self.label} ({unit})" if unit else self.label


@dataclass(frozen=True)
class Series:
    """Named y values, `x[i]` to `y[i]`; `low` and `high` are an interval drawn at each point."""

    name: str
    style: str
    x: Sequence[float]
    y: Sequence[Number]
    low: Sequence[Number] | None = None
    high: Sequence[Number] | None = None
    dashed: bool = False
    faint: bool = False


def finite(value: object) -> float | None:
    """`value` as a float, or None when it is not a finite number."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return float(value) if math.isfinite(value) else None
    except OverflowError:  # an integer that no float is as large as
        return None


def linear_ticks(low: float, high: float, wanted: int = 5) -> list[float]:
    """About `wanted` round numbers that cover [low, high], in steps of 1, 2 or 5 times a power of ten."""
    low, high = (min(max(bound, -_MOST), _MOST) for bound in (low, high))
    # A range that is nothing beside its own position cannot be divided in floating point.
    if high - low <= max(1e-9 * max(abs(low), abs(high)), _LEAST):
        high = low + (abs(low) if abs(low) > _LEAST else 1.0)
    raw = (high - low) / wanted
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= raw * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    digits = 1 - math.floor(math.log10(step))
    return [round(index * step, digits) for index in range(first, last + 1)]


def log_ticks(low: float, high: float) -> list[float]:
    """Decades that cover [low, high], both positive; with 2 and 5 between them when there are few."""
    low, high = (min(max(bound, _LEAST), _MOST) for bound in (low, high))
    first, last = math.floor(math.log10(low) + 1e-9), math.ceil(math.log10(high) - 1e-9)
    last = max(last, first + 1)
    if last - first > 3:
        stride = math.ceil((last - first) / 6)
        return [10.0**power for power in range(first, last + stride, stride)]
    ticks = [factor * 10.0**power for power in range(first, last) for factor in (1, 2, 5)]
    ticks.append(10.0**last)
    inner = [index for index, tick in enumerate(ticks) if tick <= low * 1.000001]
    start = inner[-1] if inner else 0
    stop = next((index for index, tick in enumerate(ticks) if tick >= high * 0.999999), len(ticks) - 1)
    return ticks[start : max(stop, start + 1) + 1]


def tick_label(value: float, axis: Axis) -> str:
    """A tick as text, for example 0.002, 1,500, 40% or 1e-05."""
    if axis.percent:
        return f"{value * 100:.6g}%"
    if value != 0 and abs(value) < 1e-4:
        return f"{value:.0e}"
    return f"{value:,.10g}" if abs(value) >= 1 else f"{value:.4g}"


def _scale(values: Iterable[float], axis: Axis) -> tuple[list[float], float, float]:
    """Ticks, lowest and highest value of an axis that shows `values`."""
    known = [value for value in values if not axis.log or value > 0]
    if axis.log:
        low, high = (min(known), max(known)) if known else (0.01, 1.0)
        ticks = log_ticks(low, high)
        return ticks, ticks[0], ticks[-1]
    low, high = (min(known), max(known)) if known else (0.0, 1.0)
    if axis.zero:
        low, high = min(low, 0.0), max(high, 0.0)
    if axis.top is not None:
        high = axis.top
    ticks = linear_ticks(low, high)
    return ticks, ticks[0], ticks[-1]


class _Frame:
    """Plot area with its axes; turns values into coordinates."""

    def __init__(
        self,
        x_values: Sequence[float],
        y_values: Iterable[float],
        x: Axis,
        y: Axis,
        *,
        width: int,
        whole_x: bool = False,
    ) -> None:
        self.x_axis, self.y_axis = x, y
        self.width, self.height = width, _HEIGHT[width]
        self.room = width - _LEFT - _RIGHT
        self.base = self.height - _BOTTOM
        self.y_ticks, self._y_low, self._y_high = _scale(y_values, y)
        low, high = (min(x_values), max(x_values)) if x_values else (0.0, 1.0)
        if high == low:
            half = max(0.5, abs(low) * 1e-9)
            low, high = low - half, high + half
        self._x_low, self._x_high = low, high
        ticks = [tick for tick in linear_ticks(low, high, max(self.room // 90, 3)) if low <= tick <= high]
        self.x_ticks = [tick for tick in ticks if not whole_x or tick == int(tick)]

    def x(self, value: float) -> float:
        share = (value - self._x_low) / (self._x_high - self._x_low)
        return round(_LEFT + share * self.room, 1)

    def y(self, value: float) -> float:
        low, high = self._y_low, self._y_high
        if self.y_axis.log:
            low, high, value = math.log10(low), math.log10(high), math.log10(value)
        share = min(max((value - low) / (high - low), 0.0), 1.0)
        return round(self.base - share * (self.base - _TOP), 1)

    def axes(self, x_labels: Sequence[tuple[float, str]] | None = None) -> list[str]:
        """Grid lines, tick labels and axis titles; `x_labels` are (coordinate, text) in place of numbers."""
        parts = []
        for tick in self.y_ticks:
            at = self.y(tick)
            parts.append(f'<line class="grid" x1="{_LEFT}" x2="{self.width - _RIGHT}" y1="{at}" y2="{at}"/>')
            parts.append(
                f'<text class="tick" x="{_LEFT - 8}" y="{at + 4}" text-anchor="end">'
                f"{escape(tick_label(tick, self.y_axis))}</text>"
            )
        labels = x_labels
        if labels is None:
            labels = [(self.x(tick), tick_label(tick, self.x_axis)) for tick in self.x_ticks]
        base = self.base
        parts.append(f'<line class="axis" x1="{_LEFT}" x2="{self.width - _RIGHT}" y1="{base}" y2="{base}"/>')
        for at, text in labels:
            parts.append(
                f'<text class="tick" x="{at}" y="{base + 17}" text-anchor="middle">{escape(text)}</text>'
            )
        middle = _LEFT + self.room / 2
        parts.append(
            f'<text class="label" x="{middle}" y="{self.height - 6}" text-anchor="middle">'
            f"{escape(self.x_axis.title)}</text>"
        )
        height = (_TOP + self.base) / 2
        parts.append(
            f'<text class="label" transform="translate(13 {height}) rotate(-90)" text-anchor="middle">'
            f"{escape(self.y_axis.title)}</text>"
        )
        return parts


def _svg(frame: _Frame, parts: Sequence[str], title: str, description: str) -> Markup:
    # The content was escaped where it was put in; titles are escaped here.
    return Markup(  # noqa: S704
        f'<svg viewBox="0 0 {frame.width} {frame.height}" role="img" preserveAspectRatio="xMidYMid meet">'
        f"<title>{escape(title)}</title><desc>{escape(description)}</desc>{''.join(parts)}</svg>"
    )


def _runs(points: Iterable[tuple[float, float | None]]) -> list[list[tuple[float, float]]]:
    """Stretches of neighbouring points that have a value."""
    stretches: list[list[tuple[float, float]]] = [[]]
    for x, y in points:
        if y is None:
            stretches.append([])
        else:
            stretches[-1].append((x, y))
    return [stretch for stretch in stretches if stretch]


def _shown(series: Series, axis: Axis) -> list[tuple[float, float | None]]:
    pairs = []
    for x, y in zip(series.x, series.y, strict=True):
        value = finite(y)
        pairs.append((x, None if value is None or (axis.log and value <= 0) else value))
    return pairs


def line_chart(
    series: Sequence[Series],
    x: Axis,
    y: Axis,
    *,
    width: int,
    title: str,
    description: str,
    breaks: bool = True,
) -> Markup | None:
    """Lines over a common x axis, or None when no series has a value.

    `breaks`: a missing value interrupts its line; without it the line joins the values that are there, as for
    evaluations that happen every few steps.
    """
    shown = [(one, _shown(one, y)) for one in series]
    values = [value for _, points in shown for _, value in points if value is not None]
    if not values:
        return None
    bounds = [
        bound
        for one in series
        for side in (one.low or (), one.high or ())
        for bound in map(finite, side)
        if bound is not None
    ]
    xs = [at for _, points in shown for at, value in points if value is not None]
    frame = _Frame(xs, [*values, *bounds], x, y, width=width, whole_x=True)
    parts = frame.axes()
    for one, points in shown:
        style = f"s-{one.style}" + (" dashed" if one.dashed else "") + (" faint" if one.faint else "")
        parts.append(f'<g class="{escape(style)}">')
        parts.extend(_intervals(frame, one))
        kept = points if breaks else [(at, value) for at, value in points if value is not None]
        for stretch in _runs(kept):
            if len(stretch) > 1:
                path = " ".join(f"{frame.x(at)},{frame.y(value)}" for at, value in stretch)
                parts.append(f'<polyline class="line" points="{path}"/>')
            if len(stretch) == 1 or (len(kept) <= _MARKER_LIMIT and not one.faint):
                parts.extend(
                    f'<circle class="dot" cx="{frame.x(at)}" cy="{frame.y(value)}" r="2.6"/>'
                    for at, value in stretch
                )
        if len(kept) <= _TOOLTIP_LIMIT:
            parts.extend(_tooltips(frame, one.name, kept))
        parts.append("</g>")
    return _svg(frame, parts, title, description)


def _intervals(frame: _Frame, one: Series) -> list[str]:
    parts = []
    if one.low is not None and one.high is not None:
        for at, low, high in zip(one.x, map(finite, one.low), map(finite, one.high), strict=True):
            if low is None or high is None or (frame.y_axis.log and low <= 0):
                continue
            left, top, bottom = frame.x(at), frame.y(high), frame.y(low)
            parts.append(
                f'<path class="whisker" d="M{left} {bottom}V{top}M{left - 4} {bottom}h8M{left - 4} {top}h8"/>'
            )
    return parts


def _tooltips(frame: _Frame, name: str, points: Sequence[tuple[float, float | None]]) -> list[str]:
    parts = []
    for at, value in points:
        if value is not None:
            text = f"{name}: {value:.4g} at {frame.x_axis.label.lower()} {at:g}"
            parts.append(
                f'<circle class="hover" cx="{frame.x(at)}" cy="{frame.y(value)}" r="8">'
                f"<title>{escape(text)}</title></circle>"
            )
    return parts


def _binned(xs: Sequence[float], layers: Sequence[Series]) -> tuple[list[str], list[list[float]]]:
    """At most `_MAX_BARS` bars: labels, and for every bar the mean of each layer over the bar's steps."""
    size = max(1, math.ceil(len(xs) / _MAX_BARS))
    labels, bars = [], []
    for start in range(0, len(xs), size):
        stop = min(start + size, len(xs))
        labels.append(f"{xs[start]:g}" if stop - start == 1 else f"{xs[start]:g}–{xs[stop - 1]:g}")
        bar = []
        for layer in layers:
            known = [value for value in map(finite, layer.y[start:stop]) if value is not None]
            bar.append(sum(known) / len(known) if known else 0.0)
        bars.append(bar)
    return labels, bars


def stacked_bars(
    layers: Sequence[Series],
    x: Axis,
    y: Axis,
    *,
    width: int,
    title: str,
    description: str,
    labels: Sequence[str] | None = None,
) -> Markup | None:
    """One bar an x value, the layers on top of each other; all layers share their x. None without values.

    `labels` names the bars; without it they are named by their x, and are means where there are many.
    """
    if not layers or not any(finite(value) for layer in layers for value in layer.y):
        return None
    if labels is None:
        labels, bars = _binned(layers[0].x, layers)
    else:
        bars = [[finite(layer.y[index]) or 0.0 for layer in layers] for index in range(len(labels))]
    frame = _Frame([0.0, float(len(bars))], [sum(bar) for bar in bars], x, y, width=width)
    slot = frame.room / len(bars)
    bar_width = min(slot * 0.8, 90)
    parts = frame.axes(_bar_labels(labels, slot))
    for index, bar in enumerate(bars):
        left, foot = round(_LEFT + (index + 0.5) * slot - bar_width / 2, 1), 0.0
        for layer, value in zip(layers, bar, strict=True):
            if value <= 0:
                continue
            top, bottom = frame.y(foot + value), frame.y(foot)
            foot += value
            text = f"{layer.name}: {value:.4g} {y.unit} at {x.label.lower()} {labels[index]}"
            parts.append(
                f'<rect class="bar s-{escape(layer.style)}" x="{left}" y="{top}" '
                f'width="{round(bar_width, 1)}" height="{round(bottom - top, 1)}">'
                f"<title>{escape(text)}</title></rect>"
            )
    return _svg(frame, parts, title, description)


def _bar_labels(labels: Sequence[str], slot: float) -> list[tuple[float, str]]:
    """Labels under bars that have `slot` of room each: as many as fit.

    Names in wide slots are cut; of numbers every second, fifth, tenth … is shown.
    """
    longest = max(map(len, labels), default=0) * _LETTER + 14
    if slot > 80:
        fits = int(slot / _LETTER) - 1
        shown = [label if len(label) <= fits else label[: fits - 1] + "…" for label in labels]
    else:
        wanted = max(longest / slot, 1.0)
        stride = next(factor for factor in _STRIDES if factor >= wanted)
        offset = -int(labels[0]) % stride if labels[0].isdecimal() and labels[-1].isdecimal() else 0
        shown = [label if index % stride == offset else "" for index, label in enumerate(labels)]
    return [(round(_LEFT + (index + 0.5) * slot, 1), label) for index, label in enumerate(shown) if label]


def grouped_bars(
    groups: Sequence[str],
    bars: Sequence[tuple[str, str, Sequence[Number]]],
    x: Axis,
    y: Axis,
    *,
    width: int,
    title: str,
    description: str,
) -> Markup | None:
    """Bars side by side in every group; `bars` are (name, style, a value a group). None without values."""
    values = [value for _, _, ys in bars for value in map(finite, ys) if value is not None]
    if not groups or not values:
        return None
    frame = _Frame([0.0, float(len(groups))], values, x, y, width=width)
    slot = frame.room / len(groups)
    parts = frame.axes(_bar_labels(groups, slot))
    bar_width = min(slot * 0.76 / len(bars), 48)
    for place, (name, style, ys) in enumerate(bars):
        for index, value in enumerate(map(finite, ys)):
            if value is None:
                continue
            left = _LEFT + (index + 0.5) * slot + (place - len(bars) / 2) * bar_width
            top, base = frame.y(value), frame.y(0.0)
            text = f"{name}: {tick_label(value, y)} at {x.label.lower()} {groups[index]}"
            parts.append(
                f'<rect class="bar s-{escape(style)}" x="{round(left, 1)}" y="{min(top, base)}" '
                f'width="{round(bar_width * 0.94, 1)}" height="{round(max(abs(base - top), 0.6), 1)}">'
                f"<title>{escape(text)}</title></rect>"
            )
    return _svg(frame, parts, title, description)
