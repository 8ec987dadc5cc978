"""Groups of trajectories: asked for, rewarded, handed out under the staleness bound with all their frames.

What is generated never depends on timing: group g asks the prompt at position g of the data order, and sample
j of it draws from a seed made of (job seed, g, j), also when it is generated again.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable, Sequence
from typing import Any, Protocol

import torch

from tracerl.api.constants import Reason
from tracerl.api.errors import JobError
from tracerl.api.frames import Handle
from tracerl.api.job import Algorithm, Retention, Spec, Staleness
from tracerl.engines.base import Trajectory
from tracerl.engines.client import Generation, Sampling
from tracerl.rl.loading import RecordLoader
from tracerl.rl.rollouts import ReplicaLostError, Report, Rollouts
from tracerl.rl.tasks import Item, Task
from tracerl.rl.tokenizer import Tokenizer
from tracerl.rl.train import Group, Sample
from tracerl.transport.base import FrameSource, TransportError

_ATTEMPTS = 16
"""A request that is lost or aborted this often ends the job: something keeps doing it."""
_PAUSE_SECONDS = 0.2
_REGENERATIONS = 3
"""A group whose frames were lost this often is trained on as it is: its rows are missing, and counted."""
_LOOK_SECONDS = 1.0
"""How long to wait before a congested store is looked at again, when nothing arrives meanwhile."""

Spawn = Callable[[Coroutine[Any, Any, None]], object]
"""Runs a coroutine beside the loop; an error in it ends the loop."""


def sample_seed(seed: int, group: int, sample: int) -> int:
    """Return the sampling seed, below 2^63, of one sample of one group."""
    digest = hashlib.sha256(f"{seed}/{group}/{sample}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


class Generator:
    """Turns positions of the data order into groups, and held-out items into a reward."""

    def __init__(
        self,
        spec: Spec,
        *,
        run_id: str,
        task: Task,
        tokenizer: Tokenizer,
        rollouts: Rollouts,
        source: FrameSource,
        loader: RecordLoader | None,
        report: Report,
    ) -> None:
        """`loader` is that of the one process that trains: it loads what arrives. None where several do."""
        self._spec = spec
        self._run_id = run_id
        self._task, self._tokenizer = task, tokenizer
        self._rollouts, self._source, self._loader = rollouts, source, loader
        self._report = report
        self._regenerated: Counter[int] = Counter()
        self._told_congested = False

    async def groups(self, indices: Sequence[int], *, record: bool = True) -> list[Group]:
        """Generate groups with one request to one replica, and score them.

        Without `record` they are those of a baseline, whose trajectories have no records.
        """
        algorithm = self._spec.algorithm
        items = await asyncio.to_thread(self._task.train, indices)
        each = range(algorithm.samples_per_prompt)
        prompts = [encode_prompt(self._tokenizer, item, algorithm) for item in items for _ in each]
        sampling = [
            self._sampling(float(algorithm.temperature), sample_seed(algorithm.seed, index, sample))
            for index in indices
            for sample in each
        ]
        # Frames of what is generated again must not be taken for those of the attempt before.
        turn = "" if record else "-baseline"
        ids = [
            f"{self._run_id}-{index}-{sample}-{self._regenerated[index]}{turn}"
            for index in indices
            for sample in each
        ]
        owners = [item for item in items for _ in each]
        generations = await self._generate(indices[0], prompts, sampling, ids, record=record)
        generated_at = time.perf_counter()
        trajectories = [
            _trajectory(prompt, generation) for prompt, generation in zip(prompts, generations, strict=True)
        ]
        if self._loader is not None and record:
            self._loader.prefetch(trajectories)
        rewards = await asyncio.to_thread(self._score, owners, generations)
        samples = [
            Sample(trajectory, reward, generation.finish_reason, generation.seconds)
            for trajectory, reward, generation in zip(trajectories, rewards, generations, strict=True)
        ]
        return [
            Group(index, item, samples[n * len(each) : (n + 1) * len(each)], generated_at)
            for n, (index, item) in enumerate(zip(indices, items, strict=True))
        ]

    async def evaluate(self, items: Sequence[Item], version: int) -> float:
        """Return the mean reward of one response an item; nothing of them is kept.

        Every evaluation draws with the same seeds, so that two of them differ by the policy alone.
        """
        if not items:
            raise ValueError("there is nothing to evaluate on")
        replicas = len(self._rollouts)
        algorithm = self._spec.algorithm
        prompts = [encode_prompt(self._tokenizer, item, algorithm) for item in items]
        temperature = float(algorithm.evaluation.temperature)
        # Negative groups: no training group has the same seed.
        sampling = [
            self._sampling(temperature, sample_seed(algorithm.seed, -1 - number, 0))
            for number in range(len(items))
        ]
        ids = [f"{self._run_id}-evaluation{version}-{number}" for number in range(len(items))]
        parts = await asyncio.gather(
            *(
                self._generate(
                    replica,
                    prompts[replica::replicas],
                    sampling[replica::replicas],
                    ids[replica::replicas],
                )
                for replica in range(min(replicas, len(items)))
            )
        )
        owners = [item for replica in range(replicas) for item in items[replica::replicas]]
        generations = [generation for part in parts for generation in part]
        rewards = await asyncio.to_thread(self._score, owners, generations)
        await self._drop(generations)
        return sum(rewards) / len(rewards)

    async def release(self, groups: Iterable[Group]) -> None:
        """Let the records of trajectories go: trained on, or dropped. Other retentions keep them."""
        trajectories = [sample.trajectory for group in groups for sample in group.samples]
        if self._loader is not None:
            self._loader.drop([trajectory.id for trajectory in trajectories])
        if self._spec.transport.object.retention is Retention.TRAINED:
            # A prefix of several trajectories has a reference of each of them.
            await self._release([entry.handle for t in trajectories for entry in t.entries])

    async def congested(self) -> bool:
        """Tell whether new prompts should wait because a record store has little room."""
        congested = (await asyncio.to_thread(self._source.usage)).congested
        if congested and not self._told_congested:
            self._told_congested = True
            self._report(
                Reason.RECORD_STORE_FULL,
                "a record store has little room (or does not answer), so prompts wait until a step releases "
                "records; if the trainer waits for them, raise spec.transport.ring.size or set spillPath",
            )
        return congested

    async def incomplete(self, groups: Sequence[Group]) -> list[Group]:
        """Find groups of which a frame cannot be read any more, for example since its store was restarted.

        Those that were generated again too often are not among them.
        """
        handles = [[e.handle for s in group.samples for e in s.trajectory.entries] for group in groups]
        asked = list(dict.fromkeys(handle for part in handles for handle in part))
        present = dict(zip(asked, await asyncio.to_thread(self._source.present, asked), strict=True))
        return [
            group
            for group, part in zip(groups, handles, strict=True)
            if self._regenerated[group.index] < _REGENERATIONS and not all(present[h] for h in part)
        ]

    async def give_up(self, groups: Sequence[Group]) -> None:
        """Let go of groups that are incomplete and will be generated again."""
        for group in groups:
            self._regenerated[group.index] += 1
        self._report(
            Reason.RECORD_STORE_RESTARTED,
            f"records of {len(groups)} finished groups were lost with their store; they are generated again",
        )
        await self.release(groups)

    async def _generate(
        self,
        replica: int,
        prompts: Sequence[list[int]],
        sampling: Sequence[Sampling],
        ids: Sequence[str],
        *,
        record: bool = True,
    ) -> list[Generation]:
        """Generate until nothing of it was lost or aborted."""
        for attempt in range(_ATTEMPTS):
            tried = [f"{id}-{attempt}" for id in ids]
            try:
                found = await self._rollouts.generate(replica, prompts, sampling, tried, record=record)
            except ReplicaLostError:
                await self._tell(self._source.forget, tried)
                await asyncio.sleep(_PAUSE_SECONDS)
                continue
            if all(generation.finish_reason != "abort" and generation.tokens for generation in found):
                return found
            await self._drop(found)
            await self._tell(self._source.forget, tried)
        raise JobError(
            Reason.ROLLOUT_FAILED,
            f"generation of {ids[0]} was lost or aborted {_ATTEMPTS} times; see the rollouts' logs",
        )

    async def _drop(self, generations: Sequence[Generation]) -> None:
        await self._release([entry.handle for generation in generations for entry in generation.records])

    async def _release(self, handles: Sequence[Handle]) -> None:
        await self._tell(self._source.release, handles)

    async def _tell(self, what: Callable[[Sequence[Any]], None], values: Sequence[Any]) -> None:
        """Tell the stores what to drop; what one does not hear of is dropped when the next run starts."""
        try:
            await asyncio.to_thread(what, values)
        except TransportError as error:
            self._report(Reason.TRANSPORT_FAILED, str(error))

    def _sampling(self, temperature: float, seed: int) -> Sampling:
        return Sampling(
            max_new_tokens=self._spec.algorithm.max_response_tokens,
            temperature=temperature,
            stop_token_ids=self._tokenizer.stop_ids,
            seed=seed,
        )

    def _score(self, items: Sequence[Item], generations: Sequence[Generation]) -> list[float]:
        return self._task.score(items, [self._tokenizer.decode(g.tokens) for g in generations])


def _trajectory(prompt: list[int], generation: Generation) -> Trajectory:
    return Trajectory(
        id=generation.id,
        tokens=torch.tensor(prompt + generation.tokens),
        prompt_tokens=len(prompt),
        logp_rollout=torch.tensor(generation.logp, dtype=torch.float32),
        token_versions=generation.versions,
        entries=generation.records,
    )


def encode_prompt(tokenizer: Tokenizer, item: Item, algorithm: Algorithm) -> list[int]:
    """Return a prompt's token ids; JobError when there are none or too many."""
    ids = tokenizer.encode(item.prompt)
    if not ids:
        raise JobError(Reason.TASK_LOAD, f"{item.where} has a prompt of no tokens; write some text")
    if len(ids) > algorithm.max_prompt_tokens:
        raise JobError(
            Reason.PROMPT_TOO_LONG,
            f"{item.where} has {len(ids)} tokens, more than algorithm.maxPromptTokens "
            f"{algorithm.max_prompt_tokens}; raise it or shorten the prompt",
        )
    return ids


def by_replica(indices: Sequence[int], replicas: int) -> list[list[int]]:
    """Deal groups out so that each replica is asked once, as the synchronous mode does.

    What is batched with what is then no matter of timing, and neither is the last bit of any sum.
    """
    parts = [[index for index in indices if index % replicas == replica] for replica in range(replicas)]
    return [part for part in parts if part]


class Groups(Protocol):
    """What `Batches` needs of a `Generator`."""

    async def groups(self, indices: Sequence[int]) -> list[Group]:
        """Generate groups."""
        ...

    async def release(self, groups: Iterable[Group]) -> None:
        """Let the records of groups go."""
        ...

    async def congested(self) -> bool:
        """Tell whether new prompts should wait."""
        ...

    async def incomplete(self, groups: Sequence[Group]) -> list[Group]:
        """Find groups that should be generated again."""
        ...

    async def give_up(self, groups: Sequence[Group]) -> None:
        """Let go of groups that will be generated again."""
        ...


class Batches:
    """Decides which groups are generated when, and which of them a step trains on.

    `version` is always the trainer's: the number of steps it has done. With `Wait`, step s (from 0) trains
    exactly groups s * P .. s * P + P - 1, which are asked for once version >= s - maxVersionDiff, so none of
    their tokens can be older. With `Drop`, maxVersionDiff + 1 batches are always being generated, a step
    takes those that are done first, and a group with a token that is too old is dropped whole. While a record
    store is congested, nothing is asked for that the next step does not need.
    """

    def __init__(
        self,
        algorithm: Algorithm,
        generator: Groups,
        *,
        spawn: Spawn,
        replicas: int,
        first: int,
        pending: Sequence[int] = (),
    ) -> None:
        """Start at group `first`; groups `pending` (before it) were asked for but not trained on."""
        self._algorithm = algorithm
        self._replicas = replicas
        self._generator, self._spawn = generator, spawn
        self._next = first
        self._again = list(pending)
        self._flying: set[int] = set()
        self._ready: dict[int, Group] = {}
        self._arrival = asyncio.Event()
        self._version = 0
        self._held = False
        self.dropped = 0
        """Groups dropped since the last step; the reader sets it back."""
        self.waits = 0
        """Times since the last step that groups were held back; the reader sets it back."""

    @property
    def cursor(self) -> tuple[int, list[int]]:
        """`first` and `pending` of an object that continues here."""
        pending = sorted({*self._again, *self._flying, *self._ready})
        if self._algorithm.staleness is Staleness.WAIT:
            # The same groups are asked for again by their step; what waits was sampled by lost weights.
            return min([self._next, *pending]), []
        return self._next, pending

    async def submit(self, version: int) -> None:
        """Ask for every group that may be generated now, or those alone that the next step needs."""
        self._version = version
        size, ahead = self._algorithm.prompts_per_step, self._algorithm.max_version_diff
        # What the next step lacks is asked for in any case: nothing is released before that step is done.
        beyond = self._count(ahead * size) > self._count(0)
        held = beyond and await self._generator.congested()
        self.waits += held and not self._held
        self._held = held
        self._ask(self._count(0 if held else ahead * size))

    def _count(self, ahead: int) -> int:
        """How many groups to ask for, so that the next step and `ahead` groups after it are asked for."""
        algorithm = self._algorithm
        size = algorithm.prompts_per_step
        if algorithm.staleness is Staleness.WAIT:
            stop = min((self._version + 1) * size + ahead, algorithm.steps * size)
            return max(0, stop - self._next)
        return max(0, size + ahead - len(self._flying) - len(self._ready))

    def _ask(self, count: int) -> None:
        indices = []
        for _ in range(count):
            if self._again:
                indices.append(self._again.pop(0))
            else:
                indices.append(self._next)
                self._next += 1
        # Otherwise than in the synchronous mode, each group returns as soon as it is done.
        together = self._algorithm.max_version_diff == 0
        for part in by_replica(indices, self._replicas) if together else [[index] for index in indices]:
            self._fly(part)

    def _fly(self, indices: Sequence[int]) -> None:
        self._flying.update(indices)
        self._spawn(self._generate(indices))

    async def _generate(self, indices: Sequence[int]) -> None:
        for group in await self._generator.groups(indices):
            self._flying.discard(group.index)
            self._ready[group.index] = group
        self._arrival.set()
        if self._held:
            await self.submit(self._version)

    async def take(self, version: int) -> list[Group]:
        """Wait for the groups of the next step, in the order of the data, with all frames."""
        size = self._algorithm.prompts_per_step
        while True:
            self._arrival.clear()
            if self._algorithm.staleness is Staleness.WAIT:
                wanted = list(range(version * size, (version + 1) * size))
            else:
                await self._drop_stale(version)
                wanted = sorted(list(self._ready)[:size])
            if len(wanted) == size and all(index in self._ready for index in wanted):
                lost = await self._generator.incomplete([self._ready[index] for index in wanted])
                if not lost:
                    return [self._ready.pop(index) for index in wanted]
                await self._again_from_the_start(lost)
            # What is held back may have room now although nothing arrived.
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._arrival.wait(), _LOOK_SECONDS if self._held else None)
            if self._held:
                await self.submit(version)

    async def _again_from_the_start(self, lost: Sequence[Group]) -> None:
        for group in lost:
            del self._ready[group.index]
        await self._generator.give_up(lost)
        for group in lost:
            self._fly([group.index])

    async def _drop_stale(self, version: int) -> None:
        limit = self._algorithm.max_version_diff
        stale = [group for group in self._ready.values() if version - group.oldest_version > limit]
        for group in stale:
            del self._ready[group.index]
        self.dropped += len(stale)
        if stale:
            await self.submit(version)
            await self._generator.release(stale)
