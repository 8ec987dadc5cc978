"""Fake quantisation with a straight-through gradient: what a forward pass calls."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tracerl.api.job import RoundingOrder as Order
from tracerl.numerics.blocks import NVFP4, ONE, BlockFormat, TensorScale, kernels, nearest
from tracerl.numerics.guidance import Guide, guided


def fake_quantize(
    x: Tensor,
    fmt: BlockFormat = NVFP4,
    *,
    tensor_scale: TensorScale = ONE,
    order: Order = Order.RECIPROCAL,
    site: str = "",
) -> Tensor:
    """Quantise and dequantise: `dequantize(quantize(x, ...), x.dtype)`, with zeros of either sign.

    The gradient passes unchanged, also where a value saturated, as in verl. Arguments and errors are those of
    `quantize`.
    """
    if triton := kernels(x, fmt):
        values = triton.fake_quantize(x, tensor_scale, order, site)
    else:
        values = nearest(x, fmt, tensor_scale, order, site).to_values()
    return _straight_through(x, values)


def guided_fake_quantize(
    x: Tensor,
    guide: Guide,
    fmt: BlockFormat = NVFP4,
    *,
    order: Order = Order.RECIPROCAL,
    band: float | None = None,
    site: str = "",
) -> Tensor:
    """Quantise toward a record and dequantise: `dequantize(guided_quantize(x, guide, ...), x.dtype)`.

    The gradient passes unchanged, as in `fake_quantize`. Arguments and errors are those of `guided_quantize`.
    """
    if triton := kernels(x, fmt):
        values = triton.guided_fake_quantize(x, guide, order, band, site)
    else:
        values = guided(x, guide, fmt, order=order, band=band, site=site).to_values()
    return _straight_through(x, values)


def _straight_through(x: Tensor, values: Tensor) -> Tensor:
    return _Identity.apply(x, values) if x.requires_grad and torch.is_grad_enabled() else values


class _Identity(torch.autograd.Function):
    """Gives `values`, and hands x the gradient unchanged."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, values: Tensor) -> Tensor:  # noqa: ARG004
        return values

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # noqa: ARG004
        return gradient, None
