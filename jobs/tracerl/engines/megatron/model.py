"""The model: Megatron-Core's GPTModel of a Qwen3-MoE shape, configured to compute what rollouts compute."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
    set_tensor_model_parallel_attributes,
)
from megatron.core.transformer.transformer_config import TransformerConfig
from torch.nn import functional

from tracerl.api.errors import InputError
from tracerl.api.model import ModelShape
from tracerl.engines.megatron.layers import Seat, attach, block_spec
from tracerl.engines.megatron.slicing import Place, layers_of


def transformer_config(
    shape: ModelShape, place: Place, dtype: torch.dtype, device: torch.device, extra: dict[str, Any]
) -> TransformerConfig:
    """Configure Megatron for a shape; `extra` (`spec.trainer.engineArgs`) sets further fields by their names.

    InputError when it names none of Megatron's fields, or one that the job or this adapter decides.
    """
    gpu = device.type == "cuda"
    ours: dict[str, Any] = {
        "num_layers": shape.layers,
        "hidden_size": shape.hidden,
        "num_attention_heads": shape.heads,
        "num_query_groups": shape.kv_heads,
        "kv_channels": shape.head_dim,
        "ffn_hidden_size": shape.expert_hidden,
        "moe_ffn_hidden_size": shape.expert_hidden,
        "num_moe_experts": shape.experts,
        "moe_router_topk": shape.top_k,
        # Softmax over the chosen logits is softmax over all, renormalised.
        "moe_router_pre_softmax": not shape.norm_topk_prob,
        "moe_router_load_balancing_type": "none",
        "moe_router_dtype": "fp32",
        # Gloo takes no tensors as the sizes of an all-to-all.
        "moe_token_dispatcher_type": "alltoall" if gpu else "allgather",
        "moe_grouped_gemm": False,
        "gated_linear_unit": True,
        "activation_func": functional.silu,
        "add_bias_linear": False,
        "normalization": "RMSNorm",
        "layernorm_epsilon": shape.rms_eps,
        "qk_layernorm": True,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "attention_softmax_in_fp32": True,
        "bf16": dtype is torch.bfloat16,
        "params_dtype": dtype,
        # Of what a stage sends to the next.
        "pipeline_dtype": torch.float32 if extra.get("fp32_residual_connection") else dtype,
        "use_cpu_initialization": not gpu,
        "perform_initialization": False,
        "bias_activation_fusion": False,
        "bias_dropout_fusion": False,
        "masked_softmax_fusion": False,
        "apply_rope_fusion": False,
        "gradient_accumulation_fusion": False,
        # The loss is divided by its caller, so gradients are summed over ranks.
        "calculate_per_token_loss": True,
        "tensor_model_parallel_size": place.tensor,
        "sequence_parallel": place.tensor > 1,
        "pipeline_model_parallel_size": place.pipeline,
        # Every stage has equally many layers, in one piece.
        "virtual_pipeline_model_parallel_size": None,
        "pipeline_model_parallel_layout": None,
        "num_layers_in_first_pipeline_stage": None,
        "num_layers_in_last_pipeline_stage": None,
        "account_for_embedding_in_pipeline_split": False,
        "account_for_loss_in_pipeline_split": False,
        "context_parallel_size": place.context,
        "expert_model_parallel_size": place.expert,
        "expert_tensor_parallel_size": 1,
    }
    fields = {field.name for field in dataclasses.fields(TransformerConfig) if field.init}
    for name in extra:
        where = f"spec.trainer.engineArgs.{name}"
        if name in ours:
            raise InputError(f"{where} is decided by the job or the Megatron trainer; leave it out")
        if name not in fields:
            raise InputError(f"{where} is no field of Megatron's TransformerConfig; correct or remove it")
    try:
        return TransformerConfig(**ours, **extra)
    except (ValueError, AssertionError, TypeError) as error:
        raise InputError(
            f"Megatron refuses this model and spec.trainer.engineArgs ({error}); change the arguments"
        ) from None


def build(
    shape: ModelShape, place: Place, config: TransformerConfig, seat: Seat, device: torch.device
) -> GPTModel:
    """Make a rank's part of the model, in the dtype of its configuration, with the seams on a seat.

    Its weights are undefined until they are loaded. Logits are those of the rank's part of the vocabulary;
    a pipeline stage before the last gives hidden states instead.
    """
    model = GPTModel(
        config=config,
        transformer_layer_spec=block_spec(shape.experts, len(layers_of(shape.layers, place))),
        vocab_size=shape.vocab,
        max_sequence_length=shape.context,
        pre_process=place.first_stage,
        post_process=place.last_stage,
        position_embedding_type="rope",
        rotary_base=shape.rope_theta,
        rotary_percent=1.0,
        share_embeddings_and_output_weights=shape.tie_embeddings,
        parallel_output=True,
    )
    attach(model, seat)
    _mark_shards(model)
    return model.to(device=device, dtype=config.params_dtype)


def _mark_shards(model: GPTModel) -> None:
    """Tell Megatron's optimizer which ranks sum the gradient of a parameter, and which count its norm."""
    for module in model.modules():
        if not isinstance(module, ColumnParallelLinear | RowParallelLinear | VocabParallelEmbedding):
            continue
        if module.weight is None:  # that of the embedding
            continue
        # 0.16.1 sets this where it fills weights, and these are loaded.
        if not hasattr(module.weight, "tensor_model_parallel"):
            axis = 1 if isinstance(module, RowParallelLinear) else 0
            set_tensor_model_parallel_attributes(module.weight, is_parallel=True, dim=axis, stride=1)
        # Tensor-parallel ranks that have all experts compute tokens of their own with them, which Megatron
        # takes into account only with expert parallelism.
        if getattr(module, "is_expert", False):
            module.weight.allreduce = False


def check_shape(shape: ModelShape, place: Place) -> None:
    """Raise InputError for a shape that this adapter does not build."""
    if len(shape.moe_layers) != shape.layers or len(shape.full_attention_layers) != shape.layers:
        raise InputError(
            "the model has layers without experts or without full attention, and the Megatron trainer builds "
            "neither; use another engine or another model"
        )
    for name, count, parts in (
        ("attention heads", shape.heads, place.tensor),
        ("KV heads", shape.kv_heads, place.tensor),
        ("token ids", shape.vocab, place.tensor),
        ("experts", shape.experts, place.expert),
        ("layers", shape.layers, place.pipeline),
    ):
        if count % parts:
            raise InputError(
                f"{count} {name} cannot be held by {parts} ranks evenly; change spec.trainer.parallelism"
            )
