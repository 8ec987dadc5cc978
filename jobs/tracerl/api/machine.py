"""What this machine has, for rules that only it can answer."""

from __future__ import annotations

import os
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Machine:
    """What processes may use here: GPUs, and bytes of shared memory (None where there is no /dev/shm).

    `chosen` are the GPUs by the names that CUDA_VISIBLE_DEVICES has for them, None where it is not set.
    """

    gpus: int
    shared_memory: int | None
    chosen: tuple[str, ...] | None = None

    @classmethod
    def here(cls) -> Machine:
        """Look at this machine; needs no driver library."""
        gpus = sum(path.name.removeprefix("nvidia").isdecimal() for path in Path("/dev").glob("nvidia*"))
        chosen = None
        if (names := os.environ.get("CUDA_VISIBLE_DEVICES")) is not None:
            chosen = _visible(names, gpus)
            gpus = min(gpus, len(chosen))
        try:
            volume = os.statvfs("/dev/shm")  # noqa: S108 (asked for its size, not written to)
        except OSError:
            return cls(gpus, None, chosen)
        return cls(gpus, volume.f_frsize * volume.f_blocks, chosen)

    @property
    def gpu_names(self) -> tuple[str, ...]:
        """The GPUs, by the names that CUDA knows them by."""
        return tuple(map(str, range(self.gpus))) if self.chosen is None else self.chosen


def _visible(names: str, gpus: int) -> tuple[str, ...]:
    """GPUs that CUDA_VISIBLE_DEVICES leaves visible of so many: those before the first that is not there.

    Those with the name of a UUID are taken to be there.
    """

    def there(name: str) -> bool:
        return int(name) < gpus if name.isdecimal() else name.startswith(("GPU-", "MIG-"))

    return tuple(takewhile(there, (name.strip() for name in names.split(","))))
