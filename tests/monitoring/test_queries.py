"""Every query of dashboards and alerts finds what it asks for in a Prometheus that scraped a real run."""

from __future__ import annotations

import re
from itertools import pairwise
from typing import Any

import pytest
from chart_files import NAMESPACE, ShownQuery, boards, shown_queries
from conftest import STEPS, TEAM, Scraped
from prometheus import Series

from tracerl_monitoring.alerts import ALERTS
from tracerl_monitoring.series import spec_of

_VARIABLES = {
    "$__rate_interval": "10s",
    "$operator_namespace": f"{NAMESPACE}",
    "$namespace": TEAM,
    "$job": "canary",
    "$site": ".*",
}
NOT_PRODUCED = {
    "tracerl_object_": "the records of this run go through the ring, and none to an object store",
    "tracerl_baseline_": "this run is asynchronous, and baselines need one that is not",
}
"""Metrics, by how their names begin, that stay 0 or away in this run; test_unit_data.py has their figures."""
QUERIES = shown_queries()


def chosen(expr: str) -> str:
    """A query as Grafana sends it."""
    for variable, value in _VARIABLES.items():
        expr = expr.replace(variable, value)
    return expr


def is_produced(expr: str) -> bool:
    return not any(name.startswith(tuple(NOT_PRODUCED)) for name in re.findall(r"tracerl_\w+", expr))


def shows_something(found: list[Series]) -> bool:
    return any(series.finite for series in found)


def ever_counts(found: list[Series]) -> bool:
    """Whether anything is not 0, or nothing a second."""
    return any(value for series in found for _, value in series.finite)


def legend(query: ShownQuery, series: Series) -> str:
    """What Grafana calls a series; KeyError where it has not the label that the legend names."""
    return re.sub(r"{{(\w+)}}", lambda found: series.labels[found[1]], query.legend)


@pytest.mark.parametrize("query", QUERIES, ids=str)
def test_a_panel_finds_its_series(query: ShownQuery, scraped: Scraped) -> None:
    found = scraped.prometheus.over(chosen(query.expr), scraped.start, scraped.end)
    assert shows_something(found) if is_produced(query.expr) else not ever_counts(found), query.expr
    names = [legend(query, series) for series in found]
    assert len(names) == len(set(names)), names


def test_legends_of_a_panel_differ(scraped: Scraped) -> None:
    for panel in {(query.board, query.panel, query.kind) for query in QUERIES if query.kind != "table"}:
        names = [
            legend(query, series)
            for query in QUERIES
            if (query.board, query.panel, query.kind) == panel
            for series in scraped.prometheus.over(chosen(query.expr), scraped.start, scraped.end)
        ]
        assert len(names) == len(set(names)), (panel, names)


def test_variables_offer_what_was_scraped(scraped: Scraped) -> None:
    offered = {}
    for name, board in boards().items():
        for variable in board["templating"]["list"]:
            if variable["type"] == "query":
                parts = re.fullmatch(r"label_values\((.+), (\w+)\)", variable["query"]["query"])
                assert parts is not None
                match, label = parts.groups()
                values = scraped.prometheus.get(f"label/{label}/values", **{"match[]": chosen(match)})
                offered[name, variable["name"]] = values
    assert offered == {
        ("fleet", "namespace"): [TEAM],
        ("fleet", "job"): ["canary"],
        ("job", "namespace"): [TEAM],
        ("job", "job"): ["canary"],
        ("job", "site"): ["ExpertInput", "Key", "Value"],
        ("operator", "operator_namespace"): [NAMESPACE],
    }


def test_the_pod_monitor_selects_the_pods_of_its_job(scraped: Scraped) -> None:
    targets = scraped.prometheus.get("targets")
    own = [target for target in targets["activeTargets"] if target["scrapePool"] != "operator"]
    labels = [{key: value for key, value in target["labels"].items() if key != "instance"} for target in own]
    assert sorted(labels, key=lambda each: each["role"]) == [
        {
            "namespace": TEAM,
            "job": "canary",
            "pod": "canary-node-0-0",
            "container": role,
            "endpoint": role,
            "role": role,
            "method": "TRACE",
        }
        for role in ("rollout", "store", "trainer")
    ]
    dropped = [target["discoveredLabels"] for target in targets["droppedTargets"]]
    strangers = {
        each["__meta_kubernetes_pod_container_port_name"]
        for each in dropped
        if each["__meta_kubernetes_pod_name"] == "x"
    }
    assert strangers == {"rollout", "store", "trainer", "rendezvous", "meeting"}


def test_no_label_of_a_metric_is_pushed_aside(scraped: Scraped) -> None:
    names = scraped.prometheus.get("labels", start=f"{scraped.start}", end=f"{scraped.end}")
    assert [name for name in names if name.startswith("exported_")] == []


def _raw(scraped: Scraped, selector: str) -> dict[float, float]:
    (series,) = scraped.prometheus.raw(selector, scraped.start, scraped.end)
    return dict(series.samples)


@pytest.mark.parametrize(
    ("selector", "path"),
    [
        ("tracerl_reward_mean", ["reward", "mean"]),
        ('tracerl_train_rollout_logprob_abs_diff{forward="guided",stat="mean"}', ["gap_guided", "mean"]),
        ('tracerl_train_rollout_logprob_abs_diff{forward="unguided",stat="max"}', ["gap_unguided", "max"]),
        ("tracerl_step_overhead_ratio", ["overhead", "ratio"]),
        ('tracerl_step_part_seconds{part="train_forward"}', ["seconds", "train_forward"]),
        ("tracerl_policy_version", ["version"]),
    ],
)
def test_a_gauge_is_what_the_run_log_has_of_that_step(
    selector: str, path: list[str], scraped: Scraped
) -> None:
    logged = scraped.steps()
    values = _raw(scraped, selector)
    # What was scraped at once has one time.
    at_steps = {at: int(step) for at, step in _raw(scraped, "tracerl_step").items() if at in values}
    assert len(set(at_steps.values())) >= STEPS // 4
    for at, step in at_steps.items():
        expected: Any = logged[step]
        for key in path:
            expected = expected[key]
        assert values[at] == pytest.approx(expected, rel=1e-12), step


@pytest.mark.parametrize(
    ("selector", "path"),
    [
        ("tracerl_trained_tokens_total", ["response_tokens"]),
        ("tracerl_records_rows_total", ["records", "rows"]),
        ('tracerl_step_overhead_seconds_total{part="unpack"}', ["overhead", "unpack"]),
    ],
)
def test_a_counter_is_the_sum_of_the_steps(selector: str, path: list[str], scraped: Scraped) -> None:
    logged = scraped.steps()
    values = _raw(scraped, selector)
    for at, step in _raw(scraped, "tracerl_step").items():
        parts: list[Any] = [logged[number] for number in range(1, int(step) + 1)]
        for key in path:
            parts = [part[key] for part in parts]
        assert values[at] == pytest.approx(sum(parts), rel=1e-9), step
    assert all(after >= before for (_, before), (_, after) in pairwise(sorted(values.items())))


def test_the_operators_figures_are_those_of_its_store(scraped: Scraped) -> None:
    query = next(each for each in QUERIES if each.panel == "Jobs by state" and each.kind == "timeseries")
    found = scraped.prometheus.over(chosen(query.expr), scraped.start, scraped.end)
    counts = {series.labels["state"]: series.samples[-1][1] for series in found}
    assert counts == {"Ready": 1, "NotReady": 1, "Queued": 1, "Suspended": 1, "Complete": 1, "Failed": 1}
    (wait,) = [each for each in QUERIES if each.panel == "Longest wait"]
    waits = {
        series.labels["reason"]: series.samples[0]
        for series in scraped.prometheus.over(chosen(wait.expr), scraped.start, scraped.end)
    }
    assert set(waits) == {"Starting", "Queued"}
    assert waits["Starting"][1] == pytest.approx(300, abs=60)
    assert waits["Queued"][1] == pytest.approx(7200, abs=60)


def test_no_alert_fires_at_a_run_in_order(scraped: Scraped) -> None:
    (group,) = scraped.prometheus.get("rules")["groups"]
    assert {rule["name"] for rule in group["rules"]} == {alert.name for alert in ALERTS}
    assert [(rule["name"], rule["lastError"]) for rule in group["rules"] if rule["health"] != "ok"] == []
    fired = scraped.prometheus.over('ALERTS{alertstate="firing"}', scraped.start, scraped.end)
    assert [series.labels for series in fired] == []


@pytest.mark.parametrize("alert", ALERTS, ids=lambda alert: alert.name)
def test_what_an_alert_compares_is_there(alert: Any, scraped: Scraped) -> None:
    expr = alert.value.replace("@namespace@", NAMESPACE)
    found = scraped.prometheus.over(expr, scraped.start, scraped.end)
    assert shows_something(found) if is_produced(expr) else not ever_counts(found), expr


def test_metrics_are_scraped_with_the_types_of_the_table(scraped: Scraped) -> None:
    kinds = scraped.prometheus.get("metadata")
    ours = {name: kind for name, (kind, *_) in kinds.items() if name.startswith("tracerl_")}
    assert ours
    for name, kind in ours.items():
        spec = spec_of(name)
        assert (kind["type"], kind["help"]) == (spec.type, spec.help), name
