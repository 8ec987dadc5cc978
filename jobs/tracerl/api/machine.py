"""What this machine has, for rules that only it can answer."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Machine:
    """What processes may use here: GPUs, and bytes of shared memory (None where there is no /dev/shm)."""

    gpus: int
    shared_memory: int | None

    @classmethod
    def here(cls) -> Machine:
        """Look at this machine; needs no driver library."""
        gpus = sum(path.name.removeprefix("nvidia").isdecimal() for path in Path("/dev").glob("nvidia*"))
        if (chosen := chosen_gpus()) is not None:
            gpus = min(gpus, len(chosen))
        try:
            volume = os.statvfs("/dev/shm")  # noqa: S108 (asked for its size, not written to)
        except OSError:
            return cls(gpus, None)
        return cls(gpus, volume.f_frsize * volume.f_blocks)


def chosen_gpus() -> list[str] | None:
    """GPUs that CUDA_VISIBLE_DEVICES leaves visible, by its names for them; None where it chooses none."""
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    return None if chosen is None else [name.strip() for name in chosen.split(",") if name.strip()]
