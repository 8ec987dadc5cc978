"""Where the scheduler puts the pods of jobs on GB200 nodes: four GPUs each, in two cliques, and tainted.

The nodes have no kubelet: pods are placed there, and that is all that is looked at.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from definitions import compute_domains
from live import TOLERATION, FakeNodes, Namespace, gb200, new_namespace
from small_cluster import merged
from trial import Document, Trial, condition, gpus

from cluster import Cluster

pytestmark = [pytest.mark.full, pytest.mark.timeout(600)]

CLIQUE = "nvidia.com/gpu.clique"
CLIQUES = ("one", "two")
NODES = gb200(CLIQUES)
HOST = {"kubernetes.io/arch": "arm64"}


@pytest.fixture(scope="module")
def machines(cluster: Cluster) -> Iterator[FakeNodes]:
    """Two cliques of two nodes."""
    with FakeNodes(cluster, NODES) as nodes:
        yield nodes


@pytest.fixture
def trial(cluster: Cluster, machines: FakeNodes) -> Iterator[Trial]:
    """A namespace that allows rings on nodes."""
    with new_namespace(cluster, labels={"pod-security.kubernetes.io/enforce": "privileged"}) as namespace:
        one = Trial(namespace)
        yield one
        for job in namespace.list("trj"):
            namespace.delete("trj", job["metadata"]["name"], wait=False)
        # No kubelet ends these pods, and the jobs' own cleaning pods.
        namespace.wait_for(lambda: _force_away(namespace), "the end of all jobs", 120)


def _force_away(namespace: Namespace) -> bool:
    """Do what the kubelets would do: end what is deleted, and run the pods that clean up."""
    for pod in namespace.pods():
        name = pod["metadata"]["name"]
        if "tracerl.dev/cleans-ring" in pod["metadata"]["labels"]:
            namespace.patch("pod", name, {"status": {"phase": "Succeeded"}}, subresource="status")
        else:
            namespace.delete_now(name)
    return not (namespace.list("trj") or namespace.list("jobsets") or namespace.pods())


def on_gb200(rollout: int, trainer: int, *, nodes: int = 2) -> Document:
    """Fields of a job whose roles ask for so many GPUs of a GB200 node each, by their templates."""
    there: Document = {"spec": {"tolerations": [TOLERATION], "nodeSelector": HOST}}
    return {
        "rollout": {"nodes": nodes, "template": merged(there, gpus("rollout", rollout))},
        "trainer": {
            "nodes": nodes,
            "parallelism": {"data": nodes},
            "weightSync": "Distributed",
            "template": merged(there, gpus("trainer", trainer)),
        },
    }


def places(trial: Trial, count: int, name: str = "job") -> dict[tuple[str, str], str]:
    """The node of each pod by role and index, once so many pods of a job are placed."""

    def placed() -> dict[tuple[str, str], str]:
        found = {}
        for pod in trial.pods(name):
            labels = pod["metadata"]["labels"]
            key = (
                labels["jobset.sigs.k8s.io/replicatedjob-name"],
                labels["batch.kubernetes.io/job-completion-index"],
            )
            if node := pod["spec"].get("nodeName"):
                found[key] = node
        return found if len(found) == count else {}

    return trial.namespace.wait_for(placed, f"{count} placed pods of {name}", 90)


def cliques(nodes: dict[Any, str]) -> set[str]:
    """The cliques of these nodes."""
    return {NODES[node][CLIQUE] for node in nodes.values()}


@pytest.mark.parametrize(("rollout", "trainer"), [(2, 2), (3, 1), (1, 3)])
def test_pairs_share_a_node_and_equals_do_not(trial: Trial, rollout: int, trainer: int) -> None:
    trial.start("job", on_gb200(rollout, trainer), {"placement": {"colocation": "Node"}})
    where = places(trial, 4)
    assert {where["trainer", index] for index in "01"} == {where["rollout", index] for index in "01"}
    for index in "01":
        assert where["trainer", index] == where["rollout", index]
    assert where["rollout", "0"] != where["rollout", "1"]


def test_four_pairs_fill_four_nodes(trial: Trial) -> None:
    trial.start("job", on_gb200(2, 2, nodes=4), {"placement": {"colocation": "Node"}})
    where = places(trial, 8)
    assert sorted(where["rollout", str(index)] for index in range(4)) == sorted(NODES)
    assert all(where["trainer", str(index)] == where["rollout", str(index)] for index in range(4))


@pytest.mark.parametrize("colocation", ["Pod", "Node", "None"])
def test_a_required_topology_keeps_a_job_in_one_clique(trial: Trial, colocation: str) -> None:
    placement = {"colocation": colocation, "topology": {"required": CLIQUE}}
    # Several, for one would be placed so by chance now and then.
    for number in range(3):
        trial.start(f"job-{number}", on_gb200(1, 1), {"placement": placement})
    for number in range(3):
        where = places(trial, 2 if colocation == "Pod" else 4, f"job-{number}")
        assert len(cliques(where)) == 1
        roles = {role for role, _ in where}
        assert all(where[role, "0"] != where[role, "1"] for role in roles)


def test_what_fits_no_clique_waits_and_says_so(trial: Trial) -> None:
    placement = {"colocation": "Pod", "topology": {"required": CLIQUE}}
    trial.start("job", on_gb200(2, 2, nodes=3), {"placement": placement})
    trial.wait_for("Unschedulable", "node", "ask for less", seconds=90)
    # Two of three fit: the default scheduler places what it can, a queue would not.
    assert len(cliques(places(trial, 2))) == 1


DRIVER = "channels.tests.tracerl.dev"


def channels(clique: str) -> list[Document]:
    """A class of devices, of which each node of a clique has one."""
    api = "resource.k8s.io/v1"
    select = [{"cel": {"expression": f"device.driver == '{DRIVER}'"}}]
    documents: list[Document] = [
        {
            "apiVersion": api,
            "kind": "DeviceClass",
            "metadata": {"name": DRIVER},
            "spec": {"selectors": select},
        }
    ]
    for name, labels in NODES.items():
        if labels[CLIQUE] == clique:
            spec = {
                "driver": DRIVER,
                "nodeName": name,
                "pool": {"name": name, "generation": 1, "resourceSliceCount": 1},
                "devices": [{"name": "channel-0"}],
            }
            documents.append(
                {"apiVersion": api, "kind": "ResourceSlice", "metadata": {"name": name}, "spec": spec}
            )
    return documents


@pytest.fixture
def fabric(cluster: Cluster, machines: FakeNodes) -> Iterator[None]:
    """ComputeDomains, and devices on the nodes of clique two; NVIDIA's controller is the test."""
    documents = [compute_domains(), *channels("two")]
    given = json.dumps({"apiVersion": "v1", "kind": "List", "items": documents})
    cluster.kubectl("apply", "-f", "-", input=given)
    name = documents[0]["metadata"]["name"]
    cluster.kubectl("wait", "--for=condition=Established", f"crd/{name}", "--timeout=60s")
    yield
    cluster.kubectl("delete", "-f", "-", "--timeout=60s", input=given)


@pytest.mark.usefixtures("fabric")
def test_a_compute_domain_comes_and_goes_with_its_job(trial: Trial) -> None:
    there: Document = {"spec": {"tolerations": [TOLERATION]}}
    role: Document = {"nodes": 2, "gpusPerNode": 1, "template": there}
    apart = {"parallelism": {"data": 2}, "weightSync": "Distributed"}
    placement = {"fabric": "ComputeDomain", "topology": {"required": CLIQUE}}
    trial.start("job", {"rollout": role, "trainer": role | apart, "placement": placement})
    domain = trial.namespace.wait_for(lambda: trial.namespace.find("computedomain", "job"), "the domain")
    (owner,) = domain["metadata"]["ownerReferences"]
    assert owner["uid"] == trial.namespace.get("trj", "job")["metadata"]["uid"]
    template = domain["spec"]["channel"]["resourceClaimTemplate"]["name"]
    # Its controller makes this template. While it does not run, a user is told.
    trial.wait_for("Configuration", "resource claim template", template, "not found", seconds=120)
    request = {"name": "channel", "exactly": {"deviceClassName": DRIVER}}
    trial.namespace.apply(
        {
            "apiVersion": "resource.k8s.io/v1",
            "kind": "ResourceClaimTemplate",
            "metadata": {"name": template},
            "spec": {"spec": {"devices": {"requests": [request]}}},
        }
    )
    where = places(trial, 2)
    assert cliques(where) == {"two"}
    assert where["node", "0"] != where["node", "1"]
    # Each pod has a device of its node, by the claim that its containers name.
    claims = trial.namespace.list("resourceclaims")
    allocated = {
        claim["status"]["reservedFor"][0]["uid"]: result["pool"]
        for claim in claims
        for result in claim["status"]["allocation"]["devices"]["results"]
    }
    assert allocated == {pod["metadata"]["uid"]: pod["spec"]["nodeName"] for pod in trial.pods()}
    trial.namespace.delete("trj", "job", wait=False)
    trial.namespace.wait_for(
        lambda: _force_away(trial.namespace) and not trial.namespace.list("computedomains"),
        "the end of the job and of its domain",
        120,
    )


def quota(gpus: int, local: str, topology: bool) -> list[Document]:
    """A queue with so many GPUs of the GB200 nodes."""
    api = "kueue.x-k8s.io/v1beta2"
    large = {"cpu": 1000, "memory": "1000Gi", "nvidia.com/gpu": gpus}
    resources = [{"name": name, "nominalQuota": count} for name, count in large.items()]
    flavor: Document = {"nodeLabels": HOST, "tolerations": [TOLERATION]}
    documents: list[Document] = []
    if topology:
        levels = [{"nodeLabel": CLIQUE}, {"nodeLabel": "kubernetes.io/hostname"}]
        documents.append(
            {"apiVersion": api, "kind": "Topology", "metadata": {"name": local}, "spec": {"levels": levels}}
        )
        flavor["topologyName"] = local
    group = {"coveredResources": list(large), "flavors": [{"name": local, "resources": resources}]}
    return [
        *documents,
        {"apiVersion": api, "kind": "ResourceFlavor", "metadata": {"name": local}, "spec": flavor},
        {
            "apiVersion": api,
            "kind": "ClusterQueue",
            "metadata": {"name": local},
            "spec": {"namespaceSelector": {}, "resourceGroups": [group]},
        },
        {
            "apiVersion": api,
            "kind": "LocalQueue",
            "metadata": {"name": "queue"},
            "spec": {"clusterQueue": local},
        },
    ]


@pytest.fixture
def topology() -> bool:
    """Whether the queue's flavor has one, of cliques and hosts."""
    return True


@pytest.fixture
def queue(trial: Trial, kueue: Cluster, topology: bool) -> Iterator[Trial]:
    """A namespace with the queue `queue`, of 16 GPUs."""
    name = trial.namespace.name
    documents = quota(16, name, topology)
    trial.namespace.wait_for(lambda: trial.namespace.apply(documents) or True, "Kueue's webhook", 90)
    yield trial
    for document in documents[:-1]:
        kueue.kubectl("delete", document["kind"], name, "--wait=false")


@pytest.mark.parametrize(("colocation", "topology"), [("Node", False), ("Pod", False), ("Pod", True)])
def test_of_two_jobs_that_do_not_both_fit_one_waits_whole(queue: Trial, colocation: str) -> None:
    # Twelve GPUs each of sixteen: half of the second would fit.
    placement = {"colocation": colocation, "queue": "queue"}
    count = 8 if colocation == "Node" else 4
    queue.start("first", on_gb200(2, 1, nodes=4), {"placement": placement})
    where = places(queue, count, "first")
    queue.start("second", on_gb200(2, 1, nodes=4), {"placement": placement})
    queue.wait_for("Queued", "queue", "nvidia.com/gpu", seconds=90, name="second")
    assert queue.status("second")["summary"] == "Queued"
    assert condition(queue.status("second"), "Suspended")["status"] == "True"
    assert not queue.pods("second")
    assert places(queue, count, "first") == where
    # The first gives its nodes back, and the second has them all.
    queue.namespace.patch("trj", "first", {"spec": {"suspend": True}})
    queue.namespace.wait_for(lambda: _gone(queue, "first"), "the end of the first job's pods", 120)
    again = places(queue, count, "second")
    assert len(set(again.values())) == 4
    if colocation == "Node":
        assert all(again["trainer", str(index)] == again["rollout", str(index)] for index in range(4))
    queue.wait(lambda status: status["summary"] == "Suspended", "suspended", 90, "first")


def _gone(trial: Trial, job: str) -> bool:
    """Do what the kubelets would do about pods that are deleted, until none is left."""
    for pod in trial.pods(job):
        if "deletionTimestamp" in pod["metadata"]:
            trial.namespace.delete_now(pod["metadata"]["name"])
    return not trial.pods(job) and trial.namespace.find("jobset", job) is None


def test_a_queue_places_a_job_in_one_clique(queue: Trial) -> None:
    placement = {"colocation": "Pod", "queue": "queue", "topology": {"required": CLIQUE}}
    queue.start("job", on_gb200(2, 2), {"placement": placement})
    where = places(queue, 2)
    assert len(cliques(where)) == 1
    assert where["node", "0"] != where["node", "1"]


def test_a_topology_that_cannot_keep_pairs_together_is_named(queue: Trial) -> None:
    """Kueue chooses a host for each pod, as if there were no affinity: two rollouts of two GPUs share one."""
    placement = {"colocation": "Node", "queue": "queue"}
    queue.start("job", on_gb200(2, 1, nodes=4), {"placement": placement})
    queue.wait_for("Unschedulable", "topology of Kueue", "colocation Pod", seconds=90)
