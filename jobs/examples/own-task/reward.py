"""Reward of the task "write the word backwards": the share of letters that stand where they should."""

from __future__ import annotations

from typing import Any


def letters(completion: str, item: dict[str, Any]) -> float:
    """Return 1 for the whole answer, less for a part of it; `item` is the whole line of words.jsonl."""
    answer: str = item["answer"]
    right = sum(a == b for a, b in zip(completion, answer, strict=False))
    return right / max(len(answer), len(completion))
