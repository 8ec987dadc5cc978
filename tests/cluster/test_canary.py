"""`tracerl canary` against a real API server, on which the test writes the status as the operator does."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from api_server import ApiServer
from junitparser import JUnitXml
from operator_process import eventually

from tracerl.api.constants import LABEL_CANARY

JOB = """
apiVersion: tracerl.dev/v1alpha1
kind: TraceRLJob
metadata: {name: nightly, labels: {team: rl}}
spec:
  model: {uri: "builtin://tiny-moe"}
  task: {name: builtin/chain_sum}
  algorithm: {steps: 3, promptsPerStep: 8, samplesPerPrompt: 4}
  method: {name: TRACE}
  expect: {maxGapRatio: "0.5", maxMissingRows: 0}
"""
MET = {"name": "maxGapRatio", "wanted": "<= 0.5", "value": "0.33", "met": True}
ROWS = {"name": "maxMissingRows", "wanted": "<= 0", "value": "0", "met": True}


class Rig:
    """A namespace of its own, the command in it, and the operator's part."""

    def __init__(self, server: ApiServer, here: Path) -> None:
        self.server, self.here = server, here
        self.namespace = f"canary-{uuid.uuid4().hex[:8]}"
        self.jobs = f"/apis/tracerl.dev/v1alpha1/namespaces/{self.namespace}/tracerljobs"
        self.processes: list[subprocess.Popen[str]] = []
        (here / "job.yaml").write_text(JOB)
        server.request("POST", "/api/v1/namespaces", {"metadata": {"name": self.namespace}})

    def start(self, *more: str) -> subprocess.Popen[str]:
        environment = {**os.environ, "KUBECONFIG": str(self.server.kubeconfig)}
        command = [sys.executable, "-W", "ignore", "-m", "tracerl", "canary", "job.yaml"]
        process = subprocess.Popen(
            [*command, f"--namespace={self.namespace}", *more],
            cwd=self.here,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.processes.append(process)
        return process

    def names(self) -> list[str]:
        return sorted(job["metadata"]["name"] for job in self.server.request("GET", self.jobs)["items"])

    def new(self, known: list[str]) -> dict[str, Any]:
        """The job that is not one of these."""
        (name,) = eventually(lambda: [one for one in self.names() if one not in known])
        job: dict[str, Any] = self.server.request("GET", f"{self.jobs}/{name}")
        return job

    def tell(self, name: str, **status: Any) -> None:
        """Write a status."""
        path = f"{self.jobs}/{name}/status?fieldValidation=Strict"
        self.server.request("PATCH", path, {"status": status}, kind="merge-patch+json")

    def end(
        self,
        name: str,
        terminal: str,
        reason: str = "Completed",
        message: str = "all 3 steps are done",
        expectations: Any = (MET, ROWS),
        *,
        at: str = "2026-11-30T10:02:10Z",
    ) -> None:
        """End the job as the operator does."""
        moment = {"lastTransitionTime": at, "observedGeneration": 1}
        truths = {"Ready": False, "Suspended": False, "Complete": terminal == "Complete"}
        truths["Failed"] = not truths["Complete"]
        conditions = [
            {
                "type": kind,
                "status": str(truth),
                "reason": reason,
                "message": message if truth else "",
                **moment,
            }
            for kind, truth in truths.items()
        ]
        self.tell(
            name,
            summary=terminal,
            terminal=terminal,
            startTime="2026-11-30T10:00:00Z",
            completionTime=at,
            conditions=conditions,
            progress={"step": 3, "steps": 3, "policyVersion": 3, "expectations": list(expectations)},
        )


@pytest.fixture
def rig(server: ApiServer, tmp_path: Path) -> Iterator[Rig]:
    rig = Rig(server, tmp_path)
    yield rig
    for process in rig.processes:
        process.kill()
        process.communicate()


def verdict(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=60)
    return process.returncode, out, err


def test_a_job_that_completes_passes(rig: Rig) -> None:
    process = rig.start("--junit=junit.xml", "--set=spec.algorithm.seed=7", "--timeout=5m")
    job = rig.new([])
    name = job["metadata"]["name"]
    assert name.startswith("nightly-")
    assert job["metadata"]["labels"] == {"team": "rl", LABEL_CANARY: "true"}
    # It ends, and goes, also when nobody waits for it any more.
    assert job["spec"]["activeDeadlineSeconds"] == 300
    assert job["spec"]["ttlSecondsAfterFinished"] == 14 * 24 * 3600
    assert job["spec"]["algorithm"]["seed"] == 7
    rig.tell(name, summary="Running", progress={"step": 2, "steps": 3})
    rig.end(name, "Complete")
    code, out, err = verdict(process)
    assert (code, err) == (0, "")
    assert out.splitlines()[0] == f"made trj/{name} in namespace {rig.namespace}"
    assert "Complete, step 3" in out
    assert "met     maxGapRatio 0.33, wanted <= 0.5" in out
    (suite,) = JUnitXml.fromfile(str(rig.here / "junit.xml"))
    assert (suite.name, suite.failures, suite.skipped, suite.time) == ("nightly", 0, 0, 130.0)
    assert {case.name: case.system_out for case in suite} == {
        "job": None,
        "maxGapRatio": "maxGapRatio 0.33, wanted <= 0.5",
        "maxMissingRows": "maxMissingRows 0, wanted <= 0",
    }
    assert {one.name: one.value for one in suite.properties()}["job"] == name
    assert rig.names() == [name]  # alerts look at the last one


BROKEN = {"name": "maxGapRatio", "wanted": "<= 0.5", "value": "0.61", "met": False}
FAILURES: dict[str, tuple[str, str, list[Any], str]] = {
    "broken": ("ExpectationBroken", "the run missed it", [BROKEN, ROWS], "maxGapRatio"),
    "lost": ("RecordsMissing", "step 2 lacks rows", [], "job"),
}


@pytest.mark.parametrize("case", FAILURES)
def test_a_job_that_fails_fails_the_case_that_is_why(rig: Rig, case: str) -> None:
    reason, message, expectations, failed = FAILURES[case]
    process = rig.start("--junit=-")
    name = rig.new([])["metadata"]["name"]
    rig.end(name, "Failed", reason, message, expectations)
    code, out, err = verdict(process)
    assert code == 1
    assert err.splitlines()[-1] == f"tracerl: {reason}: {message}"
    (suite,) = JUnitXml.fromstring(out.encode())  # nothing else is on stdout
    assert [one.name for one in suite if any(r.type == reason for r in one.result if hasattr(r, "type"))] == [
        failed
    ]


def test_a_job_that_does_not_end_fails_with_what_it_waits_for(rig: Rig) -> None:
    process = rig.start("--timeout=3s", "--junit=junit.xml")
    name = rig.new([])["metadata"]["name"]
    ready = {"type": "Ready", "status": "False", "reason": "Unschedulable", "message": "no node has a GPU"}
    rig.tell(
        name, conditions=[{**ready, "lastTransitionTime": "2026-11-30T10:00:00Z", "observedGeneration": 1}]
    )
    code, _, err = verdict(process)
    assert code == 1
    assert f"trj/{name} has not ended after 3 s, and last said Unschedulable: no node has a GPU" in err
    (suite,) = JUnitXml.fromfile(str(rig.here / "junit.xml"))
    assert [type(one).__name__ for one in next(iter(suite)).result] == ["Failure"]


def test_the_last_of_each_result_stays(rig: Rig) -> None:
    ends = [("Complete", "01"), ("Failed", "02"), ("Complete", "03"), ("Complete", "04")]
    made: list[str] = []
    for terminal, hour in ends:
        process = rig.start()
        name = rig.new(made)["metadata"]["name"]
        rig.end(name, terminal, at=f"2026-11-30T{hour}:00:00Z")
        assert verdict(process)[0] == (terminal == "Failed")
        made.append(name)
    assert rig.names() == sorted([made[1], made[3]])


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=lambda number: number.name)
def test_who_is_told_to_stop_leaves_no_job(rig: Rig, number: signal.Signals) -> None:
    process = rig.start()
    rig.new([])
    assert process.stdout is not None
    process.stdout.readline()
    process.stdout.readline()  # it has looked at the job, so it waits
    process.send_signal(number)
    assert verdict(process)[::2] == (1, "tracerl: stopped (Ctrl-C)\n")
    assert rig.names() == []


def test_the_api_server_may_go_and_come_back(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    import yaml

    definition = Path(__file__).parents[2] / "crds/tracerljobs.yaml"
    with ApiServer(tmp_path_factory.mktemp("restarted")) as server:
        server.define(yaml.safe_load(definition.read_text()))
        rig = Rig(server, tmp_path)
        process = rig.start()
        name = rig.new([])["metadata"]["name"]
        server.stop()
        assert process.stdout is not None
        said = iter(process.stdout.readline, "")
        assert next(line for line in said if "the API server cannot be reached" in line)
        server.start()
        server.wait()
        rig.end(name, "Complete")
        assert verdict(process)[0] == 0


def wrong_namespace(_: Rig) -> list[str]:
    return ["--namespace=nowhere"]


def wrong_server(rig: Rig) -> list[str]:
    text = rig.server.kubeconfig.read_text()
    port = text.rpartition("127.0.0.1:")[2].split('"')[0]
    (rig.here / "kubeconfig").write_text(text.replace(port, "1"))
    return []


WRONG: dict[str, tuple[Callable[[Rig], list[str]], int, str]] = {
    "namespace": (
        wrong_namespace,
        2,
        'namespaces "nowhere" not found; correct that and start the canary again',
    ),
    "server": (wrong_server, 1, "the API server cannot be reached ("),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_cannot_be_made_is_a_sentence(rig: Rig, monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    change, code, sentence = WRONG[case]
    more = change(rig)
    if (rig.here / "kubeconfig").exists():
        monkeypatch.setattr(rig.server, "kubeconfig", rig.here / "kubeconfig")
    found, out, err = verdict(rig.start(*more))
    assert (found, out) == (code, "")
    assert sentence in err
    assert (err.startswith("tracerl: "), err.count("\n")) == (True, 1)


def test_no_cluster_is_a_sentence(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rig.server, "kubeconfig", rig.here / "absent")
    code, _, err = verdict(rig.start())
    assert code == 2
    assert "no cluster is known here" in err
    assert "say which with KUBECONFIG, or run the job here with tracerl run" in err
