"""The process in which reward functions and reasoning-gym run: JSON lines in, JSON lines out.

It is apart from the trainer so that a call that hangs, even inside C code that holds the interpreter lock,
can be killed, and so that reasoning-gym's 30 packages and 12 seconds of import stay out of the trainer. The
first line says what to load; every other line is one call, answered by one line. A line is a pair of the
call's number and the call, its answer a pair of the same number and the answer. What the loaded code prints
goes to standard error, and its standard input is empty.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import math
import os
import signal
import sys
import warnings
from collections.abc import Callable
from typing import Any

CHUNK = 1024
"""Items of one reasoning-gym data set object. Item i of a data set with seed s draws from seed s + i, so
chunk c with seed s + c * CHUNK continues where chunk c - 1 ended and no two items share a seed."""

REWARD_LIMIT = 1e6
"""Largest magnitude of a reward: squares of it and sums over a job stay exact enough to report."""

_SENTENCE = 200
"""Characters of foreign code's text in an error."""
_PR_SET_PDEATHSIG = 1
Answer = dict[str, Any]


def main() -> None:
    """Serve calls until standard input ends."""
    if sys.platform == "linux":
        # A hung call would outlive a trainer that was killed; the kernel ends this process with its parent.
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    # Loaded code may read and print: keep the pipes for calls and answers alone.
    calls = os.fdopen(os.dup(0), encoding="utf-8")
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    process = os.getpid()
    serve: Callable[[dict[str, Any]], Answer] | None = None
    for line in calls:
        number, call = json.loads(line)
        answer: Answer
        try:
            if serve is None:
                serve, answer = _load(call), {"ready": True}
            else:
                answer = serve(call)
        except Exception as error:  # noqa: BLE001 -- foreign code: whatever it raises becomes a sentence
            answer = {"error": _sentence(f"{type(error).__name__}: {str(error).strip()}")}
        if os.getpid() != process:
            # Loaded code forked and let the child return: the parent answers.
            os._exit(0)
        answers.write(json.dumps([number, answer]) + "\n")
        answers.flush()


def _sentence(text: str) -> str:
    """Return the first line of a foreign text, bounded, without what a terminal or UTF-8 cannot show."""
    return "".join(char if char.isprintable() else "�" for char in text.splitlines()[0][:_SENTENCE])


def _load(wanted: dict[str, Any]) -> Callable[[dict[str, Any]], Answer]:
    if "reward" in wanted:
        sys.path[:0] = wanted["path"]
        return _reward_function(wanted["reward"])
    return _reasoning_gym(wanted["dataset"], wanted["parameters"], wanted["seed"])


def _reward_function(target: str) -> Callable[[dict[str, Any]], Answer]:
    module, name = target.split(":")
    function = getattr(importlib.import_module(module), name)

    def serve(call: dict[str, Any]) -> Answer:
        reward = function(call["completion"], call["item"])
        if not isinstance(reward, int | float) or not (isinstance(reward, int) or math.isfinite(reward)):
            return {"error": f"it returned {_sentence(repr(reward))}, which is not a finite number"}
        if abs(reward) > REWARD_LIMIT:
            return {"error": f"it returned {_sentence(repr(reward))}, beyond the limit of {REWARD_LIMIT:.0f}"}
        return {"reward": float(reward)}

    return serve


def _reasoning_gym(name: str, parameters: dict[str, Any], seed: int) -> Callable[[dict[str, Any]], Answer]:
    # What the compiler finds odd in packages that it imports is nobody's business in this log.
    with warnings.catch_warnings(action="ignore", category=SyntaxWarning):
        import reasoning_gym  # noqa: PLC0415 -- optional extra `tasks`

    chunks: dict[int, Any] = {}

    def entry(index: int) -> tuple[Any, dict[str, Any]]:
        chunk, offset = divmod(index, CHUNK)
        if chunk not in chunks:
            chunks[chunk] = reasoning_gym.create_dataset(
                name, **{**parameters, "seed": seed + chunk * CHUNK, "size": CHUNK}
            )
        return chunks[chunk], chunks[chunk][offset]

    entry(0)

    def serve(call: dict[str, Any]) -> Answer:
        data, item = entry(call["index"])
        if "completion" not in call:
            return {"prompt": item["question"], "answer": item["answer"]}
        # Partial scores exist ("860" for 86 scores .67): only the whole answer counts.
        return {"reward": float(data.score_answer(call["completion"], item) == 1.0)}

    return serve


if __name__ == "__main__":
    main()
