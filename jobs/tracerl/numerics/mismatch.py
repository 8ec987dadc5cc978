"""How far the codes of two sides are apart, in integer counts that add up over micro-batches and ranks."""

from __future__ import annotations

from dataclasses import astuple, dataclass

import torch
from torch import Tensor

from tracerl.numerics.blocks import Quantized


@dataclass(frozen=True)
class Mismatch:
    """Counts of compared values and block scales.

    The share of rollout codes outside the trainer's bracket is `mismatched / values` of a tensor that was
    guided by whole codes and scales: guidance reaches every code inside.
    """

    values: int = 0
    """Values compared."""
    mismatched: int = 0
    """Values whose codes differ; +0 and -0 do not."""
    adjacent: int = 0
    """Mismatched values whose codes are neighbours on the signed grid."""
    scales: int = 0
    """Block scales compared."""
    scales_mismatched: int = 0
    """Block scales whose codes differ."""

    def __add__(self, other: Mismatch) -> Mismatch:
        return Mismatch(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))


def compare(train: Quantized, rollout: Quantized, mask: Tensor | None = None) -> Mismatch:
    """Count where two quantised tensors differ.

    Args:
        train: The trainer's, [..., K].
        rollout: The rollout's of the same tensor.
        mask: bool [...], the rows to compare; None means every row.

    Raises:
        ValueError: The two have different formats or shapes.
    """
    if train.fmt != rollout.fmt or train.codes.shape != rollout.codes.shape:
        raise ValueError(
            f"{train.fmt.name} codes of shape {list(train.codes.shape)} and {rollout.fmt.name} codes of "
            f"shape {list(rollout.codes.shape)} cannot be compared; give both sides of one tensor"
        )
    rows = slice(None) if mask is None else mask
    sign = train.fmt.element.sign
    distance = (_place(train.codes[rows], sign) - _place(rollout.codes[rows], sign)).abs_()
    scales_differ = train.scales[rows] != rollout.scales[rows]
    return Mismatch(
        values=distance.numel(),
        mismatched=int(distance.count_nonzero()),
        adjacent=int((distance == 1).count_nonzero()),
        scales=scales_differ.numel(),
        scales_mismatched=int(scales_differ.count_nonzero()),
    )


def _place(codes: Tensor, sign: int) -> Tensor:
    """Give the place of codes on the signed grid, either zero at 0; u8 [...] to i8 [...]."""
    magnitude = (codes & (sign - 1)).to(torch.int8)
    return magnitude - 2 * magnitude * (codes >= sign)
