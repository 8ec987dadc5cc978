"""The operator as a process on a real API server; what JobSet's controller and a kubelet do, the tests do."""

from __future__ import annotations

import base64
import json
import random
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from api_server import ApiServer, RefusedError
from definitions import compute_domains, definition
from operator_process import JOBS, JOBSETS, ROOT, OperatorProcess, Space, eventually
from small_cluster import SPEC, merged
from test_any_observation import mutate

MANIFESTS = 500
FOREIGN = "kueue.x-k8s.io/multikueue"
pytestmark = pytest.mark.timeout(600)


def manifest(name: str = "canary", **spec: Any) -> dict[str, Any]:
    return {
        "apiVersion": "tracerl.dev/v1alpha1",
        "kind": "TraceRLJob",
        "metadata": {"name": name},
        "spec": merged(SPEC, spec),
    }


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiServer]:
    """An API server that knows TraceRLJobs and JobSets."""
    with ApiServer(tmp_path_factory.mktemp("rig")) as server:
        server.define(yaml.safe_load((ROOT / "crds/tracerljobs.yaml").read_text()))
        server.define(definition("JobSet"))
        yield server


@pytest.fixture(scope="module")
def operator(rig: ApiServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[OperatorProcess]:
    """The operator of the whole cluster, which no test may end, and which never had a fault."""
    with OperatorProcess(rig.kubeconfig, tmp_path_factory.mktemp("operator")) as process:
        yield process.wait_until_ready()
        assert process.process.poll() is None, process.text()
        assert process.metric("tracerl_operator_reconcile_errors_total", reason="Unexpected") == 0
        assert not [line for line in process.log() if "error" in line]


@pytest.fixture
def space(rig: ApiServer, request: pytest.FixtureRequest) -> Space:
    """A namespace for the test."""
    return Space(rig, request.node.name.replace("_", "-")[:50].strip("-"))


def running(space: Space, **spec: Any) -> None:
    """Create a job and bring it to where its pod is ready."""
    space.create(manifest(**spec))
    eventually(space.jobset)
    space.run_pod()
    eventually(lambda: space.condition("Ready")["status"] == "True")


# -- the life of a job ------------------------------------------------------------------------------------


@pytest.mark.usefixtures("operator")
def test_from_apply_to_complete(space: Space) -> None:
    space.create(manifest())
    eventually(lambda: space.condition("Ready")["reason"] == "Starting")
    assert space.names(JOBSETS, "jobsets") == {"canary"}
    assert space.names("/api/v1", "configmaps") == {"canary-job", "canary-progress"}
    assert space.names("/api/v1", "secrets") == {"canary-token"}
    for plural in ("roles", "rolebindings"):
        assert space.names("/apis/rbac.authorization.k8s.io/v1", plural) == {"canary-trainer"}
    space.run_pod(ready=False)
    space.run_pod()
    job = eventually(lambda: space.condition("Ready")["status"] == "True" and space.job())
    assert job["status"]["ready"] == "1/1"
    assert job["status"]["summary"] == "Running"
    eventually(lambda: space.events() == ["Running"])
    space.jobset_ends("Completed")
    job = eventually(lambda: space.job()["status"].get("terminal") and space.job())
    assert job["status"]["terminal"] == "Complete"
    assert [c["type"] for c in job["status"]["conditions"] if c["status"] == "True"] == ["Complete"]
    eventually(lambda: space.events() == ["Running", "Completed"])


@pytest.mark.usefixtures("operator")
def test_nothing_of_a_users_job_is_written_but_its_status(space: Space) -> None:
    running(space)
    job = space.job()
    assert job["metadata"].keys().isdisjoint({"annotations", "finalizers", "labels"})
    writers = {(entry["manager"], entry.get("subresource", "")) for entry in job["metadata"]["managedFields"]}
    assert {writer for writer in writers if writer[0] == "tracerl.dev/operator"} == {
        ("tracerl.dev/operator", "status")
    }
    assert len(writers) == 2  # and whoever created it


@pytest.mark.usefixtures("operator")
def test_the_token_is_made_once_and_never_logged(space: Space, operator: OperatorProcess) -> None:
    running(space)
    path = space.path("/api/v1", "secrets", "canary-token")
    token = space.server.request("GET", path)["data"]["token"]
    space.edit({"metadata": {"labels": {"a": "b"}}})
    space.run_pod(ready=False)
    eventually(lambda: space.condition("Ready")["status"] == "False")
    assert space.server.request("GET", path)["data"]["token"] == token
    assert base64.b64decode(token).decode() not in operator.text()


@pytest.mark.usefixtures("operator")
def test_suspended_and_resumed(space: Space) -> None:
    running(space)
    before = space.jobset()["metadata"]["uid"]
    space.edit({"spec": {"suspend": True}})
    # No garbage collector runs here: the pod's end and the finalizer's are the test's.
    eventually(lambda: "deletionTimestamp" in space.jobset()["metadata"])
    assert "foregroundDeletion" in space.jobset()["metadata"]["finalizers"]
    space.delete_pod()
    change = {"metadata": {"finalizers": None}}
    where = space.path(JOBSETS, "jobsets", "canary")
    space.server.request("PATCH", where, change, kind="merge-patch+json")
    eventually(lambda: space.condition("Suspended")["status"] == "True")
    assert space.names(JOBSETS, "jobsets") == set()
    space.edit({"spec": {"suspend": False}})
    eventually(lambda: space.jobset()["metadata"]["uid"] != before)
    space.run_pod()
    eventually(lambda: space.condition("Ready")["status"] == "True")
    assert space.condition("Suspended")["reason"] == "Resumed"


@pytest.mark.usefixtures("operator")
def test_a_job_that_is_done_is_deleted_when_its_time_is_over(space: Space) -> None:
    running(space, ttlSecondsAfterFinished=1)
    space.jobset_ends("Completed")
    eventually(lambda: space.job()["status"].get("terminal"))

    def gone() -> bool:
        try:
            space.job()
        except RefusedError as error:
            return "not found" in str(error)
        return False

    eventually(gone)


def test_a_deleted_job_is_left_alone(space: Space, operator: OperatorProcess) -> None:
    running(space)
    before = operator.metric("tracerl_operator_reconcile_duration_seconds_count", result="gone")
    space.server.request("DELETE", space.path(JOBS, "tracerljobs", "canary"))
    eventually(
        lambda: operator.metric("tracerl_operator_reconcile_duration_seconds_count", result="gone") > before
    )
    # Its objects would go with their owner; their changes bring nothing back.
    writes = operator.writes()
    space.jobset_ends("Failed")
    wait_for_a_look(space, operator)
    assert operator.writes() == writes


@pytest.mark.usefixtures("operator")
def test_a_job_is_made_again_under_its_name(space: Space) -> None:
    running(space)
    before = space.jobset()["metadata"]["uid"]
    space.server.request("DELETE", space.path(JOBS, "tracerljobs", "canary"))
    space.create(manifest())
    condition = eventually(lambda: space.condition("Ready"))
    assert "of an earlier job of this name is being removed" in condition["message"]
    # What no garbage collector does here.
    space.delete_pod()
    roles = "/apis/rbac.authorization.k8s.io/v1"
    for root, plural in ((JOBSETS, "jobsets"), (roles, "roles"), (roles, "rolebindings")):
        for name in space.names(root, plural):
            space.server.request("DELETE", space.path(root, plural, name))
    for plural in ("secrets", "serviceaccounts", "configmaps"):
        for name in space.names("/api/v1", plural):
            space.server.request("DELETE", space.path("/api/v1", plural, name))
    eventually(lambda: space.jobset()["metadata"]["uid"] != before)
    owner = space.job()["metadata"]["uid"]
    token = space.server.request("GET", space.path("/api/v1", "secrets", "canary-token"))
    assert token["metadata"]["ownerReferences"][0]["uid"] == owner


def wait_for_a_look(space: Space, operator: OperatorProcess) -> None:
    """Wait until the operator has seen something that was made after all that the test did before."""
    name = "tracerl_operator_reconcile_duration_seconds_count"
    seen = operator.metric(name, result="foreign")
    space.create(manifest(f"probe-{random.randrange(10**9)}", managedBy=FOREIGN))
    eventually(lambda: operator.metric(name, result="foreign") > seen)


def test_jobs_of_others_are_not_touched(space: Space, operator: OperatorProcess) -> None:
    space.create(manifest(managedBy=FOREIGN))
    wait_for_a_look(space, operator)
    assert "status" not in space.job()
    assert space.names("/api/v1", "configmaps") == set()


# -- what is refused --------------------------------------------------------------------------------------


@pytest.mark.usefixtures("operator")
def test_what_the_server_refuses_is_a_condition(space: Space) -> None:
    quota = {"metadata": {"name": "q"}, "spec": {"hard": {"count/configmaps": "0"}}}
    made = space.server.request("POST", space.path("/api/v1", "resourcequotas"), quota)
    # Nobody counts here, so a quota says nothing until its status does.
    status = {"status": {"hard": made["spec"]["hard"], "used": {"count/configmaps": "0"}}}
    where = space.path("/api/v1", "resourcequotas", "q")
    space.server.request("PATCH", f"{where}/status", status, kind="merge-patch+json")
    space.create(manifest())
    condition = eventually(lambda: space.condition("Ready"))
    assert condition["reason"] == "Configuration"
    assert "exceeded quota: q" in condition["message"]
    assert space.names(JOBSETS, "jobsets") == set()
    eventually(lambda: space.events() == ["Configuration"])
    space.server.request("DELETE", where)
    # A change of anything of the job's brings the next try, and so does a minute.
    space.edit({"metadata": {"labels": {"a": "b"}}})
    eventually(space.jobset)


@pytest.mark.usefixtures("operator")
def test_an_object_of_somebody_else_stays(space: Space) -> None:
    theirs = {"metadata": {"name": "canary-job"}, "data": {"theirs": "yes"}}
    space.server.request("POST", space.path("/api/v1", "configmaps"), theirs)
    space.create(manifest())
    condition = eventually(lambda: space.condition("Ready"))
    assert "ConfigMap/canary-job is there and is not this job's" in condition["message"]
    found = space.server.request("GET", space.path("/api/v1", "configmaps", "canary-job"))
    assert found["data"] == theirs["data"]
    assert "ownerReferences" not in found["metadata"]


@pytest.mark.usefixtures("operator")
def test_what_a_running_job_needs_is_put_right(space: Space) -> None:
    running(space)
    roles = space.path("/apis/rbac.authorization.k8s.io/v1", "roles", "canary-trainer")
    rules = space.server.request("GET", roles)["rules"]
    space.server.request("DELETE", roles)
    eventually(lambda: space.server.request("GET", roles)["rules"] == rules)
    space.server.request("PATCH", roles, {"rules": []}, kind="merge-patch+json")
    eventually(lambda: space.server.request("GET", roles)["rules"] == rules)
    unlabelled = {"metadata": {"labels": None}}
    space.server.request("PATCH", roles, unlabelled, kind="merge-patch+json")
    eventually(lambda: "canary-trainer" in space.names("/apis/rbac.authorization.k8s.io/v1", "roles"))
    config = space.path("/api/v1", "configmaps", "canary-job")
    space.server.request("DELETE", config)
    eventually(lambda: "was deleted" in space.condition("Ready")["message"])


PROGRESS = [
    "",
    "nonsense",
    "[" * 4000,
    "{" + '"step": 3,' * 500 + "}",
    '{"step": -1}',
    '{"step": 31, "policyVersion": 1}',
    '{"step": 1e400}',
    '{"terminal": "Complete", "step": 30, "policyVersion": 30}',
    '{"step": 3, "rewardMean": "NaN; rm -rf /"}',
]


def test_nonsense_in_the_progress_map_changes_nothing_else(space: Space, operator: OperatorProcess) -> None:
    running(space)
    where = space.path("/api/v1", "configmaps", "canary-progress")
    before = space.job()["status"]
    for text in PROGRESS:
        space.server.request("PATCH", where, {"data": {"progress": text}}, kind="merge-patch+json")
    space.server.request("PATCH", where, {"data": {"canary": "x" * 10**5}}, kind="merge-patch+json")
    right = json.dumps({"step": 3, "policyVersion": 3})
    space.server.request("PATCH", where, {"data": {"progress": right}}, kind="merge-patch+json")
    status = eventually(lambda: space.job()["status"]["progress"]["step"] == 3 and space.job()["status"])
    assert {**status, "progress": None} == {**before, "progress": None}
    assert operator.metric("tracerl_operator_reconcile_errors_total", reason="Unexpected") == 0


def test_mutated_manifests_get_a_condition_and_never_a_loop(space: Space, operator: OperatorProcess) -> None:
    chance = random.Random(7)
    taken = []
    requests = operator.metric("tracerl_operator_api_requests_total")
    for number in range(MANIFESTS):
        job = manifest(f"m-{number}")
        for _ in range(chance.randint(1, 3)):
            mutate(job["spec"], chance, set())
        try:
            space.create(job)
        except (RefusedError, UnicodeEncodeError, ValueError):
            continue
        taken.append(job["metadata"]["name"])
    assert len(taken) > 20

    def shown() -> set[str]:
        found = space.server.request("GET", space.path(JOBS, "tracerljobs"))["items"]
        foreign = {j["metadata"]["name"] for j in found if j["spec"].get("managedBy")}
        return set(taken) - {j["metadata"]["name"] for j in found if j.get("status")} - foreign

    eventually(lambda: not shown())
    eventually(lambda: operator.metric("tracerl_operator_queue_depth") == 0)
    assert operator.metric("tracerl_operator_reconcile_errors_total", reason="Unexpected") == 0
    calm = operator.writes()
    looks = operator.metric("tracerl_operator_reconcile_duration_seconds_count")
    wait_for_the_clock(5)
    assert operator.writes() == calm
    # Jobs whose pods do not come are asked about after ten seconds, and then once a minute.
    assert operator.metric("tracerl_operator_reconcile_duration_seconds_count") - looks <= len(taken)
    assert operator.metric("tracerl_operator_api_requests_total") - requests < 25 * len(taken)


def wait_for_the_clock(seconds: float) -> None:
    """Let time pass in which nothing must happen; nothing tells when that is over."""
    time.sleep(seconds)


EDITED, ROUNDS = 20, 4
"""Jobs, and edits of each before and after the first look at the memory; more of them would be slowed."""
GROWTH = 2 << 20
"""Bytes that the second half of the edits may add: 26 KiB each. To keep what was read would add more."""


def running_jobs(alone: Space, count: int) -> list[str]:
    """Create jobs whose pods run, and wait until all are ready: their names."""
    names = [f"job-{number}" for number in range(count)]
    for name in names:
        alone.create(manifest(name))
    for name in names:
        eventually(lambda name=name: alone.jobset(name))
        alone.run_pod(name)
    for name in names:
        eventually(lambda name=name: alone.condition("Ready", name)["status"] == "True")
    return names


def test_edits_without_end_take_no_memory(quiet: ApiServer, alone: Space, tmp_path: Path) -> None:
    """The soak of benchmarks/operator, whose committed curve is of half an hour, in a few seconds."""
    flags = ("--namespace", alone.name, "--peering", "none")
    with OperatorProcess(quiet.kubeconfig, tmp_path, *flags) as operator:
        operator.wait_until_ready()
        names = running_jobs(alone, EDITED)

        def edit(rounds: range) -> int:
            """Edit each job so often, wait until all show it; the operator's resident bytes."""
            for number in rounds:
                for name in names:
                    alone.edit({"spec": {"ttlSecondsAfterFinished": 10**6 + number}}, name)

            def shown(name: str) -> bool:
                job = alone.job(name)
                return bool(job["status"]["observedGeneration"] == job["metadata"]["generation"])

            for name in names:
                eventually(lambda name=name: shown(name))
            status = Path(f"/proc/{operator.process.pid}/status").read_text()
            return next(int(line.split()[1]) << 10 for line in status.splitlines() if "VmRSS" in line)

        warm = edit(range(ROUNDS))
        requests = operator.metric("tracerl_operator_api_requests_total")
        grown = edit(range(ROUNDS, 2 * ROUNDS)) - warm
        requests = operator.metric("tracerl_operator_api_requests_total") - requests
        assert grown < GROWTH, f"{grown / 2**20:.1f} MiB more after {EDITED * ROUNDS} edits"
        # An edit is a look and a write of the status; several quick ones may be one.
        assert 0 < requests <= 4 * EDITED * ROUNDS
        assert operator.metric("tracerl_operator_reconcile_errors_total") == 0


# -- operators that end, and several of them --------------------------------------------------------------


@pytest.fixture(scope="module")
def quiet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiServer]:
    """An API server on which each test runs operators of its own."""
    with ApiServer(tmp_path_factory.mktemp("quiet")) as server:
        server.define(yaml.safe_load((ROOT / "crds/tracerljobs.yaml").read_text()))
        server.define(definition("JobSet"))
        yield server


@pytest.fixture
def alone(quiet: ApiServer, request: pytest.FixtureRequest) -> Space:
    """A namespace that no other operator looks at."""
    return Space(quiet, request.node.name.replace("_", "-")[:50].strip("-"))


def test_jobset_is_installed_and_removed_while_the_operator_runs(tmp_path: Path) -> None:
    (tmp_path / "server").mkdir()
    with ApiServer(tmp_path / "server") as bare:
        bare.define(yaml.safe_load((ROOT / "crds/tracerljobs.yaml").read_text()))
        space = Space(bare, "team")
        with OperatorProcess(bare.kubeconfig, tmp_path) as operator:
            operator.wait_until_ready()
            space.create(manifest())
            condition = eventually(lambda: space.condition("Ready"))
            assert "the cluster has no JobSets" in condition["message"]
            bare.define(definition("JobSet"))
            eventually(space.jobset)
            space.run_pod()
            eventually(lambda: space.condition("Ready")["status"] == "True")
            eventually(lambda: space.events() == ["Configuration", "Running"])
            eventually(lambda: operator.ask("/readyz")[0] == 200)
            name = definition("JobSet")["metadata"]["name"]
            bare.request("DELETE", f"/apis/apiextensions.k8s.io/v1/customresourcedefinitions/{name}")
            eventually(lambda: "the cluster has no JobSets" in space.condition("Ready")["message"])
            eventually(lambda: operator.ask("/readyz")[0] == 200)
            assert operator.metric("tracerl_operator_reconcile_errors_total", reason="Unexpected") == 0
            code, seconds = operator.terminate()
            assert code == 0
            assert seconds < 10


DOMAINS = "/apis/resource.nvidia.com/v1beta1"
SPREAD: dict[str, Any] = {
    "rollout": {"nodes": 2, "gpusPerNode": 1},
    "trainer": {"nodes": 2, "gpusPerNode": 1, "parallelism": {"data": 2}},
    "placement": {"fabric": "ComputeDomain"},
}


def test_a_job_gets_the_compute_domain_that_it_asks_for(
    quiet: ApiServer, alone: Space, tmp_path: Path
) -> None:
    with OperatorProcess(quiet.kubeconfig, tmp_path, "--namespace", alone.name) as operator:
        operator.wait_until_ready()
        alone.create(manifest(**SPREAD))
        condition = eventually(lambda: alone.condition("Ready"))
        assert (condition["reason"], condition["status"]) == ("Configuration", "False")
        assert "the cluster has no ComputeDomains" in condition["message"]
        assert "install NVIDIA's DRA driver, or write fabric: None" in condition["message"]
        assert alone.names(JOBSETS, "jobsets") == set()
        crd = compute_domains()
        quiet.define(crd)
        try:
            where = alone.path(DOMAINS, "computedomains", "canary")
            domain = eventually(lambda: quiet.request("GET", where))
            channel = {"allocationMode": "Single", "resourceClaimTemplate": {"name": "canary-channel"}}
            assert domain["spec"] == {"numNodes": 0, "channel": channel}
            (owner,) = domain["metadata"]["ownerReferences"]
            assert (owner["uid"], owner["controller"]) == (alone.job()["metadata"]["uid"], True)
            (node,) = eventually(alone.jobset)["spec"]["replicatedJobs"]
            pod = node["template"]["spec"]["template"]["spec"]
            assert [c["resourceClaimTemplateName"] for c in pod["resourceClaims"]] == ["canary-channel"]
            # Somebody takes it away, and it is put back.
            quiet.request("DELETE", where)
            eventually(lambda: quiet.request("GET", where)["metadata"]["uid"] != domain["metadata"]["uid"])
            assert operator.metric("tracerl_operator_reconcile_errors_total", reason="Unexpected") == 0
        finally:
            definitions = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
            quiet.request("DELETE", f"{definitions}/{crd['metadata']['name']}")


def test_the_api_server_ends_and_comes_back(quiet: ApiServer, alone: Space, tmp_path: Path) -> None:
    with OperatorProcess(quiet.kubeconfig, tmp_path, "--namespace", alone.name) as operator:
        operator.wait_until_ready()
        running(alone)
        quiet.stop()
        try:
            eventually(
                lambda: operator.metric("tracerl_operator_api_requests_total", verb="GET", code="0") > 1, 60
            )
            assert operator.metric("tracerl_operator_leads") in (0, 1)
            assert operator.ask("/healthz")[0] == 200
        finally:
            quiet.start()
        quiet.wait()
        alone.run_pod(ready=False)
        eventually(lambda: alone.condition("Ready")["status"] == "False")
        alone.run_pod()
        eventually(lambda: alone.condition("Ready")["status"] == "True")
        assert alone.names(JOBSETS, "jobsets") == {"canary"}
        assert "Configuration" not in alone.events()
        assert operator.process.poll() is None
        assert operator.metric("tracerl_operator_reconcile_errors_total", reason="Unexpected") == 0


def test_killed_and_started_again(quiet: ApiServer, alone: Space, tmp_path: Path) -> None:
    flags = ("--namespace", alone.name)
    with OperatorProcess(quiet.kubeconfig, tmp_path, *flags) as first:
        first.wait_until_ready()
        running(alone)
        first.kill()
    alone.run_pod(ready=False)
    with OperatorProcess(quiet.kubeconfig, tmp_path, *flags) as second:
        eventually(lambda: alone.condition("Ready")["status"] == "False")
        alone.run_pod()
        eventually(lambda: alone.condition("Ready")["status"] == "True")
        alone.jobset_ends("Completed")
        eventually(lambda: alone.job()["status"].get("terminal"))
        eventually(lambda: alone.events()[-1] == "Completed")
        for line in second.log():
            assert {"time", "level", "logger", "message"} <= line.keys()
        # What becomes of a job is there by its name and the reason of the condition.
        told = [line for line in second.log() if line.get("reason") == "Completed"]
        assert [(line["namespace"], line["job"]) for line in told] == [(alone.name, "canary")]


def test_of_two_operators_one_stands_by_and_takes_over(
    quiet: ApiServer, alone: Space, tmp_path: Path
) -> None:
    flags = ("--namespace", alone.name)
    with (
        OperatorProcess(quiet.kubeconfig, tmp_path, *flags) as one,
        OperatorProcess(quiet.kubeconfig, tmp_path, *flags) as other,
    ):
        for operator in (one, other):
            operator.wait_until_ready()
        leads = "tracerl_operator_leads"
        eventually(lambda: one.metric(leads) + other.metric(leads) == 1)
        first, second = (one, other) if one.metric(leads) else (other, one)
        # Whoever came second may have asked for the lease, too.
        before = second.writes()
        running(alone)
        assert second.writes() == before
        assert second.ask("/readyz")[0] == 200
        first.kill()
        alone.run_pod(ready=False)
        eventually(lambda: alone.condition("Ready")["status"] == "False")
        assert second.metric(leads) == 1
        with OperatorProcess(quiet.kubeconfig, tmp_path, *flags) as third:
            third.wait_until_ready()
            assert third.metric(leads) == 0
            second.terminate()
            alone.run_pod()
            eventually(lambda: alone.condition("Ready")["status"] == "True")
            alone.jobset_ends("Completed")
            eventually(lambda: alone.events() == ["Running", "Starting", "Running", "Completed"])


def test_two_operators_at_once_agree(quiet: ApiServer, alone: Space, tmp_path: Path) -> None:
    """Where nobody keeps them apart, whatever both do is done once."""
    flags = ("--namespace", alone.name, "--peering", "none")
    with (
        OperatorProcess(quiet.kubeconfig, tmp_path, *flags) as one,
        OperatorProcess(quiet.kubeconfig, tmp_path, *flags) as other,
    ):
        for operator in (one, other):
            operator.wait_until_ready()
        names = running_jobs(alone, 10)
        for name in names:
            alone.jobset_ends("Completed", name)
        for name in names:
            eventually(lambda name=name: alone.job(name)["status"].get("terminal"))
            eventually(lambda name=name: len(alone.events(name)) > 1)
            # One whose caches lag behind the other's may say meanwhile that it starts.
            assert [each for each in alone.events(name) if each != "Starting"] == ["Running", "Completed"], (
                alone.events(name),
                alone.server.request("GET", alone.path("/apis/events.k8s.io/v1", "events")),
            )
        for operator in (one, other):
            assert operator.metric("tracerl_operator_reconcile_errors_total", reason="Unexpected") == 0


# -- rights, and what is said where it cannot work --------------------------------------------------------

LOOK, MAKE = ["get", "list", "watch"], ["create", "patch"]
RIGHTS: list[tuple[str, str, list[str]]] = [
    ("tracerl.dev", "tracerljobs", [*LOOK, "patch", "delete"]),
    ("tracerl.dev", "tracerljobs/status", ["patch"]),
    ("tracerl.dev", "tracerljobs/finalizers", ["update"]),
    ("jobset.x-k8s.io", "jobsets", [*LOOK, *MAKE, "delete"]),
    ("", "pods", [*LOOK, *MAKE, "delete"]),
    ("", "configmaps", [*LOOK, *MAKE]),
    ("", "serviceaccounts", [*LOOK, *MAKE]),
    ("", "secrets", ["get", *MAKE]),
    ("", "namespaces", ["get"]),
    ("rbac.authorization.k8s.io", "rolebindings", [*LOOK, *MAKE]),
    ("events.k8s.io", "events", MAKE),
    ("coordination.k8s.io", "leases", ["get", "create", "update"]),
]
ROLES = ("rbac.authorization.k8s.io", "roles", [*LOOK, *MAKE])


def account(space: Space, rights: list[tuple[str, str, list[str]]], path: Path) -> Path:
    """An account with rights in its namespace alone, as a kubeconfig."""
    give(space, "operator", rights)
    accounts = space.path("/api/v1", "serviceaccounts")
    space.server.request("POST", accounts, {"metadata": {"name": "operator"}})
    token = space.server.request("POST", f"{accounts}/operator/token", {"spec": {}})["status"]["token"]
    content = json.loads(space.server.kubeconfig.read_text())
    content["users"][0]["user"]["token"] = token
    path.write_text(json.dumps(content))
    return path


def give(space: Space, name: str, rights: list[tuple[str, str, list[str]]]) -> None:
    """Give the account rights in its namespace."""
    rules = [{"apiGroups": [g], "resources": [r], "verbs": verbs} for g, r, verbs in rights]
    root = "/apis/rbac.authorization.k8s.io/v1"
    space.server.request("POST", space.path(root, "roles"), {"metadata": {"name": name}, "rules": rules})
    binding = {
        "metadata": {"name": name},
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": name},
        "subjects": [{"kind": "ServiceAccount", "name": "operator", "namespace": space.name}],
    }
    space.server.request("POST", space.path(root, "rolebindings"), binding)


def test_rights_in_one_namespace_are_enough_and_needed_to_be_ready(alone: Space, tmp_path: Path) -> None:
    config = account(alone, RIGHTS, tmp_path / "config")
    with OperatorProcess(config, tmp_path, "--namespace", alone.name) as operator:
        code = eventually(lambda: operator.ask("/readyz")[0])
        assert code == 503
        alone.create(manifest())
        eventually(lambda: "roles" in operator.text() and "the watches ended" in operator.text())
        assert operator.ask("/readyz")[0] == 503
        assert operator.ask("/healthz")[0] == 200
        assert "status" not in alone.job()
        give(alone, "more", [ROLES])
        eventually(lambda: operator.ask("/readyz")[0] == 200)
        eventually(alone.jobset)
        alone.run_pod()
        eventually(lambda: alone.condition("Ready")["status"] == "True")
        eventually(lambda: alone.events() == ["Running"])
        assert "customresourcedefinitions" not in operator.text()


@pytest.mark.parametrize(
    ("flags", "code", "sentence"),
    [
        (["--rollout-image", "a"], 2, "--trainer-image"),
        (["--rollout-image", "a", "--trainer-image", "b", "--listen", "here"], 2, "'here' is not HOST:PORT"),
        (["--rollout-image", "a", "--trainer-image", "b", "--pod-monitor-label", "x"], 2, "KEY=VALUE"),
        (["--rollout-image", "a", "--trainer-image", "b", "--what"], 2, "--what"),
        (["--rollout-image", "a", "--trainer-image", "b"], 1, "KUBECONFIG"),
    ],
)
def test_a_wrong_start_is_one_sentence(flags: list[str], code: int, sentence: str, tmp_path: Path) -> None:
    environment = {"PYTHONPATH": f"{ROOT}/operator:{ROOT}/jobs", "HOME": str(tmp_path)}
    command = [sys.executable, "-m", "tracerl_operator", *flags]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == code
    assert sentence in result.stderr
    assert result.stderr.count("\n") == 1
    assert result.stdout == ""


def test_a_start_without_rights_or_definition_is_one_sentence(
    quiet: ApiServer, alone: Space, tmp_path: Path
) -> None:
    config = account(alone, [], tmp_path / "config")
    with OperatorProcess(config, tmp_path) as operator:
        assert operator.process.wait(240) == 1
    (line,) = operator.text().splitlines()
    assert "cannot list resource" in line
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        where = f"127.0.0.1:{taken.getsockname()[1]}"
        with OperatorProcess(quiet.kubeconfig, tmp_path, "--listen", where) as operator:
            assert operator.process.wait(240) == 1
    (line,) = operator.text().splitlines()
    assert f"cannot listen on {where}" in line
