"""Supervised warm-up: a tiny model learns the task some of the time before RL starts. Cached by content.

Unquantised FP32 on the task's own answers, whatever the method, so that jobs that differ only in method start
from the same weights.
"""

from __future__ import annotations

import hashlib
import json
import math
import random
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import xxhash
from torch import Tensor

from tracerl.api.constants import Reason
from tracerl.api.errors import JobError
from tracerl.api.job import Spec
from tracerl.engines.base import TrainerEngine
from tracerl.rl.checkpoint import Checkpoints
from tracerl.rl.generation import encode_prompt
from tracerl.rl.tasks import Task
from tracerl.rl.tokenizer import Tokenizer

WARMUP_VERSION = 1
"""Part of the cache key: raise it when the same inputs would lead to other weights."""

_RISE_STEPS = 20
_REPORT_EVERY = 5

Progress = Callable[[int, int, float | None], None]
"""Takes steps done, steps wanted and the loss in nats, None before the first step."""


@dataclass(frozen=True)
class WarmupResult:
    """What the warm-up did: nothing was computed when it came from the cache."""

    steps: int
    seconds: float
    cached: bool


def warm_up(
    engine: TrainerEngine,
    spec: Spec,
    task: Task,
    tokenizer: Tokenizer,
    *,
    cache: Path | None,
    progress: Progress,
    report: Callable[[str], None],
) -> WarmupResult:
    """Bring the engine to the warmed-up weights, with a fresh optimizer; `report` gets sentences for the log.

    Without a `cache` it is computed each time, and no process is given what others hold.
    JobError when the loss is not finite or the task has no answers.
    """
    steps = spec.warmup.steps
    if steps == 0:
        return WarmupResult(0, 0.0, cached=False)
    directory = None if cache is None else cache / "warmup" / cache_key(engine, spec, task)
    if directory is not None and _restored(engine, directory, report):
        return WarmupResult(steps, 0.0, cached=True)
    start = time.perf_counter()
    _train(engine, spec, task, tokenizer, progress)
    engine.reset_optimizer()
    if directory is not None:
        _keep(engine, directory, steps, report)
    return WarmupResult(steps, time.perf_counter() - start, cached=False)


def _restored(engine: TrainerEngine, directory: Path, report: Callable[[str], None]) -> bool:
    """Whether the engine has the weights kept there: whole and right, or they are computed again."""
    try:
        found = Checkpoints(directory, keep=1).load(
            report, what="the cached warm-up", without="it is computed again"
        )
    except JobError as error:
        report(f"the cached warm-up was not read: {error}")
        return False
    if found is None:
        return False
    engine.load_state(found.tensors)
    engine.reset_optimizer()
    return True


def _keep(engine: TrainerEngine, directory: Path, steps: int, report: Callable[[str], None]) -> None:
    """Write the weights, one directory a key, as a checkpoint is written."""
    try:
        Checkpoints(directory, keep=1).save(steps, engine.state(), {"step": steps})
    except JobError as error:
        # The cache saves time; a run whose cache cannot be written is right all the same.
        shutil.rmtree(directory, ignore_errors=True)
        report(f"the warm-up was not cached: {directory} cannot be written ({error.__cause__})")


def cache_key(engine: TrainerEngine, spec: Spec, task: Task) -> str:
    """Return the hash of everything that the warmed-up weights depend on, as 32 hexadecimal digits."""
    weights = xxhash.xxh3_128()
    for name, tensor in sorted(engine.export()):
        weights.update(name.encode())
        weights.update(tensor.contiguous().view(torch.uint8).numpy().tobytes())
    items = task.fingerprint()
    document = {
        "version": WARMUP_VERSION,
        "weights": weights.hexdigest(),
        "shape": engine.shape.model_dump(mode="json"),
        "warmup": spec.warmup.model_dump(mode="json"),
        "tokenizer": spec.model.tokenizer_uri or spec.model.uri,
        "optimizer": spec.trainer.optimizer.model_dump(
            mode="json", include={"beta1", "beta2", "epsilon", "weight_decay", "gradient_clip"}
        ),
        "task": spec.task.model_dump(mode="json", exclude={"source", "reward", "reward_timeout_seconds"}),
        "items": items,
        # The order of a file's items depends on the job's seed; that of an endless task does not.
        "order": spec.algorithm.seed if items else None,
    }
    return hashlib.sha256(json.dumps(document, sort_keys=True).encode()).hexdigest()[:32]


def _train(engine: TrainerEngine, spec: Spec, task: Task, tokenizer: Tokenizer, progress: Progress) -> None:
    steps, size = spec.warmup.steps, spec.warmup.batch_size
    peak = float(spec.warmup.learning_rate)
    progress(0, steps, None)
    for step in range(steps):
        engine.set_learning_rate(peak * learning_rate_share(step, steps))
        tokens, mask = _batch(spec, task, tokenizer, range(step * size, (step + 1) * size))
        loss = engine.supervised_step(tokens, mask)
        if not math.isfinite(loss):
            raise JobError(
                Reason.NON_FINITE,
                f"the warm-up loss of step {step + 1} is not finite; lower warmup.learningRate",
            )
        if (step + 1) % _REPORT_EVERY == 0 or step + 1 == steps:
            progress(step + 1, steps, loss)


def learning_rate_share(step: int, steps: int) -> float:
    """Return the share of the peak rate at a step: a linear rise over 20 steps, then constant.

    Constant, because what is learnt jumps late and a decay would have to know when.
    """
    return min(1.0, (step + 1) / min(_RISE_STEPS, steps))


def _batch(spec: Spec, task: Task, tokenizer: Tokenizer, positions: range) -> tuple[Tensor, Tensor]:
    """Return tokens int64 [B, S], padded with 0, and the mask bool [B, S] of tokens to predict."""
    rows: list[tuple[list[int], int]] = []
    items = task.warmup(positions)
    noise = float(spec.warmup.answer_noise)
    for number, (position, item) in enumerate(zip(positions, items, strict=True)):
        prompt = encode_prompt(tokenizer, item, spec.algorithm)
        imperfect = random.Random(f"{spec.warmup.seed}/{position}").random() < noise  # noqa: S311
        answered = items[number - 1] if imperfect else item
        answer = [*tokenizer.encode(task.supervised_answer(answered)), tokenizer.stop_ids[0]]
        rows.append((prompt + answer, len(prompt)))
    width = max(len(row) for row, _ in rows)
    tokens = torch.zeros((len(rows), width), dtype=torch.int64)
    mask = torch.zeros((len(rows), width), dtype=torch.bool)
    for number, (row, prompt_tokens) in enumerate(rows):
        tokens[number, : len(row)] = torch.tensor(row)
        mask[number, prompt_tokens : len(row)] = True
    return tokens, mask
