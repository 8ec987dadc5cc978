"""Weights between Hugging Face's names and Megatron's parameters, both ways, whole or a rank's shard.

    Megatron                                  Hugging Face                    layout
    self_attention.linear_qkv                 q_proj, k_proj, v_proj          by KV head: its q heads, k, v
    mlp.experts.local_experts.E.linear_fc1    experts.E.gate_proj, up_proj    gate above up
    pre_mlp_layernorm                         post_attention_layernorm        as it is
    all others                                one tensor each                 as it is

A tensor-parallel rank holds the heads, vocabulary rows or columns that Megatron gives it; every rank of an
expert group holds its own experts whole. A pipeline stage holds its layers, which Megatron numbers from 0.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from tracerl.api.model import ModelShape
from tracerl.engines.megatron.slicing import Place, experts_of, layers_of

COPY, QKV, GATE_UP = "copy", "qkv", "gate_up"


@dataclass(frozen=True)
class Parameter:
    """One of Megatron's parameters: which Hugging Face tensors it holds, and how."""

    name: str
    """Megatron's, on the rank that holds it."""
    hf: tuple[str, ...]
    layout: str
    axis: int | None = None
    """Axis that tensor parallelism cuts; None where every rank holds all of it."""
    expert: tuple[int, int] | None = None
    """(layer, expert) of an expert's matrix."""

    @property
    def gate_up(self) -> bool:
        """Whether it is an expert's first matrix."""
        return self.layout == GATE_UP


def parameters(shape: ModelShape, place: Place) -> list[Parameter]:
    """All parameters of a rank, in Hugging Face's order.

    A tied embedding is on the first pipeline stage and, as the output layer, on the last.
    """
    embedding = ("model.embed_tokens.weight",)
    found = []
    if place.first_stage:
        found.append(Parameter("embedding.word_embeddings.weight", embedding, COPY, 0))
    for own, layer in enumerate(layers_of(shape.layers, place)):
        ours, theirs = f"decoder.layers.{own}.", f"model.layers.{layer}."
        attention = theirs + "self_attn."
        qkv = tuple(f"{attention}{part}_proj.weight" for part in "qkv")
        found += [
            Parameter(ours + "input_layernorm.weight", (theirs + "input_layernorm.weight",), COPY),
            Parameter(ours + "self_attention.linear_qkv.weight", qkv, QKV, 0),
            Parameter(ours + "self_attention.q_layernorm.weight", (attention + "q_norm.weight",), COPY),
            Parameter(ours + "self_attention.k_layernorm.weight", (attention + "k_norm.weight",), COPY),
            Parameter(ours + "self_attention.linear_proj.weight", (attention + "o_proj.weight",), COPY, 1),
            Parameter(ours + "pre_mlp_layernorm.weight", (theirs + "post_attention_layernorm.weight",), COPY),
            Parameter(ours + "mlp.router.weight", (theirs + "mlp.gate.weight",), COPY),
        ]
        for local, expert in enumerate(experts_of(shape.experts, place)):
            matrix = f"{ours}mlp.experts.local_experts.{local}.linear_"
            name = f"{theirs}mlp.experts.{expert}."
            both = (name + "gate_proj.weight", name + "up_proj.weight")
            found += [
                Parameter(matrix + "fc1.weight", both, GATE_UP, None, (layer, expert)),
                Parameter(matrix + "fc2.weight", (name + "down_proj.weight",), COPY, None, (layer, expert)),
            ]
    if not place.last_stage:
        return found
    found.append(Parameter("decoder.final_layernorm.weight", ("model.norm.weight",), COPY))
    if not shape.tie_embeddings:
        found.append(Parameter("output_layer.weight", ("lm_head.weight",), COPY, 0))
    elif not place.first_stage:
        found.append(Parameter("output_layer.weight", embedding, COPY, 0))
    return found


def check_coverage(shape: ModelShape, place: Place, names: Iterable[str]) -> None:
    """Assert that the mapping holds all of a model's parameters and no other: versions may rename some."""
    ours, theirs = {parameter.name for parameter in parameters(shape, place)}, set(names)
    assert ours == theirs, f"weights that only one side has: {sorted(ours ^ theirs)[:4]}"


def to_megatron(
    parameter: Parameter, tensors: Mapping[str, Tensor], shape: ModelShape, place: Place
) -> Tensor:
    """Lay Hugging Face's whole tensors out as the rank's parameter."""
    parts = [tensors[name] for name in parameter.hf]
    if parameter.layout == QKV:
        groups = [part.view(shape.kv_heads, -1, part.shape[-1]) for part in parts]
        whole = torch.cat(groups, dim=1).reshape(-1, parts[0].shape[-1])
    else:
        whole = parts[0] if len(parts) == 1 else torch.cat(parts)
    if parameter.axis is None or place.tensor == 1:
        return whole
    return whole.chunk(place.tensor, dim=parameter.axis)[place.tensor_rank]


def to_hf(parameter: Parameter, value: Tensor, shape: ModelShape) -> Iterator[tuple[str, Tensor]]:
    """Give Hugging Face's tensors of a parameter, or of a rank's shard their parts (`cut_axis`)."""
    if parameter.layout == QKV:
        width, dim = value.shape[-1], shape.head_dim
        queries = shape.heads // shape.kv_heads * dim
        by_group = value.view(-1, queries + 2 * dim, width)
        parts = [part.reshape(-1, width) for part in torch.split(by_group, [queries, dim, dim], dim=1)]
    elif parameter.gate_up:
        parts = list(value.chunk(2))
    else:
        parts = [value]
    yield from zip(parameter.hf, parts, strict=True)


_CUT_AXES = {
    "embed_tokens": 0,
    "q_proj": 0,
    "k_proj": 0,
    "v_proj": 0,
    "o_proj": 1,
    "lm_head": 0,
}


def cut_axis(name: str) -> int | None:
    """Axis along which the parts of tensor-parallel ranks, in their order, make Hugging Face's tensor.

    None when each rank holds the whole.
    """
    return _CUT_AXES.get(name.removesuffix(".weight").rpartition(".")[2].rpartition("/")[2])
