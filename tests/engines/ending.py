"""Waits for processes that are not children of the test, in environments that have psutil."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

import psutil


async def until_ended(processes: Sequence[psutil.Process]) -> None:
    """Wait for processes that are not children of this one."""

    def lives(process: psutil.Process) -> bool:
        try:
            # Whoever adopted it may not collect it.
            return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return False

    deadline = time.monotonic() + 30
    while any(map(lives, processes)):
        assert time.monotonic() < deadline, [process for process in processes if lives(process)]
        await asyncio.sleep(0.05)
