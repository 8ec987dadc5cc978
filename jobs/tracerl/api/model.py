"""Shape of a Qwen3-MoE model: what rules, site tables and engines need to know without loading weights."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from tracerl.api.errors import InputError

_COMPLETE = "use the configuration of a Qwen3-MoE model"
_MAX_SIZE = 2**24
"""Largest dimension: products of two stay far from what tensors' sizes can be."""
_HF_KEYS = {
    "layers": "num_hidden_layers",
    "hidden": "hidden_size",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "experts": "num_experts",
    "top_k": "num_experts_per_tok",
    "expert_hidden": "moe_intermediate_size",
    "vocab": "vocab_size",
    "context": "max_position_embeddings",
    "rms_eps": "rms_norm_eps",
    "tie_embeddings": "tie_word_embeddings",
}
"""Hugging Face's names of what is called otherwise here."""


class ModelShape(BaseModel):
    """Dimensions of a decoder-only mixture-of-experts transformer.

    `vocab` counts token ids, `context` tokens; `moe_layers` and `full_attention_layers` are sorted layer
    indices from 0. `expert_hidden` is the width between an expert's two matrices (F in gate_up [E, 2F, H]).
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    layers: int = Field(ge=1, le=1_024)
    hidden: int = Field(ge=1, le=_MAX_SIZE)
    heads: int = Field(ge=1, le=_MAX_SIZE)
    kv_heads: int = Field(ge=1, le=_MAX_SIZE)
    head_dim: int = Field(ge=2, le=_MAX_SIZE)
    experts: int = Field(ge=1, le=_MAX_SIZE)
    top_k: int = Field(ge=1, le=_MAX_SIZE)
    expert_hidden: int = Field(ge=1, le=_MAX_SIZE)
    vocab: int = Field(ge=2, le=_MAX_SIZE)
    context: int = Field(ge=2, le=_MAX_SIZE)
    moe_layers: tuple[int, ...]
    full_attention_layers: tuple[int, ...]
    rope_theta: float = Field(10_000.0, gt=0)
    rms_eps: float = Field(1e-6, gt=0)
    tie_embeddings: bool = False
    norm_topk_prob: bool = True

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.heads % self.kv_heads:
            raise ValueError(f"{self.heads} attention heads cannot share {self.kv_heads} KV heads evenly")
        if self.top_k > self.experts:
            raise ValueError(f"top-{self.top_k} of {self.experts} experts is not possible")
        if self.head_dim % 2:
            raise ValueError(f"head dimension {self.head_dim} is odd: rotary embedding pairs its halves")
        for name in ("moe_layers", "full_attention_layers"):
            indices: tuple[int, ...] = getattr(self, name)
            if list(indices) != sorted(set(indices)) or any(not 0 <= i < self.layers for i in indices):
                raise ValueError(f"{name} must be sorted layer indices from 0 to {self.layers - 1}")
        return self

    @classmethod
    def uniform(cls, layers: int, **dimensions: Any) -> ModelShape:
        """Make a shape whose layers all are MoE layers with full attention."""
        every = tuple(range(layers))
        return cls(layers=layers, moe_layers=every, full_attention_layers=every, **dimensions)

    @classmethod
    def from_hf_config(cls, config: Mapping[str, Any]) -> ModelShape:
        """Read Hugging Face's config.json of model type qwen3_moe; InputError says which key is wrong."""
        model_type = config.get("model_type")
        if model_type != "qwen3_moe":
            raise InputError(f"config.json has model_type {model_type!r}; use a model of type qwen3_moe")
        refused = {
            "attention_bias": config.get("attention_bias", False),
            "use_sliding_window": config.get("use_sliding_window", False),
        }
        for key, value in refused.items():
            if value:
                raise InputError(
                    f"config.json sets {key}, which this version does not compute; use a model without it"
                )
        if config.get("hidden_act", "silu") != "silu":
            raise InputError(f"config.json has hidden_act {config['hidden_act']!r}; use a model with silu")
        rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
        if not isinstance(rope, Mapping) or rope.get("rope_type", rope.get("type", "default")) != "default":
            raise InputError("config.json scales its rotary embedding; use a model with the default one")

        def read(key: str, *default: Any) -> Any:
            value = config.get(key, *default)
            if value is None:
                raise InputError(f"config.json lacks {key}; {_COMPLETE}")
            return value

        layers, heads, hidden = read("num_hidden_layers"), read("num_attention_heads"), read("hidden_size")
        step, dense = read("decoder_sparse_step", 1), read("mlp_only_layers", [])
        head_dim, theta = config.get("head_dim"), rope.get("rope_theta", config.get("rope_theta"))
        every = tuple(range(layers)) if isinstance(layers, int) and 0 < layers <= 1_024 else ()
        if not isinstance(step, int) or step < 1 or not isinstance(dense, list):
            raise InputError(f"config.json has a wrong decoder_sparse_step or mlp_only_layers; {_COMPLETE}")
        try:
            return cls(
                layers=layers,
                hidden=hidden,
                heads=heads,
                kv_heads=read("num_key_value_heads", heads),
                head_dim=hidden // heads if head_dim is None else head_dim,
                # transformers 5 writes num_local_experts, published checkpoints have num_experts.
                experts=read("num_experts", config.get("num_local_experts")),
                top_k=read("num_experts_per_tok"),
                expert_hidden=read("moe_intermediate_size"),
                vocab=read("vocab_size"),
                context=read("max_position_embeddings"),
                moe_layers=tuple(i for i in every if i not in dense and (i + 1) % step == 0),
                full_attention_layers=every,
                rope_theta=10_000.0 if theta is None else theta,
                rms_eps=read("rms_norm_eps", 1e-6),
                tie_embeddings=read("tie_word_embeddings", False),
                norm_topk_prob=read("norm_topk_prob", False),
            )
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(_HF_KEYS.get(str(part), str(part)) for part in first["loc"])
            raise InputError(f"config.json is wrong: {where} {first['msg']}; {_COMPLETE}") from None
        except (TypeError, ValueError, ZeroDivisionError) as error:
            raise InputError(f"config.json is wrong: {error}; {_COMPLETE}") from None

    def to_hf_config(self) -> dict[str, Any]:
        """Write Hugging Face's config.json keys of model type qwen3_moe."""
        return {
            "architectures": ["Qwen3MoeForCausalLM"],
            "model_type": "qwen3_moe",
            "num_hidden_layers": self.layers,
            "hidden_size": self.hidden,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "num_experts": self.experts,
            "num_experts_per_tok": self.top_k,
            "moe_intermediate_size": self.expert_hidden,
            # Width of dense layers, which a shape does not hold; read only where mlp_only_layers names one.
            "intermediate_size": self.expert_hidden * self.top_k,
            "vocab_size": self.vocab,
            "max_position_embeddings": self.context,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [i for i in range(self.layers) if i not in self.moe_layers],
            "rope_theta": self.rope_theta,
            "rms_norm_eps": self.rms_eps,
            "tie_word_embeddings": self.tie_embeddings,
            "norm_topk_prob": self.norm_topk_prob,
            "attention_bias": False,
            "hidden_act": "silu",
        }


BUILTIN_MODELS: dict[str, ModelShape] = {
    "tiny-moe": ModelShape.uniform(
        4,
        hidden=96,
        heads=6,
        kv_heads=2,
        head_dim=16,
        experts=8,
        top_k=2,
        expert_hidden=48,
        vocab=64,
        context=128,
    ),
    "tiny-moe-deep": ModelShape.uniform(
        16,
        hidden=128,
        heads=8,
        kv_heads=2,
        head_dim=16,
        experts=16,
        top_k=2,
        expert_hidden=64,
        vocab=64,
        context=128,
    ),
    "small-moe": ModelShape.uniform(
        8,
        hidden=256,
        heads=8,
        kv_heads=2,
        head_dim=32,
        experts=16,
        top_k=4,
        expert_hidden=128,
        vocab=64,
        context=128,
    ),
}
"""Models of `builtin://NAME`: initialised from the job's seed, with the character tokenizer of 64 symbols."""


_MAX_CONFIG_BYTES = 2**20


def model_shape(uri: str) -> ModelShape | None:
    """Read the shape behind a model URL; None where it is not on this machine (hf, s3, pvc) or no such name.

    `file://` is a directory with config.json. InputError says in one sentence what is wrong with it.
    """
    if uri.startswith("builtin://"):
        return BUILTIN_MODELS.get(uri.removeprefix("builtin://"))
    if not uri.startswith("file://"):
        return None
    return ModelShape.from_hf_config(read_config(file_path(uri)))


def file_path(uri: str) -> Path:
    """The path of a `file://` URL, as it stands: fsspec, which reads the others, takes no %20 for a space."""
    return Path(uri.removeprefix("file://"))


def read_config(place: Path) -> dict[str, Any]:
    """Read a config.json, or that of a directory; InputError says in one sentence what is wrong with it."""
    path = place if place.suffix == ".json" else place / "config.json"
    try:
        with path.open("rb") as file:
            data = file.read(_MAX_CONFIG_BYTES + 1)
        config = json.loads(data) if len(data) <= _MAX_CONFIG_BYTES else None
    except (OSError, ValueError, RecursionError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise InputError(
            f"{path} cannot be read ({reason}); give a directory that holds config.json"
        ) from None
    if not isinstance(config, dict):
        raise InputError(f"{path} is not a model configuration; give a directory that holds config.json")
    return config
