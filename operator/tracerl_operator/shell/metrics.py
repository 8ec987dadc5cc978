"""The operator's metrics, as the table of all metrics has them."""

from __future__ import annotations

import time
from collections import Counter as Counted
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from tracerl.api.constants import METRICS, MetricSpec, Role
from tracerl_operator.cluster import at, is_true
from tracerl_operator.shell.kinds import Kind
from tracerl_operator.types import Document

_SPECS = {spec.name: spec for spec in METRICS if spec.source is Role.OPERATOR}
_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)


class Metrics:
    """All of them, in a registry of their own."""

    def __init__(self) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]  # a sample more for each, which nobody reads
        self._registry = CollectorRegistry()
        self.durations = self._make(
            Histogram, "tracerl_operator_reconcile_duration_seconds", buckets=_BUCKETS
        )
        self.errors = self._make(Counter, "tracerl_operator_reconcile_errors_total")
        self._requests = self._make(Counter, "tracerl_operator_api_requests_total")
        self._events = self._make(Gauge, "tracerl_operator_watch_last_event_timestamp_seconds")
        self._make(Gauge, "tracerl_operator_build_info").labels(version("tracerl")).set(1)

    def count(self, verb: str, kind: str, code: int) -> None:
        """Count a request to the API server."""
        self._requests.labels(verb, kind, str(code)).inc()

    def saw(self, kind: Kind) -> None:
        """Note that a watch of a kind brought something."""
        self._events.labels(kind.name).set(time.time())

    def show(self, name: str, sample: Callable[[], Mapping[str, float]]) -> None:
        """Take a gauge's values by its one label, empty where it has none, when somebody looks."""
        self._registry.register(_OnDemand(_SPECS[name], sample))

    def text(self) -> bytes:
        """Give the exposition."""
        return generate_latest(self._registry)

    def _make(self, kind: Any, name: str, **options: Any) -> Any:
        spec = _SPECS[name]
        return kind(name, spec.help, spec.labels, registry=self._registry, **options)


@dataclass(frozen=True)
class _OnDemand(Collector):
    spec: MetricSpec
    sample: Callable[[], Mapping[str, float]]

    def collect(self) -> Iterable[Metric]:
        """Make the family that the client shows."""
        family = GaugeMetricFamily(self.spec.name, self.spec.help, labels=self.spec.labels)
        for label, value in self.sample().items():
            family.add_metric([label] if self.spec.labels else [], value)
        yield family


def job_states(jobs: Iterable[Document | None]) -> Mapping[str, float]:
    """Count jobs by state."""
    return {state: float(count) for state, count in Counted(map(_state, jobs)).items()}


def _state(job: Document | None) -> str:
    job = job or {}
    terminal = at(job, "status", "terminal")
    if terminal in ("Complete", "Failed"):
        return str(terminal)
    return next((state for state in ("Suspended", "Ready") if is_true(job, state)), "NotReady")
