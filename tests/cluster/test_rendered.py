"""What the operator makes of a job is what a real API server takes, under Pod Security and with RBAC."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import pytest
from api_server import ApiServer, RefusedError
from definitions import definition
from small_cluster import APART, INSTALLATION, NODE, SPEC, TOKEN, merged, nodes

from tracerl.api.job import TraceRLJob
from tracerl_operator.objects import cleaning_pod, job_marks, kept_right, wanted
from tracerl_operator.reconcile import reconcile
from tracerl_operator.types import Apply, Decision, Observed, Ref

EVERYTHING = replace(INSTALLATION, network_policy=True, pod_monitor=True)
PLURALS = {
    "ConfigMap": "configmaps",
    "Secret": "secrets",
    "ServiceAccount": "serviceaccounts",
    "Role": "roles",
    "RoleBinding": "rolebindings",
    "NetworkPolicy": "networkpolicies",
    "JobSet": "jobsets",
    "PodMonitor": "podmonitors",
    "TraceRLJob": "tracerljobs",
}
RESTRICTED: dict[str, dict[str, Any]] = {
    "pod": {},
    "pods": nodes(3),
    "apart": APART | nodes(2),
    "gpus": {
        "rollout": {"gpusPerNode": 2},
        "trainer": {"gpusPerNode": 2, "resources": {"limits": {"memory": "900Gi", "rdma/ib": "1"}}},
        "placement": {"fabric": "ComputeDomain", "topology": {"required": "nvidia.com/gpu.clique"}},
    },
    "claims": {
        role: {
            "resources": {"claims": [{"name": "roce", "request": "nic"}]},
            "template": {
                "spec": {"resourceClaims": [{"name": "roce", "resourceClaimTemplateName": "roce-template"}]}
            },
        }
        for role in ("rollout", "trainer")
    },
    "queue": {"placement": {"queue": "lq", "topology": {"preferred": "nvidia.com/gpu.clique"}}},
    "objects": {"transport": {"onlyObject": True, "object": {"uri": "s3://bucket/p", "secretName": "s3"}}},
    "spill": {"transport": {"spillPath": "/spill", "spillLimit": "1Gi"}},
    "reward": {
        "task": {"name": None, "uri": "s3://b/t", "reward": "m:f", "source": {"configMap": "rewards"}}
    },
    "bare": {"output": None},
    "bucket": {"output": {"uri": "s3://b/p", "secretName": "s3", "endpointUrl": "http://minio:9000"}},
    "queue apart": merged(
        APART, {"placement": {"queue": "lq", "topology": {"required": "nvidia.com/gpu.clique"}}}
    ),
    "records under the run": {"transport": {"onlyObject": True}},
    "patched": {
        "rollout": {
            "template": {
                "metadata": {"annotations": {"a": "b"}},
                "spec": {
                    "tolerations": [{"operator": "Exists"}],
                    "containers": [{"name": "rollout", "env": [{"name": "A", "value": "1"}]}],
                    "volumes": [{"name": "cache", "persistentVolumeClaim": {"claimName": "cache"}}],
                },
            }
        }
    },
}


def render(namespace: str, uid: str, spec: dict[str, Any], name: str = "canary") -> list[dict[str, Any]]:
    """Everything a job gets."""
    document = {
        "metadata": {"name": name, "namespace": namespace, "uid": uid},
        "spec": merged(SPEC, spec),
    }
    job = TraceRLJob.model_validate(document)
    return wanted(job, uid, EVERYTHING, served=frozenset({"JobSet"}), token=TOKEN, restarts=0)


def path(ref: Ref, namespace: str) -> str:
    """Path of an object on the server."""
    group = "/api/v1" if ref.api_version == "v1" else f"/apis/{ref.api_version}"
    return f"{group}/namespaces/{namespace}/{PLURALS[ref.kind]}/{ref.name}"


def apply(server: ApiServer, namespace: str, document: dict[str, Any], *, dry_run: bool) -> dict[str, Any]:
    """Apply on the server's side, refusing fields that are not known."""
    query = f"fieldManager=tracerl.dev/operator&force=true&fieldValidation=Strict{'&dryRun=All' * dry_run}"
    where = path(Apply(document).ref, namespace)
    answer: dict[str, Any] = server.request("PATCH", f"{where}?{query}", document, kind="apply-patch+yaml")
    return answer


def create_pod(
    server: ApiServer, namespace: str, template: dict[str, Any], name: str = "p"
) -> dict[str, Any]:
    """Try a pod template as a pod."""
    index = {"batch.kubernetes.io/job-completion-index": "0"}
    metadata = {**template["metadata"], "name": name, "namespace": namespace}
    metadata["labels"] = {**metadata["labels"], **index}
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": template["spec"]}
    query = "dryRun=All&fieldValidation=Strict"
    answer: dict[str, Any] = server.request("POST", f"/api/v1/namespaces/{namespace}/pods?{query}", pod)
    return answer


def namespace(server: ApiServer, name: str, level: str) -> str:
    """Make a namespace with the accounts that pods need, since no controller makes them here."""
    labels = {"pod-security.kubernetes.io/enforce": level}
    server.request("POST", "/api/v1/namespaces", {"metadata": {"name": name, "labels": labels}})
    for account in ("default", "canary-trainer"):
        where = f"/api/v1/namespaces/{name}/serviceaccounts"
        server.request("POST", where, {"metadata": {"name": account}})
    return name


@pytest.fixture(scope="module")
def restricted(server: ApiServer) -> str:
    return namespace(server, "restricted", "restricted")


@pytest.fixture(scope="module")
def privileged(server: ApiServer) -> str:
    return namespace(server, "privileged", "privileged")


@pytest.fixture(scope="module")
def jobsets(server: ApiServer) -> None:
    """The server knows JobSets, by their own definition."""
    server.define(definition("JobSet"))


@pytest.fixture
def job(server: ApiServer, restricted: str) -> Iterator[dict[str, Any]]:
    """A job that is stored, and gone afterwards."""
    document = {
        "apiVersion": "tracerl.dev/v1alpha1",
        "kind": "TraceRLJob",
        "metadata": {"name": "canary"},
        "spec": SPEC,
    }
    where = f"/apis/tracerl.dev/v1alpha1/namespaces/{restricted}/tracerljobs"
    yield server.request("POST", where, document)
    if server.request("GET", where)["items"]:
        change = {"metadata": {"finalizers": None}}
        server.request("PATCH", f"{where}/canary", change, kind="merge-patch+json")
        server.request("DELETE", f"{where}/canary")


@pytest.mark.parametrize("shape", RESTRICTED)
def test_core_objects_are_taken(server: ApiServer, restricted: str, shape: str) -> None:
    for document in render(restricted, "some-uid", RESTRICTED[shape]):
        if document["kind"] in PLURALS and document["kind"] != "JobSet":
            apply(server, restricted, document, dry_run=True)


def jobs_of(namespace: str, spec: dict[str, Any]) -> list[dict[str, Any]]:
    jobset = next(o for o in render(namespace, "some-uid", spec) if o["kind"] == "JobSet")
    jobs: list[dict[str, Any]] = jobset["spec"]["replicatedJobs"]
    return jobs


@pytest.mark.parametrize("shape", RESTRICTED)
def test_pods_are_taken_where_restricted_is_enforced(server: ApiServer, restricted: str, shape: str) -> None:
    for job in jobs_of(restricted, RESTRICTED[shape]):
        template = job["template"]["spec"]["template"]
        pod = create_pod(server, restricted, template)
        # The server adds no token where none is wanted.
        mounted = json.dumps(pod["spec"]).count("serviceAccountToken")
        assert mounted == json.dumps(template["spec"]).count("serviceAccountToken")


@pytest.mark.parametrize("shape", RESTRICTED)
def test_jobs_of_the_jobset_are_taken(server: ApiServer, restricted: str, shape: str) -> None:
    for job in jobs_of(restricted, RESTRICTED[shape]):
        body = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "j"}, **job["template"]}
        where = f"/apis/batch/v1/namespaces/{restricted}/jobs?dryRun=All&fieldValidation=Strict"
        server.request("POST", where, body)


@pytest.mark.parametrize("shape", [*RESTRICTED, "node"])
@pytest.mark.usefixtures("jobsets")
def test_jobsets_are_taken(server: ApiServer, restricted: str, shape: str) -> None:
    spec = RESTRICTED.get(shape, NODE | nodes(2))
    jobset = render(restricted, "some-uid", spec)[-1]
    answer = apply(server, restricted, jobset, dry_run=True)
    template = answer["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]
    assert template["spec"]["securityContext"]["runAsUser"] == 65532


def test_rings_of_nodes_need_a_namespace_that_allows_them(
    server: ApiServer, restricted: str, privileged: str
) -> None:
    for job in jobs_of(restricted, NODE | nodes(2)):
        template = job["template"]["spec"]["template"]
        with pytest.raises(RefusedError, match="hostPath"):
            create_pod(server, restricted, template)
        create_pod(server, privileged, template)
    pod = cleaning_pod("canary", privileged, "some-uid", "node-1", "example.org/rollout:1")
    where = f"/api/v1/namespaces/{privileged}/pods?dryRun=All&fieldValidation=Strict"
    server.request("POST", where, pod)


@pytest.mark.usefixtures("jobsets")
def test_nothing_is_applied_twice(server: ApiServer, restricted: str, job: dict[str, Any]) -> None:
    """What the server stored, with its defaults, is what was wanted; its status takes ours."""
    observed = Observed(EVERYTHING, TOKEN, served=frozenset({"JobSet"}), pod_security="restricted")
    now = datetime(2026, 11, 29, 12, 0, tzinfo=UTC)
    first = reconcile(job, observed, now)
    assert {one.ref.kind for one in first.apply} == PLURALS.keys() - {"TraceRLJob", "PodMonitor"}
    objects = {one.ref: apply(server, restricted, one.document, dry_run=False) for one in first.apply}
    assert first.status is not None
    where = path(Ref("tracerl.dev/v1alpha1", "TraceRLJob", "canary"), restricted)
    change = {"status": first.status}
    stored = server.request(
        "PATCH", f"{where}/status?fieldValidation=Strict", change, kind="merge-patch+json"
    )
    second = reconcile(stored, replace(observed, objects=objects), now)
    assert second.apply == ()
    assert second.delete == ()
    third = reconcile(
        {**stored, "status": second.status or stored["status"]}, replace(observed, objects=objects), now
    )
    # Nothing but a look at why its pods are not there, in a while.
    assert replace(third, look_again_at=None) == Decision()
    for ref in objects:
        server.request("DELETE", path(ref, restricted))


def test_a_pod_monitor_is_taken(server: ApiServer, restricted: str) -> None:
    server.define(definition("PodMonitor"))
    document = {"metadata": {"name": "canary", "namespace": restricted, "uid": "some-uid"}, "spec": SPEC}
    parsed = TraceRLJob.model_validate(document)
    objects = kept_right(parsed, "some-uid", EVERYTHING, served=frozenset({"PodMonitor"}))
    (monitor,) = [each for each in objects if each["kind"] == "PodMonitor"]
    apply(server, restricted, monitor, dry_run=True)


def test_the_token_of_whoever_came_first_stays(server: ApiServer, restricted: str) -> None:
    """Two operators may make it at once; half of the pods with another token would be refused by the rest."""
    (first,) = [each for each in render(restricted, "some-uid", {}) if each["kind"] == "Secret"]
    first["metadata"].pop("ownerReferences")
    second = {**first, "stringData": {"token": "ab" * 32}}
    apply(server, restricted, first, dry_run=False)
    apply(server, restricted, first, dry_run=False)
    with pytest.raises(RefusedError, match="immutable"):
        apply(server, restricted, second, dry_run=False)
    server.request("DELETE", path(Apply(first).ref, restricted))


def test_a_trainer_may_patch_its_progress_and_nothing_else(server: ApiServer, restricted: str) -> None:
    documents = render(restricted, "some-uid", {})
    made = [d for d in documents if d["kind"] != "JobSet"]
    for document in made:
        document["metadata"].pop("ownerReferences")
        apply(server, restricted, document, dry_run=False)
    user = f"--as=system:serviceaccount:{restricted}:canary-trainer"
    patch = '--patch={"data": {"progress": "{}"}}'

    def change(kind: str, name: str) -> str:
        return server.kubectl("patch", kind, name, "-n", restricted, "--type=merge", patch, user)

    # kubectl reads what it patches, which is more than the trainer may; so the server is asked about it.
    def may(verb: str, what: str) -> bool:
        try:
            return "yes" in server.kubectl("auth", "can-i", verb, what, "-n", restricted, user)
        except RuntimeError:
            return False

    assert may("patch", "configmaps/canary-progress")
    for verb, what in (
        ("get", "configmaps/canary-progress"),
        ("delete", "configmaps/canary-progress"),
        ("update", "configmaps/canary-progress"),
        ("patch", "configmaps/canary-job"),
        ("patch", "configmaps"),
        ("create", "configmaps"),
        ("get", "secrets/canary-token"),
        ("list", "secrets"),
        ("patch", "tracerljobs.tracerl.dev/canary"),
        ("create", "pods"),
    ):
        assert not may(verb, what), (verb, what)
    with pytest.raises(RuntimeError, match="forbidden"):
        change("configmap", "canary-job")
    for document in made:
        server.request("DELETE", path(Apply(document).ref, restricted))


def test_the_finalizer_is_the_operators_to_set_and_to_remove(
    server: ApiServer, restricted: str, job: dict[str, Any]
) -> None:
    uid = job["metadata"]["uid"]
    marks = job_marks("canary", restricted, uid, ["node-1", "node-2"])
    marked = apply(server, restricted, marks, dry_run=False)
    assert marked["metadata"]["finalizers"] == ["tracerl.dev/node-ring"]
    assert marked["metadata"]["annotations"] == {"tracerl.dev/ring-nodes": "node-1,node-2"}
    assert marked["spec"] == job["spec"]
    where = path(Apply(marks).ref, restricted)
    server.request("DELETE", where)
    assert server.request("GET", where)["metadata"]["deletionTimestamp"]
    with pytest.raises(RefusedError, match="uid"):
        apply(server, restricted, job_marks("canary", restricted, "another", None), dry_run=False)
    apply(server, restricted, job_marks("canary", restricted, uid, None), dry_run=False)
    with pytest.raises(RefusedError, match="not found"):
        server.request("GET", where)
