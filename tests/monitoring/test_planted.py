"""A cost that is planted where records are encoded is found by the timed components and by pairs of steps.

Rollouts run with `planted/sitecustomize.py`, which makes every other two versions' frames cost so many hashes
more and writes down what they took: that is the truth. Both orders of a pair have it as often as not.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from pathlib import Path
from statistics import fmean, variance

import pytest
import yaml
from test_run import JOB, tracerl  # noqa: F401  the fixture

from tracerl.rl.intervals import t95

pytestmark = pytest.mark.timeout(900)

ROUNDS = 2_500
"""Hashes of 64 KiB a frame: about a twentieth of a step's CPU time."""
LEAST, MOST = 12, 400
"""Steps of each kind: as many as it takes on a machine that does other things as well."""


def measured(run: Path, log: Path) -> tuple[dict[bool, list[dict]], Counter[int]]:
    """Steps with and without the planted cost that have a pair, and the planted seconds by step."""
    try:
        lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    except FileNotFoundError:
        lines = []
    steps = [json.loads(line) for line in lines if line.endswith("\n")]
    planted: Counter[int] = Counter()
    for line in log.read_text().splitlines() if log.exists() else []:
        version, seconds = line.split()
        planted[int(version) + 1] += float(seconds)
    paired = [step for step in steps if step["baseline"] is not None]
    return {kind: [s for s in paired if (s["step"] // 2 % 2 == 1) is kind] for kind in (True, False)}, planted


def differences(steps: list[dict]) -> list[float]:
    return [step["baseline"]["recorded_seconds"] - step["baseline"]["bare_seconds"] for step in steps]


def half_width(*samples: list[float]) -> float:
    """Half of the 95 % interval of a difference of means."""
    degrees = min(len(sample) for sample in samples) - 1
    return t95(degrees) * math.sqrt(sum(variance(sample) / len(sample) for sample in samples))


def test_a_planted_cost_is_found_by_both(tracerl, tmp_path, monkeypatch):  # noqa: F811
    job = json.loads(json.dumps(JOB))
    few = {"promptsPerStep": 1, "samplesPerPrompt": 2, "maxResponseTokens": 2}
    evaluation = {"evaluation": {"prompts": 1, "every": 0}}
    job["spec"]["algorithm"] |= {"steps": 2 * MOST, "maxVersionDiff": 0, **few, **evaluation}
    job["spec"] |= {"records": {"auditEvery": 0}, "observe": {"baselineEvery": 1}}
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(job))
    log, run = tmp_path / "planted.log", tmp_path / "out"
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent / "planted"))
    monkeypatch.setenv("PLANTED_ROUNDS", str(ROUNDS))
    monkeypatch.setenv("PLANTED_LOG", str(log))
    command = tracerl("run", "job.yaml", "--out", "out", "--quiet")

    def enough():
        """Pairs of which the interval is narrower than what was planted, and without zero."""
        steps, planted = measured(run, log)
        if min(map(len, steps.values())) < LEAST:
            return None
        truth = fmean(planted[step["step"]] for step in steps[True])
        half = half_width(*map(differences, steps.values()))
        found = fmean(differences(steps[True])) - fmean(differences(steps[False]))
        return (steps, planted) if half < 0.7 * truth and found > half else None

    steps, planted = command.until(enough, "pairs that say enough", seconds=800.0)
    command.process.kill()

    truth = fmean(planted[step["step"]] for step in steps[True])
    whole = fmean(step["baseline"]["step_seconds"] for step in steps[True])
    assert 0.02 < truth / whole < 0.15
    # By the pairs: zero is outside of their interval, and the truth inside of one that holds 999 of 1000.
    found = fmean(differences(steps[True])) - fmean(differences(steps[False]))
    half = half_width(*map(differences, steps.values()))
    assert found - half > 0
    assert abs(found - truth) < 1.7 * half
    # By the timed components: in the part where it is, and in what records cost as a whole.
    for part in ("pack", "records"):
        costs = {kind: [step["overhead"][part] for step in steps[kind]] for kind in steps}
        timed = fmean(costs[True]) - fmean(costs[False])
        assert timed == pytest.approx(truth, rel=0.1, abs=1.7 * half_width(*costs.values()))
        assert timed > half_width(*costs.values())
