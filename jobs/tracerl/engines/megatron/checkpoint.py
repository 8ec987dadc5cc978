"""Megatron's distributed checkpoint: every rank writes its own shard of weights and optimizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megatron.core import dist_checkpointing, parallel_state
from megatron.core.models.gpt import GPTModel

from tracerl.api.errors import InputError


def save(directory: Path, model: GPTModel, optimizer: Any, updates: int) -> None:
    """Write model, optimizer and number of updates; all ranks call this together."""
    directory.mkdir(parents=True, exist_ok=True)
    common = {"updates": updates, "expert": parallel_state.get_expert_model_parallel_world_size()}
    dist_checkpointing.save(_sharded(model, optimizer, loading=False) | common, str(directory))


def load(directory: Path, model: GPTModel, optimizer: Any) -> int:
    """Read what `save` wrote into model and optimizer and return the number of updates.

    InputError when it is of another expert parallelism: experts apart have an optimizer of their own.
    """
    expert = parallel_state.get_expert_model_parallel_world_size()
    common = dist_checkpointing.load_common_state_dict(str(directory))
    if common["expert"] != expert:
        raise InputError(
            f"{directory} is of spec.trainer.parallelism.expert {common['expert']}, not {expert}; go on with "
            "that one, or from a checkpoint of the loop"
        )
    found = dist_checkpointing.load(_sharded(model, optimizer, loading=True), str(directory))
    model.load_state_dict(found["model"])
    optimizer.load_state_dict(found["optimizer"])
    return int(common["updates"])


def _sharded(model: GPTModel, optimizer: Any, *, loading: bool) -> dict[str, Any]:
    metadata = {
        "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
        "chained_optim_avoid_prefix": True,
    }
    weights = model.sharded_state_dict(metadata=metadata)
    state = optimizer.sharded_state_dict(weights, is_loading=loading, metadata=metadata)
    return {"model": weights, "optimizer": state}
