"""Weights of routed experts as both sides compute with them: what the FP4 codes of exported values stand for.

Rollout and trainer call this with the same exported values and so find the same codes and scales, byte for
byte. Blocks lie along the axis that is summed over.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tracerl.api.job import Quantization
from tracerl.numerics import NVFP4, BlockFormat, Quantized, TensorScale, fake_quantize, quantize
from tracerl.records.sites import BLOCK_FORMATS

GATE_UP, DOWN = "gate_up", "down"
"""The two matrices of an expert: kernels multiply gate and up at once, so they share a scale."""


@torch.no_grad()
def quantise_expert_weights(
    weight_Erc: Tensor, quantization: Quantization, *, site: str, amax_E: Tensor | None = None
) -> Quantized:
    """Quantise one matrix of several experts, [E, rows, columns], to nearest.

    In NVFP4 every expert has one FP32 scale, from its largest magnitude. A rank that holds part of a matrix
    gives the `amax_E` (float32 [E]) of the whole. Raises `NonFiniteError` naming `site`.
    """
    fmt, scale = _format(weight_Erc, quantization, amax_E)
    return quantize(weight_Erc.detach(), fmt, tensor_scale=scale, order=quantization.order, site=site)


@torch.no_grad()
def fake_quantise_expert_weights(
    weight_Erc: Tensor, quantization: Quantization, *, site: str, amax_E: Tensor | None = None
) -> Tensor:
    """Give what those codes stand for, in the dtype of the weights; arguments and errors are the same."""
    fmt, scale = _format(weight_Erc, quantization, amax_E)
    return fake_quantize(weight_Erc.detach(), fmt, tensor_scale=scale, order=quantization.order, site=site)


def _format(
    weight_Erc: Tensor, quantization: Quantization, amax_E: Tensor | None
) -> tuple[BlockFormat, TensorScale]:
    fmt = BLOCK_FORMATS[quantization.format]
    if fmt is not NVFP4:
        return fmt, TensorScale.one()
    if amax_E is None:
        amax_E = weight_Erc.abs().amax(dim=(1, 2)).float()
    return fmt, TensorScale(amax_E.view(-1, 1, 1).expand(-1, weight_Erc.shape[1], 1), "amax")


def weights_site(layer: int, matrix: str) -> str:
    """Name a matrix of a layer's experts in errors."""
    return f"layer {layer} experts' {matrix} weights"
