"""The metrics of a record store, read from its books whenever somebody asks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from tracerl.transport.exposition import Values
from tracerl.transport.ring.server import RingServer
from tracerl.transport.store.spill import SpillDirectory

_TIERS: Final = ("ring", "spill", "object")
_REFUSED: Final = ("token", "job", "run", "protocol")


def store_values(ring: RingServer, refused: Mapping[str, int], spill: SpillDirectory | None) -> Values:
    """Read what `tracerl.api.constants.METRICS` lists for a store; on the ring's event loop.

    `refused` are requests that the HTTP side refused, by reason.
    """
    status = ring.status()
    counts, counters = status.counts, status.counters
    free = counts.segments["free"] * status.segment_bytes
    return {
        "tracerl_store_ring_bytes": {
            "free": free,
            "live": counts.live_bytes,
            "dead": status.ring_bytes - free - counts.live_bytes,
        },
        "tracerl_store_segments": {str(state): count for state, count in counts.segments.items()},
        "tracerl_store_frames": {tier: counts.frames.get(tier, 0) for tier in _TIERS},
        "tracerl_store_frame_bytes": {tier: counts.frame_bytes.get(tier, 0) for tier in _TIERS},
        "tracerl_store_spill_free_bytes": {} if spill is None else {"": spill.free_bytes},
        "tracerl_store_committed_bytes_total": {"": counters["committed_bytes"]},
        "tracerl_store_committed_frames_total": {"": counters["committed_frames"]},
        "tracerl_store_released_frames_total": {"": counters["released_frames"]},
        "tracerl_store_read_bytes_total": {path: counters[f"read_bytes_{path}"] for path in ("ring", "http")},
        "tracerl_store_relocated_bytes_total": {
            tier: counters[f"relocated_bytes_{tier}"] for tier in _TIERS[1:]
        },
        "tracerl_store_tier_errors_total": {tier: counters[f"tier_errors_{tier}"] for tier in _TIERS[1:]},
        "tracerl_store_lease_waits_total": {"": counters["lease_waits"]},
        "tracerl_store_lease_timeouts_total": {"": counters["lease_timeouts"]},
        "tracerl_store_pins": {"": counts.pins},
        "tracerl_store_connections": {
            role: status.connections.get(role, 0) for role in ("producer", "reader", "control")
        },
        "tracerl_store_refused_total": {
            reason: counters[f"refused_{reason}"] + refused.get(reason, 0) for reason in _REFUSED
        },
    }
