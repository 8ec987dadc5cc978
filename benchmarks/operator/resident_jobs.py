"""What the operator takes for a thousand jobs that are there, and how fast it acts on a change of one.

    python benchmarks/operator/resident_jobs.py [--jobs N] [--seconds N] [--soak-minutes N] [--quick]

A real API server with etcd, and the operator as a process; no controllers and no kubelet. Every job runs: it
has all its objects and a pod that is Ready, which this script writes as a kubelet would. A change is an edit
of spec.ttlSecondsAfterFinished; it is done when a watch shows a status with the new observedGeneration. Times
begin before the request that makes the change, so the API server's own time is in them, and one machine does
all at once: API server, etcd, operator and this script. `make test-cluster` builds the API server.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / part) for part in ("tests/cluster", "tests/unit/operator", "operator", "jobs")]

import yaml  # noqa: E402
from api_server import ApiServer  # noqa: E402
from definitions import definition  # noqa: E402
from operator_process import JOBS, JOBSETS, OperatorProcess, Space, eventually  # noqa: E402
from small_cluster import SPEC  # noqa: E402

from tracerl.runtime.bench import machine  # noqa: E402

RESULTS = ROOT / "benchmarks/results/operator-resident-jobs.json"
LIMIT_BYTES = 256 * 2**20
CHANGES_A_SECOND = 2.0
CLIENTS = 8
REQUESTS = "tracerl_operator_api_requests_total"
LOOKS = "tracerl_operator_reconcile_duration_seconds_count"


class Watch:
    """A watch of all jobs, which notes when each showed which observedGeneration first."""

    def __init__(self, server: ApiServer, space: Space) -> None:
        self._server, self._path = server, space.path(JOBS, "tracerljobs")
        self._seen: dict[str, tuple[int, float]] = {}
        self._news = threading.Condition()
        threading.Thread(target=self._follow, daemon=True).start()

    def _follow(self) -> None:
        with contextlib.suppress(OSError):  # the server has ended
            self._read()

    def _read(self) -> None:
        version = self._server.request("GET", self._path + "?limit=1")["metadata"]["resourceVersion"]
        while True:
            query = f"?watch=1&timeoutSeconds=600&resourceVersion={version}"
            with self._server.open(self._path + query) as stream:
                for line in stream:
                    now = time.monotonic()
                    job = json.loads(line)["object"]
                    version = job["metadata"]["resourceVersion"]
                    shown = job.get("status", {}).get("observedGeneration", 0)
                    with self._news:
                        if self._seen.get(job["metadata"]["name"], (0, 0.0))[0] < shown:
                            self._seen[job["metadata"]["name"]] = shown, now
                            self._news.notify_all()

    def when(self, name: str, generation: int, seconds: float = 600.0) -> float:
        """Wait until a job showed a generation; give the time of that."""
        with self._news:
            if not self._news.wait_for(lambda: self._seen.get(name, (0, 0.0))[0] >= generation, seconds):
                raise TimeoutError(f"{name} did not show generation {generation} in {seconds} s")
            return self._seen[name][1]


class Process:
    """What /proc says of a process."""

    def __init__(self, pid: int) -> None:
        self._pid = pid

    def memory(self, key: str = "VmRSS") -> int:
        """Resident bytes now, or their peak (VmHWM)."""
        lines = Path(f"/proc/{self._pid}/status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{key}:"))

    def cpu(self) -> float:
        """Seconds on a core so far."""
        fields = Path(f"/proc/{self._pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


class Bench:
    """A rig with jobs on it, and an operator."""

    def __init__(self, server: ApiServer, directory: Path, jobs: int) -> None:
        self.server, self.directory = server, directory
        self.space = Space(server, "bench")
        self.names = [f"job-{number}" for number in range(jobs)]
        self.watch = Watch(server, self.space)
        self.pool = ThreadPoolExecutor(CLIENTS)
        self.chance = random.Random(1)

    def operator(self) -> OperatorProcess:
        """Make an operator that nobody stands by."""
        return OperatorProcess(self.server.kubeconfig, self.directory, "--peering", "none")

    def fill(self) -> float:
        """Make all jobs and their pods; give the seconds until all run."""
        began = time.monotonic()
        kind = {"apiVersion": "tracerl.dev/v1alpha1", "kind": "TraceRLJob", "spec": SPEC}
        list(self.pool.map(lambda n: self.space.create(kind | {"metadata": {"name": n}}), self.names))
        run: set[str] = set()
        while len(run) < len(self.names):
            # Asked seldom, and about all at once: the answers cost the same API server.
            time.sleep(1)
            made = self.space.names(JOBSETS, "jobsets") - run
            list(self.pool.map(self.space.run_pod, made))
            run |= made
        while self._count("Ready") < len(self.names):
            time.sleep(3)
        return time.monotonic() - began

    def _count(self, state: str) -> int:
        jobs = self.server.request("GET", self.space.path(JOBS, "tracerljobs"))["items"]
        conditions = [j.get("status", {}).get("conditions", []) for j in jobs]
        return sum(any(c["type"] == state and c["status"] == "True" for c in each) for each in conditions)

    def change(self, name: str) -> float:
        """Change a job; give the seconds until its status shows that."""
        began = time.monotonic()
        seconds = self.chance.randrange(10**6, 10**8)
        generation = self.space.edit({"spec": {"ttlSecondsAfterFinished": seconds}}, name)["metadata"][
            "generation"
        ]
        return self.watch.when(name, generation) - began

    def steadily(self, seconds: float, each: Callable[[], None]) -> list[float]:
        """Change random jobs at an even rate; give each one's seconds."""
        began, futures = time.monotonic(), []
        while (due := began + len(futures) / CHANGES_A_SECOND) < began + seconds:
            time.sleep(max(0.0, due - time.monotonic()))
            futures.append(self.pool.submit(self.change, self.chance.choice(self.names)))
            each()
        return [future.result() for future in futures]

    def burst(self) -> float:
        """Change all jobs at once; give the seconds until all show it."""
        began = time.monotonic()
        list(self.pool.map(self.change, self.names))
        return time.monotonic() - began


def quantiles(seconds: Sequence[float]) -> dict[str, float]:
    """Say how times are spread."""
    cuts = statistics.quantiles(seconds, n=100, method="inclusive")
    return {"p50": cuts[49], "p90": cuts[89], "p99": cuts[98], "max": max(seconds)}


def cost(bench: Bench, operator: OperatorProcess, seconds: float) -> dict[str, Any]:
    """Measure what changes cost over what the same time without changes does."""
    process = Process(operator.process.pid)

    def used() -> tuple[float, float, float]:
        return process.cpu(), operator.metric(REQUESTS), operator.metric(LOOKS)

    start = used()
    time.sleep(seconds)
    middle = used()
    reactions = bench.steadily(seconds, lambda: None)
    end = used()
    idle = [b - a for a, b in zip(start, middle, strict=True)]
    busy = [b - a for a, b in zip(middle, end, strict=True)]
    cpu, requests, looks = ((b - a) / len(reactions) for a, b in zip(idle, busy, strict=True))
    return {
        "changes": len(reactions),
        "changesPerSecond": CHANGES_A_SECOND,
        "reactionSeconds": quantiles(reactions),
        "cpuMillisecondsPerChange": cpu * 1000,
        "apiRequestsPerChange": requests,
        "looksPerChange": looks,
        "idleCpuMillisecondsPerSecond": idle[0] / seconds * 1000,
        "idleApiRequestsPerSecond": idle[1] / seconds,
        "loadAverage": os.getloadavg()[0],
    }


def soak(
    bench: Bench, operator: OperatorProcess, minutes: float, save: Callable[[dict[str, Any]], None]
) -> dict[str, Any]:
    """Change jobs for a long time and watch the memory."""
    process = Process(operator.process.pid)
    curve: list[tuple[float, int]] = []
    began = time.monotonic()

    def sample() -> None:
        now = time.monotonic() - began
        if not curve or now - curve[-1][0] >= 10:
            curve.append((round(now, 1), process.memory()))
            if len(curve) % 6 == 0:
                save({"minutes": round(now / 60, 1), "residentBytes": curve})

    reactions = bench.steadily(minutes * 60, sample)
    third = len(curve) // 3
    middle, last = (statistics.fmean(b for _, b in part) for part in (curve[third:-third], curve[-third:]))
    return {
        "minutes": minutes,
        "changes": len(reactions),
        "reactionSeconds": quantiles(reactions),
        "residentBytesLastThirdOverMiddleThird": last / middle,
        "residentBytes": curve,
        "errors": operator.metric("tracerl_operator_reconcile_errors_total"),
        "loadAverage": os.getloadavg()[0],
    }


def measure(
    jobs: int,
    seconds: float,
    minutes: float,
    say: Callable[[str], None],
    save: Callable[[dict[str, Any]], None],
) -> dict[str, Any]:
    """Do all of it; what is known so far is saved now and then, for a soak takes long."""
    with tempfile.TemporaryDirectory() as place, ApiServer(Path(place)) as server:
        server.define(yaml.safe_load((ROOT / "crds/tracerljobs.yaml").read_text()))
        server.define(definition("JobSet"))
        bench = Bench(server, Path(place), jobs)
        with bench.operator() as first:
            first.wait_until_ready()
            empty = Process(first.process.pid).memory()
            filled = bench.fill()
            say(f"{jobs} jobs run after {filled:.0f} s")
            after_fill = Process(first.process.pid).memory()
            before = first.metric(REQUESTS)
            burst = bench.burst()
            say(f"all changed at once: {burst:.1f} s")
            burst_requests = (first.metric(REQUESTS) - before) / jobs
            stopped = first.terminate()
        began = time.monotonic()
        with bench.operator() as second:
            second.wait_until_ready()
            ready = time.monotonic() - began
            eventually(lambda: second.metric(LOOKS) >= jobs, 600)
            drained = time.monotonic() - began
            say(f"started again: ready after {ready:.1f} s, all looked at after {drained:.1f} s")
            process = Process(second.process.pid)
            costs = cost(bench, second, seconds)
            say(f"p99 {costs['reactionSeconds']['p99'] * 1000:.0f} ms, {process.memory() / 2**20:.0f} MiB")
            result = {
                "jobs": jobs,
                "residentBytes": {
                    "empty": empty,
                    "afterFill": after_fill,
                    "afterRestart": process.memory(),
                    "peakOfRestart": process.memory("VmHWM"),
                    "limit": LIMIT_BYTES,
                },
                "fillSeconds": filled,
                "burst": {"seconds": burst, "apiRequestsPerJob": burst_requests, "clients": CLIENTS},
                "restart": {"readySeconds": ready, "drainedSeconds": drained, "stopSeconds": stopped[1]},
                "steady": costs,
            }
            save(result)
            if minutes:
                result["soak"] = soak(bench, second, minutes, lambda so_far: save(result | {"soak": so_far}))
                flat = result["soak"]["residentBytesLastThirdOverMiddleThird"]
                say(f"memory of the soak's last third: {flat:.3f} of its middle third")
            result["residentBytes"]["peak"] = process.memory("VmHWM")
            result["errors"] = second.metric("tracerl_operator_reconcile_errors_total")
            save(result)
        return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--jobs", type=int, default=1000)
    parser.add_argument("--seconds", type=float, default=120.0, help="of the steady changes, and without any")
    parser.add_argument("--soak-minutes", type=float, default=0.0)
    parser.add_argument("--quick", action="store_true", help="20 jobs and 10 seconds: shows that it works")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    jobs, seconds = (20, 10.0) if options.quick else (options.jobs, options.seconds)
    out = options.out or (None if options.quick else RESULTS)
    packages = ["kopf", "kubernetes", "aiohttp", "pydantic"]

    def say(text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    def save(result: dict[str, Any]) -> None:
        if out is not None:
            document = {"results": [result], "machine": machine(packages)}
            out.write_text(json.dumps(document, indent=2) + "\n")

    result = measure(jobs, seconds, options.soak_minutes, say, save)
    if out is None:
        print(json.dumps(result, indent=2))
    if result["residentBytes"]["peak"] > LIMIT_BYTES:
        raise SystemExit(f"resident memory passed {LIMIT_BYTES} bytes")


if __name__ == "__main__":
    main()
