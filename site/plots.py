"""Plots of measured figures for the documentation's pictures: axes, lines and points as SVG."""

# Lines of SVG are as long as they are.
# ruff: noqa: E501

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

Point = tuple[float, float]


@dataclass(frozen=True)
class Scale:
    """An axis: its bounds, ticks with their labels, and what it shows."""

    low: float
    high: float
    ticks: tuple[tuple[float, str], ...]
    title: str
    log: bool = False

    def share(self, value: float) -> float:
        """Where a value lies, from 0 to 1."""
        low, high, at = (math.log(v) if self.log else v for v in (self.low, self.high, value))
        return (at - low) / (high - low)


@dataclass(frozen=True)
class Plot:
    """A frame at left, top, width and height of a picture, with both axes."""

    at: tuple[int, int, int, int]
    title: str
    x: Scale
    y: Scale

    def place(self, point: Point) -> Point:
        """Where a point of the plot lies in the picture."""
        left, top, width, height = self.at
        return left + self.x.share(point[0]) * width, top + (1 - self.y.share(point[1])) * height

    def axes(self) -> list[str]:
        """Frame, ticks and titles."""
        left, top, width, height = self.at
        bottom = top + height
        parts = [
            f'<rect class="line" x="{left}" y="{top}" width="{width}" height="{height}"/>',
            f'<text class="ink" x="{left + width / 2:g}" y="{top - 12}">{escape(self.title)}</text>',
            f'<text class="soft small" x="{left + width / 2:g}" y="{bottom + 38}">{escape(self.x.title)}</text>',
            f'<text class="soft small" transform="translate({left - 42} {top + height / 2:g}) rotate(-90)">{escape(self.y.title)}</text>',
        ]
        for value, label in self.x.ticks:
            x, _ = self.place((value, self.y.low))
            parts.append(f'<path class="line" d="M{x:.1f} {bottom}v5"/>')
            parts.append(f'<text class="soft small" x="{x:.1f}" y="{bottom + 19}">{escape(label)}</text>')
        for value, label in self.y.ticks:
            _, y = self.place((self.x.low, value))
            parts.append(f'<path class="line" d="M{left} {y:.1f}h-5"/>')
            parts.append(
                f'<text class="soft small end" x="{left - 9}" y="{y + 4:.1f}">{escape(label)}</text>'
            )
        return parts

    def line(
        self, points: Sequence[Point], kind: str, *, dashed: bool = False, dots: bool = True
    ) -> list[str]:
        """A line through points; `kind` is a class of the pictures' style, with its own -line."""
        placed = [self.place(point) for point in points]
        dash = ' stroke-dasharray="5 4"' if dashed else ""
        path = "L".join(f"{x:.1f} {y:.1f}" for x, y in placed)
        parts = [f'<path class="{kind}-line" fill="none" stroke-width="2" d="M{path}"{dash}/>']
        if dots:
            parts += [f'<circle class="{kind}" cx="{x:.1f}" cy="{y:.1f}" r="3"/>' for x, y in placed]
        return parts

    def word(self, point: Point, text: str, kind: str, shift: Point = (0, 0), side: str = "left") -> str:
        """A word beside a point; `side` is left, end or the empty string for the middle."""
        x, y = self.place(point)
        return (
            f'<text class="{kind} small halo {side}" x="{x + shift[0]:.1f}" y="{y + shift[1]:.1f}">'
            f"{escape(text)}</text>"
        )
