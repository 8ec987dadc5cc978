"""Megatron-Core in two processes over NCCL, a GPU each, against one process on one GPU: the same numbers."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip(
    "megatron.core", reason="Megatron-Core is not installed; use an environment of make engines"
)

from megatron_worker import (
    EXPERTS,
    assert_equal,
    furthest,
    here,
    job,
    leave,
    merged,
    run_processes,
    summed,
    train_parts,
)
from runs import (
    EQUAL,
    MANIFEST,
    assert_sound,
    first_steps_equal,
    kill_after_a_step,
    logs_of,
    sets,
    start,
    steps_of,
    tracerl,
)

from tracerl.engines.base import Batch, Trajectory
from tracerl.engines.hf import initial_weights
from tracerl.engines.megatron.trainer import MegatronTrainer
from tracerl.numerics import NonFiniteError

pytestmark = pytest.mark.skipif(
    torch.cuda.device_count() < 2, reason="NCCL refuses two processes of one GPU, and there is one here"
)
DEVICE = "cuda"
RECOMPUTE = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
OPTIONS: dict[str, dict[str, Any]] = {
    "FP32": {},
    "FP32, recomputed": {"engineArgs": RECOMPUTE},
    "BF16": {"dtype": "BFloat16"},
}
SIZES = {
    "data": {"data": 2},
    "expert": {"data": 2, "expert": 2},
    "tensor": {"tensor": 2},
    "context": {"context": 2},
    "pipeline": {"pipeline": 2},
}
# Beside Megatron-Core a rollout would need a GPU of its own.
TWO_GPUS = (
    "rollout.gpusPerNode=0",
    "trainer.gpusPerNode=2",
    "placement.colocation=None",
    "trainer.engine=Megatron",
)
HUGE = "model.layers.1.self_attn.v_proj.weight"


def do_all(sizes: dict[str, int], rank: int, ranks: int) -> dict[str, Any]:
    """Train under all options in one process, which takes longer to start than to train."""
    found = {
        name: train_parts(options, sizes, rank, ranks, device=DEVICE) for name, options in OPTIONS.items()
    }
    return {"trained": found, "refused": refused(sizes)}


def refused(sizes: dict[str, int]) -> str:
    """What is said of a weight whose values are not finite behind it."""
    weights = dict(initial_weights(EXPERTS, 1))
    weights[HUGE] = torch.full_like(weights[HUGE], 3e38)
    spec = job({"method": "QAT", "quantization": {"secondInput": "RTN"}}, **sizes)
    trainer = MegatronTrainer(EXPERTS, spec, weights, device=here(DEVICE))
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(EXPERTS.vocab, (2, 12), generator=generator)
    every = [Trajectory(str(i), row, 3, torch.zeros(9), [0] * 9) for i, row in enumerate(tokens)]
    try:
        trainer.forward(Batch(every), guided=True, temperature=1.0, version=0)
    except NonFiniteError as error:
        return str(error)
    return "nothing"


@pytest.fixture(scope="module")
def one_gpu() -> Iterator[dict[str, Any]]:
    leave()
    if DEVICE == "cuda":
        torch.cuda.set_device(0)
    yield do_all({}, 0, 1)
    leave()


@pytest.fixture(scope="module")
def apart(tmp_path_factory: pytest.TempPathFactory):
    """What two ranks of each layout saw."""
    found: dict[str, list[dict[str, Any]]] = {}

    def ranks_of(layout: str) -> list[dict[str, Any]]:
        if layout not in found:
            work = partial(do_all, SIZES[layout])
            found[layout] = run_processes(work, tmp_path_factory.mktemp(layout), processes=2, device=DEVICE)
        return found[layout]

    return ranks_of


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("layout", SIZES)
def test_two_gpus_equal_one(one_gpu, apart, record_property, layout, name):
    """Of rollouts on the CPU; BF16 before the first update, in which differences of a last bit grow."""
    found = [rank["trained"][name] for rank in apart(layout)]
    expected = one_gpu["trained"][name]
    for version, one in enumerate(expected["versions"]):
        parts = [rank["versions"][version] for rank in found]
        figures = {kind: furthest(merged(parts, kind), one[kind]) for kind in ("guided", "unguided")}
        figures["rollout"] = furthest(merged(parts, "guided"), merged(parts, "rollout"))
        figures["norm"] = abs(parts[0]["norm"] / one["norm"] - 1)
        counts = summed(parts)
        figures["missed"] = sum(count["guided_mismatched"] for count in counts.values())
        figures["values"] = sum(count["values"] for count in counts.values())
        record_property(f"version {version}", figures)
    if name != "BF16":
        assert_equal(found, expected, SIZES[layout].get("tensor", 1))
        return
    parts, one = [rank["versions"][0] for rank in found], expected["versions"][0]
    counts = summed(parts)
    assert {key: count["values"] for key, count in counts.items()} == {
        key: count["values"] for key, count in one["sites"].items()
    }
    assert not any(count["guided_mismatched"] for count in counts.values())
    assert furthest(merged(parts, "guided"), one["guided"]) < 0.03
    assert furthest(merged(parts, "guided"), merged(parts, "rollout")) < 0.03


@pytest.mark.parametrize("layout", SIZES)
def test_a_value_that_is_not_finite_ends_the_pass_of_both_with_its_site(one_gpu, apart, layout):
    assert "layer 1 Value" in one_gpu["refused"]
    assert [rank["refused"] for rank in apart(layout)] == [one_gpu["refused"]] * 2


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of one Reference trainer on one GPU, and its warm-up in a cache beside it."""
    directory = tmp_path_factory.mktemp("reference")
    manifest, out = directory / "job.yaml", directory / "run"
    manifest.write_text(MANIFEST)
    done = tracerl("run", manifest, "--out", out, *sets(*EQUAL), TRACERL_CACHE=str(directory / "cache"))
    assert done.returncode == 0, done.stdout + done.stderr + logs_of(out)
    assert_sound(out, steps=3)
    return directory


@pytest.mark.parametrize("layout", ["tensor", "context", "pipeline"])
def test_a_run_with_a_model_on_two_gpus(reference, tmp_path, layout):
    """FP32 from the Reference trainer's warm-up: its tokens, rewards and figures in the first step."""
    out, changes = tmp_path / "run", (*EQUAL, *TWO_GPUS, f"trainer.parallelism={SIZES[layout]}")
    command = ("run", reference / "job.yaml", "--out", out, *sets(*changes))
    done = tracerl(*command, TRACERL_CACHE=str(reference / "cache"))
    assert done.returncode == 0, done.stdout + done.stderr + logs_of(out)
    assert_sound(out, steps=3)
    first_steps_equal(out, reference / "run")


def test_a_run_of_two_gpus_gets_over_the_loss_of_a_trainer(reference, tmp_path):
    """NCCL does not tell the other that one is gone; who started both does."""
    out, changes = tmp_path / "run", (*EQUAL, *TWO_GPUS, f"trainer.parallelism={SIZES['expert']}")
    command = ("run", reference / "job.yaml", "--out", out, *sets(*changes, "trainer.checkpoint.every=1"))
    running = start(*command, TRACERL_CACHE=str(reference / "cache"))
    kill_after_a_step(running, out, "trainer-1")
    written, _ = running.communicate()
    assert running.returncode == 0, written + logs_of(out)
    assert "starting all 2 trainers again (1 of 3)" in written
    assert_sound(out, steps=3)
    first_steps_equal(out, reference / "run")


def test_a_run_in_bf16_with_experts_on_two_gpus(tmp_path):
    """Warmed up over NCCL as well; batches may be a version old."""
    manifest, out = tmp_path / "job.yaml", tmp_path / "run"
    manifest.write_text(MANIFEST)
    changes = (*TWO_GPUS, f"trainer.parallelism={SIZES['expert']}", "algorithm.steps=3")
    done = tracerl("run", manifest, "--out", out, *sets(*changes), TRACERL_CACHE=str(tmp_path / "cache"))
    assert done.returncode == 0, done.stdout + done.stderr + logs_of(out)
    steps = steps_of(out)
    assert [step["step"] for step in steps] == [1, 2, 3]
    for step in steps:
        assert step["gap_ratio"] < 1
        assert step["records"]["rows_missing"] == step["routes_missing"] == 0
