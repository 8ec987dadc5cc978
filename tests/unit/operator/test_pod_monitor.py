"""A job's PodMonitor finds the pods that the operator makes, in every shape, and their ports and token."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from small_cluster import ALL_KINDS, APART, INSTALLATION, NODE, TOKEN, UID, job, merged, nodes

from tracerl.api.constants import LABEL_JOB_NAME, METRICS, Role
from tracerl.api.job import TraceRLJob
from tracerl_operator.objects import wanted
from tracerl_operator.types import Installation

CHART = Path(__file__).parents[3] / "charts/tracerl"
ONLY_OBJECT = {"transport": {"onlyObject": True, "object": {"uri": "s3://bucket/prefix"}}}
SHAPES = {
    "pod": {},
    "pods": nodes(3),
    "node": NODE | nodes(2),
    "apart": APART | nodes(2),
    "objects": ONLY_OBJECT,
    "objects apart": merged(APART, ONLY_OBJECT),
    "labelled": {"rollout": {"template": {"metadata": {"labels": {"team": "a"}}}}},
}


def objects(spec: dict[str, Any], uid: str = UID) -> list[dict[str, Any]]:
    installation = Installation(
        INSTALLATION.rollout_image, INSTALLATION.trainer_image, node_ring=True, pod_monitor=True
    )
    parsed = TraceRLJob.model_validate(job(**spec))
    return wanted(parsed, uid, installation, served=ALL_KINDS, token=TOKEN, restarts=0)


def one(made: list[dict[str, Any]], kind: str) -> dict[str, Any]:
    (found,) = (each for each in made if each["kind"] == kind)
    return found


def pods(made: list[dict[str, Any]]) -> list[dict[str, Any]]:
    jobs = one(made, "JobSet")["spec"]["replicatedJobs"]
    return [each["template"]["spec"]["template"] for each in jobs]


def ports(pod: dict[str, Any]) -> dict[str, str]:
    """Containers by the names of their ports."""
    containers = (*pod["spec"]["containers"], *pod["spec"].get("initContainers", ()))
    return {port["name"]: each["name"] for each in containers for port in each.get("ports", ())}


@pytest.mark.parametrize("shape", SHAPES)
def test_every_role_is_scraped_once(shape: str) -> None:
    made = objects(SHAPES[shape])
    monitor = one(made, "PodMonitor")["spec"]
    selected = monitor["selector"]["matchLabels"].items()
    assert selected
    assert all(pod["metadata"]["labels"].items() >= selected for pod in pods(made))
    assert not any(pod["metadata"]["labels"].items() >= selected for pod in pods(objects({}, "another")))
    roles = {"rollout", "trainer"} if "objects" in shape else {"rollout", "store", "trainer"}
    assert [each["port"] for each in monitor["podMetricsEndpoints"]] == sorted(roles)
    for role in roles:
        # By name, and in one kind of pod.
        assert [ports(pod)[role] for pod in pods(made) if role in ports(pod)] == [role]
    assert roles <= {spec.source.value for spec in METRICS}


@pytest.mark.parametrize("shape", SHAPES)
def test_the_token_is_that_of_the_job(shape: str) -> None:
    made = objects(SHAPES[shape])
    secret = one(made, "Secret")
    for endpoint in one(made, "PodMonitor")["spec"]["podMetricsEndpoints"]:
        credentials = endpoint["authorization"]["credentials"]
        assert endpoint["authorization"]["type"] == "Bearer"
        assert credentials["name"] == secret["metadata"]["name"]
        assert secret["stringData"][credentials["key"]] == TOKEN


def test_series_are_labelled_by_job_role_and_method() -> None:
    made = objects({})
    monitor = one(made, "PodMonitor")["spec"]
    (pod,) = pods(made)
    assert pod["metadata"]["labels"][monitor["jobLabel"]] == "canary"
    assert monitor["jobLabel"] == LABEL_JOB_NAME
    assert pod["metadata"]["labels"]["tracerl.dev/method"] == "TRACE"
    for endpoint in monitor["podMetricsEndpoints"]:
        assert endpoint["relabelings"] == [
            {"targetLabel": "role", "replacement": Role(endpoint["port"]).value},
            {"targetLabel": "method", "sourceLabels": ["__meta_kubernetes_pod_label_tracerl_dev_method"]},
        ]


def test_the_operators_job_label_is_what_dashboards_and_docs_say() -> None:
    """The ServiceMonitor's jobLabel is a label of the Service, which has the operator's labels."""
    template = (CHART / "templates/servicemonitor.yaml").read_text()
    assert "jobLabel: app.kubernetes.io/name" in template
    helpers = (CHART / "templates/_helpers.tpl").read_text()
    selector = helpers.partition('define "tracerl.selector" -}}')[2].partition("{{- end")[0]
    first = selector.strip().splitlines()[0]
    assert yaml.safe_load(first) == {"app.kubernetes.io/name": "tracerl-operator"}
