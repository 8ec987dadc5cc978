"""Whole objects and ranges of them in a directory of any fsspec URL, with retries until a deadline.

Every request runs as a coroutine on fsspec's own event loop thread; the methods here block and may be called
from any other thread.
"""

from __future__ import annotations

import asyncio
import bisect
import contextlib
import functools
import logging
import math
import random
import secrets
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple, TypeVar
from urllib.parse import urlsplit, urlunsplit

import fsspec
from fsspec.asyn import get_loop

from tracerl.api.constants import Reason
from tracerl.transport.base import Buffer, TransportError
from tracerl.transport.objects.backend import Backend, Entry, Leftover, PartsBackend, Tail, one_line
from tracerl.transport.objects.files import TEMPORARY_SUFFIX, FileBackend
from tracerl.transport.retry import Deadline, delays

_log = logging.getLogger(__name__)
_T = TypeVar("_T")

PART_BYTES = 8 * 2**20
"""Objects of twice this size and more go up in parts of it; S3 wants at least 5 MiB."""
_MOST_PARTS = 10_000
"""S3 takes no more of one object."""
CONCURRENCY = 16
"""Requests of one filesystem at a time, parts of uploads included."""

_S3 = frozenset({"s3", "s3a"})
# Filesystems whose files become visible at once and whole, or not at all.
_ATOMIC = frozenset({"s3", "s3a", "gs", "gcs", "abfs", "abfss", "az", "memory"})
_CREDENTIALS = {
    "key": "AWS_ACCESS_KEY_ID",
    "secret": "AWS_SECRET_ACCESS_KEY",
    "token": "AWS_SESSION_TOKEN",
}
# A try may hang where no timeout of a socket sees it. No network that records are sent over is slower.
_TRY_SECONDS = 30.0
_SLOWEST_BYTES_PER_SECOND = 2**20
_ABORT_SECONDS = 5.0

_Verb = Literal["read", "written", "deleted", "listed"]
OPERATIONS: Final[dict[_Verb, str]] = {
    "read": "read",
    "written": "write",
    "deleted": "delete",
    "listed": "list",
}
"""What requests do, by how messages say it."""
DURATION_BOUNDS: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, math.inf)
"""Seconds that tries are sorted by."""
_COUNTERS = (
    *("requests", "retries", "sent_bytes", "received_bytes"),
    *(f"{one}_{what}" for one in OPERATIONS.values() for what in ("ok", "failed", "nanoseconds")),
    *(f"{one}_within_{bound}" for one in OPERATIONS.values() for bound in DURATION_BOUNDS),
)


class CredentialsError(TransportError):
    """A mounted secret does not hold what it has to. ``permission``; of the reason Configuration."""

    def __init__(self, message: str) -> None:
        super().__init__("permission", message)
        self.reason = Reason.CONFIGURATION


class Span(NamedTuple):
    """Bytes start..stop-1 of an object."""

    path: str
    start: int
    stop: int


def open_filesystem(
    uri: str,
    *,
    endpoint_url: str | None = None,
    credentials: Path | None = None,
    field: str = "spec.transport.object",
    content: str = "record objects",
    deadline_seconds: float = 60,
    concurrency: int = CONCURRENCY,
    part_bytes: int = PART_BYTES,
) -> FileSystem:
    """Open the directory `uri`; nothing is requested yet.

    `content` is what is kept there, and `field` the field of the job that says so, in sentences.

    For S3, `endpoint_url` None means AWS_ENDPOINT_URL, else AWS; `credentials` is a directory with files
    named as the AWS environment variables, as a Kubernetes secret is mounted, None the standard chain of
    botocore. A request without credentials is never made. TransportError when the URL or the credentials
    are of no use.
    """
    shown = _shown(uri)
    try:
        protocol = fsspec.core.split_protocol(uri)[0] or "file"
        if protocol in _S3:
            # Here, so that other places need no s3fs.
            from tracerl.transport.objects.s3 import S3Backend  # noqa: PLC0415

            root = uri.partition("://")[2]
            if "@" in root.partition("/")[0]:
                raise ValueError("it holds a user name, which belongs into AWS_ACCESS_KEY_ID or a secret")
            if not root.partition("/")[0]:
                raise ValueError("it names no bucket")
            keys = read_credentials(credentials, field)
            backend: Backend = S3Backend(endpoint_url, keys, concurrency, field)
        else:
            # A cached listing would hide what another process has written or deleted since.
            filesystem, root = fsspec.core.url_to_fs(uri, use_listings_cache=False)
            backend = FileBackend(filesystem, concurrency, atomic=protocol in _ATOMIC)
    except (ImportError, ValueError) as error:
        raise TransportError(
            "failed",
            f"{shown} cannot be used for {content}: {one_line(error)}; "
            "write a URL of an installed filesystem",
        ) from None
    where = shown if endpoint_url is None else f"{shown} at {_shown(endpoint_url)}"
    return FileSystem(
        backend,
        root.rstrip("/"),
        where=where,
        content=content,
        deadline_seconds=deadline_seconds,
        concurrency=concurrency,
        part_bytes=part_bytes,
    )


class FileSystem:
    """Objects below one directory; paths are relative to it. All methods raise TransportError.

    A request that fails in a way that may pass (a network, a server that is down or slow, a full disk) is
    tried again with growing waits until `timeout` seconds are over, by default the deadline given at opening.
    """

    def __init__(
        self,
        backend: Backend,
        root: str,
        *,
        where: str,
        content: str,
        deadline_seconds: float,
        concurrency: int,
        part_bytes: int,
    ) -> None:
        self.where = where
        """The URL without anything secret, for messages."""
        self._content = content
        self._backend = backend
        self._root = root
        self._seconds = deadline_seconds
        self._part_bytes = part_bytes
        self._slots = asyncio.Semaphore(concurrency)
        self._loop = get_loop()
        self._chance = random.Random()  # noqa: S311 (jitter)
        self._lock = threading.Lock()
        self._counters: Counter[str] = Counter()
        self._troubled = False

    @property
    def counters(self) -> dict[str, int]:
        """Totals: requests, retries, sent_bytes, received_bytes, and by operation (read, write, delete, list)
        ``OPERATION_ok``, ``OPERATION_failed`` and ``OPERATION_nanoseconds`` of single tries, of which each is
        in one ``OPERATION_within_BOUND`` as well: that of the first of DURATION_BOUNDS that it did not pass.
        """
        with self._lock:
            return {name: self._counters[name] for name in _COUNTERS}

    def write(self, path: str, data: Buffer, *, timeout: float | None = None) -> None:
        """Write an object; it becomes visible whole or not at all."""
        self._run(self._write(path, data, self._deadline(timeout)))

    def read(self, spans: Sequence[Span], *, timeout: float | None = None) -> list[bytes | TransportError]:
        """Read all spans, concurrently; each succeeds or fails alone. None is of other length than asked."""
        deadline = self._deadline(timeout)
        return self._run(self._each([self._read(span, deadline) for span in spans]))

    def read_tails(
        self, paths: Sequence[str], nbytes: int, *, timeout: float | None = None
    ) -> list[Tail | TransportError]:
        """Read at most the last `nbytes` bytes of each object."""
        deadline = self._deadline(timeout)

        async def one(path: str) -> Tail:
            tail = await self._request(
                "read", path, lambda: self._backend.tail(self._whole(path), nbytes), deadline, nbytes
            )
            self._count(received_bytes=len(tail.data))
            return tail

        return self._run(self._each([one(path) for path in paths]))

    def entries(self, directory: str, *, timeout: float | None = None) -> list[Entry]:
        """Find all objects below a directory, sorted by path; none where it does not exist."""
        return self._run(self._entries(directory, self._deadline(timeout)))

    def delete(self, paths: Iterable[str], *, timeout: float | None = None) -> None:
        """Delete objects; one that is gone is no error. All are tried before the first error is raised."""
        deadline = self._deadline(timeout)

        async def one(path: str) -> None:
            await self._request("deleted", path, lambda: self._backend.delete(self._whole(path)), deadline)

        for answer in self._run(self._each([one(path) for path in paths])):
            if isinstance(answer, TransportError):
                raise answer

    def clean(self, directory: str, *, keep: str | None = None, timeout: float | None = None) -> None:
        """Remove what a killed writer left half-done below `directory`, apart from what is below `keep`.

        That is temporary files, and unfinished uploads of S3, which cost storage though no listing shows
        them. An account without the right to list uploads leaves those, with a warning.
        """
        self._run(self._clean(directory, keep, self._deadline(timeout)))

    def remove_empty_directories(self, directory: str) -> None:
        """Remove `directory` and the directories below it that are empty, where there are directories."""
        if isinstance(self._backend, FileBackend):
            self._backend.remove_empty(self._whole(directory))

    def probe(self) -> None:
        """Write, read, list and delete a small object, as `tracerl doctor` does."""
        path = f"probe-{secrets.token_hex(8)}{TEMPORARY_SUFFIX}"
        data = secrets.token_bytes(64)
        # First, for some servers make a bucket that does not exist when it is written to.
        self.entries("")
        self.write(path, data)
        try:
            (answer,) = self.read([Span(path, 0, len(data))])
            if isinstance(answer, TransportError):
                raise answer
            if answer != data or Entry(path, len(data)) not in self.entries(""):
                raise TransportError(
                    "failed",
                    f"{self.where} does not give back or list what was just written; use a store that is "
                    "consistent after every write",
                )
        finally:
            self.delete([path])

    def close(self) -> None:
        """End all connections; a request that is still made raises TransportError or never ends."""
        self._run(self._backend.close())

    # -- on the event loop --------------------------------------------------------------------------------

    async def _write(self, path: str, data: Buffer, deadline: Deadline) -> None:
        whole, size = self._whole(path), memoryview(data).nbytes
        if isinstance(self._backend, PartsBackend) and size >= 2 * self._part_bytes:
            await self._write_parts(self._backend, path, memoryview(data).cast("B"), deadline)
        else:
            await self._request("written", path, lambda: self._backend.put(whole, data), deadline, size)
        self._count(sent_bytes=size)

    async def _write_parts(
        self, backend: PartsBackend, path: str, data: memoryview, deadline: Deadline
    ) -> None:
        whole, request = self._whole(path), functools.partial(self._request, "written", path)
        size = max(self._part_bytes, -(-len(data) // _MOST_PARTS))
        begun = 0

        async def begin() -> str:
            nonlocal begun
            begun += 1
            return await backend.begin_upload(whole)

        upload = await request(begin, deadline)

        async def send(number: int) -> str:
            part = data[(number - 1) * size : number * size]
            return await request(lambda: backend.put_part(whole, upload, number, part), deadline, len(part))

        tasks = [self._loop.create_task(send(number + 1)) for number in range(-(-len(data) // size))]
        try:
            tags = await asyncio.gather(*tasks)
            await request(lambda: backend.end_upload(whole, upload, tags, len(data)), deadline)
        except BaseException:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            # What cannot be aborted now is at the next start.
            with contextlib.suppress(TransportError):
                await request(lambda: backend.remove(Leftover(whole, upload)), Deadline(_ABORT_SECONDS))
            raise
        if begun > 1:
            # A try before may have begun one too, its answer lost; the next start finds what stays.
            with contextlib.suppress(TransportError):
                directory = path.rpartition("/")[0]
                await self._remove_leftovers(directory, lambda one: one == whole, Deadline(_ABORT_SECONDS))

    async def _read(self, span: Span, deadline: Deadline) -> bytes:
        path, start, stop = span
        if start == stop:
            return b""
        data = await self._request(
            "read", path, lambda: self._backend.get(self._whole(path), start, stop), deadline, stop - start
        )
        if len(data) != stop - start:
            raise TransportError(
                "damaged",
                f"{path} in {self.where} has {len(data)} bytes where {stop - start} were written; it was "
                "changed by something else, keep that away from the records",
            )
        self._count(received_bytes=len(data))
        return data

    async def _entries(self, directory: str, deadline: Deadline) -> list[Entry]:
        found = await self._request(
            "listed", directory, lambda: self._backend.find(self._whole(directory)), deadline
        )
        skip = len(self._root) + 1
        return sorted(Entry(path[skip:], size) for path, size in found)

    async def _remove_leftovers(
        self, directory: str, wanted: Callable[[str], bool], deadline: Deadline
    ) -> None:
        """Remove what is unfinished below a directory, where its whole path is wanted."""
        backend = self._backend
        leftovers = await self._request(
            "listed", directory, lambda: backend.leftovers(self._whole(directory)), deadline
        )
        for leftover in leftovers:
            if wanted(leftover.path):
                remove = functools.partial(backend.remove, leftover)
                await self._request("deleted", leftover.path, remove, deadline)

    async def _clean(self, directory: str, keep: str | None, deadline: Deadline) -> None:
        kept = None if keep is None else f"{self._whole(keep)}/"
        try:
            await self._remove_leftovers(
                directory, lambda path: kept is None or not path.startswith(kept), deadline
            )
        except TransportError as error:
            if error.fault != "permission":
                raise
            _log.warning("what earlier runs left unfinished, if anything, stays: %s", error)

    async def _request(
        self,
        verb: _Verb,
        path: str,
        attempt: Callable[[], Awaitable[_T]],
        deadline: Deadline,
        nbytes: int = 0,
    ) -> _T:
        longest = _TRY_SECONDS + nbytes / _SLOWEST_BYTES_PER_SECOND
        tries = 0
        for delay in delays(self._chance):
            try:
                async with self._slots:
                    tries += 1
                    async with (
                        self._counted(verb),
                        asyncio.timeout(min(longest, max(deadline.remaining(), 0.1))),
                    ):
                        answer = await attempt()
            except Exception as error:  # noqa: BLE001  each filesystem's libraries have errors of their own
                verdict = self._backend.judge(error)
            else:
                self._recovered()
                return answer
            problem = f"{self._content} cannot be {verb} in {self.where}: {verdict.words}"
            if not verdict.passes or deadline.remaining() <= delay:
                if verdict.fault == "missing":
                    raise TransportError(
                        "missing",
                        f"{path} is not in {self.where}: it was released or removed; generate its "
                        "trajectories again",
                    )
                more = f" (after {tries} tries)" if tries > 1 else ""
                raise TransportError(verdict.fault, f"{problem}{more}; {verdict.remedy}")
            if not self._troubled:
                self._troubled = True
                _log.warning("%s; trying again until the deadline", problem)
            self._count(retries=1)
            await asyncio.sleep(delay)
        raise AssertionError("delays never end")

    @asynccontextmanager
    async def _counted(self, verb: _Verb) -> AsyncIterator[None]:
        """Count one try and its time."""
        operation, started, result = OPERATIONS[verb], time.monotonic_ns(), "failed"
        try:
            yield
            result = "ok"
        finally:
            elapsed = time.monotonic_ns() - started
            bound = DURATION_BOUNDS[bisect.bisect_left(DURATION_BOUNDS, elapsed / 1e9)]
            named = {f"{operation}_{result}": 1, f"{operation}_nanoseconds": elapsed}
            self._count(requests=1, **named, **{f"{operation}_within_{bound}": 1})

    def _recovered(self) -> None:
        if self._troubled:
            self._troubled = False
            _log.warning("%s answers again", self.where)

    async def _each(self, requests: Iterable[Coroutine[Any, Any, _T]]) -> list[_T | TransportError]:
        async def one(request: Coroutine[Any, Any, _T]) -> _T | TransportError:
            try:
                return await request
            except TransportError as error:
                return error

        return await asyncio.gather(*(one(request) for request in requests))

    def _run(self, work: Coroutine[Any, Any, _T]) -> _T:
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def _deadline(self, timeout: float | None) -> Deadline:
        return Deadline(self._seconds if timeout is None else timeout)

    def _whole(self, path: str) -> str:
        return f"{self._root}/{path}" if path else self._root or "/"

    def _count(self, **amounts: int) -> None:
        with self._lock:
            self._counters.update(amounts)


def read_credentials(directory: Path | None, field: str) -> dict[str, str]:
    """Read the files of the mounted secret that `field`.secretName names, as options of s3fs.

    Empty without a directory. TransportError when a key is not there.
    """
    if directory is None:
        return {}
    found: dict[str, str] = {}
    secret = f"{field}.secretName"
    for option, name in _CREDENTIALS.items():
        path = directory / name
        try:
            found[option] = path.read_text(encoding="utf-8").strip()
        except FileNotFoundError:
            if option != "token":
                raise CredentialsError(
                    f"the secret of {secret} has no key {name}; put AWS_ACCESS_KEY_ID and "
                    "AWS_SECRET_ACCESS_KEY into it, and for temporary credentials AWS_SESSION_TOKEN",
                ) from None
        except (OSError, UnicodeDecodeError) as error:
            raise CredentialsError(
                f"{path} cannot be read ({one_line(error)}); let this process read the secret of {secret}"
            ) from None
        if option in found and not found[option]:
            raise CredentialsError(f"the secret of {secret} has an empty {name}; write its value")
    return found


def _shown(url: str) -> str:
    """The URL without user, password and query."""
    parts = urlsplit(url)
    return urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, "", ""))
