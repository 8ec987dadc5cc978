"""How long and how often a request is tried again."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Iterator

_FIRST_SECONDS = 0.1
_LONGEST_SECONDS = 5.0


class Deadline:
    """When to give up, by the monotonic clock; never if made with None."""

    def __init__(self, seconds: float | None) -> None:
        self._start = time.monotonic()
        self._end = math.inf if seconds is None else self._start + seconds

    def elapsed(self) -> float:
        """Seconds since this was made."""
        return time.monotonic() - self._start

    def remaining(self) -> float:
        """Seconds from now, not negative; inf without an end."""
        return max(0.0, self._end - time.monotonic())

    def passed(self) -> bool:
        """Whether it is time to give up."""
        return self.remaining() == 0.0

    def later(self, seconds: float) -> Deadline:
        """Give up so much later."""
        return Deadline(self.remaining() + seconds)

    def milliseconds(self, *, forever: int, most: int) -> int:
        """Count them from now, rounded up."""
        remaining = self.remaining()
        return forever if remaining == math.inf else min(most, math.ceil(1000 * remaining))


def delays(chance: random.Random) -> Iterator[float]:
    """Seconds to wait before each further try: exponential back-off with full jitter, without an end.

    Jitter over the whole interval spreads the requests of many clients that an outage brought into step.
    """
    longest = _FIRST_SECONDS
    while True:
        yield chance.uniform(0, longest)
        longest = min(longest * 2, _LONGEST_SECONDS)
