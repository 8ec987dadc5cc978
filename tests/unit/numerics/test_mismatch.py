"""Counts of mismatching codes against counting by hand."""

from __future__ import annotations

import pytest
import torch

from tracerl.numerics import MXFP4, NVFP4, Mismatch, Quantized, TensorScale, compare, quantize

PLACES = [0, 1, 2, 3, 4, 5, 6, 7, 0, -1, -2, -3, -4, -5, -6, -7]


def quantized(codes: torch.Tensor, scales: torch.Tensor) -> Quantized:
    return Quantized(codes, scales, TensorScale.one(), NVFP4)


def test_every_pair_of_codes() -> None:
    codes = torch.arange(16, dtype=torch.uint8)
    train, rollout = codes.repeat_interleave(16).view(16, 16), codes.repeat(16).view(16, 16)
    scales = torch.zeros(16, 1, dtype=torch.uint8)
    apart = [abs(a - b) for a in PLACES for b in PLACES]
    counts = compare(quantized(train, scales), quantized(rollout, scales))
    assert counts == Mismatch(256, sum(d > 0 for d in apart), sum(d == 1 for d in apart), 16, 0)


def test_rows_of_a_mask_add_up() -> None:
    generator = torch.Generator().manual_seed(1)
    codes = [torch.randint(0, 16, (3, 4, 32), dtype=torch.uint8, generator=generator) for _ in range(2)]
    scales = [torch.randint(50, 53, (3, 4, 2), dtype=torch.uint8, generator=generator) for _ in range(2)]
    train, rollout = quantized(codes[0], scales[0]), quantized(codes[1], scales[1])
    mask = torch.rand(3, 4, generator=generator) > 0.5
    parts = compare(train, rollout, mask) + compare(train, rollout, ~mask)
    assert parts == compare(train, rollout)
    assert compare(train, rollout, mask).values == 32 * int(mask.sum())
    assert compare(train, rollout, torch.zeros(3, 4, dtype=torch.bool)) == Mismatch()


def test_other_formats_and_shapes_are_refused() -> None:
    x = torch.randn(2, 32)
    with pytest.raises(ValueError, match=r"NVFP4 codes of shape .* and MXFP4 codes"):
        compare(quantize(x), quantize(x, MXFP4))
    with pytest.raises(ValueError, match="give both sides of one tensor"):
        compare(quantize(x), quantize(x[:1]))
