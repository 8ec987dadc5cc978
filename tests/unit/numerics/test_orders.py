"""Orders against what public packages gave (golden vectors) and Transformer Engine's formula in numpy."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from tracerl.numerics import (
    MXFP4,
    NVFP4,
    NonFiniteError,
    Order,
    TensorScale,
    dequantize,
    pack_bits,
    quantize,
    unpack_bits,
)

GOLDEN = load_file(Path(__file__).parent / "golden/peers.safetensors")
CONVENTIONS = {
    Order.FOUR_OVER_SIX: "amax",
    Order.TORCHAO: "decode",
    Order.MODELOPT: "decode",
    Order.COMPRESSED_TENSORS: "encode",
}


@pytest.mark.parametrize("fixed", ["fixed", "amax"])
@pytest.mark.parametrize("order", CONVENTIONS)
@pytest.mark.parametrize("values", ["ordinary", "hard"])
def test_packages(values: str, order: Order, fixed: str) -> None:
    """Bit for bit wherever the package's arithmetic is defined: `tests/peers` says where, and repeats it."""
    prefix = f"{values}/{order}/{fixed}"
    x = GOLDEN[f"{values}/x"]
    scale = TensorScale(GOLDEN[f"{prefix}/tensor_scale"], CONVENTIONS[order])
    ours = quantize(x, tensor_scale=scale, order=order)
    compared = unpack_bits(GOLDEN[f"{prefix}/comparable"], 1, x.shape[-1]).bool()
    blocks = compared.view(*ours.scales.shape, 16).any(-1)
    assert compared.float().mean() > (0.9 if values == "ordinary" else 0.05)
    assert torch.equal(ours.scales[blocks], GOLDEN[f"{prefix}/scales"][blocks])
    theirs = unpack_bits(GOLDEN[f"{prefix}/codes"], 4, x.shape[-1])
    assert torch.equal(ours.codes[compared], theirs[compared])
    if compared.all():
        assert torch.equal(pack_bits(ours.codes, 4), GOLDEN[f"{prefix}/codes"])
    assert dequantize(ours).isfinite().all()


def test_mxfp4_package() -> None:
    ours = quantize(GOLDEN["ordinary/x"], MXFP4, order=Order.TORCHAO)
    assert torch.equal(ours.scales, GOLDEN["ordinary/MXFP4/scales"])
    assert torch.equal(pack_bits(ours.codes, 4), GOLDEN["ordinary/MXFP4/codes"])


def transformer_engine(x: np.ndarray, amax: float) -> tuple[np.ndarray, np.ndarray]:
    """Codes and E4M3 scales of Transformer Engine 2.17's reference, from its formula; FP32 [rows, K]."""
    f = np.float32
    largest = np.finfo(f).max
    blocks = x.astype(f).reshape(len(x), -1, 16)
    with np.errstate(divide="ignore", over="ignore"):
        encode = f(1) if amax == 0 else min(f(2688) / f(amax), largest)
        raw = np.abs(blocks).max(-1, keepdims=True) * (encode * (f(1) / f(6)))
        scale = to_e4m3(np.minimum(raw, f(448)))
        factor = np.minimum(f(1) / (scale * (f(1) / encode)), largest)
        y = np.clip(blocks * factor, f(-6), f(6))
    # Interval by interval as in its cast_to_fp4x2: closed on the side of the even code.
    codes = np.zeros(y.shape, np.uint8)
    for code, (low, high) in enumerate(
        [(0.25, 0.75), (0.75, 1.25), (1.25, 1.75), (1.75, 2.5), (2.5, 3.5), (3.5, 5)]
    ):
        even = code % 2 == 1
        m = np.abs(y)
        codes[(m >= low) & (m <= high) if even else (m > low) & (m < high)] = code + 1
    codes[np.abs(y) > 5] = 7
    codes[y < 0] |= 8
    return codes.reshape(x.shape), scale[..., 0]


def to_e4m3(v: np.ndarray) -> np.ndarray:
    """Nearest positive E4M3 values up to 448, ties to even, by exhaustive search; FP32 to FP32."""
    normal = [(8 + m) * 2.0 ** (e - 10) for e in range(1, 16) for m in range(8)][:-1]
    grid = np.array([m * 2.0**-9 for m in range(8)] + normal)
    ties = (grid[:-1] + grid[1:]) / 2
    above = np.searchsorted(ties, v.astype(np.float64))
    tied = ties[np.minimum(above, len(ties) - 1)] == v
    return grid[above + (tied & (above % 2 == 1))].astype(np.float32)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("amax", [0.0, 2688.0, 1.0, 1e-3, 0.7, 3e4])
def test_reciprocal_order_is_transformer_engines(amax: float, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(4)
    magnitudes = torch.exp(torch.randn(128, 1, generator=generator) * 2)
    x = (
        (torch.randn(128, 256, generator=generator) * magnitudes * (amax or 2688) / 50)
        .clamp(-6e4, 6e4)
        .to(dtype)
    )
    x[0] = 0
    x[1, :16] = torch.tensor([0.0, -0.0] * 8)
    x[2] *= 1e-3
    scale = TensorScale(torch.tensor(amax), "amax") if amax != 2688 else TensorScale.one()
    ours = quantize(x, tensor_scale=scale)
    codes, scales = transformer_engine(x.float().numpy(), amax)
    assert torch.equal(NVFP4.scale.decode(ours.scales), torch.from_numpy(scales))
    assert torch.equal(ours.codes, torch.from_numpy(codes))


def test_orders_differ_on_bf16_ties() -> None:
    """Why there are orders: on BF16 input each package's arithmetic gives some other codes."""
    x = torch.randn(256, 1024, generator=torch.Generator().manual_seed(5)).bfloat16()
    amax = torch.tensor(4.5625)  # a tensor's amax decides which orders meet ties
    codes = {order: quantize(x, tensor_scale=TensorScale(amax, "amax"), order=order).codes for order in Order}
    for order in CONVENTIONS:
        assert 0 < (codes[order] != codes[Order.RECIPROCAL]).sum() < 0.01 * x.numel()


ONES = torch.ones(2, 16)


@pytest.mark.parametrize(
    ("convention", "value", "encode", "decode"),
    [
        ("amax", 2688.0, 1.0, 1.0),
        ("amax", 5376.0, 0.5, 2.0),
        ("encode", 0.5, 0.5, 2.0),
        ("decode", 2.0, 0.5, 2.0),
        ("amax", 0.0, 1.0, 1.0),
        ("decode", 0.0, 1.0, 1.0),
        ("amax", 1e-38, torch.finfo(torch.float32).max, float(torch.tensor(1e-38) / 2688)),
    ],
)
def test_tensor_scale_conventions(convention: str, value: float, encode: float, decode: float) -> None:
    scale = TensorScale(torch.tensor(value), convention)
    assert scale.encode().item() == encode
    assert scale.decode().item() == decode


@pytest.mark.parametrize("order", Order)
def test_a_scale_a_row_equals_one_row_at_a_time(order: Order) -> None:
    x = GOLDEN["ordinary/x"][:8, :64].reshape(2, 4, 64)
    amax = x.abs().amax(-1, keepdim=True).float()
    together = quantize(x, tensor_scale=TensorScale(amax, "amax"), order=order)
    for i in range(2):
        for j in range(4):
            alone = quantize(x[i, j], tensor_scale=TensorScale(amax[i, j, 0], "amax"), order=order)
            assert torch.equal(together.codes[i, j], alone.codes)
            assert torch.equal(together.scales[i, j], alone.scales)
            assert torch.equal(dequantize(together)[i, j], dequantize(alone))


@pytest.mark.parametrize(
    ("order", "scale", "code"),
    [
        (Order.RECIPROCAL, 0, 0),
        (Order.FOUR_OVER_SIX, 0, 0),
        (Order.TORCHAO, 8, 0),  # floor 2^-6
        (Order.MODELOPT, 56, 0),  # 1.0
        (Order.COMPRESSED_TENSORS, 32, 0),  # 0.125
    ],
)
def test_a_block_of_zeros(order: Order, scale: int, code: int) -> None:
    q = quantize(torch.zeros(1, 16), order=order)
    assert q.scales.tolist() == [[scale]]
    assert (q.codes == code).all()
    assert (dequantize(q) == 0).all()


@pytest.mark.parametrize("order", Order)
def test_minus_zero_keeps_its_sign_in_torchao_alone(order: Order) -> None:
    x = torch.tensor([[-0.0, 0.0, -1e-6, 6.0] * 4])
    codes = quantize(x, order=order).codes[0, :4].tolist()
    assert codes == [8 if order is Order.TORCHAO else 0, 0, 8, 7]


def test_a_tensor_of_zeros_under_its_own_amax() -> None:
    for convention in ("amax", "decode"):
        for order in Order:
            scale = TensorScale(torch.tensor(0.0), convention)
            assert (dequantize(quantize(torch.zeros(2, 32), tensor_scale=scale, order=order)) == 0).all()


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("place", [(0, 0), (3, 63), (2, 17)])
def test_nan_and_inf_name_the_site(value: float, dtype: torch.dtype, place: tuple[int, int]) -> None:
    x = torch.randn(4, 64).to(dtype)
    x[place] = value
    with pytest.raises(NonFiniteError, match=r"layers\.7\.ExpertInput holds NaN or Inf") as error:
        quantize(x, site="layers.7.ExpertInput")
    assert error.value.reason == "NonFinite"
    # The job may be at its first step.
    assert "checkpoint" not in str(error.value)


def test_the_largest_finite_values_are_finite() -> None:
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        x = torch.full((1, 16), torch.finfo(dtype).max, dtype=dtype)
        assert (dequantize(quantize(x)) == 2688).all()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: quantize(torch.zeros(2, 24)), "pad its last axis to a multiple of 16, the block of NVFP4"),
        (lambda: quantize(torch.zeros(2, 48), MXFP4), "pad its last axis to a multiple of 32"),
        (lambda: quantize(torch.zeros(())), r"has shape \[\]"),
        (lambda: quantize(torch.zeros(2, 16, dtype=torch.float64)), "cast it to bfloat16"),
        (
            lambda: quantize(ONES, tensor_scale=TensorScale(torch.ones(2), "amax")),
            r"give a scalar or shape \[2, 1\]",
        ),
        (
            lambda: quantize(torch.zeros(2, 32), MXFP4, tensor_scale=TensorScale(torch.ones(()), "amax")),
            "leave it at 1",
        ),
    ],
)
def test_what_does_not_fit_is_one_sentence(call: Callable[[], Tensor], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()
