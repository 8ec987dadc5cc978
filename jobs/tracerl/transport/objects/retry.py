"""How long and how often a request is tried again."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator

_FIRST_SECONDS = 0.1
_LONGEST_SECONDS = 5.0


class Deadline:
    """An instant that nothing but time itself brings nearer: the wall clock may jump."""

    def __init__(self, seconds: float) -> None:
        self._at = time.monotonic() + seconds

    def remaining(self) -> float:
        """Seconds left, at least 0."""
        return max(0.0, self._at - time.monotonic())


def delays(chance: random.Random) -> Iterator[float]:
    """Seconds to wait before each further try: exponential back-off with full jitter, without an end.

    Jitter over the whole interval spreads the requests of many clients that an outage brought into step.
    """
    longest = _FIRST_SECONDS
    while True:
        yield chance.uniform(0, longest)
        longest = min(longest * 2, _LONGEST_SECONDS)
