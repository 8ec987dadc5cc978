"""The lower tiers of a record store: cold frames in a local directory, and in an object store after that.

One file or object holds the live frames of one segment, one after the other, and goes with the last of them.
It has no index: where a frame is in it only its store knows, and ends with its store. Files and objects are
written and removed on threads, never on the event loop.
"""

from __future__ import annotations

import asyncio
import errno
import fcntl
import logging
import os
import secrets
import shutil
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final
from urllib.parse import quote

from tracerl.transport.base import Fault, TransportError
from tracerl.transport.objects.filesystem import FileSystem, Span
from tracerl.transport.objects.names import directory_name
from tracerl.transport.ring.segments import LiveFrame, Location

_log = logging.getLogger(__name__)

_PREFIX: Final = "tracerl-spill-"
_NO_SPACE: Final = frozenset({errno.ENOSPC, errno.EDQUOT})
_IOV_MAX: Final = 1_024
"""Most buffers that Linux takes in one call."""
_OPEN_FILES: Final = 256
"""More than one message to a reader has descriptors."""
_GAP_BYTES, _REQUEST_BYTES = 2**17, 2**23
"""What lies this near in an object is read by one request, of at most so many bytes if of several frames."""
_OPEN_SECONDS, _CLOSE_SECONDS = 10.0, 5.0
"""How long start and end of a store wait for an object store."""


_Asked = tuple[Span, asyncio.Future[bytes]]


class SpillDirectory:
    """A tier in a new directory under `parent`, mode 0700, that `close` removes.

    The directory is locked (flock) as long as the object lives: a store that starts later removes what killed
    ones left and never touches what a living one has. `limit_bytes` bounds the files together; None: the file
    system does.
    """

    name: Final = "spill"

    def __init__(self, parent: Path, *, job_uid: str, store: str, limit_bytes: int | None) -> None:
        """Remove what dead stores left, and make the directory. TransportError when that is impossible."""
        try:
            parent.mkdir(parents=True, exist_ok=True)
            remove_leftovers(parent)
            name = f"{_PREFIX}{quote(job_uid[:12], safe='')}-{quote(store, safe='')}-"
            self.directory, self._lock = _make_locked(parent, name)
        except OSError as error:
            raise TransportError(
                _fault(error),
                f"spec.transport.spillPath: no directory can be made in {parent} ({error.strerror}); name a "
                "directory on a local file system that this user may write to",
            ) from None
        self._limit = limit_bytes
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="spill")
        self._open: OrderedDict[int | str, int] = OrderedDict()
        """Descriptors by file name, those used last at the end."""
        self._files: dict[int | str, list[int]] = {}
        """By file name: live frames, bytes."""
        self._next = 0
        self.held_bytes = 0
        """Bytes of all files; a file counts as a whole until it is gone."""

    @property
    def free_bytes(self) -> int:
        """What still fits, by the file system and by the limit."""
        system = os.statvfs(self.directory)
        free = system.f_bavail * system.f_frsize
        return free if self._limit is None else max(0, min(free, self._limit - self.held_bytes))

    async def take(self, frames: Sequence[tuple[LiveFrame, memoryview]]) -> dict[int, Location]:
        """Write frames into one file. TransportError; nothing is kept then.

        The views must stay valid until this returns or raises, also when it is cancelled.
        """
        size = sum(len(view) for _, view in frames)
        if self._limit is not None and self.held_bytes + size > self._limit:
            raise TransportError(
                "full",
                f"{self.directory} holds {self.held_bytes >> 10} KiB and may hold {self._limit >> 10} KiB; "
                "raise spec.transport.spillLimit",
            )
        name, self._next = f"{self._next:08d}", self._next + 1
        # Counted before it is written: segments that are taken at the same time share the limit.
        self.held_bytes += size
        try:
            await self._run(_write, self.directory / name, [view for _, view in frames])
        except OSError as error:
            self.held_bytes -= size
            raise TransportError(
                _fault(error),
                f"{self.directory}: {size >> 10} KiB of records could not be written ({error.strerror}); "
                f"{_remedy(error)}",
            ) from None
        self._files[name] = [len(frames), size]
        places, offset = {}, 0
        for frame, view in frames:
            places[frame.seq] = Location("spill", name, offset, len(view))
            offset += len(view)
        return places

    async def drop(self, locations: Sequence[Location]) -> None:
        """Forget frames; a file goes with its last one."""
        for location in locations:
            left = self._files[location.place]
            left[0] -= 1
            if left[0]:
                continue
            del self._files[location.place]
            if (descriptor := self._open.pop(location.place, None)) is not None:
                os.close(descriptor)
            try:
                await self._run((self.directory / str(location.place)).unlink)
            except OSError as error:
                _log.warning(
                    "%s cannot be removed (%s)", self.directory / str(location.place), error.strerror
                )
            self.held_bytes -= left[1]

    def descriptor(self, location: Location) -> int | None:
        """Give the open file of a frame, open until 255 other ones are; None when it cannot be opened."""
        try:
            return self._file(location)
        except OSError:
            return None

    async def read(self, location: Location, start: int, stop: int) -> bytes:
        """Read bytes start to stop of a frame. TransportError."""
        try:
            # A descriptor of its own: that of the file may be closed while a thread reads.
            return await asyncio.to_thread(
                _read, os.dup(self._file(location)), location.offset + start, location.offset + stop
            )
        except OSError as error:
            raise TransportError(
                "failed",
                f"{self.directory / str(location.place)} cannot be read ({error.strerror}); {_remedy(error)}",
            ) from None

    def _file(self, location: Location) -> int:
        """Open a file, or take it from those that are open."""
        descriptor = self._open.pop(location.place, None)
        if descriptor is None:
            descriptor = os.open(self.directory / str(location.place), os.O_RDONLY | os.O_CLOEXEC)
        self._open[location.place] = descriptor
        if len(self._open) > _OPEN_FILES:
            os.close(self._open.popitem(last=False)[1])
        return descriptor

    def close(self) -> None:
        """Remove the directory and all frames in it."""
        self._thread.shutdown()
        for descriptor in self._open.values():
            os.close(descriptor)
        shutil.rmtree(self.directory, ignore_errors=True)
        os.close(self._lock)

    async def _run(self, function: Callable[..., None], *arguments: object) -> None:
        await asyncio.get_running_loop().run_in_executor(self._thread, function, *arguments)


class ObjectTier:
    """A tier in an object store, below ``<job UID>/spill/<store>/``, which is emptied at start and end."""

    name: Final = "object"

    def __init__(self, files: FileSystem, *, job_uid: str, store: str) -> None:
        """Take over the filesystem; nothing is requested yet. TransportError when an id is of no use."""
        self._files = files
        try:
            self._job_directory = directory_name(job_uid)
            self._directory = f"{self._job_directory}/spill/{directory_name(store)}"
        except TransportError:
            files.close()
            raise
        # A killed store's last upload may still arrive after this one started.
        self._own = f"{self._directory}/{secrets.token_hex(4)}"
        self._objects: dict[int | str, int] = {}
        """By path: live frames."""
        self._doomed: set[str] = set()
        """Paths that could not be deleted yet."""
        self._asked: list[_Asked] = []
        self._fetches: set[asyncio.Task[None]] = set()
        self._next = 0

    async def open(self) -> None:
        """Remove what a killed store of this name left, at any time after a start.

        TransportError when the place is of no use.
        """
        try:
            await asyncio.to_thread(self._remove_all, _OPEN_SECONDS, self._own)
        except TransportError as error:
            if error.fault in {"permission", "missing"}:
                raise
            # An outage passes, and a ring with room works without this tier.
            _log.warning("%s is emptied at the end of this store instead: %s", self._directory, error)

    async def take(self, frames: Sequence[tuple[LiveFrame, memoryview]]) -> dict[int, Location]:
        """Write frames into one object. TransportError.

        Needs as much memory again as the frames have.
        """
        path, self._next = f"{self._own}/{self._next}", self._next + 1
        try:
            # On a thread, which lets the event loop go on while it copies.
            await asyncio.to_thread(self._write, path, [view for _, view in frames])
        except BaseException:
            # An upload whose answer was lost, or that nobody waits for, may be there nevertheless.
            self._doomed.add(path)
            raise
        self._objects[path] = len(frames)
        places, offset = {}, 0
        for frame, view in frames:
            places[frame.seq] = Location("object", path, offset, len(view))
            offset += len(view)
        return places

    def _write(self, path: str, views: Sequence[memoryview]) -> None:
        self._files.write(path, b"".join(views))

    def descriptor(self, location: Location) -> None:
        """There is no file: `read`."""

    async def read(self, location: Location, start: int, stop: int) -> bytes:
        """Read bytes start to stop of a frame. TransportError."""
        answer: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        if not self._asked:
            # What is asked for in the same turn of the loop is fetched together.
            asyncio.get_running_loop().call_soon(self._fetch)
        self._asked.append(
            (Span(str(location.place), location.offset + start, location.offset + stop), answer)
        )
        return await answer

    def _fetch(self) -> None:
        asked, self._asked = self._asked, []
        task = asyncio.get_running_loop().create_task(self._answer(asked))
        self._fetches.add(task)
        task.add_done_callback(self._fetches.discard)

    async def _answer(self, asked: Sequence[_Asked]) -> None:
        groups = _together(asked)
        found: Sequence[bytes | Exception]
        try:
            found = await asyncio.to_thread(self._files.read, [span for span, _ in groups])
        except Exception as error:  # noqa: BLE001  handed to those who wait
            found = [error] * len(groups)
        for (whole, group), data in zip(groups, found, strict=True):
            for span, answer in group:
                if answer.done():  # nobody waits for it any more
                    continue
                if isinstance(data, Exception):
                    answer.set_exception(data)
                else:
                    answer.set_result(data[span.start - whole.start : span.stop - whole.start])

    async def drop(self, locations: Sequence[Location]) -> None:
        """Forget frames; an object goes with its last one. One that cannot be deleted now is later."""
        for location in locations:
            self._objects[location.place] -= 1
            if not self._objects[location.place]:
                del self._objects[location.place]
                self._doomed.add(str(location.place))
        if self._doomed:
            doomed, self._doomed = self._doomed, set()
            try:
                await asyncio.to_thread(self._files.delete, doomed)
            except TransportError as error:
                _log.warning("%d objects are deleted later: %s", len(doomed), error)
                self._doomed |= doomed

    def close(self) -> None:
        """Delete all objects and end the connections; what cannot be deleted soon is at the next start."""
        try:
            self._remove_all(_CLOSE_SECONDS)
        except TransportError as error:
            _log.warning("objects of %s are left: %s", self._directory, error)
        self._files.close()

    def _remove_all(self, timeout: float, keep: str | None = None) -> None:
        """Remove everything of stores of this name, but for what is below `keep`."""
        kept = None if keep is None else f"{keep}/"
        paths = [path for path, _ in self._files.entries(self._directory, timeout=timeout)]
        dead = [path for path in paths if kept is None or not path.startswith(kept)]
        self._files.delete(dead, timeout=timeout)
        self._files.clean(self._directory, keep=keep, timeout=timeout)
        self._files.remove_empty_directories(self._job_directory)


def _together(asked: Sequence[_Asked]) -> list[tuple[Span, list[_Asked]]]:
    """Group what is near in one object, and so is read by one request."""
    groups: list[tuple[Span, list[_Asked]]] = []
    for span, answer in sorted(asked, key=lambda each: each[0]):
        if groups:
            whole, group = groups[-1]
            stop = max(whole.stop, span.stop)
            near = span.path == whole.path and span.start - whole.stop <= _GAP_BYTES
            if near and stop - whole.start <= _REQUEST_BYTES:
                group.append((span, answer))
                groups[-1] = whole._replace(stop=stop), group
                continue
        groups.append((span, [(span, answer)]))
    return groups


def remove_leftovers(parent: Path) -> list[Path]:
    """Remove the spill directories in `parent` whose store is dead; give those that were removed."""
    removed = []
    for path in parent.glob(f"{_PREFIX}*"):
        try:
            lock = _lock(path)
        except OSError:  # of another user, or removed by another store in this moment
            continue
        if lock is None:
            continue
        try:
            shutil.rmtree(path)
            removed.append(path)
        except OSError as error:
            _log.warning("%s of a dead store cannot be removed (%s)", path, error.strerror)
        finally:
            os.close(lock)
    return removed


def _make_locked(parent: Path, prefix: str) -> tuple[Path, int]:
    """Make a directory that nobody takes for a left-over, and give it with its lock."""
    while True:
        path = parent / f"{prefix}{secrets.token_hex(8)}"
        path.mkdir(mode=0o700)
        # A store that starts now may lock, or have removed, a directory that is not locked yet.
        try:
            lock = _lock(path)
        except FileNotFoundError:
            continue
        if lock is not None:
            return path, lock


def _lock(path: Path) -> int | None:
    """Lock a directory and give its descriptor; None when another process has it, or it is gone by now."""
    lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.path.samestat(os.fstat(lock), path.stat()):
            return lock
    except (BlockingIOError, FileNotFoundError):
        pass
    except BaseException:
        os.close(lock)
        raise
    os.close(lock)
    return None


def _write(path: Path, views: Sequence[memoryview]) -> None:
    """Write a new file; OSError, and no file is left, when it cannot be written whole."""
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        waiting = list(views)
        while waiting:
            written = os.writev(file, waiting[:_IOV_MAX])
            done = 0
            while done < len(waiting) and written >= len(waiting[done]):
                written -= len(waiting[done])
                done += 1
            waiting = waiting[done:]
            if waiting and written:
                waiting[0] = waiting[0][written:]
    except BaseException:
        path.unlink()
        raise
    finally:
        os.close(file)


def _read(descriptor: int, start: int, stop: int) -> bytes:
    """Read bytes of a file and close it; OSError also when it is shorter than that."""
    try:
        data = os.pread(descriptor, stop - start, start)
        if len(data) != stop - start:
            raise OSError(errno.EIO, "it is shorter than what was written")
        return data
    finally:
        os.close(descriptor)


def _fault(error: OSError) -> Fault:
    if error.errno in _NO_SPACE:
        return "full"
    return "permission" if error.errno in {errno.EACCES, errno.EPERM, errno.EROFS} else "failed"


def _remedy(error: OSError) -> str:
    if error.errno in _NO_SPACE:
        return "free space there, or set spec.transport.spillLimit below what there is"
    if error.errno in {errno.EMFILE, errno.ENFILE}:
        return "let the store have more files open (ulimit -Hn)"
    return "look at the disk, and keep everything else from changing files of a running job"
