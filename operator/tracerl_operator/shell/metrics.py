"""The operator's metrics, as the table of all metrics has them."""

from __future__ import annotations

import time
from collections import Counter as Counted
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from http import HTTPStatus
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

from tracerl.api.constants import LABEL_CANARY, METRICS, MetricSpec, Reason, Role
from tracerl_operator.cluster import at, is_true, items
from tracerl_operator.shell.kinds import Kind
from tracerl_operator.times import parse_time
from tracerl_operator.types import Document

_SPECS = {spec.name: spec for spec in METRICS if spec.source is Role.OPERATOR}
_ENDS = ("Complete", "Failed")
_AT_REST = (*_ENDS, "Suspended")
_STATUSES = frozenset(HTTPStatus)
_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)


class Metrics:
    """All of them, in a registry of their own."""

    def __init__(self) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]  # a sample more for each, which nobody reads
        self._registry = CollectorRegistry()
        self.durations = self._make(
            Histogram, "tracerl_operator_reconcile_duration_seconds", buckets=_BUCKETS
        )
        self._errors = self._make(Counter, "tracerl_operator_reconcile_errors_total")
        self._requests = self._make(Counter, "tracerl_operator_api_requests_total")
        self._events = self._make(Gauge, "tracerl_operator_watch_last_event_timestamp_seconds")
        self._make(Gauge, "tracerl_operator_build_info").labels(version("tracerl")).set(1)
        for labels in _SPECS["tracerl_operator_reconcile_duration_seconds"].listed():
            self.durations.labels(*labels)

    def failed(self, code: int | None) -> str:
        """Count a look at a job that failed, by HTTP status, 0 without an answer or None by a fault of ours.

        Returns the reason.
        """
        reason = "Unexpected" if code is None else f"Code{_code(code)}" if code else "NoAnswer"
        self._errors.labels(reason).inc()
        return reason

    def count(self, verb: str, kind: str, code: int) -> None:
        """Count a request to the API server."""
        self._requests.labels(verb, kind, _code(code)).inc()

    def saw(self, kind: Kind) -> None:
        """Note that a watch of a kind brought something."""
        self._events.labels(kind.name).set(time.time())

    def show(self, name: str, sample: Callable[[], Mapping[str, float]]) -> None:
        """Take a gauge's values by its one label, empty where it has none, when somebody looks."""
        self._registry.register(_OnDemand(_SPECS[name], sample))

    def show_jobs(self, jobs: Callable[[], Iterable[Document | None]]) -> None:
        """Take what is shown of jobs, all of them together, from their documents."""
        self._registry.register(_OfJobs(jobs))

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
        yield _gauge(self.spec, self.sample())


@dataclass(frozen=True)
class _OfJobs(Collector):
    jobs: Callable[[], Iterable[Document | None]]

    def collect(self) -> Iterable[Metric]:
        """Make the families of all jobs together, which are looked up once: that is most of a scrape."""
        jobs = list(self.jobs())
        for name, sample in (
            ("tracerl_operator_jobs", job_states(jobs)),
            ("tracerl_operator_longest_not_ready_seconds", longest_not_ready(jobs, datetime.now(UTC))),
            ("tracerl_operator_canary_end_timestamp_seconds", canary_ends(jobs)),
        ):
            yield _gauge(_SPECS[name], sample)


def _gauge(spec: MetricSpec, sample: Mapping[str, float]) -> Metric:
    family = GaugeMetricFamily(spec.name, spec.help, labels=spec.labels)
    for label, value in sample.items():
        family.add_metric([label] if spec.labels else [], value)
    return family


def _code(code: int) -> str:
    return str(code) if not code or code in _STATUSES else "other"


def job_states(jobs: Iterable[Document | None]) -> Mapping[str, float]:
    """Count jobs by state; every state has a count."""
    (states,) = _SPECS["tracerl_operator_jobs"].values
    counted = Counted(map(_state, jobs))
    return {state: float(counted[state]) for state in states}


def longest_not_ready(jobs: Iterable[Document | None], now: datetime) -> Mapping[str, float]:
    """Give the longest time that jobs which should run have not been Ready, by Ready's reason."""
    longest: dict[str, float] = {}
    for job in jobs:
        ready = _condition(job, "Ready")
        since = parse_time(at(ready, "lastTransitionTime"))
        if since is None or at(ready, "status") == "True" or _state(job) in _AT_REST:
            continue
        reason = at(ready, "reason")
        reason = reason if reason in tuple(Reason) else Reason.UNEXPECTED
        longest[reason] = max(longest.get(reason, 0.0), (now - since).total_seconds())
    return longest


def canary_ends(jobs: Iterable[Document | None]) -> Mapping[str, float]:
    """Give the Unix time of the latest end of a canary, by how it ended."""
    latest: dict[str, float] = {}
    for job in jobs:
        ended, result = parse_time(at(job, "status", "completionTime")), at(job, "status", "terminal")
        if ended is None or result not in _ENDS or at(job, "metadata", "labels", LABEL_CANARY) != "true":
            continue
        latest[result] = max(latest.get(result, 0.0), ended.timestamp())
    return latest


def _condition(job: Document | None, kind: str) -> Document | None:
    return next((c for c in items(job or {}, "status", "conditions") if at(c, "type") == kind), None)


def _state(job: Document | None) -> str:
    job = job or {}
    terminal = at(job, "status", "terminal")
    if terminal in _ENDS:
        return str(terminal)
    if is_true(job, "Suspended"):
        return "Queued" if at(_condition(job, "Suspended"), "reason") == Reason.QUEUED else "Suspended"
    return "Ready" if is_true(job, "Ready") else "NotReady"
