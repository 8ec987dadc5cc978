"""PromQL over the metrics of `tracerl.api.constants.METRICS`, and over nothing else."""

from __future__ import annotations

import re

from tracerl.api.constants import METRICS, MetricSpec

TARGET_LABELS = frozenset({"namespace", "job", "role", "method", "pod", "container", "endpoint", "instance"})
"""Labels that a scrape gives to a series; the PodMonitor of a job and the chart's ServiceMonitor see to it.

`job` is the name of the TraceRLJob, and `tracerl-operator` for the operator.
"""
SPECS: dict[str, MetricSpec] = {spec.name: spec for spec in METRICS}
FLEET = 'namespace=~"$namespace",job=~"$job"'
ONE_JOB = 'namespace="$namespace",job="$job"'
OPERATOR = 'namespace=~"$operator_namespace"'
"""Matchers of the dashboards' variables; the jobs' namespace that Grafana passes on is not the operator's."""
RATE = "$__rate_interval"
PER_JOB = "namespace, job"

_HISTOGRAM = re.compile(r"_(bucket|sum|count)$")


def spec_of(name: str) -> MetricSpec:
    """Give the metric that a series is of; the three kinds of series of a histogram have its name.

    ValueError when there is none.
    """
    spec = SPECS.get(name)
    if spec is None:
        spec = SPECS.get(_HISTOGRAM.sub("", name))
        if spec is None or spec.type != "histogram":
            raise ValueError(f"METRICS has no {name}; add it there, or correct the query")
    return spec


def series(name: str, scope: str = "", **matchers: str) -> str:
    """Select a metric's series; a matcher is a value, or an operator and a quoted value, such as `!="a"`.

    ValueError when METRICS has no such name, or not with such a label.
    """
    labels = spec_of(name).labels
    for label in matchers:
        if label not in labels:
            raise ValueError(f"{name} has no label {label} in METRICS, but {', '.join(labels) or 'none'}")
    parts = [f"{label}{_operator(value)}" for label, value in matchers.items()]
    inside = ",".join([scope, *parts] if scope else parts)
    return f"{name}{{{inside}}}" if inside else name


def _operator(value: str) -> str:
    return value if value[:1] in "=!" else f'="{value}"'


def rate(name: str, scope: str = "", window: str = RATE, **matchers: str) -> str:
    """Give a counter's increase a second."""
    return f"rate({series(name, scope, **matchers)}[{window}])"


def increase(name: str, scope: str = "", window: str = RATE, **matchers: str) -> str:
    """Give a counter's increase."""
    return f"increase({series(name, scope, **matchers)}[{window}])"


def total(what: str, by: str = "") -> str:
    """Add series up, by labels."""
    return f"sum by ({by}) ({what})" if by else f"sum({what})"


def most(what: str, by: str = "") -> str:
    """Take the largest of series, by labels; of several pods one after another, the one there is."""
    return f"max by ({by}) ({what})" if by else f"max({what})"


def quantile(share: str, name: str, scope: str = "", window: str = RATE, by: str = "") -> str:
    """Estimate a quantile of a histogram, by labels."""
    buckets = rate(f"{name}_bucket", scope, window)
    return f"histogram_quantile({share}, {total(buckets, ', '.join(filter(None, ('le', by))))})"
