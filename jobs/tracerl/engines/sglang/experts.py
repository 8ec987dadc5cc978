"""Routed experts in plain torch, with a hook between the two matrices.

SGLang's fused kernels never show what goes into the second matrix. Where that is quantised, this takes their
place: the arithmetic of SGLang's `moe_forward_native`, bit for bit when the hook changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

SecondInputHook = Callable[[Tensor], Tensor]
"""Maps [N, top_k * width], slots in the order of the ids, to what the second matrix is given."""


def experts_forward(
    layer: Any,
    x_NH: Tensor,
    weights_NK: Tensor,
    ids_NK: Tensor,
    *,
    width: int,
    activation: Callable[[Tensor], Tensor],
    second_input: SecondInputHook,
) -> Tensor:
    """Compute the routed experts of an SGLang `FusedMoE` layer that holds all of them, unquantised.

    Of what the first matrix gives, `activation` makes half as many values, of which the first `width` are the
    model's: SGLang pads matrices with zeros to the multiples that its kernels want. Returns [N, H].
    """
    rows, top_k = ids_NK.shape
    chosen = ids_NK.reshape(-1)
    order = chosen.argsort()
    counts = torch.bincount(chosen, minlength=layer.num_experts).tolist()
    sorted_x = x_NH[order // top_k]

    def each(inputs: Tensor, matrices: Tensor, then: Callable[[Tensor], Tensor]) -> Tensor:
        pairs = zip(torch.split(inputs, counts), matrices, strict=True)
        return torch.cat([then(functional.linear(part, matrix)) for part, matrix in pairs if len(part)])

    hidden = each(sorted_x, layer.w13_weight, activation)
    in_order = torch.zeros_like(hidden)
    in_order[order] = hidden
    treated = second_input(in_order[:, :width].reshape(rows, top_k * width))
    in_order[:, :width] = treated.reshape(-1, width)
    sorted_out = each(in_order[order], layer.w2_weight, lambda out: out)
    out = torch.empty_like(sorted_out)
    out[order] = sorted_out
    return (
        out.view(rows, top_k, -1)
        .type(weights_NK.dtype)
        .mul_(weights_NK.unsqueeze(dim=-1))
        .sum(dim=1)
        .type(out.dtype)
    )
