"""The metrics of a rollout that come from where its frames go, alike in every engine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from tracerl.engines.frames import FrameWriter
from tracerl.transport.base import TransportError
from tracerl.transport.objects.filesystem import DURATION_BOUNDS, OPERATIONS

if TYPE_CHECKING:
    # prometheus_client looks for SGLang's directory when it is imported, which is not made by then.
    from tracerl.transport.exposition import Distribution, Values

SinkState = tuple[int, dict[str, int]] | None
"""Frame bytes that a sink's store holds, and what the sink counted; None when it cannot say just now."""


def sink_state(writer: FrameWriter) -> SinkState:
    """Ask where a writer's frames go; nothing is held and counted before the first run."""
    try:
        usage = writer.usage()
    except TransportError:
        return None
    return (0, {}) if usage is None else (usage.frame_bytes, usage.counters)


def sink_values(state: SinkState, dropped: Mapping[str, int]) -> Values:
    """Give the values of METRICS that a sink knows; `dropped` are the writer's own, by reason."""
    if state is None:
        return dict.fromkeys(_SINK_METRICS)
    held, counted = state

    def count(name: str) -> int:
        return counted.get(name, 0)

    operations = OPERATIONS.values()
    return {
        "tracerl_records_held_bytes": {"": held},
        # With frames in objects that could not be uploaded: one metric, so not known without the sink.
        "tracerl_records_dropped_total": {**dropped, "lost": count("lost_frames")},
        "tracerl_object_uploads_total": {"ok": count("uploads_ok"), "failed": count("uploads_failed")},
        "tracerl_object_uploaded_bytes_total": {"": count("uploaded_bytes")},
        "tracerl_object_retries_total": {"": count("retries")},
        "tracerl_object_requests_total": {
            (operation, result): count(f"{operation}_{result}")
            for operation in operations
            for result in ("ok", "failed")
        },
        "tracerl_object_request_duration_seconds": {one: _durations(one, counted) for one in operations},
    }


def _durations(operation: str, counted: Mapping[str, int]) -> Distribution:
    from tracerl.transport.exposition import Distribution  # noqa: PLC0415

    within = {bound: counted.get(f"{operation}_within_{bound}", 0) for bound in DURATION_BOUNDS}
    return Distribution(within, counted.get(f"{operation}_nanoseconds", 0) / 1e9)


_SINK_METRICS = (
    "tracerl_records_held_bytes",
    "tracerl_records_dropped_total",
    "tracerl_object_uploads_total",
    "tracerl_object_uploaded_bytes_total",
    "tracerl_object_retries_total",
    "tracerl_object_requests_total",
    "tracerl_object_request_duration_seconds",
)
