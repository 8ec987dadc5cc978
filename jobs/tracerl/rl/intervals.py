"""Intervals of means and of ratios of means, by Student's t."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean

# Two-sided 95 % quantiles of Student's t for 1 to 30 degrees of freedom; beyond, the normal's.
_T95 = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131,
    2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
)  # fmt: skip
Z95 = 1.960
"""Two-sided 95 % quantile of the normal distribution."""


def t95(degrees: int) -> float:
    """Two-sided 95 % quantile of Student's t."""
    return _T95[degrees - 1] if degrees <= len(_T95) else Z95


def ratio_of_sums(pairs: Sequence[tuple[float, float]]) -> tuple[float, float, float] | None:
    """Ratio of the sums of pairs (part, whole) and its 95 % interval; None for fewer than two pairs.

    The interval is that of the ratio estimator (Cochran, Sampling Techniques, chapter 6): Student's t over
    the residuals part - ratio * whole. Pairs, not single values, vary: what one has more to do than another
    is in both of its values and cancels.
    """
    n = len(pairs)
    if n < 2:
        return None
    whole = fmean(whole for _, whole in pairs)
    ratio = fmean(part for part, _ in pairs) / whole
    squares = sum((part - ratio * of) ** 2 for part, of in pairs)
    half = t95(n - 1) * math.sqrt(squares / (n - 1) / n) / whole
    return ratio, ratio - half, ratio + half
