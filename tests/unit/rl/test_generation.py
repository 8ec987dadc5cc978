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
    """A trainer and rollouts whose every finish is chosen by a random generator: nothing depends on time."""

    def __init__(self, algorithm: Algorithm, order: random.Random, replicas: int = 1) -> None:
        self.algorithm, self.order = algorithm, order
        self.version = 0
        self.requests: list[list[int]] = []
        self.unfinished: list[asyncio.Event] = []
        self.released: list[int] = []
        self.tasks: list[asyncio.Task[None]] = []
        self.batches = Batches(
            algorithm,
            generate=self.generate,
            release=self.release,
            spawn=self.spawn,
            replicas=replicas,
            first=0,
        )

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        self.tasks.append(asyncio.ensure_future(work))

    async def generate(self, indices: Sequence[int]) -> list[Group]:
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
        self.batches.submit(self.version)
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
@given(st.integers(0, 4), st.integers(0, 2**32))
def test_waiting_trains_every_group_in_order_and_in_time(max_version_diff: int, seed: int) -> None:
    async def scenario() -> None:
        world = World(algorithm("Wait", max_version_diff), random.Random(seed))
        for step in range(8):
            groups = await world.step()
            assert [group.index for group in groups] == [3 * step, 3 * step + 1, 3 * step + 2]
            assert all(step - group.oldest_version <= max_version_diff for group in groups)
        # All that was asked for was trained on: nothing runs when the job ends.
        assert sorted(index for request in world.requests for index in request) == list(range(24))
        assert not world.unfinished
        assert not world.released

    asyncio.run(scenario())


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 4), st.integers(0, 2**32))
def test_dropping_keeps_the_bound_and_loses_no_group(max_version_diff: int, seed: int) -> None:
    async def scenario() -> None:
        world = World(algorithm("Drop", max_version_diff), random.Random(seed))
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
    world.batches.submit(0)
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
        again.algorithm,
        generate=again.generate,
        release=again.release,
        spawn=again.spawn,
        replicas=1,
        first=first,
        pending=pending,
    )
    again.batches.submit(1)
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
    world.batches.submit(0)
    await asyncio.sleep(0)
    assert world.requests == requests
    await world.stop()


def test_sample_seeds_differ_and_do_not_change() -> None:
    seeds = {sample_seed(*at) for at in [(1, 2, 3), (1, 3, 2), (2, 1, 3), (12, 3, 0), (1, 23, 0)]}
    assert len(seeds) == 5
    assert all(0 <= seed < 2**63 for seed in seeds)
    # First 8 bytes of sha256("1/2/3"), little-endian, shifted right by one.
    assert sample_seed(1, 2, 3) == int.from_bytes(bytes.fromhex("9de93caf7d8d2a94"), "little") >> 1
