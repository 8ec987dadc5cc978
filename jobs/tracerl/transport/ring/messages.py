"""What a store and its clients say to each other: one SEQPACKET datagram a message, little-endian.

A message is whole or absent, so a client that is killed while it sends leaves none of it. It starts with one
byte, its number in `_CODECS`; its class tells what follows. `decode` makes a message of any bytes, or raises
ProtocolError. No message is longer than MAX_MESSAGE: clients split their lists.

The client speaks first, with Hello, which is answered by Welcome or Refused. Then:

| who | sends | is answered by |
| --- | --- | --- |
| producer | LeaseRequest | Leased, or Refused ``full`` after its timeout |
| producer | Commits | nothing |
| control | Nudge | nothing |
| reader | Pin | Pinned, with descriptors of the local files that frames were spilled to |
| reader | Fetch | Fetched with a descriptor |
| reader | Unpin | nothing |
| control | Release, Forget | nothing |
| control | Retain, StartRun | Done or Refused |
| control | Present | Presence |
| control | UsageRequest | Usage |

A client has one request open at a time. After a violation the store sends Refused and closes the connection.
"""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Callable
from dataclasses import asdict, dataclass
from enum import IntEnum
from typing import Any, Literal, NamedTuple, get_args, get_origin, get_type_hints

from tracerl.api.frames import Handle, HandleError, format_handle, parse_handle
from tracerl.transport.base import Fault, TransportError, Usage
from tracerl.transport.ring.segments import Commit, ProtocolError

PROTOCOL = 1
MAX_MESSAGE = 65_536
"""Bytes. A socket's usual buffer of 208 KiB holds several."""
MAX_PINS = 250
"""Frames of a Pin: each may be answered with a descriptor, and the kernel passes at most 253 at once."""
MAX_FETCHES = 1_000
"""Pieces of a Fetch."""
MAX_SEQS = 8_000
"""Frames of an Unpin, Retain, Release or Present."""
MAX_NAME_BYTES = 1_024
"""UTF-8 bytes of a trajectory's name."""
FOREVER = 2**32 - 1
"""Milliseconds that a LeaseRequest without a timeout waits."""

Role = Literal["producer", "reader", "control"]

_SEQ = re.compile("[0-9]{1,19}")  # below 2**64
_SURROGATE = re.compile("[\ud800-\udfff]")  # JSON can hold what UTF-8 cannot


@dataclass(frozen=True, slots=True)
class Hello:
    """JSON. `name` tells people who that is."""

    job_uid: str
    run_id: str
    role: Role
    token: str
    name: str
    protocol: int = PROTOCOL


@dataclass(frozen=True, slots=True)
class Welcome:
    """JSON. Comes with a descriptor of the ring's file: writable for producers, read-only for readers."""

    store: str
    instance: str
    segment_bytes: int
    segments: int


@dataclass(frozen=True, slots=True)
class LeaseRequest:
    """u32, u32. Ends the lease that the producer has; waits at most so long for another, or FOREVER.

    `waited` is for people: how many milliseconds the frame has waited before.
    """

    milliseconds: int
    waited: int = 0


@dataclass(frozen=True, slots=True)
class Leased:
    """u32, u64. The segment starts with frame `first_seq`; see `segments`."""

    segment: int
    first_seq: int


@dataclass(frozen=True, slots=True)
class Commits:
    """For each: u64 sequence number, u64 length, u64 XXH3-64, u16 n, n bytes of its trajectory in UTF-8.

    All of the producer's lease, in the order they lie.
    """

    frames: list[Commit]


@dataclass(frozen=True, slots=True)
class Pin:
    """u64 each, at most MAX_PINS."""

    seqs: list[int]


@dataclass(frozen=True, slots=True)
class Unpin:
    """u64 each: frames of which one pin each is given back."""

    seqs: list[int]


@dataclass(frozen=True, slots=True)
class Retain:
    """u64 each: frames that get a reference more."""

    seqs: list[int]


@dataclass(frozen=True, slots=True)
class Release:
    """u64 each: frames that lose a reference."""

    seqs: list[int]


@dataclass(frozen=True, slots=True)
class Present:
    """u64 each: frames of which the client asks whether they could be pinned."""

    seqs: list[int]


PieceFault = Literal["", Fault]


class PinState(IntEnum):
    """What came of a pin."""

    RING = 0
    """`place` is the segment, `offset` counts from its start."""
    FILE = 1
    """`place` is the index of a descriptor that came along, `offset` counts from that file's start."""
    DISTANT = 2
    """The bytes can be had by Fetch."""
    MISSING = 3
    """Released or never committed; there is no pin."""
    FOREIGN = 4
    """Of another run; there is no pin."""


class PinAnswer(NamedTuple):
    """u8, u32, u64, u64. The length is in bytes."""

    state: PinState
    place: int = 0
    offset: int = 0
    length: int = 0


@dataclass(frozen=True, slots=True)
class Pinned:
    """A PinAnswer for each frame of the Pin."""

    answers: list[PinAnswer]


class Piece(NamedTuple):
    """u64, u64, u64. Bytes `start` to `stop` of a frame that the reader has pinned."""

    seq: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Fetch:
    """Pieces of frames that Pinned calls distant, at most MAX_FETCHES, together at most one segment long."""

    pieces: list[Piece]


@dataclass(frozen=True, slots=True)
class Fetched:
    """JSON. A fault or "" for each piece, and a sentence about the first fault.

    Comes with a descriptor of a file that holds the pieces without a fault, one after the other.
    """

    faults: list[PieceFault]
    message: str


@dataclass(frozen=True, slots=True)
class Presence:
    """u8 each: whether that frame of the Present could be pinned."""

    present: list[int]


@dataclass(frozen=True, slots=True)
class Forget:
    """u16 n, n bytes of UTF-8 each: trajectories of the client's run."""

    trajectories: list[str]


@dataclass(frozen=True, slots=True)
class StartRun:
    """Nothing. The client's run is the only one from now on; frames of others are dropped."""


@dataclass(frozen=True, slots=True)
class UsageRequest:
    """Nothing."""


@dataclass(frozen=True, slots=True)
class Nudge:
    """Nothing. The store looks at once at what producers have sent, which it else does now and then."""


@dataclass(frozen=True, slots=True)
class Done:
    """Nothing. The request was carried out."""


@dataclass(frozen=True, slots=True)
class Refused:
    """JSON."""

    fault: Fault
    message: str


Message = (
    Hello | Welcome | LeaseRequest | Leased | Commits | Pin | Pinned | Unpin | Fetch | Fetched | Retain
    | Release | Present | Presence | Forget | StartRun | UsageRequest | Usage | Nudge | Done | Refused
)  # fmt: skip


def encode(message: Message) -> bytes:
    """Write a message; ValueError when it would be longer than MAX_MESSAGE, or a number does not fit."""
    number, codec = _BY_CLASS[type(message)]
    try:
        data = bytes([number]) + codec.pack(message)
    except struct.error as error:
        raise ValueError(f"{type(message).__name__}: {error}") from None
    if len(data) > MAX_MESSAGE:
        raise ValueError(f"{type(message).__name__} of {len(data)} bytes: no message is that long")
    return data


def decode(data: memoryview) -> Message:
    """Read a message, copying what it needs; ProtocolError when the bytes are none."""
    if not 1 <= len(data) <= MAX_MESSAGE or data[0] >= len(_CODECS):
        raise ProtocolError("not a message")
    message: Message = _CODECS[data[0]].unpack(data[1:])
    return message


class _Codec(NamedTuple):
    message: type
    pack: Callable[[Any], bytes]
    unpack: Callable[[memoryview], Any]


def _json(message: type) -> _Codec:
    hints = get_type_hints(message)

    def pack(value: Any) -> bytes:
        return json.dumps(asdict(value), ensure_ascii=False).encode()

    def unpack(body: memoryview) -> Any:
        try:
            values = json.loads(bytes(body))
        except (ValueError, RecursionError):
            raise ProtocolError("not JSON") from None
        if type(values) is not dict or values.keys() != hints.keys():
            raise ProtocolError(f"not the fields of {message.__name__}")
        if not all(_fits(values[name], hint) for name, hint in hints.items()):
            raise ProtocolError(f"a field of {message.__name__} is of a wrong type")
        return message(**values)

    return _Codec(message, pack, unpack)


def _fits(value: object, hint: Any) -> bool:
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Literal:
        return value in arguments
    if origin is list:
        return type(value) is list and all(_fits(item, arguments[0]) for item in value)
    if origin is dict:
        return type(value) is dict and all(_fits(item, arguments[1]) for item in value.values())
    if hint is str:
        return type(value) is str and not _SURROGATE.search(value)
    return type(value) is hint


def _row(message: type, layout: str) -> _Codec:
    """One value of each kind, in the order of the fields."""
    row = struct.Struct("<" + layout)

    def unpack(body: memoryview) -> Any:
        if len(body) != row.size:
            raise ProtocolError(f"{message.__name__} of a wrong length")
        return message(*row.unpack(body))

    names = list(get_type_hints(message))
    return _Codec(message, lambda value: row.pack(*(getattr(value, name) for name in names)), unpack)


def _numbers(message: type, letter: str, most: int) -> _Codec:
    """A list of numbers of one kind."""
    size = struct.calcsize("<" + letter)
    (name,) = get_type_hints(message)

    def pack(value: Any) -> bytes:
        numbers = getattr(value, name)
        return struct.pack(f"<{len(numbers)}{letter}", *numbers)

    def unpack(body: memoryview) -> Any:
        count, rest = divmod(len(body), size)
        if rest or count > most:
            raise ProtocolError(f"{message.__name__} of a wrong length")
        return message(list(struct.unpack(f"<{count}{letter}", body)))

    return _Codec(message, pack, unpack)


def _rows(message: type, layout: str, most: int, make: Callable[..., Any]) -> _Codec:
    """A list of rows of one kind; `make` makes an item of a row's values."""
    row = struct.Struct("<" + layout)
    (name,) = get_type_hints(message)

    def pack(value: Any) -> bytes:
        return b"".join(row.pack(*item) for item in getattr(value, name))

    def unpack(body: memoryview) -> Any:
        count, rest = divmod(len(body), row.size)
        if rest or count > most:
            raise ProtocolError(f"{message.__name__} of a wrong length")
        try:
            return message([make(*values) for values in row.iter_unpack(body)])
        except ValueError as error:
            raise ProtocolError(f"{message.__name__}: {error}") from None

    return _Codec(message, pack, unpack)


def _pin_answer(state: int, place: int, offset: int, length: int) -> PinAnswer:
    return PinAnswer(PinState(state), place, offset, length)


def _named_rows(message: type, layout: str, make: Callable[..., Any], split: Callable[[Any], Any]) -> _Codec:
    """A list of rows, each with a name behind it; `split` gives an item's values, the name last."""
    row = struct.Struct("<" + layout + "H")
    (name,) = get_type_hints(message)

    def pack(value: Any) -> bytes:
        parts: list[bytes] = []
        for item in getattr(value, name):
            *values, text = split(item)
            encoded = text.encode()
            parts += (row.pack(*values, len(encoded)), encoded)
        return b"".join(parts)

    def unpack(body: memoryview) -> Any:
        items, at = [], 0
        while at < len(body):
            if at + row.size > len(body):
                raise ProtocolError(f"{message.__name__} ends early")
            *values, size = row.unpack_from(body, at)
            at += row.size
            if size > MAX_NAME_BYTES or at + size > len(body):
                raise ProtocolError(f"{message.__name__} has a name that is too long")
            try:
                items.append(make(*values, str(body[at : at + size], "utf-8")))
            except UnicodeDecodeError:
                raise ProtocolError(f"{message.__name__} has a name that is not UTF-8") from None
            at += size
        return message(items)

    return _Codec(message, pack, unpack)


_CODECS = (
    _json(Hello),
    _json(Welcome),
    _row(LeaseRequest, "II"),
    _row(Leased, "IQ"),
    _named_rows(Commits, "QQQ", Commit, tuple),
    _numbers(Pin, "Q", MAX_PINS),
    _rows(Pinned, "BIQQ", MAX_PINS, _pin_answer),
    _numbers(Unpin, "Q", MAX_SEQS),
    _rows(Fetch, "QQQ", MAX_FETCHES, Piece),
    _json(Fetched),
    _numbers(Retain, "Q", MAX_SEQS),
    _numbers(Release, "Q", MAX_SEQS),
    _numbers(Present, "Q", MAX_SEQS),
    _numbers(Presence, "B", MAX_SEQS),
    _named_rows(Forget, "", str, lambda name: (name,)),
    _row(StartRun, ""),
    _row(UsageRequest, ""),
    _json(Usage),
    _row(Nudge, ""),
    _row(Done, ""),
    _json(Refused),
)
_BY_CLASS = {codec.message: (number, codec) for number, codec in enumerate(_CODECS)}


def name_frame(store: str, instance: str, seq: int, length: int, xxh3: int) -> Handle:
    """Make the handle of a frame in a ring: ``rec://<store>/<instance>/<seq>?len=…&xxh3=…``."""
    return format_handle(store, f"{instance}/{seq}", length, xxh3)


def find_frame(handle: Handle, store: str, instance: str) -> tuple[int, int]:
    """Read sequence number and length out of a handle.

    TransportError ``missing`` when it is of an earlier process of the store, or no handle of this store.
    """
    try:
        parts = parse_handle(handle)
    except HandleError as error:
        raise TransportError("missing", f"{error}; generate the trajectory again") from None
    of_instance, _, seq = parts.name.partition("/")
    if parts.store != store or not _SEQ.fullmatch(seq):
        raise TransportError("missing", f"{handle[:200]} names no frame of {store}; ask its own store")
    if of_instance != instance:
        raise TransportError(
            "missing",
            f"{handle} went with an earlier {store}, which was restarted; generate the trajectory again",
        )
    return int(seq), parts.length


def not_pinned(handle: Handle, state: PinState) -> TransportError:
    """Say why a frame could not be pinned."""
    if state == PinState.FOREIGN:
        return TransportError(
            "foreign", f"{handle} does not belong to the run that asks for it; ask with the run's own id"
        )
    return TransportError("missing", f"{handle} was released or dropped; generate its trajectory again")


def wrong_length(handle: Handle, length: int) -> TransportError:
    """Say that a frame is not as long as its handle promises."""
    return TransportError(
        "damaged", f"{handle} has {length} bytes in its store; the handle was changed on its way, drop it"
    )
