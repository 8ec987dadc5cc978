import copy
import json
from pathlib import Path
from typing import Any

import pytest

from tracerl.api.errors import InputError
from tracerl.api.model import BUILTIN_MODELS, ModelShape, model_shape

# config.json of Qwen/Qwen3-30B-A3B on Hugging Face, without what no shape needs.
QWEN3_30B_A3B: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "attention_bias": False,
    "decoder_sparse_step": 1,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "max_position_embeddings": 40960,
    "max_window_layers": 48,
    "mlp_only_layers": [],
    "model_type": "qwen3_moe",
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "num_attention_heads": 32,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000.0,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_sliding_window": False,
    "vocab_size": 151936,
}


def test_published_configuration() -> None:
    shape = ModelShape.from_hf_config(QWEN3_30B_A3B)
    assert shape == ModelShape.uniform(
        48,
        hidden=2048,
        heads=32,
        kv_heads=4,
        head_dim=128,
        experts=128,
        top_k=8,
        expert_hidden=768,
        vocab=151936,
        context=40960,
        rope_theta=1e6,
        rms_eps=1e-6,
        tie_embeddings=False,
        norm_topk_prob=True,
    )


@pytest.mark.parametrize("name", BUILTIN_MODELS)
def test_round_trip_and_transformers(name: str) -> None:
    """Our configuration means the same to transformers, and theirs to us."""
    transformers = pytest.importorskip("transformers")
    shape = BUILTIN_MODELS[name]
    assert ModelShape.from_hf_config(shape.to_hf_config()) == shape
    theirs = transformers.Qwen3MoeConfig(**shape.to_hf_config())
    assert (theirs.num_experts, theirs.num_experts_per_tok) == (shape.experts, shape.top_k)
    assert ModelShape.from_hf_config(theirs.to_dict()) == shape


def test_dense_layers() -> None:
    """As in transformers: a mixture where i is not listed and (i + 1) % decoder_sparse_step == 0."""
    config = {**QWEN3_30B_A3B, "num_hidden_layers": 6, "decoder_sparse_step": 2, "mlp_only_layers": [3]}
    shape = ModelShape.from_hf_config(config)
    assert shape.moe_layers == (1, 5)
    assert shape.full_attention_layers == (0, 1, 2, 3, 4, 5)
    assert ModelShape.from_hf_config({**shape.to_hf_config()}) == shape


@pytest.mark.parametrize(
    ("change", "fragment"),
    [
        ({"model_type": "llama"}, "model_type 'llama'"),
        ({"attention_bias": True}, "sets attention_bias"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, "rotary"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "rotary"),
        ({"num_experts": None}, "lacks num_experts"),
        ({"num_hidden_layers": "48"}, "layers"),
        ({"num_hidden_layers": -1}, "layers"),
        ({"num_hidden_layers": 10**12}, "layers"),
        ({"hidden_size": "x", "head_dim": None}, "is wrong"),
        ({"num_attention_heads": 0, "head_dim": None}, "is wrong"),
        ({"num_key_value_heads": 5}, "cannot share 5 KV heads"),
        ({"num_experts_per_tok": 200}, "top-200 of 128"),
        ({"head_dim": 63}, "is odd"),
        ({"rms_norm_eps": "small"}, "rms_norm_eps"),
        ({"rms_norm_eps": 0}, "rms_norm_eps"),
        ({"head_dim": 0}, "head_dim"),
        ({"head_dim": 128.0}, "head_dim"),
        ({"rope_theta": 0}, "rope_theta"),
        ({"rope_theta": "10000"}, "rope_theta"),
        ({"rope_theta": float("inf")}, "rope_theta"),
        ({"rope_parameters": {"rope_theta": 0}}, "rope_theta"),
        ({"hidden_size": 1e9}, "hidden_size"),
        ({"hidden_size": 10**30}, "hidden_size"),
        ({"vocab_size": True}, "vocab_size"),
        ({"decoder_sparse_step": 0}, "decoder_sparse_step"),
        ({"mlp_only_layers": 3}, "mlp_only_layers"),
    ],
)
def test_configuration_that_is_refused(change: dict[str, Any], fragment: str) -> None:
    with pytest.raises(InputError) as error:
        ModelShape.from_hf_config({**copy.deepcopy(QWEN3_30B_A3B), **change})
    assert fragment in str(error.value)
    assert "\n" not in str(error.value)


def test_model_that_is_not_here() -> None:
    assert model_shape("hf://Qwen/Qwen3-30B-A3B") is None
    assert model_shape("builtin://tiny-moe") is BUILTIN_MODELS["tiny-moe"]


@pytest.mark.parametrize("name", ["sp ace", "per%20cent"])
def test_the_path_of_a_file_url_is_taken_as_it_stands(tmp_path: Path, name: str) -> None:
    """As fsspec takes it, which reads the tokenizer from the same URL."""
    (tmp_path / name).mkdir()
    shape = BUILTIN_MODELS["tiny-moe"]
    (tmp_path / name / "config.json").write_text(json.dumps(shape.to_hf_config()))
    assert model_shape(f"file://{tmp_path}/{name}") is not None
