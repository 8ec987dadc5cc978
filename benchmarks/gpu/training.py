"""The whole training step of the reference engine on a GPU, with records and guided kernels and without.

A step is some forward and backward passes and one update, of a slice of Qwen3-30B-A3B: layers, experts and
vocabulary cut, every width as it is. With: TRACE, whose records come from the host for each micro-batch.
Without: QAT, which rounds the same values to nearest and replays no experts. Both engines have the same
weights and tokens and take turns, timed by CUDA events.
"""

from __future__ import annotations

import dataclasses
import itertools
import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tracerl.api.job import Spec
from tracerl.api.model import ModelShape
from tracerl.engines.base import Batch, Trajectory
from tracerl.engines.hf import hf_shapes
from tracerl.engines.reference.model import MoEModel, PlainHooks, WholeSequences
from tracerl.engines.reference.trainer import ReferenceTrainer
from tracerl.engines.reference.weights import RolloutWeights
from tracerl.methods import plan
from tracerl.numerics import dequantize, quantize
from tracerl.records.pairing import TrajectoryRecords
from tracerl.records.rows import pack_routes, pack_rows
from tracerl.records.sites import SiteKind, SiteTable, site_table

ARMS: dict[str, dict[str, Any]] = {
    "oneBitHalf": {"codeBits": 1, "scaleBits": 3, "layers": {"policy": "LastHalf"}},
    "wholeAll": {"codeBits": 4, "scaleBits": 8, "layers": {"policy": "All"}},
}


@dataclass(frozen=True)
class Size:
    """A slice of Qwen3-30B-A3B, which has 48 layers, 128 experts and a vocabulary of 151,936.

    A quarter of the experts is what one rank of four holds under expert parallelism; it has its share of the
    tokens of all four. The vocabulary is cut like the layers, so that the head has its part of the work.
    """

    layers: int = 8
    hidden: int = 2048
    heads: int = 32
    kv_heads: int = 4
    head_dim: int = 128
    experts: int = 32
    top_k: int = 8
    expert_hidden: int = 768
    vocab: int = 25_344
    prompt_tokens: int = 256
    response_tokens: int = 768
    trajectories: int = 16
    micro_batches: int = 2

    @property
    def shape(self) -> ModelShape:
        """The model."""
        return ModelShape.uniform(
            self.layers,
            hidden=self.hidden,
            heads=self.heads,
            kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            experts=self.experts,
            top_k=self.top_k,
            expert_hidden=self.expert_hidden,
            vocab=self.vocab,
            context=self.prompt_tokens + self.response_tokens,
        )

    def spec(self, method: dict[str, Any], *, routing_replay: bool) -> Spec:
        """The job."""
        return Spec.model_validate(
            {
                "model": {"uri": "builtin://tiny-moe"},
                "task": {"name": "builtin/chain_sum"},
                "algorithm": {
                    "steps": 1,
                    "promptsPerStep": self.trajectories,
                    "samplesPerPrompt": self.micro_batches,
                    "routingReplay": routing_replay,
                },
                "method": method,
            }
        )

    @property
    def tokens(self) -> int:
        """Rows of a micro-batch."""
        return self.trajectories * (self.prompt_tokens + self.response_tokens - 1)

    @property
    def matrix_flops(self) -> float:
        """Operations of the matrix products of one micro-batch, forward and backward, without attention's."""
        attention = self.hidden * self.head_dim * (2 * self.heads + 2 * self.kv_heads)
        experts = self.top_k * 3 * self.hidden * self.expert_hidden + self.hidden * self.experts
        head = self.hidden * self.vocab * self.trajectories * self.response_tokens
        return 6.0 * (self.tokens * self.layers * (attention + experts) + head)


def random_weights(shape: ModelShape, device: str) -> dict[str, Tensor]:
    """Draw weights like a fresh model's where they will be: on a CPU 1.5 billion take most of a minute."""
    generator = torch.Generator(device).manual_seed(1)
    return {
        name: torch.ones(size, device=device)
        if len(size) == 1
        else torch.randn(size, generator=generator, device=device, dtype=torch.bfloat16) * size[1] ** -0.5
        for name, size in hf_shapes(shape).items()
    }


class _Recording(PlainHooks):
    """A rollout's rounding that writes rows uint8 [N, row_bytes] of its site table."""

    def __init__(self, shape: ModelShape, table: SiteTable, rows: Tensor) -> None:
        super().__init__(shape)
        self._table, self._rows = table, rows

    def _round(self, layer: int, kind: SiteKind, x: Tensor) -> Tensor:
        quantized = quantize(x)
        site = self._table.find(layer, kind)
        if site is not None:
            packed, zero = pack_rows(site, quantized)
            assert not len(zero), "the trajectories would have to carry zero blocks"
            offset = self._table.offset(site)
            self._rows[:, offset : offset + site.row_bytes] = packed
        return dequantize(quantized, x.dtype)

    def expert_input(self, layer: int, x: Tensor) -> Tensor:
        return self._round(layer, SiteKind.EXPERT_INPUT, x)

    def key(self, layer: int, k: Tensor) -> Tensor:
        return self._round(layer, SiteKind.KEY, k)

    def value(self, layer: int, v: Tensor) -> Tensor:
        return self._round(layer, SiteKind.VALUE, v)

    def routes(self, layer: int, logits: Tensor) -> Tensor:
        ids = super().routes(layer, logits)
        site = self._table.find(layer, SiteKind.ROUTES)
        if site is not None:
            offset = self._table.offset(site)
            self._rows[:, offset : offset + site.row_bytes] = pack_routes(site, ids)
        return ids


@torch.inference_mode()
def recorded(
    size: Size, spec: Spec, weights: dict[str, Tensor], batches: Sequence[Sequence[Tensor]], device: str
) -> list[list[TrajectoryRecords]]:
    """What a rollout with these weights records of whole sequences, int64 [n] each, by micro-batch."""
    shape, table = size.shape, site_table(size.shape, spec)
    model = MoEModel(shape, torch.bfloat16, device)
    RolloutWeights(model, plan(spec, shape), spec.quantization).load(weights)
    result = []
    for batch in batches:
        lengths = [len(tokens) - 1 for tokens in batch]
        rows = torch.zeros((sum(lengths), table.row_bytes), dtype=torch.uint8, device=device)
        stream = torch.cat([tokens[:-1] for tokens in batch]).to(device)
        model(stream, WholeSequences(shape, lengths, device), _Recording(shape, table, rows))
        result.append(
            [
                TrajectoryRecords(
                    table=table,
                    n_rows=len(part),
                    # As the loader of a job leaves them.
                    rows=part.pin_memory(),
                    present=torch.ones((len(part), len(table.sites)), dtype=torch.bool),
                    versions=torch.zeros(len(part), dtype=torch.int32),
                    zero_blocks=torch.zeros((0, 3), dtype=torch.int64),
                    tensor_scales=None,
                    faults=np.zeros(len(part), dtype=np.uint8),
                    bytes=part.numel(),
                    mixed=0,
                )
                for part in rows.cpu().split(lengths)
            ]
        )
    return result


class Engine:
    """A trainer with the micro-batches of its step."""

    def __init__(self, size: Size, spec: Spec, weights: dict[str, Tensor], device: str) -> None:
        self.size = size
        self.trainer = ReferenceTrainer(size.shape, spec, weights, device)
        self.batches: list[Batch] = []

    def step(self, *, guided: bool, ahead: bool = True) -> None:
        """Forward, backward and update; `ahead`: the next micro-batch is uploaded beside each pass."""
        how: dict[str, Any] = {"guided": guided, "temperature": 1.0, "version": 0}
        for batch, following in itertools.zip_longest(self.batches, self.batches[1:]):
            batch.upcoming = (lambda one=following: one.trajectories) if ahead and following else list
            self.trainer.accumulate(batch, lambda logp: -logp.mean(), **how)
        self.trainer.update()


def tokens_of(size: Size) -> list[list[Tensor]]:
    """Draw the tokens of every micro-batch."""
    generator = torch.Generator().manual_seed(2)
    length = size.prompt_tokens + size.response_tokens
    return [
        [torch.randint(size.vocab, (length,), generator=generator) for _ in range(size.trajectories)]
        for _ in range(size.micro_batches)
    ]


def batches_of(
    size: Size, batches: Sequence[Sequence[Tensor]], records: Sequence[Sequence[TrajectoryRecords | None]]
) -> list[Batch]:
    """Make micro-batches of tokens and their records."""
    return [
        Batch(
            [
                Trajectory(
                    id=f"{number}-{index}",
                    tokens=tokens,
                    prompt_tokens=size.prompt_tokens,
                    logp_rollout=torch.zeros(size.response_tokens),
                    token_versions=[0] * size.response_tokens,
                    records=record,
                )
                for index, (tokens, record) in enumerate(zip(batch, known, strict=True))
            ]
        )
        for number, (batch, known) in enumerate(zip(batches, records, strict=True))
    ]


def seconds(work: Callable[[], object]) -> float:
    """Time work by CUDA events, from an idle GPU to an idle GPU."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    start.record()
    work()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / 1000


def upload_seconds(size: int, device: str) -> float:
    """Time of copying bytes from pinned memory to an idle GPU, the least of ten."""
    host = torch.empty(size, dtype=torch.uint8, pin_memory=True)
    there = torch.empty(size, dtype=torch.uint8, device=device)
    return min(seconds(lambda: there.copy_(host, non_blocking=True)) for _ in range(10))


def interval(values: Sequence[float]) -> dict[str, float]:
    """Mean of values with its 95 % interval, by bootstrap."""
    chance = random.Random(0)
    means = sorted(statistics.fmean(chance.choices(values, k=len(values))) for _ in range(4_000))
    return {"mean": statistics.fmean(values), "low": means[99], "high": means[3_899]}


def measure(size: Size, arm: str, pairs: int, device: str = "cuda") -> dict[str, Any]:
    """Pairs of steps with and without records; shares are of the step with them.

    Beside them steps that upload each micro-batch only when its pass begins.
    """
    weights = random_weights(size.shape, device)
    tokens = tokens_of(size)
    spec = size.spec({"name": "TRACE", "trace": ARMS[arm]}, routing_replay=True)
    recording = Engine(size, spec, weights, device)
    records = recorded(size, spec, weights, tokens, device)
    recording.batches = batches_of(size, tokens, records)
    plain = Engine(size, size.spec({"name": "QAT"}, routing_replay=False), weights, device)
    plain.batches = batches_of(size, tokens, [[None] * size.trajectories] * size.micro_batches)
    del weights
    steps: dict[str, Callable[[], None]] = {
        "with": lambda: recording.step(guided=True),
        "without": lambda: plain.step(guided=False),
        "late": lambda: recording.step(guided=True, ahead=False),
    }
    times: dict[str, list[float]] = {which: [] for which in steps}
    for number in range(pairs + 2):
        for which in list(steps) if number % 2 else reversed(steps):
            taken = seconds(steps[which])
            if number >= 2:
                times[which].append(taken)
    shares = [(a - b) / a for a, b in zip(times["with"], times["without"], strict=True)]
    record_bytes = sum(one.rows.numel() for batch in records for one in batch)
    assert recording.trainer.stats().guided_missing == 0, "every row was recorded"
    return {
        "size": dataclasses.asdict(size),
        "method": ARMS[arm],
        "recordBytesPerToken": site_table(size.shape, spec).row_bytes,
        "recordBytes": record_bytes,
        "uploadSeconds": upload_seconds(record_bytes, device),
        "tokens": size.tokens * size.micro_batches,
        "pairs": pairs,
        "secondsWith": statistics.median(times["with"]),
        "secondsWithout": statistics.median(times["without"]),
        "secondsUploadedLate": statistics.median(times["late"]),
        "shareOfStep": interval(shares) | {"all": shares},
        "matrixFlopsPerSecond": size.matrix_flops * size.micro_batches / statistics.median(times["without"]),
    }
