"""Checkpoints that every rank writes its part of: all is there once, and any layout goes on from them."""

from __future__ import annotations

import os
import resource
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron_worker import run_ranks
from test_megatron_apart import (
    EXPERTS_APART,
    SHAPE,
    TOGETHER,
    Lead,
    job_of,
    leader_of,
    rank_of_two,
    trajectories,
    two_ranks,
)
from torch import Tensor

from tracerl.api.resolved import ResolvedJob
from tracerl.engines.base import Batch
from tracerl.engines.hf import hf_shapes
from tracerl.engines.megatron.trainer import MegatronTrainer
from tracerl.engines.reference.trainer import ReferenceTrainer
from tracerl.rl import parallel
from tracerl.rl.checkpoint import Checkpoints, StoredTensors
from tracerl.rl.parallel import LeadingEngine

LAYOUTS = [EXPERTS_APART, {"tensor": 2}, {"context": 2, "expert": 2}]


def trained(leader: LeadingEngine) -> dict[str, Tensor]:
    """State after an update."""
    leader.set_learning_rate(0.01)
    how = {"guided": True, "temperature": 1.0, "version": 0}
    leader.accumulate(Batch(trajectories(3)), lambda logp: -logp.sum(), **how)
    leader.update()
    return leader.state()


def equal(state: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> bool:
    return set(state) == set(expected) and all(torch.equal(state[name], t) for name, t in expected.items())


def save(resolved: ResolvedJob, engine: MegatronTrainer) -> dict[str, Any]:
    """Save after an update; `got` has the tensors that came to rank 0 while that was done."""
    got: list[Tensor] = []
    receive = parallel._receive

    def counting(rank: int) -> parallel.Message:
        message, tensors = receive(rank)
        got.extend(tensors)
        return message, tensors

    with leader_of(resolved, engine) as leader:
        state = trained(leader)
        parallel._receive = counting
        files = leader.save_shards(resolved.run_dir)
        parallel._receive = receive
        own = sum(tensor.nbytes for tensor in engine.state().values())
        leader.close()
    return {"state": state, "files": files, "own": own, "got": got}


def load(paths: list[Path], resolved: ResolvedJob, engine: MegatronTrainer) -> tuple[Any, Any]:
    with leader_of(resolved, engine) as leader:
        before = leader.state()
        leader.load_shards(StoredTensors(paths))
        after = leader.state()
        leader.close()
    return before, after


@pytest.mark.parametrize("sizes", LAYOUTS, ids=["experts", "tensors", "rows and experts"])
def test_each_rank_writes_its_part_and_any_layout_goes_on_from_them(tmp_path, sizes):
    """Rank 0 gets no tensor of another; the files have everything once, bit for bit."""
    saved, followed = two_ranks(job_of(tmp_path, sizes), save)
    assert followed is None
    expected, files = saved["state"], saved["files"]
    assert expected["updates"] == 1
    assert all(expected[f"exp_avg/{name}"].any() for name in hf_shapes(SHAPE))
    assert saved["got"] == []
    paths = [tmp_path / name for name in sorted(files)]
    assert [path.name for path in paths] == [f"state-rank-0000{rank}.safetensors" for rank in range(2)]
    assert equal(StoredTensors(paths), expected)
    # Beside the tensors a file has a header with their names.
    header = int.from_bytes(paths[0].read_bytes()[:8], "little") + 8
    assert files[paths[0].name][0] - header == saved["own"]
    whole = sum(tensor.nbytes for tensor in expected.values())
    assert 0.3 * whole < saved["own"] < 0.8 * whole
    for other in [TOGETHER, *(layout for layout in LAYOUTS if layout != sizes)]:
        again = job_of(tmp_path, other, warmup={"seed": 99})
        (before, after), followed = two_ranks(again, partial(load, paths))
        assert followed is None
        assert not equal(before, expected)
        assert equal(after, expected)
    reference = ReferenceTrainer(SHAPE, job_of(tmp_path, {}).job.spec)
    reference.load_state(StoredTensors(paths))
    assert equal(reference.state(), expected)


def two_saves(resolved: ResolvedJob, engine: MegatronTrainer) -> None:
    """Save twice, with an update between; the state of the first is kept beside."""
    checkpoints = Checkpoints(resolved.layout.checkpoints, keep=2)
    with leader_of(resolved, engine) as leader:
        torch.save(trained(leader), resolved.run_dir / "first.pt")
        checkpoints.write(1, {"step": 1}, leader.save_shards)
        trained(leader)
        checkpoints.write(2, {"step": 2}, leader.save_shards)
        leader.close()


def with_rank_1(resolved: ResolvedJob, first: Callable[[], None], lead: Lead) -> list[Any]:
    """As `two_ranks`, with something that rank 1 does first."""
    how = (lead, None, parallel._SHARE_BYTES)
    works = [partial(rank_of_two, resolved, *how, 0), partial(prepared, first, resolved, how)]
    return run_ranks(works, resolved.run_dir)


def prepared(first: Callable[[], None], resolved: ResolvedJob, how: tuple[Any, ...]) -> Any:
    first()
    return rank_of_two(resolved, *how, 1)


def die(result: Path, opened: int) -> None:
    """End at once when the second checkpoint's file was opened so many times, as if killed."""
    seen = 0

    def audit(event: str, arguments: tuple[object, ...]) -> None:
        nonlocal seen
        if event == "open" and str(arguments[0]).endswith("000002.partial/state-rank-00001.safetensors"):
            seen += 1
            if seen == opened:
                torch.save("killed", result)
                os._exit(0)

    sys.addaudithook(audit)


@pytest.mark.parametrize("opened", [1, 2], ids=["before it is on the disk", "before it is measured"])
def test_a_rank_that_dies_while_it_writes_leaves_the_checkpoint_before(tmp_path, opened):
    resolved = job_of(tmp_path, EXPERTS_APART)
    (reason, message), followed = with_rank_1(resolved, partial(die, tmp_path / "1.pt", opened), two_saves)
    assert followed == "killed"
    assert reason == "TrainerLost"
    assert "trainer-1 is gone" in message
    checkpoints = Checkpoints(resolved.layout.checkpoints, keep=2)
    found = checkpoints.load(pytest.fail)
    assert found is not None
    assert found.step == 1
    assert equal(found.tensors, torch.load(tmp_path / "first.pt"))
    assert [path.name for path in resolved.layout.checkpoints.iterdir()] == ["step-000001"]


def small_files() -> None:
    sys.dont_write_bytecode = True
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, 10_000))


def test_a_rank_without_room_says_so(tmp_path):
    resolved = job_of(tmp_path, EXPERTS_APART)
    (reason, message), _ = with_rank_1(resolved, small_files, two_saves)
    assert reason == "CheckpointFailed"
    assert "trainer-1 cannot use the checkpoint (" in message
    assert "too large" in message
    assert list(resolved.layout.checkpoints.iterdir()) == []


def save_here(resolved: ResolvedJob, engine: MegatronTrainer) -> None:
    os.chdir(resolved.run_dir / "here")
    with leader_of(resolved, engine) as leader:
        Checkpoints(Path("checkpoints"), keep=2).write(1, {"step": 1}, leader.save_shards)


def test_a_rank_that_does_not_see_the_directory_says_so(tmp_path):
    """As one on another node, where the same name is another place."""
    resolved = job_of(tmp_path, EXPERTS_APART)
    for place in ("here", "there"):
        (tmp_path / place).mkdir()
    (reason, message), _ = with_rank_1(resolved, partial(os.chdir, tmp_path / "there"), save_here)
    assert reason == "CheckpointFailed"
    assert "trainer-1 cannot use the checkpoint (" in message
    assert "give spec.output.uri a volume that all nodes share, or write Full" in message
    assert list((tmp_path / "there").iterdir()) == []
