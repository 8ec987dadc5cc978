"""What a filesystem of objects needs of each kind of place: one try of every request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, runtime_checkable

from tracerl.transport.base import Buffer, Fault


class Entry(NamedTuple):
    """An object that a listing found, and its size in bytes."""

    path: str
    size: int


class Leftover(NamedTuple):
    """A temporary file (`upload` is empty), or an upload of S3 that was not ended."""

    path: str
    upload: str


class Tail(NamedTuple):
    """The last bytes of an object, and its whole size."""

    data: bytes
    size: int


@dataclass(frozen=True)
class Verdict:
    """What an error means: its kind, whether it may pass by waiting, and in words."""

    fault: Fault
    passes: bool
    words: str
    remedy: str = "check that place and the network"


class Backend(Protocol):
    """One try of each request; paths are whole. Methods raise whatever their library raises."""

    async def put(self, path: str, data: Buffer) -> None:
        """Write an object."""
        ...

    async def get(self, path: str, start: int, stop: int) -> bytes:
        """Read bytes start..stop-1; fewer when the object ends before."""
        ...

    async def tail(self, path: str, nbytes: int) -> Tail:
        """Read at most the last `nbytes` bytes."""
        ...

    async def find(self, directory: str) -> list[Entry]:
        """Find all objects below a directory."""
        ...

    async def delete(self, path: str) -> None:
        """Delete an object; one that is gone is no error."""
        ...

    async def leftovers(self, directory: str) -> list[Leftover]:
        """Find what was begun below a directory and not ended."""
        ...

    async def remove(self, leftover: Leftover) -> None:
        """Remove it; what is gone is no error."""
        ...

    async def close(self) -> None:
        """End all connections."""
        ...

    def judge(self, error: Exception) -> Verdict:
        """Say what an error of a method means."""
        ...


@runtime_checkable
class PartsBackend(Backend, Protocol):
    """A place that takes a large object in parts, at the same time."""

    async def begin_upload(self, path: str) -> str:
        """Begin an upload; returns its id."""
        ...

    async def put_part(self, path: str, upload: str, number: int, data: Buffer) -> str:
        """Write a part, counted from 1; returns its tag."""
        ...

    async def end_upload(self, path: str, upload: str, tags: Sequence[str], size: int) -> None:
        """Make an object of `size` bytes of all parts."""
        ...


def one_line(error: Exception) -> str:
    """The error in the words of the operating system, or the first line of its own."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror.lower()
    return (str(error).splitlines() or [type(error).__name__])[0]
