"""What SGLang is started with for a job, and what is refused because it could not be recorded rightly."""

from __future__ import annotations

import inspect
import json
import random
import socket
from collections.abc import Iterable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from tracerl.api.errors import InputError
from tracerl.api.job import DType, NumericsBackend, Spec
from tracerl.api.model import ModelShape
from tracerl.api.suggest import nearest

_SPARE_TOKENS = 16
"""SGLang keeps some tokens of its limits for itself."""
_CHUNK_TOKENS = 4_096
"""Longer prompts are prefilled in several passes."""

_PORTS = range(20_000, 30_000)
"""Where ports are looked for: below those that systems give to outgoing connections."""
_PORTS_BESIDE = (0, *range(1, 7), 13)
"""Those that SGLang uses with DP attention, beside the one that it is told."""

_REFUSED = {
    "speculative_algorithm": "rows of drafted tokens that are thrown away cannot be told from others",
    "enable_hierarchical_cache": "rows of keys and values that leave the device and come back are not kept",
    "enable_lmcache": "rows of keys and values that leave the device and come back are not kept",
    "disaggregation_mode": "prefill and decoding in two servers have their rows apart",
    "enable_dp_attention": "the job says it elsewhere: spec.rollout.parallelism.data",
    "dp_size": "whole models beside each other take no weights by broadcast; use spec.rollout.nodes",
    "nnodes": "a rollout is on one node",
    "pp_size": "the rows of one token would lie in several processes",
    "attn_cp_size": "the rows of one sequence would lie in several processes",
    "moe_a2a_backend": "experts would be given other rows than those that are recorded",
    "enable_two_batch_overlap": "it interleaves the rows of two batches",
    "enable_torch_compile": "hooks would be compiled away",
    "quantization": "the plugin quantises; write spec.quantization",
    "kv_cache_dtype": "the plugin quantises keys and values; write spec.quantization.targets",
    "enable_lora": "weights of adapters are not the trainer's",
    "rl_on_policy_target": "it changes what layers compute",
}
"""Engine arguments that records and weight updates do not go together with, and why."""


def engine_arguments(spec: Spec, shape: ModelShape, directory: Path) -> dict[str, Any]:
    """Give the arguments of SGLang's Engine; `directory` gets the model's config.json and nothing else.

    Weights come from the trainer, so SGLang starts with dummy ones. InputError names an argument of
    ``spec.rollout.engineArgs`` that is refused.
    """
    rollout = spec.rollout
    on_cpu = rollout.gpus_per_node == 0
    sizes = rollout.parallelism
    unit_tokens = rollout.kv_cache_tokens // sizes.data
    arguments: dict[str, Any] = {
        "model_path": str(directory),
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "dtype": "bfloat16" if spec.model.dtype is DType.BFLOAT16 else "float32",
        "device": "cpu" if on_cpu else "cuda",
        "disable_custom_all_reduce": on_cpu,
        "attention_backend": "torch_native" if on_cpu else "triton",
        "sampling_backend": "pytorch",
        # Hooks that quantise decide by values, which a graph cannot.
        "disable_cuda_graph": True,
        # SGLang's tensor-parallel size is that of the experts: attention has `data` units of these ranks.
        "tp_size": sizes.ranks,
        "attn_dp_size": sizes.data,
        "ep_size": sizes.expert,
        "max_total_tokens": unit_tokens + _SPARE_TOKENS,
        "max_running_requests": rollout.max_running_requests,
        # SGLang gives each unit its part of it.
        "chunked_prefill_size": sizes.data * min(_CHUNK_TOKENS, unit_tokens),
        "mem_fraction_static": 0.2 if on_cpu else 0.8,
        "enable_return_routed_experts": True,
        "sampling_defaults": "openai",
        "weight_version": "none",
        "random_seed": spec.algorithm.seed,
        "sleep_on_idle": True,
        "enable_metrics": True,
        "log_level": "warning",
    }
    if sizes.data > 1:
        # Else every server on this machine would want the same ports.
        arguments["dist_init_addr"] = f"127.0.0.1:{_free_port()}"
    if rollout.numerics is NumericsBackend.NATIVE:
        arguments |= _NATIVE
    own = arguments.keys() - {"mem_fraction_static", "chunked_prefill_size", "attention_backend", "log_level"}
    for name in rollout.engine_args:
        why = _REFUSED.get(name) or ("the job says it elsewhere" if name in own else None)
        if why is not None:
            raise InputError(f"spec.rollout.engineArgs.{name} cannot be given with SGLang: {why}; remove it")
    _check_names(rollout.engine_args)
    write_config(shape, directory, arguments["dtype"])
    return arguments | rollout.engine_args


_NATIVE: dict[str, Any] = {
    "disable_cuda_graph": False,
    "attention_backend": "trtllm_mha",
    "quantization": "modelopt_fp4",
    "kv_cache_dtype": "nvfp4",
    # A prefill that attends an FP8 copy of the cache would have its own keys and values in BF16.
    "prefill_kv_cache_dequant_dtype": "nvfp4",
    "moe_runner_backend": "flashinfer_trtllm",
}
"""What the Native back end changes. Not run: it needs Blackwell."""


def _check_names(names: Iterable[str]) -> None:
    from sglang.srt.server_args import ServerArgs  # noqa: PLC0415

    known = inspect.signature(ServerArgs).parameters
    for name in names:
        if name not in known:
            near = nearest(name, known)
            remedy = "remove it" if near is None else f"write {near}"
            raise InputError(f"spec.rollout.engineArgs.{name} is no argument of SGLang's; {remedy}")


def _free_port() -> int:
    """Find a port that is free together with those that SGLang takes beside it."""
    for first in random.sample(_PORTS, 100):
        with ExitStack() as taken, suppress(OSError):
            for beside in _PORTS_BESIDE:
                taken.enter_context(socket.socket()).bind(("127.0.0.1", first + beside))
            return first
    raise InputError("no port from 20000 to 30000 is free on this machine; end what uses them")


def write_config(shape: ModelShape, directory: Path, dtype: str) -> None:
    """Write the config.json that SGLang reads; no token ends a sequence but those that a request names."""
    config = shape.to_hf_config() | {
        "dtype": dtype,
        "bos_token_id": None,
        "eos_token_id": None,
        "max_position_embeddings": shape.context + _SPARE_TOKENS,
    }
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")
