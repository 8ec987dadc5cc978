"""What this machine has, for rules that only it can answer."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Machine:
    """GPUs of this machine and the size of its shared memory in bytes (None where there is no /dev/shm)."""

    gpus: int
    shared_memory: int | None

    @classmethod
    def here(cls) -> Machine:
        """Look at this machine; needs no driver library."""
        gpus = sum(path.name.removeprefix("nvidia").isdecimal() for path in Path("/dev").glob("nvidia*"))
        try:
            volume = os.statvfs("/dev/shm")  # noqa: S108 (asked for its size, not written to)
        except OSError:
            return cls(gpus, None)
        return cls(gpus, volume.f_frsize * volume.f_blocks)
