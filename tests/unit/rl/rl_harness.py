"""A whole job in one process: real rollout servers, trainer and transport, a few thousand weights."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from aiohttp import web

from tracerl.api.job import TraceRLJob
from tracerl.api.model import ModelShape
from tracerl.api.resolved import Endpoint, EndpointFile, Endpoints, ResolvedJob
from tracerl.engines.reference.server import RolloutServer
from tracerl.engines.reference.trainer import ReferenceTrainer
from tracerl.rl.loading import LEADER, open_loader
from tracerl.rl.loop import run_loop
from tracerl.rl.parallel import LeadingEngine
from tracerl.transport.sources import open_sink

SHAPE = ModelShape.uniform(
    2, hidden=32, heads=2, kv_heads=1, head_dim=16, experts=4, top_k=2, expert_hidden=16, vocab=64, context=32
)
# An untrained model earns something, and not the same for every sample: its share of digits.
REWARD = """
def digits(completion, item):
    return sum(c in item["answer"] for c in completion) / max(1, len(completion))
"""


def make_job(directory: Path, **sections: dict[str, Any]) -> ResolvedJob:
    """Resolve a small job into a directory; sections of the spec are merged over its defaults."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "token").write_text("secret")
    (directory / "reward_code.py").write_text(REWARD)
    lines = [f'{{"prompt": "{n} + {n} =", "answer": "0123456789"}}' for n in range(10, 40)]
    (directory / "train.jsonl").write_text("\n".join(lines))
    spec: dict[str, Any] = {
        "model": {"uri": "builtin://tiny-moe", "dtype": "Float32"},
        "task": {
            "uri": str(directory / "train.jsonl"),
            "reward": "reward_code:digits",
            "source": {"uri": str(directory / "reward_code.py")},
            "heldOutPrompts": 4,
        },
        "algorithm": {
            "steps": 4,
            "promptsPerStep": 2,
            "samplesPerPrompt": 3,
            "miniBatches": 2,
            "maxPromptTokens": 16,
            "maxResponseTokens": 6,
            "maxVersionDiff": 0,
            "evaluation": {"prompts": 4},
        },
        "method": {"name": "TRACE"},
        "rollout": {"maxRunningRequests": 16, "kvCacheTokens": 512},
        "trainer": {"optimizer": {"learningRate": "0.01"}, "checkpoint": {"every": 2}},
        "transport": {"onlyObject": True},
    }
    for name, fields in sections.items():
        spec[name] = {**spec.get(name, {}), **fields}
    job = TraceRLJob.model_validate(
        {"apiVersion": "tracerl.dev/v1alpha1", "kind": "TraceRLJob", "metadata": {"name": "x"}, "spec": spec}
    )
    return ResolvedJob(
        job=job,
        job_uid="uid",
        run_dir=directory,
        cache_dir=directory / "cache",
        token_file=directory / "token",
        endpoints=Endpoints(
            directory=directory / "endpoints",
            rollout=[Endpoint(name="rollout-0")],
            trainer=[Endpoint(name="trainer-0"), Endpoint(name="trainer-1")],
        ),
    )


@contextlib.asynccontextmanager
async def rollout(
    resolved: ResolvedJob, puts_into: ResolvedJob | None = None, shape: ModelShape = SHAPE
) -> AsyncIterator[RolloutServer]:
    """Serve rollout-0 on a free port, published like that of a real process."""
    server = RolloutServer(
        resolved.job,
        shape,
        job_uid=resolved.job_uid,
        token="secret",
        open_sink=partial(open_sink, puts_into or resolved, "rollout-0"),
    )
    runner = web.AppRunner(server.application(), handler_cancellation=True, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    assert resolved.endpoints.directory is not None
    published = resolved.endpoints.directory / "rollout-0.json"
    url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    EndpointFile(url=url, pid=1, instance_id=server.instance_id).publish(published)
    try:
        yield server
    finally:
        published.unlink()
        server.stop()
        await runner.cleanup()
        server.close()


class Log:
    """Keeps every line; `on_line` is called after each."""

    def __init__(self, on_line: Callable[[Mapping[str, Any]], None] = lambda _: None) -> None:
        self.lines: list[dict[str, Any]] = []
        self.saved_steps: list[int] = []
        self.on_line = on_line

    def write(self, record: Mapping[str, Any]) -> None:
        self.lines.append(dict(record))
        self.on_line(record)

    def progress(self, stage: str, done: int, total: int, **values: float) -> None:
        pass

    def sync(self) -> None:
        pass

    def saved(self, step: int) -> None:
        self.saved_steps.append(step)

    def of(self, kind: str) -> list[dict[str, Any]]:
        return [line for line in self.lines if line["type"] == kind]

    @property
    def repeatable(self) -> list[dict[str, Any]]:
        """Steps without what differs between equal runs: times and names."""
        timed = {"run_id", "time", "seconds", "overhead", "tokens_per_second", "transport"}
        return [{key: value for key, value in line.items() if key not in timed} for line in self.of("step")]


def trainer(resolved: ResolvedJob) -> ReferenceTrainer:
    torch.set_num_threads(1)
    return ReferenceTrainer(SHAPE, resolved.job.spec)


@contextlib.contextmanager
def leading(resolved: ResolvedJob, ranks: int = 1) -> Iterator[LeadingEngine]:
    """What the loop makes of a trainer, here for trajectories without entries."""
    with open_loader(resolved, SHAPE, "run", LEADER) as (loader, _):
        yield LeadingEngine(trainer(resolved), loader, run_id="run", nodes=[None] * ranks)


async def run(resolved: ResolvedJob, log: Log | None = None) -> Log:
    """Run a job with one rollout to its end; returns its log."""
    log = log or Log()
    async with rollout(resolved):
        await run_loop(resolved, trainer(resolved), log)
    return log
