"""Reward of the task "write digits": learnt in twenty steps, without a warm-up."""

from __future__ import annotations

from typing import Any

LENGTH = 32
"""Symbols of a full answer, spec.algorithm.maxResponseTokens."""


def digits(completion: str, item: dict[str, Any]) -> float:  # noqa: ARG001 (every prompt asks for the same)
    """Return the share of a full answer that is digits."""
    return sum(symbol.isdigit() for symbol in completion) / LENGTH
