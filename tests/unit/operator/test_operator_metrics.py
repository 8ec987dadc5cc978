"""What the operator exposes is what METRICS says of it, however many jobs there are."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tracerl.api.constants import LABEL_CANARY, METRICS, OPEN_LABELS, Reason, Role
from tracerl_operator.shell.kinds import JOB
from tracerl_operator.shell.metrics import Metrics, canary_ends, job_states, longest_not_ready

OPERATOR = {spec.name: spec for spec in METRICS if spec.source is Role.OPERATOR}
NOW = datetime(2026, 3, 1, 12, 0, tzinfo=UTC)


def job(
    ready: str = "False",
    reason: str = "Starting",
    since: str = "2026-03-01T11:00:00Z",
    *,
    suspended: str | None = None,
    terminal: str | None = None,
    ended: str | None = None,
    canary: str | None = None,
) -> dict[str, Any]:
    conditions = [{"type": "Ready", "status": ready, "reason": reason, "lastTransitionTime": since}]
    if suspended is not None:
        conditions.append({"type": "Suspended", "status": "True", "reason": suspended})
    labels = {} if canary is None else {LABEL_CANARY: canary}
    return {
        "metadata": {"name": "j", "labels": labels},
        "status": {"conditions": conditions, "terminal": terminal, "completionTime": ended},
    }


def exposed(metrics: Metrics) -> dict[str, tuple[str, list[tuple[dict[str, str], float]]]]:
    found = {}
    for family in text_string_to_metric_families(metrics.text().decode()):
        name = f"{family.name}_total" if family.type == "counter" else family.name
        found[name] = family.type, [(dict(sample.labels), sample.value) for sample in family.samples]
    return found


def working(jobs: list[Any]) -> Metrics:
    """Metrics of an operator that works on these jobs."""
    metrics = Metrics()
    metrics.show_jobs(lambda: jobs)
    metrics.show("tracerl_operator_queue_depth", lambda: {"": 0.0})
    metrics.show("tracerl_operator_leads", lambda: {"": 1.0})
    metrics.saw(JOB)
    for code in (200, 404, 409, 0):
        metrics.count("GET", "TraceRLJob", code)
        metrics.failed(code)
    metrics.failed(None)
    metrics.durations.labels("changed").observe(0.2)
    return metrics


def test_every_metric_of_the_operator_is_exposed_with_its_type_and_labels_and_nothing_else() -> None:
    found = exposed(working([job(), job(terminal="Complete", ended="2026-03-01T11:00:00Z", canary="true")]))
    assert set(found) == set(OPERATOR)
    for name, (kind, samples) in found.items():
        spec = OPERATOR[name]
        assert kind == spec.type
        assert samples
        assert all(set(labels) - {"le"} == set(spec.labels) for labels, _ in samples)
        for label, values in zip(spec.labels, spec.values, strict=True):
            shown = {labels[label] for labels, _ in samples}
            assert shown <= set(values) if values else len(shown) <= OPEN_LABELS[label].most


def test_the_exposition_does_not_grow_with_jobs() -> None:
    states = [job("True", "Running"), job(), job(suspended="Queued"), job(terminal="Failed")]
    few, many = (len(working(states * count).text().splitlines()) for count in (1, 250))
    assert few == many


def test_answers_that_no_server_should_give_are_one_label_value() -> None:
    metrics = Metrics()
    for code in range(600, 700):
        metrics.count("GET", "Pod", code)
        metrics.failed(code)
    shown = {
        label
        for _, samples in exposed(metrics).values()
        for labels, _ in samples
        for label in (labels.get("code"), labels.get("reason"))
        if label
    }
    assert shown == {"other", "Codeother"}


@pytest.mark.parametrize(
    ("document", "state"),
    [
        (job("True", "Running"), "Ready"),
        (job(), "NotReady"),
        ({}, "NotReady"),
        (None, "NotReady"),
        (job(suspended="SuspendedBySpec"), "Suspended"),
        (job(suspended="Queued"), "Queued"),
        (job(suspended="Queued", terminal="Failed"), "Failed"),
        (job("True", terminal="Complete"), "Complete"),
        ({"status": {"conditions": "none", "terminal": 7}}, "NotReady"),
    ],
)
def test_each_job_is_in_one_state_and_every_state_has_a_count(document: Any, state: str) -> None:
    counted = job_states([document])
    assert {name for name, count in counted.items() if count} == {state}
    assert counted.keys() == {"Ready", "NotReady", "Queued", "Suspended", "Complete", "Failed"}


def test_the_longest_wait_is_by_reason_and_of_jobs_that_should_run() -> None:
    jobs = [
        job(since="2026-03-01T11:59:00Z"),
        job(since="2026-03-01T11:30:00Z"),
        job(reason="Queued", since="2026-03-01T10:00:00Z", suspended="Queued"),
        job(reason="HandWritten", since="2026-03-01T11:58:00Z"),
        job("True", "Running", "2026-03-01T01:00:00Z"),
        job(reason="SuspendedBySpec", since="2026-03-01T01:00:00Z", suspended="SuspendedBySpec"),
        job(reason="Completed", since="2026-03-01T01:00:00Z", terminal="Complete"),
        job(since="yesterday"),
        None,
    ]
    assert longest_not_ready(jobs, NOW) == {"Starting": 1800.0, "Queued": 7200.0, Reason.UNEXPECTED: 120.0}


def test_the_latest_end_of_a_canary_is_by_how_it_ended() -> None:
    def ended(result: str, time: str, canary: str | None = "true") -> dict[str, Any]:
        return job(terminal=result, ended=time, canary=canary)

    jobs = [
        ended("Complete", "2026-03-01T09:00:00Z"),
        ended("Complete", "2026-03-01T10:00:00Z"),
        ended("Failed", "2026-03-01T08:00:00Z"),
        ended("Complete", "2026-03-01T11:00:00Z", None),
        ended("Failed", "2026-03-01T11:00:00Z", "false"),
        job(canary="true"),
    ]
    assert canary_ends(jobs) == {"Complete": 1772359200.0, "Failed": 1772352000.0}
    assert canary_ends(jobs[3:]) == {}
