"""Dealing: which rank of a trainer trains on which trajectory of a micro-batch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from tracerl.api.job import TrainerParallelism


def units_of(parallelism: TrainerParallelism) -> list[int]:
    """Number of the unit that each rank belongs to, by rank.

    The ranks of a unit have the same trajectories: they are one data-parallel rank's tensor, context and
    pipeline parallel ones. Tensor ranks are next to each other, then those of context, data and pipeline.
    """
    inner, data = parallelism.tensor * parallelism.context, parallelism.data
    return [rank // inner % data for rank in range(inner * data * parallelism.pipeline)]


def deal(homes: Sequence[str | None], nodes: Sequence[str | None], lengths: Sequence[int]) -> list[list[int]]:
    """Deal trajectories out over units of ranks; returns each unit's, in their order in the micro-batch.

    `homes` are the nodes that hold each trajectory's records (None: no matter which), `nodes` those of the
    units, `lengths` the trajectories' tokens. Numbers of trajectories differ by 1 at most between units; as
    many as that allows are on a unit of their home; then tokens are even, as far as dealing the longest first
    makes them so. The same arguments give the same deal.
    """
    base, extra = divmod(len(homes), len(nodes))
    at_home = Counter(homes)
    ranks_of = Counter(nodes)
    # Some ranks take one more: those of nodes where more trajectories are at home than fit otherwise.
    more: Counter[str | None] = Counter()
    for node, ranks in ranks_of.items():
        if node is not None:
            more[node] = min(extra - more.total(), ranks, max(0, at_home[node] - base * ranks))
    for node, ranks in ranks_of.items():
        more[node] += min(extra - more.total(), ranks - more[node])

    dealt: list[list[int]] = [[] for _ in nodes]
    tokens = [0] * len(nodes)

    def give(index: int, ranks: Sequence[int]) -> bool:
        """Give a trajectory to the rank with the fewest tokens that may take it."""
        free = [r for r in ranks if len(dealt[r]) < base or (len(dealt[r]) == base and more[nodes[r]])]
        if not free:
            return False
        rank = min(free, key=lambda r: (tokens[r], len(dealt[r]), r))
        more[nodes[rank]] -= len(dealt[rank]) == base
        dealt[rank].append(index)
        tokens[rank] += lengths[index]
        return True

    # The longest first: they stay, and those that have to leave their home have the fewest records.
    longest = sorted(range(len(homes)), key=lambda index: (-lengths[index], index))
    left = [
        index
        for index in longest
        if homes[index] is None
        or not give(index, [r for r, node in enumerate(nodes) if node == homes[index]])
    ]
    for index in left:
        give(index, range(len(nodes)))
    return [sorted(indices) for indices in dealt]
