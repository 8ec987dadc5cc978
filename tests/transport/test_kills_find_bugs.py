"""The kill tests against builds with a bug planted in them: each must be found by the same checks.

A plant is an edit of a copy of the package. When the edited lines change, the plant has to follow.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import kill_harness
import pytest
from kill_harness import PACKAGES, Violation, needs_strace, nursery
from kill_ledger import frame_bytes
from kill_scene import Scene, scene
from test_kills_at_calls import kill_producers, kill_readers
from test_kills_at_random import kill_at_random

pytestmark = [needs_strace, pytest.mark.timeout(600)]


class Plant(NamedTuple):
    """Lines of a module, and what they are replaced by."""

    file: str
    right: str
    wrong: str


def producers(place: Scene) -> None:
    kill_producers(place, 60)


def readers(place: Scene) -> None:
    kill_readers(place, 30)


def anybody(place: Scene) -> None:
    kill_at_random(place, 40, seed=7)


EMPTY = "the store is empty"
CHANGED = "wrong rec|damaged rec"
PLANTS: dict[str, tuple[list[Plant], Callable[[Scene], None], str]] = {
    "committed-before-it-is-filled": (
        [
            Plant(
                "transport/ring/client.py",
                "            xxh3 = _copy_and_hash(session.memory[start : start + len(data)], data)\n"
                "            batch.append((index, Commit(seq, len(data), xxh3, key.trajectory)))\n",
                "            xxh3 = xxhash.xxh3_64_intdigest(data)\n"
                "            batch.append((index, Commit(seq, len(data), xxh3, key.trajectory)))\n"
                "            self._commit(batch, results, deadline)\n"
                "            batch = []\n"
                "            session.memory[start : start + len(data)] = data\n",
            )
        ],
        producers,
        "committed frames have other bytes than their commits say",
    ),
    "hash-of-something-else": (
        [
            Plant(
                "transport/ring/client.py",
                "        return xxhash.xxh3_64_intdigest(target)\n",
                "        return xxhash.xxh3_64_intdigest(target[1:])\n",
            )
        ],
        producers,
        "damaged rec|committed frames have other bytes",
    ),
    "pins-end-with-the-last-reference": (
        [
            Plant(
                "transport/ring/segments.py",
                "        frame.references = 0\n        if frame.pins == 0:\n",
                "        frame.references = 0\n"
                "        if frame.location.tier == 'ring':\n"
                "            self._segment_of(frame).frames.discard(seq)\n"
                "            self._free_if_empty(frame.location.place)\n"
                "        if frame.pins == 0:\n",
            )
        ],
        anybody,
        CHANGED,
    ),
    "unpinned-before-it-is-read": (
        [
            Plant(
                "transport/ring/client.py",
                "            borrowed = Borrowed(pieces, partial(_give_back, session, pins, "
                "self._timeout))\n",
                "            _unpin(session, pins, self._timeout)\n            borrowed = Borrowed(pieces)\n",
            )
        ],
        anybody,
        CHANGED,
    ),
    "pinned-segments-are-moved": (
        [
            Plant(
                "transport/ring/segments.py",
                " and segment.producer is None and not segment.pinned\n",
                " and segment.producer is None\n",
            ),
            Plant(
                "transport/ring/segments.py",
                "frame is None or frame.pins or",
                "frame is None or",
            ),
        ],
        anybody,
        CHANGED,
    ),
    "handles-of-an-earlier-store-are-taken": (
        [
            Plant(
                "transport/ring/messages.py", "    if of_instance != instance:\n", "    if not of_instance:\n"
            )
        ],
        anybody,
        "damaged rec",
    ),
    "missing-before-all-commits-are-received": (
        [
            Plant(
                "transport/ring/server.py",
                "        if not all(seq in self._segments for seq in seqs):\n            self._drain()\n",
                "        if not all(seq in self._segments for seq in seqs):\n            pass\n",
            )
        ],
        anybody,
        "a committed frame was lost while its store lived",
    ),
    "leases-outlive-their-producers": (
        [
            Plant(
                "transport/ring/server.py",
                "        self._segments.end_lease(connection.number)\n        self._segments.drop_reader",
                "        self._segments.drop_reader",
            )
        ],
        producers,
        EMPTY,
    ),
    "pins-outlive-their-readers": (
        [
            Plant(
                "transport/ring/server.py",
                "        self._segments.drop_reader(connection.number)\n        # Not",
                "        # Not",
            )
        ],
        readers,
        EMPTY,
    ),
    "the-ring-stays": (
        [
            Plant(
                "transport/ring/server.py",
                "        os.close(self._read_only)\n        self._directory.remove()\n",
                "        os.close(self._read_only)\n",
            )
        ],
        readers,
        "left behind",
    ),
}


def build(directory: Path, plants: list[Plant]) -> Path:
    """Copy the package and edit it; the directory to import it from."""
    shutil.copytree(PACKAGES / "tracerl", directory / "tracerl")
    for plant in plants:
        path = directory / "tracerl" / plant.file
        text = path.read_text()
        assert text.count(plant.right) == 1, f"{plant.file} has changed: write the plant anew"
        path.write_text(text.replace(plant.right, plant.wrong))
    return directory


@pytest.mark.parametrize(("verifies", "finding"), [(True, "damaged rec"), (False, "wrong rec.* at-first")])
def test_a_reader_that_does_not_verify_is_found(tmp_path: Path, verifies: bool, finding: str) -> None:
    """Frames are compared byte by byte, whatever their hashes say: a bit flips, and both readers meet it."""
    with nursery(tmp_path / "nursery") as actors, scene(actors, tmp_path / "scene") as place:
        place.start_store()
        assert place.start_producer("producer", turns=1).wait() == 0
        (put, *_) = (put for put in place.book.look().open.values() if put.length > 100)
        ring = place.memory / "store-0" / "ring"
        position = ring.read_bytes().find(frame_bytes(put.trajectory, put.index, put.length))
        with ring.open("r+b", buffering=0) as file:
            file.seek(position + 50)
            (byte,) = file.read(1)
            file.seek(position + 50)
            file.write(bytes([byte ^ 16]))
        assert place.start_reader("reader", once=True, verifies=verifies).wait() == 0
        with pytest.raises(Violation, match=finding):
            place.check()


@pytest.mark.parametrize("name", PLANTS)
def test_a_planted_bug_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    # Some bugs show only by what never happens.
    monkeypatch.setattr(kill_harness, "SECONDS", 8.0)
    plants, judge, finding = PLANTS[name]
    with (
        nursery(tmp_path / "nursery", build(tmp_path / "build", plants)) as actors,
        scene(actors, tmp_path / "scene", spill_bytes=8 << 20) as place,
        pytest.raises(Violation, match=finding),
    ):
        judge(place)
