"""Small jobs in a namespace, and how a test about faults looks at them: status, conditions, the run's log."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import yaml
from live import Namespace
from small_cluster import merged

Document = dict[str, Any]

_SMALL: Document = yaml.safe_load((Path(__file__).parent / "jobs/small.yaml").read_text())
QUICK: Document = {"algorithm": {"steps": 1, "evaluation": {"every": 0, "prompts": 8}}}
"""Changes for a job of which only the start is of interest, and that it comes to an end."""
STEPS = 16
LONG: Document = {
    "algorithm": {"steps": STEPS, "evaluation": {"every": 1000, "prompts": 8}},
    "trainer": {"checkpoint": {"every": 1}},
    "output": {"uri": "pvc://runs"},
}
"""Changes for a job that trains long enough to be met at it, and keeps what it did in the claim `runs`."""

_KINDS = (
    "jobsets.jobset.x-k8s.io,jobs,pods,services,configmaps,secrets,serviceaccounts,roles,rolebindings,"
    "networkpolicies"
)


class Trial:
    """A test's jobs in a namespace. Those named `job` are meant where no name is given."""

    def __init__(self, namespace: Namespace) -> None:
        self.namespace, self.cluster = namespace, namespace.cluster

    def start(self, name: str = "job", *changes: Document) -> None:
        """Apply a small job with changes of its spec."""
        spec = _SMALL["spec"]
        for change in changes:
            spec = merged(spec, change)
        self.namespace.apply({**_SMALL, "metadata": {"name": name}, "spec": spec})

    def status(self, name: str = "job") -> Document:
        """What a job says of itself."""
        found: Document = self.namespace.get("trj", name).get("status") or {}
        return found

    def wait(
        self, ready: Callable[[Document], Any], what: str, seconds: float, name: str = "job"
    ) -> Document:
        """Wait until a job's status is as asked, and give it."""

        def answer() -> Document | None:
            status = self.status(name)
            return status if ready(status) else None

        found = self.namespace.wait_for(answer, f"{name} {what}", seconds)
        assert found is not None
        return found

    def wait_for(self, reason: str, *words: str, seconds: float, name: str = "job") -> str:
        """Wait until Ready has this reason and a message with all of these words; the message."""

        def there(status: Document) -> bool:
            found = condition(status, "Ready")
            return found.get("reason") == reason and all(word in found["message"] for word in words)

        status = self.wait(there, f"with {reason} because of {words}", seconds, name)
        message: str = condition(status, "Ready")["message"]
        return message

    def steps(self) -> int:
        """How many steps the log of the run has, in the claim `runs`; the status tells later."""
        return len(self.log("step"))

    def wait_step(self, step: int, seconds: float = 300) -> None:
        """Wait until training has come so far."""
        self.namespace.wait_for(lambda: self.steps() >= step, f"step {step}", seconds)

    def wait_complete(self, seconds: float = 300, name: str = "job") -> Document:
        """Wait for a job's good end, and see that all of its status says so."""
        job = self.namespace.wait_for_job(name, seconds=seconds)
        status: Document = job["status"]
        assert condition(status, "Complete")["reason"] == "Completed"
        assert condition(status, "Failed")["status"] == "False"
        assert at_step(status) == job["spec"]["algorithm"]["steps"]
        return status

    def wait_failed(self, reason: str, *words: str, seconds: float = 300, name: str = "job") -> str:
        """Wait for a job's bad end with this reason and a message with all of these words; the message."""
        status = self.namespace.wait_for_job(name, "Failed", seconds)["status"]
        found = condition(status, "Failed")
        assert found["reason"] == reason, found
        assert [word for word in words if word not in found["message"]] == [], found
        message: str = found["message"]
        return message

    def event(self, reason: str, name: str = "job") -> str:
        """Messages of a job's events with this reason."""
        only = f"--field-selector=reason={reason},involvedObject.name={name}"
        events = json.loads(self.namespace.kubectl("get", "events", only, "-o", "json"))["items"]
        return "\n".join(event["message"] for event in events)

    # -- pods

    def pods(self, name: str = "job", job: str | None = None) -> list[Document]:
        """Pods of a job; of one of its replicated jobs with `job`."""
        role = "" if job is None else f",jobset.sigs.k8s.io/replicatedjob-name={job}"
        found: list[Document] = self.namespace.pods(f"tracerl.dev/job-name={name}{role}")
        return found

    def uids(self, name: str = "job") -> set[str]:
        """UIDs of a job's pods: one that is made again has another."""
        return {pod["metadata"]["uid"] for pod in self.pods(name)}

    def kill(self, container: str, name: str = "job") -> None:
        """Kill a container's process in the job's one pod that has it running."""
        pods = [p["metadata"]["name"] for p in self.pods(name) if container in running(p)]
        assert len(pods) == 1, f"{container} runs in {pods}"
        self.namespace.kill_process(pods[0], container)

    # -- what a run wrote

    def log(self, kind: str, name: str = "job") -> list[Document]:
        """Records of a kind in the log of the one run of a job in the claim `runs`; needs no API server."""
        volume = self.cluster.place.data / "volumes" / f"{self.namespace.name}-runs"
        texts = [log.read_text() for log in volume.glob(f"{name}-*/*.jsonl")]
        # The last line may be half written.
        lines = [line for text in texts for line in text.splitlines(keepends=True) if line.endswith("\n")]
        return [record for record in map(json.loads, lines) if record["type"] == kind]

    def resumed_from(self) -> list[int]:
        """Where each start of the trainer began."""
        return [record["resumed_from"] for record in self.log("start")]

    # -- the end

    def remove(self, name: str = "job", seconds: float = 90) -> None:
        """Delete a job as a user does, and see that nothing of it stays."""
        self.namespace.delete("trj", name)
        deadline = time.monotonic() + seconds
        while left := self.left(name):
            assert time.monotonic() < deadline, f"left of {name}: {left}\n{self.namespace.describe()}"
            time.sleep(0.5)

    def left(self, name: str) -> list[str]:
        """Objects of a job: all that is named after it."""
        found = self.namespace.kubectl("get", _KINDS, "-o", "name").split()
        return [one for one in found if f"{one.partition('/')[2]}-".startswith(f"{name}-")]

    def remove_all(self) -> None:
        """Delete all jobs, and see that nothing of them stays."""
        for job in self.namespace.list("trj"):
            self.remove(job["metadata"]["name"])


def condition(status: Document, kind: str) -> Document:
    """A condition of a status; empty when it is not there."""
    return next((one for one in status.get("conditions", []) if one["type"] == kind), {})


def at_step(status: Document) -> int:
    """How far training has come."""
    step: int = status.get("progress", {}).get("step", 0)
    return step


def containers(pod: Document) -> list[Document]:
    """Statuses of a pod's containers, the sidecars first."""
    status = pod["status"]
    return [*status.get("initContainerStatuses", ()), *status.get("containerStatuses", ())]


def running(pod: Document) -> Sequence[str]:
    """Names of a pod's containers that run."""
    return [status["name"] for status in containers(pod) if "running" in status.get("state", {})]


def gpus(container: str, count: int) -> Document:
    """A patch of a pod template that asks for GPUs, which the reference engines do without."""
    limits = {"nvidia.com/gpu": str(count)}
    return {"spec": {"containers": [{"name": container, "resources": {"limits": limits}}]}}
