"""Products of matrices in compute dtype: which arithmetic a device multiplies BF16 with is decided here.

A CPU without instructions for BF16 takes three to thirty times as long for a BF16 product as for one of FP32.
There the factors are widened, which is exact, and sums of FP32 are rounded to BF16 once: what other CPUs'
instructions compute, but for the order of a sum.

Axes: N rows, I and O inputs and outputs, B matrices of a batch, J rows and K columns of one, summed over I.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional


@cache
def multiplies_bf16() -> bool:
    """Whether torch has oneDNN's products of BF16 on this CPU, and not plain loops alone, as with AVX2."""
    mkldnn = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    return bool(mkldnn and torch.ops.mkldnn._is_mkldnn_bf16_supported())


def _widens(x: Tensor) -> bool:
    return x.dtype is torch.bfloat16 and not x.is_cuda and not multiplies_bf16()


class _WideLinear(torch.autograd.Function):
    """`functional.linear` of BF16 by FP32 products, in both directions; it keeps the BF16 factors."""

    @staticmethod
    def forward(ctx: Any, x_NI: Tensor, weight_OI: Tensor) -> Tensor:
        """Give [N, O] in x's dtype."""
        ctx.save_for_backward(x_NI, weight_OI)
        return functional.linear(x_NI.float(), weight_OI.float()).to(x_NI.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        """Gradients of x and weight."""
        x_NI, weight_OI = ctx.saved_tensors
        grad_NO = grads[0].float()
        grad_x_NI = (grad_NO @ weight_OI.float()).to(x_NI.dtype)
        return grad_x_NI, (grad_NO.t() @ x_NI.float()).to(weight_OI.dtype)


def linear(x_NI: Tensor, weight_OI: Tensor) -> Tensor:
    """Product [N, O] of rows with a weight, in their dtype; gradients flow."""
    if _widens(x_NI):
        out: Tensor = _WideLinear.apply(x_NI, weight_OI)
        return out
    return functional.linear(x_NI, weight_OI)


def bmm(a_BJI: Tensor, b_BIK: Tensor, plus_BJK: Tensor | None = None) -> Tensor:
    """Products [B, J, K] of each pair of matrices, in their dtype, added to `plus`; without gradient.

    The sum with `plus` is rounded once.
    """
    if not _widens(a_BJI):
        return torch.bmm(a_BJI, b_BIK) if plus_BJK is None else torch.baddbmm(plus_BJK, a_BJI, b_BIK)
    a, b = a_BJI.float(), b_BIK.float()
    wide = torch.bmm(a, b) if plus_BJK is None else torch.baddbmm(plus_BJK.float(), a, b)
    return wide.to(a_BJI.dtype)
