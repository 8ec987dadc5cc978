"""What objects are called, ``<uri>/<job UID>/<run id>/<store>/<writer>-<number>.trecs``, and their frames.

The handle of a frame names object and offset: ``rec://<store>/<writer>-<number>/<offset>?len=…&xxh3=…``.
"""

from __future__ import annotations

import re
from typing import Final, NamedTuple
from urllib.parse import quote

from tracerl.api.frames import Handle, HandleError, format_handle, parse_handle
from tracerl.transport.base import TransportError
from tracerl.transport.objects.format import OBJECT_SUFFIX

_OBJECT = re.compile(r"([0-9a-f]{8})-([0-9]{1,15})")
_FRAME = re.compile(rf"({_OBJECT.pattern})/([0-9]{{1,19}})")

MAX_FRAME_BYTES: Final = 2**31
"""No frame is longer."""


class FrameName(NamedTuple):
    """Which object of which writer of a store a frame is in, and where in it."""

    store: str
    writer: str
    number: int
    offset: int


class FramePlace(NamedTuple):
    """A parsed handle; `path` is that of the object, below the URL of the records."""

    path: str
    name: FrameName
    length: int
    xxh3: int


class ObjectNames:
    """Names of one run of one job. TransportError when an id cannot be a directory's name."""

    def __init__(self, job_uid: str, run_id: str) -> None:
        self.job_directory = directory_name(job_uid)
        self.run_directory = f"{self.job_directory}/{directory_name(run_id)}"

    def store_directory(self, store: str) -> str:
        """Where one store's objects are."""
        return f"{self.run_directory}/{directory_name(store)}"

    def path(self, store: str, writer: str, number: int) -> str:
        """Path of an object."""
        return f"{self.store_directory(store)}/{writer}-{number}{OBJECT_SUFFIX}"

    def handle(self, name: FrameName, length: int, xxh3: int) -> Handle:
        """Handle of a frame."""
        store, writer, number, offset = name
        return format_handle(store, f"{writer}-{number}/{offset}", length, xxh3)

    def place(self, handle: Handle) -> FramePlace:
        """Where a frame is; TransportError ``missing`` when no object's frame has such a handle."""
        try:
            parts = parse_handle(handle)
        except HandleError as error:
            raise TransportError("missing", str(error)) from None
        # Handles come from another process: none may lead out of the run's directory, or be read without end.
        match = _FRAME.fullmatch(parts.name)
        if parts.length > MAX_FRAME_BYTES:
            raise TransportError("missing", f"{handle} is longer than any frame")
        if match is None or parts.store in {".", ".."}:
            raise TransportError("missing", f"{handle[:200]} does not name a frame of an object")
        _, writer, number, offset = match.groups()
        name = FrameName(parts.store, writer, int(number), int(offset))
        return FramePlace(self.path(*name[:3]), name, parts.length, parts.xxh3)


def is_object(path: str) -> bool:
    """Whether a path could be that of an object."""
    return path.endswith(OBJECT_SUFFIX)


def directory_name(id: str) -> str:
    """Make an id a name of a directory, whatever is in it. TransportError when that is impossible."""
    if id in {"", ".", ".."}:
        raise TransportError(
            "failed",
            f"{id!r} as id of a job, run or store cannot name a directory of records; use another id",
        )
    return quote(id, safe="")
