"""The rules in plain Python and exact fractions, one value at a time, from the specification alone."""

from __future__ import annotations

from fractions import Fraction
from functools import cache

MAGNITUDES = [Fraction(v) for v in ("0", "1/2", "1", "3/2", "2", "3", "4", "6")]


@cache
def signed_value(code: int) -> Fraction:
    """Value of a 4-bit code: sign bit, then the index of the magnitude."""
    return -MAGNITUDES[code - 8] if code >= 8 else MAGNITUDES[code]


@cache
def to_nearest(z: Fraction) -> Fraction:
    """Nearest value, ties to the even code, saturating."""
    sign, m = (-1, -z) if z < 0 else (1, z)
    best = min(range(8), key=lambda code: (abs(MAGNITUDES[code] - m), code % 2))
    return sign * MAGNITUDES[best]


@cache
def bracket(z: Fraction) -> tuple[Fraction, Fraction]:
    """The two values around z; one value twice where z is hit or beyond the largest."""
    grid = sorted({signed_value(code) for code in range(16)})
    below = [g for g in grid if g <= z]
    above = [g for g in grid if g >= z]
    return (below[-1] if below else above[0]), (above[0] if above else below[-1])


def reference(z: Fraction, negative: bool, rollout: int, bits: int) -> Fraction:
    """What a record says: the rollout's whole code, or the nearest magnitude with its low bits."""
    if bits == 4:
        return signed_value(rollout)
    candidates = [MAGNITUDES[c] for c in range(8) if c % 2**bits == rollout % 2**bits]
    distance = min(abs(c - abs(z)) for c in candidates)
    nearest = min(c for c in candidates if abs(c - abs(z)) == distance)  # ties to the smaller
    return -nearest if negative else nearest


def guided(z: Fraction, negative: bool, rollout: int, bits: int, band: Fraction | None) -> Fraction:
    """The value around z nearer to the reference; to nearest without a record or outside the band."""
    low, high = bracket(z)
    if bits == 0:
        return to_nearest(z)
    if band is not None and low < high and abs(z - (low + high) / 2) > band * (high - low):
        return to_nearest(z)
    wanted = reference(z, negative, rollout, bits)
    return low if abs(low - wanted) <= abs(high - wanted) else high


def rebuilt_scale(own: int, low_bits: int, bits: int) -> int:
    """The code of a positive E4M3 scale (1 to 126) with those bits nearest to `own`, the larger of two."""
    for distance in range(128):
        for code in (own + distance, own - distance):
            if 1 <= code <= 126 and code % 2**bits == low_bits:
                return code
    raise AssertionError("some code has these bits")
