"""From values to Prometheus' text: the one place that makes families of `tracerl.api.constants.METRICS`.

An exporter says what its values are when somebody asks. Counters count what their process did, from 0 at its
start: Prometheus takes a value that fell for such a start and adds all of the new one. So a counter must not
fall otherwise. Where a value is not known just now it has no sample, which Prometheus bridges; a 0 in its
place would be taken for a start, and the next value counted twice.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from tracerl.api.constants import METRICS, MetricSpec, Role

T = TypeVar("T")
Samples = Mapping[Any, float]
"""By label values: a tuple in the order of the metric's labels, text for one label, empty text for none."""


@dataclass(frozen=True)
class Distribution:
    """What a histogram shows: how many values were counted up to each bound, the last infinite; their sum."""

    counts: Mapping[float, int]
    """By bound, rising; a value is in that of the first bound that it does not pass."""
    total: float


Values = Mapping[str, Samples | Mapping[str, Distribution] | None]
"""By metric name, of a histogram distributions by the value of its label; None: not known now."""

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"


def families(role: Role, values: Values) -> Iterator[Metric]:
    """Make a family of every metric that `role` exposes, in the order of METRICS.

    A counter has all its listed label values from the start, 0 where nothing was counted. Raises KeyError for
    a metric without an entry, and ValueError for one that is not in the list or whose labels do not fit.
    """
    specs = [spec for spec in METRICS if spec.source is role]
    if unknown := values.keys() - {spec.name for spec in specs}:
        raise ValueError(f"{', '.join(sorted(unknown))}: no metric of a {role}")
    return (_family(spec, values[spec.name]) for spec in specs)


def exposition(role: Role, values: Values) -> bytes:
    """Write the families of a role as text."""
    return text(Families(role, lambda: values))


def text(collector: Collector) -> bytes:
    """Write what a collector has as text."""
    registry = CollectorRegistry()
    registry.register(collector)
    return generate_latest(registry)


@dataclass(frozen=True)
class Families(Collector):
    """A role's families whose values are read whenever somebody asks."""

    role: Role
    read: Callable[[], Values]

    def collect(self) -> Iterator[Metric]:
        """Make the families."""
        return families(self.role, self.read())


def by_labels(samples: Mapping[Any, T]) -> dict[tuple[str, ...], T]:
    """Give samples by their label values as tuples."""
    return {
        labels if isinstance(labels, tuple) else (labels,) if labels else (): value
        for labels, value in samples.items()
    }


def _family(spec: MetricSpec, samples: Mapping[Any, Any] | None) -> Metric:
    kind: Any = _KINDS[spec.type]
    family: Any = kind(spec.name, spec.help, labels=spec.labels)
    found = {} if samples is None else by_labels(samples)
    if spec.type == "counter" and samples is not None:
        found = dict.fromkeys(spec.listed(), 0.0) | found
    for labels, value in found.items():
        if len(labels) != len(spec.labels):
            raise ValueError(f"{spec.name} has labels {spec.labels} and not {labels}")
        if isinstance(value, Distribution):
            upto = zip(value.counts, itertools.accumulate(value.counts.values()), strict=True)
            buckets = [("+Inf" if bound == math.inf else str(bound), count) for bound, count in upto]
            family.add_metric(labels, buckets, value.total)
        else:
            family.add_metric(labels, value)
    metric: Metric = family
    return metric


_KINDS: Final = {
    "counter": CounterMetricFamily,
    "gauge": GaugeMetricFamily,
    "histogram": HistogramMetricFamily,
}
