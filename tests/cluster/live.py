"""What tests do to a live cluster.

Namespaces of their own, waiting that says what it saw, storage, hardware that is not there, and violence.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import signal
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

from node import NAME as NODE

from cluster import Cluster

USER = 65532
OPERATOR = "tracerl-system"
T = TypeVar("T")
_OURS = {"tracerl.dev/made-by": "tests"}
_FAKE = {"key": "tracerl.dev/fake", "effect": "NoSchedule"}
TOLERATION = {**_FAKE, "operator": "Exists"}
"""What a pod needs to be placed on a fake node; ordinary pods stay away, for nothing runs there."""


class NotSeenError(AssertionError):
    """Something did not come in time; the message holds what the namespace looked like."""


def _documents(what: Any) -> str:
    """Text, the path of a file, an object or several as what kubectl reads."""
    if isinstance(what, Path):
        return what.read_text()
    if isinstance(what, str):
        return what
    items = [what] if isinstance(what, Mapping) else list(what)
    return "\n---\n".join(json.dumps(item) for item in items)


class Namespace:
    """One namespace, made for a test."""

    def __init__(self, cluster: Cluster, name: str) -> None:
        self.cluster, self.name = cluster, name
        self._volumes: list[Path] = []

    def kubectl(self, *arguments: str, input: str | None = None, check: bool = True) -> str:
        """Run kubectl in this namespace; RuntimeError with its message when it fails."""
        return self.cluster.kubectl("--namespace", self.name, *arguments, input=input, check=check)

    def apply(self, what: Any) -> None:
        """Apply as a user does: an object, several, text or a file."""
        self.kubectl("apply", "-f", "-", input=_documents(what))

    def get(self, kind: str, name: str) -> dict[str, Any]:
        """One object; RuntimeError when there is none."""
        document: dict[str, Any] = json.loads(self.kubectl("get", kind, name, "-o", "json"))
        return document

    def find(self, kind: str, name: str) -> dict[str, Any] | None:
        """One object, or None when there is none."""
        text = self.kubectl("get", kind, name, "-o", "json", "--ignore-not-found")
        return json.loads(text) if text.strip() else None

    def list(self, kind: str, selector: str = "") -> list[dict[str, Any]]:
        """All objects of a kind, by label."""
        items: list[dict[str, Any]] = json.loads(self.kubectl("get", kind, "-l", selector, "-o", "json"))[
            "items"
        ]
        return items

    def delete(self, kind: str, name: str, *, wait: bool = True) -> None:
        self.kubectl("delete", kind, name, f"--wait={str(wait).lower()}", "--timeout=100s")

    def patch(self, kind: str, name: str, change: Any, *, subresource: str | None = None) -> None:
        """Change an object by a merge patch."""
        more = [f"--subresource={subresource}"] if subresource else []
        self.kubectl("patch", kind, name, "--type=merge", "-p", json.dumps(change), *more)

    def wait_for(self, ready: Callable[[], T], what: str, seconds: float = 60) -> T:
        """Ask until the answer is true and give it; NotSeenError with the namespace's state after so long.

        A request that fails is an answer that is not there yet: the object, or the API server.
        """
        try:
            answer: T = self.cluster.poll(ready, what, seconds)
        except TimeoutError as error:
            raise NotSeenError(f"{error}\n\n{self.describe()}") from None
        return answer

    def wait_for_job(self, name: str, terminal: str = "Complete", seconds: float = 300) -> dict[str, Any]:
        """Wait until a TraceRLJob ended as said; fails at once when it ended otherwise."""

        def ended() -> dict[str, Any] | None:
            job = self.get("tracerljob", name)
            return job if job.get("status", {}).get("terminal") else None

        job = self.wait_for(ended, f"the end of TraceRLJob {name}", seconds)
        if job["status"]["terminal"] != terminal:
            raise NotSeenError(
                f"TraceRLJob {name} ended as {job['status']['terminal']}, not {terminal}\n\n{self.describe()}"
            )
        return job

    def condition(self, job: str, kind: str) -> dict[str, Any]:
        """One condition of a TraceRLJob; empty when there is none."""
        conditions = self.get("tracerljob", job).get("status", {}).get("conditions", [])
        return next((each for each in conditions if each["type"] == kind), {})

    def describe(self) -> str:
        """Jobs, pods, events and the last lines of every container, to read in a failed test."""

        def ask(*arguments: str) -> str:
            with contextlib.suppress(RuntimeError):
                return self.kubectl(*arguments, check=False)
            return "(no answer)"

        kinds = "tracerljobs,jobsets,jobs,pods,configmaps,secrets,persistentvolumeclaims"
        parts = [f"Namespace {self.name}", ask("get", kinds, "-o", "wide")]
        parts += ["Events", ask("get", "events", "--sort-by=.metadata.creationTimestamp")]
        parts += [
            "TraceRLJobs",
            ask("get", "tracerljobs", "-o", "jsonpath={range .items[*]}{.status}{'\\n'}{end}"),
        ]
        with contextlib.suppress(RuntimeError):
            for pod in self.list("pods"):
                name = pod["metadata"]["name"]
                parts += [f"Pod {name}", json.dumps(pod["status"].get("conditions", []))]
                for status in _statuses(pod):
                    container = status["name"]
                    state = json.dumps(
                        {each: status.get(each) for each in ("state", "lastState", "restartCount")}
                    )
                    log = ask("logs", name, "-c", container, "--tail=30")
                    parts += [f"Container {name}/{container} {state}", log]
        operator = self.cluster.kubectl(
            "--namespace",
            OPERATOR,
            "logs",
            "--tail=60",
            "-l",
            "app.kubernetes.io/name=tracerl-operator",
            check=False,
        )
        return "\n".join([*parts, "Operator", operator])

    # Pods

    def pods(self, selector: str = "") -> list[dict[str, Any]]:
        return self.list("pods", selector)

    def logs(self, pod: str, container: str, *, previous: bool = False) -> str:
        return self.kubectl("logs", pod, "-c", container, *(["--previous"] if previous else []))

    def processes(self, pod: str, container: str) -> dict[int, str]:
        """This machine's ids of a container's processes, each with its command line."""
        status = next(each for each in _statuses(self.get("pod", pod)) if each["name"] == container)
        identity = status.get("containerID", "").removeprefix("containerd://")
        if not identity:
            return {}
        found: dict[int, str] = {}
        for root in self.cluster.cgroups():
            for file in root.glob(f"kubepods/**/{identity}/cgroup.procs"):
                for pid in map(int, file.read_text().split()):
                    with contextlib.suppress(OSError):
                        found[pid] = Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ").strip()
        return found

    def kill_process(
        self,
        pod: str,
        container: str,
        number: signal.Signals = signal.SIGKILL,
        *,
        matching: str | None = None,
    ) -> None:
        """Signal a container's first process, or those whose command line holds `matching`, from outside."""
        processes = self.processes(pod, container)
        chosen = [
            pid
            for pid, line in processes.items()
            if (matching in line if matching is not None else _is_first(pid))
        ]
        if not chosen:
            raise NotSeenError(f"{pod}/{container} has no such process among {processes}")
        for pid in chosen:
            # One may be the other's first process, and end with it.
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def evict(self, pod: str) -> None:
        """Evict a pod as a drain does."""
        body = {
            "apiVersion": "policy/v1",
            "kind": "Eviction",
            "metadata": {"name": pod, "namespace": self.name},
        }
        path = f"/api/v1/namespaces/{self.name}/pods/{pod}/eviction"
        self.cluster.kubectl("create", "--raw", path, "-f", "-", input=json.dumps(body))

    # Storage

    def volume(self, claim: str) -> Path:
        """A claim on a directory of this machine that pods of our images can write; the directory."""
        name = f"{self.name}-{claim}"
        directory = self.cluster.place.data / "volumes" / name
        directory.mkdir(parents=True)
        os.chown(directory, USER, USER)
        self._volumes.append(directory)
        size, modes = {"storage": "10Gi"}, ["ReadWriteMany"]
        volume = {
            "apiVersion": "v1",
            "kind": "PersistentVolume",
            "metadata": {"name": name, "labels": _OURS},
            "spec": {
                "capacity": size,
                "accessModes": modes,
                "storageClassName": "",
                "hostPath": {"path": str(directory), "type": "Directory"},
                "claimRef": {"name": claim, "namespace": self.name},
            },
        }
        spec = {
            "accessModes": modes,
            "storageClassName": "",
            "volumeName": name,
            "resources": {"requests": size},
        }
        bound = {
            "apiVersion": "v1",
            "kind": "PersistentVolumeClaim",
            "metadata": {"name": claim},
            "spec": spec,
        }
        self.apply([volume, bound])
        return directory

    def secret(self, name: str, values: Mapping[str, str]) -> None:
        self.apply(
            {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": name}, "stringData": dict(values)}
        )

    # Its end

    def remove(self) -> None:
        """Delete jobs, pods and rings, and let the namespace go; `wait_for_the_end_of_all` sees to it."""
        jobs = [job["metadata"]["uid"] for job in self.list("tracerljobs")]
        if jobs:
            self.kubectl("delete", "tracerljobs", "--all", "--timeout=100s")
        # A namespace's deletion looks again only after half of the longest grace period that it meets.
        soon = ("--all", "--grace-period=1", "--wait=false")
        try:
            self.kubectl("delete", "jobsets.jobset.x-k8s.io,jobs,pods", *soon)
        except RuntimeError:
            # A test may have taken JobSet away.
            self.kubectl("delete", "jobs,pods", *soon)
        for pod in self.pods():
            if pod["spec"].get("nodeName", NODE) != NODE:
                # No kubelet answers for a fake node.
                self.delete_now(pod["metadata"]["name"])
        self.cluster.poll(lambda: not self.pods(), f"the end of {self.name}'s pods", 60)
        left = [uid for uid in jobs if (self.cluster.files("/dev/shm") / uid).exists()]
        if left:
            raise NotSeenError(f"rings are left in /dev/shm: {left}")
        volumes = [f"persistentvolume/{directory.name}" for directory in self._volumes]
        self.cluster.kubectl("delete", f"namespace/{self.name}", *volumes, "--wait=false")
        for directory in self._volumes:
            shutil.rmtree(directory)

    def delete_now(self, pod: str) -> None:
        """Delete a pod without asking its node."""
        self.kubectl("delete", "pod", pod, "--grace-period=0", "--force", "--ignore-not-found", check=False)


def _statuses(pod: Mapping[str, Any]) -> list[dict[str, Any]]:
    status = pod.get("status", {})
    return [*status.get("initContainerStatuses", []), *status.get("containerStatuses", [])]


def _is_first(pid: int) -> bool:
    """Whether a process is number 1 of its own namespace."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return False
    return next(line.split()[-1] for line in lines if line.startswith("NSpid:")) == "1"


@contextlib.contextmanager
def new_namespace(
    cluster: Cluster, prefix: str = "test", labels: Mapping[str, str] | None = None
) -> Iterator[Namespace]:
    """A namespace for the time of the block, with labels such as a level of Pod Security."""
    name = f"{prefix}-{secrets.token_hex(3)}"
    meta = {"name": name, "labels": {**_OURS, **(labels or {})}}
    cluster.kubectl(
        "create", "-f", "-", input=json.dumps({"apiVersion": "v1", "kind": "Namespace", "metadata": meta})
    )
    namespace = Namespace(cluster, name)
    # Pods are refused before it is there.
    cluster.poll(lambda: namespace.find("serviceaccount", "default"), f"the service account of {name}", 60)
    try:
        yield namespace
    finally:
        namespace.remove()


def wait_for_the_end_of_all(cluster: Cluster) -> None:
    """See that nothing of removed namespaces is left, in the API or on the node.

    Kubernetes takes its time: a namespace goes five seconds after it was deleted, and the kubelet looks once
    a minute for containers without a pod. So this is asked once, not after each test.
    """
    (label, value), *_ = _OURS.items()

    def objects() -> str:
        return cluster.kubectl("get", "namespaces,persistentvolumes", "-l", f"{label}={value}", "-o", "name")

    try:
        cluster.poll(lambda: not objects().strip(), "the end of the tests' namespaces", 120)
    except TimeoutError as error:
        state = cluster.kubectl("get", "namespaces", "-l", f"{label}={value}", "-o", "yaml", check=False)
        raise NotSeenError(f"{error}: {objects()}\n{state}") from None
    living = [line.partition("/")[2] for line in cluster.kubectl("get", "namespaces", "-o", "name").split()]
    others = ",".join(f'labels."io.kubernetes.pod.namespace"!={name}' for name in living)
    cluster.poll(
        lambda: not cluster.ctr("containers", "ls", "-q", others).strip(), "the end of their containers", 120
    )


# Violence


def wait_for_api(cluster: Cluster) -> None:
    cluster.poll(lambda: cluster.kubectl("get", "--raw", "/readyz", seconds=10) == "ok", "API server", 120)


def stop_api_server(cluster: Cluster) -> None:
    """Kill the API server and keep it down."""
    cluster.hold("kube-apiserver")


def start_api_server(cluster: Cluster) -> None:
    """Let the API server come back, and wait for it."""
    cluster.release("kube-apiserver")
    wait_for_api(cluster)


@contextlib.contextmanager
def api_server_down(cluster: Cluster) -> Iterator[None]:
    """No API server for the time of the block."""
    stop_api_server(cluster)
    try:
        yield
    finally:
        start_api_server(cluster)


def restart_kubelet(cluster: Cluster) -> None:
    """Kill the kubelet and wait until the next one answers; containers run on."""
    cluster.kill("kubelet")
    path = f"/api/v1/nodes/{NODE}/proxy/healthz"
    cluster.poll(lambda: cluster.kubectl("get", "--raw", path, seconds=10) == "ok", "kubelet", 120)


@contextlib.contextmanager
def drained(cluster: Cluster, *, selector: str, node: str = NODE) -> Iterator[None]:
    """Drain the pods that a selector names from a node, which takes no others until the block ends."""
    try:
        cluster.kubectl(
            *("drain", node, "--ignore-daemonsets", "--delete-emptydir-data", "--force"),
            *(f"--pod-selector={selector}", "--timeout=100s"),
        )
        yield
    finally:
        cluster.kubectl("uncordon", node)


# Hardware that is not there


def _set_gpus(cluster: Cluster, node: str, operation: str, value: str | None = None) -> None:
    change = [
        {
            "op": operation,
            "path": f"/status/{part}/nvidia.com~1gpu",
            **({} if value is None else {"value": value}),
        }
        for part in ("capacity", "allocatable")
    ]
    cluster.kubectl("patch", "node", node, "--subresource=status", "--type=json", "-p", json.dumps(change))


@contextlib.contextmanager
def fake_gpus(cluster: Cluster, count: int) -> Iterator[None]:
    """GPUs on the node where pods run: numbers that the scheduler counts, without devices."""
    _set_gpus(cluster, NODE, "add", str(count))
    try:
        yield
    finally:
        _set_gpus(cluster, NODE, "remove")


class FakeNodes:
    """Nodes without a kubelet, kept Ready: pods are placed on them and stay Pending there."""

    def __init__(self, cluster: Cluster, nodes: Mapping[str, Mapping[str, str]], gpus: int = 4) -> None:
        self._cluster, self._gpus = cluster, gpus
        self.nodes = {name: dict(labels) for name, labels in nodes.items()}
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._keep, daemon=True)

    def __enter__(self) -> FakeNodes:
        self._cluster.kubectl("apply", "-f", "-", input=_documents(self._node(name) for name in self.nodes))
        resources = {"cpu": "64", "memory": "512Gi", "ephemeral-storage": "512Gi", "pods": "110"}
        resources["nvidia.com/gpu"] = str(self._gpus)
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        ready = {"type": "Ready", "status": "True", "reason": "Fake", "message": "no kubelet"}
        times = {"lastHeartbeatTime": now, "lastTransitionTime": now}
        status = {"capacity": resources, "allocatable": resources, "conditions": [{**ready, **times}]}
        for name in self.nodes:
            self._cluster.kubectl(
                *("patch", "node", name, "--subresource=status", "--type=merge", "-p"),
                json.dumps({"status": status}),
            )
        self._thread.start()
        return self

    def _node(self, name: str) -> dict[str, Any]:
        labels = {
            "kubernetes.io/hostname": name,
            "kubernetes.io/os": "linux",
            "kubernetes.io/arch": "arm64",
            "nvidia.com/gpu.product": "NVIDIA-GB200",
            **self.nodes[name],
        }
        metadata = {"name": name, "labels": labels}
        return {"apiVersion": "v1", "kind": "Node", "metadata": metadata, "spec": {"taints": [_FAKE]}}

    def _lease(self, name: str) -> dict[str, Any]:
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        return {
            "apiVersion": "coordination.k8s.io/v1",
            "kind": "Lease",
            "metadata": {"name": name, "namespace": "kube-node-lease"},
            "spec": {"holderIdentity": name, "leaseDurationSeconds": 40, "renewTime": now},
        }

    def _keep(self) -> None:
        while True:
            leases = _documents(self._lease(name) for name in self.nodes)
            # While a test holds the API server down there is nothing to renew.
            with contextlib.suppress(RuntimeError):
                self._cluster.kubectl("apply", "--server-side", "--force-conflicts", "-f", "-", input=leases)
            if self._ended.wait(10):
                return

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()
        for name in self.nodes:
            selector = f"--field-selector=spec.nodeName={name}"
            self._cluster.kubectl(
                *("delete", "pods", "--all-namespaces", "--grace-period=0", "--force", selector), check=False
            )
        self._cluster.kubectl("delete", "node", *self.nodes)
        self._cluster.kubectl("delete", "lease", "-n", "kube-node-lease", "--ignore-not-found", *self.nodes)


def gb200(cliques: Iterable[str], nodes_a_clique: int = 2) -> dict[str, dict[str, str]]:
    """Names and labels of fake GB200 nodes, so many in each clique (NVLink domain)."""
    return {
        f"fake-{clique}-{number}": {"nvidia.com/gpu.clique": clique}
        for clique in cliques
        for number in range(nodes_a_clique)
    }
