"""`tracerl run` with both roles on the GPU, which they share where there is one."""

import json
import os
import subprocess
import sys
from pathlib import Path

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


def tracerl(*arguments, **environment):
    return subprocess.run(
        [sys.executable, "-m", "tracerl", *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=280,
        env={**os.environ, **environment},
        check=False,
    )


def test_a_run_with_both_roles_on_the_gpu(tmp_path: Path):
    manifest, out = tmp_path / "job.yaml", tmp_path / "run"
    manifest.write_text(MANIFEST)
    done = tracerl("run", manifest, "--out", out, TRACERL_CACHE=str(tmp_path / "cache"))
    assert done.returncode == 0, done.stdout + done.stderr + _logs(out)
    steps = steps_of(out)
    assert [step["step"] for step in steps] == [1, 2, 3, 4, 5, 6]
    for step in steps:
        assert step["gap_ratio"] < 1
        assert step["records"]["rows_missing"] == step["routes_missing"] == 0


def test_steps_are_compared_by_what_they_take_of_the_gpu(tmp_path: Path):
    manifest, out = tmp_path / "job.yaml", tmp_path / "run"
    manifest.write_text(MANIFEST)
    changes = (
        "algorithm.maxVersionDiff=0",
        "algorithm.steps=4",
        "records.auditEvery=0",
        "observe.baselineEvery=1",
    )
    sets = [word for change in changes for word in ("--set", f"spec.{change}")]
    done = tracerl("run", manifest, "--out", out, *sets, TRACERL_CACHE=str(tmp_path / "cache"))
    assert done.returncode == 0, done.stdout + done.stderr + _logs(out)
    pairs = [step["baseline"] for step in steps_of(out)]
    assert pairs[0] is None
    assert pairs[-1]["so_far"]["pairs"] == 3
    for pair in pairs[1:]:
        assert pair["bare_seconds"] > 0
        assert pair["step_seconds"] >= pair["recorded_seconds"] > 0


def test_methods_are_compared_on_the_gpu(tmp_path: Path):
    manifest, out = tmp_path / "job.yaml", tmp_path / "both"
    manifest.write_text(MANIFEST)
    changes = ("--set", "spec.algorithm.steps=2")
    command = ("compare", manifest, "--methods", "BF16,QAT,TRACE", *changes, "--out", out)
    done = tracerl(*command, TRACERL_CACHE=str(tmp_path / "cache"))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Gap at equal weights" in done.stdout
    assert (out / "report.html").exists()
    first = {arm: steps_of(out / f"{arm}-seed1")[0] for arm in ("bf16", "qat", "trace")}
    gaps = {arm: (step["gap_guided"] or step["gap_unguided"])["mean"] for arm, step in first.items()}
    assert max(gaps["bf16"], gaps["trace"]) < gaps["qat"]


def test_a_machine_whose_gpus_are_hidden_is_one_sentence(tmp_path: Path):
    manifest, out = tmp_path / "job.yaml", tmp_path / "run"
    manifest.write_text(MANIFEST)
    done = tracerl("run", manifest, "--out", out, CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 2
    assert "spec.rollout.gpusPerNode" in done.stderr
    assert "this machine has 0 in CUDA_VISIBLE_DEVICES" in done.stderr
    assert "Traceback" not in done.stderr


def steps_of(out: Path):
    lines = (out / "metrics.jsonl").read_text().splitlines()
    return [record for line in lines if (record := json.loads(line))["type"] == "step"]


def _logs(out: Path) -> str:
    return "\n".join(f"{path.name}: {path.read_text()[-3000:]}" for path in out.glob("logs/*"))
