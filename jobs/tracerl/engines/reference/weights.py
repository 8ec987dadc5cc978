"""Weights of the reference model: Hugging Face's tensors as views of its own.

`hf_views` is the one place that knows how Hugging Face's tensors lie in the model's; initialising, loading
and exporting all go through the views it gives.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from tracerl.api.job import Quantization
from tracerl.api.model import ModelShape
from tracerl.engines.hf import check_weights, initial_weights
from tracerl.engines.reference.model import MoEModel
from tracerl.engines.reference.quantised import quantise_experts
from tracerl.methods import MethodPlan


def hf_views(shape: ModelShape, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Name every weight as Hugging Face does, with the view of `parameters` (`MoEModel`'s) that holds it."""
    heads, groups, dim, width = shape.heads, shape.kv_heads, shape.head_dim, shape.expert_hidden
    views = {"model.embed_tokens.weight": parameters["embedding"]}
    for index in range(shape.layers):
        ours, theirs = f"layers.{index}.", f"model.layers.{index}."
        q, k, v = torch.split(parameters[ours + "qkv"], [heads * dim, groups * dim, groups * dim])
        views |= {
            theirs + "input_layernorm.weight": parameters[ours + "input_norm"],
            theirs + "self_attn.q_proj.weight": q,
            theirs + "self_attn.k_proj.weight": k,
            theirs + "self_attn.v_proj.weight": v,
            theirs + "self_attn.q_norm.weight": parameters[ours + "q_norm"],
            theirs + "self_attn.k_norm.weight": parameters[ours + "k_norm"],
            theirs + "self_attn.o_proj.weight": parameters[ours + "o"],
            theirs + "post_attention_layernorm.weight": parameters[ours + "post_norm"],
            theirs + "mlp.gate.weight": parameters[ours + "router"],
        }
        gate_up, down = parameters[ours + "gate_up"], parameters[ours + "down"]
        for expert in range(shape.experts):
            prefix = f"{theirs}mlp.experts.{expert}."
            views[prefix + "gate_proj.weight"] = gate_up[expert, :width]
            views[prefix + "up_proj.weight"] = gate_up[expert, width:]
            views[prefix + "down_proj.weight"] = down[expert]
    views["model.norm.weight"] = parameters["norm"]
    if not shape.tie_embeddings:
        views["lm_head.weight"] = parameters["head"]
    return views


@torch.no_grad()
def initialise(shape: ModelShape, parameters: Mapping[str, Tensor], seed: int) -> None:
    """Fill parameters with `initial_weights`, in whatever dtype they are stored."""
    views = hf_views(shape, parameters)
    for name, value in initial_weights(shape, seed):
        views[name].copy_(value)


@torch.no_grad()
def copy_weights(views: Mapping[str, Tensor], tensors: Mapping[str, Tensor], where: str) -> None:
    """Copy named tensors into all of `views`: nothing left out, nothing left over, or nothing copied.

    InputError as of `check_weights`.
    """
    check_weights({name: tuple(view.shape) for name, view in views.items()}, tensors, where)
    for name, view in views.items():
        view.copy_(tensors[name])


class RolloutWeights:
    """The weights of a rollout's model, replaced as a whole and quantised as its method says."""

    def __init__(self, model: MoEModel, method: MethodPlan, quantization: Quantization) -> None:
        self._model, self._method, self._quantization = model, method, quantization

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Take weights by Hugging Face's names; after an InputError the model is as it was."""
        views = hf_views(self._model.shape, dict(self._model.named_parameters()))
        copy_weights(views, tensors, "the new weights")
        quantise_experts(self._model, self._method.weights_rollout, self._quantization)
