"""Each alert fires when it should and not when it should not, by promtool."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from chart_files import alert_rules

_JOB = 'namespace="team",job="run"'
_POD = f'{_JOB},pod="run-node-0-0"'
_OPERATOR = 'namespace="tracerl-system",job="tracerl-operator"'
_GAP = f'tracerl_train_rollout_logprob_abs_diff{{{_POD},forward="guided",stat="mean"}}'
_RUN = {"namespace": "team", "job": "run"}
_STORE = {**_RUN, "pod": "run-node-0-0"}


@dataclass(frozen=True)
class Case:
    """Series a minute apart, in promtool's notation, and what fires at a minute."""

    name: str
    alert: str
    series: dict[str, str]
    minute: int
    labels: dict[str, str] | None = None
    summary: str = ""
    text: str = ""
    severity: str = "warning"


def ring(free: int) -> dict[str, str]:
    states = {"free": free, "live": 90, "dead": 10 - free}
    return {f'tracerl_store_ring_bytes{{{_POD},state="{s}"}}': f"{n}+0x60" for s, n in states.items()}


def steps(step: str, *, pods: int = 1) -> dict[str, str]:
    info = {
        f'tracerl_info{{{_JOB},pod="t{n}",method="TRACE",format="NVFP4",version="1"}}': "1+0x120"
        for n in range(pods)
    }
    shown = {f'tracerl_step{{{_JOB},pod="t0"}}': step, f'tracerl_steps{{{_JOB},pod="t0"}}': "60+0x120"}
    return info | (shown if step else {})


def requests(ok: str, failed: str) -> dict[str, str]:
    where = f'tracerl_object_requests_total{{{_POD},operation="write",result='
    return {f'{where}"ok"}}': ok, f'{where}"failed"}}': failed}


def overhead(capture: str, forward: str) -> dict[str, str]:
    where = f"tracerl_step_overhead_seconds_total{{{_POD},part="
    path = {f"tracerl_step_critical_path_seconds_total{{{_POD}}}": "0+60x90"}
    return {f'{where}"capture"}}': capture, f'{where}"extra_forward"}}': forward, **path}


def canary(**ends: str) -> dict[str, str]:
    name = "tracerl_operator_canary_end_timestamp_seconds"
    return {f'{name}{{{_OPERATOR},result="{result}"}}': values for result, values in ends.items()}


def staleness(mean: str, limit: str) -> dict[str, str]:
    return {
        f'tracerl_staleness_versions{{{_POD},stat="mean"}}': mean,
        f"tracerl_staleness_limit_versions{{{_POD}}}": limit,
    }


def missing(rows: str) -> dict[str, str]:
    return {
        f"tracerl_records_rows_total{{{_POD}}}": "0+1000x120",
        f'tracerl_records_missing_total{{{_POD},reason="checksum"}}': rows,
        f'tracerl_records_missing_total{{{_POD},reason="missing"}}': "0+0x120",
    }


def waits(reason: str, values: str) -> dict[str, str]:
    return {f'tracerl_operator_longest_not_ready_seconds{{{_OPERATOR},reason="{reason}"}}': values}


def leads(values: str, namespace: str = "tracerl-system", pod: str = "a") -> dict[str, str]:
    return {f'tracerl_operator_leads{{namespace="{namespace}",job="tracerl-operator",pod="{pod}"}}': values}


CASES = [
    Case(
        "two and a half times the least",
        "TraceRLGapRising",
        {_GAP: "0.02+0x360 0.05+0x60"},
        395,
        _RUN,
        "The gap between rollout and trainer of team/run rises.",
        "The mean guided gap is 0.05 nats, more than 2 times the least of six hours.",
    ),
    Case(
        "of one trainer after another",
        "TraceRLGapRising",
        {
            _GAP: "0.02+0x360 stale",
            _GAP.replace("node-0-0", "node-0-0-b"): "_x362 0.05+0x60",
        },
        400,
        _RUN,
        "The gap between rollout and trainer of team/run rises.",
        "The mean guided gap is 0.05 nats, more than 2 times the least of six hours.",
    ),
    Case("not quite twice", "TraceRLGapRising", {_GAP: "0.02+0x360 0.039+0x60"}, 395),
    Case("three times very little", "TraceRLGapRising", {_GAP: "0.003+0x360 0.009+0x60"}, 395),
    Case("for a short while", "TraceRLGapRising", {_GAP: "0.02+0x360 0.05+0x12 0.02+0x60"}, 395),
    Case(
        "the unguided one",
        "TraceRLGapRising",
        {_GAP.replace("guided", "unguided"): "0.02+0x360 0.09+0x60"},
        395,
    ),
    Case(
        "two rows of a thousand",
        "TraceRLRecordsMissing",
        missing("0+2x120"),
        90,
        _RUN,
        "team/run trains on rows without their record.",
        "0.2% of the rows of the last hour had no usable record; above spec.records.maxMissingRatio the job"
        " fails.",
        "critical",
    ),
    Case("half a row of a thousand", "TraceRLRecordsMissing", missing("0+0.5x120"), 90),
    Case(
        "15 percent",
        "TraceRLOverheadAboveBudget",
        overhead("0+3x90", "0+6x90"),
        75,
        _RUN,
        "TRACE costs team/run more than its budget.",
        "Records, guided kernels and extra forward take 15% of the steps' critical path.",
    ),
    Case("9 percent", "TraceRLOverheadAboveBudget", overhead("0+3x90", "0+2.4x90"), 75),
    Case("a canary's three minutes", "TraceRLOverheadAboveBudget", overhead("0+30x3", "0+0x3"), 4),
    Case(
        "all as old as may be",
        "TraceRLStalenessAtBound",
        staleness("3+0x90", "3+0x90"),
        75,
        _RUN,
        "What team/run trains on is as old as it may be.",
        "Trajectories are 3 versions old on average, about algorithm.maxVersionDiff.",
        "info",
    ),
    Case("some as old", "TraceRLStalenessAtBound", staleness("2.5+0x90", "3+0x90"), 75),
    Case("a bound of one", "TraceRLStalenessAtBound", staleness("1+0x90", "1+0x90"), 75),
    Case(
        "96 percent",
        "TraceRLRingFull",
        ring(4),
        20,
        _STORE,
        "A record store of team/run is full.",
        "96% of the ring in pod run-node-0-0 are in use: rollouts wait, and drop frames after"
        " transport.deadlineSeconds.",
    ),
    Case("94 percent", "TraceRLRingFull", ring(6), 20),
    Case("96 percent for five minutes", "TraceRLRingFull", ring(4), 5),
    Case(
        "little room",
        "TraceRLSpillFull",
        {
            f'tracerl_store_frame_bytes{{{_POD},tier="spill"}}': "96+0x60",
            f"tracerl_store_spill_free_bytes{{{_POD}}}": "4+0x60",
        },
        10,
        _STORE,
        "team/run cannot spill records to disk for long.",
        "What pod run-node-0-0 has below transport.spillPath is about to be full, or refuses segments.",
    ),
    Case(
        "a segment refused",
        "TraceRLSpillFull",
        {f'tracerl_store_tier_errors_total{{{_POD},tier="spill"}}': "0+0x20 1+0x60"},
        30,
        _STORE,
        "team/run cannot spill records to disk for long.",
        "What pod run-node-0-0 has below transport.spillPath is about to be full, or refuses segments.",
    ),
    Case(
        "room",
        "TraceRLSpillFull",
        {
            f'tracerl_store_frame_bytes{{{_POD},tier="spill"}}': "90+0x60",
            f"tracerl_store_spill_free_bytes{{{_POD}}}": "10+0x60",
            f'tracerl_store_tier_errors_total{{{_POD},tier="spill"}}': "3+0x60",
        },
        30,
    ),
    Case(
        "one request of ten",
        "TraceRLObjectStoreFailing",
        requests("0+9x60", "0+1x60"),
        30,
        _RUN,
        "The object store of team/run fails.",
        "Requests fail, or objects of frames could not be uploaded; their records are lost.",
        "critical",
    ),
    Case(
        "an upload",
        "TraceRLObjectStoreFailing",
        requests("0+99x60", "0+1x60")
        | {f'tracerl_object_uploads_total{{{_POD},result="failed"}}': "0+0x20 1+0x60"},
        30,
        _RUN,
        "The object store of team/run fails.",
        "Requests fail, or objects of frames could not be uploaded; their records are lost.",
        "critical",
    ),
    Case(
        "a store's segment",
        "TraceRLObjectStoreFailing",
        {f'tracerl_store_tier_errors_total{{{_POD},tier="object"}}': "0+0x20 1+0x60"},
        30,
        _RUN,
        "The object store of team/run fails.",
        "Requests fail, or objects of frames could not be uploaded; their records are lost.",
        "critical",
    ),
    Case("one request of a hundred", "TraceRLObjectStoreFailing", requests("0+99x60", "0+1x60"), 30),
    Case("no requests", "TraceRLObjectStoreFailing", requests("9+0x60", "1+0x60"), 30),
    Case(
        "the same step",
        "TraceRLJobStuck",
        steps("5+0x120", pods=2),
        80,
        _RUN,
        "team/run runs and does no steps.",
        "Its trainer answers, and has done no step for 60 minutes.",
        "critical",
    ),
    Case(
        "no first step",
        "TraceRLJobStuck",
        steps("", pods=2),
        80,
        _RUN,
        "team/run runs and does no steps.",
        "Its trainer answers, and has done no step for 60 minutes.",
        "critical",
    ),
    Case("a step in five minutes", "TraceRLJobStuck", steps("0+0.2x120"), 80),
    Case("all steps done", "TraceRLJobStuck", steps("60+0x120"), 80),
    Case("for half an hour", "TraceRLJobStuck", steps("5+0x30 6+0.2x90"), 60),
    Case(
        "no node",
        "TraceRLJobNotReady",
        waits("Unschedulable", "0+60x60"),
        31,
        {"reason": "Unschedulable"},
        "A job does not start (Unschedulable).",
        "A job that should run has not been Ready for 31m 0s; kubectl get trj -A shows it.",
    ),
    Case("a queue", "TraceRLJobNotReady", waits("Queued", "0+60x60"), 50),
    Case("a start", "TraceRLJobNotReady", waits("Starting", "0+60x60"), 29),
    Case(
        "a day and three hours",
        "TraceRLCanaryStale",
        canary(Complete="100+0x1700"),
        27 * 60,
        {},
        "No canary was complete for long.",
        "The last one that was is 1d 2h 58m 20s ago.",
    ),
    Case(
        "and its job is deleted",
        "TraceRLCanaryStale",
        canary(Complete="100+0x60 stale", Failed="90000+0x1700"),
        27 * 60,
        {},
        "No canary was complete for long.",
        "The last one that was is 1d 2h 58m 20s ago.",
    ),
    Case("yesterday's", "TraceRLCanaryStale", canary(Complete="7200+0x1700"), 27 * 60),
    Case("no canary", "TraceRLCanaryStale", leads("1+0x1700"), 27 * 60),
    Case(
        "after one that was complete",
        "TraceRLCanaryFailed",
        canary(Complete="4000+0x60", Failed="5000+0x60"),
        30,
        {},
        "The canary failed.",
        "The canary that ended last is Failed; its condition says which expectation it broke.",
    ),
    Case(
        "the only one",
        "TraceRLCanaryFailed",
        canary(Failed="5000+0x60"),
        30,
        {},
        "The canary failed.",
        "The canary that ended last is Failed; its condition says which expectation it broke.",
    ),
    Case(
        "before one that was complete",
        "TraceRLCanaryFailed",
        canary(Complete="6000+0x60", Failed="5000+0x60"),
        30,
    ),
    *(
        Case(
            name,
            "TraceRLOperatorDown",
            series,
            7,
            {},
            "No TraceRL operator works in tracerl-system.",
            "None is scraped that leads. Jobs that run go on; none is started, restarted or cleaned up.",
            "critical",
        )
        for name, series in {
            "none": steps("5+0x10"),
            "all stand by": leads("0+0x10") | leads("0+0x10", pod="b"),
            "another installation's": leads("1+0x10", namespace="other"),
        }.items()
    ),
    Case("one leads", "TraceRLOperatorDown", leads("1+0x10") | leads("0+0x10", pod="b"), 7),
    Case(
        "another one takes over",
        "TraceRLOperatorDown",
        leads("1+0x3 0+0x10") | leads("0+0x5 1+0x10", pod="b"),
        9,
    ),
    Case(
        "one a minute",
        "TraceRLReconcileErrors",
        {f'tracerl_operator_reconcile_errors_total{{{_OPERATOR},reason="Code403"}}': "0+1x60"},
        45,
        {"namespace": "tracerl-system", "reason": "Code403"},
        "The operator fails at jobs (Code403).",
        "15 looks at jobs failed within 15 minutes; its log names the jobs.",
    ),
    Case(
        "one in five minutes",
        "TraceRLReconcileErrors",
        {f'tracerl_operator_reconcile_errors_total{{{_OPERATOR},reason="NoAnswer"}}': "0+0.2x60"},
        45,
    ),
]


def promtool(*arguments: object) -> str:
    """Run promtool; RuntimeError with what it said when it fails."""
    command = ["promtool", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(done.stdout + done.stderr)
    return done.stdout


def write_rules(directory: Path, *names: str) -> Path:
    """Write the rules of some alerts, or all: promtool evaluates each minute all that it is given."""
    document = alert_rules()
    (group,) = document["groups"]
    group["rules"] = [rule for rule in group["rules"] if not names or rule["alert"] in names]
    path = directory / "rules.yaml"
    path.write_text(yaml.safe_dump(document))
    return path


def rule_test(case: Case) -> dict[str, Any]:
    expected = []
    if case.labels is not None:
        annotations = {
            "summary": case.summary,
            "description": case.text,
            "runbook_url": f"docs/runbooks/{case.alert}.md",
        }
        labels = {**case.labels, "severity": case.severity}
        expected = [{"exp_labels": labels, "exp_annotations": annotations}]
    return {
        "name": case.name,
        "interval": "1m",
        "input_series": [{"series": name, "values": values} for name, values in case.series.items()],
        "alert_rule_test": [
            {"eval_time": f"{case.minute}m", "alertname": case.alert, "exp_alerts": expected}
        ],
    }


def test_rules_are_rules(tmp_path: Path) -> None:
    said = promtool("check", "rules", write_rules(tmp_path))
    assert f"SUCCESS: {len(alert_rules()['groups'][0]['rules'])} rules found" in said


def test_every_alert_has_cases_of_both_kinds() -> None:
    names = {rule["alert"] for rule in alert_rules()["groups"][0]["rules"]}
    assert {case.alert for case in CASES if case.labels is not None} == names
    assert {case.alert for case in CASES if case.labels is None} == names


def run_tests(directory: Path, alert: str, cases: list[Case]) -> None:
    path, rules = directory / "test.yaml", write_rules(directory, alert)
    document = {"rule_files": [str(rules)], "evaluation_interval": "1m", "tests": [*map(rule_test, cases)]}
    path.write_text(yaml.safe_dump(document))
    promtool("test", "rules", path)


@pytest.mark.parametrize("alert", sorted({case.alert for case in CASES}))
def test_an_alert_fires_when_it_should_and_else_not(alert: str, tmp_path: Path) -> None:
    run_tests(tmp_path, alert, [case for case in CASES if case.alert == alert])


def test_promtool_finds_an_alert_that_does_not_fire(tmp_path: Path) -> None:
    quiet = next(case for case in CASES if case.name == "94 percent")
    with pytest.raises(RuntimeError, match="TraceRLRingFull"):
        run_tests(tmp_path, quiet.alert, [replace(quiet, labels=_STORE)])
