"""Every seam of Megatron-Core that the adapter uses, by name and signature: an upgrade fails here first."""

import importlib
import importlib.metadata
import inspect

import pytest
import torch
from megatron.core.models.gpt import GPTModel

from tracerl.api.errors import InputError
from tracerl.api.job import TrainerParallelism
from tracerl.api.model import ModelShape
from tracerl.engines.megatron import host as host_module
from tracerl.engines.megatron.host import (
    TESTED_VERSIONS,
    check_version,
    host,
    host_optimizer,
    join_groups,
    quiet,
)
from tracerl.engines.megatron.layers import (
    GuidedAttention,
    GuidedExperts,
    GuidedMoE,
    Norm,
    RecordedRoutes,
    Seat,
    block_spec,
)
from tracerl.engines.megatron.model import build, transformer_config
from tracerl.engines.megatron.slicing import Place

SHAPE = ModelShape.uniform(
    2, hidden=32, heads=4, kv_heads=2, head_dim=16, experts=4, top_k=2, expert_hidden=16, vocab=30, context=64
)
CPU = torch.device("cpu")
# What each seam must take, by position; versions may add more behind it.
SEAMS = {
    "transformer.moe.moe_layer.MoELayer.preprocess": ["self", "hidden_states", "probs", "routing_map"],
    "transformer.moe.moe_layer.MoELayer.postprocess": ["self", "output", "shared_expert_output"],
    "transformer.moe.experts.SequentialMLP.forward": [
        "self", "permuted_local_hidden_states", "tokens_per_expert", "permuted_probs",
    ],
    "transformer.dot_product_attention.DotProductAttention.forward": [
        "self", "query", "key", "value", "attention_mask",
    ],
    "transformer.moe.router_replay.RouterReplay.get_replay_topk": [
        "self", "scores", "topk", "num_groups", "group_topk", "default_compute_topk",
    ],
    "models.gpt.gpt_model.GPTModel.forward": ["self", "input_ids", "position_ids", "attention_mask"],
    "models.gpt.gpt_model.GPTModel.set_input_tensor": ["self", "input_tensor"],
    "parallel_state.get_pipeline_model_parallel_group": ["check_initialized"],
    "tensor_parallel.random.CudaRNGStatesTracker.fork": ["self", "name"],
    "tensor_parallel.random._get_cuda_rng_state": ["device", "clone", "graph_safe"],
    "tensor_parallel.random._set_cuda_rng_state": ["new_state", "device", "graph_safe"],
    "models.common.embeddings.rotary_pos_embedding.get_pos_emb_on_this_cp_rank": [
        "pos_emb", "seq_dim", "cp_group",
    ],
    "tensor_parallel.gather_from_sequence_parallel_region": [
        "input_", "tensor_parallel_output_grad", "group",
    ],
    "tensor_parallel.reduce_from_tensor_model_parallel_region": ["input_", "group"],
    "tensor_parallel.vocab_parallel_cross_entropy": ["vocab_parallel_logits", "target"],
    "tensor_parallel.layers.set_tensor_model_parallel_attributes": [
        "tensor", "is_parallel", "dim", "stride",
    ],
    "transformer.transformer_block.TransformerBlockSubmodules": ["layer_specs", "layer_norm"],
    "transformer.torch_norm.WrappedTorchNorm": ["config", "hidden_size", "eps"],
    "distributed.finalize_model_grads.finalize_model_grads": ["model", "num_tokens"],
    "optimizer.get_megatron_optimizer": ["config", "model_chunks"],
    "optimizer.optimizer.ChainedOptimizer.prepare_grads": ["self"],
    "optimizer.optimizer.ChainedOptimizer.get_grad_norm": ["self"],
    "optimizer.optimizer.ChainedOptimizer.step": ["self"],
    "optimizer.optimizer.ChainedOptimizer.sharded_state_dict": [
        "self", "model_sharded_state_dict", "is_loading",
    ],
    "distributed.distributed_data_parallel.DistributedDataParallel.zero_grad_buffer": ["self"],
    "dist_checkpointing.save": ["sharded_state_dict", "checkpoint_dir"],
    "dist_checkpointing.load": ["sharded_state_dict", "checkpoint_dir"],
}  # fmt: skip


@pytest.mark.parametrize("name", SEAMS)
def test_a_seam_has_its_name_and_signature(name):
    parts = name.split(".")
    for cut in range(len(parts) - 1, 0, -1):
        try:
            found = importlib.import_module("megatron.core." + ".".join(parts[:cut]))
        except ModuleNotFoundError:
            continue
        for part in parts[cut:]:
            found = getattr(found, part)
        break
    given = list(inspect.signature(found).parameters)
    assert given[: len(SEAMS[name])] == SEAMS[name]


def test_the_installed_version_is_a_tested_one():
    assert importlib.metadata.version("megatron-core") in TESTED_VERSIONS
    check_version()


def test_an_untested_version_is_refused(monkeypatch):
    monkeypatch.setattr(host_module, "TESTED_VERSIONS", ("0.1.0",))
    with pytest.raises(InputError, match=r"tested with 0\.1\.0 alone"):
        check_version()


@pytest.fixture
def model() -> GPTModel:
    join_groups(TrainerParallelism(), CPU)
    with host(CPU), quiet():
        return build(SHAPE, Place(), transformer_config(SHAPE, Place(), torch.float32, CPU, {}), Seat(), CPU)


def test_every_layer_of_a_built_model_has_its_seams(model):
    for index, layer in enumerate(model.decoder.layers):
        assert type(layer.self_attention.core_attention) is GuidedAttention
        assert type(layer.mlp) is GuidedMoE
        norms = (layer.input_layernorm, layer.pre_mlp_layernorm, layer.self_attention.q_layernorm)
        assert {type(norm) for norm in (*norms, layer.self_attention.k_layernorm)} == {Norm}
        assert type(layer.mlp.experts) is GuidedExperts
        assert type(layer.mlp.router.router_replay) is RecordedRoutes
        assert layer.mlp.layer_number == layer.self_attention.core_attention.layer_number == index + 1
        seats = {id(m.seat) for m in (layer.self_attention.core_attention, layer.mlp, layer.mlp.experts)}
        assert len(seats) == 1
    assert type(model.decoder.final_layernorm) is Norm
    # The router is the layer's: a second way to its weight would train it twice.
    names = [name for name, _ in model.named_parameters()]
    assert len(names) == len(set(names))
    assert not any("experts.router" in name for name in names)


def test_a_layer_spec_with_other_classes_is_refused(monkeypatch):
    from tracerl.engines.megatron import layers

    monkeypatch.setattr(layers, "MoELayer", GuidedMoE)
    with pytest.raises(AssertionError, match="is tested"):
        block_spec(4, 1)


def test_every_argument_is_a_field_of_megatrons_configuration():
    config = transformer_config(SHAPE, Place(), torch.bfloat16, CPU, {"recompute_granularity": "selective"})
    assert config.params_dtype is torch.bfloat16
    assert config.moe_router_pre_softmax is False
    assert config.recompute_granularity == "selective"


def test_cuda_is_as_it_was_after_a_block():
    before = torch.cuda.current_device, torch.cuda.synchronize
    with host_optimizer(CPU):
        assert torch.cuda.current_device() == CPU
        assert torch.zeros(1, device="cuda").device == CPU
        assert torch.zeros(1).type() == "torch.cuda.FloatTensor"
    assert (torch.cuda.current_device, torch.cuda.synchronize) == before
    assert torch.zeros(1).type() == "torch.FloatTensor"
    with pytest.raises(KeyError), host(CPU):
        raise KeyError
    assert (torch.cuda.current_device, torch.cuda.synchronize) == before
