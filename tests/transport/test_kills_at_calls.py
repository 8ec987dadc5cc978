"""kill -9 at the system calls of a producer, a reader and a store, with the other two going on.

A clean run is traced first; then the same is run again and again, and killed on entering each of its system
calls, which is also the moment right after the call before. The normal form takes a sample of the calls that
are made often; ``TRACERL_KILLS=all`` takes each.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from kill_harness import SAMPLE, Actor, Call, Nursery, calls_of, last_call, needs_strace, nursery, sampled
from kill_scene import Scene, scene

_log = logging.getLogger(__name__)
pytestmark = [needs_strace, pytest.mark.timeout(3600)]
FRAMES = 150
"""Frames that pass through a store before it is asked to end."""


@pytest.fixture(scope="module")
def actors(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nursery]:
    with nursery(tmp_path_factory.mktemp("nursery")) as made:
        yield made


def with_after(calls: list[Call], sample: int) -> Iterator[tuple[Call, bool]]:
    """Calls to kill on entering, and those that send, to kill after them too: what follows makes no call."""
    yield from ((call, False) for call in sampled(calls, sample))
    sending = [call for call in calls if call[0] in ("sendto", "sendmsg")]
    yield from ((call, True) for call in sampled(sending, sample // 4))


def kill_producers(place: Scene, sample: int) -> Counter[str]:
    """Kill a producer at its system calls; the store and a reader live through all of it."""
    place.start_store()
    reader = place.start_reader("reader")
    counted = place.start_producer("victim", turns=2, trace=True)
    calls = _count(counted)
    kills: Counter[str] = Counter()
    for call, after in with_after(calls, sample):
        victim = place.start_producer("victim", turns=2, kill_at=call, after=after)
        kills[_end(victim, call, after)] += 1
        place.audit()
        place.drained()
        place.empty(reader, connections=2)
    place.stop()
    return kills


def kill_readers(place: Scene, sample: int) -> Counter[str]:
    """Kill a reader at its system calls; its next life reads what it left, so nothing may be lost."""
    place.start_store()
    helper = place.start_reader("helper", puts=str(place.directory / "nothing"))
    _feed(place)
    calls = _count(place.start_reader("victim", once=True, trace=True))
    kills: Counter[str] = Counter()
    for call, after in with_after(calls, sample):
        _feed(place)
        victim = place.start_reader("victim", once=True, kill_at=call, after=after)
        kills[_end(victim, call, after)] += 1
        heir = place.start_reader("victim", once=True)
        assert heir.wait() == 0, heir.errors()
        place.drained()
        place.empty(helper, connections=2)
    place.stop()
    return kills


def kill_stores(place: Scene, sample: int) -> Counter[str]:
    """Kill a store at its system calls; a new one takes its place, a producer and a reader go on with it."""

    def life(call: Call | None) -> Actor:
        store = place.start_store(kill_at=call, trace=call is None)
        place.progress(FRAMES, unless=store)
        place.terminate(store)
        return store

    place.start_producer("producer", timeout=60.0)
    place.start_reader("reader", hold=40)
    calls = _count(life(None))
    kills: Counter[str] = Counter()
    for call in sampled(calls, sample):
        _killed(place, life(call), call, kills)
    place.start_store()
    place.stop_producers()
    place.drained()
    place.empty(place.readers["reader"], connections=2)
    place.stop()
    return kills


SPILL_CALLS = ("openat", "write", "writev", "pwrite64", "fsync", "ftruncate", "rename", "unlink", "close")


def kill_spilling_stores(place: Scene, sample: int) -> Counter[str]:
    """Kill a store at the system calls of its thread that spills: traced from when it serves.

    Its event loop opens, writes and removes no files by then, so these calls are the thread's.
    """
    place.start_producer("producer", timeout=60.0)
    place.start_reader("reader", hold=60)
    store = place.start_store()
    trace = store.attach()
    place.progress(3 * FRAMES)
    calls = [call for call in calls_of(trace) if call[0] in SPILL_CALLS]
    place.terminate(store)
    assert store.wait() == 0, store.errors()
    kills: Counter[str] = Counter()
    for call in sampled(calls, sample):
        victim = place.start_store()
        place.killed[place.instance] = 0  # until it is known when
        victim.attach(call)
        # More than before: how much is spilled depends on who was faster.
        place.progress(8 * FRAMES, unless=victim)
        place.terminate(victim)
        _killed(place, victim, call, kills)
    place.start_store()
    place.stop_producers()
    place.drained()
    place.empty(place.readers["reader"], connections=2)
    place.stop()
    return kills


def _killed(place: Scene, victim: Actor, call: Call, kills: Counter[str]) -> None:
    """Note a store's end, and see its successor clean up, serve, and leave nothing behind in the end."""
    kills[_end(victim, call)] += 1
    assert victim.trace is not None
    place.killed[place.instance] = last_call(victim.trace)[1]
    successor = place.start_store()
    place.progress(10)
    place.audit()
    place.terminate(successor)
    assert successor.wait() == 0, successor.errors()
    place.nothing_left()


def _feed(place: Scene) -> None:
    feeder = place.start_producer("feeder", turns=1)
    assert feeder.wait() == 0, feeder.errors()


def _count(counted: Actor) -> list[Call]:
    """The calls of a traced run that nobody kills."""
    assert counted.wait() == 0, counted.errors()
    assert counted.trace is not None
    return calls_of(counted.trace)


def _end(victim: Actor, call: Call, after: bool = False) -> str:
    """Wait for the end of a victim: where it was killed, or ``ended`` when it did not get there."""
    status = victim.wait()
    if status == -9:
        return f"after {call[0]}" if after else call[0]
    assert status == 0, victim.errors()
    return "ended"


def _report(name: str, kills: Counter[str]) -> None:
    """Runs differ a little in how often they wait, so not every call is reached; most must be."""
    made = kills.total() - kills["ended"]
    _log.info("%s: %d kills at %s", name, made, dict(kills.most_common()))
    assert made >= kills.total() * 0.6, kills


def test_producer(actors: Nursery, tmp_path: Path) -> None:
    with scene(actors, tmp_path / "scene") as place:
        _report("producer", kill_producers(place, SAMPLE))


def test_reader(actors: Nursery, tmp_path: Path) -> None:
    with scene(actors, tmp_path / "scene") as place:
        _report("reader", kill_readers(place, SAMPLE))


def test_store(actors: Nursery, tmp_path: Path) -> None:
    with scene(actors, tmp_path / "scene", spill_bytes=8 << 20) as place:
        _report("store", kill_stores(place, SAMPLE))


def test_store_that_spills(actors: Nursery, tmp_path: Path) -> None:
    with scene(actors, tmp_path / "scene", spill_bytes=8 << 20) as place:
        _report("spilling store", kill_spilling_stores(place, SAMPLE // 2))
