"""Fake quantisation: equal to codes and back, with the gradient passed unchanged, for any shape and dtype."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tracerl.numerics import (
    E4M3,
    MXFP4,
    NVFP4,
    BlockFormat,
    Guide,
    NonFiniteError,
    Order,
    Quantized,
    TensorScale,
    dequantize,
    fake_quantize,
    guided_fake_quantize,
    guided_quantize,
    quantize,
    quantize_dequantize,
)


def every_value_under_every_scale(every: int) -> Tensor:
    """BF16 [rows, 16]: per E4M3 scale, blocks of every BF16 value up to 6 times it, and that maximum."""
    patterns = torch.arange(2**15, dtype=torch.int16).view(torch.bfloat16)
    rows = []
    for code in range(1, 127, every):
        largest = (6 * E4M3.decode(torch.tensor([code], dtype=torch.uint8))).bfloat16()
        values = patterns[patterns <= largest]
        values = torch.cat([values, -values])[: 2 * len(values) // 15 * 15].view(-1, 15)
        rows.append(torch.cat([largest.expand(len(values), 1), values], -1))
    return torch.cat(rows)


@pytest.mark.parametrize("order", Order)
def test_every_bf16_value_under_every_scale(order: Order) -> None:
    x = every_value_under_every_scale(every=2 if order is Order.RECIPROCAL else 18)
    assert torch.equal(fake_quantize(x, order=order), dequantize(quantize(x, order=order), x.dtype))


@pytest.mark.parametrize("order", Order)
@pytest.mark.parametrize("fmt", [NVFP4, MXFP4], ids=["NVFP4", "MXFP4"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_codes_and_values_in_one_call_are_those_of_two(
    order: Order, fmt: BlockFormat, dtype: torch.dtype
) -> None:
    """Bit for bit, the signs of zeros too, and over more values than go through the steps together."""
    x = torch.randn(1400, 96, generator=torch.Generator().manual_seed(4)).to(dtype)
    x[5] = 0
    x[6], x[7, ::2] = -0.0, 1e-38
    scale = TensorScale(torch.full((), 3.7), "encode") if fmt is NVFP4 else TensorScale.one()
    whole, values = quantize_dequantize(x, fmt, tensor_scale=scale, order=order)
    q = quantize(x, fmt, tensor_scale=scale, order=order)
    assert torch.equal(whole.codes, q.codes)
    assert torch.equal(whole.scales, q.scales)
    wanted, pattern = dequantize(q, dtype), torch.int16 if dtype is torch.bfloat16 else torch.int32
    assert values.dtype == dtype
    assert torch.equal(values.view(pattern), wanted.view(pattern))
    with pytest.raises(NonFiniteError, match="layer 3"):
        quantize_dequantize(x / 0, fmt, order=order, site="layer 3 Key")


@pytest.mark.parametrize("band", [None, 0.1])
@pytest.mark.parametrize("code_bits", [0, 1, 2, 4])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_guided(code_bits: int, band: float | None, dtype: torch.dtype) -> None:
    x = every_value_under_every_scale(every=42).to(dtype)
    x[:100] = 0
    generator = torch.Generator().manual_seed(1)
    codes = torch.randint(0, 16, x.shape, dtype=torch.uint8, generator=generator)
    scales = (quantize(x).scales.int() + torch.randint(-2, 3, (len(x), 1), generator=generator)).clamp(0, 126)
    guide = Guide.of(Quantized(codes, scales.to(torch.uint8), TensorScale.one(), NVFP4), code_bits, 3)
    values = guided_fake_quantize(x, guide, band=band)
    assert values.dtype == dtype
    assert torch.equal(values, dequantize(guided_quantize(x, guide, band=band), dtype))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(
    "shape", [(16,), (0, 32), (3, 0, 32), (1, 32), (5, 7, 96), (2, 3, 4, 64), (4100, 32)]
)
def test_any_leading_shape_and_dtype(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(2)).to(dtype)
    q = quantize(x)
    assert q.codes.shape == x.shape
    assert q.scales.shape == (*shape[:-1], shape[-1] // 16)
    flat = quantize(x.reshape(-1, shape[-1]).float())
    assert torch.equal(q.codes.view(-1, shape[-1]), flat.codes)
    for values in (fake_quantize(x), guided_fake_quantize(x, Guide.of(q)), dequantize(q, dtype)):
        assert values.shape == x.shape
        assert values.dtype == dtype
        assert torch.equal(values, dequantize(flat, dtype).view(shape))


def test_not_contiguous() -> None:
    base = torch.randn(64, 48, 3, generator=torch.Generator().manual_seed(3)).bfloat16()
    views = (base[..., 0], base.permute(2, 0, 1), base[::2, :, 1], base[:, 16:32, 2], base[:48, :, 0].mT)
    for x in views:
        assert not x.is_contiguous()
        q, same = quantize(x), quantize(x.clone(memory_format=torch.contiguous_format))
        assert torch.equal(q.codes, same.codes)
        assert torch.equal(q.scales, same.scales)
        assert torch.equal(fake_quantize(x), dequantize(same, x.dtype))
        assert torch.equal(guided_fake_quantize(x, Guide.of(q)), dequantize(same, x.dtype))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("guided", [False, True])
def test_the_gradient_passes_unchanged(guided: bool, dtype: torch.dtype) -> None:
    x = torch.randn(4, 5, 32, dtype=dtype, generator=torch.Generator().manual_seed(4)) * 10
    x[0] *= 1000  # beyond 2688: saturated under a tensor scale of 1
    x[1] = 0
    x.requires_grad_()
    values = guided_fake_quantize(x, Guide.of(quantize(x * 0.9))) if guided else fake_quantize(x)
    gradient = torch.randn(4, 5, 32, generator=torch.Generator().manual_seed(5)).to(dtype)
    values.backward(gradient)
    assert x.grad is not None
    assert x.grad.dtype == dtype
    assert torch.equal(x.grad, gradient)


def test_no_gradient_is_kept_where_none_is_wanted() -> None:
    x = torch.randn(2, 16, requires_grad=True)
    with torch.no_grad():
        assert not fake_quantize(x).requires_grad
    assert not fake_quantize(x.detach()).requires_grad
    assert not dequantize(quantize(x)).requires_grad


def test_the_input_is_left_alone() -> None:
    x = torch.randn(8, 64)
    before = x.clone()
    guide = Guide.of(quantize(x + 0.1))
    fake_quantize(x)
    guided_fake_quantize(x, guide, band=0.1)
    assert torch.equal(x, before)


def test_mxfp4() -> None:
    x = torch.randn(6, 64, generator=torch.Generator().manual_seed(6)).bfloat16()
    x[0] = 0
    q = quantize(x, MXFP4)
    assert torch.equal(fake_quantize(x, MXFP4), dequantize(q, x.dtype))
    assert torch.equal(guided_fake_quantize(x, Guide.of(q), MXFP4), dequantize(q, x.dtype))


def test_nan_names_the_site() -> None:
    x = torch.randn(4, 16)
    x[2, 3] = torch.nan
    with pytest.raises(NonFiniteError, match=r"layers\.3\.Value"):
        fake_quantize(x, site="layers.3.Value")
