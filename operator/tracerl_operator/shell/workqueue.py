"""A queue of keys that does each key's work once at a time, later after an error, and never in a hot loop."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)

FIRST_BACKOFF, LAST_BACKOFF = 5.0, 300.0
_BURST, _REFILL_SECONDS = 20, 3.0
_SOONEST = 1.0


@dataclass
class _Entry:
    """What the queue knows of a key that waits, is being worked on or failed."""

    queued: bool = False
    working: bool = False
    again: bool = False
    urgent: bool = False
    failures: int = 0
    held_until: float = 0.0
    """Not before this, because it came back too often."""
    failed_until: float = 0.0
    """Not before this, because its work failed; something urgent ends this, and this alone."""
    timer: asyncio.TimerHandle | None = None
    due: float = 0.0
    tokens: float = _BURST
    filled_at: float = field(default=0.0)

    @property
    def earliest(self) -> float:
        """When it may be given out again."""
        return max(self.held_until, self.failed_until)


class WorkQueue(Generic[K]):
    """Keys to be worked on. `add` what changed, `get` one, and then say `done` or `failed`.

    A key that is being worked on is not given out a second time; what is added meanwhile comes afterwards.
    A key whose work failed waits 5 s, then twice as long each time up to 5 minutes, and additions do not
    shorten this unless they are `urgent`. One that comes back without end is slowed down to once in 3 s.
    """

    def __init__(self) -> None:
        self._entries: dict[K, _Entry] = {}
        self._ready: asyncio.Queue[K] = asyncio.Queue()
        self._running = asyncio.Event()
        self._clock = asyncio.get_running_loop().time

    def __len__(self) -> int:
        return self._ready.qsize()

    def add(self, key: K, *, urgent: bool = False) -> None:
        """Have a key worked on, at once unless it is held back."""
        entry = self._entries.setdefault(key, _Entry(filled_at=self._clock()))
        if urgent:
            entry.failed_until = 0.0
        if entry.working:
            entry.again = True
            entry.urgent = entry.urgent or urgent
        elif not entry.queued:
            self._schedule(key, entry, entry.earliest)

    def add_after(self, key: K, seconds: float) -> None:
        """Have a key worked on later; of several times the first counts."""
        entry = self._entries.setdefault(key, _Entry(filled_at=self._clock()))
        if not entry.queued:
            due = max(self._clock() + max(seconds, _SOONEST), entry.earliest)
            self._set_timer(key, entry, due)

    async def get(self) -> K:
        """Wait for a key, and for the queue to run."""
        while True:
            await self._running.wait()
            key = await self._ready.get()
            if self._running.is_set():
                break
            self._ready.put_nowait(key)
        entry = self._entries[key]
        entry.queued, entry.working, entry.urgent = False, True, False
        now = self._clock()
        filled = entry.tokens + (now - entry.filled_at) / _REFILL_SECONDS
        entry.tokens = max(min(_BURST, filled) - 1, 0)
        entry.filled_at = now
        entry.held_until = now + _REFILL_SECONDS if entry.tokens < 1 else 0.0
        entry.failed_until = 0.0
        return key

    def done(self, key: K) -> None:
        """Say that the work on a key went well."""
        entry = self._entries[key]
        entry.failures = 0
        self._release(key, entry)

    def failed(self, key: K) -> float:
        """Say that it did not, and get the seconds until it comes back if nothing urgent happens."""
        entry = self._entries[key]
        pause: float = min(FIRST_BACKOFF * 2**entry.failures, LAST_BACKOFF)
        pause *= random.uniform(0.8, 1.2)  # noqa: S311  # so that jobs that fail together do not come together
        entry.failures = min(entry.failures + 1, 20)
        if not entry.urgent:
            entry.failed_until = self._clock() + pause
        entry.again = True
        self._release(key, entry)
        return pause

    def forget(self, key: K) -> None:
        """Drop what is known of a key that is being worked on and has no object any more."""
        entry = self._entries.pop(key)
        if entry.timer is not None:
            entry.timer.cancel()
        if entry.again:
            self.add(key)

    def run(self, running: bool) -> None:
        """Let keys out, or keep them back."""
        if running:
            self._running.set()
        else:
            self._running.clear()

    def _release(self, key: K, entry: _Entry) -> None:
        entry.working = False
        if entry.again:
            entry.again = False
            self._schedule(key, entry, entry.earliest)

    def _schedule(self, key: K, entry: _Entry, due: float) -> None:
        if due <= self._clock():
            self._push(key, entry)
        else:
            self._set_timer(key, entry, due)

    def _set_timer(self, key: K, entry: _Entry, due: float) -> None:
        if entry.timer is not None:
            if entry.due <= due:
                return
            entry.timer.cancel()
        loop = asyncio.get_running_loop()
        entry.due = due
        entry.timer = loop.call_later(due - self._clock(), self._expired, key, entry)

    def _expired(self, key: K, entry: _Entry) -> None:
        entry.timer = None
        if entry.working:
            entry.again = True
        elif not entry.queued:
            self._push(key, entry)

    def _push(self, key: K, entry: _Entry) -> None:
        if entry.timer is not None:
            entry.timer.cancel()
            entry.timer = None
        entry.queued = True
        self._ready.put_nowait(key)
