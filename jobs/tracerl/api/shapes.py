"""Shapes of models for planning: also of those that no engine here computes, such as hybrids of attentions.

What a job records follows from a shape alone, so `tracerl plan` needs a config.json and no weights. The table
below repeats what published config.json files say; nothing in it is derived or guessed.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from tracerl.api.errors import InputError
from tracerl.api.model import BUILTIN_MODELS, ModelShape, file_path, read_config
from tracerl.api.suggest import nearest

_MAX_LAYERS = 1_024
_FAMILIES = ("qwen3_moe", "qwen3_next", "qwen3_5_moe", "qwen3_5_moe_text", "qwen4_exp", "qwen4_exp_text")
_LAYER_TYPES = {"full_attention": True, "indexed_attention": True, "linear_attention": False}
"""Whether a layer of a type caches keys and values."""


def _hybrid(layers: int, *, interval: int = 4, **dimensions: Any) -> ModelShape:
    """All layers are mixtures of experts, every `interval`-th has full attention, the others linear."""
    return ModelShape(
        layers=layers,
        moe_layers=tuple(range(layers)),
        full_attention_layers=tuple(range(interval - 1, layers, interval)),
        **dimensions,
    )


KNOWN_MODELS: dict[str, ModelShape] = {
    "Qwen/Qwen3-30B-A3B": ModelShape.uniform(
        48,
        hidden=2048,
        heads=32,
        kv_heads=4,
        head_dim=128,
        experts=128,
        top_k=8,
        expert_hidden=768,
        vocab=151_936,
        context=40_960,
    ),
    "Qwen/Qwen3-235B-A22B": ModelShape.uniform(
        94,
        hidden=4096,
        heads=64,
        kv_heads=4,
        head_dim=128,
        experts=128,
        top_k=8,
        expert_hidden=1536,
        vocab=151_936,
        context=40_960,
    ),
    "Qwen/Qwen3-Next-80B-A3B-Instruct": _hybrid(
        48,
        hidden=2048,
        heads=16,
        kv_heads=2,
        head_dim=256,
        experts=512,
        top_k=10,
        expert_hidden=512,
        vocab=151_936,
        context=262_144,
    ),
    "Qwen/Qwen3.5-35B-A3B": _hybrid(
        40,
        hidden=2048,
        heads=16,
        kv_heads=2,
        head_dim=256,
        experts=256,
        top_k=8,
        expert_hidden=512,
        vocab=248_320,
        context=262_144,
    ),
    "Qwen/Qwen3.5-122B-A10B": _hybrid(
        48,
        hidden=3072,
        heads=32,
        kv_heads=2,
        head_dim=256,
        experts=256,
        top_k=8,
        expert_hidden=1024,
        vocab=248_320,
        context=262_144,
    ),
    "Qwen/Qwen3.5-397B-A17B": _hybrid(
        60,
        hidden=4096,
        heads=32,
        kv_heads=2,
        head_dim=256,
        experts=512,
        top_k=10,
        expert_hidden=1024,
        vocab=248_320,
        context=262_144,
    ),
    "Qwen/Qwen3.8-Flash-Next": _hybrid(
        48,
        hidden=2560,
        heads=24,
        kv_heads=2,
        head_dim=256,
        experts=512,
        top_k=10,
        expert_hidden=640,
        vocab=248_320,
        context=262_144,
    ),
    "Qwen/Qwen3.8-2.4T-A95B": _hybrid(
        92,
        hidden=8192,
        heads=64,
        kv_heads=4,
        head_dim=256,
        experts=512,
        top_k=10,
        expert_hidden=2048,
        vocab=248_320,
        context=262_144,
    ),
}
"""Shapes by Hugging Face repository."""


def planning_shape(uri: str) -> ModelShape:
    """Find the shape of a job's model by its URL, or of a config.json or a repository by a plain name.

    ``builtin://`` and ``hf://`` names are looked up, ``file://`` and paths are read: a config.json or a
    directory that holds one. InputError says how to give the shape where it is not known here.
    """
    if uri.startswith("builtin://"):
        shape = BUILTIN_MODELS.get(uri.removeprefix("builtin://"))
        if shape is None:
            raise InputError(f"{uri} is not a model; write one of {', '.join(BUILTIN_MODELS)}")
        return shape
    if uri.startswith("file://"):
        return shape_of_config(read_config(file_path(uri)))
    name = uri.removeprefix("hf://").partition("@")[0]
    found = {known.lower(): shape for known, shape in KNOWN_MODELS.items()}.get(name.lower())
    if found is not None:
        return found
    if "://" not in uri and Path(uri).exists():
        return shape_of_config(read_config(Path(uri)))
    close = nearest(name, KNOWN_MODELS)
    meant = f"did you mean {close}? Else " if close is not None else ""
    raise InputError(
        f"the shape of {uri[:200]} is not known here; {meant}give the model's config.json with --model PATH, "
        f"or one of {', '.join(KNOWN_MODELS)}"
    )


def shape_of_config(config: Mapping[str, Any]) -> ModelShape:
    """Read the shape from what Hugging Face's config.json says; InputError names the key that is wrong.

    Multimodal models hold the text model's keys under ``text_config``. Layers with linear attention have no
    keys and values to record. What does not change a record (rotary embedding, sharing of embeddings, …) is
    left at its default.
    """
    text = config.get("text_config", config)
    if not isinstance(text, Mapping):
        raise InputError("config.json has a text_config that is not a mapping; give a model's config.json")
    family = text.get("model_type", config.get("model_type"))
    if family not in _FAMILIES:
        raise InputError(
            f"config.json has model_type {family!r}, whose records are not known; use a model of type "
            f"{', '.join(_FAMILIES)}"
        )

    def read(key: str, *others: str) -> int:
        for name in (key, *others):
            value = text.get(name)
            if isinstance(value, int) and not isinstance(value, bool) and value > 0:
                return value
            if value is not None:
                raise InputError(f"config.json has {name} {value!r}, which is not a positive whole number")
        raise InputError(f"config.json lacks {key}; use the configuration of a mixture-of-experts model")

    uniform = family == "qwen3_moe"
    layers, heads, hidden = read("num_hidden_layers"), read("num_attention_heads"), read("hidden_size")
    if layers > _MAX_LAYERS:
        raise InputError(f"config.json has num_hidden_layers {layers}; a model has at most {_MAX_LAYERS}")
    step = text.get("decoder_sparse_step", 1)
    dense = text.get("mlp_only_layers") or []
    if not isinstance(step, int) or step < 1 or not isinstance(dense, list):
        raise InputError("config.json has a wrong decoder_sparse_step or mlp_only_layers; correct it")
    try:
        return ModelShape(
            layers=layers,
            hidden=hidden,
            heads=heads,
            kv_heads=read("num_key_value_heads"),
            head_dim=hidden // heads if uniform and text.get("head_dim") is None else read("head_dim"),
            # transformers 5 writes num_local_experts for some families.
            experts=read("num_experts", "num_local_experts"),
            top_k=read("num_experts_per_tok"),
            expert_hidden=read("moe_intermediate_size"),
            vocab=read("vocab_size"),
            context=read("max_position_embeddings"),
            moe_layers=tuple(i for i in range(layers) if i not in dense and (i + 1) % step == 0),
            full_attention_layers=_with_cache(text, layers, uniform=uniform),
        )
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "the configuration"
        raise InputError(f"config.json is wrong: {where}: {first['msg']}; correct it") from None


def _with_cache(text: Mapping[str, Any], layers: int, *, uniform: bool) -> tuple[int, ...]:
    kinds = text.get("layer_types")
    if kinds is None:
        # Without a list, every n-th layer has full attention; Qwen3-MoE has it everywhere.
        interval = 1 if uniform else text.get("full_attention_interval")
        if not isinstance(interval, int) or isinstance(interval, bool) or interval < 1:
            raise InputError("config.json lacks layer_types or full_attention_interval; add one of them")
        return tuple(range(interval - 1, layers, interval))
    if not isinstance(kinds, list) or len(kinds) != layers:
        raise InputError(f"config.json has layer_types that do not name {layers} layers; correct it")
    for index, kind in enumerate(kinds):
        if not isinstance(kind, str) or kind not in _LAYER_TYPES:
            raise InputError(
                f"config.json has layer_types[{index}] {kind!r}, whose records are not known; this version "
                f"knows {', '.join(_LAYER_TYPES)}"
            )
    return tuple(index for index, kind in enumerate(kinds) if _LAYER_TYPES[kind])
