"""The ring's file: memory that several processes map, in a directory that belongs to one living store.

A store's directory holds its ring file and its socket, and is locked (flock) as long as the store lives.
Everything in it is made and removed under that lock, so a killed store's left-overs can be told from a living
store's files without a process id. Any file system with flock and fallocate will do; meant is tmpfs.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import stat
import time
from pathlib import Path

from tracerl.transport.base import TransportError

RING = "ring"
SOCKET = "socket"

_MODE = 0o770
_LOCK_ATTEMPTS = 100
"""Of 10 ms each, after which the lock is a living store's."""
_MAKE_ATTEMPTS = 1_000
"""How often reapers may win; a parent that is a link to nowhere always does."""
_RELEASE_SECONDS = 30.0
"""The processes that mapped a killed store's ring notice within this time, and its memory is free again."""
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class RingDirectory:
    """A store's directory, locked by this process until `remove` or the process's end."""

    def __init__(self, path: Path, descriptor: int, *, had_ring: bool) -> None:
        self.path = path
        self.had_ring = had_ring
        """Whether a killed store has left its ring there, which other processes may still have mapped."""
        self._descriptor = descriptor

    @classmethod
    def create(cls, path: Path) -> RingDirectory:
        """Make the directory and lock it, and remove what a killed store has left in it.

        Its group is the parent's where that has the set-group-ID bit. TransportError ``failed`` when a living
        store has it, ``permission`` when it, or its parent, is another user's.
        """
        try:
            for _ in range(_MAKE_ATTEMPTS):
                try:
                    with contextlib.suppress(FileExistsError):
                        path.parent.mkdir(_MODE, parents=True)
                    with contextlib.suppress(FileExistsError):
                        path.mkdir(_MODE)
                    descriptor = os.open(path, _DIRECTORY)
                except FileNotFoundError:  # a reaper has removed it meanwhile
                    continue
                try:
                    _check_owner(path, descriptor)
                    if not _lock_soon(descriptor):
                        raise TransportError(
                            "failed",
                            f"{path} belongs to a store that is running; stop it, or use another name",
                        )
                    if _same(path, descriptor):
                        had_ring = _clear(descriptor)
                        os.fchmod(descriptor, _MODE | os.fstat(descriptor).st_mode & stat.S_ISGID)
                        return cls(path, descriptor, had_ring=had_ring)
                except FileNotFoundError:  # or has removed its parent too
                    pass
                except BaseException:
                    os.close(descriptor)
                    raise
                os.close(descriptor)
            raise TransportError("failed", f"{path} cannot be made: it is always gone at once; check it")
        except PermissionError as error:
            raise TransportError(
                "permission", f"{path} cannot be made ({error.strerror}); let this user write there"
            ) from None
        except OSError as error:
            raise TransportError("failed", f"{path} cannot be made ({error.strerror}); check it") from None

    @property
    def group(self) -> int:
        """Id of the group whose members may connect."""
        return os.fstat(self._descriptor).st_gid

    def remove(self) -> None:
        """Remove the directory and all that is in it, then its parent if that is empty."""
        _clear(self._descriptor)
        _remove_empty(self.path)
        os.close(self._descriptor)
        _remove_empty(self.path.parent)


def map_ring(descriptor: int, size: int, *, writable: bool) -> memoryview:
    """Map all of a ring's file, until the last view of it is gone. OSError; ValueError if it is shorter."""
    # Populated, because a page fault for each page would halve the speed of the first pass through the ring.
    flags = mmap.MAP_SHARED | mmap.MAP_POPULATE
    protection = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
    return memoryview(mmap.mmap(descriptor, size, flags=flags, prot=protection))


def create_ring(directory: RingDirectory, size: int) -> tuple[int, int]:
    """Make the ring's file and take all its memory now, so that no write meets a full file system later.

    Returns a writable and a read-only descriptor. TransportError ``full`` when `size` bytes are not there,
    even after those who mapped a killed store's ring have let go of it.
    """
    path = directory.path / RING
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o660)
    try:
        os.fchmod(descriptor, 0o660)  # whatever the umask is
        until = time.monotonic() + (_RELEASE_SECONDS if directory.had_ring else 0.0)
        while not _take(descriptor, size, last=time.monotonic() >= until):
            time.sleep(0.1)
        return descriptor, os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        os.close(descriptor)
        path.unlink()
        if error.errno not in {errno.ENOSPC, errno.ENOMEM, errno.EDQUOT, errno.EFBIG}:
            raise TransportError("failed", f"{path} cannot be made ({error.strerror}); check it") from None
        system = os.statvfs(directory.path)
        raise TransportError(
            "full",
            f"a ring of {_mebibytes(size)} does not fit into {directory.path.parent}, which has "
            f"{_mebibytes(system.f_bavail * system.f_frsize)} free of "
            f"{_mebibytes(system.f_blocks * system.f_frsize)}; lower spec.transport.ring.size, or give more "
            "shared memory (docker run --shm-size, a Pod's emptyDir sizeLimit and memory limit, or mount -o "
            "remount,size=)",
        ) from None


def _take(descriptor: int, size: int, *, last: bool) -> bool:
    """Take the memory of a file; False when it is not there and this was not the last attempt."""
    try:
        os.posix_fallocate(descriptor, 0, size)
    except OSError as error:
        if last or error.errno not in {errno.ENOSPC, errno.ENOMEM}:
            raise
        return False
    return True


def reap(parent: Path) -> list[Path]:
    """Remove the directories of killed stores in `parent`, never a living store's, and return them.

    Then `parent` itself if it is empty. What is not this user's, or is no store's, is left alone.
    """
    try:
        directory = os.open(parent, _DIRECTORY)
    except OSError:  # not there, a link, or another user's
        return []
    try:
        # Whose it is may put links to anywhere into it, and other directories in the place of those seen.
        reaped = _reap_all(directory) if os.fstat(directory).st_uid in _trusted() else []
    finally:
        os.close(directory)
    _remove_empty(parent)
    return [parent / name for name in reaped]


def _reap_all(parent: int) -> list[str]:
    reaped = []
    for name in sorted(os.listdir(parent)):
        try:
            descriptor = os.open(name, _DIRECTORY, dir_fd=parent)
        except OSError:  # not a directory, another user's, or gone
            continue
        try:
            if (
                os.fstat(descriptor).st_uid == os.geteuid()
                and set(os.listdir(descriptor)) <= {RING, SOCKET}  # noqa: PTH208  by descriptor
                and _lock(descriptor)
                and _same(name, descriptor, parent)
            ):
                _clear(descriptor)
                with contextlib.suppress(OSError):  # not empty any more, or a mounted volume
                    os.rmdir(name, dir_fd=parent)
                reaped.append(name)
        except OSError:  # never a reason to fail for who reaps: it may have no rights, or be no file of ours
            continue
        finally:
            os.close(descriptor)
    return reaped


def _lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _lock_soon(descriptor: int) -> bool:
    """Lock, unless somebody keeps the lock: a reaper has it for a moment, a living store for good."""
    for _ in range(_LOCK_ATTEMPTS):
        if _lock(descriptor):
            return True
        time.sleep(0.01)
    return False


def _same(path: Path | str, descriptor: int, parent: int | None = None) -> bool:
    """Whether the path still leads to what was opened: who locks a removed directory has locked nothing."""
    try:
        found = os.stat(path, dir_fd=parent, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return os.path.samestat(found, os.fstat(descriptor))


def _trusted() -> set[int]:
    """Users who may read and change what this one has anyway."""
    return {0, os.geteuid()}


def _check_owner(path: Path, descriptor: int) -> None:
    # Whoever owns the parent, sticky or not, or a link to it, could put another directory in this one's
    # place: clients would show the token to a socket there.
    parents = {path.parent.stat().st_uid, path.parent.lstat().st_uid}
    if os.fstat(descriptor).st_uid != os.geteuid() or not parents <= _trusted():
        raise TransportError(
            "permission", f"{path} or its parent belongs to another user; remove it, or use another place"
        )


def _clear(descriptor: int) -> bool:
    """Remove a store's files; whether its ring was there."""
    found = False
    for name in (SOCKET, RING):
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name, dir_fd=descriptor)
            found = name == RING
    return found


def _remove_empty(path: Path) -> None:
    with contextlib.suppress(OSError):  # not empty, gone, or a mounted volume
        path.rmdir()


def _mebibytes(size: int) -> str:
    return f"{size / 2**20:,.0f} MiB"
