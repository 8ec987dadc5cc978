"""Very many frames through one store: memory, descriptors, shared memory and files stay as they are.

20,000 frames by default; ``TRACERL_SOAK_FRAMES=1000000`` is the long form, ``TRACERL_SOAK_MINUTES=30`` runs
at least so long. An eighth of the frames live long enough to be spilled.
"""

from __future__ import annotations

import logging
import os
import time
from contextlib import suppress
from pathlib import Path

import pytest
from kill_harness import Actor, nursery, wait_until
from kill_scene import RING, Scene, scene

FRAMES = int(os.environ.get("TRACERL_SOAK_FRAMES", "20000"))
MINUTES = float(os.environ.get("TRACERL_SOAK_MINUTES", "0"))
SPILL = 8 << 20
SAMPLES = 20
GROWTH = 3 << 20
"""Bytes that a process may gain between the first and the last quarter: what allocators do, not what leaks.

20,000 frames that left one Python object each behind would be as much.
"""

_log = logging.getLogger(__name__)
pytestmark = pytest.mark.timeout(int(600 + 120 * MINUTES + FRAMES / 100))


def measure(place: Scene) -> dict[str, int]:
    """What everybody holds now: bytes of their own memory, descriptors; and what lies around in files."""
    assert place.store is not None
    actors: dict[str, Actor] = {"store": place.store, **place.producers, **place.readers}
    found = {}
    for name, actor in actors.items():
        assert actor.status is None, actor.errors()
        found[f"{name} bytes"] = resident(actor.pid)
        found[f"{name} descriptors"] = len(list(Path(f"/proc/{actor.pid}/fd").iterdir()))
        found[f"{name} threads"] = len(list(Path(f"/proc/{actor.pid}/task").iterdir()))
    found["shared memory files"] = sum(len(files) for _, _, files in os.walk(place.memory))
    found["shared memory bytes"] = blocks(place.memory)
    assert place.spill is not None
    found["spilled bytes"] = blocks(place.spill)
    return found


def resident(pid: int) -> int:
    """Memory of a process that is its own, without files and shared memory."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) << 10
    raise AssertionError(f"process {pid} has no memory")


def blocks(directory: Path) -> int:
    """Bytes that the files of a directory take; some may go while this looks."""
    size = 0
    for where, _, files in os.walk(directory):
        for name in files:
            with suppress(FileNotFoundError):
                size += Path(where, name).stat().st_blocks * 512
    return size


def test_nothing_grows(tmp_path: Path) -> None:
    with nursery(tmp_path / "nursery") as actors, scene(actors, tmp_path / "s", spill_bytes=SPILL) as place:
        place.start_store()
        for share in range(2):
            place.start_producer(f"producer-{share}", largest=8_192)
            place.start_reader(f"reader-{share}", share=share, shares=2, hold=400)
        started = time.monotonic()
        samples: list[dict[str, int]] = []
        while len(samples) < SAMPLES:
            share = len(samples) + 1
            frames, seconds = FRAMES * share // SAMPLES, MINUTES * 60 * share / SAMPLES

            def reached(frames: int = frames, seconds: float = seconds) -> bool:
                place.check()
                return place.book.read >= frames and time.monotonic() - started >= seconds

            wait_until(
                reached, lambda: f"frames are read; {place.state()}", 60 + seconds + FRAMES / SAMPLES / 20
            )
            samples.append(measure(place))
        audit = place.audit()
        assert audit["counters"]["relocated_bytes_spill"] > 0, "no frame lived long enough to be spilled"
        place.stop_producers()
        place.drained()
        place.empty(place.readers["reader-0"], connections=4)
        place.stop()
    quarter = SAMPLES // 4
    for name in samples[0]:
        early = max(sample[name] for sample in samples[quarter : 2 * quarter])
        late = max(sample[name] for sample in samples[-quarter:])
        _log.info("%s: %s at first, %s early, %s late", name, samples[0][name], early, late)
        if name.endswith(" bytes") and not name.startswith(("shared", "spilled")):
            assert late <= early + GROWTH, f"{name} grew from {early:,} to {late:,}"
        elif name.endswith("descriptors"):
            # The store keeps some spilled files open, as many as there are.
            assert late <= early + SPILL // RING * 32, f"{name} grew from {early} to {late}"
        elif name == "spilled bytes":
            assert late <= 2 * SPILL
        else:
            assert late <= early, f"{name} grew from {early:,} to {late:,}"
