"""Jobs and objects that were written to hurt: deep, long, large, or with labels of others."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import pytest
from small_cluster import NOW, Cluster, job

from tracerl_operator.check import parse
from tracerl_operator.reconcile import reconcile
from tracerl_operator.shell.kinds import CONFIG_MAP, JOB, JobKey
from tracerl_operator.shell.store import Store
from tracerl_operator.status import troubled


def nested(levels: int) -> Any:
    value: Any = 1
    for _ in range(levels):
        value = {"a": value}
    return value


@pytest.mark.parametrize(
    ("spec", "path"),
    [
        ({"rollout": {"engineArgs": {"x": nested(200)}}}, "spec.rollout.engineArgs"),
        ({"task": {"parameters": {"x": nested(100)}}}, "spec.task.parameters"),
        ({"trainer": {"template": {"x": [[nested(70)]]}}}, "spec.trainer.template"),
    ],
)
def test_a_deep_job_is_refused_by_field(spec: dict[str, Any], path: str) -> None:
    parsed, faults = parse(job(**spec))
    assert parsed is None
    assert [fault.path for fault in faults] == [path]
    assert "deeper than 64 levels" in str(faults[0])


def test_any_depth_that_an_api_server_takes_is_decided_on() -> None:
    deep = job()
    deep["spec"]["rollout"] = {"engineArgs": nested(10_000)}
    decision = reconcile(deep, Cluster(job()).observed, NOW)
    assert decision.status is not None
    assert decision.status["terminal"] == "Failed"
    assert not decision.apply


def test_a_large_job_is_refused_and_one_at_the_limit_is_not() -> None:
    parsed, faults = parse(job(rollout={"template": {"metadata": {"annotations": {"a": "x" * 2**18}}}}))
    assert parsed is None
    assert "262144" in str(faults[0])
    parsed, faults = parse(job(rollout={"template": {"metadata": {"annotations": {"a": "x" * 250_000}}}}))
    assert parsed is not None
    assert faults == []


def test_a_list_of_thousands_is_merged_in_time() -> None:
    variables = [{"name": f"E{number}"} for number in range(9_000)]
    cluster = Cluster(
        job(rollout={"template": {"spec": {"containers": [{"name": "rollout", "env": variables}]}}})
    )
    began = time.process_time()
    cluster.step()
    assert cluster.find("JobSet") is not None
    assert time.process_time() - began < 5


@pytest.mark.parametrize("name", [[], {}, None, 1.5])
def test_a_container_whose_name_is_none_is_refused(name: object) -> None:
    cluster = Cluster(job())
    cluster.job["spec"]["rollout"] = {"template": {"spec": {"containers": [{"name": name}]}}}
    decision = cluster.step()
    assert decision.status is not None
    assert decision.status["terminal"] == "Failed"
    assert "spec.rollout.template.spec.containers[0].name" in cluster.message("Failed")


def test_a_pod_with_the_label_of_a_job_is_not_the_jobs() -> None:
    cluster = Cluster(job()).running()
    ended = {"name": "rollout", "restartCount": 99, "state": {"terminated": {"exitCode": 2}}}
    for labels in ({}, {"jobset.sigs.k8s.io/jobset-uid": "another"}):
        stranger = {
            "metadata": {
                "name": "stranger",
                "uid": "s",
                "labels": {"tracerl.dev/job-name": "canary"} | labels,
            },
            "status": {"phase": "Running", "containerStatuses": [ended]},
        }
        observed = replace(cluster.observed, pods=(*cluster.observed.pods, stranger))
        decision = reconcile(cluster.job, observed, cluster.now)
        assert (decision.status, decision.delete) == (None, ())


def test_a_template_cannot_make_pods_look_like_cleaning_pods() -> None:
    cluster = Cluster(
        job(rollout={"template": {"metadata": {"labels": {"tracerl.dev/cleans-ring": "true"}}}})
    )
    cluster.settle()
    (replicated,) = cluster.jobset["spec"]["replicatedJobs"]
    assert "tracerl.dev/cleans-ring" not in replicated["template"]["spec"]["template"]["metadata"]["labels"]


def cached(**more: Any) -> dict[str, Any]:
    labels = {"tracerl.dev/job-name": "canary"}
    metadata = {"name": "m", "namespace": "team", "uid": "u", "resourceVersion": "1", "labels": labels}
    return {"metadata": metadata, **more}


def test_of_config_maps_only_the_progress_is_kept() -> None:
    store, large = Store(), "x" * 1_000_000
    document = cached(data={"job.yaml": large, "progress": "{}"}, binaryData={"a": large})
    document["metadata"]["annotations"] = {"a": large}
    store.put(CONFIG_MAP, document)
    (found,) = store.objects(JobKey("team", "canary")).values()
    assert found["data"] == {"progress": "{}"}
    assert found["metadata"]["labels"] == document["metadata"]["labels"]
    assert len(str(found)) < 500
    store.put(
        CONFIG_MAP,
        cached(data={"progress": large}) | {"metadata": cached()["metadata"] | {"resourceVersion": "2"}},
    )
    (found,) = store.objects(JobKey("team", "canary")).values()
    assert "data" not in found


def test_of_ended_jobs_templates_are_not_kept() -> None:
    store = Store()
    ended = job(rollout={"template": {"spec": {}}, "engineArgs": {"a": 1}, "nodes": 1})
    ended["status"] = {"terminal": "Complete"}
    store.put(JOB, ended)
    found = store.job(JobKey("team", "canary"))
    assert found is not None
    assert found["spec"]["rollout"] == {"nodes": 1}
    assert found["spec"]["task"] == ended["spec"]["task"]


def test_a_fault_of_the_operator_is_shown_once() -> None:
    shown = job()
    status = troubled(shown, "the operator failed", NOW)
    assert status is not None
    assert status["summary"] == "Unexpected"
    ready = next(c for c in status["conditions"] if c["type"] == "Ready")
    assert (ready["status"], ready["reason"], ready["message"]) == (
        "False",
        "Unexpected",
        "the operator failed",
    )
    shown["status"] = status
    assert troubled(shown, "the operator failed", NOW.replace(hour=13)) is None
    shown["status"] = {"terminal": "Failed"}
    assert troubled(shown, "the operator failed", NOW) is None
