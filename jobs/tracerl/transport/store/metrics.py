"""The metrics of a record store, read from its books whenever somebody asks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from tracerl.api.constants import METRICS, Role
from tracerl.transport.ring.server import RingServer
from tracerl.transport.store.http import StoreServer

_TIERS: Final = ("ring", "spill", "object")
_REFUSED: Final = ("token", "job", "run", "protocol")


class StoreMetrics(Collector):
    """What `tracerl.api.constants.METRICS` lists for a store. To be collected on the ring's event loop."""

    def __init__(self, ring: RingServer, server: StoreServer) -> None:
        self._ring, self._server = ring, server

    def collect(self) -> Iterator[Metric]:
        """Make the metrics."""
        values = self._values()
        for spec in METRICS:
            if spec.source is not Role.STORE:
                continue
            family = CounterMetricFamily if spec.type == "counter" else GaugeMetricFamily
            metric = family(spec.name, spec.help, labels=spec.labels)
            for label, value in values[spec.name].items():
                metric.add_metric([label] if spec.labels else [], value)
            yield metric

    def _values(self) -> Mapping[str, Mapping[str, float]]:
        """By metric and label; a metric without labels has one value under an empty label."""
        status = self._ring.status()
        counts, counters = status.counts, status.counters
        free = counts.segments["free"] * status.segment_bytes
        refused = {
            reason: counters[f"refused_{reason}"] + self._server.refused[reason] for reason in _REFUSED
        }
        return {
            "tracerl_store_ring_bytes": {
                "free": free,
                "live": counts.live_bytes,
                "dead": status.ring_bytes - free - counts.live_bytes,
            },
            "tracerl_store_segments": {str(state): count for state, count in counts.segments.items()},
            "tracerl_store_frames": {tier: counts.frames.get(tier, 0) for tier in _TIERS},
            "tracerl_store_frame_bytes": {tier: counts.frame_bytes.get(tier, 0) for tier in _TIERS},
            "tracerl_store_committed_bytes_total": {"": counters["committed_bytes"]},
            "tracerl_store_committed_frames_total": {"": counters["committed_frames"]},
            "tracerl_store_released_frames_total": {"": counters["released_frames"]},
            "tracerl_store_read_bytes_total": {
                path: counters[f"read_bytes_{path}"] for path in ("ring", "http")
            },
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
            "tracerl_store_refused_total": refused,
        }
