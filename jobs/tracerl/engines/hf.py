"""Hugging Face's names and files of a Qwen3-MoE model's weights, initial values from a seed, and checks.

Engines name weights this way wherever they leave them: exports, checkpoints, weight updates.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from tracerl.api.errors import InputError
from tracerl.api.model import ModelShape
from tracerl.api.resolved import write_atomically

INDEX_FILE = "model.safetensors.index.json"
WEIGHTS_FILE = "model.safetensors"


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


def check_names(sizes: Mapping[str, tuple[int, ...]], tensors: Mapping[str, Tensor], where: str) -> None:
    """Raise InputError unless `tensors` are named as all weights and nothing else; none of them is read.

    It names `where` and a tensor that is unknown or missing.
    """
    unknown = next((name for name in tensors if name not in sizes), None)
    if unknown is not None:
        raise InputError(
            f"{where}: the model of this config.json has no tensor {unknown}; use the config.json and the "
            "weights of one model"
        )
    missing = [name for name in sizes if name not in tensors]
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise InputError(f"{where}: tensor {missing[0]}{more} is missing; write all weights of the model")


def check_weights(sizes: Mapping[str, tuple[int, ...]], tensors: Mapping[str, Tensor], where: str) -> None:
    """Raise InputError unless `tensors` are all of the named weights and nothing else, in sizes and values.

    It names `where` and a tensor that is unknown, missing, of another shape, not of floating point or not
    finite.
    """
    check_names(sizes, tensors, where)
    for name, tensor in tensors.items():
        size = sizes[name]
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


def read_tensors(directory: Path) -> dict[str, Tensor]:
    """Read model.safetensors, or the shards that model.safetensors.index.json lists, by name.

    InputError names the file that is not there, cut short or damaged.
    """
    index = directory / INDEX_FILE
    paths = [directory / WEIGHTS_FILE]
    if index.exists():
        weight_map = _read_json(index).get("weight_map")
        if not isinstance(weight_map, dict) or not all(isinstance(f, str) for f in weight_map.values()):
            raise InputError(f"{index} has no weight_map of tensor names to files; download the model again")
        outside = next((f for f in weight_map.values() if Path(f).name != f), None)
        if outside is not None:
            raise InputError(f"{index} points outside its directory ({outside}); download the model again")
        paths = [directory / file for file in sorted(set(weight_map.values()))]
    tensors: dict[str, Tensor] = {}
    for path in paths:
        try:
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118 (not a mapping)
                    tensors[name] = file.get_tensor(name)
        except FileNotFoundError:
            raise InputError(f"{path} is not there; name a directory that has it") from None
        except (SafetensorError, OSError) as error:
            raise InputError(
                f"{path} cannot be read as safetensors ({error}); copy or download it again"
            ) from None
    return tensors


def write_model(directory: Path, shape: ModelShape, tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Write config.json and model.safetensors, each whole or not at all; make the directory when needed."""
    directory.mkdir(parents=True, exist_ok=True)
    config = shape.to_hf_config()
    named = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors}
    config["dtype"] = str(next(iter(named.values())).dtype).removeprefix("torch.")
    unfinished = directory / (WEIGHTS_FILE + ".tmp")
    save_file(named, unfinished, metadata={"format": "pt"})
    unfinished.replace(directory / WEIGHTS_FILE)
    write_atomically(directory / "config.json", json.dumps(config, indent=2) + "\n")


def _read_json(path: Path) -> dict[str, object]:
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise InputError(f"{path} is not there; name a directory that has it") from None
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(f"{path} cannot be read as JSON ({error}); copy or download it again") from None
    if not isinstance(document, dict):
        raise InputError(f"{path} holds no JSON object; copy or download it again")
    return document
