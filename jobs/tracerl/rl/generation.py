"""Groups of trajectories: asked for, rewarded, records fetched, handed out under the staleness bound.

What is generated never depends on timing: group g asks the prompt at position g of the data order, and sample
j of it draws from a seed made of (job seed, g, j), also when it is generated again.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from typing import Any

import torch

from tracerl.api.constants import Reason
from tracerl.api.errors import JobError
from tracerl.api.frames import Handle
from tracerl.api.job import Algorithm, Retention, Spec, Staleness
from tracerl.engines.base import Trajectory
from tracerl.engines.client import Generation, Sampling
from tracerl.records.pairing import TrajectoryRecords, assemble
from tracerl.records.sites import SiteTable
from tracerl.rl.rollouts import ReplicaLostError, Rollouts
from tracerl.rl.tasks import Item, Task
from tracerl.rl.tokenizer import Tokenizer
from tracerl.rl.train import Group, Sample
from tracerl.transport.base import Transport

_ATTEMPTS = 16
"""A request that is lost or aborted this often ends the job: something keeps doing it."""
_PAUSE_SECONDS = 0.2

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
        job_uid: str,
        run_id: str,
        task: Task,
        tokenizer: Tokenizer,
        rollouts: Rollouts,
        transport: Transport,
        table: SiteTable,
        audit_table: SiteTable,
    ) -> None:
        self._spec = spec
        self._job_uid, self._run_id = job_uid, run_id
        self._task, self._tokenizer = task, tokenizer
        self._rollouts, self._transport = rollouts, transport
        self._table, self._audit_table = table, audit_table
        self._handles: dict[str, list[Handle]] = {}

    async def groups(self, indices: Sequence[int]) -> list[Group]:
        """Generate groups with one request to one replica, score them and fetch their records."""
        algorithm = self._spec.algorithm
        items = await asyncio.to_thread(self._task.train, indices)
        each = range(algorithm.samples_per_prompt)
        prompts = [encode_prompt(self._tokenizer, item, algorithm) for item in items for _ in each]
        sampling = [
            self._sampling(float(algorithm.temperature), sample_seed(algorithm.seed, index, sample))
            for index in indices
            for sample in each
        ]
        ids = [f"{self._run_id}-{index}-{sample}" for index in indices for sample in each]
        owners = [item for item in items for _ in each]
        for attempt in range(_ATTEMPTS):
            generations, instance = await self._generate(
                indices[0], prompts, sampling, [f"{id}-{attempt}" for id in ids]
            )
            generated_at = time.perf_counter()
            rewards = await asyncio.to_thread(self._score, owners, generations)
            samples = await asyncio.to_thread(self._samples, prompts, generations, rewards)
            if not _lacks_frames(samples) or not await self._rollouts.lost_since(indices[0], instance):
                break
            # The records went with the process that wrote them: generate again rather than train without.
            await asyncio.to_thread(self._drop, generations)
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
        generations = [generation for part, _ in parts for generation in part]
        rewards = await asyncio.to_thread(self._score, owners, generations)
        await asyncio.to_thread(self._drop, generations)
        return sum(rewards) / len(rewards)

    async def release(self, groups: Iterable[Group]) -> None:
        """Let the records of trajectories go: trained on, or dropped. Other retentions keep them."""
        handles = [
            handle
            for group in groups
            for sample in group.samples
            for handle in self._handles.pop(sample.trajectory.id, ())
        ]
        if self._spec.transport.object.retention is Retention.TRAINED:
            await asyncio.to_thread(self._release, handles)

    async def _generate(
        self,
        replica: int,
        prompts: Sequence[list[int]],
        sampling: Sequence[Sampling],
        ids: Sequence[str],
    ) -> tuple[list[Generation], str | None]:
        """Generate until nothing of it was lost or aborted; returns the instance that did it too."""
        for attempt in range(_ATTEMPTS):
            try:
                found, instance = await self._rollouts.generate(
                    replica, prompts, sampling, [f"{id}-{attempt}" for id in ids]
                )
            except ReplicaLostError:
                await asyncio.sleep(_PAUSE_SECONDS)
                continue
            if all(generation.finish_reason != "abort" and generation.tokens for generation in found):
                return found, instance
            await asyncio.to_thread(self._drop, found)
        raise JobError(
            Reason.ROLLOUT_FAILED,
            f"generation of {ids[0]} was lost or aborted {_ATTEMPTS} times; see the rollouts' logs",
        )

    def _sampling(self, temperature: float, seed: int) -> Sampling:
        return Sampling(
            max_new_tokens=self._spec.algorithm.max_response_tokens,
            temperature=temperature,
            stop_token_ids=self._tokenizer.stop_ids,
            seed=seed,
        )

    def _score(self, items: Sequence[Item], generations: Sequence[Generation]) -> list[float]:
        return self._task.score(items, [self._tokenizer.decode(g.tokens) for g in generations])

    def _samples(
        self, prompts: Sequence[list[int]], generations: Sequence[Generation], rewards: Sequence[float]
    ) -> list[Sample]:
        return [self._sample(*parts) for parts in zip(prompts, generations, rewards, strict=True)]

    def _sample(self, prompt: list[int], generation: Generation, reward: float) -> Sample:
        fetching = 0.0

        def fetch(handle: Handle) -> memoryview:
            nonlocal fetching
            start = time.thread_time()
            try:
                return self._transport.get(handle)
            finally:
                fetching += time.thread_time() - start

        start = time.thread_time()

        def collect(table: SiteTable) -> TrajectoryRecords:
            return assemble(
                generation.records,
                fetch,
                table,
                tokens=len(prompt) + len(generation.tokens),
                prompt_tokens=len(prompt),
                token_versions=generation.versions,
                job_uid=self._job_uid,
                run_id=self._run_id,
                trajectory=generation.id,
                reprefill=self._spec.records.reprefill,
            )

        records = collect(self._table) if self._table.sites else None
        audited = any(entry.audit for entry in generation.records)
        unpacking = time.thread_time() - start - fetching
        # Audits are measurements, not part of what training needs: their time is not counted as overhead.
        fetched = fetching
        audit = collect(self._audit_table) if audited else None
        self._handles[generation.id] = [entry.handle for entry in generation.records]
        return Sample(
            trajectory=Trajectory(
                id=generation.id,
                tokens=torch.tensor(prompt + generation.tokens),
                prompt_tokens=len(prompt),
                logp_rollout=torch.tensor(generation.logp, dtype=torch.float32),
                token_versions=generation.versions,
                records=records,
                audit=audit,
            ),
            reward=reward,
            finish_reason=generation.finish_reason,
            rollout_seconds=generation.seconds,
            frames=len(generation.records),
            fetch_seconds=fetched,
            unpack_seconds=unpacking,
        )

    def _drop(self, generations: Sequence[Generation]) -> None:
        self._release([entry.handle for generation in generations for entry in generation.records])

    def _release(self, handles: Iterable[Handle]) -> None:
        # One frame may hold a prefix of several trajectories: each of them names and releases it.
        for handle in handles:
            self._transport.release(handle)


def _lacks_frames(samples: Iterable[Sample]) -> bool:
    found = (sample.trajectory.records for sample in samples)
    return any(records is not None and records.missing["missing"] > 0 for records in found)


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


class Batches:
    """Decides which groups are generated when, and which of them a step trains on.

    `version` is always the trainer's: the number of steps it has done. With `Wait`, step s (from 0) trains
    exactly groups s * P .. s * P + P - 1, which are asked for once version >= s - maxVersionDiff, so none of
    their tokens can be older. With `Drop`, maxVersionDiff + 1 batches are always being generated, a step
    takes those that are done first, and a group with a token that is too old is dropped whole.
    """

    def __init__(
        self,
        algorithm: Algorithm,
        *,
        generate: Callable[[Sequence[int]], Awaitable[list[Group]]],
        release: Callable[[Iterable[Group]], Awaitable[None]],
        spawn: Spawn,
        replicas: int,
        first: int,
        pending: Sequence[int] = (),
    ) -> None:
        """Start at group `first`; groups `pending` (before it) were asked for but not trained on."""
        self._algorithm = algorithm
        self._replicas = replicas
        self._generate, self._release, self._spawn = generate, release, spawn
        self._next = first
        self._again = list(pending)
        self._flying: set[int] = set()
        self._ready: dict[int, Group] = {}
        self._arrival = asyncio.Event()
        self.dropped = 0
        """Groups dropped since the last step; the reader sets it back."""

    @property
    def cursor(self) -> tuple[int, list[int]]:
        """`first` and `pending` of an object that continues here."""
        pending = sorted({*self._again, *self._flying, *self._ready})
        if self._algorithm.staleness is Staleness.WAIT:
            # The same groups are asked for again by their step; what waits was sampled by lost weights.
            return min([self._next, *pending]), []
        return self._next, pending

    def submit(self, version: int) -> None:
        """Ask for every group that may be generated now."""
        algorithm = self._algorithm
        size = algorithm.prompts_per_step
        ahead = (algorithm.max_version_diff + 1) * size
        if algorithm.staleness is Staleness.WAIT:
            stop = min(version * size + ahead, algorithm.steps * size)
            count = stop - self._next
        else:
            count = ahead - len(self._flying) - len(self._ready)
        indices = []
        for _ in range(count):
            if self._again:
                indices.append(self._again.pop(0))
            else:
                indices.append(self._next)
                self._next += 1
        # The synchronous mode asks each replica once: what is batched with what is then no matter of timing,
        # and neither is the last bit of any sum. Otherwise each group returns as soon as it is done.
        if algorithm.max_version_diff == 0:
            parts = [[i for i in indices if i % self._replicas == r] for r in range(self._replicas)]
        else:
            parts = [[index] for index in indices]
        for part in parts:
            if part:
                self._flying.update(part)
                self._spawn(self._fly(part))

    async def _fly(self, indices: Sequence[int]) -> None:
        for group in await self._generate(indices):
            self._flying.discard(group.index)
            self._ready[group.index] = group
        self._arrival.set()

    async def take(self, version: int) -> list[Group]:
        """Wait for the groups of the next step, in the order of the data."""
        size = self._algorithm.prompts_per_step
        while True:
            self._arrival.clear()
            if self._algorithm.staleness is Staleness.WAIT:
                wanted = list(range(version * size, (version + 1) * size))
            else:
                await self._drop_stale(version)
                wanted = sorted(list(self._ready)[:size])
            if len(wanted) == size and all(index in self._ready for index in wanted):
                return [self._ready.pop(index) for index in wanted]
            await self._arrival.wait()

    async def _drop_stale(self, version: int) -> None:
        limit = self._algorithm.max_version_diff
        stale = [group for group in self._ready.values() if version - group.oldest_version > limit]
        for group in stale:
            del self._ready[group.index]
        self.dropped += len(stale)
        if stale:
            self.submit(version)
            await self._release(stale)
