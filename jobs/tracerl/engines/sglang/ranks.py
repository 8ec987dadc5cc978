"""What the ranks of one engine have to decide alike.

Every rank runs a scheduler of its own. Tensor-parallel ranks have the same requests: should one of them admit
or refuse what another does not, both wait for each other for ever. With DP attention there are several units
of such ranks, of other requests each; weights are those of all. All who are concerned call at the same point.
"""

from __future__ import annotations

from typing import Any

import torch

_PROBLEM_BYTES = 1_000


def any_rank(flag: bool) -> bool:
    """Tell whether the flag is set on some rank of those that have the same requests."""
    group = _parallel().attn_tp_group
    if group.world_size == 1:
        return flag
    flags = torch.tensor([flag], dtype=torch.int32)
    torch.distributed.all_reduce(flags, torch.distributed.ReduceOp.MAX, group=group.cpu_group)
    return bool(flags.item())


def first_problem(problem: str | None) -> str | None:
    """Give the problem of the first of all ranks that has one, at most 1,000 bytes of it."""
    group = _parallel().tp_group
    if group.world_size == 1:
        return problem
    text = (problem or "").encode()[:_PROBLEM_BYTES]
    own = torch.tensor([*text.ljust(_PROBLEM_BYTES, b"\0")], dtype=torch.uint8)
    of_all = [torch.empty_like(own) for _ in range(group.world_size)]
    torch.distributed.all_gather(of_all, own, group=group.cpu_group)
    texts = [bytes(one.tolist()).rstrip(b"\0").decode(errors="ignore") for one in of_all]
    return next(filter(None, texts), None)


def _parallel() -> Any:
    from sglang.srt.runtime_context import get_parallel  # noqa: PLC0415

    return get_parallel()
