"""A pod of two trainers: one process for the kubelet, which is rank 0 and starts rank 1."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from pathlib import Path

from rl_harness import make_job, rollout

from tracerl.api.model import BUILTIN_MODELS
from tracerl.api.resolved import ResolvedJob


def two_in_a_pod(directory: Path) -> ResolvedJob:
    trainer = {"parallelism": {"data": 2}, "optimizer": {"learningRate": "0.01"}}
    resolved = make_job(directory, trainer=trainer, algorithm={"steps": 2}, warmup={"steps": 0})
    resolved.write(directory / "job.yaml")
    return resolved


async def start(resolved: ResolvedJob) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        sys.executable,
        *("-m", "tracerl.runtime.trainer_pod_main", str(resolved.run_dir / "job.yaml"), "trainer-0"),
        stderr=asyncio.subprocess.PIPE,
        env=os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
    )


async def read_until(pod: asyncio.subprocess.Process, words: str) -> str:
    assert pod.stderr is not None
    said = ""
    while words not in said:
        line = await pod.stderr.readline()
        assert line, said
        said += line.decode()
    return said


async def test_all_ranks_of_a_pod_train_and_end(tmp_path: Path) -> None:
    resolved = two_in_a_pod(tmp_path)
    async with rollout(resolved, shape=BUILTIN_MODELS["tiny-moe"]):
        pod = await start(resolved)
        _, said = await pod.communicate()
    assert pod.returncode == 0, said.decode()
    assert [name in said.decode() for name in ("trainer-0 ends", "trainer-1 ends")] == [True, True]
    lines = [json.loads(line) for line in resolved.layout.metrics.read_text().splitlines()]
    assert [line["step"] for line in lines if line["type"] == "step"] == [1, 2]


async def test_a_rank_that_is_killed_ends_the_pod_with_its_signal(tmp_path: Path) -> None:
    """Rank 0 waits for a rollout meanwhile, which never comes."""
    pod = await start(two_in_a_pod(tmp_path))
    said = await read_until(pod, "trainer-1 of job x starts as process ")
    os.kill(int(said.rpartition("starts as process ")[2].split()[0]), signal.SIGKILL)
    _, rest = await pod.communicate()
    assert pod.returncode == 128 + signal.SIGKILL
    assert "trainer-1 ended with exit code 137, and this pod with it" in rest.decode()


async def test_a_job_that_cannot_be_read_is_bad_input(tmp_path: Path) -> None:
    resolved = two_in_a_pod(tmp_path)
    (tmp_path / "job.yaml").write_text("kind: Something")
    pod = await start(resolved)
    _, said = await pod.communicate()
    assert pod.returncode == 2
    assert "is not a resolved job" in said.decode()
