"""`tracerl run` as a user types it, and what it left behind."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

MANIFEST = """
apiVersion: tracerl.dev/v1alpha1
kind: TraceRLJob
metadata: {name: gpu}
spec:
  model: {uri: "builtin://tiny-moe"}
  warmup: {steps: 60, seed: 2}
  task: {name: builtin/chain_sum}
  algorithm: {steps: 6, promptsPerStep: 16, samplesPerPrompt: 8, maxVersionDiff: 1}
  method: {name: TRACE}
  records: {auditEvery: 4}
  rollout: {gpusPerNode: 1}
  trainer: {gpusPerNode: 1}
  transport: {ring: {size: 32Mi}}
"""
EQUAL = (
    "model.dtype=Float32",
    "warmup.steps=20",
    "task.parameters={min_terms: 2, max_terms: 2, min_digits: 1, max_digits: 1}",
    "task.heldOutPrompts=32",
    "algorithm.evaluation.prompts=32",
    "algorithm.steps=3",
    "algorithm.maxVersionDiff=0",
    "method.trace.layers.policy=All",
    "quantization.secondInput=Recorded",
    "records.auditEvery=2",
    "rollout.gpusPerNode=0",
    "placement.colocation=None",
)
"""Changes under which a trainer computes what a rollout did, to FP32's rounding noise.

The rollout is on the CPU, where a sequence does not depend on those that are computed beside it: on a GPU
some of its values would fall to the other side of a boundary, and other tokens follow.
"""
SECONDS = 280.0


def sets(*changes: str) -> list[str]:
    """Changes of the manifest's spec on a command line."""
    return [word for change in changes for word in ("--set", f"spec.{change}")]


def start(*arguments: object, **environment: str) -> subprocess.Popen[str]:
    """Start a command."""
    return subprocess.Popen(
        [sys.executable, "-m", "tracerl", *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, **environment},
    )


def kill_after_a_step(running: subprocess.Popen[str], out: Path, name: str) -> None:
    """Kill a process of a run with SIGKILL, once the run has done a step."""
    deadline = time.monotonic() + SECONDS
    while not steps_of(out):
        assert running.poll() is None, running.communicate()[0]
        assert time.monotonic() < deadline, f"no step within {SECONDS:.0f} s: {logs_of(out)}"
        time.sleep(0.05)
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            words = (entry / "cmdline").read_text().split("\0") if entry.name.isdecimal() else []
            if name in words and any(word.startswith(str(out)) for word in words):
                os.kill(int(entry.name), signal.SIGKILL)
                return
    raise AssertionError(f"{name} does not run")


def tracerl(*arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a command to its end."""
    return subprocess.run(
        [sys.executable, "-m", "tracerl", *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=SECONDS,
        env={**os.environ, **environment},
        check=False,
    )


def steps_of(out: Path) -> list[dict[str, Any]]:
    """Records of the steps of a run."""
    path = out / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return [record for line in lines if (record := json.loads(line))["type"] == "step"]


def logs_of(out: Path) -> str:
    """The ends of what its processes wrote."""
    return "\n".join(f"{path.name}: {path.read_text()[-3000:]}" for path in out.glob("logs/*"))


def assert_sound(out: Path, *, steps: int) -> None:
    """Under `EQUAL`: all steps are done, nothing is missing, no code differs, and no gap is left."""
    # A step behind the last checkpoint is done again after a restart.
    found = {step["step"]: step for step in steps_of(out)}
    assert sorted(found) == [*range(1, steps + 1)]
    assert found[1]["reward"]["mean"] > 0
    for step in found.values():
        assert step["records"]["rows_missing"] == step["routes_missing"] == 0
        assert step["gap_guided"]["max"] < 1e-4
        # Experts' inputs, second inputs, keys and values of four layers.
        assert len(step["mismatch"]) == 16
        assert all(site["guided_values"] > 0 == site["guided_mismatched"] for site in step["mismatch"])


def first_steps_equal(out: Path, expected: Path) -> None:
    """The first steps of both runs are of the same tokens, and their policies are the same."""
    one, other = steps_of(out)[0], steps_of(expected)[0]
    for name in ("trajectories", "prompt_tokens", "response_tokens", "reward"):
        assert one[name] == other[name], name
    assert one["policy"] == pytest.approx(other["policy"], rel=1e-3, abs=1e-5)
    assert one["gap_unguided"]["mean"] == pytest.approx(other["gap_unguided"]["mean"], rel=0.05, abs=1e-5)
