"""Pieces of the transformer with hand-written gradients, in plain torch, made for one CPU thread or a GPU.

What autograd would record as dozens of small operations is a few passes over contiguous memory here.
Broadcasts over short rows and reductions of short rows are what costs on a CPU, so they are done as small
matrix products or avoided; rows are gathered in both directions and never scattered. On a GPU, waiting for it
is what costs, so no size depends there on what it has computed, but for FP32 experts of many rows.

Axes: N rows, H hidden, D head dimension, h query heads, g key heads, r = h / g, E experts, K experts a token,
F expert hidden, B sequences, S their padded length, C rows an expert is padded to.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from tracerl.engines.reference.products import bmm

EXPERT_MULTIPLE = 64
"""Experts' rows are padded to a multiple of this: oneDNN compiles a BF16 kernel for every new shape."""
_FEW_SLOTS = 1 << 16
"""Up to so many padded rows of all experts a GPU computes room for any choice instead of telling how many."""


class _RMSNorm(torch.autograd.Function):
    """``weight * x / rms(x)`` over the last axis of x [N, H]: FP32 arithmetic, rounded once."""

    @staticmethod
    def forward(ctx: Any, x_NH: Tensor, weight_H: Tensor, eps: float) -> Tensor:
        """Normalise; result in x's dtype."""
        norm_N1 = torch.linalg.vector_norm(x_NH, dim=-1, keepdim=True, dtype=torch.float32)
        scale_N1 = norm_N1.square_().div_(x_NH.shape[-1]).add_(eps).rsqrt_()
        ctx.save_for_backward(x_NH, weight_H, scale_N1)
        out_NH: Tensor = (x_NH.float() * scale_N1).mul_(weight_H.float()).to(x_NH.dtype)
        return out_NH

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        """Gradients of x and weight."""
        x_NH, weight_H, scale_N1 = ctx.saved_tensors
        weight = weight_H.float()
        grad_NH, unit_NH = grads[0].float(), x_NH.float() * scale_N1
        product_NH = grad_NH * unit_NH
        grad_weight = product_NH.sum(0).to(weight_H.dtype)
        mean_N1 = product_NH @ (weight / len(weight)).unsqueeze(1)
        grad_x_NH = (grad_NH * weight).addcmul_(unit_NH, mean_N1, value=-1).mul_(scale_N1)
        return grad_x_NH.to(x_NH.dtype), grad_weight, None


@dataclass(frozen=True)
class Places:
    """Where M rows lie among P padded places, and back; both directions are gathers."""

    row: Tensor
    """int64 [P]: row in each place, 0 in padding."""
    place: Tensor
    """int64 [M]: place of each row."""
    padding: Tensor
    """int64: places that hold no row."""

    @classmethod
    def of(cls, place: Tensor, places: int) -> Places:
        """Invert `place`."""
        row = place.new_full((places,), -1)
        row[place] = torch.arange(len(place), device=place.device)
        empty = row < 0
        if place.is_cuda:  # where to ask how many there are would wait
            count = places - len(place)
            nth = torch.where(empty, empty.cumsum(0) - 1, count)
            every = torch.arange(places, device=place.device)
            padding = place.new_empty(count + 1).scatter_(0, nth, every)[:count]
        else:
            padding = empty.nonzero().squeeze(1)
        return cls(row.clamp_(min=0), place, padding)


@dataclass(frozen=True)
class Rotation:
    """Rotary embedding of N rows at their positions, spread over all heads: products need no broadcast."""

    cos: Tensor
    """float32 [N, (h + g) * D], as is `sin`."""
    sin: Tensor
    swap: Tensor
    """float32 [D, D]: ``x @ swap`` is (-second half, first half) of x."""

    @classmethod
    def at(cls, table: Tensor, positions: Tensor, heads: int) -> Rotation:
        """Rows of a table [context, D] of D / 2 cosines and D / 2 sines, for `heads` query and key heads."""
        half = table.shape[1] // 2
        eye = torch.eye(half, device=table.device)
        zero = torch.zeros_like(eye)
        swap = torch.cat([torch.cat([zero, eye], 1), torch.cat([-eye, zero], 1)])
        parts = table.chunk(2, dim=1)
        if len(positions) < len(table):  # the fewer rows are spread
            cos, sin = (part.index_select(0, positions).repeat(1, 2 * heads) for part in parts)
        else:
            cos, sin = (part.repeat(1, 2 * heads).index_select(0, positions) for part in parts)
        return cls(cos, sin, swap)


class _NormRotate(torch.autograd.Function):
    """Split qkv [N, (h + 2g) * D]; RMS-norm q and k by head, rotate them; FP32 inside."""

    @staticmethod
    def forward(  # noqa: PLR0917 (autograd passes by position)
        ctx: Any,
        qkv: Tensor,
        q_norm_D: Tensor,
        k_norm_D: Tensor,
        rotation: Rotation,
        sizes: tuple[int, int],
        eps: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Give q [N, h * D], k and v [N, g * D] in qkv's dtype; `sizes` is (h, g)."""
        (heads, groups), dim = sizes, q_norm_D.shape[0]
        width = (heads + groups) * dim
        weight_P = torch.cat([q_norm_D.repeat(heads), k_norm_D.repeat(groups)]).float()
        unit_NP = torch.empty((len(qkv), width), device=qkv.device).copy_(qkv[:, :width])
        by_head_MD = unit_NP.view(-1, dim)
        scale_M1 = torch.linalg.vector_norm(by_head_MD, dim=1, keepdim=True)
        scale_M1.square_().div_(dim).add_(eps).rsqrt_()
        by_head_MD.mul_(scale_M1)
        y_NP = unit_NP * weight_P
        swapped_NP = (y_NP.view(-1, dim) @ rotation.swap).view_as(y_NP)
        y_NP.mul_(rotation.cos).addcmul_(swapped_NP, rotation.sin)
        ctx.save_for_backward(unit_NP, scale_M1, weight_P)
        ctx.rotation, ctx.sizes, ctx.dim, ctx.norm_dtype = rotation, sizes, dim, q_norm_D.dtype
        q, k, v = y_NP[:, : heads * dim], y_NP[:, heads * dim :], qkv[:, width:]
        return q.to(qkv.dtype).contiguous(), k.to(qkv.dtype).contiguous(), v.contiguous()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of qkv and the two norms' weights."""
        unit_NP, scale_M1, weight_P = ctx.saved_tensors
        rotation: Rotation = ctx.rotation
        (heads, groups), dim = ctx.sizes, ctx.dim
        grad_NP = torch.cat([grads[0], grads[1]], dim=1).float()
        swapped_NP = ((grad_NP * rotation.sin).view(-1, dim) @ rotation.swap.t()).view_as(grad_NP)
        grad_NP.mul_(rotation.cos).add_(swapped_NP)
        grad_weight_hD = (grad_NP * unit_NP).sum(0).view(heads + groups, dim)
        by_head_MD, unit_MD = grad_NP.mul_(weight_P).view(-1, dim), unit_NP.view(-1, dim)
        mean_M1 = (by_head_MD * unit_MD) @ torch.full((dim, 1), 1 / dim, device=unit_NP.device)
        by_head_MD.addcmul_(unit_MD, mean_M1, value=-1).mul_(scale_M1)
        grad_qkv = torch.cat([grad_NP.to(grads[2].dtype), grads[2]], dim=1)
        grad_q_norm = grad_weight_hD[:heads].sum(0).to(ctx.norm_dtype)
        grad_k_norm = grad_weight_hD[heads:].sum(0).to(ctx.norm_dtype)
        return grad_qkv, grad_q_norm, grad_k_norm, None, None, None


class _Pad(torch.autograd.Function):
    """Rows [M, D] to padded places; what padding holds is any row, and its gradient is left out."""

    @staticmethod
    def forward(ctx: Any, x_MD: Tensor, places: Places) -> Tensor:
        """Gather rows."""
        ctx.places = places
        return x_MD.index_select(0, places.row)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        """Gather the gradient back."""
        return grads[0].index_select(0, ctx.places.place), None


class _Unpad(torch.autograd.Function):
    """Rows [M, D] out of padded places, whose padding gets no gradient."""

    @staticmethod
    def forward(ctx: Any, x_PD: Tensor, places: Places) -> Tensor:
        """Gather rows."""
        ctx.places = places
        return x_PD.index_select(0, places.place)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        """Gather the gradient back."""
        places: Places = ctx.places
        return grads[0].index_select(0, places.row).index_fill_(0, places.padding, 0), None


class _CausalAttention(torch.autograd.Function):
    """Causal grouped-query attention over short padded sequences, the heads of a group in one product.

    Scores and softmax are FP32, weights are rounded to v's dtype before they meet v, as training kernels do.
    Scores lie [B * g, S keys, r * S queries]: a softmax over a strided axis is vectorised over the queries.
    """

    @staticmethod
    def forward(ctx: Any, q_GQD: Tensor, k_GSD: Tensor, v_GSD: Tensor, mask_SQ: Tensor) -> Tensor:
        """Attend: q [B * g, r * S, D], k and v [B * g, S, D], mask float32 [S, r * S] of 0 and -inf."""
        factor = q_GQD.shape[-1] ** -0.5
        scores_GSQ = torch.baddbmm(mask_SQ, k_GSD.float(), q_GQD.float().transpose(1, 2), alpha=factor)
        weights_GSQ = torch.softmax(scores_GSQ, dim=1).to(v_GSD.dtype)
        ctx.save_for_backward(q_GQD, k_GSD, v_GSD, weights_GSQ)
        return bmm(weights_GSQ.transpose(1, 2), v_GSD)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of q, k and v."""
        q_GQD, k_GSD, v_GSD, weights_GSQ = ctx.saved_tensors
        (grad_GQD,) = grads
        grad_v_GSD = bmm(weights_GSQ, grad_GQD)
        grad_weights_GSQ = bmm(v_GSD, grad_GQD.transpose(1, 2)).float()
        grad_scores_GSQ = torch._softmax_backward_data(
            grad_weights_GSQ, weights_GSQ.float(), 1, torch.float32
        )
        grad_scores_GSQ = grad_scores_GSQ.mul_(q_GQD.shape[-1] ** -0.5).to(q_GQD.dtype)
        grad_q_GQD = bmm(grad_scores_GSQ.transpose(1, 2), k_GSD)
        return grad_q_GQD, bmm(grad_scores_GSQ, q_GQD), grad_v_GSD, None


@dataclass(frozen=True)
class Dispatch:
    """Which padded slot of which expert holds which (token, k) pair, and back.

    Padding points at pair 0 and has no way back: it costs time and changes nothing.
    """

    rows: int
    """C."""
    pair: Tensor
    """int64 [E * C]: pair (token * K + k) in each slot, 0 in padding."""
    real: Tensor
    """bool [E * C]: False in padding."""
    slot: Tensor
    """int64 [N, K]: slot of each pair."""

    @classmethod
    def of(cls, ids_NK: Tensor, experts: int) -> Dispatch:
        """Sort pairs by expert."""
        id_M, order_M = ids_NK.reshape(-1).sort(stable=True)
        end_E = _ends(id_M, experts)
        start_E = functional.pad(end_E[:-1], (1, 0))
        most = len(ids_NK)  # a token goes to an expert once
        unknown = ids_NK.is_cuda and (
            most * experts <= _FEW_SLOTS or torch.cuda.is_current_stream_capturing()
        )
        if not unknown:
            most = int((end_E - start_E).max())
        rows = -(-most // EXPERT_MULTIPLE) * EXPERT_MULTIPLE
        shift_E = torch.arange(experts, device=id_M.device) * rows - start_E
        place_M = torch.arange(len(id_M), device=id_M.device) + shift_E[id_M]
        pair_EC = order_M.new_zeros(experts * rows)
        pair_EC[place_M] = order_M
        real_EC = torch.zeros(experts * rows, dtype=torch.bool, device=id_M.device)
        real_EC.index_fill_(0, place_M, True)
        slot_M = torch.empty_like(order_M)
        slot_M[order_M] = place_M
        return cls(rows, pair_EC, real_EC, slot_M.view_as(ids_NK))


def _ends(id_M: Tensor, experts: int) -> Tensor:
    """Where the pairs of each expert end, int64 [E], in sorted ids int64 [M]."""
    return torch.searchsorted(id_M, torch.arange(experts, device=id_M.device), right=True)


def _grouped(a: Tensor, b: Tensor, end_E: Tensor) -> Tensor:
    """Product of each group of rows of a [M, I] with its matrix of b [E, I, J], or of columns with rows."""
    # torch.nn.functional has it since 2.10.
    out: Tensor = torch._grouped_mm(a, b, offs=end_E)
    return out


def _combine(y_MH: Tensor, slot_NK: Tensor, weight_NK: Tensor | None = None) -> Tensor:
    """Weighted sum [N, H] of each token's K rows of y, accumulated in FP32 and rounded once."""
    return functional.embedding_bag(slot_NK, y_MH, mode="sum", per_sample_weights=weight_NK)


def _swiglu_gradients(
    grad_inner: Tensor, inner: Tensor, gate: Tensor, up: Tensor, weight: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of the rows' weights [...] (float32) and of both projections [..., F].

    Args:
        grad_inner: [..., F], of the inner values where every row weighed one; it is overwritten.
        inner: [..., F], what the second matrix was given.
        gate: [..., F], what the first matrix gave, before SiLU.
        up: [..., F], the other half of it.
        weight: [..., 1], of each row in its token's sum.
    """
    # d(weight) = <grad y, y> = <grad inner, inner>, over F values instead of H.
    grad_weight = (grad_inner * inner).sum(-1, dtype=torch.float32)
    grad_inner.mul_(weight)
    grad_up = functional.silu(gate).mul_(grad_inner)
    return grad_weight, torch.ops.aten.silu_backward(grad_inner.mul_(up), gate), grad_up


class _Experts(torch.autograd.Function):
    """SwiGLU experts as batched matrix products over rows padded per expert."""

    @staticmethod
    def forward(  # noqa: PLR0917 (autograd passes by position)
        ctx: Any,
        x_NH: Tensor,
        gates_NK: Tensor,
        ids_NK: Tensor,
        gate_up_EGH: Tensor,
        down_EHF: Tensor,
        fc2_input: Callable[[Tensor], Tensor] | None,
    ) -> Tensor:
        """Weighted sum [N, H] of the chosen experts of x; `fc2_input` maps [N, K * F] straight through."""
        tokens, top_k = ids_NK.shape
        experts, hidden, width = down_EHF.shape
        plan = Dispatch.of(ids_NK, experts)
        slots, shape = experts * plan.rows, (experts, plan.rows, width)
        token_M = torch.arange(tokens, device=x_NH.device).repeat_interleave(top_k)
        row_EC = token_M[plan.pair]

        x_ECH = x_NH.index_select(0, row_EC).view(experts, plan.rows, hidden)
        gate_ECF = bmm(x_ECH, gate_up_EGH[:, :width].transpose(1, 2))
        up_ECF = bmm(x_ECH, gate_up_EGH[:, width:].transpose(1, 2))
        inner_ECF = functional.silu(gate_ECF).mul_(up_ECF)
        if fc2_input is not None:
            inner_NF = inner_ECF.view(slots, width).index_select(0, plan.slot.view(-1))
            inner_NF = fc2_input(inner_NF.view(tokens, top_k * width)).view(-1, width)
            inner_ECF = inner_NF.index_select(0, plan.pair).view(shape)
        y_ECH = bmm(inner_ECF, down_EHF.transpose(1, 2))
        gates_typed_NK = gates_NK.to(x_NH.dtype)
        ctx.save_for_backward(
            x_ECH,
            gate_ECF,
            up_ECF,
            inner_ECF,
            gates_typed_NK,
            gate_up_EGH,
            down_EHF,
            row_EC,
            plan.pair,
            plan.real,
            plan.slot,
        )
        return _combine(y_ECH.view(slots, hidden), plan.slot, gates_typed_NK)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of x, gates (float32) and both matrices."""
        (
            x_ECH,
            gate_ECF,
            up_ECF,
            inner_ECF,
            gates_NK,
            gate_up_EGH,
            down_EHF,
            row_EC,
            pair_EC,
            real_EC,
            slot_NK,
        ) = ctx.saved_tensors
        (experts, rows, width), hidden = inner_ECF.shape, x_ECH.shape[2]
        slots = experts * rows
        # Zero in padding, so that no product below sums anything that is not there.
        gate_EC1 = (gates_NK.reshape(-1)[pair_EC] * real_EC).view(experts, rows, 1)
        grad_y_ECH = grads[0].index_select(0, row_EC).view(experts, rows, hidden)
        grad_inner_ECF = bmm(grad_y_ECH, down_EHF)
        grad_down_EHF = bmm(grad_y_ECH.mul_(gate_EC1).transpose(1, 2), inner_ECF)
        grad_weight_EC, grad_gate_ECF, grad_up_ECF = _swiglu_gradients(
            grad_inner_ECF, inner_ECF, gate_ECF, up_ECF, gate_EC1
        )
        grad_gates_NK = grad_weight_EC.view(slots)[slot_NK]
        grad_gate_up_EGH = torch.cat(
            [bmm(grad_gate_ECF.transpose(1, 2), x_ECH), bmm(grad_up_ECF.transpose(1, 2), x_ECH)],
            dim=1,
        )
        grad_x_ECH = bmm(grad_gate_ECF, gate_up_EGH[:, :width])
        grad_x_ECH = bmm(grad_up_ECF, gate_up_EGH[:, width:], grad_x_ECH)
        grad_x_NH = _combine(grad_x_ECH.view(slots, hidden), slot_NK)
        return grad_x_NH, grad_gates_NK, None, grad_gate_up_EGH, grad_down_EHF, None


class _GroupedExperts(torch.autograd.Function):
    """`_Experts` as one product over the rows of all experts, sorted: nothing is padded or waited for."""

    @staticmethod
    def forward(  # noqa: PLR0917 (autograd passes by position)
        ctx: Any,
        x_NH: Tensor,
        gates_NK: Tensor,
        ids_NK: Tensor,
        gate_up_EGH: Tensor,
        down_EHF: Tensor,
        fc2_input: Callable[[Tensor], Tensor] | None,
    ) -> Tensor:
        """See `_Experts.forward`."""
        (tokens, top_k), width = ids_NK.shape, down_EHF.shape[2]
        id_M, order_M = ids_NK.reshape(-1).sort(stable=True)
        end_E = _ends(id_M, len(down_EHF)).int()
        slot_M = torch.empty_like(order_M)
        slot_M[order_M] = torch.arange(len(order_M), device=order_M.device)
        token_M = order_M.div(top_k, rounding_mode="floor")

        x_MH = x_NH.index_select(0, token_M)
        gate_MF, up_MF = _grouped(x_MH, gate_up_EGH.transpose(1, 2), end_E).chunk(2, dim=1)
        inner_MF = functional.silu(gate_MF).mul_(up_MF)
        if fc2_input is not None:
            inner_NF = fc2_input(inner_MF.index_select(0, slot_M).view(tokens, top_k * width))
            inner_MF = inner_NF.view(-1, width).index_select(0, order_M)
        y_MH = _grouped(inner_MF, down_EHF.transpose(1, 2), end_E)
        gates_typed_NK, slot_NK = gates_NK.to(x_NH.dtype), slot_M.view_as(ids_NK)
        ctx.save_for_backward(
            x_MH, gate_MF, up_MF, inner_MF, gates_typed_NK, gate_up_EGH, down_EHF, end_E, order_M, slot_NK
        )
        return _combine(y_MH, slot_NK, gates_typed_NK)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """See `_Experts.backward`."""
        x_MH, gate_MF, up_MF, inner_MF, gates_NK, gate_up_EGH, down_EHF, end_E, order_M, slot_NK = (
            ctx.saved_tensors
        )
        gate_M1 = gates_NK.reshape(-1).index_select(0, order_M).unsqueeze(1)
        token_M = order_M.div(slot_NK.shape[1], rounding_mode="floor")
        grad_y_MH = grads[0].index_select(0, token_M)
        grad_inner_MF = _grouped(grad_y_MH, down_EHF, end_E)
        grad_down_EHF = _grouped(grad_y_MH.mul_(gate_M1).t(), inner_MF, end_E)
        grad_weight_M, grad_gate_MF, grad_up_MF = _swiglu_gradients(
            grad_inner_MF, inner_MF, gate_MF, up_MF, gate_M1
        )
        grad_gates_NK = grad_weight_M[slot_NK]
        grad_MG = torch.cat([grad_gate_MF, grad_up_MF], dim=1)
        grad_gate_up_EGH = _grouped(grad_MG.t(), x_MH, end_E)
        grad_x_NH = _combine(_grouped(grad_MG, gate_up_EGH, end_E), slot_NK)
        return grad_x_NH, grad_gates_NK, None, grad_gate_up_EGH, grad_down_EHF, None


class _Logits(torch.autograd.Function):
    """FP32 sums of BF16 products, whose gradient is rounded to BF16, as training kernels do."""

    @staticmethod
    def forward(ctx: Any, x_MH: Tensor, head_VH: Tensor) -> Tensor:
        """Give float32 [M, V]."""
        ctx.save_for_backward(x_MH, head_VH)
        return torch.mm(x_MH, head_VH.t(), out_dtype=torch.float32)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        """Gradients of x and head."""
        x_MH, head_VH = ctx.saved_tensors
        grad_MV = grads[0].to(x_MH.dtype)
        return torch.mm(grad_MV, head_VH), torch.mm(grad_MV.t(), x_MH)


def rms_norm(x_NH: Tensor, weight_H: Tensor, eps: float) -> Tensor:
    """``weight * x / rms(x)`` over the last axis, computed in FP32 and rounded once to x's dtype."""
    out: Tensor = _RMSNorm.apply(x_NH, weight_H, eps)
    return out


def norm_rotate(
    qkv: Tensor, norms: tuple[Tensor, Tensor], rotation: Rotation, sizes: tuple[int, int], eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Split qkv [N, (h + 2g) * D] by sizes (h, g), norm q and k by head and rotate them."""
    out: tuple[Tensor, Tensor, Tensor] = _NormRotate.apply(qkv, *norms, rotation, sizes, eps)
    return out


def logits(x_MH: Tensor, head_VH: Tensor) -> Tensor:
    """Products float32 [M, V] of rows with a head's, summed in FP32."""
    # A GPU multiplies FP32 without its tensor cores; of BF16 values the products are the same.
    if x_MH.is_cuda and x_MH.dtype is torch.bfloat16:
        out: Tensor = _Logits.apply(x_MH, head_VH)
        return out
    return functional.linear(x_MH.float(), head_VH.float())


def pad(x_MD: Tensor, places: Places) -> Tensor:
    """Rows [M, D] in their padded places [P, D]; what padding holds is undefined but finite."""
    out: Tensor = _Pad.apply(x_MD, places)
    return out


def unpad(x_PD: Tensor, places: Places) -> Tensor:
    """Rows [M, D] out of their padded places [P, D]."""
    out: Tensor = _Unpad.apply(x_PD, places)
    return out


def causal_attention(q_GQD: Tensor, k_GSD: Tensor, v_GSD: Tensor, mask_SQ: Tensor) -> Tensor:
    """Attention of q [B * g, r * S, D] to k, v [B * g, S, D] under float32 mask [S, r * S] of 0 and -inf."""
    out: Tensor = _CausalAttention.apply(q_GQD, k_GSD, v_GSD, mask_SQ)
    return out


def experts(
    x_NH: Tensor,
    gates_NK: Tensor,
    ids_NK: Tensor,
    *,
    gate_up_EGH: Tensor,
    down_EHF: Tensor,
    fc2_input: Callable[[Tensor], Tensor] | None,
) -> Tensor:
    """Gated sum [N, H] of the SwiGLU experts `ids_NK`; `fc2_input` maps [N, K * F] straight through."""
    # A CPU has no product of groups, and a GPU has none of FP32.
    function = _GroupedExperts if x_NH.is_cuda and x_NH.dtype is torch.bfloat16 else _Experts
    out: Tensor = function.apply(x_NH, gates_NK, ids_NK, gate_up_EGH, down_EHF, fc2_input)
    return out
