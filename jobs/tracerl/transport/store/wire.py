"""The answer to POST /v1/read: a stream of records, so that an error in the middle of a frame can be told.

A record is 8 bytes, little endian: kind (u8), fault (u8), 2 zero bytes, length (u32); then `length` bytes.

==== ===== =========================================================================================
kind name  meaning
==== ===== =========================================================================================
1    DATA  next bytes of the current frame: its ranges one after the other; at most 256 KiB
2    DONE  the current frame is complete, the next one begins; length 0
3    ERROR the current frame is given up; `fault` counts into `FAULTS`, the bytes are a sentence (UTF-8)
4    END   after the last frame; length 0. An answer without it was cut off
==== ===== =========================================================================================

Frames come in the order in which they were asked for.
"""

from __future__ import annotations

import struct
from typing import Final, get_args

from tracerl.transport.base import Fault

RECORD: Final = struct.Struct("<BBxxI")
DATA, DONE, ERROR, END = 1, 2, 3, 4
FAULTS: Final[tuple[Fault, ...]] = get_args(Fault)
MAX_DATA_BYTES: Final = 2**18
MAX_SENTENCE_BYTES: Final = 2_000

MEDIA_TYPE: Final = "application/vnd.tracerl.frames"
MAX_FRAME_BYTES: Final = 2**26
"""No segment is longer, and so no frame."""
MAX_FRAMES: Final = 1_024
"""Most frames of one read or list, and handles or trajectories of one other request."""
MAX_LIST_BYTES: Final = 2**19
"""A list with several frames is not longer."""
MAX_RANGES: Final = 65_536
"""Most ranges of all frames of one read."""
MAX_BODY_BYTES: Final = 8 * 2**20
"""Longest body of a request."""


def error_record(fault: Fault, sentence: str) -> bytes:
    """Make an ERROR record with its sentence."""
    text = sentence.encode("utf-8", "replace")[:MAX_SENTENCE_BYTES]
    return RECORD.pack(ERROR, FAULTS.index(fault), len(text)) + text
