"""A canary that trains, the operator's exporter, and a Prometheus that scrapes both, once for all tests."""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import pytest
import yaml
from chart_files import NAMESPACE, alert_rules
from prometheus import Prometheus, running, until
from scraping import scrape_configs, targets
from small_cluster import ALL_KINDS, INSTALLATION, TOKEN

from tracerl.api.constants import LABEL_CANARY
from tracerl.api.job import TraceRLJob
from tracerl_operator.objects import wanted
from tracerl_operator.shell.endpoint import listen
from tracerl_operator.shell.kinds import JOB, POD
from tracerl_operator.shell.metrics import Metrics
from tracerl_operator.shell.store import Store

ROOT = Path(__file__).parents[2]
TEAM, UID = "team", "6f1c2f9e-0000-4000-8000-00000000000a"
STEPS = 24
_SETTINGS = {
    "task.name": "builtin/chain_sum",
    "task.heldOutPrompts": 32,
    "warmup.steps": 20,
    "algorithm.steps": STEPS,
    "algorithm.promptsPerStep": 8,
    "algorithm.evaluation.every": 4,
    "algorithm.evaluation.prompts": 32,
    "records.auditEvery": 16,
    "expect.minRewardGain": "null",
    "expect.maxGapRatio": "null",
}


@dataclass(frozen=True)
class Scraped:
    """A run that ended, and what Prometheus has of it."""

    prometheus: Prometheus
    start: float
    end: float
    run: Path
    document: dict[str, Any]
    pages: dict[str, bytes]
    """What each exporter showed in the middle of the run, by its role."""

    def steps(self) -> dict[int, dict[str, Any]]:
        """The run log's records of steps by number."""
        lines = (self.run / "metrics.jsonl").read_text().splitlines()
        records = [json.loads(line) for line in lines]
        return {record["step"]: record for record in records if record["type"] == "step"}


def _conditions(**conditions: tuple[str, str, datetime]) -> list[dict[str, Any]]:
    return [
        {"type": kind, "status": status, "reason": reason, "lastTransitionTime": at.isoformat()}
        for kind, (status, reason, at) in conditions.items()
    ]


def _fleet(now: datetime) -> dict[str, dict[str, Any]]:
    """Status of jobs that an operator looks after, by name."""
    recently, ended = now - timedelta(minutes=5), now - timedelta(hours=2)

    def end(result: str, at: datetime) -> dict[str, Any]:
        return {
            "terminal": result,
            "completionTime": at.isoformat(),
            "conditions": _conditions(**{result: ("True", "Completed", at)}),
        }

    return {
        "runs": {"conditions": _conditions(Ready=("True", "Running", recently))},
        "starts": {"conditions": _conditions(Ready=("False", "Starting", recently))},
        "waits": {
            "conditions": _conditions(Ready=("False", "Queued", ended), Suspended=("True", "Queued", ended))
        },
        "rests": {
            "conditions": _conditions(
                Ready=("False", "SuspendedBySpec", ended), Suspended=("True", "SuspendedBySpec", ended)
            )
        },
        "canary-1": end("Failed", ended - timedelta(hours=1)),
        "canary-2": end("Complete", ended),
    }


def operator_metrics(now: datetime) -> Metrics:
    """The operator's metrics after some work, from its own store."""
    metrics, store = Metrics(), Store()
    for number, (name, status) in enumerate(_fleet(now).items()):
        labels = {LABEL_CANARY: "true"} if name.startswith("canary") else {}
        metadata = {"name": name, "namespace": TEAM, "uid": f"uid-{number}", "labels": labels}
        store.put(JOB, {"metadata": {**metadata, "resourceVersion": str(number + 1)}, "status": status})
        metrics.saw(JOB)
    metrics.saw(POD)
    metrics.show_jobs(lambda: map(store.job, store.job_keys()))
    metrics.show("tracerl_operator_queue_depth", lambda: {"": 3.0})
    metrics.show("tracerl_operator_leads", lambda: {"": 1.0})
    return metrics


@contextmanager
def exported(metrics: Metrics, metrics_work: threading.Event) -> Iterator[str]:
    """Serve them as the operator does, and work on until told to end; gives the address."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    runner = asyncio.run_coroutine_threadsafe(
        listen("127.0.0.1", 0, health=lambda: None, readiness=lambda: None, metrics=metrics.text), loop
    ).result()

    def work() -> None:
        while not metrics_work.wait(0.2):
            metrics.durations.labels("unchanged").observe(0.02)
            metrics.durations.labels("changed").observe(0.2)
            metrics.count("GET", "Pod", 200)
            metrics.count("PATCH", "JobSet", 409)
            metrics.failed(503)

    worker = threading.Thread(target=work)
    worker.start()
    try:
        yield f"127.0.0.1:{runner.addresses[0][1]}"
    finally:
        metrics_work.set()
        worker.join()
        asyncio.run_coroutine_threadsafe(runner.cleanup(), loop).result()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


def _objects(spec: dict[str, Any], uid: str) -> list[dict[str, Any]]:
    job = TraceRLJob.model_validate(
        {"metadata": {"name": "canary", "namespace": TEAM, "uid": uid}, "spec": spec}
    )
    installation = replace(INSTALLATION, pod_monitor=True)
    return wanted(job, uid, installation, served=ALL_KINDS, token=TOKEN, restarts=0)


def _pod(objects: list[dict[str, Any]]) -> dict[str, Any]:
    jobset = next(each for each in objects if each["kind"] == "JobSet")
    (replicated,) = jobset["spec"]["replicatedJobs"]
    template: dict[str, Any] = replicated["template"]["spec"]["template"]
    return template


def _write(path: Path, document: Any) -> None:
    """Write it so that nobody reads half of it."""
    unfinished = path.with_suffix(".new")
    unfinished.write_text(json.dumps(document))
    unfinished.rename(path)


def _lines(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


def _page(address: str, token: str) -> bytes:
    request = Request(f"http://{address}/metrics", headers={"Authorization": f"Bearer {token}"})
    with urlopen(request, timeout=30) as answer:
        page: bytes = answer.read()
    return page


@pytest.fixture(scope="session")
def scraped(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scraped]:
    """Train a canary of some steps in the sight of Prometheus."""
    missing = [each for each in ("prometheus", "promtool") if shutil.which(each) is None]
    assert not missing, f"{missing[0]} is not installed: apt-get install prometheus"
    directory = tmp_path_factory.mktemp("scraped")
    run, found = directory / "run", directory / "pods.json"
    document = yaml.safe_load((ROOT / "jobs/examples/canary.yaml").read_text())
    settings = {**_SETTINGS, "transport.spillPath": str(directory / "spill")}
    (directory / "spill").mkdir()
    objects = _objects(document["spec"], UID)
    monitor = next(each for each in objects if each["kind"] == "PodMonitor")
    # Another job's pod, which has the same ports: Prometheus would scrape it where the selector is too wide.
    stranger = targets(
        _pod(_objects(document["spec"], "another-uid")), namespace=TEAM, name="x", addresses={}
    )
    _write(found, stranger)
    now = datetime.now(UTC)
    with exported(operator_metrics(now), threading.Event()) as address:
        labels = {"namespace": NAMESPACE, "job": "tracerl-operator", "pod": "tracerl-operator-a"}
        operator = {"job_name": "operator", "static_configs": [{"targets": [address], "labels": labels}]}
        scrapes = [operator, *scrape_configs(monitor, credentials=run / "token", found=found)]
        with running(directory, scrapes, alert_rules()) as prometheus:
            start = time.time()
            command = [sys.executable, "-m", "tracerl", "run", str(ROOT / "jobs/examples/canary.yaml")]
            for path, value in settings.items():
                command += ["--set", f"spec.{path}={value}"]
            log = directory / "run.log"
            with log.open("wb") as out:
                process = subprocess.Popen([*command, "--out", str(run)], stdout=out, stderr=out)
            try:

                def ended() -> bool:
                    addresses = {
                        file.stem.partition("-")[0]: json.loads(file.read_text())["url"].partition("//")[2]
                        for file in sorted(run.glob("endpoints/*-0.json"))
                    }
                    if len(addresses) == 3 and not pods:
                        pods.extend(
                            targets(
                                _pod(objects), namespace=TEAM, name="canary-node-0-0", addresses=addresses
                            )
                        )
                        _write(found, [*stranger, *pods])
                    if pods and not pages and _lines(run / "metrics.jsonl") > STEPS // 3:
                        addresses["operator"] = address
                        token = (run / "token").read_text().strip()
                        pages.update({role: _page(where, token) for role, where in addresses.items()})
                    return process.poll() is not None

                pages: dict[str, bytes] = {}
                pods: list[dict[str, Any]] = []
                until("the run ends", ended, 480)
            finally:
                process.kill()
                process.wait()
            assert process.returncode == 0, log.read_text()
            yield Scraped(prometheus, start, time.time(), run, document, pages)
