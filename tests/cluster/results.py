"""Writes what a run of the cluster tests found to the file that TRACERL_CLUSTER_RESULTS names."""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

_TOOLS = Path(__file__).parent / "tools"
_MODULES = {
    "kubernetes": ("kube", "k8s.io/kubernetes"),
    "etcd": ("kube", "go.etcd.io/etcd/server/v3"),
    "coredns": ("kube", "github.com/coredns/coredns"),
    "containerd": ("containerd", "github.com/containerd/containerd/v2"),
    "helm": ("kube", "helm.sh/helm/v3"),
    "jobset": ("jobset", "sigs.k8s.io/jobset"),
    "kueue": ("kueue", "sigs.k8s.io/kueue"),
}


def _versions() -> dict[str, str]:
    found = {}
    for name, (tool, module) in _MODULES.items():
        text = (_TOOLS / tool / "go.mod").read_text()
        match = re.search(rf"^(?:require )?\s*{re.escape(module)} (v\S+)", text, re.MULTILINE)
        assert match is not None, f"{module} is not in tools/{tool}/go.mod"
        found[name] = match[1]
    runc = subprocess.run(["runc", "--version"], capture_output=True, text=True, check=False).stdout
    return {
        **found,
        "runc": runc.split("\n", 1)[0].removeprefix("runc version "),
        "linux": platform.release(),
    }


class Results:
    """A pytest plugin; a test's outcome is the worst of its phases, its time that of the test alone."""

    def __init__(self, path: Path, level: str) -> None:
        self._path, self._level = path, level
        self._tests: dict[str, dict[str, Any]] = {}
        self._start = time.monotonic()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        entry = self._tests.setdefault(report.nodeid, {"outcome": "passed", "seconds": 0.0})
        if report.when == "call":
            entry["seconds"] = round(report.duration, 1)
        if report.failed or (report.skipped and entry["outcome"] == "passed"):
            entry["outcome"] = report.outcome

    def pytest_sessionfinish(self) -> None:
        commit = subprocess.run(
            ["git", "rev-parse", "HEAD"], cwd=_TOOLS, capture_output=True, text=True, check=False
        ).stdout.strip()
        outcomes = [entry["outcome"] for entry in self._tests.values()]
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        document = {
            "date": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
            "commit": commit,
            "level": self._level,
            "seconds": round(time.monotonic() - self._start),
            "machine": {"cpus": os.cpu_count(), "memoryBytes": memory, "architecture": platform.machine()},
            "versions": _versions(),
            "outcomes": {each: outcomes.count(each) for each in sorted(set(outcomes))},
            "tests": self._tests,
        }
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._path.write_text(json.dumps(document, indent=1) + "\n")
