"""Guided rounding against the exhaustive oracle: every rollout code, every record width, a fine grid of z."""

from __future__ import annotations

from fractions import Fraction

import pytest
import rounding_oracle as oracle
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tracerl.numerics import (
    E2M1,
    E4M3,
    MXFP4,
    NVFP4,
    BlockFormat,
    Guide,
    NonFiniteError,
    Order,
    Quantized,
    TensorScale,
    compare,
    dequantize,
    guided_quantize,
    quantize,
    unpack_bits,
)

WIDTHS = [0, 1, 2, 4]
CODES = torch.arange(16, dtype=torch.uint8)


def fine_grid() -> Tensor:
    """Multiples of 1/32 beyond saturation, both zeros, tiny values, FP32 neighbours of every change."""
    steps = torch.arange(-7 * 32, 7 * 32 + 1) / 32
    changes = torch.tensor([0, 0.25, 0.5, 0.75, 1, 1.25, 1.5, 1.75, 2, 2.25, 2.5, 3, 3.5, 3.75, 4, 4.5, 5, 6])
    near = torch.cat([torch.nextafter(changes, torch.tensor(to)) for to in (-9.0, 9.0)])
    tiny = torch.tensor([1e-40, 1e-30, 1e-10, 0.1, 0.2])
    z = torch.cat([steps, near, -near, tiny, -tiny, torch.tensor([-0.0, 100.0, -1e30])])
    return torch.cat([z, torch.zeros(-len(z) % 16)])


def one_block_scale(codes: Tensor, fmt: BlockFormat = NVFP4) -> Quantized:
    """A rollout's codes [rows, K] under scales of 1, so that z is x."""
    one = fmt.scale.encode(torch.ones(1)).item()
    scales = torch.full((len(codes), codes.shape[-1] // fmt.block), one, dtype=torch.uint8)
    return Quantized(codes, scales, TensorScale.one(), fmt)


def all_pairs() -> tuple[Tensor, Tensor]:
    """Every z of the fine grid with every rollout code, one code a row: both [16, K]."""
    z = fine_grid()
    return z.expand(16, -1), CODES.unsqueeze(-1).expand(16, len(z)).contiguous()


def signed(codes: Tensor) -> list[list[Fraction]]:
    return [[oracle.signed_value(code) for code in row] for row in codes.tolist()]


@pytest.mark.parametrize("band", [None, 0.0, 0.125, 0.25, 0.5])
@pytest.mark.parametrize("bits", WIDTHS)
def test_equals_the_oracle(bits: int, band: float | None) -> None:
    x, rollout = all_pairs()
    guided = guided_quantize(x, Guide.of(one_block_scale(rollout), bits, 8), band=band)
    assert (guided.scales == 56).all()
    expected = [
        [
            oracle.guided(Fraction(z), z < 0, code, bits, None if band is None else Fraction(band))
            for z, code in zip(zs, codes, strict=True)
        ]
        for zs, codes in zip(x.tolist(), rollout.tolist(), strict=True)
    ]
    assert signed(guided.codes) == expected
    # A code's sign is z's, also where its magnitude is zero; -0 counts as +0.
    assert torch.equal(guided.codes >= 8, x < 0)


def test_a_band_of_a_half_and_none_guide_all() -> None:
    x, rollout = all_pairs()
    for bits in WIDTHS:
        guide = Guide.of(one_block_scale(rollout), bits, 8)
        assert torch.equal(guided_quantize(x, guide, band=0.5).codes, guided_quantize(x, guide).codes)


@pytest.mark.parametrize("fmt", [NVFP4, MXFP4], ids=["NVFP4", "MXFP4"])
def test_equation_3(fmt: BlockFormat) -> None:
    """|q_guided - q_rollout| <= |q_RTN - q_rollout|: whole codes always, else with it in the bracket."""
    z = fine_grid()
    z = torch.cat([z, torch.zeros(-len(z) % fmt.block)])
    x, rollout = z.expand(16, -1), CODES.unsqueeze(-1).expand(16, len(z)).contiguous()
    recorded = one_block_scale(rollout, fmt)
    guide = {bits: Guide.of(recorded, bits, 8) for bits in WIDTHS}
    codes = {bits: guided_quantize(x, guide[bits], fmt).codes for bits in WIDTHS}

    def distance(bits: int) -> Tensor:
        return (E2M1.decode(codes[bits]) - E2M1.decode(rollout)).abs()

    assert (distance(4) <= distance(0)).all()
    brackets = [oracle.bracket(Fraction(v)) for v in z.tolist()]
    inside = torch.tensor([[oracle.signed_value(c) in b for b in brackets] for c in range(16)])
    for bits in (1, 2):
        assert (distance(bits) <= distance(0))[inside].all()
        assert not (distance(bits) <= distance(0)).all()
    # Two bits reach every code in the bracket. One bit leaves out the upper one of (2, 2.25] and (4, 4.5],
    # where the nearest odd magnitude is below the bracket; rounding to nearest does not reach it either.
    m = z.abs()
    below = ((m > 2) & (m <= 2.25)) | ((m > 4) & (m <= 4.5))
    upper = (rollout & 7) % 2 == 1
    assert (distance(2) == 0)[inside].all()
    assert torch.equal((distance(1) > 0) & inside, below & upper & inside)
    assert (distance(0) > 0)[below & upper & inside].all()


def test_equation_3_fails_for_a_code_outside_the_bracket() -> None:
    """z = 2.6 rounds to 3, one code from the rollout's 4, whose low bit 0 guides to 2, two codes away."""
    x = torch.full((1, 16), 2.6)
    rollout = one_block_scale(torch.full((1, 16), 6, dtype=torch.uint8))
    low_bit, whole = (dequantize(guided_quantize(x, Guide.of(rollout, bits, 8))) for bits in (1, 4))
    nearest = dequantize(guided_quantize(x, Guide.of(rollout, 0, 8)))
    assert (nearest == 3).all()
    assert (low_bit == 2).all()
    assert (whole == 3).all()


@pytest.mark.parametrize(
    ("z", "code", "bits", "expected"),
    [
        # |z| in (2, 2.25] or (4, 4.5]: the nearest odd magnitude lies below the bracket.
        (2.2, 7, 1, 2.0),
        (2.25, 5, 1, 2.0),  # a tie of references 1.5 and 3: the smaller
        (2.26, 5, 1, 3.0),
        (4.4, 7, 1, 4.0),
        (4.5, 7, 1, 4.0),
        (4.51, 7, 1, 6.0),
        (-2.2, 13, 1, -2.0),
        # Two bits: references of low bits 1 are 0.5 and 3, nearer to 0.5 up to 1.75.
        (1.75, 5, 2, 1.5),
        (1.76, 5, 2, 2.0),
        # Hit exactly: the only candidate, whatever the record.
        (3.0, 6, 1, 3.0),
        (0.0, 1, 1, 0.0),
        # Saturated: 6 is the only candidate.
        (7.5, 0, 1, 6.0),
        (-1e30, 0, 4, -6.0),
        # A whole code of the other sign: the nearer end of the bracket is zero.
        (0.4, 9, 4, 0.0),
        (-0.4, 1, 4, 0.0),
    ],
)
def test_decided_cases(z: float, code: int, bits: int, expected: float) -> None:
    rollout = one_block_scale(torch.full((1, 16), code, dtype=torch.uint8))
    guided = dequantize(guided_quantize(torch.full((1, 16), z), Guide.of(rollout, bits, 8)))
    assert (guided == expected).all()


def two_sides(seed: int, noise: float) -> tuple[Tensor, Tensor]:
    """The trainer's BF16 values and the rollout's, which differ by some noise."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(6, 64, generator=generator) * torch.exp(3 * torch.randn(6, 1, generator=generator))
    y = x + noise * x.abs().mean(-1, keepdim=True) * torch.randn(6, 64, generator=generator)
    return x.bfloat16(), y.bfloat16()


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**32), st.sampled_from([1e-3, 0.02, 0.2, 1.0]), st.sampled_from(Order))
def test_equation_3_on_whole_tensors(seed: int, noise: float, order: Order) -> None:
    x, y = two_sides(seed, noise)
    rollout = quantize(y, order=order)
    to_nearest = guided_quantize(x, Guide.of(rollout, 0, 8), order=order)
    recorded = (rollout.scales > 0).repeat_interleave(16, -1)

    def distance(guided: Quantized) -> Tensor:
        return (dequantize(guided) - dequantize(rollout)).abs()[recorded]

    whole = guided_quantize(x, Guide.of(rollout, 4, 8), order=order)
    assert (distance(whole) <= distance(to_nearest)).all()
    inside = distance(whole) == 0  # guidance by whole codes reaches every code in the bracket
    for bits in (1, 2):
        low = guided_quantize(x, Guide.of(rollout, bits, 8), order=order)
        assert (distance(low) <= distance(to_nearest))[inside].all()
    assert (whole.scales[rollout.scales > 0] == rollout.scales[rollout.scales > 0]).all()


@settings(max_examples=20, deadline=None)
@given(
    st.integers(0, 2**32), st.sampled_from(Order), st.sampled_from(WIDTHS), st.sampled_from([0, 1, 2, 3, 8])
)
def test_the_same_values_on_both_sides_need_no_guidance(
    seed: int, order: Order, code_bits: int, scale_bits: int
) -> None:
    """Equal inputs give equal codes for every width, so guidance changes nothing."""
    x, _ = two_sides(seed, 0.0)
    rollout = quantize(x, order=order)
    guided = guided_quantize(x, Guide.of(rollout, code_bits, scale_bits), order=order)
    mismatch = compare(guided, rollout)
    assert mismatch.mismatched == 0
    assert mismatch.scales_mismatched == 0


def test_absent_rows_keep_their_own_scale_and_rounding() -> None:
    x = torch.randn(4, 5, 64, generator=torch.Generator().manual_seed(6)).bfloat16()
    rollout = quantize((x * 1.1).bfloat16())
    present = torch.rand(4, 5, generator=torch.Generator().manual_seed(7)) > 0.5
    own = quantize(x)
    for bits in WIDTHS:
        full = Guide.of(rollout, bits, 3)
        guide = Guide(full.codes, full.scales, bits, 3, full.tensor_scale, full.zero_blocks, present)
        guided, all_guided = guided_quantize(x, guide), guided_quantize(x, full)
        assert torch.equal(guided.codes[~present], own.codes[~present])
        assert torch.equal(guided.scales[~present], own.scales[~present])
        assert torch.equal(guided.codes[present], all_guided.codes[present])
        assert torch.equal(guided.scales[present], all_guided.scales[present])


def test_tensor_scale_is_the_rollouts() -> None:
    x = torch.randn(3, 64, generator=torch.Generator().manual_seed(8))
    y = x + 0.05 * torch.randn(3, 64, generator=torch.Generator().manual_seed(9))
    for value in (torch.tensor(2.5), y.abs().amax(-1, keepdim=True)):
        rollout = quantize(y, tensor_scale=TensorScale(value, "amax"))
        guided = guided_quantize(x, Guide.of(rollout, 4, 8))
        assert guided.tensor_scale is rollout.tensor_scale
        assert compare(guided, rollout).mismatched < compare(quantize(x), quantize(y)).mismatched


def test_of_records_low_bits_and_zero_blocks() -> None:
    x = torch.randn(2, 32)
    x[1, 16:] = 0
    q = quantize(x)
    guide = Guide.of(q)
    assert torch.equal(unpack_bits(guide.codes, 1, 32), q.codes & 1)
    assert torch.equal(unpack_bits(guide.scales, 3, 2), q.scales & 7)
    assert guide.zero_blocks is not None
    assert guide.zero_blocks.tolist() == [[False, False], [False, True]]


def test_saturation_under_a_smaller_rollout_scale() -> None:
    """A rollout scale one code smaller: the trainer's largest value lies beyond 6 and saturates."""
    x = torch.linspace(-6, 6, 16).unsqueeze(0)
    own = quantize(x)
    rollout = Quantized(own.codes, own.scales - 1, own.tensor_scale, NVFP4)
    guided = guided_quantize(x, Guide.of(rollout, 1, 3))
    assert torch.equal(guided.scales, rollout.scales)
    assert E2M1.decode(guided.codes).abs().max() == 6
    assert dequantize(guided).abs().max() == 6 * E4M3.decode(rollout.scales).item()


def test_errors() -> None:
    x = torch.randn(2, 3, 32)
    guide = Guide.of(quantize(x))
    with pytest.raises(ValueError, match=r"drift band of 0\.6; use 0 to 0\.5"):
        guided_quantize(x, guide, band=0.6)
    with pytest.raises(ValueError, match=r"layers\.0\.Key has shape \[6, 32\] and a record whose codes"):
        guided_quantize(x.view(6, 32), guide, site="layers.0.Key")
    bad = Guide(guide.codes, guide.scales, 3, 3, guide.tensor_scale)
    with pytest.raises(ValueError, match="a record of 3 code and 3 scale bits"):
        guided_quantize(x, bad)
    x[1, 2, 7] = torch.nan
    with pytest.raises(NonFiniteError, match=r"layers\.0\.Key"):
        guided_quantize(x, guide, site="layers.0.Key")
