"""The reference transformer: Qwen3-MoE over a flat stream of tokens, with a hook at every quantised site.

All token-wise work is done on unpadded rows [N, …], where N counts the tokens of all sequences together.
Only attention knows sequences; it comes in as an object: `WholeSequences` for the trainer, `Prefill` and
`Decode` over a `KVCache` for the rollout. The model does not know of formats, methods or records.

Matrices are multiplied in compute dtype; norms, rotation, attention, router and logits are FP32.
Axes: N rows, H hidden, D head dimension, E experts, K experts a token, F expert hidden, B sequences, S their
padded length, C rows an expert is padded to.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional

from tracerl.api.errors import InputError
from tracerl.api.model import ModelShape
from tracerl.engines.device import to_device
from tracerl.engines.reference.kernels import (
    Places,
    Rotation,
    causal_attention,
    experts,
    logits,
    norm_rotate,
    pad,
    rms_norm,
    unpad,
)
from tracerl.engines.reference.products import linear

SEQUENCE_MULTIPLE = 16
"""Sequences are padded to a multiple of this for attention: CPU softmax is several times slower below it."""
LONGEST_SHORT = 128
"""Up to this padded length all scores of a batch are held; above it torch's attention, which holds none."""


class SiteHooks(Protocol):
    """What happens at the sites of a forward pass; row i of every argument is token i of the stream.

    Values come in compute dtype and go back in it, with the same shape. Gradients must flow straight through.
    """

    def expert_input(self, layer: int, x: Tensor, /) -> Tensor:
        """Input of the routed experts [N, hidden], once per token, before it is dispatched."""
        ...

    def key_value(self, layer: int, k: Tensor, v: Tensor, /) -> tuple[Tensor, Tensor]:
        """Keys after norm and rotation, and values, before they are cached and attended.

        Both are [N, kv_heads * head_dim].
        """
        ...

    def routes(self, layer: int, logits: Tensor, /) -> Tensor:
        """Expert ids int64 [N, top_k] from router logits float32 [N, experts]; called without gradient."""
        ...

    @property
    def fc2_input(self) -> Callable[[int, Tensor], Tensor] | None:
        """Method (layer, x) -> x on the input of the experts' second matrix, or None to leave it as it is.

        x is [N, top_k * expert_hidden], expert slots in the order of the ids. Called without gradient: its
        result is used as if the gradient were the identity.
        """
        ...


class PlainHooks:
    """No quantisation and live routing; the base of what treats some sites only."""

    def __init__(self, shape: ModelShape) -> None:
        self.shape = shape

    def expert_input(self, _layer: int, x: Tensor, /) -> Tensor:
        """Give back what came."""
        return x

    def key(self, _layer: int, k: Tensor, /) -> Tensor:
        """Give back what came."""
        return k

    def value(self, _layer: int, v: Tensor, /) -> Tensor:
        """Give back what came."""
        return v

    def key_value(self, layer: int, k: Tensor, v: Tensor, /) -> tuple[Tensor, Tensor]:
        """Treat keys and values each by its own method."""
        return self.key(layer, k), self.value(layer, v)

    def routes(self, _layer: int, logits: Tensor, /) -> Tensor:
        """The top-k experts, most probable first."""
        return logits.topk(self.shape.top_k, dim=-1).indices

    @property
    def fc2_input(self) -> Callable[[int, Tensor], Tensor] | None:
        """Leave it as it is."""
        return None


class Attention(Protocol):
    """Causal attention over whatever came before; knows which rows of the stream belong together."""

    positions: Tensor
    """int64 [N]: position of each row in its sequence."""

    def __call__(self, layer: int, q_NhD: Tensor, k_NgD: Tensor, v_NgD: Tensor, /) -> Tensor:
        """Attend; all in compute dtype, result [N, heads * head_dim]."""
        ...


class KVCache:
    """Keys and values of up to `slots` sequences of at most `capacity` tokens each.

    The cache has no state of its own: whoever owns the slots knows their lengths and passes them.
    """

    def __init__(
        self,
        shape: ModelShape,
        *,
        slots: int,
        capacity: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
    ) -> None:
        size = (shape.layers, slots, shape.kv_heads, capacity, shape.head_dim)
        self.k: Tensor = torch.zeros(size, dtype=dtype, device=device)
        self.v: Tensor = torch.zeros(size, dtype=dtype, device=device)
        self.shape, self.slots, self.capacity = shape, slots, capacity


class WholeSequences:
    """Attention of whole sequences that lie one after the other in the stream, for training.

    Weights of attention are rounded to compute dtype, as training kernels do, where the rollout's attention
    (`Prefill`, `Decode`) is FP32 inside: in real engines, too, the two sides round at different places.
    """

    def __init__(self, shape: ModelShape, lengths: Sequence[int], device: torch.device | str = "cpu") -> None:
        heads, groups = shape.heads, shape.kv_heads
        device, rows = torch.device(device), sum(lengths)
        length_B = to_device(torch.tensor(lengths, dtype=torch.int64), device)
        start_B = length_B.cumsum(0) - length_B
        batch, padded = len(lengths), -(-max(lengths) // SEQUENCE_MULTIPLE) * SEQUENCE_MULTIPLE
        sequence_N = torch.arange(batch, device=device).repeat_interleave(length_B, output_size=rows)
        position_N = torch.arange(rows, device=device) - start_B[sequence_N]
        self.positions: Tensor = position_N

        def places(count: int) -> Places:
            """Place the rows of [N * count, D] in the order [B, count, S]."""
            head = torch.arange(count, device=device) * padded
            place = ((sequence_N * count * padded + position_N).unsqueeze(1) + head).reshape(-1)
            return Places.of(place, batch * count * padded)

        self._queries, self._keys = places(heads), places(groups)
        self._shape, self._batch, self._padded = shape, batch, padded
        self._mask_SQ: Tensor | None = None
        if padded <= LONGEST_SHORT:
            future_SS = torch.full((padded, padded), -torch.inf, device=device).tril(-1)
            self._mask_SQ = future_SS.repeat(1, heads // groups)

    def __call__(self, _layer: int, q_NhD: Tensor, k_NgD: Tensor, v_NgD: Tensor, /) -> Tensor:
        """Attend causally inside each sequence (`Attention`)."""
        shape, dim = self._shape, self._shape.head_dim
        q = pad(q_NhD.reshape(-1, dim), self._queries)
        k, v = (pad(x.reshape(-1, dim), self._keys) for x in (k_NgD, v_NgD))
        if self._mask_SQ is not None:
            size = (self._batch * shape.kv_heads, -1, dim)
            out = causal_attention(q.view(size), k.view(size), v.view(size), self._mask_SQ)
        else:
            # In BF16 the gradient of torch's attention on a CPU takes ten times as long.
            dtype = q.dtype if q.is_cuda else torch.float32
            out = functional.scaled_dot_product_attention(
                q.view(self._batch, shape.heads, self._padded, dim).to(dtype),
                k.view(self._batch, shape.kv_heads, self._padded, dim).to(dtype),
                v.view(self._batch, shape.kv_heads, self._padded, dim).to(dtype),
                is_causal=True,
                enable_gqa=True,
            ).to(q.dtype)
        return unpad(out.reshape(-1, dim), self._queries).view(len(q_NhD), -1)


class Prefill(WholeSequences):
    """Whole sequences from position 0 that also fill the cache: sequence i goes to slots[i].

    `slots` int64 [B] is on the host.
    """

    def __init__(self, cache: KVCache, slots: Tensor, lengths: Sequence[int]) -> None:
        super().__init__(cache.shape, lengths, cache.k.device)
        self._cache = cache
        self._cache_slot_N = to_device(slots.repeat_interleave(torch.tensor(lengths)), cache.k.device)

    def __call__(self, layer: int, q_NhD: Tensor, k_NgD: Tensor, v_NgD: Tensor, /) -> Tensor:
        """Store, then attend (`Attention`)."""
        for cached, new_NgD in ((self._cache.k[layer], k_NgD), (self._cache.v[layer], v_NgD)):
            cached[self._cache_slot_N, :, self.positions] = new_NgD.to(cached.dtype)
        return super().__call__(layer, q_NhD.float(), k_NgD.float(), v_NgD.float()).to(q_NhD.dtype)


class Decode:
    """One token a sequence: row i continues slots[i], which holds lengths[i] tokens already (both int64 [B]).

    The token's position is lengths[i]; the owner of the slot counts one more afterwards. Slots 0..B-1 in this
    order are attended where they lie; others are copied together first. A caller who knows that they lie so,
    and how many tokens of each are to be looked at (`seen`), says so by `span`; else both are read.
    """

    def __init__(self, cache: KVCache, slots: Tensor, lengths: Tensor, *, span: int | None = None) -> None:
        groups = cache.shape.kv_heads
        self._cache, self.positions = cache, lengths
        in_place = span is not None or torch.equal(slots, torch.arange(len(slots), device=slots.device))
        self._gather = None if in_place else slots
        self._span = seen(cache, int(lengths.max())) if span is None else span
        head = torch.arange(groups, device=slots.device)
        self._place_M = ((slots[:, None] * groups + head) * cache.capacity + lengths[:, None]).flatten()
        unseen_BS = torch.arange(self._span, device=lengths.device) > lengths[:, None]
        bias_BS = torch.zeros(unseen_BS.shape, device=lengths.device).masked_fill_(unseen_BS, -torch.inf)
        self._bias_M1S = bias_BS.repeat_interleave(groups, dim=0).unsqueeze(1)

    def __call__(self, layer: int, q_NhD: Tensor, k_NgD: Tensor, v_NgD: Tensor, /) -> Tensor:
        """Store the new token's key and value, then attend to all of its sequence (`Attention`)."""
        rows, heads, dim = q_NhD.shape
        k_MSD, v_MSD = (
            self._store(cached[layer], new)
            for cached, new in ((self._cache.k, k_NgD), (self._cache.v, v_NgD))
        )
        q_MrD = (q_NhD.float() * dim**-0.5).view(len(k_MSD), -1, dim)
        # Batched products of a few rows each take half the time of torch's attention here.
        scores_MrS = torch.bmm(q_MrD, k_MSD.transpose(1, 2)).add_(self._bias_M1S)
        out_MrD = torch.bmm(torch.softmax(scores_MrS, dim=-1), v_MSD)
        return out_MrD.view(rows, heads * dim).to(q_NhD.dtype)

    def _store(self, cached: Tensor, new_NgD: Tensor) -> Tensor:
        """Write one row a sequence; give all rows that are attended, float32 [B * g, S, D]."""
        cached.view(-1, cached.shape[-1]).index_copy_(
            0, self._place_M, new_NgD.flatten(0, 1).to(cached.dtype)
        )
        held = cached[:, :, : self._span]
        held = held[: len(new_NgD)] if self._gather is None else held.index_select(0, self._gather)
        return held.flatten(0, 1).float()


def seen(cache: KVCache, longest: int) -> int:
    """How many tokens of every slot are looked at, where the longest holds so many already."""
    return min(-(-(longest + 1) // SEQUENCE_MULTIPLE) * SEQUENCE_MULTIPLE, cache.capacity)


class Layer(nn.Module):
    """Parameters of one transformer layer; q, k and v are one matrix, so are an expert's gate and up."""

    def __init__(self, shape: ModelShape, dtype: torch.dtype, device: torch.device | str) -> None:
        super().__init__()

        def parameter(*size: int) -> nn.Parameter:
            return nn.Parameter(torch.zeros(size, dtype=dtype, device=device))

        heads, groups, dim = shape.heads, shape.kv_heads, shape.head_dim
        self.input_norm = parameter(shape.hidden)
        self.qkv = parameter((heads + 2 * groups) * dim, shape.hidden)
        self.q_norm = parameter(dim)
        self.k_norm = parameter(dim)
        self.o = parameter(shape.hidden, heads * dim)
        self.post_norm = parameter(shape.hidden)
        self.router = parameter(shape.experts, shape.hidden)
        self.gate_up = parameter(shape.experts, 2 * shape.expert_hidden, shape.hidden)
        self.down = parameter(shape.experts, shape.hidden, shape.expert_hidden)


class MoEModel(nn.Module):
    """Qwen3-MoE with parameters in compute dtype (float32 or bfloat16), all zero until they are loaded.

    Experts' parameters hold what the products use: whoever quantises weights writes quantised values here.
    Raises `InputError` for a shape with dense layers, which this engine does not compute.
    """

    rotation: Tensor

    def __init__(
        self, shape: ModelShape, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
    ) -> None:
        super().__init__()
        if len(shape.moe_layers) != shape.layers or len(shape.full_attention_layers) != shape.layers:
            raise InputError(
                "the model has layers without experts or without full attention, and the Reference engine "
                "computes neither; use another engine or another model"
            )
        self.shape, self.dtype = shape, dtype
        self.embedding = nn.Parameter(torch.zeros(shape.vocab, shape.hidden, dtype=dtype, device=device))
        self.layers = nn.ModuleList(Layer(shape, dtype, device) for _ in range(shape.layers))
        self.norm = nn.Parameter(torch.zeros(shape.hidden, dtype=dtype, device=device))
        self.head = (
            None
            if shape.tie_embeddings
            else nn.Parameter(torch.zeros(shape.vocab, shape.hidden, dtype=dtype, device=device))
        )
        half = torch.arange(0, shape.head_dim, 2, dtype=torch.float32) / shape.head_dim
        angles = torch.arange(shape.context, dtype=torch.float32)[:, None] / shape.rope_theta**half
        table = torch.cat([angles.cos(), angles.sin()], dim=-1).to(device)
        self.register_buffer("rotation", table, persistent=False)

    def forward(self, tokens_N: Tensor, attention: Attention, hooks: SiteHooks) -> Tensor:
        """Hidden states [N, hidden] after the last norm, from token ids int64 [N] of one or more sequences.

        `attention.positions` must be below the shape's context.
        """
        shape = self.shape
        heads, groups, dim = shape.heads, shape.kv_heads, shape.head_dim
        rotation = Rotation.at(self.rotation, attention.positions, heads + groups)
        x_NH = functional.embedding(tokens_N, self.embedding)
        for index, module in enumerate(self.layers):
            layer: Layer = module  # type: ignore[assignment]
            qkv = linear(rms_norm(x_NH, layer.input_norm, shape.rms_eps), layer.qkv)
            q, k, v = norm_rotate(qkv, (layer.q_norm, layer.k_norm), rotation, (heads, groups), shape.rms_eps)
            k, v = hooks.key_value(index, k, v)
            attended = attention(
                index, q.view(-1, heads, dim), k.view(-1, groups, dim), v.view(-1, groups, dim)
            )
            x_NH = x_NH + linear(attended, layer.o)

            normed = rms_norm(x_NH, layer.post_norm, shape.rms_eps)
            logits_NE = functional.linear(normed.float(), layer.router.float())
            with torch.no_grad():
                ids_NK = hooks.routes(index, logits_NE)
            gates_NK = self._gates(logits_NE, ids_NK)
            x_NH = x_NH + experts(
                hooks.expert_input(index, normed),
                gates_NK,
                ids_NK,
                gate_up_EGH=layer.gate_up,
                down_EHF=layer.down,
                fc2_input=None if hooks.fc2_input is None else partial(hooks.fc2_input, index),
            )
        return rms_norm(x_NH, self.norm, shape.rms_eps)

    def logits(self, hidden_MH: Tensor) -> Tensor:
        """Logits float32 [M, vocab] of chosen rows of `forward`'s result."""
        head = self.embedding if self.head is None else self.head
        return logits(hidden_MH, head)

    def _gates(self, logits_NE: Tensor, ids_NK: Tensor) -> Tensor:
        """Weights float32 [N, K] of the chosen experts, whether the choice is live or replayed (R3)."""
        if self.shape.norm_topk_prob:
            return torch.softmax(logits_NE.gather(1, ids_NK), dim=-1)
        return torch.softmax(logits_NE, dim=-1).gather(1, ids_NK)
