"""A step of decoding under a CUDA graph, with capture and without, of the reference rollout on a GPU.

With: the step rounds, packs what the site table names into rows on the device, and the rows go to pinned
memory and from there into the buffer of the sequences' rows, beside the step after. Without: the same step
rounds alike and keeps nothing. Both are graphs of one model, over the same sequences, and take turns, timed
by CUDA events over some steps in a row, from token to token with what the host does in between.
"""

from __future__ import annotations

import dataclasses
import statistics
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import training

from tracerl.engines.reference.capture import CaptureHooks, RowBuffer
from tracerl.engines.reference.model import KVCache, MoEModel
from tracerl.engines.reference.passes import Draw, Stream, passes_on
from tracerl.engines.reference.weights import RolloutWeights
from tracerl.methods import plan
from tracerl.records.sites import site_table

ARMS = training.ARMS


@dataclass(frozen=True)
class Batch:
    """What is decoded: `sequences` at once, from token `start` on, `steps` of them in a row."""

    sequences: int = 256
    start: int = 512
    steps: int = 32


class Decoder:
    """A rollout's model, cache, capture and rows."""

    def __init__(self, size: training.Size, batch: Batch, arm: str, device: str) -> None:
        shape = size.shape
        spec = size.spec({"name": "TRACE", "trace": ARMS[arm]}, routing_replay=True)
        method, self.table = plan(spec, shape), site_table(shape, spec)
        model = MoEModel(shape, torch.bfloat16, device)
        RolloutWeights(model, method, spec.quantization).load(training.random_weights(shape, device))
        slots, capacity = batch.sequences, batch.start + batch.steps
        cache = KVCache(shape, slots=slots, capacity=capacity, dtype=torch.bfloat16, device=device)
        generator = torch.Generator(device).manual_seed(3)
        for cached in (cache.k, cache.v):
            cached.normal_(generator=generator)
        hooks = CaptureHooks(shape, method, spec.quantization, self.table, None, device=device, rows=slots)
        self._passes = passes_on(model, cache, hooks)
        self._rows = RowBuffer(self.table, slots=slots, capacity=capacity, reprefill=spec.records.reprefill)
        self._batch = batch

    @torch.inference_mode()
    def decode(self, *, recording: bool) -> list[int]:
        """Make the steps; gives the last tokens."""
        batch = self._batch
        slots = np.arange(batch.sequences)
        tokens = slots.copy()
        draw = Draw(
            np.ones(batch.sequences, np.float32), torch.full((batch.sequences,), 0.5, dtype=torch.float64)
        )
        for step in range(batch.steps):
            positions = np.full(batch.sequences, batch.start + step)
            passed = self._passes.run(Stream(tokens, slots, positions), draw, recording=recording)
            if passed.record is not None:
                self._rows.store(slots, positions, passed.record, 0)
            tokens, _ = passed.drawn()
        found: list[int] = tokens.tolist()
        return found


def measure(arm: str, pairs: int, device: str = "cuda") -> dict[str, Any]:
    """Pairs of steps with and without capture; shares are of the step with it."""
    size, batch = training.Size(), Batch()
    decoder = Decoder(size, batch, arm, device)
    if decoder.decode(recording=True) != decoder.decode(recording=False):
        raise RuntimeError("the steps with capture and without it drew different tokens")
    times: dict[bool, list[float]] = {True: [], False: []}
    for number in range(pairs):
        for recording in (True, False) if number % 2 else (False, True):
            taken = training.seconds(lambda recording=recording: decoder.decode(recording=recording))
            times[recording].append(taken / batch.steps)
    shares = [(a - b) / a for a, b in zip(times[True], times[False], strict=True)]
    return {
        "size": dataclasses.asdict(size),
        "batch": dataclasses.asdict(batch),
        "method": ARMS[arm],
        "recordBytesPerToken": decoder.table.row_bytes,
        "pairs": pairs,
        "secondsWith": statistics.median(times[True]),
        "secondsWithout": statistics.median(times[False]),
        "shareOfStep": training.interval(shares) | {"all": shares},
    }
