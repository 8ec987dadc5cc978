"""Frames as files in a directory that both sides reach: any fsspec URL, one file a frame.

A store's frames lie in ``<uri>/<job UID>/<run id>/<store>/``. A name ends in ``.trec``; while a file is being
written it ends in ``.tmp``, which no reader opens, and only then is it renamed. Object stores show an object
only when it is whole, so there it is written under its own name at once. Additional references are empty
files in ``<frame>.refs/``, so that a rollout can retain what a trainer in another process releases.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import threading
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import IO, Any
from urllib.parse import quote

import fsspec
import xxhash
from fsspec.implementations.local import LocalFileSystem

from tracerl.api.frames import (
    FRAME_SUFFIX,
    FrameKey,
    Handle,
    HandleError,
    HandleParts,
    format_handle,
    parse_handle,
)
from tracerl.transport.base import TransportError, Usage

_TEMPORARY_SUFFIX = ".tmp"
_REFERENCES_SUFFIX = ".refs"
# Filesystems whose writes become visible at once and whole, or not at all.
_OBJECT_STORES = frozenset({"s3", "s3a", "gs", "gcs", "abfs", "abfss", "az"})
_ATOMIC = _OBJECT_STORES | {"memory"}
# Enough for a person to recognise the trajectory; names stay far below 255 bytes.
_SLUG_CHARACTERS = 64
# `release` removes a directory that became empty; a `put` that had just made it makes it again.
_ATTEMPTS = 64
_NO_SPACE = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
_NO_RIGHT = frozenset({errno.EACCES, errno.EPERM, errno.EROFS})


class _AbsolutePaths(LocalFileSystem):  # type: ignore[misc]  # fsspec has no types
    """fsspec's local filesystem for paths that are absolute already.

    Its own methods work every path out anew, several times over, which costs more than the system calls.
    """

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return path

    def open(self, path: str, mode: str = "rb") -> IO[Any]:
        return open(path, mode)  # noqa: PTH123  pathlib parses the path as well

    def mv(self, path1: str, path2: str) -> None:
        os.replace(path1, path2)  # noqa: PTH105


@lru_cache(maxsize=256)
def _directory_name(text: str) -> str:
    return quote(text, safe="")


class DirectoryTransport:
    """One store's end of a directory transport; `get`, `retain` and `release` work for handles of all stores.

    `store` names the one process that puts frames under it: an object made with the same name removes what
    a killed predecessor left half-written. A process that only reads uses a name of its own. Credentials and
    endpoints of object stores come from their own environment variables (``AWS_ENDPOINT_URL`` and the like).
    """

    def __init__(self, uri: str, *, store: str, job_uid: str, run_id: str) -> None:
        if {store, job_uid, run_id} & {"", ".", ".."}:
            raise ValueError("store, job UID and run id are names of directories")
        self._uri = uri
        self._store = store
        self._job_uid = job_uid
        self._run_id = run_id
        try:
            # A cached listing would hide what the other process has written or deleted since.
            self._fs, root = fsspec.core.url_to_fs(uri, use_listings_cache=False)
        except (ImportError, ValueError) as error:
            raise TransportError(
                "failed", f"{uri} cannot be used for records: {error}; write a URL of an installed filesystem"
            ) from None
        if type(self._fs) is LocalFileSystem:
            self._fs = _AbsolutePaths()
        protocol = self._fs.protocol
        protocols = {protocol} if isinstance(protocol, str) else set(protocol)
        self._atomic = bool(protocols & _ATOMIC)
        self._has_directories = not protocols & _OBJECT_STORES
        self._run_root = "/".join((root.rstrip("/"), _directory_name(job_uid), _directory_name(run_id)))
        self._lock = threading.Lock()
        self._writer = secrets.token_hex(4)
        self._sequence = 0
        self._bytes_put = self._frames_put = self._bytes_got = self._gets = 0
        with self._errors("cleaned"):
            for file in self._files():
                if file["name"].endswith(_TEMPORARY_SUFFIX):
                    self._fs.rm_file(file["name"])

    def put(self, frame: bytes | memoryview, key: FrameKey) -> Handle:
        """Store a frame; it is visible under its handle only when it is whole."""
        if (key.job_uid, key.run_id) != (self._job_uid, self._run_id):
            raise TransportError(
                "foreign",
                f"a frame of run {key.run_id} of job {key.job_uid} does not belong into the records of run "
                f"{self._run_id} of job {self._job_uid}; use the transport of its own run",
            )
        data = memoryview(frame).cast("B")
        with self._lock:
            sequence = self._sequence
            self._sequence += 1
        name = (
            f"{quote(key.trajectory, safe='')[:_SLUG_CHARACTERS]}.{key.part}of{key.parts}"
            f".{key.row_start}-{key.row_stop}.v{key.version}.{self._writer}-{sequence:x}{FRAME_SUFFIX}"
        )
        path = self._path(self._store, name)
        with self._errors("written"):
            if self._atomic:
                self._fs.pipe_file(path, bytes(data))
            else:
                self._write_and_rename(path, data)
        with self._lock:
            self._bytes_put += len(data)
            self._frames_put += 1
        return format_handle(self._store, name, len(data), xxhash.xxh3_64_intdigest(data))

    def _write_and_rename(self, path: str, data: memoryview) -> None:
        temporary = path + _TEMPORARY_SUFFIX
        for attempt in range(_ATTEMPTS):
            try:
                file = self._fs.open(temporary, "wb")
            except FileNotFoundError:
                if attempt + 1 == _ATTEMPTS:
                    raise
                with contextlib.suppress(FileNotFoundError):
                    self._fs.makedirs(self._path(self._store), exist_ok=True)
                continue
            break
        try:
            with file:
                file.write(data)
            self._fs.mv(temporary, path)
        except BaseException:
            with contextlib.suppress(OSError):
                self._fs.rm_file(temporary)
            raise

    def get(self, handle: Handle, ranges: Sequence[tuple[int, int]] | None = None) -> memoryview:
        """Fetch a frame, or the bytes of ranges (start, stop) of it one after the other.

        ValueError when a range does not lie in the frame.
        """
        parts = self._parse(handle)
        path = self._path(parts.store, parts.name)
        wanted = [(0, parts.length)] if ranges is None else list(ranges)
        for start, stop in wanted:
            if not 0 <= start <= stop <= parts.length:
                raise ValueError(f"{start}..{stop} is not a range of a frame of {parts.length} bytes")
        with self._errors("read", handle):
            if ranges is None:
                pieces = [self._fs.cat_file(path)]
            else:  # object stores fetch them concurrently
                wanted = [span for span in wanted if span[0] < span[1]]
                starts, stops = [start for start, _ in wanted], [stop for _, stop in wanted]
                pieces = self._fs.cat_ranges([path] * len(wanted), starts, stops, on_error="raise")
        for piece, (start, stop) in zip(pieces, wanted, strict=True):
            if len(piece) != stop - start:
                raise TransportError(
                    "damaged",
                    f"{self._uri} has {len(piece)} bytes where {handle} has {stop - start}; the file was "
                    "changed by something else, keep that away from the directory",
                )
        data = pieces[0] if len(pieces) == 1 else b"".join(pieces)
        with self._lock:
            self._bytes_got += len(data)
            self._gets += 1
        return memoryview(data)

    def retain(self, handle: Handle) -> None:
        """Add a reference, so that one more release is needed until the frame goes."""
        parts = self._parse(handle)
        path = self._path(parts.store, parts.name)
        references = path + _REFERENCES_SUFFIX
        with self._errors("retained", handle):
            if not self._fs.exists(path):
                raise FileNotFoundError(path)
            if self._has_directories:
                with contextlib.suppress(FileExistsError):
                    self._fs.mkdir(references, create_parents=False)
            reference = f"{references}/{secrets.token_hex(8)}"
            self._fs.pipe_file(reference, b"")
            if not self._fs.exists(path):  # released meanwhile: the reference came too late
                self._fs.rm_file(reference)
                self._remove_empty(references)
                self._remove_empty_parents(parts.store)
                raise FileNotFoundError(path)

    def release(self, handle: Handle) -> None:
        """Drop a reference; the last one deletes the frame, and directories that are then empty."""
        parts = self._parse(handle)
        path = self._path(parts.store, parts.name)
        references = path + _REFERENCES_SUFFIX
        with self._errors("released"):
            names = self._names(references)
            for reference in names or ():
                try:
                    self._fs.rm_file(reference)
                except FileNotFoundError:  # another releaser took this one
                    continue
                return
            with contextlib.suppress(FileNotFoundError):
                self._fs.rm_file(path)
            # Was there none, then one that a retainer makes meanwhile is its to remove.
            if names is not None:
                self._remove_empty(references)
            self._remove_empty_parents(parts.store)

    def usage(self) -> Usage:
        """Count what lies under this store's name, and what went through this object."""
        with self._errors("counted"):
            frames = [file["size"] for file in self._files() if file["name"].endswith(FRAME_SUFFIX)]
        with self._lock:
            return Usage(
                bytes_held=sum(frames),
                frames_held=len(frames),
                bytes_put=self._bytes_put,
                frames_put=self._frames_put,
                bytes_got=self._bytes_got,
                gets=self._gets,
            )

    def close(self) -> None:
        """Delete everything under this store's name."""
        with self._errors("cleaned"):
            with contextlib.suppress(FileNotFoundError):
                self._fs.rm(self._path(self._store), recursive=True)
            self._remove_empty_parents(self._store)

    def _files(self) -> list[dict[str, Any]]:
        try:
            return list(self._fs.ls(self._path(self._store), detail=True))
        except FileNotFoundError:
            return []

    def _names(self, directory: str) -> list[str] | None:
        try:
            return list(self._fs.ls(directory, detail=False))
        except FileNotFoundError:
            return None

    def _path(self, store: str, *names: str) -> str:
        return "/".join((self._run_root, _directory_name(store), *names))

    def _parse(self, handle: Handle) -> HandleParts:
        try:
            parts = parse_handle(handle)
        except HandleError as error:
            raise TransportError("missing", str(error)) from None
        # Handles come from another process: a name that leaves its store's directory is not a frame's.
        if "/" in parts.name or not parts.name.endswith(FRAME_SUFFIX) or parts.store in {".", ".."}:
            raise TransportError("missing", f"{handle[:200]} does not name a frame of {self._uri}")
        return parts

    def _remove_empty_parents(self, store: str) -> None:
        for directory in (self._path(store), self._run_root, self._run_root.rpartition("/")[0]):
            if not self._remove_empty(directory):
                return

    def _remove_empty(self, directory: str) -> bool:
        if not self._has_directories:
            return False
        try:
            self._fs.rmdir(directory)
        except FileNotFoundError:
            return True
        except OSError:  # not empty
            return False
        return True

    @contextlib.contextmanager
    def _errors(self, done: str, handle: Handle | None = None) -> Iterator[None]:
        """Turn a filesystem's error into one sentence; `done` is what could not be done with the frames."""
        where = f"record frames cannot be {done} in {self._uri}"
        try:
            yield
        except FileNotFoundError as error:
            if handle is None:
                raise TransportError("failed", f"{where}: {error}; create that place") from None
            raise TransportError(
                "missing",
                f"{handle} is not in {self._uri}: it was released or removed; generate the trajectory again",
            ) from None
        except OSError as error:
            if error.errno in _NO_SPACE:
                raise TransportError(
                    "full",
                    f"{where}: no space is left; free some, or set spec.transport.object.uri elsewhere",
                ) from None
            if isinstance(error, PermissionError) or error.errno in _NO_RIGHT:
                raise TransportError(
                    "permission",
                    f"{where}: {error}; let this process read and write there, or set "
                    "spec.transport.object.uri elsewhere",
                ) from None
            raise TransportError("failed", f"{where}: {error}; check that place") from error
        # A filesystem's client may raise types of its own libraries, which only the backend knows.
        except Exception as error:
            raise TransportError("failed", f"{where}: {error}; check that place") from error
