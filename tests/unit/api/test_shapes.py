"""Shapes for planning: published configurations, also of models that no engine here computes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tracerl.api.errors import InputError
from tracerl.api.model import BUILTIN_MODELS
from tracerl.api.shapes import KNOWN_MODELS, planning_shape, shape_of_config

# config.json of Qwen/Qwen3.5-35B-A3B on Hugging Face, without what no shape needs.
QWEN35_35B_A3B: dict[str, Any] = {
    "architectures": ["Qwen3_5MoeForConditionalGeneration"],
    "model_type": "qwen3_5_moe",
    "text_config": {
        "model_type": "qwen3_5_moe_text",
        "full_attention_interval": 4,
        "head_dim": 256,
        "hidden_size": 2048,
        "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 10,
        "max_position_embeddings": 262_144,
        "moe_intermediate_size": 512,
        "num_attention_heads": 16,
        "num_experts": 256,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 40,
        "num_key_value_heads": 2,
        "vocab_size": 248_320,
    },
    "vision_config": {"hidden_size": 1152, "num_heads": 16},
}
TEXT: dict[str, Any] = QWEN35_35B_A3B["text_config"]


def test_a_multimodal_hybrid() -> None:
    shape = shape_of_config(QWEN35_35B_A3B)
    assert shape == KNOWN_MODELS["Qwen/Qwen3.5-35B-A3B"]
    assert shape.full_attention_layers == (3, 7, 11, 15, 19, 23, 27, 31, 35, 39)
    assert shape_of_config({k: v for k, v in TEXT.items() if k != "layer_types"}) == shape


@pytest.mark.parametrize(
    ("family", "known"),
    [("qwen3_5_moe_text", "Qwen/Qwen3.5-35B-A3B"), ("qwen3_next", "Qwen/Qwen3-Next-80B-A3B-Instruct")],
)
def test_what_transformers_writes(family: str, known: str) -> None:
    """The defaults of these families are the published model's, but for the context."""
    transformers = pytest.importorskip("transformers")
    config = {**transformers.AutoConfig.for_model(family).to_dict(), "max_position_embeddings": 262_144}
    assert shape_of_config(config) == KNOWN_MODELS[known]


@pytest.mark.parametrize("name", BUILTIN_MODELS)
def test_builtin_models(name: str) -> None:
    assert planning_shape(f"builtin://{name}") == BUILTIN_MODELS[name]
    shape = shape_of_config(BUILTIN_MODELS[name].to_hf_config())
    assert shape == BUILTIN_MODELS[name]


@pytest.mark.parametrize(
    "uri", ["hf://Qwen/Qwen3.5-35B-A3B", "hf://qwen/qwen3.5-35b-a3b@main", "Qwen/Qwen3.5-35B-A3B"]
)
def test_known_models(uri: str) -> None:
    assert planning_shape(uri).layers == 40


def test_a_file_and_a_directory(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(QWEN35_35B_A3B), encoding="utf-8")
    for place in (str(file), str(tmp_path), f"file://{tmp_path}"):
        assert planning_shape(place) == KNOWN_MODELS["Qwen/Qwen3.5-35B-A3B"]


@pytest.mark.parametrize(
    ("uri", "sentence"),
    [
        ("hf://Qwen/Qwen3.5-35B-A3", "did you mean Qwen/Qwen3.5-35B-A3B?"),
        ("s3://models/mine", "give the model's config.json with --model PATH"),
        ("builtin://huge", "write one of tiny-moe"),
        ("file:///nowhere", "/nowhere/config.json cannot be read"),
    ],
)
def test_unknown_models(uri: str, sentence: str) -> None:
    with pytest.raises(InputError, match=sentence.replace("?", r"\?")):
        planning_shape(uri)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"model_type": "deepseek_v3"}, "model_type 'deepseek_v3', whose records are not known"),
        ({"num_experts": None}, "lacks num_experts"),
        ({"hidden_size": "2048"}, "hidden_size '2048', which is not a positive whole number"),
        ({"hidden_size": True}, "hidden_size True"),
        ({"num_hidden_layers": 10**9}, "at most 1024"),
        ({"layer_types": ["full_attention"]}, "do not name 40 layers"),
        ({"layer_types": ["mamba"] * 40}, r"layer_types\[0\] 'mamba'"),
        ({"layer_types": None, "full_attention_interval": 0}, "lacks layer_types or full_attention_interval"),
        ({"head_dim": None}, "lacks head_dim"),
        ({"num_key_value_heads": 3}, "cannot share 3 KV heads"),
        ({"decoder_sparse_step": "2"}, "wrong decoder_sparse_step"),
    ],
)
def test_wrong_configurations(change: dict[str, Any], sentence: str) -> None:
    with pytest.raises(InputError, match=sentence):
        shape_of_config({**TEXT, **change})
