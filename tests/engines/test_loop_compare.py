"""`tracerl compare` with SGLang as rollout and Megatron-Core as trainer: the gap at equal weights."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tracerl.runtime.interpreters import ROLES, variable

ROOT = Path(__file__).resolve().parents[2]
METHODS = ("BF16", "QAT", "TRACE")


@pytest.mark.full
@pytest.mark.timeout(5400)
def test_the_gap_at_equal_weights_of_the_real_engines(tmp_path: Path) -> None:
    """One step each. TRACE is about as close as no quantisation at all, and rounding to nearest is far."""
    for role in ROLES:
        assert os.environ.get(variable(role)), f"{variable(role)} is not set; use make test-engines"
    out = tmp_path / "compare"
    command = ["compare", "jobs/examples/canary-engines.yaml", "--methods", ",".join(METHODS)]
    more = ["--set", "spec.algorithm.steps=1", "--out", str(out)]
    done = subprocess.run(
        [sys.executable, "-m", "tracerl", *command, *more],
        check=False,
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stderr) == (0, "")
    gaps = {}
    for method in METHODS:
        run = out / f"{method.lower()}-seed1"
        first = json.loads((run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()[0])
        assert (first["step"], first["method"], set(first["staleness"]["tokens"])) == (1, method, {"0"})
        assert first["gap_guided"]["tokens"] >= 500
        gaps[method] = first["gap_guided"]["mean"]
        assert "sglang" in (run / "logs/rollout-0.log").read_text(encoding="utf-8")
        assert "megatron" in (run / "logs/trainer-0.log").read_text(encoding="utf-8")
    assert gaps["TRACE"] < 1.5 * gaps["BF16"]
    assert gaps["TRACE"] < 0.2 * gaps["QAT"]
    # What is printed is that.
    table = re.search(r"Gap at equal weights +BF16 +QAT +TRACE.*\n((?:.+\n){4})", done.stdout)
    assert table is not None, done.stdout
    rows = {line[:20].strip(): line[20:].split() for line in table[1].splitlines()}
    assert [float(cell) for cell in rows["Mean (nats)"]] == pytest.approx(
        [gaps[method] for method in METHODS], rel=0.01
    )
    assert float(rows["Mean / BF16's"][2]) == pytest.approx(gaps["TRACE"] / gaps["BF16"], rel=0.01)
    assert float(rows["Mean / QAT's"][2]) == pytest.approx(gaps["TRACE"] / gaps["QAT"], rel=0.01)
