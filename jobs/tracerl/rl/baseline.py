"""Steps that are done twice, with and without records: what records take is then a difference, not a timing.

Every `observe.baselineEvery`-th step, the groups of that step are generated a second time without being
recorded, with the same weights and the same seeds and so with the same tokens, and are trained on by the same
step without guidance: every site rounds to nearest, the live router chooses, and no pass is there for the
ratio alone. That update is thrown away, so that the run is what it would be without baselines. Which side
comes first alternates: what the second one finds warm favours neither. Time is the CPU time of the processes,
which other work on the machine changes little; where both roles have a GPU, what their passes take of it, by
CUDA events.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any, Protocol, TypeVar

from torch import Tensor

from tracerl.rl.account import overhead_of, pairs_with
from tracerl.rl.generation import by_replica
from tracerl.rl.parallel import LeadingEngine
from tracerl.rl.steprecord import Baseline
from tracerl.rl.train import Group, Learner, Timer

T = TypeVar("T")


class Surroundings(Protocol):
    """What a pair needs of the loop."""

    async def compute(self, work: Callable[[], T]) -> T:
        """Run something on the engine's thread."""
        ...

    async def unless_asked_to_stop(self, work: Coroutine[Any, Any, T]) -> T | None:
        """Wait for what rollouts do; None when the loop is to stop."""
        ...


class Pair:
    """One step and its baseline. The loop says how far the step is, in the order of the methods."""

    def __init__(
        self,
        around: Surroundings,
        engine: LeadingEngine,
        learner: Learner,
        groups: Callable[[Sequence[int]], Awaitable[list[Group]]],
        taken_seconds: Callable[[], Awaitable[float | None]],
        *,
        version: int,
        indices: Sequence[int],
        replicas: int,
        bare_first: bool,
    ) -> None:
        """`engine` and `learner` train without records; `groups` generates without them.

        `taken_seconds`: of rollouts, record stores and trainer so far; None when one does not answer.
        """
        self._around, self._engine, self._learner, self._groups = around, engine, learner, groups
        self._taken_seconds = taken_seconds
        self._version, self._parts = version, by_replica(indices, replicas)
        self._bare_first = bare_first
        self._before: dict[str, Tensor] = {}
        self._mark: float | None = None
        self._recorded: list[float | None] = []
        self._bare: list[float | None] = []
        self._push: float | None = None
        self.aside = 0.0
        """Wall time that is the baseline's and not the step's."""

    async def begin(self) -> None:
        """Before the step's groups are asked for; rollouts have nothing to do."""
        started = time.perf_counter()
        if self._bare_first:
            await self._do_bare()
        else:
            self._before = await self._around.compute(self._engine.state)
        await self._lap()
        self.aside += time.perf_counter() - started

    async def trained(self) -> None:
        """The step's update is done, and rollouts still have the weights of before."""
        self._recorded.append(await self._lap())
        started = time.perf_counter()
        if not self._bare_first:
            await self._do_bare()
        await self._lap()
        self.aside += time.perf_counter() - started

    async def pushed(self) -> None:
        """Rollouts have the new weights."""
        self._push = await self._lap()

    async def released(self) -> None:
        """The step's records are let go."""
        self._recorded.append(await self._lap())

    def result(self, pairs: Sequence[tuple[float, float]]) -> Baseline | None:
        """Give what was measured after the earlier `pairs`; None where a part is not known."""
        recorded, bare = _sum(self._recorded), _sum(self._bare)
        if recorded is None or bare is None or self._push is None:
            return None
        made = Baseline(
            recorded_seconds=recorded,
            bare_seconds=bare,
            step_seconds=recorded + self._push,
            bare_first=self._bare_first,
            so_far=None,
        )
        return made.model_copy(update={"so_far": overhead_of(pairs_with(pairs, made))})

    async def _do_bare(self) -> None:
        await self._lap()
        generated = await self._around.unless_asked_to_stop(self._generate())
        self._bare.append(await self._lap())
        if generated is None:
            self._bare.append(None)
            return
        restore = await self._around.compute(self._engine.state)
        if self._before:
            await self._around.compute(lambda: self._engine.load_state(self._before))
        await self._lap()
        await self._around.compute(lambda: self._learner.step(generated, self._version, Timer()))
        self._bare.append(await self._lap())
        await self._around.compute(lambda: self._engine.load_state(restore))

    async def _generate(self) -> list[Group]:
        found = await asyncio.gather(*(self._groups(part) for part in self._parts))
        return sorted((group for part in found for group in part), key=lambda group: group.index)

    async def _lap(self) -> float | None:
        """Time since the last call; None when it cannot be known."""
        before, self._mark = self._mark, await self._taken_seconds()
        # A process that was started again begins from 0.
        return None if before is None or self._mark is None or self._mark < before else self._mark - before


def _sum(laps: Sequence[float | None]) -> float | None:
    known = [lap for lap in laps if lap is not None]
    return sum(known) if known and len(known) == len(laps) else None
