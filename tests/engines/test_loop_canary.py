"""`tracerl run` with SGLang as rollout and Megatron-Core as trainer: it learns, and it survives kills.

TRACERL_ROLLOUT_PYTHON and TRACERL_TRAINER_PYTHON name both interpreters, as in `make test-engines`; the
test itself needs neither engine.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import pytest
from conftest import TWO_RANKS, weights_of

from tracerl.api.resolved import EndpointFile, RunLayout
from tracerl.engines.hf import write_model
from tracerl.runtime.interpreters import ROLES, variable

ROOT = Path(__file__).resolve().parents[2]
JOB = "jobs/examples/canary-engines.yaml"
SECONDS = 1500.0
"""A run that takes longer hangs: it is a few minutes, and several times that where the cores are busy."""
pytestmark = pytest.mark.timeout(1800)
T = TypeVar("T")


class Run:
    """A running `tracerl run`."""

    def __init__(self, directory: Path, *overrides: str) -> None:
        for role in ROLES:
            assert os.environ.get(variable(role)), f"{variable(role)} is not set; use make test-engines"
        words = [word for override in overrides for word in ("--set", override)]
        self.layout = RunLayout(directory)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tracerl", "run", JOB, "--out", str(directory), *words],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def finish(self) -> tuple[int, str]:
        """Exit code, and what it wrote."""
        try:
            written, _ = self._process.communicate(timeout=SECONDS)
        except subprocess.TimeoutExpired:
            self._process.send_signal(signal.SIGTERM)
            raise
        return self._process.returncode, written

    def until(self, condition: Callable[[], T | None], what: str) -> T:
        """Wait for a condition while the run goes on."""
        deadline = time.monotonic() + SECONDS
        while (found := condition()) is None:
            assert self._process.poll() is None, f"it ended before {what}: {self.finish()}"
            assert time.monotonic() < deadline, f"waited in vain: {what}"
            time.sleep(0.1)
        return found

    def steps(self) -> list[dict[str, Any]]:
        """Records of the steps that are done."""
        if not self.layout.metrics.exists():
            return []
        lines = self.layout.metrics.read_text(encoding="utf-8").splitlines()
        return [record for record in map(json.loads, lines) if record["type"] == "step"]

    def pid_of(self, name: str) -> int:
        """A process of this run by its name, which is the last word of its command line."""
        job, word = os.fsencode(self.layout.job), name.encode()
        for entry in Path("/proc").iterdir():
            with contextlib.suppress(OSError):
                words = (
                    (entry / "cmdline").read_bytes().rstrip(b"\0").split(b"\0")
                    if entry.name.isdecimal()
                    else []
                )
                if job in words and words[-1] == word:
                    return int(entry.name)
        raise AssertionError(f"{name} does not run")

    def kill(self, name: str) -> None:
        """Kill a process with SIGKILL, and wait until another one is in its place."""
        path = self.layout.endpoints / f"{name}.json"
        before = EndpointFile.read(path)
        assert before is not None
        os.kill(before.pid, signal.SIGKILL)

        def other() -> EndpointFile | None:
            now = EndpointFile.read(path)
            return now if now is not None and now.instance_id != before.instance_id else None

        self.until(other, f"{name} is there again")


def test_the_canary_of_the_engines(tmp_path: Path) -> None:
    """Weights travel by gloo, batches are a version old, and an untaught model learns to write digits."""
    run = Run(tmp_path / "run")
    code, written = run.finish()
    assert code == 0, written
    steps = run.steps()
    assert [step["step"] for step in steps] == [*range(1, 25)]
    assert [step["version"] for step in steps] == [*range(1, 25)]
    # The first batch is of the version that trains on it: what is left of the gap is rounding alone.
    assert set(steps[0]["staleness"]["tokens"]) == {"0"}
    assert steps[0]["gap_ratio"] < 0.5
    # Weights come while sequences are under way, so later batches hold tokens, and records, of two versions.
    assert any({"0", "1"} <= step["staleness"]["tokens"].keys() for step in steps)
    assert steps[0]["reward"]["mean"] < 0.3
    assert steps[-1]["reward"]["mean"] > 0.8
    summary = json.loads(run.layout.summary.read_text(encoding="utf-8"))
    assert summary["rows_missing"] == 0


@pytest.mark.full
def test_two_trainers_with_half_of_the_experts_each(tmp_path: Path) -> None:
    """Two nodes, Reference rollouts: records of both, weights by gloo, and a checkpoint.

    The second trainer is killed where both make their groups. Megatron would wait half an hour for it there.
    """
    run = Run(
        tmp_path / "run",
        "spec.rollout.engine=Reference",
        "spec.rollout.nodes=2",
        "spec.trainer.nodes=2",
        "spec.trainer.parallelism={data: 2, expert: 2}",
        "spec.model.dtype=Float32",
        "spec.quantization.secondInput=Recorded",
        "spec.algorithm.steps=3",
        "spec.algorithm.maxVersionDiff=0",
        "spec.records.auditEvery=2",
        "spec.expect={maxMissingRows: 0}",
    )
    meeting = run.layout.meeting

    def met() -> int | None:
        come = meeting.exists() and b"tracerl/here/1" in meeting.read_bytes()
        return run.pid_of("trainer-1") if come else None

    os.kill(run.until(met, "trainer-1 has come"), signal.SIGKILL)
    code, written = run.finish()
    assert code == 0, written
    assert "trainer-1 was killed" in written
    assert "starting all 2 trainers again (1 of 3)" in written
    steps = run.steps()
    assert [step["step"] for step in steps] == [1, 2, 3]
    for step in steps:
        assert step["gap_guided"]["max"] < 1e-4
        assert step["records"]["rows_missing"] == step["routes_missing"] == 0
        # Experts' inputs, second inputs, keys and values of four layers.
        assert len(step["mismatch"]) == 16
        assert all(site["guided_values"] > 0 == site["guided_mismatched"] for site in step["mismatch"])


@pytest.mark.full
def test_two_ranks_of_sglang_and_steps_without_records(tmp_path: Path) -> None:
    """FP32, weights by gloo to both ranks; every second step is done without records as well."""
    write_model(tmp_path / "model", TWO_RANKS, weights_of(0, shape=TWO_RANKS).items())
    uri = (tmp_path / "model").as_uri()
    run = Run(
        tmp_path / "run",
        f"spec.model={{uri: '{uri}', tokenizerUri: 'builtin://tiny-moe', dtype: Float32}}",
        "spec.rollout.parallelism.tensor=2",
        "spec.trainer.engine=Reference",
        "spec.algorithm.steps=7",
        "spec.algorithm.maxVersionDiff=0",
        "spec.records.auditEvery=0",
        "spec.observe.baselineEvery=2",
        "spec.expect={maxMissingRows: 0}",
    )
    code, written = run.finish()
    assert code == 0, written
    steps = run.steps()
    assert [step["version"] for step in steps] == [*range(1, 8)]
    assert max(step["gap_guided"]["mean"] for step in steps) < 1e-4
    # Half of the trajectories' rows in each part; a part that did not come would be missing.
    assert json.loads(run.layout.summary.read_text(encoding="utf-8"))["rows_missing"] == 0
    pairs = [step["baseline"] for step in steps if step.get("baseline")]
    assert [pair["bare_first"] for pair in pairs] in ([False, True, False], [True, False, True])
    assert pairs[-1]["so_far"]["pairs"] == 3


@pytest.mark.full
def test_sglang_and_megatron_killed_in_the_middle(tmp_path: Path) -> None:
    """Whatever was in flight is generated again, weights travel anew (by disk here), no row is missing."""
    run = Run(
        tmp_path / "run",
        "spec.algorithm.steps=8",
        "spec.trainer.weightSync=Disk",
        "spec.trainer.checkpoint={every: 1}",
        "spec.expect={maxMissingRows: 0}",
    )
    run.until(lambda: run.steps()[1:2] or None, "two steps are done")
    run.kill("rollout-0")
    done = len(run.steps())
    run.until(lambda: run.steps()[done : done + 1] or None, "a step with the new rollout")
    run.kill("trainer-0")
    code, written = run.finish()
    assert code == 0, written
    result = json.loads(run.layout.result.read_text(encoding="utf-8"))
    assert result["state"] == "Complete"
    assert result["restarts"] == {"rollout-0": 1, "trainer-0": 1}
    assert {step["step"] for step in run.steps()} == {*range(1, 9)}
