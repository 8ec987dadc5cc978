"""SGLang as the process that it is in a run, beside a record store, and what tests do with both.

A start takes a minute or more, nearly all of it imports, so that servers are shared by the tests of a module.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from rollout_servers import NODE, SHAPE, TOKEN, Process, reader_of, run_directory
from torch import Tensor

from tracerl.api.job import Spec, TraceRLJob
from tracerl.api.model import ModelShape, model_shape
from tracerl.api.resolved import ResolvedJob
from tracerl.engines.base import Batch, EngineStats, Trajectory
from tracerl.engines.client import Generation, RolloutClient, Sampling, push_from_disk
from tracerl.engines.hf import initial_weights, write_model
from tracerl.engines.reference.trainer import ReferenceTrainer
from tracerl.records.pairing import TrajectoryRecords, assemble
from tracerl.records.sites import SiteTable, audit_table, site_table
from tracerl.transport.sources import RecordSources, open_source

RUN = "run-1"
START_SECONDS = 600
TWO_RANKS = ModelShape.uniform(
    4,
    hidden=96,
    heads=6,
    kv_heads=2,
    head_dim=16,
    experts=8,
    top_k=2,
    expert_hidden=64,
    vocab=64,
    context=128,
)
"""A tiny model whose heads and experts two ranks can share: an expert is two blocks of 16 on each."""


def spec_of(**parts: dict[str, Any]) -> Spec:
    """A job of the tiny model that records everything; `parts` change sections of it."""
    document: dict[str, Any] = {
        "model": {"uri": "builtin://tiny-moe", "dtype": "Float32"},
        "task": {"name": "builtin/chain_sum"},
        "algorithm": {
            "steps": 1,
            "promptsPerStep": 1,
            "samplesPerPrompt": 2,
            "maxPromptTokens": 24,
            "maxResponseTokens": 104,
        },
        "method": {"name": "TRACE", "trace": {"layers": {"policy": "All"}}},
        "quantization": {"secondInput": "Recorded"},
        "records": {"chunkTokens": 7},
        "rollout": {"engine": "SGLang", "kvCacheTokens": 1024, "maxRunningRequests": 16},
        "transport": {"ring": {"size": "16Mi"}},
    }
    for name, part in parts.items():
        document[name] = document.get(name, {}) | part
    return Spec.model_validate(document)


def resolve(directory: Path, spec: Spec) -> ResolvedJob:
    """A run directory with a resolved job and a token."""
    job = TraceRLJob.model_validate({"metadata": {"name": "rollout"}, "spec": spec})
    return run_directory(directory, job)


def start(resolved: ResolvedJob, module: str, name: str, **environment: str) -> Process:
    """A process of a run, with SGLang's Python: Megatron's tests run with another."""
    python = os.environ.get("TRACERL_ROLLOUT_PYTHON", sys.executable)
    return Process(resolved, module, name, python=python, seconds=START_SECONDS, **environment)


class Rollout:
    """An SGLang rollout and its store."""

    def __init__(self, directory: Path, spec: Spec) -> None:
        self.spec, self.resolved = spec, resolve(directory, spec)
        shape = model_shape(spec.model.uri)
        assert shape is not None
        self.shape = shape
        self.store = start(self.resolved, "store_main", "store-0")
        self.store.wait_until_it_listens()
        try:
            self.start_server()
        except BaseException:
            self.store.end()
            raise
        self.source: RecordSources = open_source(self.resolved, RUN, NODE, starts_run=True)
        self.version = -1

    def start_server(self) -> None:
        """Start SGLang, for the first time or after it was killed."""
        self.server = start(self.resolved, "rollout_main", "rollout-0")
        self.url = self.server.wait_until_it_listens().url

    @contextlib.asynccontextmanager
    async def client(self) -> AsyncIterator[RolloutClient]:
        digest = site_table(self.shape, self.spec).digest
        async with RolloutClient(self.url, TOKEN, run_id=RUN, site_table=digest) as client:
            await client.connect()
            yield client

    def write(self, weights: dict[str, Tensor]) -> Path:
        """Weights of the next version, as a trainer writes them."""
        self.version += 1
        directory = self.resolved.run_dir / f"v{self.version}"
        write_model(directory, self.shape, weights.items())
        return directory

    async def push(self, client: RolloutClient, weights: dict[str, Tensor]) -> int:
        """Push weights as the loop does; gives their version."""
        directory = self.write(weights)
        await client.pause_generation("retract")
        await push_from_disk([client], str(directory), self.version)
        await client.continue_generation()
        return self.version

    def trajectory(self, prompt: Sequence[int], one: Generation, *, audited: bool = False) -> Trajectory:
        """What a trainer gets: the tokens with everything that was recorded."""
        return Trajectory(
            id=one.id,
            tokens=torch.tensor([*prompt, *one.tokens]),
            prompt_tokens=len(prompt),
            logp_rollout=torch.tensor(one.logp),
            token_versions=one.versions,
            records=self.records(prompt, one, site_table(self.shape, self.spec)),
            audit=self.records(prompt, one, audit_table(self.shape, self.spec)) if audited else None,
        )

    def records(self, prompt: Sequence[int], one: Generation, table: SiteTable) -> TrajectoryRecords:
        return assemble(
            one.records,
            reader_of(self.source),
            table,
            tokens=len(prompt) + len(one.tokens),
            prompt_tokens=len(prompt),
            token_versions=one.versions,
            job_uid="uid-1",
            run_id=RUN,
            trajectory=one.id,
            reprefill=self.spec.records.reprefill,
        )

    def compare(self, trajectories: list[Trajectory], seed: int, version: int) -> EngineStats:
        """Assert that records and log-probs are those of a trainer with the same weights; its counts."""
        trainer = ReferenceTrainer(self.shape, self.spec, weights_of(seed, shape=self.shape))
        logp = trainer.forward(Batch(trajectories), guided=True, temperature=1.0, version=version)
        stats = trainer.stats()
        assert (stats.routes_missing, stats.guided_missing) == (0, 0)
        for row, one in zip(logp, trajectories, strict=True):
            assert (row[: len(one.logp_rollout)] - one.logp_rollout).abs().max() < 2e-5
        return stats

    def frames_held(self) -> int:
        return self.source.usage().frames

    async def until_held(self, frames: int) -> None:
        for _ in range(200):
            if self.frames_held() == frames:
                return
            await asyncio.sleep(0.05)
        assert self.frames_held() == frames

    def release(self, generations: Sequence[Generation]) -> None:
        self.source.release([entry.handle for one in generations for entry in one.records])

    def close(self) -> None:
        self.source.close()
        for process in (self.server, self.store):
            if process.process.poll() is None:
                process.end()


def weights_of(
    seed: int, dtype: torch.dtype = torch.float32, *, shape: ModelShape = SHAPE
) -> dict[str, Tensor]:
    """Initial weights of a tiny model, sharp enough that experts and tokens differ."""
    weights = {name: tensor.to(dtype) for name, tensor in initial_weights(shape, seed)}
    weights["lm_head.weight"] *= 2
    return weights


def sampling(count: int, new_tokens: int, *, temperature: float = 1.0) -> list[Sampling]:
    return [Sampling(new_tokens, temperature, seed=index) for index in range(count)]


async def generate(
    client: RolloutClient, prompts: Sequence[Sequence[int]], samplings: Sequence[Sampling], name: str
) -> list[Generation]:
    return await client.generate_batch(prompts, samplings, ids=[f"{name}-{i}" for i in range(len(prompts))])


@pytest.fixture(scope="session")
def rollout_of(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Rollout]]:
    """Starts rollouts; one at a time, since each is three processes of some hundred MB."""
    started: list[Rollout] = []

    def start(**parts: dict[str, Any]) -> Rollout:
        while started:
            started.pop().close()
        started.append(Rollout(tmp_path_factory.mktemp("rollout") / "run", spec_of(**parts)))
        return started[0]

    yield start
    while started:
        started.pop().close()
