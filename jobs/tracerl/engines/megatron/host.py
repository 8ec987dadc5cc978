"""The machine under Megatron-Core: tested versions, process groups, and answers where CUDA is missing.

Megatron-Core is written for GPUs. On a CPU its modules compute the same, once a few functions of CUDA that
it calls for bookkeeping have an answer: `host` gives them one for the time of a call and takes it back.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import logging
import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.common.embeddings import rotary_pos_embedding
from megatron.core.tensor_parallel import random as megatron_random
from megatron.core.transformer.moe import moe_utils
from torch.distributed import HashStore  # type: ignore[attr-defined]
from torch.overrides import TorchFunctionMode

from tracerl.api.errors import InputError
from tracerl.api.job import TrainerParallelism
from tracerl.engines.base import GROUP_BACKENDS
from tracerl.engines.megatron.slicing import Place, context_chunks

TESTED_VERSIONS = ("0.16.1", "0.19.2")

# Without Transformer Engine 0.16.1 reads this name in the router, which only its import would have bound.
if not hasattr(moe_utils, "te_general_gemm"):
    moe_utils.te_general_gemm = None


def check_version() -> None:
    """Raise InputError unless the installed Megatron-Core is one whose seams are tested."""
    found = importlib.metadata.version("megatron-core")
    if found not in TESTED_VERSIONS:
        raise InputError(
            f"megatron-core {found} is installed, but the Megatron trainer is tested with "
            f"{' and '.join(TESTED_VERSIONS)} alone; install one of them (make engines)"
        )


def join_groups(parallelism: TrainerParallelism, device: torch.device) -> Place:
    """Make Megatron's process groups over the processes that have met, or over this one alone.

    Returns this rank's place. InputError when the sizes do not multiply to the number of processes, or
    groups of other sizes exist already.
    """
    if not dist.is_initialized():
        backend = GROUP_BACKENDS[device.type]
        dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1)
    if parallelism.ranks != dist.get_world_size():
        raise InputError(
            f"spec.trainer.parallelism asks for {parallelism.ranks} processes (tensor x pipeline x "
            f"context x data), but {dist.get_world_size()} have met; start as many"
        )
    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=parallelism.tensor,
            pipeline_model_parallel_size=parallelism.pipeline,
            context_parallel_size=parallelism.context,
            expert_model_parallel_size=parallelism.expert,
            expert_tensor_parallel_size=1,
            create_gloo_process_groups=False,  # for a distributed optimizer's state, on GPUs
        )
        if device.type == "cuda":
            # Attention asks for the state of these random numbers, though no dropout draws any.
            megatron_random.model_parallel_cuda_manual_seed(0)
    place = Place(
        tensor=parallel_state.get_tensor_model_parallel_world_size(),
        tensor_rank=parallel_state.get_tensor_model_parallel_rank(),
        context=parallel_state.get_context_parallel_world_size(),
        context_rank=parallel_state.get_context_parallel_rank(),
        pipeline=parallel_state.get_pipeline_model_parallel_world_size(),
        pipeline_rank=parallel_state.get_pipeline_model_parallel_rank(),
        expert=parallel_state.get_expert_model_parallel_world_size(),
        expert_rank=parallel_state.get_expert_model_parallel_rank(),
    )
    asked = (parallelism.tensor, parallelism.context, parallelism.pipeline, parallelism.expert)
    if (place.tensor, place.context, place.pipeline, place.expert) != asked:
        raise InputError(
            "this process already has Megatron groups of other sizes; start the trainer in a process of its "
            "own"
        )
    return place


def join_unit(parallelism: TrainerParallelism) -> dist.ProcessGroup | None:
    """Group of the ranks that do every pass together; None where each computes alone.

    Those that hold parts of one model and, where experts are apart, all that share experts with one of them.
    """
    model = parallelism.tensor * parallelism.context
    size = math.lcm(model, parallelism.expert)
    stage = model * parallelism.data
    if size * parallelism.pipeline == 1:
        return None
    found: dist.ProcessGroup | None = None
    for first in range(0, stage, size):
        ranks = [
            offset + rank
            for offset in range(0, stage * parallelism.pipeline, stage)
            for rank in range(first, first + size)
        ]
        # All processes make all groups, as torch demands.
        group = dist.new_group(ranks)
        if dist.get_rank() in ranks:
            assert isinstance(group, dist.ProcessGroup)
            found = group
    return found


@contextlib.contextmanager
def host(device: torch.device) -> Iterator[None]:
    """Let Megatron-Core compute on this device for the time of the block; nothing to do on a GPU."""
    if device.type == "cuda":
        yield
        return
    with contextlib.ExitStack() as stack:
        # Where there is a GPU too, the compiler would ask CUDA for it and get the CPU.
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        for owner, name, value in _ANSWERS:
            stack.enter_context(_replaced(owner, name, value))
        yield


@contextlib.contextmanager
def host_optimizer(device: torch.device) -> Iterator[None]:
    """`host` for the optimizer, which besides names CUDA where it makes tensors and asks for their type."""
    with host(device), contextlib.nullcontext() if device.type == "cuda" else _NamedOnHost():
        yield


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Keep back what Megatron says while it builds: advice to install faster kernels, and of subclasses."""
    logger = logging.getLogger("megatron")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", category=UserWarning, module="megatron")
            yield
    finally:
        logger.setLevel(level)


@contextlib.contextmanager
def _replaced(owner: Any, name: str, value: object) -> Iterator[None]:
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


@contextlib.contextmanager
def _no_fork(_tracker: object, _name: str | None = None) -> Iterator[None]:
    """Random numbers apart for each rank: nothing here draws any, as dropout is 0."""
    yield


def _nothing_to_keep(*_: object, **__: object) -> torch.Tensor:
    return torch.empty(0)


def _rotation_here(angles: torch.Tensor, axis: int, group: dist.ProcessGroup) -> torch.Tensor:
    """Rotation angles of the positions that a context-parallel rank holds."""
    chunks = torch.tensor(context_chunks(group.rank(), group.size()))
    positions = torch.arange(angles.shape[axis]).view(2 * group.size(), -1)
    return angles.index_select(axis, positions[chunks].flatten())


_ANSWERS: tuple[tuple[Any, str, object], ...] = (
    (torch.cuda, "current_device", lambda: torch.device("cpu")),
    (torch.cuda, "current_stream", lambda *_: None),
    (torch.cuda, "synchronize", lambda *_: None),
    (megatron_random.CudaRNGStatesTracker, "fork", _no_fork),
    (rotary_pos_embedding, "get_pos_emb_on_this_cp_rank", _rotation_here),
    # Activation recompute keeps and restores the state of CUDA's random numbers.
    (megatron_random, "_get_cuda_rng_state", _nothing_to_keep),
    (megatron_random, "_set_cuda_rng_state", _nothing_to_keep),
)


class _NamedOnHost(TorchFunctionMode):
    """Reads device "cuda" as the CPU, where tensors stay, with the names that their types have on a GPU."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run one function of torch."""
        kwargs = dict(kwargs or {})
        if kwargs.get("device") == "cuda":
            kwargs["device"] = "cpu"
        if func is torch.Tensor.cuda:
            return args[0]
        result = func(*args, **kwargs)
        if func is torch.Tensor.type and isinstance(result, str):
            return result.replace("torch.", "torch.cuda.")
        return result
