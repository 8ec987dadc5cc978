from __future__ import annotations

import asyncio
import os
import random
import resource
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tracerl.transport.base import TransportError
from tracerl.transport.objects.filesystem import open_filesystem
from tracerl.transport.ring.segments import LiveFrame, Location
from tracerl.transport.store.spill import ObjectTier, SpillDirectory, remove_leftovers

_SEED = 20_260_731


def spill(parent: Path, *, limit: int | None = None, store: str = "store-0") -> SpillDirectory:
    return SpillDirectory(parent, job_uid="0123456789abcdef", store=store, limit_bytes=limit)


def live(seq: int, frame: bytes) -> tuple[LiveFrame, memoryview]:
    return LiveFrame(seq, 0, len(frame), 0, "t-0"), memoryview(frame)


def read(tier: SpillDirectory, location: Location) -> bytes:
    descriptor = tier.descriptor(location)
    assert descriptor is not None
    return os.pread(descriptor, location.length, location.offset)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MiB."""
    command = ["mount", "-t", "tmpfs", "-o", "size=1m", "tracerl-test", str(tmp_path)]
    made = subprocess.run(command, capture_output=True, check=False)
    if made.returncode:
        pytest.skip("only root may mount a small file system")
    try:
        yield tmp_path
    finally:
        subprocess.run(["umount", "-l", str(tmp_path)], check=True)


async def test_frames_come_back_as_they_were(tmp_path: Path) -> None:
    chance = random.Random(_SEED)
    # More buffers than one call of the kernel takes, empty ones among them, and one that is long.
    frames = [chance.randbytes(chance.choice([0, 1, 63, 64, 65, 300])) for _ in range(2_500)]
    frames.append(chance.randbytes(3 * 2**20))
    tier = spill(tmp_path)
    try:
        places = await tier.take([live(7 + seq, frame) for seq, frame in enumerate(frames)])
        assert {seq - 7: read(tier, place) for seq, place in places.items()} == dict(enumerate(frames))
        assert tier.held_bytes == sum(map(len, frames))
    finally:
        tier.close()


async def test_files_are_for_this_user_alone(tmp_path: Path) -> None:
    tier = spill(tmp_path)
    try:
        await tier.take([live(0, b"secret")])
        [file] = tier.directory.iterdir()
        assert stat.S_IMODE(tier.directory.stat().st_mode) == 0o700
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
    finally:
        tier.close()
    assert not [*tmp_path.iterdir()]


async def test_a_file_goes_with_its_last_frame(tmp_path: Path) -> None:
    tier = spill(tmp_path)
    try:
        first = await tier.take([live(0, b"a" * 100), live(1, b"b" * 100)])
        second = await tier.take([live(2, b"c" * 50)])
        await tier.drop([first[0]])
        assert read(tier, first[1]) == b"b" * 100
        assert tier.held_bytes == 250
        held = os.dup(tier.descriptor(first[1]))  # as a message to a reader passes it on
        await tier.drop([first[1]])
        assert tier.held_bytes == 50
        assert len([*tier.directory.iterdir()]) == 1
        # A reader that has the file open still reads the right bytes.
        assert os.pread(held, 100, 100) == b"b" * 100
        os.close(held)
        assert read(tier, second[2]) == b"c" * 50
    finally:
        tier.close()


async def test_the_limit_holds_for_segments_taken_together(tmp_path: Path) -> None:
    tier = spill(tmp_path, limit=1_000)
    try:
        taken = await asyncio.gather(
            *(tier.take([live(seq, bytes(300))]) for seq in range(5)), return_exceptions=True
        )
        full = [answer for answer in taken if isinstance(answer, TransportError)]
        places = [answer for answer in taken if isinstance(answer, dict)]
        assert len(full) == 2
        assert {error.fault for error in full} == {"full"}
        assert all("spec.transport.spillLimit" in str(error) for error in full)
        assert tier.held_bytes == 900
        await tier.drop([location for place in places for location in place.values()])
        assert tier.held_bytes == 0
        await tier.take([live(9, bytes(1_000))])
    finally:
        tier.close()


async def test_a_full_disk_is_an_error_and_leaves_nothing(small_disk: Path) -> None:
    tier = spill(small_disk)
    try:
        await tier.take([live(0, bytes(600 * 1024))])
        with pytest.raises(TransportError, match="free space there") as caught:
            await tier.take([live(1, bytes(600 * 1024))])
        assert caught.value.fault == "full"
        assert len([*tier.directory.iterdir()]) == 1
        assert tier.held_bytes == 600 * 1024
        await tier.take([live(1, bytes(100 * 1024))])
    finally:
        tier.close()


async def test_what_was_damaged_from_outside_is_an_error(tmp_path: Path) -> None:
    tier = spill(tmp_path)
    try:
        places = await tier.take([live(0, b"a" * 100)])
        assert await tier.read(places[0], 10, 20) == b"a" * 10
        [file] = tier.directory.iterdir()
        os.truncate(file, 50)
        assert await tier.read(places[0], 0, 50) == b"a" * 50
        with pytest.raises(TransportError, match="shorter than what was written") as caught:
            await tier.read(places[0], 0, 51)
        assert caught.value.fault == "failed"
    finally:
        tier.close()
    with pytest.raises(TransportError, match="cannot be read"):
        await spill(tmp_path).read(places[0], 0, 1)
    assert spill(tmp_path).descriptor(places[0]) is None


async def test_more_files_than_are_kept_open(tmp_path: Path) -> None:
    tier = spill(tmp_path)
    try:
        places = [(await tier.take([live(seq, b"%d" % seq)]))[seq] for seq in range(300)]
        for _ in range(2):
            assert [int(read(tier, place)) for place in places] == [*range(300)]
        # One message to a reader names at most 250 files: all of them are open at once.
        descriptors = {tier.descriptor(place) for place in places[:250]}
        assert len(descriptors) == 250
        assert all(descriptor is not None and os.fstat(descriptor) for descriptor in descriptors)
        await tier.drop(places)
        assert not [*tier.directory.iterdir()]
    finally:
        tier.close()


def test_a_place_that_is_none_is_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(TransportError, match=r"spec\.transport\.spillPath: no directory can be made in"):
        spill(tmp_path / "file")


@pytest.mark.parametrize("odd", ["..", "a/../../b", "/etc", "\0", "*", "ü"])
def test_odd_names_stay_in_their_directory(tmp_path: Path, odd: str) -> None:
    parent = tmp_path / "spill"
    tier = SpillDirectory(parent, job_uid=odd, store=odd, limit_bytes=None)
    assert [*parent.iterdir()] == [tier.directory]
    tier.close()
    assert [*tmp_path.rglob("*")] == [parent]


async def test_too_many_open_files_are_no_lack_of_space(tmp_path: Path) -> None:
    tier = spill(tmp_path)
    places = await tier.take([live(0, b"abc")])
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, before[1]))
        with pytest.raises(TransportError) as taken:
            await tier.take([live(1, b"def")])
        with pytest.raises(TransportError) as unread:
            await tier.read(places[0], 0, 3)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    for caught in (taken, unread):
        assert caught.value.fault == "failed"
        assert "Too many open files" in str(caught.value)
        assert "ulimit" in str(caught.value)
        assert "free space" not in str(caught.value)
    assert await tier.read(places[0], 0, 3) == b"abc"
    tier.close()


async def test_a_store_that_starts_empties_the_place_and_keeps_its_own(tmp_path: Path) -> None:
    """In whatever order: a store that is listened to already moves frames while the place is emptied."""
    left = tmp_path / "job" / "spill" / "store-0" / "0badcafe"
    left.mkdir(parents=True)
    (left / "0").write_bytes(b"left")
    (left / "1.1234abcd.tmp").write_bytes(b"half")
    (tmp_path / "job" / "spill" / "store-1").mkdir()
    (tmp_path / "job" / "spill" / "store-1" / "0").write_bytes(b"of another store")
    tier = ObjectTier(open_filesystem(tmp_path.as_uri()), job_uid="job", store="store-0")
    places = await tier.take([live(0, b"abc"), live(1, b"defg")])
    await tier.open()
    places |= await tier.take([live(2, b"h")])
    read_back = [await tier.read(places[seq], 0, places[seq].length) for seq in range(3)]
    assert read_back == [b"abc", b"defg", b"h"]
    assert not left.exists()
    tier.close()
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == ["0"]


@pytest.mark.parametrize("odd", ["", ".", ".."])
def test_an_id_that_names_no_directory_of_objects_is_a_sentence(tmp_path: Path, odd: str) -> None:
    for ids in ({"job_uid": odd, "store": "store-0"}, {"job_uid": "job", "store": odd}):
        with pytest.raises(TransportError, match="cannot name a directory") as caught:
            ObjectTier(open_filesystem(tmp_path.as_uri()), **ids)
        assert caught.value.fault == "failed"


_HOLD = """
import sys
from pathlib import Path
from tracerl.transport.store.spill import SpillDirectory
tier = SpillDirectory(Path(sys.argv[1]), job_uid="job", store="store-1", limit_bytes=None)
(tier.directory / "00000000").write_bytes(b"left")
print(tier.directory, flush=True)
sys.stdin.read()
"""


def test_a_start_removes_what_a_killed_store_left_and_nothing_of_a_living_one(tmp_path: Path) -> None:
    living = spill(tmp_path)
    process = subprocess.Popen(
        [sys.executable, "-c", _HOLD, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with process:
        assert process.stdout is not None
        killed = Path(process.stdout.readline().strip())
        assert not remove_leftovers(tmp_path)
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert killed.is_dir()
    (tmp_path / "of-somebody-else").mkdir()
    next_one = spill(tmp_path, store="store-1")
    assert {*tmp_path.iterdir()} == {living.directory, next_one.directory, tmp_path / "of-somebody-else"}
    living.close()
    next_one.close()
