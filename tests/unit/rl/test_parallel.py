"""Two trainer processes over gloo train as one does."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import xxhash
from rl_harness import SHAPE, Log, leading, make_job, rollout, trainer
from test_train import VERSION, groups

from tracerl.api.errors import InputError, JobError
from tracerl.api.job import Spec
from tracerl.api.resolved import ResolvedJob
from tracerl.engines.reference.trainer import ReferenceTrainer
from tracerl.methods import plan
from tracerl.rl.checkpoint import StoredTensors, measure, measure_all
from tracerl.rl.loop import run_loop
from tracerl.rl.parallel import LeadingEngine, follow, join
from tracerl.rl.train import Learner, StepOutcome, Timer


@contextmanager
def second_process(resolved: ResolvedJob, at: str | None = None) -> Iterator[None]:
    """Rank 1 in a child, which must end without an error; they meet by a file or `at` an address."""
    torch.set_num_threads(1)
    meeting = at or resolved.layout.meeting
    child = os.fork()
    if child == 0:
        try:
            join(meeting, rank=1, ranks=2)
            follow(ReferenceTrainer(SHAPE, resolved.job.spec), resolved, "trainer-1")
            os._exit(0)
        finally:
            os._exit(1)
    join(meeting, rank=0, ranks=2)
    try:
        yield
    finally:
        dist.destroy_process_group()
        _, status = os.waitpid(child, 0)
    assert status == 0


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@contextmanager
def two_processes(resolved: ResolvedJob) -> Iterator[LeadingEngine]:
    with second_process(resolved), leading(resolved, ranks=2) as leader:
        yield leader
        leader.close()


def job_of(tmp_path: Path, **sections: dict[str, Any]) -> ResolvedJob:
    algorithm = {"promptsPerStep": 4, "miniBatches": 2, "routingReplay": False}
    return make_job(tmp_path, algorithm=algorithm, **sections)


def step(engine: LeadingEngine, spec: Spec) -> StepOutcome:
    return Learner(engine, plan(spec, SHAPE), spec).step(groups(), VERSION, Timer())


def test_a_step_of_two_processes_is_that_of_one(tmp_path: Path) -> None:
    # Micro-batches of one trajectory leave the second process without one.
    job = job_of(tmp_path, method={"name": "QAT"}, trainer={"microBatchTokens": 16})
    spec = job.job.spec
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(2, 64, (5, 9), generator=generator)
    mask = torch.rand(5, 9, generator=generator) < 0.5
    losses, outcomes, states = [], [], []

    def train(engine: LeadingEngine) -> None:
        engine.set_learning_rate(0.01)
        losses.append(engine.supervised_step(tokens, mask))
        engine.reset_optimizer()
        engine.load_state(engine.state())
        outcomes.extend([step(engine, spec), step(engine, spec)])
        states.append(engine.state())

    with leading(job) as alone:
        train(alone)
    with two_processes(job) as together:
        train(together)
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    for one, two in zip(outcomes[:2], outcomes[2:], strict=True):
        assert two.policy.model_dump() == pytest.approx(one.policy.model_dump(), rel=1e-3, abs=1e-6)
        assert two.rollout_corr == pytest.approx(one.rollout_corr, rel=1e-3, abs=1e-5)
        assert two.gap_guided.tokens == one.gap_guided.tokens
        assert one.engine.guided_rows == two.engine.guided_rows
        assert one.engine.records.rows == two.engine.records.rows
    for name, tensor in states[0].items():
        # In norm: AdamW turns the last bit of a gradient near zero into a whole step of one weight.
        difference = (states[1][name].float() - tensor.float()).norm()
        assert difference <= 1e-3 * tensor.float().norm() + 1e-9, name


def test_an_error_of_another_process_ends_the_job_with_its_sentence(tmp_path: Path) -> None:
    job = job_of(tmp_path)
    with second_process(job, at=f"localhost:{free_port()}"), leading(job, ranks=2) as together:
        with pytest.raises(InputError):
            together.load_state({"updates": torch.tensor(3)})
        # The other process refused it as well, which the next answer from there tells.
        with pytest.raises(JobError, match="the checkpoint's weights"):
            together.stats()
        together.close()


def test_each_process_measures_its_share_of_files(tmp_path: Path) -> None:
    """Of a file that is not there for another one, that one's sentence; for this one it is damage."""
    job = job_of(tmp_path)
    paths = [tmp_path / str(number) for number in range(5)]
    for number, path in enumerate(paths):
        path.write_bytes(b"x" * number)
    with two_processes(job) as together:
        assert together.measure(paths) == [
            [number, xxhash.xxh3_64(b"x" * number).hexdigest()] for number in range(5)
        ]
        assert together.measure([]) == []
        with pytest.raises(FileNotFoundError):
            together.measure([tmp_path / "none", *paths[:2]])
        # Answers to the question before are not taken for those to the next.
        assert together.measure(paths[3:]) == measure_all(paths[3:])
        with pytest.raises(JobError, match=r"trainer-1 cannot use the checkpoint .*/none.*, or write Full"):
            together.measure([paths[0], tmp_path / "none"])


def test_equal_processes_write_one_shard(tmp_path: Path) -> None:
    """What all of them hold is there once; each reads it by itself."""
    with two_processes(job_of(tmp_path)) as together:
        together.supervised_step(torch.ones(2, 9, dtype=torch.int64), torch.ones(2, 9, dtype=torch.bool))
        expected = together.state()
        files = together.save_shards(tmp_path)
        assert files == {"state-rank-00000.safetensors": measure(tmp_path / "state-rank-00000.safetensors")}
        together.reset_optimizer()
        together.load_shards(StoredTensors([tmp_path / name for name in files]))
        together.stats()
        found = together.state()
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


def test_who_does_not_come_is_missed_in_a_sentence(tmp_path: Path) -> None:
    """The name of rank 0 leads nowhere yet; and nobody comes to rank 0."""
    for rank, at in ((1, "no-such-host.invalid:29501"), (0, f"no-such-host.invalid:{free_port()}")):
        with pytest.raises(JobError, match=f"trainer-{rank} did not meet the other 1 trainers through {at} "):
            join(at, rank=rank, ranks=2, seconds=0.5)


async def test_a_whole_job_with_records(tmp_path: Path) -> None:
    job = make_job(
        tmp_path,
        records={"auditEvery": 2},
        warmup={"steps": 3, "batchSize": 4},
        trainer={"parallelism": {"data": 2}},
    )
    log = Log()
    with second_process(job):
        async with rollout(job):
            await run_loop(job, trainer(job), log)
    steps = log.of("step")
    assert [line["step"] for line in steps] == [1, 2, 3, 4]
    for line in steps:
        # The records reached both processes: guided forwards equal the rollout in FP32.
        assert line["gap_guided"]["max"] < 1e-4
        assert line["routes_missing"] == 0
        assert len(line["mismatch"]) == 6
        rows = line["prompt_tokens"] + line["response_tokens"] - line["trajectories"]
        assert (line["records"]["rows"], line["records"]["rows_missing"]) == (rows, 0)
        # Each process read its own frames and no others, but for prompts of which both have samples.
        read = line["transport"]["read_bytes"]["object"]
        whole = line["records"]["bytes"] + line["records"]["audit_bytes"]
        assert whole <= read <= 1.5 * whole
