"""The process group over which a trainer broadcasts weights to rollouts: rank 0 sends, rollouts receive.

It stands beside the process's default group, since trainer and rollout do not start together. Store keys are
laid out as SGLang's `init_custom_process_group` lays them out, so the other side may be an SGLang server.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch.distributed import PrefixStore, ProcessGroupGloo, TCPStore  # type: ignore[attr-defined]

DTYPES: dict[str, torch.dtype] = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
}
"""Names of tensor types in `/update_weights_from_distributed`."""


def dtype_name(dtype: torch.dtype) -> str:
    """Name of a tensor type as DTYPES spells it."""
    return str(dtype).removeprefix("torch.")


class WeightGroup:
    """One member of a weight group; methods block, and raise RuntimeError when a peer is gone or too slow."""

    def __init__(
        self, address: str, port: int, *, rank: int, world_size: int, name: str, timeout_seconds: float
    ) -> None:
        """Reach rank 0's store; rank 0 itself listens on `port` (0 takes a free one, see the attribute).

        Groups of one process may share a port: their names keep them apart.
        """
        timeout = timedelta(seconds=timeout_seconds)
        # Rank 0 need not wait until its own name is known.
        host = "127.0.0.1" if rank == 0 else address
        self._store = TCPStore(
            host, port, world_size, rank == 0, timeout, wait_for_workers=False, multi_tenant=rank == 0
        )
        self.port: int = self._store.port
        self.rank, self.world_size, self.name = rank, world_size, name
        self._timeout = timeout
        self._group: Any = None

    def join(self) -> None:
        """Wait until every member has joined."""
        store = PrefixStore("cpu/", PrefixStore(f"{self.name}/", PrefixStore(self.name, self._store)))
        self._group = ProcessGroupGloo(store, self.rank, self.world_size, self._timeout)

    def broadcast(self, tensor: Tensor) -> None:
        """Send (rank 0) or fill in place (others) one contiguous CPU tensor."""
        if self._group is None:
            raise RuntimeError("join the weight group before broadcasting")
        self._group.broadcast(tensor, 0).wait()
