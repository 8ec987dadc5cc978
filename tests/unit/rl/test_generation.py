"""Which groups are asked for when, and which are trained on: the staleness bound as a property."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Coroutine, Iterable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tracerl.api.job import Algorithm
from tracerl.engines.base import Trajectory
from tracerl.rl.generation import Batches, sample_seed
from tracerl.rl.tasks import Item
from tracerl.rl.train import Group, Sample


class World:
    """A trainer, rollouts and stores whose every event is chosen by a random generator: no time passes."""

    def __init__(
        self, algorithm: Algorithm, order: random.Random, replicas: int = 1, *, faults: bool = False
    ) -> None:
        self.algorithm, self.order, self.faults = algorithm, order, faults
        self.version = 0
        self.requests: list[list[int]] = []
        self.unfinished: list[asyncio.Event] = []
        self.released: list[int] = []
        self.given_up: list[int] = []
        self.tasks: list[asyncio.Task[None]] = []
        self.batches = Batches(algorithm, self, spawn=self.spawn, replicas=replicas, first=0)

    async def congested(self) -> bool:
        await asyncio.sleep(0)
        return self.faults and self.order.random() < 0.5

    async def incomplete(self, groups: Sequence[Group]) -> list[Group]:
        await asyncio.sleep(0)
        return [group for group in groups if self.faults and self.order.random() < 0.1]

    async def give_up(self, groups: Sequence[Group]) -> None:
        self.given_up += [group.index for group in groups]

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        self.tasks.append(asyncio.ensure_future(work))

    async def groups(self, indices: Sequence[int]) -> list[Group]:
        self.requests.append(list(indices))
        started, finished = self.version, asyncio.Event()
        self.unfinished.append(finished)
        await finished.wait()
        # In the middle of a weight update: some tokens are of the old version, some of the new.
        versions = [started, self.version]
        trajectory = Trajectory("t", torch.zeros(3, dtype=torch.int64), 1, torch.zeros(2), versions)
        sample = Sample(trajectory, 0.0, "stop", {})
        return [Group(index, Item(index, "here", "p", None), [sample], 0.0) for index in indices]

    async def release(self, groups: Iterable[Group]) -> None:
        self.released += [group.index for group in groups]

    async def step(self) -> list[Group]:
        """Train one step: rollouts finish in any order until the batch is there."""
        await self.batches.submit(self.version)
        taking = asyncio.ensure_future(self.batches.take(self.version))
        while not taking.done():
            for _ in range(5):
                await asyncio.sleep(0)
            if not taking.done() and self.unfinished:
                self.unfinished.pop(self.order.randrange(len(self.unfinished))).set()
        groups = taking.result()
        self.version += 1
        return groups

    async def stop(self) -> None:
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)


def algorithm(staleness: str, max_version_diff: int, steps: int = 8, size: int = 3) -> Algorithm:
    return Algorithm.model_validate(
        {
            "steps": steps,
            "promptsPerStep": size,
            "samplesPerPrompt": 2,
            "maxVersionDiff": max_version_diff,
            "staleness": staleness,
        }
    )


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 4), st.integers(0, 2**32), st.booleans())
def test_waiting_trains_every_group_in_order_and_in_time(
    max_version_diff: int, seed: int, faults: bool
) -> None:
    async def scenario() -> None:
        world = World(algorithm("Wait", max_version_diff), random.Random(seed), faults=faults)
        for step in range(8):
            groups = await world.step()
            assert [group.index for group in groups] == [3 * step, 3 * step + 1, 3 * step + 2]
            assert all(step - group.oldest_version <= max_version_diff for group in groups)
        # All that was asked for was trained on: nothing runs when the job ends.
        asked = sorted(index for request in world.requests for index in request)
        assert asked == sorted([*range(24), *world.given_up])
        assert not world.unfinished
        assert not world.released

    asyncio.run(scenario())


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 4), st.integers(0, 2**32), st.booleans())
def test_dropping_keeps_the_bound_and_loses_no_group(max_version_diff: int, seed: int, faults: bool) -> None:
    async def scenario() -> None:
        world = World(algorithm("Drop", max_version_diff), random.Random(seed), faults=faults)
        trained: list[int] = []
        for step in range(8):
            groups = await world.step()
            assert len(groups) == 3
            assert all(step - group.oldest_version <= max_version_diff for group in groups)
            trained += [group.index for group in groups]
        first, pending = world.batches.cursor
        assert sorted([*trained, *world.released, *pending]) == list(range(first))
        assert world.batches.dropped == len(world.released)
        await world.stop()

    asyncio.run(scenario())


async def test_a_group_that_became_too_old_is_dropped_whole_and_replaced() -> None:
    world = World(algorithm("Drop", 1, size=1), random.Random(0))
    await world.batches.submit(0)
    await asyncio.sleep(0)
    slow = world.unfinished.pop(0)
    await world.step()
    await world.step()
    slow.set()
    taken = await world.step()
    assert 0 in world.released
    assert 0 not in [group.index for group in taken]
    assert world.batches.dropped == 1
    await world.stop()


async def test_pending_groups_are_asked_for_again_after_a_resume() -> None:
    world = World(algorithm("Drop", 1), random.Random(3))
    await world.step()
    first, pending = world.batches.cursor
    assert pending
    await world.stop()
    again = World(algorithm("Drop", 1), random.Random(4))
    again.batches = Batches(
        again.algorithm, again, spawn=again.spawn, replicas=1, first=first, pending=pending
    )
    await again.batches.submit(1)
    await asyncio.sleep(0)
    asked = [index for request in again.requests for index in request]
    assert asked[: len(pending)] == pending
    assert asked[len(pending) :] == list(range(first, first + len(asked) - len(pending)))
    await again.stop()


@pytest.mark.parametrize(
    ("max_version_diff", "replicas", "requests"),
    [(0, 1, [[0, 1, 2]]), (0, 2, [[0, 2], [1]]), (1, 2, [[0], [1], [2], [3], [4], [5]])],
)
async def test_the_synchronous_mode_asks_each_replica_once(
    max_version_diff: int, replicas: int, requests: list[list[int]]
) -> None:
    world = World(algorithm("Wait", max_version_diff), random.Random(0), replicas)
    await world.batches.submit(0)
    await asyncio.sleep(0)
    assert world.requests == requests
    await world.stop()


@pytest.mark.parametrize("staleness", ["Wait", "Drop"])
async def test_while_a_store_is_congested_only_the_next_step_is_asked_for(staleness: str) -> None:
    world = World(algorithm(staleness, 2), random.Random(0))
    full = True

    async def congested() -> bool:
        return full

    world.congested = congested  # type: ignore[method-assign]
    await world.batches.submit(0)
    await asyncio.sleep(0)
    assert world.requests == [[0], [1], [2]]
    # An arrival looks again; three waits in a row are one.
    world.unfinished.pop().set()
    for _ in range(5):
        await asyncio.sleep(0)
    assert world.requests == [[0], [1], [2]]
    assert world.batches.waits == 1
    full = False
    world.unfinished.pop().set()
    for _ in range(5):
        await asyncio.sleep(0)
    assert world.requests == [[index] for index in range(9)]
    # What the next step lacks is asked for whatever the stores say: it alone makes room.
    full = True
    await world.step()
    world.version = 3
    await world.batches.submit(3)
    await asyncio.sleep(0)
    assert len(world.requests) == (12 if staleness == "Wait" else 9)
    await world.stop()


async def test_groups_that_lost_frames_are_generated_again() -> None:
    world = World(algorithm("Wait", 0), random.Random(0))
    lost = {0, 2}

    async def incomplete(groups: Sequence[Group]) -> list[Group]:
        return [group for group in groups if group.index in lost and group.index not in world.given_up]

    world.incomplete = incomplete  # type: ignore[method-assign]
    groups = await world.step()
    assert [group.index for group in groups] == [0, 1, 2]
    assert world.given_up == [0, 2]
    assert world.requests == [[0, 1, 2], [0], [2]]


def test_sample_seeds_differ_and_do_not_change() -> None:
    seeds = {sample_seed(*at) for at in [(1, 2, 3), (1, 3, 2), (2, 1, 3), (12, 3, 0), (1, 23, 0)]}
    assert len(seeds) == 5
    assert all(0 <= seed < 2**63 for seed in seeds)
    # First 8 bytes of sha256("1/2/3"), little-endian, shifted right by one.
    assert sample_seed(1, 2, 3) == int.from_bytes(bytes.fromhex("9de93caf7d8d2a94"), "little") >> 1
