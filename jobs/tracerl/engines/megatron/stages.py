"""Pipeline stages: what ranks that hold the layers of a model one after the other send each other.

A micro-batch goes through the stages in pieces, so that a stage computes one while others compute those
before and behind it: all pieces forward, then the loss of all of them, then all backward in the reverse order
(GPipe). With p stages and n equal pieces a stage waits for (p - 1) / (n + p - 1) of the time. Shapes are not
sent: every stage knows them. Sends are waited for at the end of a pass, by `settle`.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

PIECES_A_STAGE = 4
"""At most: a stage waits for less than a fifth of the time, and more would make matrices smaller."""


class Stages:
    """The stages of a pipeline, seen from this rank's."""

    def __init__(self, stages: int) -> None:
        """`stages` is their number, of Megatron's group."""
        self._group = parallel_state.get_pipeline_model_parallel_group() if stages > 1 else None
        here = dist.get_rank()
        self._ranks = [here] if self._group is None else dist.get_process_group_ranks(self._group)
        self._own = self._ranks.index(here)
        self._sent: list[tuple[Any, Tensor]] = []

    @property
    def first(self) -> bool:
        """Whether tokens come in here."""
        return self._own == 0

    @property
    def last(self) -> bool:
        """Whether log-probs come out here."""
        return self._own == len(self._ranks) - 1

    def pieces(self, trajectories: int) -> int:
        """How many pieces a micro-batch of so many trajectories goes through in."""
        return 1 if self._group is None else max(1, min(trajectories, PIECES_A_STAGE * len(self._ranks)))

    def send(self, tensor: Tensor, *, onward: bool) -> None:
        """Send hidden states onward to the next stage, or their gradient back to the one before."""
        tensor = tensor.detach().contiguous()
        self._sent.append((dist.isend(tensor, self._neighbour(onward), group=self._group), tensor))

    def receive(self, like: Tensor, *, onward: bool) -> Tensor:
        """Receive what the stage before sent onward, or the next sent back, in their order; as `like` is."""
        found = torch.empty_like(like, memory_format=torch.contiguous_format)
        dist.recv(found, self._neighbour(not onward), group=self._group)
        return found

    def settle(self) -> None:
        """Wait until all that was sent has come."""
        for work, _ in self._sent:
            work.wait()
        self._sent.clear()

    def share(self, tensor: Tensor) -> Tensor:
        """Give all stages the last one's tensor, for which the others bring one of its shape."""
        if self._group is not None:
            dist.broadcast(tensor, self._ranks[-1], group=self._group)
        return tensor

    def _neighbour(self, onward: bool) -> int:
        return self._ranks[self._own + (1 if onward else -1)]
