"""kill -9 of one or two of a store, two producers and two readers, one of them over HTTP, at random instants.

``TRACERL_KILLS_SEED`` repeats the choices of a failed run; instants within a process repeat only roughly.
"""

from __future__ import annotations

import logging
import os
import random
import time
from pathlib import Path

import pytest
from kill_harness import KILLS, Actor, nursery
from kill_scene import Scene, scene

_log = logging.getLogger(__name__)
pytestmark = pytest.mark.timeout(1800)
ROUNDS = {"few": 50, "some": 110, "all": 1_000}[KILLS]
AHEAD = 700
"""Frames after which producers wait, some 8 MiB: as much as the ring, the spill and some objects."""
SEED = int(os.environ.get("TRACERL_KILLS_SEED", "1"))


def kill_at_random(place: Scene, rounds: int, seed: int) -> int:
    """Kill and start again; after each round everybody must get on, and the books must be right."""
    draw = random.Random(seed)
    starts = {
        "store": place.start_store,
        "producer-0": lambda: place.start_producer("producer-0", ahead=AHEAD),
        "producer-1": lambda: place.start_producer("producer-1", ahead=AHEAD),
        "reader-0": lambda: place.start_reader("reader-0", shares=2, share=0, hold=40),
        "reader-1": lambda: place.start_reader("reader-1", shares=2, share=1, hold=40, remote=True),
    }
    for start in starts.values():
        start()
    place.progress()
    kills = 0
    for number in range(rounds):
        victims = draw.sample(list(starts), draw.choice((1, 1, 2)))
        _spin(draw.uniform(0, 0.003))
        actors = [_actor(place, name) for name in victims]
        # Together first: they must not learn of each other's end one by one.
        place.kill(*actors)
        kills += len(victims)
        for name in sorted(victims, key=lambda name: name != "store"):
            starts[name]()
        place.progress(draw.randrange(1, 30))
        if number % 4 == 0:  # it reads all that there is
            place.audit()
    place.stop_producers()
    place.drained()
    place.empty(place.readers["reader-0"], connections=4)
    place.stop()
    return kills


def _actor(place: Scene, name: str) -> Actor:
    actor = {"store": place.store, **place.producers, **place.readers}[name]
    assert actor is not None
    return actor


def _spin(seconds: float) -> None:
    """An instant that no condition names: wherever the others are by then."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        pass


def test_kills_at_random_instants(tmp_path: Path) -> None:
    with (
        nursery(tmp_path / "nursery") as actors,
        scene(actors, tmp_path / "scene", spill_bytes=2 << 20, objects=True) as place,
    ):
        kills = kill_at_random(place, ROUNDS, SEED)
    _log.info("%d kills in %d rounds, %d frames put, %d read", kills, ROUNDS, place.book.put, place.book.read)
    assert kills >= ROUNDS
    assert place.tiers == {"ring", "spill", "object"}
