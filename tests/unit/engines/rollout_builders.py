"""A scheduler with its writer and a record store, driven without HTTP."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import torch
from engine_stores import JOB, RUN, WAIT_SECONDS, RecordStore, RingStore
from torch import Tensor

from tracerl.api.job import Reprefill, Spec
from tracerl.api.model import ModelShape
from tracerl.engines.frames import Destination, FrameWriter
from tracerl.engines.reference.capture import CaptureHooks, RowBuffer
from tracerl.engines.reference.model import KVCache, MoEModel
from tracerl.engines.reference.scheduler import Broken, Finished, Request, Scheduler
from tracerl.engines.reference.weights import RolloutWeights, hf_views, initialise
from tracerl.methods import plan
from tracerl.records.pairing import TrajectoryRecords, assemble
from tracerl.records.sites import audit_table, site_table

SHAPE = ModelShape.uniform(
    2, hidden=32, heads=4, kv_heads=2, head_dim=16, experts=4, top_k=2, expert_hidden=16, vocab=30, context=64
)
torch.set_num_threads(1)


def spec_of(
    method: str = "TRACE", *, dtype: str = "Float32", records: dict | None = None, **quantization
) -> Spec:
    return Spec.model_validate(
        {
            "model": {"uri": "builtin://tiny-moe", "dtype": dtype},
            "task": {"name": "builtin/chain_sum"},
            "algorithm": {"steps": 1, "promptsPerStep": 1, "samplesPerPrompt": 2},
            "quantization": quantization,
            "method": {"name": method}
            | ({"trace": {"layers": {"policy": "All"}}} if method == "TRACE" else {}),
            "records": records or {},
        }
    )


def weights_of(seed: int, shape: ModelShape = SHAPE) -> dict[str, Tensor]:
    """Initial weights with larger matrices, so that the small model prefers some tokens."""
    parameters = {name: p.detach() for name, p in MoEModel(shape).named_parameters()}
    initialise(shape, parameters, seed)
    for name, view in parameters.items():
        if view.ndim > 1 and "embedding" not in name:
            view.mul_(2.0)
    return {name: view.clone() for name, view in hf_views(shape, parameters).items()}


class Rollout:
    """A running scheduler with weights of version 0; `close` it."""

    def __init__(
        self,
        records: Path,
        spec: Spec,
        *,
        slots: int = 16,
        kv_tokens: int = 16 * 64,
        weights: dict[str, Tensor] | None = None,
        limit_bytes: int = 2**20,
        deadline_seconds: float = WAIT_SECONDS,
        store: Callable[[Path], RecordStore] = RingStore,
        device: str = "cpu",
    ) -> None:
        self.spec, self.device = spec, device
        self.table, self.audit_table = site_table(SHAPE, spec), audit_table(SHAPE, spec)
        dtype = torch.bfloat16 if spec.model.dtype == "BFloat16" else torch.float32
        method = plan(spec, SHAPE)
        every = spec.records.audit_every
        tables = [self.table, self.audit_table] if every else [self.table]
        self.model = MoEModel(SHAPE, dtype, device)
        self.store = store(records)
        self.writer = FrameWriter(limit_bytes=limit_bytes, deadline_seconds=deadline_seconds)
        self.writer.direct(Destination(self.store.sink, JOB, RUN))
        self.scheduler = Scheduler(
            self.model,
            KVCache(SHAPE, slots=slots, capacity=SHAPE.context, dtype=torch.float32, device=device),
            CaptureHooks(
                SHAPE,
                method,
                spec.quantization,
                self.table,
                self.audit_table if every else None,
                device=device,
                rows=slots,
            ),
            [
                RowBuffer(table, slots=slots, capacity=SHAPE.context, reprefill=spec.records.reprefill)
                for table in tables
            ],
            self.writer,
            instance="instance",
            kv_tokens=kv_tokens,
            chunk_tokens=spec.records.chunk_tokens,
            audit_every=every,
        )
        self._weights = RolloutWeights(self.model, method, spec.quantization)
        self.push(weights_of(0) if weights is None else weights, 0)

    def push(self, weights: dict[str, Tensor], version: int) -> None:
        assert self.scheduler.call(self.scheduler.begin_update).result(WAIT_SECONDS) is None
        load = lambda: self._weights.load(weights)  # noqa: E731
        self.scheduler.call(lambda: self.scheduler.end_update(load, version)).result(WAIT_SECONDS)

    def start(self, *asked: dict) -> Pending:
        pending = Pending(len(asked))
        self.scheduler.submit([request(index, pending, **one) for index, one in enumerate(asked)])
        return pending

    def generate(self, *asked: dict) -> list[Finished]:
        outcomes = self.start(*asked).wait()
        assert all(isinstance(outcome, Finished) for outcome in outcomes)
        return outcomes

    def assemble(
        self, id: str, prompt: list[int], done: Finished, *, audit: bool = False
    ) -> TrajectoryRecords:
        versions = [version for version, start, end in done.spans for _ in range(start, end)]
        return assemble(
            done.entries,
            self.store.get,
            self.audit_table if audit else self.table,
            tokens=len(prompt) + len(done.tokens),
            prompt_tokens=len(prompt),
            token_versions=versions,
            job_uid=JOB,
            run_id=RUN,
            reprefill=Reprefill(self.spec.records.reprefill),
            trajectory=id,
            page_locked=self.device == "cuda",
        )

    def close(self) -> None:
        self.scheduler.stop()
        self.writer.close()
        self.store.close()


class Pending:
    """Outcomes of requests, in the order in which they were asked."""

    def __init__(self, count: int) -> None:
        self.outcomes: list[Finished | Broken | None] = [None] * count
        self._left = threading.Semaphore(0)

    def take(self, index: int, outcome: Finished | Broken) -> None:
        assert self.outcomes[index] is None, "delivered twice"
        self.outcomes[index] = outcome
        self._left.release()

    def wait(self) -> list[Finished | Broken]:
        for _ in self.outcomes:
            assert self._left.acquire(timeout=WAIT_SECONDS), "a request was not answered"
        return self.outcomes


def request(
    index: int,
    pending: Pending,
    *,
    prompt: list[int],
    new: int,
    id: str | None = None,
    temperature: float = 1.0,
    seed: int | None = None,
    stop: tuple[int, ...] = (),
) -> Request:
    return Request(
        id=id or f"t{index}",
        prompt=prompt,
        max_new_tokens=new,
        temperature=temperature,
        seed=index if seed is None else seed,
        stop_token_ids=stop,
        deliver=lambda outcome: pending.take(index, outcome),
    )
