"""The Triton kernels under Triton's interpreter, bit for bit against the torch functions.

The interpreter runs them in numpy, whose FP32 is IEEE's too. It truncates FP32 to BF16, where a GPU rounds,
so BF16 values are compared under tensor scales that are powers of two.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from tracerl.numerics import (
    Guide,
    NonFiniteError,
    NonFiniteFlags,
    Order,
    Quantized,
    TensorScale,
    dequantize,
    fake_quantize,
    guided_fake_quantize,
    guided_quantize,
    pack_bits,
    quantize,
    quantize_dequantize,
    quantize_into_rows,
    rebuild_scales,
    unpack_bits,
)
from tracerl.numerics.bits import packed_size

with pytest.MonkeyPatch.context() as patch:
    patch.setenv("TRITON_INTERPRET", "1")  # read where a kernel is defined, also Triton's own
    from tracerl.numerics import triton
    from tracerl.numerics.triton import launch

    patch.syspath_prepend(str(Path(__file__).parents[3] / "benchmarks/gpu"))
    HARD = importlib.import_module("hard_blocks")

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
ONE = TensorScale.one()
PATTERNS = {torch.bfloat16: torch.int16, torch.float16: torch.int16, torch.float32: torch.int32}


@pytest.fixture(autouse=True)
def _interpreted(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TRITON_INTERPRET", "1")  # and where one is called
    with np.errstate(all="ignore"):
        yield


def hard_blocks(n: int, k: int, dtype: torch.dtype) -> Tensor:
    """[n, k], as the GPU is given."""
    return HARD.hard_blocks(torch.Generator().manual_seed(0), n, k, dtype)


def same(found: Tensor, wanted: Tensor) -> None:
    assert found.dtype == wanted.dtype
    if found.dtype.is_floating_point:  # zeros of either sign differ
        found, wanted = found.view(PATTERNS[found.dtype]), wanted.view(PATTERNS[wanted.dtype])
    assert torch.equal(found, wanted)


def same_codes(found: Quantized, wanted: Quantized) -> None:
    same(found.scales, wanted.scales)
    same(found.codes, wanted.codes)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("order", Order)
def test_rounding_to_nearest(order: Order, dtype: torch.dtype) -> None:
    x = hard_blocks(7, 48, dtype)
    wanted, values = quantize_dequantize(x, order=order)
    assert len(wanted.scales.unique()) > 8
    found, out = triton.quantize_dequantize(x, ONE, order, "")
    same_codes(found, wanted)
    same(out, values)
    assert torch.equal(triton.fake_quantize(x, ONE, order, ""), fake_quantize(x, order=order))


@pytest.mark.parametrize("by_row", [False, True])
@pytest.mark.parametrize("convention", ["encode", "decode", "amax"])
@pytest.mark.parametrize("order", Order)
def test_tensor_scales(order: Order, convention: str, by_row: bool) -> None:
    x = hard_blocks(5, 32, torch.float32)
    value = torch.tensor([[0.3], [7.1], [1.0], [0.0], [1000.0]])
    if convention == "encode":
        value[3] = 1.7
    scale = TensorScale(value if by_row else value[1, 0], convention)
    wanted, values = quantize_dequantize(x, tensor_scale=scale, order=order)
    found, out = triton.quantize_dequantize(x, scale, order, "")
    same_codes(found, wanted)
    same(out, values)


@pytest.mark.parametrize("band", [None, 0.125])
@pytest.mark.parametrize("scale_bits", [0, 1, 2, 3, 8])
@pytest.mark.parametrize("code_bits", [0, 1, 2, 4])
def test_rounding_toward_a_record(code_bits: int, scale_bits: int, band: float | None) -> None:
    dtype = DTYPES[(code_bits + scale_bits) % 3]
    x = hard_blocks(7, 80, dtype)
    generator = torch.Generator().manual_seed(1)
    rollout = quantize((x.float() * (1 + 0.1 * torch.randn(x.shape, generator=generator))).to(dtype))
    rollout.codes[1] = torch.randint(0, 16, (80,), generator=generator, dtype=torch.uint8)
    present = torch.arange(7) != 3
    guide = replace(Guide.of(rollout, code_bits, scale_bits), present=present)
    wanted = guided_quantize(x, guide, band=band)
    same_codes(triton.guided_quantize(x, guide, Order.RECIPROCAL, band, ""), wanted)
    out = triton.guided_fake_quantize(x, guide, Order.RECIPROCAL, band, "")
    assert torch.equal(out, dequantize(wanted, dtype))
    if code_bits and band is None:
        assert not torch.equal(wanted.codes, quantize(x).codes)


@pytest.mark.parametrize("order", Order)
def test_orders_of_guided_rounding(order: Order) -> None:
    x = hard_blocks(5, 32, torch.bfloat16)
    guide = Guide.of(quantize(x.roll(1, 1), order=order))
    same_codes(triton.guided_quantize(x, guide, order, None, ""), guided_quantize(x, guide, order=order))


def test_every_change_of_the_guided_rule() -> None:
    """FP32 neighbours of every magnitude and midpoint, with every code of the rollout, under a scale of 1."""
    changes = torch.tensor([0, 0.25, 0.5, 0.75, 1, 1.25, 1.5, 1.75, 2, 2.25, 2.5, 3, 3.5, 3.75, 4, 4.5, 5, 6])
    z = torch.cat([changes, *(torch.nextafter(changes, torch.tensor(to)) for to in (-9.0, 9.0))])
    z = torch.cat([z, -z, torch.tensor([1e-40, -1e-40, 7.5, -1e30])])
    x = z.expand(16, -1)
    codes = torch.arange(16, dtype=torch.uint8).unsqueeze(1).expand(16, len(z)).contiguous()
    rollout = Quantized(codes, torch.full((16, len(z) // 16), 56, dtype=torch.uint8), ONE, quantize(x).fmt)
    for code_bits in (1, 2, 4):
        for band in (None, 0.0, 0.25):
            guide = Guide.of(rollout, code_bits, 8)
            found = triton.guided_quantize(x, guide, Order.RECIPROCAL, band, "")
            same_codes(found, guided_quantize(x, guide, band=band))


@pytest.mark.parametrize("k", [16, 48, 128, 336])
@pytest.mark.parametrize(("code_bits", "scale_bits"), [(1, 3), (2, 2), (4, 8), (0, 1)])
def test_rows_of_a_record(k: int, code_bits: int, scale_bits: int) -> None:
    x, at = hard_blocks(3, k, torch.bfloat16), 5
    widths = {"code_bits": code_bits, "scale_bits": scale_bits}
    rows = torch.full((3, at + k), 0xAA, dtype=torch.uint8)
    zero_bits = torch.full((3, -(-k // 128)), 0xAA, dtype=torch.uint8)
    wanted, wanted_zero = rows.clone(), zero_bits.clone()
    values, out = torch.empty_like(x), torch.empty_like(x)
    quantize_into_rows(x, wanted, at, zero_bits=wanted_zero, values=values, **widths)
    rest = {"tensor_scale": ONE, "order": Order.RECIPROCAL, "site": ""}
    triton.quantize_into_rows(x, rows, at, zero_bits=zero_bits, values=out, **widths, **rest)
    same(values, dequantize(quantize(x), x.dtype))
    same(out, values)
    same(rows, wanted)
    same(zero_bits, wanted_zero)


@pytest.mark.parametrize("scale", [ONE, TensorScale(torch.tensor(0.37), "amax")])
@pytest.mark.parametrize("dtype", DTYPES[:2])
@pytest.mark.parametrize("order", Order)
def test_one_bit_of_every_magnitude(order: Order, dtype: torch.dtype, scale: TensorScale) -> None:
    """Blocks of all magnitudes down to a thousandth of one that decides their scale, which is any of many."""
    generator = torch.Generator().manual_seed(0)
    tops = (torch.randn(16, generator=generator) * 12).clamp_(-20, 15).exp2().to(dtype).view(torch.int16)
    below = torch.arange(1920)[torch.randperm(1920, generator=generator)].to(torch.int16)
    patterns = (tops[:, None] - below).clamp_(min=0).view(16, 128, 15)
    patterns = torch.cat([patterns, tops[:, None, None].expand(-1, 128, 1)], 2).view(16, 2048)
    x = torch.where(torch.rand(patterns.shape, generator=generator) < 0.5, 1, -1) * patterns.view(dtype)
    assert len(quantize(x, order=order, tensor_scale=scale).scales.unique()) > 8
    rows, wanted = torch.zeros(2, 16, 256 + 48, dtype=torch.uint8)
    zero_bits, wanted_zero = torch.zeros(2, 16, 16, dtype=torch.uint8)
    widths = {"code_bits": 1, "scale_bits": 3, "tensor_scale": scale, "order": order}
    quantize_into_rows(x, wanted, 0, zero_bits=wanted_zero, **widths)
    triton.quantize_into_rows(x, rows, 0, zero_bits=zero_bits, site="", **widths)
    same(rows, wanted)
    same(zero_bits, wanted_zero)


def test_one_bit_of_values_that_make_no_pairs() -> None:
    """An odd stride, an odd start, FP32, and a scale a row: all are packed nevertheless."""
    x = hard_blocks(6, 96, torch.bfloat16)
    stretched, moved = torch.empty(6, 97, dtype=x.dtype), torch.empty(6 * 96 + 1, dtype=x.dtype)
    stretched[:, :96], moved[1:] = x, x.flatten()
    by_row = TensorScale(torch.rand(6, 1, generator=torch.Generator().manual_seed(0)) + 0.5, "encode")
    for view, scale in (
        (stretched[:, :96], ONE),
        (moved[1:].view(6, 96), ONE),
        (x.float(), ONE),
        (x, by_row),
    ):
        rows, wanted = torch.zeros(2, 6, 15, dtype=torch.uint8)
        zero_bits, wanted_zero = torch.zeros(2, 6, 1, dtype=torch.uint8)
        widths = {"code_bits": 1, "scale_bits": 3, "tensor_scale": scale, "order": Order.RECIPROCAL}
        quantize_into_rows(view, wanted, 0, zero_bits=wanted_zero, **widths)
        triton.quantize_into_rows(view, rows, 0, zero_bits=zero_bits, site="", **widths)
        same(rows, wanted)
        same(zero_bits, wanted_zero)


@pytest.mark.parametrize("blocks", [1, 8])
def test_no_one_bit_of_what_is_not_finite(blocks: int) -> None:
    rows, zero_bits = (torch.zeros(3, size * blocks, dtype=torch.uint8) for size in (3, 1))
    widths = {"code_bits": 1, "scale_bits": 8, "tensor_scale": ONE, "order": Order.RECIPROCAL}
    for bad in (torch.nan, -torch.nan, torch.inf, -torch.inf):
        x = torch.ones(3, 16 * blocks, dtype=torch.bfloat16)
        triton.quantize_into_rows(x, rows, 0, zero_bits=zero_bits, site="layer 3", **widths)
        x[1, -1] = bad
        with pytest.raises(NonFiniteError, match="layer 3 holds NaN or Inf"):
            triton.quantize_into_rows(x, rows, 0, zero_bits=zero_bits, site="layer 3", **widths)


@pytest.mark.parametrize("n", [1, 5, 8, 129])
@pytest.mark.parametrize("bits", [0, 1, 2, 3, 4, 8])
def test_packing(bits: int, n: int) -> None:
    values = torch.randint(0, 256, (3, n + 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(n))
    values = values[:, :n]
    packed = pack_bits(values, bits)
    same(triton.pack_bits(values, bits), packed)
    same(triton.unpack_bits(packed, bits, n), unpack_bits(packed, bits, n))


@pytest.mark.parametrize("bits", [0, 1, 2, 3, 8])
def test_rebuilt_scales(bits: int) -> None:
    own, low = torch.meshgrid(torch.arange(127), torch.arange(min(1 << bits, 127)), indexing="ij")
    own, low = own.to(torch.uint8), low.to(torch.uint8)
    same(triton.rebuild_scales(own, low, bits, ""), rebuild_scales(own, low, bits))


def test_shapes_and_strides() -> None:
    x = hard_blocks(6, 96, torch.bfloat16)
    for view in (x[:, 16:48], x[::2], x.view(2, 3, 96), x.view(3, 2, 96).transpose(0, 1), x[0], x.T[:, :0]):
        same_codes(triton.quantize(view, ONE, Order.RECIPROCAL, ""), quantize(view))
    for empty in (x[:0], x[:, :0], x.view(2, 3, 96)[:, :0]):
        same_codes(triton.quantize(empty, ONE, Order.RECIPROCAL, ""), quantize(empty))
        guide = Guide.of(quantize(empty))
        same_codes(
            triton.guided_quantize(empty, guide, Order.RECIPROCAL, None, ""), guided_quantize(empty, guide)
        )
    stream = torch.randint(0, 256, (6, 40), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    guide = replace(Guide.of(quantize(x)), codes=stream[:, 3:15], scales=stream[:, 15:18])
    guide = replace(guide, present=torch.eye(6, dtype=torch.bool)[:, 2] == 0, zero_blocks=None)
    found = triton.guided_quantize(x, guide, Order.RECIPROCAL, None, "")
    same_codes(found, guided_quantize(x, guide))


@pytest.mark.parametrize("blocks", [7, 1000])
def test_rows_longer_than_a_grid(blocks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a kernel's programs along a row there are at most 65,535; here 4."""
    monkeypatch.setattr(launch, "_COLUMNS", 4)
    x = hard_blocks(3, blocks * 16, torch.bfloat16)
    same_codes(triton.quantize(x, ONE, Order.RECIPROCAL, ""), quantize(x))
    guide = Guide.of(quantize(x.roll(1, 1)))
    same_codes(triton.guided_quantize(x, guide, Order.RECIPROCAL, None, ""), guided_quantize(x, guide))
    codes, bits = packed_size(blocks * 16, 1), packed_size(blocks, 1)
    rows, zero_bits = (torch.zeros(3, size, dtype=torch.uint8) for size in (codes + bits, bits))
    widths = {"code_bits": 1, "scale_bits": 1, "tensor_scale": ONE, "order": Order.RECIPROCAL}
    triton.quantize_into_rows(x, rows, 0, zero_bits=zero_bits, site="", **widths)
    same(rows, torch.cat([pack_bits(quantize(x).codes, 1), pack_bits(quantize(x).scales, 1)], 1))
    same(zero_bits, pack_bits((quantize(x).scales == 0).byte(), 1))


def test_programs_of_a_long_row() -> None:
    tile = launch._tile(torch.empty(1, 1 << 27, dtype=torch.bfloat16, device="meta"), launch.NEAREST)
    assert tile is not None
    assert tile.grid == (1, 32768)
    assert tile.options["NB"] * tile.grid[1] * 16 == 1 << 27


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("dtype", DTYPES)
def test_no_code_of_what_is_not_finite(dtype: torch.dtype, bad: float) -> None:
    x = torch.ones(3, 32, dtype=dtype)
    guide = Guide.of(quantize(x))
    x[1, 17] = bad
    with pytest.raises(NonFiniteError, match="layer 3 holds NaN or Inf"):
        triton.fake_quantize(x, ONE, Order.RECIPROCAL, "layer 3")
    with pytest.raises(NonFiniteError, match="layer 3 holds NaN or Inf"):
        triton.guided_fake_quantize(x, guide, Order.RECIPROCAL, None, "layer 3")


def test_marks_of_a_pass() -> None:
    x = torch.ones(3, 32)
    bad = torch.full((3, 32), torch.nan)
    flags = NonFiniteFlags("cpu", capacity=3)
    with flags:
        triton.fake_quantize(x, ONE, Order.RECIPROCAL, "layer 0")
        triton.fake_quantize(bad, ONE, Order.RECIPROCAL, "layer 1")
        triton.fake_quantize(bad, ONE, Order.RECIPROCAL, "layer 2")
        with pytest.raises(ValueError, match="layer 3 has no mark left of 3; give a larger capacity"):
            triton.fake_quantize(bad, ONE, Order.RECIPROCAL, "layer 3")
    marks = flags.marks.clone()
    with pytest.raises(NonFiniteError, match="layer 1 holds NaN or Inf"):
        flags.check()
    flags.check()
    with pytest.raises(NonFiniteError, match="layer 1 holds NaN or Inf"):
        flags.check(marks)


def test_a_whole_scale_that_is_no_number() -> None:
    x = torch.ones(2, 32)
    guide = Guide.of(quantize(x), 1, 8)
    guide.scales[1, 0] = 127
    with pytest.raises(ValueError, match="the record of layer 3 holds a whole block scale that is no finite"):
        triton.guided_fake_quantize(x, guide, Order.RECIPROCAL, None, "layer 3")
    with pytest.raises(ValueError, match="the record of layer 3 holds a whole block scale that is no finite"):
        guided_fake_quantize(x, guide, site="layer 3")


def test_rows_that_do_not_fit() -> None:
    x, zero_bits = torch.ones(2, 32), torch.zeros(2, 1, dtype=torch.uint8)
    widths = {"code_bits": 1, "scale_bits": 3}
    rows = torch.zeros(2, 9, dtype=torch.uint8)
    quantize_into_rows(x, rows, 4, zero_bits=zero_bits, **widths)
    with pytest.raises(ValueError, match=r"takes bytes 5 to 10 of 2 rows; rows of shape \[2, 9\] were given"):
        quantize_into_rows(x, rows, 5, zero_bits=zero_bits, **widths)
    with pytest.raises(ValueError, match=r"1 bytes of zero blocks a row; shape \[2, 2\] was given"):
        quantize_into_rows(x, rows, 4, zero_bits=torch.zeros(2, 2, dtype=torch.uint8), **widths)
    with pytest.raises(ValueError, match="whose bytes are neighbours"):
        quantize_into_rows(x, torch.zeros(9, 2, dtype=torch.uint8).T, 4, zero_bits=zero_bits, **widths)
    with pytest.raises(
        ValueError, match=r"is torch.float32 \[2, 32\] and its values go to torch.float32 \[2, 16\]"
    ):
        quantize_into_rows(x, rows, 4, zero_bits=zero_bits, values=x[:, :16], **widths)
    with pytest.raises(ValueError, match=r"has shape \[32\]; give \[N, K\]"):
        quantize_into_rows(x[0], rows, 4, zero_bits=zero_bits, **widths)
    with pytest.raises(ValueError, match="recorded with 8 code and 3 scale bits; use one of"):
        quantize_into_rows(x, rows, 0, zero_bits=zero_bits, **{**widths, "code_bits": 8, "scale_bits": 3})


@given(
    dtype=st.sampled_from(DTYPES),
    patterns=st.lists(st.integers(-(2**31), 2**31 - 1), min_size=64, max_size=64),
    record=st.lists(st.integers(0, 255), min_size=20, max_size=20),
    code_bits=st.sampled_from([1, 2, 4]),
    order=st.sampled_from(list(Order)),
)
@example(torch.float32, [-(2**31) + 1, 0x41234567] * 32, [0] * 20, 1, Order.RECIPROCAL)
@settings(max_examples=15, deadline=None, database=None)
def test_any_patterns(
    dtype: torch.dtype, patterns: list[int], record: list[int], code_bits: int, order: Order
) -> None:
    x = torch.tensor(patterns, dtype=torch.int32).to(PATTERNS[dtype]).view(dtype).nan_to_num().view(2, 32)
    found, out = triton.quantize_dequantize(x, ONE, order, "")
    wanted, values = quantize_dequantize(x, order=order)
    same_codes(found, wanted)
    same(out, values)
    width = 32 * code_bits // 8
    stream = torch.tensor(record, dtype=torch.uint8)[: width + 1].expand(2, -1)
    guide = Guide(stream[:, :width], stream[:, width:], code_bits, 3, ONE)
    same_codes(triton.guided_quantize(x, guide, order, None, ""), guided_quantize(x, guide, order=order))
