"""How large a scrape is and how long it takes, with a thousand jobs.

    python benchmarks/operator/scrapes.py

The operator's metrics are made of all its jobs, so they are measured with none and with a thousand of them
in its own store. A job's are those of its processes, whatever other jobs there are: the most that their
labels allow, without audits and with audits of 48 layers. A scrape's time is the CPU time that making the
text takes, also as a ratio to parsing that text by prometheus_client in the same run.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "tests/unit/operator"), str(ROOT / "operator")]

from prometheus_client.parser import text_string_to_metric_families  # noqa: E402
from small_cluster import SPEC  # noqa: E402

from tracerl.api.constants import METRICS, OPEN_LABELS, Role  # noqa: E402
from tracerl.runtime.bench import machine  # noqa: E402
from tracerl.transport.exposition import exposition  # noqa: E402
from tracerl_operator.shell.kinds import JOB  # noqa: E402
from tracerl_operator.shell.metrics import Metrics  # noqa: E402
from tracerl_operator.shell.store import Store  # noqa: E402

RESULTS = ROOT / "benchmarks/results/operator-scrapes.json"
JOBS, LAYERS, TIMES = 1_000, 48, 25
REASONS = ("Running", "Starting", "Queued", "Unschedulable")


def operator(jobs: int) -> Callable[[], bytes]:
    """Metrics of an operator with so many jobs, a quarter in each state."""
    metrics, store = Metrics(), Store()
    for number in range(jobs):
        reason = REASONS[number % len(REASONS)]
        ready = "True" if reason == "Running" else "False"
        since = {"lastTransitionTime": "2026-11-29T12:00:00Z"}
        conditions = [{"type": "Ready", "status": ready, "reason": reason, **since}]
        name = {"namespace": f"team-{number % 20}", "name": f"job-{number}"}
        metadata = {**name, "uid": f"uid-{number}", "resourceVersion": str(number + 1)}
        store.put(JOB, {"metadata": metadata, "spec": SPEC, "status": {"conditions": conditions}})
    metrics.show_jobs(lambda: map(store.job, store.job_keys()))
    metrics.show("tracerl_operator_queue_depth", lambda: {"": 0.0})
    metrics.show("tracerl_operator_leads", lambda: {"": 1.0})
    for verb, kind, code in product(("GET", "APPLY", "LIST", "WATCH"), range(12), (200, 404, 409)):
        metrics.count(verb, f"Kind{kind}", code)
    return metrics.text


def process(role: Role, layers: int) -> Callable[[], bytes]:
    """Metrics of a process of a job, all that its labels allow."""

    def values(label: str, listed: tuple[str, ...]) -> tuple[str, ...]:
        count = layers if label == "layer" else OPEN_LABELS[label].most if not listed else 0
        return listed or tuple(str(number) for number in range(count))

    made = {
        spec.name: dict.fromkeys(
            product(*(values(*pair) for pair in zip(spec.labels, spec.values, strict=True))),
            0.123456789,
        )
        for spec in METRICS
        if spec.source is role
    }
    return lambda: exposition(role, made)


def measure(scrape: Callable[[], bytes]) -> dict[str, Any]:
    """Size and CPU time of a scrape."""
    text = scrape().decode()

    def seconds(work: Callable[[], object]) -> float:
        started = time.process_time()
        work()
        return time.process_time() - started

    # In turns, so that a machine that is busy for a while slows down both.
    pairs = [
        (seconds(scrape), seconds(lambda: list(text_string_to_metric_families(text)))) for _ in range(TIMES)
    ]
    return {
        "bytes": len(text),
        "series": sum(not line.startswith("#") for line in text.splitlines()),
        "cpuMilliseconds": median(a for a, _ in pairs) * 1000,
        "ratioToParsing": median(a / b for a, b in pairs),
    }


def main() -> None:
    """Measure, print and write."""
    roles = (Role.TRAINER, Role.ROLLOUT, Role.STORE)
    result = {
        "machine": machine(["prometheus-client"]),
        "jobs": JOBS,
        "operator": {"none": measure(operator(0)), "all": measure(operator(JOBS))},
        "job": {
            "withoutAudits": {role: measure(process(role, 0)) for role in roles},
            f"auditsOf{LAYERS}Layers": {role: measure(process(role, LAYERS)) for role in roles},
        },
    }
    plain = result["job"]["withoutAudits"]
    result["allJobsOfOneNode"] = {
        what: JOBS * sum(plain[role][what] for role in roles) for what in ("bytes", "series")
    }
    text = json.dumps(result, indent=1) + "\n"
    RESULTS.write_text(text)
    print(text)


if __name__ == "__main__":
    main()
