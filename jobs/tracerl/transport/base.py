"""The contract of every transport: frames in, handles out, and the same bytes again until released.

A transport knows nothing about frames beyond their key: what it moves is opaque, and whether the bytes are
the right ones is for their reader to verify. All methods may be called from several threads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from tracerl.api.constants import Reason
from tracerl.api.errors import JobError
from tracerl.api.frames import FrameKey, Handle

Fault = Literal["missing", "full", "permission", "foreign", "damaged", "failed"]


class TransportError(JobError):
    """A frame could not be stored or fetched.

    `fault`: ``missing`` (released or never stored), ``full`` (no space), ``permission``, ``foreign`` (of
    another job or run), ``damaged`` (not as long as its handle says), ``failed`` (anything else, such as a
    network that is down).
    """

    def __init__(self, fault: Fault, message: str) -> None:
        super().__init__(Reason.TRANSPORT_FAILED, message)
        self.fault = fault


@dataclass(frozen=True, slots=True)
class Usage:
    """What a transport holds now, and what went through this object since it was made."""

    bytes_held: int
    frames_held: int
    bytes_put: int
    frames_put: int
    bytes_got: int
    gets: int


class Transport(Protocol):
    """Moves frames from a rollout to a trainer."""

    def put(self, frame: bytes | memoryview, key: FrameKey) -> Handle:
        """Store a frame with one reference; it is visible to `get` only as a whole. TransportError."""
        ...

    def get(self, handle: Handle, ranges: Sequence[tuple[int, int]] | None = None) -> memoryview:
        """Fetch a frame, or the bytes of ranges (start, stop) of it one after the other. TransportError."""
        ...

    def retain(self, handle: Handle) -> None:
        """Add a reference: one more `release` is needed until the frame goes. TransportError."""
        ...

    def release(self, handle: Handle) -> None:
        """Drop a reference; the last one deletes the frame. Releasing what is gone does nothing."""
        ...

    def usage(self) -> Usage:
        """Count what this store holds, whoever released the rest. TransportError."""
        ...

    def close(self) -> None:
        """Delete what this store still holds; the object is of no use afterwards. TransportError."""
        ...
