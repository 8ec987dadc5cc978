"""Hugging Face's names of a Qwen3-MoE model's weights, their initial values from a seed, and their checks.

Engines name weights this way wherever they leave them: exports, checkpoints, weight updates.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from tracerl.api.errors import InputError
from tracerl.api.model import ModelShape


def hf_shapes(shape: ModelShape) -> dict[str, tuple[int, ...]]:
    """Name every weight of a model whose layers all are MoE layers with full attention, with its size."""
    hidden, dim, width = shape.hidden, shape.head_dim, shape.expert_hidden
    sizes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (shape.vocab, hidden)}
    for index in range(shape.layers):
        layer = f"model.layers.{index}."
        sizes |= {
            layer + "input_layernorm.weight": (hidden,),
            layer + "self_attn.q_proj.weight": (shape.heads * dim, hidden),
            layer + "self_attn.k_proj.weight": (shape.kv_heads * dim, hidden),
            layer + "self_attn.v_proj.weight": (shape.kv_heads * dim, hidden),
            layer + "self_attn.q_norm.weight": (dim,),
            layer + "self_attn.k_norm.weight": (dim,),
            layer + "self_attn.o_proj.weight": (hidden, shape.heads * dim),
            layer + "post_attention_layernorm.weight": (hidden,),
            layer + "mlp.gate.weight": (shape.experts, hidden),
        }
        for expert in range(shape.experts):
            prefix = f"{layer}mlp.experts.{expert}."
            sizes[prefix + "gate_proj.weight"] = (width, hidden)
            sizes[prefix + "up_proj.weight"] = (width, hidden)
            sizes[prefix + "down_proj.weight"] = (hidden, width)
    sizes["model.norm.weight"] = (hidden,)
    if not shape.tie_embeddings:
        sizes["lm_head.weight"] = (shape.vocab, hidden)
    return sizes


def initial_weights(shape: ModelShape, seed: int) -> Iterator[tuple[str, Tensor]]:
    """Give every weight in float32, drawn from a seed: the same values on every machine, in every engine.

    Norms 1, embedding of unit variance, matrices of variance 1 / fan-in, and those that write to the residual
    stream smaller by sqrt(2 * layers), so that its variance does not grow with depth.
    """
    generator = torch.Generator().manual_seed(seed)
    for name, size in sorted(hf_shapes(shape).items()):
        if len(size) == 1:
            yield name, torch.ones(size)
            continue
        deviation = 1.0 if name.startswith("model.embed") else 1 / math.sqrt(size[1])
        if "o_proj" in name or "down_proj" in name:
            deviation /= math.sqrt(2 * shape.layers)
        yield name, torch.randn(size, generator=generator) * deviation


def check_weights(sizes: Mapping[str, tuple[int, ...]], tensors: Mapping[str, Tensor], where: str) -> None:
    """Raise InputError unless `tensors` are all of the named weights and nothing else, in sizes and values.

    It names `where` and a tensor that is unknown, missing, of another shape, not of floating point or not
    finite.
    """
    for name, tensor in tensors.items():
        size = sizes.get(name)
        if size is None:
            raise InputError(
                f"{where}: the model of this config.json has no tensor {name}; use the config.json and the "
                "weights of one model"
            )
        if tuple(tensor.shape) != size:
            raise InputError(
                f"{where}: tensor {name} has shape {list(tensor.shape)}, but config.json asks for "
                f"{list(size)}; use the config.json and the weights of one model"
            )
        if not tensor.is_floating_point():
            raise InputError(
                f"{where}: tensor {name} holds {str(tensor.dtype).removeprefix('torch.')}, but only "
                "floating-point weights are read; export the model unquantised"
            )
        if not bool(tensor.isfinite().all()):
            raise InputError(
                f"{where}: tensor {name} holds NaN or Inf; take weights from before that happened"
            )
    missing = [name for name in sizes if name not in tensors]
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise InputError(f"{where}: tensor {missing[0]}{more} is missing; write all weights of the model")
