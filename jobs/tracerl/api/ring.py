"""How large a ring's segments are: what the rules count with is what the record store makes."""

from __future__ import annotations

SEGMENT_SIZES = tuple(1 << power for power in range(16, 27))
"""Bytes that a segment may have, 64 KiB to 64 MiB."""


def segment_size(ring_bytes: int) -> int:
    """Choose the size of a ring's segments in bytes.

    The largest power of two of which the ring holds 32, at least 64 KiB and at most 64 MiB.
    """
    wanted = 1 << max((ring_bytes // 32).bit_length() - 1, 0)
    return max(SEGMENT_SIZES[0], min(SEGMENT_SIZES[-1], wanted))
