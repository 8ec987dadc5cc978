"""Guided rounding: the trainer rounds toward what the rollout recorded (TRACE, equation 2).

Under the rollout's scale, |z| lies in a bracket of two neighbouring magnitudes; the record names a reference,
and the bracket's magnitude nearer to it is taken. The outcome depends only on which magnitude |z| hits, or
between which magnitudes and midpoints it lies: finitely many positions. So the rule, written in plain Python
as the paper states it (`guided_magnitude`), becomes one table a record width, indexed by position and record.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from tracerl.api.job import RoundingOrder as Order
from tracerl.numerics.bits import pack_bits, packed_size, unpack_bits
from tracerl.numerics.blocks import (
    NVFP4,
    BlockFormat,
    Quantized,
    Rounding,
    TensorScale,
    as_rows,
    block_scales,
    kernels,
)
from tracerl.numerics.elements import E2M1, MAGNITUDE
from tracerl.numerics.flags import NO_SCALE, refuse

CODE_BITS = (0, 1, 2, 4)
SCALE_BITS = (0, 1, 2, 3, 8)


@dataclass(frozen=True, eq=False)
class Guide:
    """What the rollout recorded of a tensor [..., K].

    Rows that are not `present` are rounded to nearest under the trainer's own scales, and so are blocks whose
    scale in the rollout was zero, which low bits cannot tell: `zero_blocks` does.
    """

    codes: Tensor
    """u8 [..., ceil(K * code_bits / 8)], packed low bits of the codes."""
    scales: Tensor
    """u8 [..., ceil(K / block * scale_bits / 8)], packed low bits of the block scales."""
    code_bits: int
    """1, 2, 4 (the whole code with its sign), or 0: round to nearest under the rollout's scale."""
    scale_bits: int
    """1, 2, 3, 8 (the whole scale), or 0: the trainer's own scale."""
    tensor_scale: TensorScale
    """The rollout's; finite also in rows that are not present."""
    zero_blocks: Tensor | None = None
    """bool [..., K / block]; None means no block."""
    present: Tensor | None = None
    """bool [...]; None means every row."""

    @classmethod
    def of(cls, q: Quantized, code_bits: int = 1, scale_bits: int = 3) -> Guide:
        """Record a quantised tensor."""
        return cls(
            pack_bits(q.codes, code_bits),
            pack_bits(q.scales, scale_bits),
            code_bits,
            scale_bits,
            q.tensor_scale,
            zero_blocks=q.scales < q.fmt.smallest_scale_code,
        )


def guided_quantize(
    x: Tensor,
    guide: Guide,
    fmt: BlockFormat = NVFP4,
    *,
    order: Order = Order.RECIPROCAL,
    band: float | None = None,
    site: str = "",
) -> Quantized:
    """Quantise toward a record.

    Args:
        x: BF16, FP16 or FP32 [..., K], K a multiple of the block.
        guide: The rollout's record of the same tensor.
        fmt: The block format of both sides.
        order: Whose FP32 arithmetic, on both sides.
        band: Guide only values whose |z| is at most this share of the bracket's width away from its midpoint;
            round others to nearest under the same scale. None and 0.5 guide all.
        site: Name of the tensor in errors.

    Returns:
        Codes, and the scales under which they were chosen: the rollout's wherever it gave guidance.

    Raises:
        NonFiniteError: x holds NaN or Inf.
        ValueError: The guide does not fit x or the format, or the band is not within 0 to 0.5.
    """
    if triton := kernels(x, fmt):
        quantized: Quantized = triton.guided_quantize(x, guide, order, band, site)
        return quantized
    return guided(x, guide, fmt, order=order, band=band, site=site).to_codes()


def rebuild_scales(
    own: Tensor, low_bits: Tensor, bits: int, fmt: BlockFormat = NVFP4, *, site: str = ""
) -> Tensor:
    """Give the rollout's scale codes: those nearest the trainer's own that have the recorded low bits.

    Exact where the two sides are at most 2^(bits-1) - 1 codes apart. Of two codes equally near, 2^(bits-1) on
    either side, the larger is taken: too large a scale is coarse, too small a one saturates. Fewer than 8
    bits never give a scale of zero, which is recorded apart.

    Args:
        own: u8 [...], the trainer's scale codes.
        low_bits: u8 [...], below 2^bits.
        bits: 1, 2, 3, 8 (gives `low_bits`) or 0 (gives `own`).
        fmt: The block format.
        site: Name of the tensor in errors.

    Returns:
        u8 [...].

    Raises:
        ValueError: A whole scale is not a finite one.
    """
    if triton := kernels(own, fmt):
        rebuilt: Tensor = triton.rebuild_scales(own, low_bits, bits, site)
        return rebuilt
    if bits == 0:
        return own
    if bits == 8:
        if low_bits.numel():
            refuse(low_bits.max() > fmt.scale.largest_code, NO_SCALE, site)
        return low_bits
    index = (own.int() << bits).bitwise_or_(low_bits)
    return _rebuilt(fmt, bits, own.device).index_select(0, index.view(-1)).view(own.shape)


@cache
def _rebuilt(fmt: BlockFormat, bits: int, device: torch.device) -> Tensor:
    """Give the rebuilt code for every own code and every low bits, at index own << bits | low bits."""
    codes = range(fmt.smallest_scale_code, fmt.scale.largest_code + 1)
    by_low_bits = [[c for c in codes if c % (1 << bits) == low] for low in range(1 << bits)]
    rebuilt = [
        [min(candidates, key=lambda c: (abs(c - own), -c)) for candidates in by_low_bits]
        for own in range(fmt.scale.largest_code + 1)
    ]
    return torch.tensor(rebuilt, dtype=torch.uint8, device=device).flatten()


def guided(
    x: Tensor, guide: Guide, fmt: BlockFormat, *, order: Order, band: float | None, site: str
) -> Rounding:
    """Round toward a guide under its scales; arguments and errors as in `guided_quantize`."""
    check_guide(x, guide, fmt, band, site)
    rows = as_rows(x, fmt, guide.tensor_scale, site)
    r, n, _ = rows.shape
    own = fmt.scale.encode(block_scales(rows, fmt, guide.tensor_scale.by_row(x.device), order, site))
    recorded = unpack_bits(guide.scales, guide.scale_bits, n).reshape(r, n, 1)
    scales = rebuild_scales(own, recorded, guide.scale_bits, fmt, site=site)
    unguided = scales < fmt.smallest_scale_code
    if guide.zero_blocks is not None:
        unguided = unguided | guide.zero_blocks.reshape(r, n, 1)
    if guide.present is not None:
        unguided = unguided | ~guide.present.reshape(r, 1, 1)
    scales = fmt.scale.decode(torch.where(unguided, own, scales))

    bits = guide.code_bits
    record = unpack_bits(guide.codes, bits, x.shape[-1]).reshape(rows.shape)
    section = unguided.int() * (_POSITIONS << bits)

    def rule(z: Tensor, part: slice) -> Tensor:
        if bits == 0:
            return fmt.element.round(z)
        return _toward(z, record[part], section[part], bits, band)

    return Rounding(x.shape, rows, fmt, order, guide.tensor_scale, scales, rule)


def _toward(z: Tensor, record: Tensor, section: Tensor, bits: int, band: float | None) -> Tensor:
    """Round scaled values toward a record.

    Args:
        z: FP32 [., n, b].
        record: u8 [., n, b], low bits or whole codes.
        section: i32 [., n, 1], where the part of the table begins that a block uses.
        bits: 1, 2 or 4.
        band: As in `guided_quantize`.

    Returns:
        FP32 [., n, b], values of E2M1; zeros have no defined sign.
    """
    patterns = z.view(torch.int32)
    if bits == 4:  # signs relative to z, as the table holds magnitudes
        record = record ^ (patterns >> 28).bitwise_and_(E2M1.sign).to(torch.uint8)
    index = record.int().add_(_position(patterns), alpha=1 << bits).add_(section)
    values = _table(bits, z.device).index_select(0, index.view(-1)).view(z.shape).mul_(z.sign())
    if band is not None:
        nearest = E2M1.round(z)
        saturated = z.clamp(-E2M1.largest, E2M1.largest)
        # The nearest magnitude is half a width away at the midpoint, and no distance where it is hit.
        to_midpoint = 0.5 - (saturated - nearest).abs_().div_(E2M1.spacing(saturated))
        values.sub_(nearest).mul_(to_midpoint.le_(band)).add_(nearest)
    return values


_DROPPED = 20
"""Low bits of |z| that only matter as being zero or not: magnitudes and midpoints have 3 bits of mantissa."""
_LEAST, _MOST = (torch.tensor([0.25, E2M1.largest]).view(torch.int32) >> _DROPPED).tolist()
"""Cut patterns of 0.25, below which the rule does not change (0 itself is kept by its sign), and of 6."""
_POSITIONS = 2 * (_MOST - _LEAST) + 1
"""One for each cut pattern from 0.25 to 6, at even positions, and one for each open interval between two."""


def _position(patterns: Tensor) -> Tensor:
    """Give the position of |z|; FP32 patterns i32 [...] to i32 [...]."""
    magnitudes = (patterns & MAGNITUDE).clamp_(_LEAST << _DROPPED, _MOST << _DROPPED)
    # Rounded up plus rounded down, minus twice the least: odd where bits were dropped.
    above = (magnitudes + ((1 << _DROPPED) - 1 - (2 * _LEAST << _DROPPED))).bitwise_right_shift_(_DROPPED)
    return magnitudes.bitwise_right_shift_(_DROPPED).add_(above)


@cache
def _table(bits: int, device: torch.device) -> Tensor:
    """Give a magnitude for every position and record: one section guided, then one to nearest."""
    magnitudes = torch.empty(_POSITIONS)
    magnitudes[::2] = (torch.arange(_LEAST, _MOST + 1, dtype=torch.int32) << _DROPPED).view(torch.float32)
    magnitudes[1::2] = (magnitudes[:-1:2] + magnitudes[2::2]) / 2
    guided = [[guided_magnitude(m, record, bits) for record in range(1 << bits)] for m in magnitudes.tolist()]
    to_nearest = E2M1.round(magnitudes).repeat_interleave(1 << bits)
    return torch.cat([torch.tensor(guided).flatten(), to_nearest]).to(device)


def guided_magnitude(m: float, record: int, bits: int) -> float:
    """Give the magnitude that one value takes: the guided rule as the paper states it.

    Args:
        m: |z| under the rollout's scale.
        record: Low bits of the rollout's code; at 4 bits the whole code, its sign bit relative to z's sign.
        bits: 1, 2 or 4.

    Returns:
        The one of the two magnitudes around m that is nearer to the reference. A magnitude that is hit, and 6
        for everything above, is the only candidate. Of two references equally near, the smaller counts.
    """
    grid = E2M1.magnitudes
    below = max(g for g in grid if g <= m)
    above = min((g for g in grid if g >= m), default=E2M1.largest)
    if bits == 4:
        reference = -grid[record - E2M1.sign] if record & E2M1.sign else grid[record]
    else:
        reference = min(grid[record :: 1 << bits], key=lambda g: (abs(g - m), g))
    return min(below, above, key=lambda g: abs(g - reference))


def check_guide(x: Tensor, guide: Guide, fmt: BlockFormat, band: float | None, site: str) -> None:
    """Raise ValueError when a guide or a band does not fit a tensor."""
    where = site or "a guided tensor"
    if guide.code_bits not in CODE_BITS or guide.scale_bits not in SCALE_BITS:
        raise ValueError(
            f"{where} has a record of {guide.code_bits} code and {guide.scale_bits} scale bits; "
            f"use one of {CODE_BITS} and one of {SCALE_BITS}"
        )
    if band is not None and not 0 <= band <= 0.5:
        raise ValueError(f"{where} has a drift band of {band}; use 0 to 0.5, or None to guide all values")
    leading, k = x.shape[:-1], x.shape[-1]
    wanted = {
        "codes": (guide.codes, (*leading, packed_size(k, guide.code_bits))),
        "scales": (guide.scales, (*leading, packed_size(k // fmt.block, guide.scale_bits))),
        "zero_blocks": (guide.zero_blocks, (*leading, k // fmt.block)),
        "present": (guide.present, tuple(leading)),
    }
    for name, (tensor, shape) in wanted.items():
        if tensor is not None and tensor.shape != shape:
            raise ValueError(
                f"{where} has shape {list(x.shape)} and a record whose {name} have shape "
                f"{list(tensor.shape)}; give {list(shape)}"
            )
