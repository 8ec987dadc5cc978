"""Who trains on what: even counts first, then records at home, then even tokens."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tracerl.api.job import TrainerParallelism
from tracerl.rl.dealing import deal, units_of

NODES = st.sampled_from(["a", "b", "c"])
CASE = st.tuples(
    st.lists(st.tuples(NODES | st.none(), st.integers(1, 9)), max_size=7),
    st.lists(NODES | st.none(), min_size=1, max_size=4),
)


def at_home(homes: list[str | None], nodes: list[str | None], dealt: list[list[int]]) -> int:
    return sum(
        homes[index] is not None and homes[index] == nodes[rank]
        for rank, indices in enumerate(dealt)
        for index in indices
    )


@settings(max_examples=150, deadline=None)
@given(CASE)
def test_counts_are_even_and_no_even_deal_has_more_at_home(case: tuple[list, list]) -> None:
    homes, lengths = [home for home, _ in case[0]], [length for _, length in case[0]]
    nodes = case[1]
    dealt = deal(homes, nodes, lengths)
    assert sorted(index for indices in dealt for index in indices) == list(range(len(homes)))
    assert all(indices == sorted(indices) for indices in dealt)
    low, high = len(homes) // len(nodes), -(-len(homes) // len(nodes))
    assert all(low <= len(indices) <= high for indices in dealt)
    assert deal(homes, nodes, lengths) == dealt
    if len(nodes) ** len(homes) > 20_000:
        return
    best = 0
    for ranks in product(range(len(nodes)), repeat=len(homes)):
        other = [[i for i, rank in enumerate(ranks) if rank == r] for r in range(len(nodes))]
        if all(low <= len(indices) <= high for indices in other):
            best = max(best, at_home(homes, nodes, other))
    assert at_home(homes, nodes, dealt) == best


@pytest.mark.parametrize(
    ("homes", "nodes", "lengths", "dealt"),
    [
        # Nothing known: the longest first, to whoever has the fewest tokens.
        ([None] * 4, [None, None], [5, 1, 6, 2], [[1, 2], [0, 3]]),
        # All at home on one node: the shortest leaves it.
        (["a", "a"], ["a", "b"], [1, 9], [[1], [0]]),
        # Of three trajectories the node where two are at home gets two.
        (["b", "a", "b"], ["a", "b"], [1, 1, 1], [[1], [0, 2]]),
        (["a"], ["b", "a"], [1], [[], [0]]),
        ([], ["a", "b"], [], [[], []]),
        (["a", "b", "a"], ["a"], [3, 1, 2], [[0, 1, 2]]),
    ],
)
def test_deals(homes: list, nodes: list, lengths: list, dealt: list) -> None:
    assert deal(homes, nodes, lengths) == dealt


@pytest.mark.parametrize(
    ("sizes", "units"),
    [
        ({"data": 3}, [0, 1, 2]),
        ({"tensor": 2, "data": 2}, [0, 0, 1, 1]),
        ({"context": 2}, [0, 0]),
        # Stages of a pipeline are furthest apart.
        ({"tensor": 2, "pipeline": 2, "data": 2}, [0, 0, 1, 1, 0, 0, 1, 1]),
        ({"data": 4, "expert": 2}, [0, 1, 2, 3]),
    ],
)
def test_units(sizes: dict[str, int], units: list[int]) -> None:
    assert units_of(TrainerParallelism(**sizes)) == units


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(1, 1_000), min_size=8, max_size=40))
def test_tokens_are_even_where_records_do_not_matter(lengths: list[int]) -> None:
    tokens = [sum(lengths[i] for i in part) for part in deal([None] * len(lengths), [None, None], lengths)]
    # Longest first to two ranks: they differ by the longest at most.
    assert abs(tokens[0] - tokens[1]) <= max(lengths)
