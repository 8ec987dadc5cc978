"""`tracerl run` with both roles on the GPU, which they share where there is one, and on two GPUs."""

from pathlib import Path

import pytest
import torch
from runs import EQUAL, MANIFEST, assert_sound, first_steps_equal, logs_of, sets, steps_of, tracerl


def assert_trains(tmp_path: Path, *changes: str) -> None:
    """The manifest's run comes to its end, with the gap narrowed and no row missing in any step."""
    manifest, out = tmp_path / "job.yaml", tmp_path / "run"
    manifest.write_text(MANIFEST)
    done = tracerl("run", manifest, "--out", out, *changes, TRACERL_CACHE=str(tmp_path / "cache"))
    assert done.returncode == 0, done.stdout + done.stderr + logs_of(out)
    steps = steps_of(out)
    assert [step["step"] for step in steps] == [1, 2, 3, 4, 5, 6]
    for step in steps:
        assert step["gap_ratio"] < 1
        assert step["records"]["rows_missing"] == step["routes_missing"] == 0


def test_a_run_with_both_roles_on_the_gpu(tmp_path: Path):
    assert_trains(tmp_path)


def test_steps_are_compared_by_what_they_take_of_the_gpu(tmp_path: Path):
    manifest, out = tmp_path / "job.yaml", tmp_path / "run"
    manifest.write_text(MANIFEST)
    changes = sets(
        "algorithm.maxVersionDiff=0",
        "algorithm.steps=4",
        "records.auditEvery=0",
        "observe.baselineEvery=1",
    )
    done = tracerl("run", manifest, "--out", out, *changes, TRACERL_CACHE=str(tmp_path / "cache"))
    assert done.returncode == 0, done.stdout + done.stderr + logs_of(out)
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


TWO_GPUS = pytest.mark.skipif(
    torch.cuda.device_count() < 2, reason="two trainers need two GPUs, and there is one here"
)
TWO_NODES = sets("rollout.nodes=2", "trainer.nodes=2", "trainer.parallelism.data=2")


@TWO_GPUS
def test_two_trainers_on_two_gpus_train_as_one_does(tmp_path: Path):
    """FP32, everything guided, from one warm-up: the same tokens, rewards and figures in the first step."""
    manifest = tmp_path / "job.yaml"
    manifest.write_text(MANIFEST)
    for name, more in (("one", []), ("two", TWO_NODES)):
        out = tmp_path / name
        command = ("run", manifest, "--out", out, *sets(*EQUAL), *more)
        done = tracerl(*command, TRACERL_CACHE=str(tmp_path / "cache"))
        assert done.returncode == 0, done.stdout + done.stderr + logs_of(out)
        assert_sound(out, steps=3)
    first_steps_equal(tmp_path / "two", tmp_path / "one")


@TWO_GPUS
def test_two_nodes_with_both_roles_on_two_gpus(tmp_path: Path):
    """BF16, warmed up over NCCL as well; two rollouts share the GPUs with the trainers."""
    assert_trains(tmp_path, *TWO_NODES)
