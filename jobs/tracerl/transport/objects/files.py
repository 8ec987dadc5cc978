"""Requests to any fsspec filesystem but S3, through its blocking methods, in threads."""

# The methods are documented in `Backend`.
# ruff: noqa: D102

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import secrets
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from fsspec.implementations.local import LocalFileSystem

from tracerl.transport.base import Buffer
from tracerl.transport.objects.backend import Entry, Leftover, Tail, Verdict, one_line

_T = TypeVar("_T")

TEMPORARY_SUFFIX = ".tmp"
# How often makedirs and open may lose against someone who removes empty directories.
_ATTEMPTS = 64
_NO_SPACE = frozenset({errno.ENOSPC, errno.EDQUOT})
_NO_RIGHT = frozenset({errno.EACCES, errno.EPERM, errno.EROFS})
_NEVER_PASSES = frozenset({errno.EINVAL, errno.ENAMETOOLONG, errno.EISDIR, errno.ENOTDIR, errno.EFBIG})


class FileBackend:
    """See `Backend`."""

    def __init__(self, filesystem: Any, concurrency: int, *, atomic: bool) -> None:
        self._filesystem = filesystem
        self._atomic = atomic
        # fsspec moves a file into a directory that is in its place.
        local = isinstance(filesystem, LocalFileSystem)
        self._rename: Callable[[str, str], object] = os.replace if local else filesystem.mv
        self._threads = ThreadPoolExecutor(concurrency, "objects")

    async def _call(self, function: Callable[..., _T], *arguments: Any) -> _T:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, function, *arguments)

    async def put(self, path: str, data: Buffer) -> None:
        await self._call(self._put, path, data)

    def _put(self, path: str, data: Buffer) -> None:
        if self._atomic:
            self._filesystem.pipe_file(path, bytes(data))
            return
        # One name a try: an earlier one may still be writing in its thread.
        temporary = f"{path}.{secrets.token_hex(4)}{TEMPORARY_SUFFIX}"
        for attempt in range(_ATTEMPTS):
            try:
                file = self._filesystem.open(temporary, "wb")
            except FileNotFoundError:
                if attempt + 1 == _ATTEMPTS:
                    raise
                with contextlib.suppress(FileNotFoundError):
                    self._filesystem.makedirs(temporary.rpartition("/")[0], exist_ok=True)
                continue
            break
        try:
            with file:
                file.write(data)
            self._rename(temporary, path)
        except BaseException:
            with contextlib.suppress(OSError):
                self._filesystem.rm_file(temporary)
            raise

    async def get(self, path: str, start: int, stop: int) -> bytes:
        return bytes(await self._call(self._filesystem.cat_file, path, start, stop))

    async def tail(self, path: str, nbytes: int) -> Tail:
        def read() -> Tail:
            size = int(self._filesystem.size(path))
            return Tail(bytes(self._filesystem.cat_file(path, max(0, size - nbytes), size)), size)

        return await self._call(read)

    async def find(self, directory: str) -> list[Entry]:
        def find() -> list[Entry]:
            try:
                found = self._filesystem.find(directory, detail=True)
            except FileNotFoundError:
                return []
            return [Entry(path, int(info["size"])) for path, info in found.items() if path != directory]

        return await self._call(find)

    async def delete(self, path: str) -> None:
        def delete() -> None:
            with contextlib.suppress(FileNotFoundError):
                self._filesystem.rm_file(path)

        await self._call(delete)

    async def leftovers(self, directory: str) -> list[Leftover]:
        return [
            Leftover(path, "") for path, _ in await self.find(directory) if path.endswith(TEMPORARY_SUFFIX)
        ]

    async def remove(self, leftover: Leftover) -> None:
        await self.delete(leftover.path)

    def remove_empty(self, directory: str) -> None:
        """Remove empty directories of this machine from there downward."""
        if not isinstance(self._filesystem, LocalFileSystem):
            return
        for parent, _, _ in os.walk(directory, topdown=False):
            with contextlib.suppress(OSError):  # not empty
                Path(parent).rmdir()

    async def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    def judge(self, error: Exception) -> Verdict:
        words = one_line(error)
        if isinstance(error, FileNotFoundError):
            return Verdict("missing", False, words)
        if isinstance(error, OSError):
            if error.errno in _NO_SPACE:
                return Verdict(
                    "full",
                    True,
                    "no space is left",
                    "free some, or set spec.transport.object.uri elsewhere",
                )
            if isinstance(error, PermissionError) or error.errno in _NO_RIGHT:
                return Verdict(
                    "permission",
                    False,
                    words,
                    "let this process read and write there, or set spec.transport.object.uri elsewhere",
                )
            return Verdict("failed", error.errno not in _NEVER_PASSES, words)
        # What a library of some network filesystem raises, only that library knows.
        return Verdict("failed", not isinstance(error, NotImplementedError | ValueError), words)
