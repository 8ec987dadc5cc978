"""One RL run in one process, with a set number of policy versions between sampling and training.

The product's own scheduler, records, generator and learner, without the HTTP server and the loop: there, how
old a trajectory is depends on the machine's speed; a study of staleness must set it. Step s generates an
equal share of its groups with the weights of version max(0, s - lag) for every lag, and trains those of s.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tracerl.api.job import DType, Spec, TraceRLJob
from tracerl.api.model import BUILTIN_MODELS, ModelShape
from tracerl.engines.client import Generation, Sampling
from tracerl.engines.frames import Destination, FrameWriter
from tracerl.engines.reference.capture import CaptureHooks, RowBuffer
from tracerl.engines.reference.model import KVCache, MoEModel
from tracerl.engines.reference.scheduler import Broken, Finished, Request, Scheduler
from tracerl.engines.reference.trainer import ReferenceTrainer
from tracerl.engines.reference.weights import RolloutWeights
from tracerl.methods import plan
from tracerl.records.sites import audit_table, site_table
from tracerl.rl.generation import Generator
from tracerl.rl.loading import RecordLoader
from tracerl.rl.parallel import LeadingEngine
from tracerl.rl.tasks import load_task
from tracerl.rl.tokenizer import load_tokenizer
from tracerl.rl.train import Learner, StepOutcome, Timer
from tracerl.rl.warmup import warm_up
from tracerl.transport.base import FrameSink
from tracerl.transport.objects.filesystem import open_filesystem
from tracerl.transport.objects.sink import ObjectSink
from tracerl.transport.objects.source import ObjectSource

_UID = "study"
Weights = dict[str, Tensor]


class OneProcessRollout:
    """The reference engine's scheduler, with what a `Generator` calls of `rl.rollouts.Rollouts`."""

    def __init__(self, job: TraceRLJob, shape: ModelShape, sink: FrameSink, run_id: str, device: str) -> None:
        spec = job.spec
        method = plan(spec, shape)
        dtype = torch.bfloat16 if spec.model.dtype is DType.BFLOAT16 else torch.float32
        table = site_table(shape, spec)
        audits = audit_table(shape, spec) if spec.records.audit_every else None
        slots = spec.rollout.max_running_requests
        capacity = spec.algorithm.max_prompt_tokens + spec.algorithm.max_response_tokens
        self._writer = FrameWriter(limit_bytes=2**30, deadline_seconds=spec.transport.deadline_seconds)
        self._writer.direct(Destination(sink, _UID, run_id))
        model = MoEModel(shape, dtype, device)
        self._weights = RolloutWeights(model, method, spec.quantization)
        self._scheduler = Scheduler(
            model,
            KVCache(shape, slots=slots, capacity=capacity, dtype=dtype, device=device),
            CaptureHooks(shape, method, spec.quantization, table, audits, device=device, rows=slots),
            [
                RowBuffer(one, slots=slots, capacity=capacity, reprefill=spec.records.reprefill)
                for one in (table, audits)
                if one is not None
            ],
            self._writer,
            instance=run_id,
            kv_tokens=slots * capacity,
            chunk_tokens=spec.records.chunk_tokens,
            audit_every=spec.records.audit_every,
        )

    def __len__(self) -> int:
        return 1

    async def use(self, version: int, weights: Weights) -> None:
        """Generate with these weights from now on."""
        self._scheduler.call(self._scheduler.begin_update).result()
        self._scheduler.call(
            lambda: self._scheduler.end_update(lambda: self._weights.load(weights), version)
        ).result()

    async def generate(
        self,
        _replica: int,
        prompts: Sequence[Sequence[int]],
        sampling: Sequence[Sampling],
        ids: Sequence[str],
        *,
        record: bool = True,
    ) -> list[Generation]:
        """Generate everything and wait for it."""
        futures: list[Future[Finished | Broken]] = [Future() for _ in prompts]
        self._scheduler.submit(
            [
                Request(
                    id=id,
                    prompt=list(prompt),
                    max_new_tokens=params.max_new_tokens,
                    temperature=params.temperature,
                    seed=params.seed or 0,
                    stop_token_ids=params.stop_token_ids,
                    deliver=future.set_result,
                    recorded=record,
                )
                for id, prompt, params, future in zip(ids, prompts, sampling, futures, strict=True)
            ]
        )
        return [
            _generation(id, prompt, await asyncio.wrap_future(future))
            for id, prompt, future in zip(ids, prompts, futures, strict=True)
        ]

    def close(self) -> None:
        """End the threads."""
        self._scheduler.stop()
        self._writer.close()


def _generation(id: str, prompt: Sequence[int], outcome: Finished | Broken) -> Generation:
    if isinstance(outcome, Broken):
        raise RuntimeError(outcome.message)
    versions = [version for version, start, end in outcome.spans for _ in range(start, end)]
    return Generation(
        id=id,
        prompt_tokens=len(prompt),
        tokens=outcome.tokens,
        logp=outcome.logp,
        versions=versions,
        finish_reason=str(outcome.finish_reason["type"]),
        records=outcome.entries,
        seconds=outcome.seconds,
    )


class OneProcessJob:
    """All parts of a job in this process, warmed up; whoever made it decides what is generated when.

    `run_id` is unique in the process: the records of its runs lie in one memory.
    """

    def __init__(self, job: TraceRLJob, run_id: str, cache: Path, device: str = "cpu") -> None:
        self.spec = spec = job.spec
        shape = _shape(spec)
        memory = f"memory://{run_id}"
        sink = ObjectSink(
            open_filesystem(memory),
            store="study",
            job_uid=_UID,
            run_id=run_id,
            batch_bytes=2**20,
            batch_seconds=0.0,
        )
        self._source = ObjectSource(
            open_filesystem(memory), job_uid=_UID, run_id=run_id, retention=spec.transport.object.retention
        )
        self._loader = RecordLoader(
            self._source,
            site_table(shape, spec),
            audit_table(shape, spec),
            job_uid=_UID,
            run_id=run_id,
            reprefill=spec.records.reprefill,
        )
        self.rollout = OneProcessRollout(job, shape, sink, run_id, device)
        self.trainer = ReferenceTrainer(shape, spec, device=device)
        self.task = load_task(spec.task, order_seed=spec.algorithm.seed, scratch=cache)
        tokenizer = load_tokenizer(spec.model)
        warm_up(self.trainer, spec, self.task, tokenizer, cache=cache, progress=_quiet, report=print)
        self.generator = Generator(
            spec,
            run_id=run_id,
            task=self.task,
            tokenizer=tokenizer,
            rollouts=self.rollout,  # type: ignore[arg-type]  # the part of Rollouts that a Generator uses
            source=self._source,
            loader=self._loader,
            report=print,
        )
        engine = LeadingEngine(self.trainer, self._loader, run_id=run_id)
        self.learner = Learner(engine, plan(spec, shape), spec)

    def weights(self) -> Weights:
        """The trainer's weights of now, to keep."""
        return {name: value.clone() for name, value in self.trainer.export()}

    def close(self) -> None:
        """End threads and processes."""
        self.rollout.close()
        self._loader.close()
        self._source.close()
        self.task.close()


def run(job: TraceRLJob, lags: Sequence[int], *, evaluate: int, cache: Path) -> dict[str, Any]:
    """Train; returns per-step rewards, gaps and k3 KL of rollout against trainer, and both evaluations."""
    return asyncio.run(_run(job, lags, evaluate, cache))


def warm(job: TraceRLJob, cache: Path, device: str = "cpu") -> None:
    """Fill the warm-up cache for a job, so that its arms start from the same weights at once."""
    spec = job.spec
    task = load_task(spec.task, order_seed=spec.algorithm.seed, scratch=cache)
    trainer = ReferenceTrainer(_shape(spec), spec, device=device)
    warm_up(trainer, spec, task, load_tokenizer(spec.model), cache=cache, progress=_quiet, report=print)
    task.close()


def _shape(spec: Spec) -> ModelShape:
    return BUILTIN_MODELS[spec.model.uri.removeprefix("builtin://")]


def _quiet(*_: object) -> None:
    pass


async def _run(job: TraceRLJob, lags: Sequence[int], evaluate: int, cache: Path) -> dict[str, Any]:
    started = time.perf_counter()
    spec = job.spec
    parts = OneProcessJob(job, f"{spec.method.name}-{spec.algorithm.seed}", cache)
    history: deque[Weights] = deque(maxlen=max(lags) + 1)
    steps: list[dict[str, Any]] = []
    prompts = spec.algorithm.prompts_per_step
    try:
        rewards = {}
        for step in range(spec.algorithm.steps + 1):
            history.append(parts.weights())
            if step in {0, spec.algorithm.steps}:
                await parts.rollout.use(step, history[-1])
                rewards[step] = await parts.generator.evaluate(parts.task.held_out[:evaluate], step)
            if step == spec.algorithm.steps:
                break
            groups = []
            for part, lag in enumerate(lags):
                version = max(0, step - lag)
                await parts.rollout.use(version, history[version - step - 1])
                first = step * prompts + part * prompts // len(lags)
                groups += await parts.generator.groups(range(first, first + prompts // len(lags)))
            outcome = parts.learner.step(groups, step, Timer())
            await parts.generator.release(groups)
            steps.append(step_figures(outcome))
    finally:
        parts.close()
    return {
        "steps": steps,
        "heldOutStart": rewards[0],
        "heldOutEnd": rewards[spec.algorithm.steps],
        "seconds": time.perf_counter() - started,
    }


def step_figures(outcome: StepOutcome) -> dict[str, Any]:
    """What a study keeps of a step."""
    unguided = outcome.gap_unguided or outcome.gap_guided
    return {
        "reward": outcome.reward.mean,
        "gapGuided": outcome.gap_guided.mean,
        "gapUnguided": unguided.mean,
        "k3Kl": outcome.rollout_corr["k3_kl"],
        "isWeightMean": outcome.rollout_corr["rollout_is_mean"],
        "clipFraction": outcome.policy.clip_fraction,
        "gradNorm": outcome.policy.grad_norm,
        "missing": outcome.engine.records.missing.total(),
    }
