"""Jobs for the operator's tests, and the part of a cluster that it sees: objects, pods, and time.

The cluster applies what a decision says as an API server with its controllers would: it adds UIDs, owners of
what it makes, and defaults; pods do what a test tells them.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from typing import Any

from tracerl_operator.reconcile import reconcile
from tracerl_operator.types import Decision, Delete, Event, Installation, Observed, Ref

NOW = datetime(2026, 11, 29, 12, 0, 0, tzinfo=UTC)
TOKEN = "0f" * 32
UID = "6f1c2f9e-0000-4000-8000-00000000000a"
INSTALLATION = Installation("example.org/rollout:1", "example.org/trainer:1")
ALL_KINDS = frozenset({"JobSet", "ComputeDomain", "PodMonitor", "Workload"})
JOBSET = ("jobset.x-k8s.io/v1alpha2", "JobSet")

SPEC: dict[str, Any] = {
    "model": {"uri": "builtin://tiny-moe"},
    "task": {"name": "builtin/chain_sum"},
    "algorithm": {"steps": 30, "promptsPerStep": 16, "samplesPerPrompt": 8},
    "method": {"name": "TRACE"},
    "output": {"uri": "pvc://runs/canary"},
}


def merged(base: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """A copy with changes below; None removes."""
    result = copy.deepcopy(base)
    for key, value in changes.items():
        if value is None:
            result.pop(key, None)
        elif isinstance(value, dict) and isinstance(result.get(key), dict):
            result[key] = merged(result[key], value)
        else:
            result[key] = copy.deepcopy(value)
    return result


def job(name: str = "canary", **spec: Any) -> dict[str, Any]:
    """A job as the API server has it."""
    return {
        "apiVersion": "tracerl.dev/v1alpha1",
        "kind": "TraceRLJob",
        "metadata": {
            "name": name,
            "namespace": "team",
            "uid": UID,
            "generation": 1,
            "resourceVersion": "7",
            "creationTimestamp": "2026-11-29T11:59:00Z",
        },
        "spec": merged(SPEC, spec),
    }


NODE = {"placement": {"colocation": "Node"}}
APART = {"placement": {"colocation": "None"}}


def nodes(count: int) -> dict[str, Any]:
    """Fields of a job of that many nodes of each role."""
    return {
        "rollout": {"nodes": count},
        "trainer": {"nodes": count, "parallelism": {"data": count}},
    }


@dataclass
class Cluster:
    """What the operator sees and changes."""

    job: dict[str, Any]
    observed: Observed = field(
        default_factory=lambda: Observed(INSTALLATION, TOKEN, served=ALL_KINDS, pod_security="restricted")
    )
    now: datetime = NOW
    events: list[Event] = field(default_factory=list)
    deleted: list[Delete] = field(default_factory=list)
    count: int = 0

    # -- the operator's side ------------------------------------------------------------------------------

    def decide(self) -> Decision:
        """Ask, and do nothing about the answer."""
        return reconcile(self.job, self.observed, self.now)

    def step(self) -> Decision:
        """Ask, and do what the answer says."""
        decision = self.decide()
        for one in decision.apply:
            if any(refusal.startswith(str(one.ref)) for refusal in self.observed.refusals):
                break
            self._apply(one.ref, copy.deepcopy(one.document))
        for delete in decision.delete:
            self.deleted.append(delete)
            self.remove(delete)
        if decision.status is not None:
            self.job["status"] = decision.status
        self.events += decision.events
        return decision

    def settle(self) -> None:
        """Reconcile until nothing is left to do; fails the test when that does not come."""
        for _ in range(10):
            decision = self.step()
            if not (decision.apply or decision.delete or decision.status or decision.events):
                return
        raise AssertionError(f"does not settle: {decision}")

    # -- the API server's side ----------------------------------------------------------------------------

    def _apply(self, ref: Ref, document: dict[str, Any]) -> None:
        metadata = document["metadata"]
        if ref.kind == "TraceRLJob":
            assert metadata["uid"] == self.job["metadata"]["uid"]
            for key in ("finalizers", "annotations"):
                if key in metadata:
                    self.job["metadata"][key] = metadata[key]
                else:
                    self.job["metadata"].pop(key, None)
            return
        self.count += 1
        made = self.now.strftime("%Y-%m-%dT%H:%M:%SZ")
        metadata |= {"uid": f"made-{self.count}", "creationTimestamp": made}
        if ref.kind == "Pod":
            self.observed = replace(self.observed, pods=(*self.observed.pods, document))
            return
        if ref.kind == "Secret":
            document.pop("stringData", None)  # the operator reads no content
        before = self.observed.objects.get(ref, {})
        self.observed = replace(self.observed, objects={**self.observed.objects, ref: {**before, **document}})

    def remove(self, delete: Delete) -> None:
        """Delete an object of that UID, and the pods of a JobSet."""
        if delete.ref.kind == "TraceRLJob":
            return
        objects, pods = dict(self.observed.objects), self.observed.pods
        if delete.ref.kind == "Pod":
            pods = tuple(pod for pod in pods if pod["metadata"]["uid"] != delete.uid)
        elif delete.ref in objects and objects[delete.ref]["metadata"]["uid"] == delete.uid:
            del objects[delete.ref]
            label = "jobset.sigs.k8s.io/jobset-uid"
            pods = tuple(pod for pod in pods if pod["metadata"]["labels"].get(label) != delete.uid)
        self.observed = replace(self.observed, objects=objects, pods=pods)

    def find(self, kind: str, suffix: str = "") -> dict[str, Any] | None:
        """The object of a kind whose name ends so, if there is one."""
        objects = self.observed.objects.items()
        found = [o for ref, o in objects if ref.kind == kind and ref.name.endswith(suffix)]
        assert len(found) < 2
        return found[0] if found else None

    @property
    def jobset(self) -> dict[str, Any]:
        """The JobSet, which is there."""
        jobset = self.find("JobSet")
        assert jobset is not None
        return jobset

    def set_jobset(self, **status: Any) -> None:
        """What JobSet's controller says."""
        self.jobset.setdefault("status", {}).update(status)

    def end_jobset(self, condition: str, reason: str = "") -> None:
        """The JobSet ended."""
        self.set_jobset(conditions=[{"type": condition, "status": "True", "reason": reason}])

    def report(self, text: str) -> None:
        """What trainer 0 wrote."""
        progress = self.find("ConfigMap", "-progress")
        assert progress is not None
        progress["data"] = {"progress": text}

    # -- the pods' side -----------------------------------------------------------------------------------

    def run_pods(self, *, ready: bool = True) -> None:
        """JobSet's pods run, each pair on a node."""
        pods = []
        jobset = self.jobset
        for replicated in jobset["spec"]["replicatedJobs"]:
            spec = replicated["template"]["spec"]
            for index in range(spec["completions"]):
                labels = spec["template"]["metadata"]["labels"] | {
                    "jobset.sigs.k8s.io/jobset-uid": jobset["metadata"]["uid"],
                    "jobset.sigs.k8s.io/replicatedjob-name": replicated["name"],
                    "batch.kubernetes.io/job-completion-index": str(index),
                }
                name = f"{jobset['metadata']['name']}-{replicated['name']}-0-{index}-abcde"
                pods.append(
                    {
                        "metadata": {"name": name, "uid": f"uid-{name}", "labels": labels},
                        "spec": {"nodeName": f"machine-{index}"},
                        "status": {
                            "phase": "Running",
                            "conditions": [{"type": "Ready", "status": str(ready)}],
                        },
                    }
                )
        self.observed = replace(self.observed, pods=tuple(pods))

    def running(self) -> Cluster:
        """Come to where all pods run."""
        self.settle()
        self.jobset["spec"]["suspend"] = False  # Kueue's, where there is a queue
        self.run_pods()
        self.settle()
        return self

    def end_container(
        self, pod: int, container: str, code: int, message: str = "", *, restarts: int | None = None
    ) -> None:
        """A container ended; with `restarts` the kubelet started it again for the n-th time."""
        ended = {"terminated": {"exitCode": code, "message": message}}
        status: dict[str, Any] = {"name": container, "restartCount": restarts or 0}
        status |= {"state": ended} if restarts is None else {"state": {"running": {}}, "lastState": ended}
        statuses = self.observed.pods[pod]["status"].setdefault("containerStatuses", [])
        statuses[:] = [*(s for s in statuses if s["name"] != container), status]

    def end_pods(self, phase: str) -> None:
        """All pods ended."""
        for pod in self.observed.pods:
            pod["status"]["phase"] = phase
            pod["status"]["conditions"] = [{"type": "Ready", "status": "False"}]

    # -- what is shown ------------------------------------------------------------------------------------

    @property
    def status(self) -> dict[str, Any]:
        """The job's status."""
        found: dict[str, Any] = self.job["status"]
        return found

    def conditions(self) -> dict[str, str]:
        """Condition types with their status and reason."""
        return {c["type"]: f"{c['status']} {c['reason']}" for c in self.status["conditions"]}

    def message(self, condition: str) -> str:
        """Message of a condition."""
        return next(c["message"] for c in self.status["conditions"] if c["type"] == condition)

    def wait(self, **duration: float) -> None:
        """Time passes."""
        self.now += timedelta(**duration)
