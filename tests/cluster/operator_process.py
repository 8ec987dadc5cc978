"""The operator as a process on a rig, and the objects of jobs as a user and other controllers handle them."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self, TypeVar

from api_server import ApiServer, RefusedError

T = TypeVar("T")
Document = dict[str, Any]
ROOT = Path(__file__).parents[2]
JOBS = "/apis/tracerl.dev/v1alpha1"
JOBSETS = "/apis/jobset.x-k8s.io/v1alpha2"


def eventually(what: Callable[[], T], seconds: float = 120.0) -> T:
    """Ask until the answer is true, or until an assertion holds; give the answer. Busy machines are slow."""
    deadline = time.monotonic() + seconds
    while True:
        wrong: Exception | None = None
        try:
            if answer := what():
                return answer
        except (AssertionError, RefusedError, LookupError, OSError) as error:
            wrong = error
        if time.monotonic() > deadline:
            raise AssertionError(f"still not so after {seconds} s: {wrong or 'false'}") from wrong
        time.sleep(0.05)


class OperatorProcess:
    """``python -m tracerl_operator`` with a kubeconfig; a context manager."""

    def __init__(self, kubeconfig: Path, directory: Path, *flags: str) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self._port = free.getsockname()[1]
        self._log = directory / f"operator-{self._port}.log"
        self._command = [
            *(sys.executable, "-m", "tracerl_operator"),
            *("--rollout-image", "example.org/rollout:1", "--trainer-image", "example.org/trainer:1"),
            *("--listen", f"127.0.0.1:{self._port}"),
            *flags,
        ]
        self._environment = {
            "KUBECONFIG": str(kubeconfig),
            "PATH": os.environ["PATH"],
            "PYTHONPATH": os.pathsep.join(str(ROOT / part) for part in ("operator", "jobs")),
        }

    def __enter__(self) -> Self:
        with self._log.open("ab") as log:
            self.process = subprocess.Popen(
                self._command, stdout=log, stderr=log, env=self._environment, cwd=self._log.parent
            )
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def kill(self) -> None:
        """End it without a word."""
        self.process.kill()
        self.process.wait()

    def terminate(self) -> tuple[int, float]:
        """End it as a kubelet does; give the exit code and the seconds that it took."""
        began = time.monotonic()
        self.process.send_signal(signal.SIGTERM)
        code = self.process.wait(timeout=30)
        return code, time.monotonic() - began

    def wait_until_ready(self) -> Self:
        """Wait until it knows everything."""
        eventually(lambda: self.ask("/readyz")[0] == 200 or self.process.poll() is not None, 240)
        assert self.process.poll() is None, self.text()
        return self

    def ask(self, path: str) -> tuple[int, str]:
        """Ask its endpoint; code 0 when it does not answer."""
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self._port}{path}", timeout=10) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()
        except OSError:
            return 0, ""

    def metric(self, name: str, **labels: str) -> float:
        """Sum the samples of a metric that have these labels."""
        total = 0.0
        for line in self.ask("/metrics")[1].splitlines():
            found = re.fullmatch(rf"{name}(?:{{(.*)}})? (\S+)", line)
            if found is None:
                continue
            have = dict(re.findall(r'(\w+)="([^"]*)"', found[1] or ""))
            if labels.items() <= have.items():
                total += float(found[2])
        return total

    def writes(self) -> float:
        """Count its requests that change something, but for its Lease."""
        verbs = ("APPLY", "DELETE", "PATCH", "CREATE")
        return sum(self.metric("tracerl_operator_api_requests_total", verb=verb) for verb in verbs)

    def text(self) -> str:
        """What it has logged."""
        return self._log.read_text()

    def log(self) -> list[Document]:
        """What it has logged, parsed: every line is JSON."""
        return [json.loads(line) for line in self.text().splitlines()]


class Space:
    """A namespace, with what happens in it."""

    def __init__(self, server: ApiServer, name: str) -> None:
        self.server, self.name = server, name
        server.request("POST", "/api/v1/namespaces", {"metadata": {"name": name}})

    def path(self, root: str, plural: str, name: str = "") -> str:
        """Path of a collection or of an object."""
        return f"{root}/namespaces/{self.name}/{plural}{f'/{name}' if name else ''}"

    def create(self, job: Document) -> Document:
        """Create a job."""
        answer: Document = self.server.request("POST", self.path(JOBS, "tracerljobs"), job)
        return answer

    def job(self, name: str = "canary") -> Document:
        """Read a job."""
        answer: Document = self.server.request("GET", self.path(JOBS, "tracerljobs", name))
        return answer

    def edit(self, change: Document, name: str = "canary") -> Document:
        """Change a job by a merge patch."""
        path = self.path(JOBS, "tracerljobs", name)
        answer: Document = self.server.request("PATCH", path, change, kind="merge-patch+json")
        return answer

    def names(self, root: str, plural: str) -> set[str]:
        """Names of the objects of a job."""
        query = "?labelSelector=tracerl.dev/job-name"
        found = self.server.request("GET", self.path(root, plural) + query)
        return {item["metadata"]["name"] for item in found["items"]}

    def jobset(self, name: str = "canary") -> Document:
        """Read a JobSet."""
        answer: Document = self.server.request("GET", self.path(JOBSETS, "jobsets", name))
        return answer

    def jobset_says(self, name: str = "canary", **status: Any) -> None:
        """What JobSet's controller would write."""
        path = self.path(JOBSETS, "jobsets", name) + "/status"
        full = {"restarts": 0, **status}
        self.server.request("PATCH", path, {"status": full}, kind="merge-patch+json")

    def jobset_ends(self, condition: str, name: str = "canary") -> None:
        """The JobSet has come to its end."""
        ended = {
            "type": condition,
            "status": "True",
            "reason": "Test",
            "message": "",
            "lastTransitionTime": "2026-11-29T12:00:00Z",
        }
        self.jobset_says(name, conditions=[ended])

    def run_pod(self, name: str = "canary", *, ready: bool = True) -> None:
        """JobSet's controller makes the pod, the scheduler and the kubelet start it."""
        jobset = self.jobset(name)
        path, pod = self.path("/api/v1", "pods"), f"{name}-node-0-0-abcde"
        if pod not in self.names("/api/v1", "pods"):
            account = {"metadata": {"name": f"{name}-trainer"}}
            labels = {
                "tracerl.dev/job-name": name,
                "jobset.sigs.k8s.io/jobset-uid": jobset["metadata"]["uid"],
                "jobset.sigs.k8s.io/replicatedjob-name": "node",
                "batch.kubernetes.io/job-completion-index": "0",
            }
            spec = {
                "containers": [{"name": "trainer", "image": "example.org/trainer:1"}],
                "automountServiceAccountToken": False,
                "serviceAccountName": account["metadata"]["name"],
            }
            self.server.request("POST", path, {"metadata": {"name": pod, "labels": labels}, "spec": spec})
        condition = {"type": "Ready", "status": str(ready)}
        status = {"status": {"phase": "Running", "conditions": [condition]}}
        kind = "strategic-merge-patch+json"
        self.server.request("PATCH", f"{path}/{pod}/status", status, kind=kind)

    def delete_pod(self, name: str = "canary") -> None:
        """The kubelet has ended the pod."""
        path = self.path("/api/v1", "pods", f"{name}-node-0-0-abcde")
        self.server.request("DELETE", path, {"gracePeriodSeconds": 0})

    def events(self, name: str = "canary") -> list[str]:
        """Reasons of the events on a job, oldest first."""
        found = self.server.request("GET", self.path("/apis/events.k8s.io/v1", "events"))["items"]
        mine = [e for e in found if e["regarding"]["name"] == name]
        return [e["reason"] for e in sorted(mine, key=lambda e: e["eventTime"])]

    def condition(self, kind: str, name: str = "canary") -> Document:
        """A condition of a job."""
        conditions = self.job(name)["status"]["conditions"]
        return next(c for c in conditions if c["type"] == kind)
