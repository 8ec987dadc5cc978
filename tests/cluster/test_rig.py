"""The rig itself: what the other tests rely on holds on this machine."""

from __future__ import annotations

import json
import secrets
import signal
from pathlib import Path
from typing import Any

import pytest
from live import (
    TOLERATION,
    FakeNodes,
    Namespace,
    NotSeenError,
    api_server_down,
    drained,
    fake_gpus,
    gb200,
    new_namespace,
    restart_kubelet,
    wait_for_the_end_of_all,
)

from cluster import Cluster

SAFE = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}, "readOnlyRootFilesystem": True}


def pod(name: str, script: str, **spec: Any) -> dict[str, Any]:
    container = {
        "name": "main",
        "image": "localhost/pause:1",
        "imagePullPolicy": "Never",
        "command": ["/bin/sh", "-c", script],
        "securityContext": SAFE,
        **spec.pop("container", {}),
    }
    security = {"runAsNonRoot": True, "runAsUser": 65532, "seccompProfile": {"type": "RuntimeDefault"}}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "labels": {"app": name}},
        "spec": {"securityContext": security, "restartPolicy": "Never", "containers": [container], **spec},
    }


def phase(namespace: Namespace, name: str, wanted: str) -> None:
    namespace.wait_for(
        lambda: namespace.get("pod", name)["status"].get("phase") == wanted, f"{name} {wanted}"
    )


@pytest.mark.ci
def test_a_pod_finds_a_service_and_keeps_what_it_writes(namespace: Namespace, cluster: Cluster) -> None:
    directory = namespace.volume("runs")
    mount = [{"name": "runs", "mountPath": "/runs"}]
    claim = [{"name": "runs", "persistentVolumeClaim": {"claimName": "runs"}}]
    namespace.apply(
        pod("peer", "httpd -f -p 8000 -h /bin", container={"ports": [{"containerPort": 8000}]}),
    )
    namespace.apply(
        {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": {"name": "peer"},
            "spec": {"selector": {"app": "peer"}, "ports": [{"port": 80, "targetPort": 8000}]},
        }
    )
    phase(namespace, "peer", "Running")
    address = namespace.get("service", "peer")["spec"]["clusterIP"]
    ask = f"printf 'GET /sh HTTP/1.0\\r\\n\\r\\n' | nc {address} 80 | head -1"
    ask = f"until {ask} > /runs/answer && grep -q HTTP /runs/answer; do sleep 1; done"
    namespace.apply(pod("asker", ask, container={"volumeMounts": mount}, volumes=claim))
    phase(namespace, "asker", "Succeeded")
    assert (directory / "answer").read_text().split()[1] == "200"
    assert (directory / "answer").stat().st_uid == 65532


@pytest.mark.ci
def test_the_restricted_namespace_refuses_a_host_path(namespace: Namespace) -> None:
    volumes = [{"name": "shm", "hostPath": {"path": "/dev/shm"}}]
    with pytest.raises(RuntimeError, match=r'restricted volume types .*"hostPath"'):
        namespace.apply(pod("ring", "true", volumes=volumes))


@pytest.mark.ci
def test_what_does_not_come_is_told_with_the_state_of_the_namespace(namespace: Namespace) -> None:
    namespace.apply(pod("absent", "true", container={"image": "localhost/absent:1"}))
    with pytest.raises(NotSeenError) as told:
        namespace.wait_for(
            lambda: namespace.get("pod", "absent")["status"]["phase"] == "Running", "the pod", 5
        )
    assert "ErrImageNeverPull" in str(told.value)


def test_a_process_is_killed_from_outside(namespace: Namespace) -> None:
    namespace.apply(pod("two", "sleep $((999 + 1)) & sleep 2000; true"))
    phase(namespace, "two", "Running")
    namespace.wait_for(lambda: len(namespace.processes("two", "main")) == 3, "both processes")
    namespace.kill_process("two", "main", matching="sleep 1000")
    namespace.wait_for(lambda: len(namespace.processes("two", "main")) == 2, "the end of one")
    namespace.kill_process("two", "main", signal.SIGKILL)
    phase(namespace, "two", "Failed")
    ended = namespace.get("pod", "two")["status"]["containerStatuses"][0]["state"]["terminated"]
    assert ended["exitCode"] == 137


def test_evicted_and_drained_pods_end(namespace: Namespace, cluster: Cluster) -> None:
    namespace.apply(pod("first", "trap 'exit 0' TERM; while true; do sleep 1; done"))
    namespace.apply(pod("second", "trap 'exit 0' TERM; while true; do sleep 1; done"))
    phase(namespace, "first", "Running")
    phase(namespace, "second", "Running")
    namespace.evict("first")
    namespace.wait_for(lambda: not namespace.list("pods", "app=first"), "the end of first")
    with drained(cluster, selector="app=second"):
        assert namespace.pods("app=second") == []
        namespace.apply(pod("third", "true"))
        namespace.wait_for(
            lambda: "unschedulable" in json.dumps(namespace.get("pod", "third")["status"]), "third waits"
        )
    phase(namespace, "third", "Succeeded")


def test_pods_outlive_kubelet_and_api_server(namespace: Namespace, cluster: Cluster) -> None:
    namespace.apply(pod("steady", "sleep 1000"))
    phase(namespace, "steady", "Running")
    before = namespace.processes("steady", "main")
    kubelet, server = cluster.daemon("kubelet"), cluster.daemon("kube-apiserver")
    restart_kubelet(cluster)
    with api_server_down(cluster), pytest.raises(RuntimeError, match=r"refused|reset"):
        cluster.kubectl("get", "--raw", "/readyz")
    assert kubelet != cluster.daemon("kubelet") is not None
    assert server != cluster.daemon("kube-apiserver") is not None
    assert namespace.processes("steady", "main") == before
    assert namespace.get("pod", "steady")["status"]["containerStatuses"][0]["restartCount"] == 0


def test_the_scheduler_counts_gpus_that_are_not_there(namespace: Namespace, cluster: Cluster) -> None:
    def wants(count: int) -> dict[str, Any]:
        return {"resources": {"limits": {"nvidia.com/gpu": str(count)}}}

    with fake_gpus(cluster, 4):
        namespace.apply(pod("three", "sleep 1000", container=wants(3)))
        phase(namespace, "three", "Running")
        namespace.apply(pod("two", "sleep 1000", container=wants(2)))
        namespace.wait_for(
            lambda: "Insufficient nvidia.com/gpu" in json.dumps(namespace.get("pod", "two")["status"]),
            "two waits",
        )
    with FakeNodes(cluster, gb200(["left", "right"])):
        far = {"nodeSelector": {"nvidia.com/gpu.clique": "right"}, "tolerations": [TOLERATION]}
        namespace.apply(pod("far", "true", container=wants(4), **far))
        node = namespace.wait_for(
            lambda: namespace.get("pod", "far")["spec"].get("nodeName"), "a node for far"
        )
        assert node in ("fake-right-0", "fake-right-1")
    assert "fake" not in cluster.kubectl("get", "nodes", "-o", "name")


def test_pods_reach_the_s3_server(namespace: Namespace, s3: Any) -> None:
    bucket = s3.bucket()
    s3.client().put_object(Bucket=bucket, Key="a/b", Body=b"here")
    keys = {"AWS_ACCESS_KEY_ID": s3.access_key, "AWS_SECRET_ACCESS_KEY": s3.secret_key}
    namespace.secret("s3", keys)
    script = (
        "import s3fs\n"
        f"there = s3fs.S3FileSystem(endpoint_url={s3.endpoint_url!r})\n"
        f"print(there.cat({bucket + '/a/b'!r}))"
    )
    container = {
        "image": "localhost/tracerl-canary:test",
        "command": ["python", "-c", script],
        "envFrom": [{"secretRef": {"name": "s3"}}],
    }
    namespace.apply(pod("reader", "", container=container))
    phase(namespace, "reader", "Succeeded")
    assert namespace.logs("reader", "main").strip() == "b'here'"


@pytest.mark.ci
def test_removed_namespaces_leave_nothing_on_the_node(cluster: Cluster) -> None:
    """The last test of all, so that it says so of those before it, too."""
    name = secrets.token_hex(8)
    with new_namespace(cluster) as namespace:
        namespace.volume("runs")
        volumes = [{"name": "shm", "hostPath": {"path": "/dev/shm", "type": "Directory"}}]
        mount = {"volumeMounts": [{"name": "shm", "mountPath": "/shm"}]}
        namespace.apply(pod("ring", f"mkdir /shm/{name}; sleep 1000", container=mount, volumes=volumes))
        phase(namespace, "ring", "Running")
        ring = cluster.files("/dev/shm") / name
        namespace.wait_for(ring.exists, "the ring")
        assert not Path("/dev/shm", name).exists()
        ring.rmdir()
        (identity,) = namespace.get("pod", "ring")["status"]["containerStatuses"]
        container = identity["containerID"].removeprefix("containerd://")
        assert container in cluster.ctr("containers", "ls", "-q")
    wait_for_the_end_of_all(cluster)
    assert container not in cluster.ctr("containers", "ls", "-q")
    assert cluster.kubectl("get", "namespace", namespace.name, "--ignore-not-found") == ""
    assert not [*(cluster.place.data / "volumes").glob(f"{namespace.name}-*")]
