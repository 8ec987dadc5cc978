"""A record store, its producers and its readers in one place, whichever of them is being killed."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kill_harness import Actor, Call, Leftovers, Nursery, Violation, wait_until
from kill_ledger import Book

SHARED_MEMORY = Path("/dev/shm")
SEGMENT = 64 << 10
RING = 32 * SEGMENT
"""The smallest ring that is cut into the smallest segments, so that every limit is met often."""


class Scene:
    """One job's processes on one node. Ledgers are in `directory`; shared memory is `ring` below `memory`."""

    def __init__(
        self,
        nursery: Nursery,
        directory: Path,
        *,
        ring_bytes: int = RING,
        memory: Path | None = None,
        spill: Path | None = None,
        spill_bytes: int | None = None,
        objects: bool = False,
        largest: int = SEGMENT,
    ) -> None:
        self.nursery = nursery
        self.directory = directory
        directory.mkdir(parents=True, exist_ok=True)
        self.memory = Path(tempfile.mkdtemp(prefix="tracerl-kills-", dir=memory or SHARED_MEMORY))
        self.spill = None if spill_bytes is None else spill or directory / "spill"
        if self.spill is not None:
            self.spill.mkdir(exist_ok=True)
        self.objects = directory / "objects" if objects else None
        self.leftovers = Leftovers(list(filter(None, [self.memory, self.spill, self.objects])))
        self.largest = largest
        self.store_arguments: dict[str, Any] = {
            "parent": str(self.memory),
            "name": "store-0",
            "job_uid": secrets.token_hex(8),
            "run_id": secrets.token_hex(4),
            "token": secrets.token_hex(16),
            "ring_bytes": ring_bytes,
            "spill": str(self.spill) if self.spill else None,
            "spill_bytes": spill_bytes,
            "objects": self.objects.as_uri() if self.objects else None,
            "timeout": 20.0,
            "published": str(directory / "store-0.json"),
        }
        self.book = Book(directory)
        self.tiers: set[str] = set()
        """Where frames have been, as audits saw it."""
        self.killed: dict[str, int] = {}
        self.store: Actor | None = None
        self.instance = ""
        self.producers: dict[str, Actor] = {}
        self.readers: dict[str, Actor] = {}
        self._lives: dict[str, int] = {}
        self._all: list[Actor] = []
        self._watched: list[Actor] = []
        """Actors that may still write to stderr, or have done so since it was read last."""

    # -- starting ---------------------------------------------------------------------------------------

    def start_store(self, *, kill_at: Call | None = None, trace: bool = False) -> Actor:
        """Start a store and wait until it serves, or has been killed as it was to be."""
        store = self.nursery.start("store", kill_at=kill_at, trace=trace, **self.store_arguments)
        self._add(store)
        self.store = store
        store.control.settimeout(30)
        self.instance = self._told(store)
        if self.instance and kill_at is not None:
            self.killed[self.instance] = 0  # until it is known when
        if self._told(store) != "ready" and kill_at is None:
            raise Violation(f"the store did not start: {store.where()} {store.errors()}")
        return store

    def _told(self, store: Actor) -> str:
        try:
            return store.control.recv(100).decode()
        except ConnectionError:
            return ""

    def start_producer(self, name: str, **arguments: Any) -> Actor:
        """Start a producer, or its next life."""
        life = self._lives[name] = self._lives.get(name, -1) + 1
        options = {key: arguments.pop(key) for key in ("kill_at", "after", "trace") if key in arguments}
        ours = {
            "store": self.store_arguments,
            "ledger": str(self.directory / f"{name}.{life}.puts"),
            "name": f"{name}.{life}",
            "largest": self.largest,
        }
        actor = self.nursery.start("producer", **options, **{**ours, **arguments})
        self._add(actor)
        self.producers[name] = actor
        return actor

    def start_reader(self, name: str, **arguments: Any) -> Actor:
        """Start a reader, or its next life, which goes on where its ledger ends."""
        options = {key: arguments.pop(key) for key in ("kill_at", "after", "trace") if key in arguments}
        ours = {
            "store": self.store_arguments,
            "puts": str(self.directory),
            "ledger": str(self.directory / f"{name}.reads"),
            "name": name,
        }
        if name in self.readers:
            start = self.directory / f"{name}.start"
            start.write_text(json.dumps(self.book.look().rest()))
            ours["start"] = str(start)
        actor = self.nursery.start("reader", **options, **{**ours, **arguments})
        self._add(actor)
        self.readers[name] = actor
        return actor

    def _add(self, actor: Actor) -> None:
        self._all.append(actor)
        self._watched.append(actor)

    # -- killing ----------------------------------------------------------------------------------------

    def kill(self, *actors: Actor) -> None:
        """Kill -9, all at once, and wait for their ends."""
        if self.store in actors:
            self.killed[self.instance] = time.monotonic_ns()
        for actor in actors:
            actor.kill()
        for actor in actors:
            actor.wait()

    def terminate(self, store: Actor) -> None:
        """Ask a store to end; it takes its frames with it."""
        self.killed.setdefault(self.instance, time.monotonic_ns())
        store.kill(signal.SIGTERM)

    # -- judging ----------------------------------------------------------------------------------------

    def check(self) -> None:
        """Compare the ledgers; Violation says what is wrong."""
        if faults := self.book.look().faults(self.killed):
            raise Violation(f"{len(faults)} faults, first: " + "\n".join(faults[:5]))

    def quiet(self) -> None:
        """Look for what no user should see: tracebacks, also those that a process survives."""
        ended = self.nursery.ended()
        for actor in self._watched:
            if "Traceback" in (errors := actor.errors()):
                raise Violation(f"{actor.role} {actor.pid} wrote a traceback: {errors[-3000:]}")
        self._watched = [actor for actor in self._watched if actor.pid not in ended]

    def progress(self, frames: int = 20, unless: Actor | None = None) -> None:
        """Wait until every living producer put and every reader settled so many more frames.

        Or until `unless` has ended, if that is meant to be killed.
        """
        actors = {**self.producers, **self.readers}
        living = {name: actor for name, actor in actors.items() if actor.status is None}
        before = self.book.look().lines.copy()

        def done() -> bool:
            if unless is not None and unless.status is not None:
                return True
            self.check()
            for name, actor in living.items():
                if actor.status is not None:
                    raise Violation(f"{name} ended with {actor.status}: {actor.errors()[-3000:]}")
            return all(self.book.lines[name] >= before[name] + frames for name in living)

        wait_until(done, lambda: f"everybody gets {frames} frames further; {self.state()}")
        self.quiet()

    def stop_producers(self) -> None:
        """Let producers end after their turn."""
        for producer in self.producers.values():
            if producer.status is None:
                producer.tell("stop")
                if status := producer.wait():
                    raise Violation(f"a producer ended with {status}: {producer.errors()}")

    def drained(self) -> None:
        """Wait until all frames in the ledgers were read and released, or went with their killed store."""

        for reader in self.readers.values():
            if reader.status is None:
                reader.ask("drain")

        def done() -> bool:
            self.check()
            return not self.book.open

        wait_until(done, lambda: f"all frames are read; {self.state()}")
        self.quiet()

    def state(self) -> str:
        """Where everybody is, for the message of a failure."""
        book = self.book
        actors = {"store": self.store, **self.producers, **self.readers}
        where = [f"{name}: {actor.where()}" for name, actor in actors.items() if actor is not None]
        return (
            f"put {book.put}, read {book.read}, missing {len(book.missing)}, open {len(book.open)} "
            f"({list(book.open)[:2]}), last errors {list(book.errors)[-3:]}; " + "; ".join(where)
        )

    def audit(self) -> dict[str, Any]:
        """What the store holds; Violation when a committed frame has other bytes than its commit said."""
        assert self.store is not None
        found: dict[str, Any] = self.store.ask("audit")
        self.tiers |= {tier for tier, frames in found["tiers"].items() if frames}
        if found["damaged"]:
            raise Violation(
                f"committed frames have other bytes than their commits say: {found['damaged'][:5]}"
            )
        return found

    def empty(self, reader: Actor, connections: int) -> None:
        """Forget what killed processes left and wait until the store holds nothing at all."""
        names = self.book.look().trajectories
        for first in range(0, len(names), 1_000):
            reader.ask("forget", trajectories=names[first : first + 1_000])
        names.clear()
        last: dict[str, Any] = {}

        def done() -> bool:
            last.clear()
            last.update(self.audit())
            return (
                last["frames"] == last["pins"] == last["held_bytes"] == self._spilled() == 0
                and last["connections"] <= connections
            )

        wait_until(done, lambda: f"the store is empty with {connections} connections; it has {last}")

    def _spilled(self) -> int:
        places = filter(None, [self.spill, self.objects])
        return sum(len(files) for place in places for _, _, files in os.walk(place))

    # -- the end ----------------------------------------------------------------------------------------

    def stop(self) -> None:
        """End all as a job does; Violation when something is left in memory or on disk, or somebody hangs."""
        for actor in (*self.producers.values(), *self.readers.values()):
            if actor.status is None:
                actor.tell("stop")
                status = actor.wait()
                if status:
                    raise Violation(f"{actor.role} ended with {status}: {actor.errors()}")
        if self.store is not None and self.store.status is None:
            self.terminate(self.store)
            status = self.store.wait()
            if status:
                raise Violation(f"the store ended with {status}: {self.store.errors()}")
        self.check()
        self.quiet()
        self.nothing_left()

    def nothing_left(self) -> None:
        """Look for what is left in memory or on disk when no store runs."""
        if found := self.leftovers.found():
            raise Violation(f"left behind: {sorted(map(str, found))}")

    def close(self) -> None:
        """Kill what still lives and remove everything, whatever happened."""
        for actor in self._all:
            if actor.status is None:
                actor.kill()
                actor.wait()
        shutil.rmtree(self.memory, ignore_errors=True)


@contextmanager
def scene(nursery: Nursery, directory: Path, **arguments: Any) -> Iterator[Scene]:
    """A scene for the time of a with block."""
    made = Scene(nursery, directory, **arguments)
    try:
        yield made
    finally:
        made.close()
