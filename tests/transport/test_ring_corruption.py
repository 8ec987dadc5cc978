"""Flipped, cut and removed bytes below a living store: those frames are told apart, others are right."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import xxhash
from kill_harness import Nursery, nursery, wait_until
from kill_ledger import frame_bytes
from kill_products import open_sink, open_source
from kill_scene import RING, SEGMENT, Scene, scene

from tracerl.api.frames import FrameKey, Handle, parse_handle
from tracerl.transport.base import TransportError, Wanted

LENGTH = SEGMENT // 4


@pytest.fixture(scope="module")
def actors(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nursery]:
    with nursery(tmp_path_factory.mktemp("nursery")) as made:
        yield made


def put(place: Scene, sink, frames: range) -> list[Handle]:
    store = place.store_arguments
    return [
        sink.put(
            frame_bytes("t", index, LENGTH),
            FrameKey(store["job_uid"], store["run_id"], "t", 0, 1, index, index + 1, 0),
            timeout=20,
        )
        for index in frames
    ]


def judged(source, handles: list[Handle]) -> list[str]:
    """For each frame: ``right``, ``damaged`` (the hash in its handle says so), the fault, or ``WRONG``."""
    found = []
    with source.borrow([Wanted(handle) for handle in handles]) as borrowed:
        for index, (handle, piece) in enumerate(zip(handles, borrowed.pieces, strict=True)):
            if isinstance(piece, TransportError):
                assert "\n" not in str(piece)
                found.append(piece.fault)
            elif xxhash.xxh3_64_intdigest(piece[0]) != parse_handle(handle).xxh3:
                found.append("damaged")
            else:
                found.append("right" if piece[0] == frame_bytes("t", index, LENGTH) else "WRONG")
        del piece
    return found


def flip(path: Path, position: int) -> None:
    """Change one bit."""
    with path.open("r+b", buffering=0) as file:
        file.seek(position)
        (byte,) = file.read(1)
        file.seek(position)
        file.write(bytes([byte ^ 1]))


def find(path: Path, data: bytes) -> int:
    """Where the bytes are in a file."""
    position = path.read_bytes().find(data)
    assert position >= 0
    return position


def spilled(place: Scene) -> list[Path]:
    assert place.spill is not None
    return sorted(path for path in place.spill.rglob("*") if path.is_file())


def test_flipped_bits_in_the_ring(actors: Nursery, tmp_path: Path) -> None:
    with scene(actors, tmp_path / "s") as place:
        place.start_store()
        sink, source = open_sink(place.store_arguments, "p"), open_source(place.store_arguments, "r")
        handles = put(place, sink, range(40))
        ring = place.memory / "store-0" / "ring"
        for index, byte in ((0, 0), (7, LENGTH - 1), (39, LENGTH // 2)):
            flip(ring, find(ring, frame_bytes("t", index, LENGTH)) + byte)
        expected = ["damaged" if index in {0, 7, 39} else "right" for index in range(40)]
        assert judged(source, handles) == expected
        source.release(handles)
        wait_until(lambda: source.usage().frames == 0, "the damaged are released like all others")
        sink.close()
        source.close()
        place.stop()


@pytest.mark.parametrize("damage", ["flipped", "cut", "emptied", "removed"])
def test_damaged_files_of_the_spill(actors: Nursery, tmp_path: Path, damage: str) -> None:
    """One file of many: its frames alone are gone or damaged, the store goes on and cleans up in the end."""
    with scene(actors, tmp_path / "s", spill_bytes=64 << 20) as place:
        place.start_store()
        sink, source = open_sink(place.store_arguments, "p"), open_source(place.store_arguments, "r")
        frames = range(2 * RING // LENGTH)
        handles = put(place, sink, frames)
        file = spilled(place)[0]
        content = file.read_bytes()
        inside = {i: at for i in frames if (at := content.find(frame_bytes("t", i, LENGTH))) >= 0}
        assert len(inside) == SEGMENT // LENGTH
        first = min(inside, key=lambda index: inside[index])
        if damage == "flipped":
            flip(file, inside[first] + LENGTH // 3)
            bad = {first}
        elif damage == "cut":
            os.truncate(file, len(content) - LENGTH // 2)
            bad = {max(inside, key=lambda index: inside[index])}
        elif damage == "emptied":
            os.truncate(file, 0)
            bad = set(inside)
        else:
            file.unlink()
            bad = set(inside)
        found = judged(source, handles)
        right = {index for index, state in enumerate(found) if state == "right"}
        assert right == set(frames) - bad, [(i, state) for i, state in enumerate(found) if state != "right"]
        assert all(found[index] in {"damaged", "missing", "failed"} for index in bad), found
        more = put(place, sink, range(8))
        assert judged(source, more) == ["right"] * 8
        source.release([*handles, *more])
        wait_until(lambda: source.usage().frames == 0, "all is released")
        sink.close()
        source.close()
        place.stop()
        assert "Traceback" not in place.store.errors()
