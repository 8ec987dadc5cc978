"""The contract of every transport: frames go into a sink, handles come out, and a source reads them.

A transport knows nothing about frames beyond their key: what it moves is opaque, and whether the bytes are
the right ones is for their reader to verify by the handle's hash. A rollout has one sink, a trainer process
one source over all stores of its job. All methods may be called from several threads.

A committed frame has references, one after `put`. They belong to the trajectories that name its handle, not
to whoever put it: a frame outlives its producer and goes with its last reference.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Literal, NamedTuple, Protocol, Self

from tracerl.api.constants import Reason
from tracerl.api.errors import JobError
from tracerl.api.frames import FrameKey, Handle

Buffer = bytes | bytearray | memoryview
Fault = Literal["missing", "full", "permission", "foreign", "damaged", "failed"]


class TransportError(JobError):
    """A frame could not be stored or fetched.

    `fault`: ``missing`` (released or never stored), ``full`` (no space within the timeout), ``permission``,
    ``foreign`` (of another job or run, or without the token), ``damaged`` (not as long as its handle says),
    ``failed`` (anything else, such as a network that is down).
    """

    def __init__(self, fault: Fault, message: str) -> None:
        super().__init__(Reason.TRANSPORT_FAILED, message)
        self.fault = fault


class LoanError(TransportError):
    """Borrowed frames did not stay until they were given back: what was read may be of others. ``failed``.

    Whatever was made of their views is to be thrown away, even if their hashes were right; read them again.
    """

    def __init__(self, message: str) -> None:
        super().__init__("failed", message)


@dataclass(frozen=True, slots=True)
class Usage:
    """What stores hold now, in bytes and frames of committed frames that are not yet released."""

    capacity_bytes: int
    """Shared memory for frames; 0 where there is none (object stores)."""
    held_bytes: int
    """Bytes in the fastest tier, all of a segment counted as long as any frame in it lives."""
    frames: int
    """Frames in all tiers."""
    frame_bytes: int
    """Bytes of frames in all tiers."""
    congested: bool = False
    """Whether new generation should wait: producers would find no room soon."""
    counters: dict[str, int] = field(default_factory=dict)
    """Totals since the object was made: bytes and frames by path, retries, what was lost."""
    cpu_seconds: float = 0.0
    """CPU time of the store's process so far; 0 where there is none."""


class FrameSink(Protocol):
    """Where a rollout puts frames."""

    @property
    def max_frame_bytes(self) -> int:
        """A longer frame cannot be put."""
        ...

    def put(self, frame: Buffer, key: FrameKey, *, timeout: float | None = None) -> Handle:
        """Store a frame with one reference.

        Waits at most `timeout` seconds for room: None as long as it takes, 0 not at all. TransportError.
        """
        ...

    def put_many(
        self, frames: Sequence[tuple[Buffer, FrameKey]], *, timeout: float | None = None
    ) -> list[Handle | TransportError]:
        """Store frames that belong together for less than one `put` each; each succeeds or fails alone."""
        ...

    def settle(self, done: Callable[[], None]) -> None:
        """Call `done` once, on any thread, when all frames put before can be read by others, or are lost.

        What is lost was counted and logged by then.
        """
        ...

    def retain(self, handles: Iterable[Handle]) -> None:
        """Add a reference each. TransportError ``missing`` when one is gone; no reference is added then."""
        ...

    def release(self, handles: Iterable[Handle]) -> None:
        """Drop a reference each; releasing what is gone does nothing."""
        ...

    def usage(self) -> Usage:
        """Count what this sink's store holds. TransportError."""
        ...

    def close(self) -> None:
        """Settle what was put and let go of connections; frames stay. The object is of no use afterwards."""
        ...


class Wanted(NamedTuple):
    """What a reader wants of a frame: all of it, or byte ranges (start, stop)."""

    handle: Handle
    ranges: tuple[tuple[int, int], ...] | None = None


class Borrowed:
    """Bytes of frames until `release`, which makes every view invalid. Use as a context manager.

    `pieces[i]` answers the i-th `Wanted`: one read-only view a range (of a whole frame: one), in place where
    the frame is in shared memory of this node, else a copy; or the TransportError that it met.
    """

    def __init__(
        self,
        pieces: list[list[memoryview] | TransportError],
        unpin: Callable[[], None] | None = None,
    ) -> None:
        self.pieces = pieces
        self._unpin = unpin
        # Releasing a view does not end arrays and views made of it, but they keep alive what has lent it its
        # memory. That is one object a view where bytes are in place; copies (bytes and bytearrays, which have
        # no weak references) do no harm.
        self._lenders: list[weakref.ref[object]] = []
        for piece in pieces:
            for view in piece if isinstance(piece, list) else ():
                with contextlib.suppress(TypeError):
                    self._lenders.append(weakref.ref(view.obj))

    def release(self) -> None:
        """End all views; using one afterwards is a ValueError, never old bytes. A second call does nothing.

        TransportError when arrays over a view are still in use: their bytes then stay pinned until a later
        call succeeds. LoanError, now and again from every later call, when the bytes did not stay in place
        until now: only when this has returned may what was made of them be trusted.
        """
        for piece in self.pieces:
            for view in piece if isinstance(piece, list) else ():
                with contextlib.suppress(BufferError):  # is found out below
                    view.release()
        in_use = sum(lender() is not None for lender in self._lenders)
        if in_use:
            raise TransportError(
                "failed",
                f"{in_use} borrowed views are still in use by arrays made of them; drop those arrays before "
                "releasing the frames",
            )
        unpin, self._unpin = self._unpin, None
        if unpin is not None:
            try:
                unpin()
            except TransportError:
                self._unpin = unpin  # whoever calls next must hear of it too
                raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.release()
            return
        # The error's traceback may keep arrays alive; it matters more than the pins, which end with `close`.
        with contextlib.suppress(TransportError):
            self.release()


class FrameSource(Protocol):
    """Where a trainer process reads frames: by their handles, from whichever store has them."""

    def borrow(self, wanted: Sequence[Wanted]) -> Borrowed:
        """Read frames or parts of them, concurrently where that helps.

        Errors of single frames are in the answer. ValueError when a range does not lie in its frame.
        """
        ...

    def present(self, handles: Sequence[Handle]) -> list[bool]:
        """Tell which frames could be read now."""
        ...

    def release(self, handles: Iterable[Handle]) -> None:
        """Drop a reference each; releasing what is gone does nothing."""
        ...

    def forget(self, trajectories: Iterable[str]) -> None:
        """Drop all frames put under these trajectories' keys, whose handles never arrived here."""
        ...

    def usage(self) -> Usage:
        """Count what all stores hold together; congested when one is. TransportError."""
        ...

    def close(self) -> None:
        """End all pins and connections; frames stay. The object is of no use afterwards."""
        ...
