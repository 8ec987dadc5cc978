"""What records cost: nanoseconds a recorded value, and their share of a step of the reference engines.

    python benchmarks/transport/step.py [--quick] [--hidden N] [--repeats N] [--out FILE]

A step generates a batch and trains on it, through the parts that a job has: scheduler, capture, frame writer,
a record store in a process of its own, loader, trainer. The rollout runs twice with the same weights, prompts
and seeds: as TRACE, which records, and as QAT without routing replay, which rounds alike and records nothing.
Their difference in CPU time, over all threads and the store, is what capture, packing and putting cost;
loading, batching and releasing are timed where they happen. The two sides take turns, and the interval of the
share is a bootstrap over repeats. Guided rounding is not the records' cost and not in it.

A difference of two long times is noisy. So the share is given a second time from what the rollout itself
times around capture, packing and putting, as a job's report has it: steadier, but blind to what records cost
elsewhere.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import random
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from tracerl.api.job import Spec
from tracerl.api.model import ModelShape
from tracerl.engines.base import Batch, Trajectory
from tracerl.engines.frames import Destination, FrameWriter
from tracerl.engines.reference.capture import CaptureHooks, RowBuffer
from tracerl.engines.reference.model import KVCache, MoEModel
from tracerl.engines.reference.scheduler import Broken, Finished, Request, Scheduler
from tracerl.engines.reference.trainer import ReferenceTrainer
from tracerl.engines.reference.weights import RolloutWeights
from tracerl.methods import plan
from tracerl.observe.text import seconds, share
from tracerl.records.sites import SiteKind, audit_table, site_table
from tracerl.rl.loading import RecordLoader
from tracerl.runtime.bench import HELLO, cpu_seconds, machine, record_store, wiring_for
from tracerl.transport.base import FrameSink
from tracerl.transport.ring.client import StoreSink, StoreSource

RESULTS = Path(__file__).parents[1] / "results/transport-step-cpu.json"
WAIT_SECONDS = 600.0


@dataclass(frozen=True)
class Size:
    """Model and batch of a step."""

    hidden: int = 1024
    layers: int = 4
    experts: int = 8
    top_k: int = 2
    vocab: int = 1024
    prompts: int = 4
    samples: int = 8
    prompt_tokens: int = 32
    response_tokens: int = 48

    @property
    def shape(self) -> ModelShape:
        """Grouped-query attention with heads of 64, experts half as wide as the model."""
        heads = self.hidden // 64
        return ModelShape.uniform(
            self.layers,
            hidden=self.hidden,
            heads=heads,
            kv_heads=max(1, heads // 4),
            head_dim=64,
            experts=self.experts,
            top_k=self.top_k,
            expert_hidden=self.hidden // 2,
            vocab=self.vocab,
            context=self.prompt_tokens + self.response_tokens,
        )

    def spec(self, *, records: bool) -> Spec:
        """TRACE as by default, or QAT without replay."""
        method = {"name": "TRACE"} if records else {"name": "QAT"}
        return Spec.model_validate(
            {
                "model": {"uri": "builtin://tiny-moe"},
                "task": {"name": "builtin/chain_sum"},
                "algorithm": {
                    "steps": 1,
                    "promptsPerStep": self.prompts,
                    "samplesPerPrompt": self.samples,
                    "routingReplay": records,
                    "maxPromptTokens": self.prompt_tokens,
                    "maxResponseTokens": self.response_tokens,
                },
                "method": method,
            }
        )


class Rollout:
    """A scheduler with its model and frame writer, as a rollout process has them."""

    def __init__(self, size: Size, sink: FrameSink, *, records: bool) -> None:
        self.size, self.records = size, records
        spec, shape = size.spec(records=records), size.shape
        slots = size.prompts * size.samples
        method, table = plan(spec, shape), site_table(shape, spec)
        model = MoEModel(shape, torch.bfloat16)
        self.writer = FrameWriter(limit_bytes=64 * 2**20, deadline_seconds=WAIT_SECONDS)
        self.writer.direct(Destination(sink, HELLO["job_uid"], HELLO["run_id"]))
        self.scheduler = Scheduler(
            model,
            KVCache(shape, slots=slots, capacity=shape.context, dtype=torch.float32),
            CaptureHooks(shape, method, spec.quantization, table, None),
            [RowBuffer(table, slots=slots, capacity=shape.context, reprefill=spec.records.reprefill)],
            self.writer,
            instance="bench",
            kv_tokens=slots * shape.context,
            chunk_tokens=spec.records.chunk_tokens,
            audit_every=0,
        )
        self._weights = RolloutWeights(model, method, spec.quantization)

    def push(self, trainer: ReferenceTrainer) -> None:
        """Take the trainer's weights as version 0."""
        tensors = {name: tensor.clone() for name, tensor in trainer.export()}
        self.scheduler.call(self.scheduler.begin_update).result(WAIT_SECONDS)
        self.scheduler.call(lambda: self.scheduler.end_update(lambda: self._weights.load(tensors), 0)).result(
            WAIT_SECONDS
        )

    def generate(self, step: int) -> tuple[list[Trajectory], float]:
        """Generate the batch of a step, and tell what the rollout timed of records; frames are put then."""
        size, chance = self.size, random.Random(step)
        prompts = [
            [chance.randrange(2, size.vocab) for _ in range(size.prompt_tokens)] for _ in range(size.prompts)
        ]
        outcomes: dict[int, Finished | Broken] = {}
        left = threading.Semaphore(0)

        def deliver(index: int) -> Callable[[Finished | Broken], None]:
            def take(outcome: Finished | Broken) -> None:
                outcomes[index] = outcome
                left.release()

            return take

        count = size.prompts * size.samples
        ids = [f"{step}-{index}" for index in range(count)]
        self.scheduler.submit(
            [
                Request(
                    id=ids[index],
                    prompt=prompts[index // size.samples],
                    max_new_tokens=size.response_tokens,
                    temperature=1.0,
                    seed=step * count + index,
                    stop_token_ids=(),
                    deliver=deliver(index),
                )
                for index in range(count)
            ]
        )
        for _ in range(count):
            if not left.acquire(timeout=WAIT_SECONDS):
                raise SystemExit("the rollout did not answer")
        trajectories = []
        timed = 0.0
        for index in range(count):
            done, prompt = outcomes[index], prompts[index // size.samples]
            if isinstance(done, Broken):
                raise SystemExit(f"the rollout failed: {done.message}")
            timed += sum(done.seconds.values())
            trajectories.append(
                Trajectory(
                    id=ids[index],
                    tokens=torch.tensor(prompt + done.tokens),
                    prompt_tokens=len(prompt),
                    logp_rollout=torch.tensor(done.logp),
                    token_versions=[0] * len(done.tokens),
                    entries=done.entries,
                )
            )
        return trajectories, timed

    def close(self) -> None:
        self.scheduler.stop()
        self.writer.close()


@dataclass(frozen=True)
class Cost:
    """CPU seconds of one step: rollout with and without records, and the parts of the trainer."""

    recording: float
    plain: float
    timed: float
    """Capture, packing and putting, as the rollout times them."""
    loading: float
    batching: float
    releasing: float
    training: float

    @property
    def records(self) -> float:
        """What the records took."""
        return self.recording - self.plain + self.loading + self.batching + self.releasing

    @property
    def timed_records(self) -> float:
        """The same from what was timed, without the difference of two rollouts."""
        return self.timed + self.loading + self.batching + self.releasing

    @property
    def step(self) -> float:
        """The whole step, records included."""
        return self.recording + self.loading + self.training + self.releasing


def cpu_time() -> float:
    """CPU seconds of this process with all its threads, and of the store."""
    return time.process_time() + cpu_seconds()


class Bench:
    """Both rollouts, the trainer and the loader."""

    def __init__(self, size: Size, store: Path) -> None:
        self.size = size
        spec, shape = size.spec(records=True), size.shape
        self.table = site_table(shape, spec)
        self.sink = StoreSink(store, name="rollout-0", timeout=WAIT_SECONDS, **HELLO)
        self.source = StoreSource(store, name="trainer-0", timeout=WAIT_SECONDS, **HELLO)
        self.loader = RecordLoader(
            self.source,
            self.table,
            audit_table(shape, spec),
            job_uid=HELLO["job_uid"],
            run_id=HELLO["run_id"],
            reprefill=spec.records.reprefill,
        )
        self.trainer = ReferenceTrainer(shape, spec)
        self.rollouts = {records: Rollout(size, self.sink, records=records) for records in (True, False)}
        for rollout in self.rollouts.values():
            rollout.push(self.trainer)

    def step(self, number: int) -> Cost:
        """One step with both rollouts, in an order that alternates."""
        cpu: dict[bool, float] = {}
        batches: dict[bool, list[Trajectory]] = {}
        for records in (True, False) if number % 2 else (False, True):
            before = cpu_time()
            batches[records], seconds_timed = self.rollouts[records].generate(number)
            cpu[records] = cpu_time() - before
            if records:
                timed = seconds_timed
        same = zip(batches[True], batches[False], strict=True)
        if any(not torch.equal(one.tokens, other.tokens) for one, other in same):
            raise SystemExit("the two rollouts sampled different tokens: they did not do the same work")

        before = cpu_time()
        trajectories = self.loader.load(batches[True])
        loaded = cpu_time()
        if any(t.records is None or t.records.missing for t in trajectories):
            raise SystemExit("records are missing")
        batch = Batch(trajectories)
        self.trainer.stats()
        started = cpu_time()
        self.trainer.forward(batch, guided=True, temperature=1.0, version=0)
        self.trainer.accumulate(batch, lambda logp: -logp.mean(), guided=True, temperature=1.0, version=0)
        self.trainer.update()
        trained = cpu_time()
        self.source.release([entry.handle for t in trajectories for entry in t.entries])
        self.loader.drop([t.id for t in trajectories])
        # Released one-way: the store's part is done when it has answered something later.
        self.source.usage()
        return Cost(
            recording=cpu[True],
            plain=cpu[False],
            timed=timed,
            loading=loaded - before,
            batching=self.trainer.stats().unpack_seconds,
            releasing=cpu_time() - trained,
            training=trained - started,
        )

    @property
    def values(self) -> int:
        """Recorded values of a step: experts' inputs, keys and values, without expert ids."""
        size = self.size
        rows = size.prompts * size.samples * (size.prompt_tokens + size.response_tokens - 1)
        return rows * sum(site.dim for site in self.table.sites if site.kind is not SiteKind.ROUTES)

    def close(self) -> None:
        for rollout in self.rollouts.values():
            rollout.close()
        self.loader.close()
        self.source.close()
        self.sink.close()


def interval(values: Sequence[float]) -> tuple[float, float]:
    """95 % interval of the mean, by bootstrap."""
    chance = random.Random(0)
    means = sorted(statistics.fmean(chance.choices(values, k=len(values))) for _ in range(10_000))
    return means[249], means[9_749]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a narrow model, few repeats")
    parser.add_argument("--hidden", type=int, help="width of the model")
    parser.add_argument("--repeats", type=int, metavar="N", help="steps that are measured")
    text = f"where the JSON goes; by default {RESULTS.name} of the results, with --quick nowhere"
    parser.add_argument("--out", type=Path, metavar="FILE", help=text)
    options = parser.parse_args()
    torch.set_num_threads(1)
    size = Size(hidden=256, response_tokens=32) if options.quick else Size()
    if options.hidden is not None:
        size = dataclasses.replace(size, hidden=options.hidden)
    repeats = options.repeats or (3 if options.quick else 20)

    costs: list[Cost] = []
    with tempfile.TemporaryDirectory() as directory, record_store(wiring_for(2**20, directory)) as wiring:
        bench = Bench(size, Path(wiring.store))
        try:
            bench.step(0)
            for number in range(1, repeats + 1):
                costs.append(bench.step(number))
                last = costs[-1]
                print(
                    f"step {number} of {repeats}: {last.step:.2f} s of CPU, records {last.records:.3f} s",
                    file=sys.stderr,
                    flush=True,
                )
        finally:
            bench.close()
        values = bench.values

    shares = [cost.records / cost.step for cost in costs]
    timed = [cost.timed_records / cost.step for cost in costs]
    (low, high), (timed_low, timed_high) = interval(shares), interval(timed)
    mean = {
        field.name: statistics.fmean(getattr(cost, field.name) for cost in costs)
        for field in dataclasses.fields(Cost)
    }
    records = statistics.fmean(cost.records for cost in costs)
    result = {
        "size": dataclasses.asdict(size),
        "recordedValues": values,
        "recordBytesPerToken": bench.table.row_bytes,
        "nanosecondsPerValue": records / values * 1e9,
        "shareOfStep": {"mean": statistics.fmean(shares), "low": low, "high": high, "all": shares},
        "timedNanosecondsPerValue": statistics.fmean(cost.timed_records for cost in costs) / values * 1e9,
        "timedShareOfStep": {"mean": statistics.fmean(timed), "low": timed_low, "high": timed_high},
        "cpuSeconds": {
            **mean,
            "records": records,
            "step": statistics.fmean(cost.step for cost in costs),
        },
        "repeats": repeats,
    }
    document = {"results": [result], "machine": {**machine(), "torch": torch.__version__}}
    out = options.out or (None if options.quick else RESULTS)
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(document, indent=2) + "\n")
    print(
        f"hidden {size.hidden}: {result['nanosecondsPerValue']:.2f} ns a recorded value; records take "
        f"{share(result['shareOfStep']['mean'])} of a step of {seconds(result['cpuSeconds']['step'])} CPU "
        f"(95 %: {share(low)} to {share(high)}); as timed {result['timedNanosecondsPerValue']:.2f} ns, "
        f"{share(result['timedShareOfStep']['mean'])} ({share(timed_low)} to {share(timed_high)})"
    )


if __name__ == "__main__":
    main()
