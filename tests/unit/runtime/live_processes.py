"""Waiting for, and finding, real processes."""

import os
import time
from collections.abc import Callable
from pathlib import Path

SECONDS = 20.0
"""Deadline for things that take milliseconds: reached only when they do not happen."""


def wait_until(condition: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < deadline, f"waited in vain: {what}"
        time.sleep(0.01)


def processes_of(mark: str) -> set[int]:
    """Processes, of any parent, that have `mark` on their command line; zombies have no command line."""
    found = set()
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal() and int(entry.name) != os.getpid():
            try:
                if mark.encode() in (entry / "cmdline").read_bytes():
                    found.add(int(entry.name))
            except OSError:
                pass
    return found
