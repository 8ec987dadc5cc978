"""Names of record frames: the key that a producer puts a frame under, and the handle that finds it again."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple, NewType
from urllib.parse import quote, unquote

from tracerl.api.errors import TraceRLError


@dataclass(frozen=True, slots=True)
class FrameKey:
    """Identity of a frame: a contiguous range of rows of one part of one trajectory under one version.

    The frame holds rows `row_start..row_stop-1` of part `part` of `parts`. Rows and parts count from 0;
    `version` is the policy version that computed the rows.
    """

    job_uid: str
    run_id: str
    trajectory: str
    part: int
    parts: int
    row_start: int
    row_stop: int
    version: int


@dataclass(frozen=True, slots=True)
class FoundFrame:
    """A stored frame that was looked for: where it is, and its bytes.

    `data` is None where it cannot be read: `reason` is then one word, `message` a sentence. `RELEASED` is no
    fault: the frame went, after its use, between being found and being read.
    """

    path: str
    data: bytes | None
    reason: str = ""
    message: str = ""


RELEASED = "released"
"""`FoundFrame.reason` of a frame that is there no more."""

FRAME_SUFFIX = ".trec"
"""Ending of a file or object that holds one whole frame."""

Handle = NewType("Handle", str)
"""Location-independent text `rec://<store>/<name>?len=<bytes>&xxh3=<16 hex digits>` of a committed frame."""


class HandleError(TraceRLError):
    """The text is not a handle."""


class HandleParts(NamedTuple):
    """A parsed handle: store that resolves it, frame's name there, length in bytes, XXH3-64."""

    store: str
    name: str
    length: int
    xxh3: int


_PLAIN = re.compile(r"[A-Za-z0-9_.~/-]+")
_HANDLE = re.compile(r"rec://([^/?#\s]+)/([^?#\s]+)\?len=([0-9]{1,19})&xxh3=([0-9a-f]{16})")


def format_handle(store: str, name: str, length: int, xxh3: int) -> Handle:
    """Write a handle; `name` may hold slashes, other reserved characters are percent-encoded."""
    if not store or not name or length < 0 or not 0 <= xxh3 < 2**64:
        raise HandleError(
            f"no handle can be made of store {store!r}, name {name!r}, length {length}, hash {xxh3}"
        )
    if not _PLAIN.fullmatch(name):  # quote takes longer than everything else that is done for a small frame
        name = quote(name, safe="/")
    if not _PLAIN.fullmatch(store) or "/" in store:
        store = quote(store, safe="")
    return Handle(f"rec://{store}/{name}?len={length}&xxh3={xxh3:016x}")


@lru_cache(maxsize=4_096)
def parse_handle(handle: str) -> HandleParts:
    """Read a handle; HandleError when the text is not one."""
    match = _HANDLE.fullmatch(handle)
    if match is None:
        raise HandleError(
            f"{handle[:200]!r} is not a record handle (rec://STORE/NAME?len=BYTES&xxh3=16 hex digits)"
        )
    store, name, length, xxh3 = match.groups()
    return HandleParts(unquote(store), unquote(name), int(length), int(xxh3, 16))
