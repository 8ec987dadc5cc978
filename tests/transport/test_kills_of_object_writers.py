"""kill -9 of a process that writes objects, at its system calls; and damage to what it wrote.

What was settled before the kill is there and right; every object is whole or is not seen as one; the next
writer of the store clears away what was half-written.
"""

from __future__ import annotations

import logging
import os
import secrets
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import xxhash
from kill_harness import SAMPLE, Actor, Nursery, calls_of, needs_strace, nursery, sampled
from kill_ledger import Put, Tail, frame_bytes, parse_put
from kill_products import open_objects

from tracerl.api.frames import Handle, parse_handle
from tracerl.api.job import Retention
from tracerl.transport.base import TransportError, Wanted
from tracerl.transport.objects.filesystem import open_filesystem
from tracerl.transport.objects.format import OBJECT_SUFFIX, decode_index
from tracerl.transport.objects.source import ObjectSource

_log = logging.getLogger(__name__)
pytestmark = pytest.mark.timeout(1800)
LARGEST = 30_000


@pytest.fixture(scope="module")
def actors(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nursery]:
    with nursery(tmp_path_factory.mktemp("nursery")) as made:
        yield made


@pytest.fixture
def place(tmp_path: Path) -> dict[str, Any]:
    ids = {"job_uid": secrets.token_hex(8), "run_id": secrets.token_hex(4)}
    return {"uri": (tmp_path / "objects").as_uri(), "name": "rollout-0", **ids}


def start(actors: Nursery, place: dict[str, Any], ledger: Path, **options: Any) -> Actor:
    arguments = {"place": place, "ledger": str(ledger), "name": ledger.stem, "largest": LARGEST, "turns": 2}
    return actors.start("writer", **{**arguments, **options})


def puts(ledger: Path) -> list[Put]:
    return [put for line in Tail(ledger).lines() if (put := parse_put(line)) is not None]


def open_source(place: dict[str, Any]) -> ObjectSource:
    return ObjectSource(
        open_filesystem(place["uri"]),
        job_uid=place["job_uid"],
        run_id=place["run_id"],
        retention=Retention.TRAINED,
    )


def judged(source: ObjectSource, wanted: list[Put]) -> list[str]:
    """For each frame ``right``, ``damaged`` by its hash, a fault, or ``WRONG``."""
    found: list[str] = []
    if not wanted:
        return found
    with source.borrow([Wanted(Handle(put.handle)) for put in wanted]) as borrowed:
        for put, piece in zip(wanted, borrowed.pieces, strict=True):
            if isinstance(piece, TransportError):
                found.append(piece.fault)
            elif xxhash.xxh3_64_intdigest(piece[0]) != parse_handle(put.handle).xxh3:
                found.append("damaged")
            else:
                right = piece[0] == frame_bytes(put.trajectory, put.index, put.length)
                found.append("right" if right else "WRONG")
        del piece
    return found


def files(tmp_path: Path) -> list[Path]:
    return sorted(path for path in (tmp_path / "objects").rglob("*") if path.is_file())


@needs_strace
def test_kills(actors: Nursery, tmp_path: Path, place: dict[str, Any]) -> None:
    counted = start(actors, place, tmp_path / "counted.puts", trace=True)
    assert counted.wait() == 0, counted.errors()
    assert counted.trace is not None
    kills: Counter[str] = Counter()
    source = open_source(place)
    for number, call in enumerate(sampled(calls_of(counted.trace), SAMPLE)):
        ledger = tmp_path / f"victim{number}.puts"
        victim = start(actors, place, ledger, kill_at=call)
        status = victim.wait()
        assert status in (0, -9), victim.errors()
        kills["ended" if status == 0 else call[0]] += 1
        assert "Traceback" not in victim.errors()
        for path in files(tmp_path):
            if path.suffix == OBJECT_SUFFIX:
                data = path.read_bytes()
                decode_index(data, len(data))
        settled = puts(ledger)
        assert judged(source, settled) == ["right"] * len(settled)
        source.release([Handle(put.handle) for put in settled])
    open_objects(place).close()
    left = [path for path in files(tmp_path) if path.suffix != OBJECT_SUFFIX]
    assert left == []
    source.forget({put.trajectory for path in tmp_path.glob("*.puts") for put in puts(path)})
    source.close()
    _log.info("object writer: %d kills at %s", kills.total() - kills["ended"], dict(kills.most_common()))
    assert kills["ended"] <= kills.total() * 0.4


@pytest.mark.parametrize("damage", ["flipped", "cut", "emptied", "removed"])
def test_damaged_objects(actors: Nursery, tmp_path: Path, place: dict[str, Any], damage: str) -> None:
    writer = start(actors, place, tmp_path / "writer.puts", turns=6)
    assert writer.wait() == 0, writer.errors()
    wanted = puts(tmp_path / "writer.puts")
    path = files(tmp_path)[0]
    data = path.read_bytes()
    offsets = {
        index: int(put.handle.partition("?")[0].rpartition("/")[2])
        for index, put in enumerate(wanted)
        if f"/{path.stem}/" in put.handle
    }
    mine = [index for index in offsets if wanted[index].length]
    assert set(offsets.values()) == {frame.offset for frame in decode_index(data, len(data)).frames}
    if damage == "flipped":
        position = offsets[mine[0]]
        with path.open("r+b", buffering=0) as file:
            file.seek(position)
            file.write(bytes([data[position] ^ 0x80]))
        bad = {mine[0]}
    elif damage == "cut":
        last = max(mine, key=lambda index: offsets[index])
        os.truncate(path, offsets[last])
        bad = {last}
    else:
        path.write_bytes(b"") if damage == "emptied" else path.unlink()
        bad = set(mine)
    source = open_source(place)
    found = judged(source, wanted)
    wrong = {index for index, state in enumerate(found) if state != "right"}
    assert bad <= wrong
    # Frames beside a damaged one are read with it, so a cut object may cost more than what was cut off.
    assert wrong <= (
        set(offsets) if damage == "cut" else bad | {index for index in offsets if index not in mine}
    )
    assert {found[index] for index in wrong} <= {"damaged", "missing"}, found
    source.release([Handle(put.handle) for put in wanted])
    source.close()
