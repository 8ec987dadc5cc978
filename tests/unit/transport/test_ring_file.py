"""Directories of stores: made, locked, and removed only when their store is dead."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tracerl.transport.base import TransportError
from tracerl.transport.ring import file as ring_file
from tracerl.transport.ring.file import RING, SOCKET, RingDirectory, create_ring, map_ring, reap

SIZE = 1 << 16


def fault(error: TransportError) -> str:
    assert "\n" not in str(error)
    return error.fault


def names(path: Path) -> list[str]:
    return sorted(each.name for each in path.iterdir())


def make(path: Path) -> RingDirectory:
    directory = RingDirectory.create(path)
    for descriptor in create_ring(directory, SIZE):
        os.close(descriptor)
    return directory


def killed_store(path: Path) -> None:
    """Leave what a store leaves that is killed."""
    code = (
        "import os, signal, sys; from pathlib import Path\n"
        "from tracerl.transport.ring.file import RingDirectory, create_ring\n"
        f"create_ring(RingDirectory.create(Path(sys.argv[1])), {SIZE})\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    assert subprocess.run([sys.executable, "-c", code, str(path)], check=False).returncode == -9
    assert (path / RING).stat().st_size == SIZE


def test_the_ring_is_there_whole_and_for_user_and_group(tmp_path: Path) -> None:
    previous = os.umask(0o077)
    try:
        directory = RingDirectory.create(tmp_path / "job" / "store-0")
        writable, read_only = create_ring(directory, SIZE)
    finally:
        os.umask(previous)
    file = directory.path / RING
    assert file.stat().st_blocks * 512 >= SIZE  # no write can meet a full file system
    assert stat.S_IMODE(file.stat().st_mode) == 0o660
    assert stat.S_IMODE(directory.path.stat().st_mode) == 0o770
    written, seen = map_ring(writable, SIZE, writable=True), map_ring(read_only, SIZE, writable=False)
    written[5:8] = b"abc"
    assert bytes(seen[4:9]) == b"\0abc\0"
    assert seen.readonly
    with pytest.raises(ValueError, match="length"):
        map_ring(read_only, 2 * SIZE, writable=False)
    with pytest.raises(PermissionError):
        map_ring(read_only, SIZE, writable=True)
    directory.remove()
    assert list(tmp_path.iterdir()) == []
    assert bytes(seen[5:8]) == b"abc"  # who has it mapped keeps it
    os.close(writable)
    os.close(read_only)


def test_the_group_is_inherited(tmp_path: Path) -> None:
    parent = tmp_path / "job"
    parent.mkdir()
    parent.chmod(0o2770)
    directory = RingDirectory.create(parent / "store-0")
    assert directory.path.stat().st_mode & stat.S_ISGID
    assert directory.group == parent.stat().st_gid
    directory.remove()


def test_a_living_stores_directory_is_neither_taken_nor_reaped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ring_file, "_LOCK_ATTEMPTS", 2)
    store = make(tmp_path / "store-0")
    with pytest.raises(TransportError) as caught:
        RingDirectory.create(tmp_path / "store-0")
    assert fault(caught.value) == "failed"
    assert reap(tmp_path) == []
    assert (tmp_path / "store-0" / RING).exists()
    store.remove()


def test_a_killed_stores_directory_is_reaped_or_taken_over(tmp_path: Path) -> None:
    parent = tmp_path / "job"
    for name in ("store-0", "store-1"):
        killed_store(parent / name)
    (parent / "store-1" / SOCKET).touch()
    with (parent / "store-0" / RING).open("rb") as old:  # readers may still have it mapped
        store = make(parent / "store-0")
        assert not os.path.samestat((parent / "store-0" / RING).stat(), os.fstat(old.fileno()))
        assert os.fstat(old.fileno()).st_size == SIZE
    assert reap(parent) == [parent / "store-1"]
    assert names(parent) == ["store-0"]
    store.remove()
    assert not parent.exists()


def test_what_is_no_stores_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "ring").touch()
    (tmp_path / "notes" / "precious").touch()
    (tmp_path / "ring").touch()
    (tmp_path / "link").symlink_to(tmp_path / "notes")
    assert reap(tmp_path) == []
    assert reap(tmp_path / "absent") == []
    assert names(tmp_path) == ["link", "notes", "ring"]
    assert names(tmp_path / "notes") == ["precious", "ring"]
    for path in (tmp_path / "ring", tmp_path / "link"):
        with pytest.raises(TransportError) as caught:
            RingDirectory.create(path)
        assert fault(caught.value) == "failed"


as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
OTHER = 12_345
"""Id of another user."""


def give_away(path: Path) -> Path:
    os.chown(path, OTHER, OTHER, follow_symlinks=False)
    return path


@as_root
@pytest.mark.parametrize("mode", [0o755, 0o1777])
def test_another_users_directory_is_not_used(tmp_path: Path, mode: int) -> None:
    """Nor one in another user's directory, who may rename it there whatever the sticky bit says."""
    (tmp_path / "real" / "store-0").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "real")
    for name in ("a", "b"):
        (tmp_path / name / "store-0").mkdir(parents=True)
        (tmp_path / name).chmod(mode)
    give_away(tmp_path / "a" / "store-0")
    give_away(tmp_path / "b")
    give_away(tmp_path / "link")
    for name in ("a", "b", "link"):
        with pytest.raises(TransportError) as caught:
            RingDirectory.create(tmp_path / name / "store-0")
        assert fault(caught.value) == "permission"
    assert reap(tmp_path / "a") == reap(tmp_path / "b") == []
    assert names(tmp_path / "b") == ["store-0"]


_AS_ANOTHER_USER = """
import os, sys
from pathlib import Path
from tracerl.transport.ring.file import RingDirectory, reap
os.setgid(12345), os.setuid(12345)
directory = RingDirectory.create(Path(sys.argv[1]) / "store-0")
assert reap(Path(sys.argv[1])) == []
directory.remove()
print(reap(Path(sys.argv[2])))
"""


@as_root
def test_roots_directory_for_everybody_is_used(ring_parent: Path) -> None:
    """Such as a volume that a kubelet has made. What another user's directory hides is none of ours."""
    volume, hidden = ring_parent / "volume", ring_parent / "hidden"
    volume.mkdir()
    volume.chmod(0o1777)
    hidden.mkdir(0o700)
    command = [sys.executable, "-c", _AS_ANOTHER_USER, str(volume), str(hidden)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.stderr, done.stdout) == ("", "[]\n")
    assert names(volume) == []


@pytest.fixture
def ring_parent() -> Iterator[Path]:
    """A directory that other users can enter."""
    path = Path(tempfile.mkdtemp(prefix="trt-", dir="/dev/shm"))
    path.chmod(0o755)
    yield path
    shutil.rmtree(path)


def test_reaping_follows_no_links(tmp_path: Path) -> None:
    for name in ("empty", "ringlike"):
        (tmp_path / "mine" / name).mkdir(parents=True)
    (tmp_path / "mine" / "ringlike" / "ring").touch()
    evil = tmp_path / "tracerl-0-evil"
    evil.symlink_to(tmp_path / "mine")
    assert reap(evil) == []
    assert names(tmp_path / "mine") == ["empty", "ringlike"]
    assert names(tmp_path / "mine" / "ringlike") == ["ring"]


def test_a_parent_that_is_a_link_to_nowhere_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "job").symlink_to(tmp_path / "nowhere")
    with pytest.raises(TransportError) as caught:
        RingDirectory.create(tmp_path / "job" / "store-0")
    assert fault(caught.value) == "failed"


def test_a_ring_that_does_not_fit_leaves_nothing(tmp_path: Path) -> None:
    shared = (
        Path("/dev/shm") / f"tracerl-test-{os.getpid()}"
    )  # a tmpfs refuses what is larger than itself at once
    directory = RingDirectory.create(shared / "store-0")
    try:
        with pytest.raises(TransportError) as caught:
            create_ring(directory, shutil.disk_usage("/dev/shm").total + (1 << 20))
        assert fault(caught.value) == "full"
        assert "--shm-size" in str(caught.value)
        assert names(directory.path) == []
    finally:
        directory.remove()
    assert not shared.exists()


def test_reapers_never_take_a_directory_from_its_maker(tmp_path: Path) -> None:
    """Stores come and go while others reap: whoever holds a directory finds it and its ring in place."""
    parent = tmp_path / "job"
    done = threading.Event()

    def reaper() -> None:
        while not done.is_set():
            reap(parent)

    def store(number: int) -> None:
        for _ in range(60):
            directory = make(parent / f"store-{number}")
            assert (directory.path / RING).stat().st_size == SIZE
            directory.remove()

    with ThreadPoolExecutor(6) as pool:
        reapers = [pool.submit(reaper) for _ in range(2)]
        stores = [pool.submit(store, number % 3) for number in range(3)]
        try:
            for each in stores:
                each.result(timeout=60)
        finally:
            done.set()
        for each in reapers:
            each.result(timeout=60)
    assert not parent.exists()
