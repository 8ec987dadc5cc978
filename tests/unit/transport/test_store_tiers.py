"""A ring with lower tiers below it, read in place and over HTTP."""

from __future__ import annotations

import random
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from record_stores import (
    JOB_UID,
    ThreadStore,
    files_below,
    frames_of,
    key,
    right,
    shared_directory,
    wait_until,
    wanted,
)

from tracerl.api.frames import Handle
from tracerl.transport.base import TransportError, Wanted
from tracerl.transport.objects.filesystem import open_filesystem
from tracerl.transport.remote import RemoteSource
from tracerl.transport.ring.client import StoreSink, StoreSource
from tracerl.transport.store.spill import ObjectTier, SpillDirectory

_SEED = 11_29
RING = 2**21
SEGMENT = 2**16


@pytest.fixture
def ring_dir() -> Iterator[Path]:
    with shared_directory() as directory:
        yield directory


def directory_tier(parent: Path, limit: int | None = None) -> SpillDirectory:
    return SpillDirectory(parent, job_uid=JOB_UID, store="store-0", limit_bytes=limit)


def object_tier(uri: str, deadline_seconds: float = 30) -> ObjectTier:
    files = open_filesystem(uri, deadline_seconds=deadline_seconds)
    return ObjectTier(files, job_uid=JOB_UID, store="store-0")


def put_until_full(store: ThreadStore, sink: StoreSink) -> tuple[list[Handle], TransportError]:
    """Put frames until the tier below the ring took no more of them."""
    handles: list[Handle] = []
    while True:
        try:
            handles.append(sink.put(bytes(60_000), key(row=len(handles)), timeout=0.2))
        except TransportError as error:
            counters = store.ring.status().counters
            if counters["tier_errors_spill"] + counters["tier_errors_object"]:
                return handles, error


def check_all(source: StoreSource | RemoteSource, handles: list[Handle]) -> None:
    """Read all frames, some by ranges, a few at a time as a trainer does."""
    chance = random.Random(_SEED)
    for first in range(0, len(handles), 16):
        part = handles[first : first + 16]
        with source.borrow(wanted(part)) as borrowed:
            for handle, piece in zip(part, borrowed.pieces, strict=True):
                assert not isinstance(piece, TransportError), piece
                assert right(handle, piece)
            whole = [bytes(piece[0]) for piece in borrowed.pieces]
            ranges = [
                tuple(sorted((chance.randrange(len(frame) + 1), chance.randrange(len(frame) + 1))))
                for frame in whole
            ]
        asked = [Wanted(handle, (span, (0, 1))) for handle, span in zip(part, ranges, strict=True)]
        with source.borrow(asked) as borrowed:
            for frame, (start, stop), piece in zip(whole, ranges, borrowed.pieces, strict=True):
                assert not isinstance(piece, TransportError), piece
                assert [bytes(view) for view in piece] == [frame[start:stop], frame[:1]]


@pytest.mark.parametrize("tier", ["spill", "object"])
def test_a_reader_that_is_behind_reads_everything_from_below(
    ring_dir: Path, tmp_path: Path, tier: str
) -> None:
    below = directory_tier(tmp_path) if tier == "spill" else object_tier(tmp_path.as_uri())
    store = ThreadStore(ring_dir / "store-0", ring_bytes=RING, tiers=[below])
    chance = random.Random(_SEED)
    frames = frames_of(_SEED, [chance.randrange(1, 60_000) for _ in range(240)])
    assert sum(map(len, frames)) > 3 * RING
    sink, near, far = store.sink(), store.near(), store.far()
    handles = [sink.put(frame, key(row=row), timeout=30) for row, frame in enumerate(frames)]
    wait_until(lambda: not store.ring.usage().congested)
    counts = store.ring.status().counts
    assert counts.frame_bytes[tier] > 2 * RING
    assert counts.live_bytes <= RING
    check_all(near, handles)
    check_all(far, handles)
    counters = near.usage().counters
    assert counters[f"read_bytes_{tier}"] > counters["read_bytes_ring"] > 0
    near.release(handles[:120])
    wait_until(lambda: far.usage().frames == 120)
    check_all(far, handles[120:])
    far.release(handles)
    wait_until(lambda: far.usage().frames == 0 and not files_below(tmp_path))
    for client in (sink, near, far):
        client.close()
    store.close()
    assert not [*tmp_path.iterdir()]


def test_frames_that_are_being_read_stay_in_place(ring_dir: Path, tmp_path: Path) -> None:
    store = ThreadStore(ring_dir / "store-0", ring_bytes=RING, tiers=[directory_tier(tmp_path)])
    sink, near = store.sink(), store.near()
    frames = frames_of(_SEED, [30_000] * 20)
    handles = [sink.put(frame, key()) for frame in frames]
    borrowed = near.borrow(wanted(handles))
    for frame in frames_of(_SEED + 1, [50_000] * 100):
        sink.put(frame, key(), timeout=30)
    assert [bytes(piece[0]) for piece in borrowed.pieces] == frames
    assert near.usage().counters == {"read_frames": 20, "read_bytes_ring": 600_000}
    borrowed.release()
    for client in (sink, near):
        client.close()
    store.close()


def test_what_one_tier_cannot_take_goes_to_the_next(ring_dir: Path, tmp_path: Path) -> None:
    disk, objects = tmp_path / "disk", tmp_path / "objects"
    tiers = [directory_tier(disk, limit=4 * SEGMENT), object_tier(objects.as_uri())]
    store = ThreadStore(ring_dir / "store-0", ring_bytes=RING, tiers=tiers)
    sink, near, far = store.sink(), store.near(), store.far()
    handles = [sink.put(frame, key(), timeout=30) for frame in frames_of(_SEED, [50_000] * 100)]
    wait_until(lambda: not store.ring.usage().congested)
    status = store.ring.status()
    assert status.counters["tier_errors_spill"] > 0
    assert 0 < status.counts.frame_bytes["spill"] <= 4 * SEGMENT
    assert status.counts.frame_bytes["object"] > RING
    check_all(near, handles)
    check_all(far, handles)
    for client in (sink, near, far):
        client.close()
    store.close()
    assert not files_below(tmp_path)


def test_without_room_anywhere_a_put_waits_and_then_fails(ring_dir: Path, tmp_path: Path) -> None:
    store = ThreadStore(
        ring_dir / "store-0", ring_bytes=RING, tiers=[directory_tier(tmp_path, limit=10 * SEGMENT)]
    )
    sink, near = store.sink(), store.near()
    handles, error = put_until_full(store, sink)
    assert error.fault == "full"
    assert "raise spec.transport.ring.size" in str(error)
    assert near.usage().congested
    # All that fits is there, and nothing that was put is lost.
    assert len(handles) >= 40
    check_all(near, handles)
    # A put that waits goes on when a trainer has released something.
    near.release(handles)
    handle = sink.put(b"again", key(), timeout=30)
    check_all(near, [handle])
    for client in (sink, near):
        client.close()
    store.close()


def test_a_full_disk_sends_frames_to_the_object_store(ring_dir: Path, tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=512k", "tracerl-test", str(disk)]
    if subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("only root may mount a small file system")
    try:
        tiers = [directory_tier(disk), object_tier((tmp_path / "objects").as_uri())]
        store = ThreadStore(ring_dir / "store-0", ring_bytes=RING, tiers=tiers)
        sink, near = store.sink(), store.near()
        handles = [sink.put(frame, key(), timeout=30) for frame in frames_of(_SEED, [50_000] * 80)]
        wait_until(lambda: not store.ring.usage().congested)
        counts = store.ring.status().counts
        assert counts.frame_bytes["spill"] > 0
        assert counts.frame_bytes["object"] > 0
        check_all(near, handles)
        for client in (sink, near):
            client.close()
        store.close()
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=True)


def test_an_object_store_that_fails_makes_producers_wait_and_recovers(ring_dir: Path, tmp_path: Path) -> None:
    place = tmp_path / "objects"
    place.write_text("in the way")
    store = ThreadStore(ring_dir / "store-0", ring_bytes=RING, tiers=[object_tier(place.as_uri(), 0.2)])
    sink, near = store.sink(), store.near()
    handles, error = put_until_full(store, sink)
    assert error.fault == "full"
    assert store.ring.status().counters["tier_errors_object"] > 0
    place.unlink()
    handles += [sink.put(bytes(60_000), key(), timeout=30) for _ in range(40)]
    check_all(near, handles)
    for client in (sink, near):
        client.close()
    store.close()
