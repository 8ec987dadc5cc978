"""The bytes of an object: frames one after the other, then an index, then a footer.

docs/reference/object-format.md is the specification. An object is read from its end, so one that was cut off
never passes for a whole one. What its frames hold is not its concern.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Literal, NamedTuple, Self

import xxhash
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from tracerl.transport.base import Buffer

OBJECT_SUFFIX = ".trecs"
"""Ending of an object's name."""
OBJECT_VERSION = 1
ALIGNMENT = 64
"""Frames begin at multiples of this many bytes."""
_MAGIC = b"TRACEOBJ"
_FOOTER = struct.Struct("<QQIHH8s")
FOOTER_BYTES = _FOOTER.size
TAIL_BYTES = 64 * 1024
"""Reading this much of an object's end almost always gets its whole index."""
_MAX_INDEX_BYTES = 2**28

ObjectFault = Literal["truncated", "magic", "version", "checksum", "layout"]


class ObjectError(ValueError):
    """The bytes are not a whole object; `reason` says in one word what is wrong."""

    def __init__(self, reason: ObjectFault, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class IndexedFrame(NamedTuple):
    """Where a frame is in its object, its XXH3-64 as 16 hex digits, whose it is, and how many hold it.

    `trajectory` counts in `ObjectIndex.trajectories`; `references` is what the frame had when the object was
    sealed, at least 1.
    """

    offset: Annotated[int, Field(ge=0)]
    length: Annotated[int, Field(ge=0)]
    xxh3: Annotated[str, Field(pattern=r"^[0-9a-f]{16}$")]
    trajectory: Annotated[int, Field(ge=0)]
    references: Annotated[int, Field(ge=1)]


class ReferenceChange(NamedTuple):
    """References that the writer added to or dropped from a frame of an object that it had sealed before."""

    number: Annotated[int, Field(ge=0)]
    offset: Annotated[int, Field(ge=0)]
    delta: int


class ObjectIndex(BaseModel):
    """What an object holds. Numbers count the objects of one writer, in the order of their sealing."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    job_uid: str
    run_id: str
    store: str
    writer: Annotated[str, Field(pattern=r"^[0-9a-f]{8}$")]
    number: Annotated[int, Field(ge=0)]
    trajectories: list[str]
    frames: list[IndexedFrame]
    changes: list[ReferenceChange]

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        end = 0
        for frame in self.frames:
            if frame.offset % ALIGNMENT or frame.offset < end:
                raise ValueError(f"the frame at {frame.offset} is not aligned or overlaps the one before")
            end = frame.offset + max(frame.length, 1)
            if frame.trajectory >= len(self.trajectories):
                raise ValueError(f"the frame at {frame.offset} belongs to no trajectory")
        if any(change.number >= self.number for change in self.changes):
            raise ValueError("a change names an object that was not sealed before")
        return self

    @property
    def frames_end(self) -> int:
        """Where the last frame ends."""
        return self.frames[-1].offset + self.frames[-1].length if self.frames else 0


def align(offset: int) -> int:
    """Round up to where a frame may begin."""
    return -(-offset // ALIGNMENT) * ALIGNMENT


def encode_index(index: ObjectIndex, offset: int) -> bytes:
    """Write index and footer: what follows the frames of an object, `offset` bytes from its start."""
    text = index.model_dump_json().encode()
    return text + _FOOTER.pack(xxhash.xxh3_64_intdigest(text), offset, len(text), OBJECT_VERSION, 0, _MAGIC)


@dataclass(frozen=True, slots=True)
class _Footer:
    xxh3: int
    offset: int
    length: int


def _read_footer(tail: Buffer, size: int) -> _Footer:
    if len(tail) < FOOTER_BYTES:
        raise ObjectError("truncated", f"{size} bytes are less than an object's footer")
    xxh3, offset, length, version, reserved, magic = _FOOTER.unpack_from(tail, len(tail) - FOOTER_BYTES)
    if magic != _MAGIC:
        raise ObjectError("magic", "it does not end in the footer of an object, or was cut off")
    if version != OBJECT_VERSION:
        raise ObjectError("version", f"format version {version} is not {OBJECT_VERSION}")
    if reserved or length > _MAX_INDEX_BYTES:
        raise ObjectError("layout", f"its footer says an index of {length} bytes")
    if offset + length + FOOTER_BYTES != size:
        raise ObjectError(
            "truncated", f"it has {size} bytes, its footer says {offset + length + FOOTER_BYTES}"
        )
    return _Footer(xxh3, offset, length)


def decode_index(tail: Buffer, size: int, fetch: Callable[[int, int], Buffer] | None = None) -> ObjectIndex:
    """Read the index of an object of `size` bytes from the bytes of its end.

    `fetch(start, stop)` is called once when the index is longer than `tail`. ObjectError when the object is
    not whole.
    """
    footer = _read_footer(tail, size)
    start = size - len(tail)
    if footer.offset < start:
        if fetch is None:
            raise ObjectError("truncated", f"the index begins at {footer.offset}, before the bytes given")
        tail, start = fetch(footer.offset, size), footer.offset
        if len(tail) != size - start:
            raise ObjectError("truncated", f"it has fewer than {size} bytes")
    text = bytes(memoryview(tail)[footer.offset - start : footer.offset - start + footer.length])
    if xxhash.xxh3_64_intdigest(text) != footer.xxh3:
        raise ObjectError("checksum", "the hash of its index differs")
    try:
        index = ObjectIndex.model_validate_json(text)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"])
        raise ObjectError(
            "layout", f"its index is none: {place + ': ' if place else ''}{first['msg']}"
        ) from None
    if index.frames_end > footer.offset:
        raise ObjectError("layout", f"its frames end at {index.frames_end}, after its index began")
    return index


class ObjectBuilder:
    """Gathers frames into one object in memory. Not for several threads at once."""

    def __init__(self, capacity: int) -> None:
        # Zeroed memory costs nothing until it is written, and no later frame moves an earlier one.
        self._data = bytearray(capacity)
        self._end = 0

    @property
    def size(self) -> int:
        """Bytes used by frames so far."""
        return self._end

    def room(self, nbytes: int) -> bool:
        """Whether a frame of so many bytes fits into the capacity."""
        return align(self._end) + max(nbytes, 1) <= len(self._data)

    def add(self, frame: memoryview) -> int:
        """Copy a frame of bytes to the end; returns its offset. ValueError when there is no room."""
        if not self.room(len(frame)):
            raise ValueError(f"no room for a frame of {len(frame)} bytes")
        # An empty frame takes a place as well: an offset names one frame.
        offset = align(self._end)
        self._data[offset : offset + len(frame)] = frame
        self._end = offset + max(len(frame), 1)
        return offset

    def seal(self, index: ObjectIndex) -> bytearray:
        """End the object; the builder is of no use afterwards."""
        data, self._data = self._data, bytearray()
        end = align(self._end)
        del data[end:]
        data.extend(bytes(end - len(data)))
        data.extend(encode_index(index, end))
        return data
