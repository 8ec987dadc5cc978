"""What the policy is asked and how an answer is scored: named tasks, or JSONL with a reward function.

A task is a fixed set of held-out items and an endless, deterministic sequence of training items. No
held-out prompt ever appears in training: they are told apart by their text, since different seeds can draw
equal prompts.
"""

from __future__ import annotations

import hashlib
import json
import os
import queue
import random
import select
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import Any, Protocol

import fsspec

from tracerl.api.constants import Reason
from tracerl.api.errors import InputError, JobError, how_to_install
from tracerl.api.job import AnswerFormat
from tracerl.api.job import Task as TaskSpec
from tracerl.api.pods import REWARD_DIRECTORY
from tracerl.rl.rewardcode import CodeError, fetch_code
from tracerl.rl.tokenizer import CHAIN_SUM_QUESTION
from tracerl.transport.objects.backend import one_line

_LOAD_SECONDS = 120
"""Importing reasoning-gym takes 12 s alone and far longer beside a busy trainer."""
_UNDERWAY = 32 * 1024
"""Bytes of requests that wait in a worker's pipe, which holds 64 KiB."""
_WORKERS = 2
_PROBES = 64
_PROBE_STRIDE = 2**24
_ORDERS, _ORDER_STRIDE = 64, 2**22
"""Jobs with other seeds ask an endless task for other items; so many a job before it meets the next."""
_MAX_SUM = 1_000
"""Most terms and digits of a chain sum: Python writes no integer of more than 4300 digits."""
_WARMUP_START = 2**30
"""Warm-up examples come from here on, far from where any job's training items end."""


@dataclass(frozen=True)
class Item:
    """One question. `index` finds it again in its source; `fields` is what a reward function is given."""

    index: int
    where: str
    """How messages call it, for example "line 17 of s3://…/train.jsonl"."""
    prompt: str
    answer: str | None
    """The right answer in plain order; None when the source has none."""
    fields: dict[str, Any] = field(default_factory=dict, repr=False)


class Source(Protocol):
    """Where items come from, and how a completion of one is scored."""

    size: int | None
    """Number of items; None when there is no end."""

    def items(self, indices: Sequence[int]) -> list[Item]:
        """Return items by index, the same ones every time."""
        ...

    def score(self, items: Sequence[Item], completions: Sequence[str]) -> list[float]:
        """Return the rewards of completions in plain order; JobError names the item."""
        ...

    def close(self) -> None:
        """End the processes of this source."""
        ...


class Task:
    """Held-out items, training items in the job's order, and rewards."""

    def __init__(
        self, source: Source, *, held_out: int, answer_format: AnswerFormat, order_seed: int, name: str
    ) -> None:
        self._source = source
        self._reversed = answer_format is AnswerFormat.REVERSED
        self._order_seed = order_seed
        self._name = name
        self.held_out, self._start = _distinct(source, held_out, name)
        self._held_out_prompts = {item.prompt for item in self.held_out}
        self._pool: list[Item] | None = None
        self._shuffled: tuple[int, list[int]] | None = None
        if source.size is not None:
            items = source.items(range(source.size))
            self._pool = [item for item in items if item.prompt not in self._held_out_prompts]
            if not self._pool:
                raise JobError(
                    Reason.TASK_LOAD,
                    f"{name} has no training prompt left beside its {len(self.held_out)} held-out ones; "
                    "lower task.heldOutPrompts or add items",
                )

    def train(self, positions: Sequence[int]) -> list[Item]:
        """Return the training items at positions of the job's order, counted from 0 over all steps."""
        if self._pool is None:
            start = self._start + self._order_seed % _ORDERS * _ORDER_STRIDE
            return self._endless([start + position for position in positions])
        return [
            self._pool[self._order(position // len(self._pool))[position % len(self._pool)]]
            for position in positions
        ]

    def _order(self, epoch: int) -> list[int]:
        """Return the order of the pool in an epoch."""
        assert self._pool is not None
        known = self._shuffled
        if known is None or known[0] != epoch:
            order = list(range(len(self._pool)))
            random.Random(f"{self._order_seed}/{epoch}").shuffle(order)  # noqa: S311 -- data order
            # One assignment of a whole pair: several threads ask.
            self._shuffled = known = epoch, order
        return known[1]

    def warmup(self, positions: Sequence[int]) -> list[Item]:
        """Return supervised examples by position; an endless task has some that RL does not reach."""
        if self._pool is not None:
            return self.train(positions)
        return self._endless([_WARMUP_START + position for position in positions])

    def _endless(self, indices: Sequence[int]) -> list[Item]:
        """Return items by index; one whose prompt is held out gives way to one from far behind."""
        found = self._source.items(indices)
        for probe in range(1, _PROBES):
            clashes = [n for n, item in enumerate(found) if item.prompt in self._held_out_prompts]
            if not clashes:
                return found
            others = self._source.items([indices[n] + probe * _PROBE_STRIDE for n in clashes])
            for n, item in zip(clashes, others, strict=True):
                found[n] = item
        raise JobError(
            Reason.TASK_LOAD,
            f"{self._name} has hardly a prompt that is not held out; lower task.heldOutPrompts "
            "or widen task.parameters",
        )

    def known_items(self) -> list[Item]:
        """Return the items that are known before anything is asked: held out, and all of a file's."""
        return [*self.held_out, *(self._pool or ())]

    def fingerprint(self) -> str:
        """Return a hash of a file's training items, which its address does not tell; "" for named tasks."""
        if self._pool is None:
            return ""
        digest = hashlib.sha256()
        for item in self._pool:
            digest.update(json.dumps([item.prompt, item.answer]).encode())
        return digest.hexdigest()

    def supervised_answer(self, item: Item) -> str:
        """Return the text that the policy should write; JobError when the task has no answers."""
        if item.answer is None:
            raise JobError(
                Reason.TASK_LOAD, f"{item.where} has no answer to warm up on; set warmup.steps to 0"
            )
        return item.answer[::-1] if self._reversed else item.answer

    def score(self, items: Sequence[Item], completions: Sequence[str]) -> list[float]:
        """Return the rewards of completions as the policy wrote them."""
        return self._source.score(items, [text[::-1] if self._reversed else text for text in completions])

    def close(self) -> None:
        """End the task's processes."""
        self._source.close()


def _distinct(source: Source, wanted: int, name: str) -> tuple[list[Item], int]:
    """Return the first `wanted` items with distinct prompts, and the index after the last one looked at."""
    found: dict[str, Item] = {}
    start, end = 0, source.size if source.size is not None else 16 * wanted + 1024
    while len(found) < wanted:
        stop = min(end, start + wanted - len(found))
        if start == stop:
            raise JobError(
                Reason.TASK_LOAD,
                f"{name} has only {len(found)} distinct prompts among its first {end} items, fewer than "
                f"task.heldOutPrompts {wanted}; lower it",
            )
        for item in source.items(range(start, stop)):
            found.setdefault(item.prompt, item)
        start = stop
    return list(found.values()), start


# -- builtin/chain_sum ------------------------------------------------------------------------------------


class ChainSum:
    """Twin of chain_sum of reasoning-gym 0.1.25 (Apache-2.0): equal questions, answers and scores."""

    size: int | None = None

    def __init__(self, parameters: dict[str, Any], seed: int) -> None:
        ranges = {"min_terms": 2, "max_terms": 6, "min_digits": 1, "max_digits": 4}
        unknown = sorted(set(parameters) - {*ranges, "allow_negation"})
        if unknown:
            raise InputError(
                f"spec.task.parameters.{unknown[0]} is not a parameter of builtin/chain_sum; "
                f"use {', '.join(ranges)} or allow_negation"
            )
        values = {key: parameters.get(key, default) for key, default in ranges.items()}
        for key, value in values.items():
            if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= _MAX_SUM:
                raise InputError(
                    f"spec.task.parameters.{key} is {value!r}; write an integer from 1 to {_MAX_SUM}"
                )
        for kind in ("terms", "digits"):
            if values[f"min_{kind}"] > values[f"max_{kind}"]:
                raise InputError(
                    f"spec.task.parameters.min_{kind} is larger than max_{kind}; swap or equal them"
                )
        self._terms = values["min_terms"], values["max_terms"]
        self._digits = values["min_digits"], values["max_digits"]
        self._negation = parameters.get("allow_negation", False)
        if not isinstance(self._negation, bool):
            raise InputError(
                f"spec.task.parameters.allow_negation is {self._negation!r}; write true or false"
            )
        self._seed = seed

    def items(self, indices: Sequence[int]) -> list[Item]:
        """Return items by index: the draws are those of reasoning-gym, in its order."""
        return [self._item(index) for index in indices]

    def _item(self, index: int) -> Item:
        rng = random.Random(self._seed + index)  # noqa: S311 -- a task, not a secret
        terms, digits = rng.randint(*self._terms), rng.randint(*self._digits)
        low, high = (0 if digits == 1 else 10 ** (digits - 1)), 10**digits - 1
        if self._negation:
            low = -high
        numbers = [rng.randint(low, high) for _ in range(terms)]
        signs = [rng.choice(["+", "-"]) for _ in range(terms - 1)]
        expression, result = str(numbers[0]), numbers[0]
        for sign, number in zip(signs, numbers[1:], strict=True):
            expression += f" {sign} {number}"
            result += number if sign == "+" else -number
        return Item(
            index=index,
            where=f"item {index} of builtin/chain_sum",
            prompt=f"{CHAIN_SUM_QUESTION}{expression} =",
            answer=str(result),
        )

    def score(self, items: Sequence[Item], completions: Sequence[str]) -> list[float]:
        """Return 1 for the right number, leading zeros, commas and spaces around it forgiven, else 0."""
        return [_equal(text, str(item.answer)) for item, text in zip(items, completions, strict=True)]

    def close(self) -> None:
        """Nothing to end."""


def _equal(completion: str, answer: str) -> float:
    try:
        return float(Decimal(completion.replace(",", "")) == Decimal(answer))
    except InvalidOperation:
        return 0.0


# -- the process that runs foreign code -------------------------------------------------------------------


class _Worker:
    """One `tracerl.rl.taskworker` process; a call that takes too long kills it."""

    def __init__(self, wanted: dict[str, Any], what: str) -> None:
        # PYTHONHASHSEED: some data sets of reasoning-gym iterate over sets of strings.
        environment = {**os.environ, "PYTHONHASHSEED": "0"}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tracerl.rl.taskworker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
        )
        self._buffer = b""
        self._calls = 0
        (answer,) = self.call([wanted], _LOAD_SECONDS)
        if answer is None:
            raise JobError(
                Reason.TASK_LOAD, f"{what} was not loaded within {_LOAD_SECONDS} s; make its import faster"
            )
        if "error" in answer:
            self.close()
            raise JobError(Reason.TASK_LOAD, f"{what} cannot be loaded ({answer['error']}); correct it")

    def call(self, requests: Sequence[dict[str, Any]], seconds: float) -> list[dict[str, Any] | None]:
        """Return answers in order, up to and including the first that is an error or None.

        Numbers tell which answer is whose: foreign code can do anything to the pipe it runs beside.

        None: there was no answer within `seconds` after the one before, and the process is killed.
        """
        answers: list[dict[str, Any] | None] = []
        first = self._calls
        self._calls += len(requests)
        lines = [json.dumps(call).encode() + b"\n" for call in enumerate(requests, start=first)]
        sent = underway = 0
        while len(answers) < len(lines):
            # Ahead of the answers, but never more than the pipe holds: a write would block, while the worker
            # may be blocked on an answer that nobody reads.
            while sent < len(lines) and (sent == len(answers) or underway + len(lines[sent]) <= _UNDERWAY):
                underway += len(lines[sent])
                if not self._send(lines[sent]):
                    return [*answers, {"error": "its process has ended"}]
                sent += 1
            answer = self._receive(first, first + len(answers), seconds)
            underway -= len(lines[len(answers)])
            answers.append(answer)
            if answer is None or "error" in answer:
                break
        return answers

    def _send(self, line: bytes) -> bool:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(line)
            self._process.stdin.flush()
        except (BrokenPipeError, ValueError):  # ValueError: an earlier call took too long and closed it
            return False
        return True

    def _receive(self, first: int, wanted: int, seconds: float) -> dict[str, Any] | None:
        """Return the answer to the call numbered `wanted`, passing over those to calls before `first`.

        The latter come when an error ended an earlier batch of calls.
        """
        number = -1
        while number < first:
            line = self._read_line(seconds)
            if line is None:
                return None
            try:
                number, answer = json.loads(line) if line else (wanted, {"error": "its process has ended"})
            except (ValueError, TypeError):
                break
        if number != wanted:
            self.close()
            return {"error": "its process mixed up its answers; does it write to them?"}
        checked: dict[str, Any] = answer
        return checked

    def _read_line(self, seconds: float) -> bytes | None:
        """Return a line; None, and the process is killed, when none comes in time; b"" when it has ended."""
        stdout = self._process.stdout
        assert stdout is not None
        deadline = time.monotonic() + seconds
        ready = select.poll()  # select() takes no descriptor above 1,023
        ready.register(stdout, select.POLLIN)
        while b"\n" not in self._buffer:
            left = deadline - time.monotonic()
            if left <= 0 or not ready.poll(left * 1000):
                self.close()
                return None
            read = os.read(stdout.fileno(), 1 << 16)
            if not read:
                return b""
            self._buffer += read
        line, self._buffer = self._buffer.split(b"\n", 1)
        return line

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()


class _Workers:
    """A few equal workers, used from several threads."""

    def __init__(self, wanted: dict[str, Any], what: str, *, count: int, seconds: float) -> None:
        self._seconds = seconds
        self._all = [_Worker(wanted, what) for _ in range(count)]
        self._free: queue.Queue[_Worker] = queue.Queue()
        for worker in self._all:
            self._free.put(worker)

    def call(self, requests: Sequence[dict[str, Any]], where: Sequence[str]) -> list[dict[str, Any]]:
        """Return the answers of one free worker, waiting for one; JobError names what failed."""
        worker = self._free.get()
        try:
            answers = worker.call(requests, self._seconds)
        finally:
            self._free.put(worker)
        found = []
        for answer, name in zip(answers, where, strict=False):
            if answer is None:
                raise JobError(
                    Reason.REWARD_FAILED,
                    f"the reward of {name} took longer than {self._seconds} s and was stopped; "
                    "make it faster or raise task.rewardTimeoutSeconds",
                )
            if "error" in answer:
                raise JobError(
                    Reason.REWARD_FAILED, f"the reward of {name} failed ({answer['error']}); correct it"
                )
            found.append(answer)
        return found

    def close(self) -> None:
        for worker in self._all:
            worker.close()


# -- reasoning_gym/NAME -----------------------------------------------------------------------------------


class ReasoningGym:
    """A data set of the package reasoning-gym (extra `tasks`), which runs in a worker process."""

    size: int | None = None

    def __init__(self, name: str, parameters: dict[str, Any], seed: int, timeout_seconds: int) -> None:
        self._name = f"reasoning_gym/{name}"
        reserved = sorted({"seed", "size"} & set(parameters))
        if reserved:
            raise InputError(f"spec.task.parameters.{reserved[0]} is set by the job; use task.seed instead")
        wanted = {"dataset": name, "parameters": parameters, "seed": seed}
        try:
            self._workers = _Workers(wanted, self._name, count=1, seconds=timeout_seconds)
        except JobError as error:
            if "No module named 'reasoning_gym'" in str(error):
                raise JobError(
                    Reason.TASK_LOAD,
                    f"{self._name} needs the package reasoning-gym; {how_to_install('tasks')}, on a cluster "
                    "name an image that has it, or use builtin/chain_sum",
                ) from None
            raise

    def items(self, indices: Sequence[int]) -> list[Item]:
        """Return the data set's items by index."""
        where = [f"item {index} of {self._name}" for index in indices]
        answers = self._workers.call([{"index": index} for index in indices], where)
        return [
            Item(index=index, where=name, prompt=answer["prompt"], answer=answer["answer"])
            for index, name, answer in zip(indices, where, answers, strict=True)
        ]

    def score(self, items: Sequence[Item], completions: Sequence[str]) -> list[float]:
        """Return 1 where the data set scores exactly 1, else 0."""
        calls = [
            {"index": item.index, "completion": text} for item, text in zip(items, completions, strict=True)
        ]
        return [answer["reward"] for answer in self._workers.call(calls, [item.where for item in items])]

    def close(self) -> None:
        """End the worker."""
        self._workers.close()


# -- JSONL with a reward function -------------------------------------------------------------------------


class JSONLines:
    """Items of a JSONL file at any fsspec URL, scored by a function of the user in worker processes."""

    def __init__(
        self,
        uri: str,
        reward: str,
        path: Sequence[str],
        *,
        shuffle_seed: int,
        timeout_seconds: int,
        s3: Mapping[str, str],
    ) -> None:
        self._items = _read_lines(uri, s3)
        # The held-out items are the first ones: without this they would be the first of a sorted file.
        random.Random(shuffle_seed).shuffle(self._items)  # noqa: S311 -- data order
        self.size: int | None = len(self._items)
        wanted = {"reward": reward, "path": list(path)}
        self._workers = _Workers(wanted, f"the reward {reward}", count=_WORKERS, seconds=timeout_seconds)

    def items(self, indices: Sequence[int]) -> list[Item]:
        """Return items of the shuffled file."""
        return [self._items[index] for index in indices]

    def score(self, items: Sequence[Item], completions: Sequence[str]) -> list[float]:
        """Return what the function returns; JobError when it raises, hangs or returns no finite number."""
        calls = [
            {"completion": text, "item": item.fields} for item, text in zip(items, completions, strict=True)
        ]
        return [answer["reward"] for answer in self._workers.call(calls, [item.where for item in items])]

    def close(self) -> None:
        """End the workers."""
        self._workers.close()


def _options(uri: str, s3: Mapping[str, str]) -> Mapping[str, str]:
    return s3 if uri.startswith(("s3://", "s3a://")) else {}


def _read_lines(uri: str, s3: Mapping[str, str]) -> list[Item]:
    try:
        with fsspec.open(uri, "rb", **_options(uri, s3)) as file:
            lines: list[bytes] = file.read().splitlines()
    except Exception as error:  # noqa: BLE001 -- each of fsspec's many file systems has errors of its own
        raise JobError(
            Reason.TASK_LOAD,
            f"{uri} cannot be read ({one_line(error)}); check spec.task.uri and the credentials",
        ) from None
    items = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        where = f"line {number} of {uri}"
        try:
            fields = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise JobError(
                Reason.TASK_LOAD, f"{where} is not JSON ({error}); write one object a line"
            ) from None
        if not isinstance(fields, dict) or not isinstance(fields.get("prompt"), str) or not fields["prompt"]:
            raise JobError(
                Reason.TASK_LOAD, f'{where} has no text "prompt"; write {{"prompt": "…", "answer": …}}'
            )
        answer = fields.get("answer")
        items.append(
            Item(
                index=number,
                where=where,
                prompt=fields["prompt"],
                answer=None if answer is None else str(answer),
                fields=fields,
            )
        )
    if not items:
        raise JobError(Reason.TASK_LOAD, f"{uri} has no items; write one JSON object a line")
    return items


def _reward_path(spec: TaskSpec, scratch: Path, s3: Mapping[str, str]) -> list[str]:
    """Return the directories besides the working one to import the reward module from; fetches it."""
    source, reward = spec.source, spec.reward
    if source is None or (source.config_map is None and source.uri is None):
        return []
    if source.config_map is not None:
        if not Path(REWARD_DIRECTORY).is_dir():
            raise JobError(
                Reason.TASK_LOAD,
                f"spec.task.source.configMap {source.config_map} is not mounted at {REWARD_DIRECTORY}, which "
                "happens on a cluster only; use task.source.uri here",
            )
        return [REWARD_DIRECTORY]
    assert source.uri is not None
    assert reward is not None
    target = scratch / "reward"
    try:
        fetch_code(source.uri, reward.partition(":")[0], target, _options(source.uri, s3))
    except CodeError as error:
        raise JobError(Reason.TASK_LOAD, f"spec.task.source.uri {source.uri} {error}") from None
    return [str(target)]


def load_task(spec: TaskSpec, *, order_seed: int, scratch: Path, s3: Mapping[str, str] | None = None) -> Task:
    """Return the job's task; call it from the main thread, whose life the worker processes share.

    `scratch` is a directory of the run for fetched reward code, and `s3` fsspec's options for what is read
    from s3:// URLs. InputError or JobError says what is wrong.
    """
    source: Source
    if spec.name is not None:
        name = spec.name
        kind, _, dataset = name.partition("/")
        if name == "builtin/chain_sum":
            source = ChainSum(spec.parameters, spec.seed)
        elif kind == "reasoning_gym" and dataset:
            source = ReasoningGym(dataset, spec.parameters, spec.seed, spec.reward_timeout_seconds)
        else:
            raise InputError(
                f"spec.task.name {name} is not a task; use builtin/chain_sum or reasoning_gym/DATASET"
            )
    elif spec.uri is not None and spec.reward is not None:
        name = spec.uri
        source = JSONLines(
            spec.uri,
            spec.reward,
            _reward_path(spec, scratch, s3 or {}),
            shuffle_seed=spec.seed,
            timeout_seconds=spec.reward_timeout_seconds,
            s3=s3 or {},
        )
    else:
        raise InputError("spec.task names nothing to do; set task.name, or task.uri with task.reward")
    try:
        return Task(
            source,
            held_out=spec.held_out_prompts,
            answer_format=spec.answer_format,
            order_seed=order_seed,
            name=name,
        )
    except BaseException:
        source.close()
        raise
