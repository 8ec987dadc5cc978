"""Several processes over gloo, each with all of the model or a part of it, against one: the same numbers."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import shutil
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hand_rollout import roll_out
from megatron_worker import (
    EXPERTS,
    assert_equal,
    checkpoints,
    job,
    leave,
    merged,
    run_processes,
    run_ranks,
    shape_of,
    train,
    train_parts,
    train_shares,
)
from rl_harness import Log, make_job, rollout
from torch import Tensor

from tracerl.api.errors import InputError, JobError
from tracerl.api.frames import Handle
from tracerl.api.job import TrainerParallelism
from tracerl.api.model import ModelShape
from tracerl.api.resolved import ResolvedJob
from tracerl.engines.base import Batch, Trajectory
from tracerl.engines.hf import hf_shapes, initial_weights
from tracerl.engines.megatron.trainer import MegatronTrainer
from tracerl.records.frame import FrameHeader, encode_frame
from tracerl.records.pairing import RecordEntry
from tracerl.records.sites import site_table
from tracerl.rl import parallel
from tracerl.rl.dealing import units_of
from tracerl.rl.loading import LEADER, open_loader
from tracerl.rl.loop import run_loop
from tracerl.rl.parallel import LeadingEngine, follow, join
from tracerl.transport.sources import open_sink

torch.set_num_threads(1)

SHAPE = ModelShape.uniform(
    2, hidden=32, heads=2, kv_heads=2, head_dim=16, experts=4, top_k=2, expert_hidden=16, vocab=64, context=32
)
TOGETHER, EXPERTS_APART = {"data": 2}, {"data": 2, "expert": 2}
RECOMPUTE = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}


@pytest.fixture(autouse=True)
def apart() -> Iterator[None]:
    leave()
    yield
    leave()


def alone(options: dict[str, Any]) -> dict[str, Any]:
    spec = job(options)
    return train(MegatronTrainer(shape_of(options), spec), spec, 0, options.get("count", 5))


@pytest.mark.parametrize(
    ("sizes", "options"),
    [
        ({"data": 2, "expert": 2}, {}),
        ({"data": 2, "expert": 2}, {"quantization": {"secondInput": "RTN"}, "method": "QAT"}),
        ({"data": 2, "expert": 2}, {"engineArgs": RECOMPUTE}),
        ({"data": 4, "expert": 2}, {}),
        ({"tensor": 2}, {}),
        pytest.param({"context": 2}, {}, marks=pytest.mark.full),
        ({"tensor": 2, "expert": 2}, {"engineArgs": RECOMPUTE}),
        ({"context": 2, "expert": 2}, {}),
        ({"tensor": 2, "data": 2, "expert": 4}, {}),
        pytest.param({"tensor": 2, "context": 2}, {}, marks=pytest.mark.full),
        # Pieces of one trajectory, of several, and of none on one of two ranks.
        ({"pipeline": 2}, {"engineArgs": RECOMPUTE}),
        pytest.param({"pipeline": 2}, {"count": 11, "tied": True}, marks=pytest.mark.full),
        ({"pipeline": 2, "data": 2, "expert": 2}, {}),
        pytest.param({"pipeline": 2, "data": 2}, {}, marks=pytest.mark.full),
        pytest.param({"pipeline": 2, "tensor": 2}, {"engineArgs": RECOMPUTE}, marks=pytest.mark.full),
        pytest.param({"pipeline": 2, "context": 2}, {}, marks=pytest.mark.full),
    ],
    ids=lambda value: "-".join(map(str, value)) if isinstance(value, dict) else None,
)
def test_a_model_apart_equals_the_model_together(tmp_path, sizes, options):
    """Log-probs, moments and every code, of unequal shares of which one is empty; ranks count their own."""
    ranks = TrainerParallelism(**sizes).ranks
    found = run_processes(partial(train_parts, options, sizes), tmp_path, processes=ranks)
    expected = alone(options)
    assert_equal(found, expected, sizes.get("tensor", 1))
    for one in expected["versions"]:
        assert ((1, "FC2Input") in one["sites"]) is (options.get("method") != "QAT")


@pytest.mark.parametrize("sizes", [EXPERTS_APART, {"pipeline": 2}], ids=["experts", "stages"])
def test_bf16_without_updates_is_bit_for_bit(tmp_path, sizes):
    """Sums over experts are rounded once, wherever the experts are; stages send what they computed."""
    options = {"dtype": "BFloat16"}
    ranks = run_processes(partial(train_parts, options, sizes), tmp_path, processes=2)
    found = [rank["versions"][0] for rank in ranks]
    expected = alone(options)["versions"][0]
    for kind in ("guided", "unguided"):
        for i, row in merged(found, kind).items():
            assert torch.equal(row, expected[kind][i][: len(row)])


@pytest.mark.parametrize(
    "sizes", [EXPERTS_APART, {"tensor": 2}, {"pipeline": 2}], ids=["experts", "tensors", "stages"]
)
def test_megatrons_checkpoint_goes_on_with_a_model_apart(tmp_path, sizes):
    """Each rank writes and reads its own; a process that holds all experts refuses it in a sentence."""
    for found in run_processes(partial(checkpoints, tmp_path, sizes), tmp_path, processes=2):
        for one, other in (("loaded", "saved"), ("resumed", "straight")):
            assert found[one].keys() == found[other].keys()
            assert all(torch.equal(found[one][name], tensor) for name, tensor in found[other].items())
        assert int(found["resumed"]["updates"]) == 2
    if sizes is not EXPERTS_APART:
        return
    together = MegatronTrainer(EXPERTS, job({}))
    before = together.state()
    with pytest.raises(InputError, match=r"parallelism\.expert 2, not 1; go on"):
        together.load_sharded(tmp_path / "apart")
    assert all(torch.equal(before[name], tensor) for name, tensor in together.state().items())


# -- in the loop --------------------------------------------------------------------------------------------


def job_of(
    directory: Path,
    sizes: dict[str, int],
    *,
    sync: str = "Auto",
    state: str = "Full",
    **sections: dict[str, Any],
) -> ResolvedJob:
    trainer = {
        "engine": "Megatron",
        "weightSync": sync,
        "parallelism": sizes,
        "optimizer": {"learningRate": "0.01"},
        "checkpoint": {"every": 2, "state": state},
    }
    records = {"auditEvery": 2}
    quantization = {"secondInput": "Recorded"}
    return make_job(directory, trainer=trainer, records=records, quantization=quantization, **sections)


Lead = Callable[[ResolvedJob, MegatronTrainer], Any]


def two_ranks(
    resolved: ResolvedJob,
    lead: Lead,
    weights: dict[str, Tensor] | None = None,
    *,
    share_bytes: int = parallel._SHARE_BYTES,
) -> list[Any]:
    """Let rank 0 lead, rank 1 follow; what each returned, of a JobError its reason and text."""
    resolved.layout.meeting.unlink(missing_ok=True)
    works = [partial(rank_of_two, resolved, lead, weights, share_bytes, rank) for rank in range(2)]
    return run_ranks(works, resolved.run_dir)


def rank_of_two(
    resolved: ResolvedJob, lead: Lead, weights: dict[str, Tensor] | None, share_bytes: int, rank: int
) -> Any:
    parallel._SHARE_BYTES = share_bytes
    join(resolved.layout.meeting, rank=rank, ranks=2)
    engine = MegatronTrainer(SHAPE, resolved.job.spec, weights)
    try:
        return follow(engine, resolved, "trainer-1") if rank else lead(resolved, engine)
    except JobError as error:
        return error.reason, str(error)


@contextmanager
def leader_of(resolved: ResolvedJob, engine: MegatronTrainer) -> Iterator[LeadingEngine]:
    """What the loop makes of rank 0's engine, here for trajectories without entries."""
    units = units_of(resolved.job.spec.trainer.parallelism)
    with open_loader(resolved, SHAPE, "run", LEADER, engine.selections) as (loader, _):
        yield LeadingEngine(engine, loader, run_id="run", nodes=[None, None], units=units)


def trajectories(count: int) -> list[Trajectory]:
    generator = torch.Generator().manual_seed(0)
    return [
        Trajectory(str(i), torch.randint(SHAPE.vocab, (12,), generator=generator), 3, torch.zeros(9), [0] * 9)
        for i in range(count)
    ]


def whole_job(resolved: ResolvedJob, engine: MegatronTrainer) -> list[dict[str, Any]]:
    log = Log()

    async def train() -> None:
        async with rollout(resolved, shape=SHAPE):
            await run_loop(resolved, engine, log)

    asyncio.run(train())
    return log.lines


def run(resolved: ResolvedJob) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Steps and events of a job."""
    lines, followed = two_ranks(resolved, whole_job)
    assert followed is None
    assert isinstance(lines, list), lines
    steps, events = ([line for line in lines if line["type"] == kind] for kind in ("step", "event"))
    return steps, events


@pytest.mark.parametrize(
    ("sync", "sizes", "state"),
    [
        ("Disk", EXPERTS_APART, "Full"),
        ("Distributed", EXPERTS_APART, "Sharded"),
        ("Distributed", {"tensor": 2}, "Sharded"),
        ("Disk", {"pipeline": 2}, "Sharded"),
        pytest.param("Disk", {"context": 2, "expert": 2}, "Sharded", marks=pytest.mark.full),
    ],
    ids=["experts by disk", "experts by gloo", "tensors", "stages", "rows and experts"],
)
def test_a_whole_job_with_records_weights_and_checkpoints(tmp_path, sync, sizes, state):
    """Against a model together; then continued from a checkpoint, also by ranks that hold all of it.

    Those read one of the other state, and the newest one is damaged.
    """
    together, _ = run(job_of(tmp_path / "together", TOGETHER, sync=sync))
    job = job_of(tmp_path / "apart", sizes, sync=sync, state=state)
    apart, _ = run(job)
    ranks = {f"state-rank-0000{rank}.safetensors" for rank in range(2)}
    held = {"Full": {"state.safetensors"}, "Sharded": ranks}
    for step in (2, 4):
        files = {path.name for path in (job.layout.checkpoints / f"step-00000{step}").iterdir()}
        assert files == {"loop.json", "manifest.json"} | held[state]
    assert [line["step"] for line in apart] == [1, 2, 3, 4]
    for line, other in zip(apart, together, strict=True):
        assert line["gap_guided"]["max"] < 1e-4
        assert line["routes_missing"] == 0
        rows = line["prompt_tokens"] + line["response_tokens"] - line["trajectories"]
        assert (line["records"]["rows"], line["records"]["rows_missing"]) == (rows, 0)
        assert len(line["mismatch"]) == len(other["mismatch"]) == 8
        assert line["records"]["frames"] == other["records"]["frames"]
        # Each rank fetches the frames of its own trajectories, but for prompts of which both have samples.
        fetched = line["records"]["bytes"] + line["records"]["audit_bytes"]
        assert fetched <= line["transport"]["read_bytes"]["object"] <= 1.5 * fetched
    assert apart[0]["reward"] == together[0]["reward"]
    assert apart[0]["policy"] == pytest.approx(together[0]["policy"], rel=1e-3, abs=1e-5)
    shutil.copytree(tmp_path / "apart", tmp_path / "copy")
    other = {"Full": "Sharded", "Sharded": "Full"}[state]
    for directory, layout, form in ((tmp_path / "apart", sizes, state), (tmp_path / "copy", TOGETHER, other)):
        again = job_of(directory, layout, sync=sync, state=form)
        newest = max((again.layout.checkpoints / "step-000004").glob("state*"))
        data = newest.read_bytes()
        newest.write_bytes(data[:-1] + bytes([data[-1] ^ 255]))
        resumed, events = run(again)
        assert [line["reason"] for line in events] == ["CheckpointDamaged"]
        assert f"{newest.name} does not have the length and hash" in events[0]["message"]
        assert [line["step"] for line in resumed] == [3, 4]
        for line, before in zip(resumed, apart[2:], strict=True):
            assert line["reward"] == before["reward"]
            assert line["policy"] == pytest.approx(before["policy"], rel=1e-3, abs=1e-5)
            assert line["gap_guided"]["max"] < 1e-4


def fetch_and_lose(
    rolled: list[Trajectory], resolved: ResolvedJob, engine: MegatronTrainer
) -> dict[str, Any]:
    """A pass with all records, in frames of three rows, and one without rows 3 to 5 of the first of them."""
    table, how = site_table(SHAPE, resolved.job.spec), {"guided": True, "temperature": 1.0, "version": 0}
    with leader_of(resolved, engine) as leader, closing(open_sink(resolved, "rollout-0", "run")) as sink:
        size = 0
        for trajectory in rolled:
            assert trajectory.records is not None
            assert len(trajectory.records.zero_blocks) == 0
            for start in range(0, trajectory.records.n_rows, 3):
                rows = trajectory.records.rows.numpy()[start : start + 3]
                place = (start, start + len(rows))
                header = FrameHeader("uid", "run", trajectory.id, 0, 1, *place, 0, table.digest)
                data = encode_frame(header, table, rows)
                trajectory.entries.append(RecordEntry(sink.put(data, header.key), 0, 1, *place))
                size += len(data)
        settled = threading.Event()
        sink.settle(settled.set)
        assert settled.wait(30)
        batch = Batch([dataclasses.replace(trajectory, records=None) for trajectory in rolled])
        leader.announce([batch])
        logp = leader.forward(batch, **how)
        stats = leader.stats()
        leader.announce([])
        kept = batch.trajectories[0].entries
        gone = dataclasses.replace(kept[1], handle=Handle(kept[1].handle.replace("-0/", "-9/")))
        batch.trajectories[0].entries = [kept[0], gone, *kept[2:]]
        leader.forward(batch, **how)
        without = leader.stats()
        leader.close()
    return {"size": size, "logp": logp, "stats": stats, "without": without}


@pytest.mark.parametrize("sizes", [{"context": 2, "expert": 2}, {"tensor": 2}], ids=["rows", "tensors"])
def test_ranks_fetch_frames_of_their_rows_and_miss_a_lost_one_once(tmp_path, sizes):
    """Twelve rows, of which context-parallel ranks hold the outer and the inner two frames of three."""
    resolved = job_of(tmp_path, sizes)
    weights = dict(initial_weights(SHAPE, 1))
    prompts = [[5, 9, 3], [7, 2, 8, 4]]
    rolled = roll_out(SHAPE, resolved.job.spec, weights, prompts, [10, 6], version=0)
    seen, followed = two_ranks(resolved, partial(fetch_and_lose, rolled), weights)
    assert followed is None
    assert isinstance(seen, dict), seen
    for row, trajectory in zip(seen["logp"], rolled, strict=True):
        assert (row[: len(trajectory.logp_rollout)] - trajectory.logp_rollout).abs().max() < 1e-5
    stats, without = seen["stats"], seen["without"]
    assert (stats.records.rows, stats.records.missing, stats.records.frames) == (21, {}, 7)
    assert stats.guided_missing == stats.routes_missing == 0
    if "context" in sizes:
        assert stats.records.bytes == seen["size"], "each frame is of one rank"
    # Of one context-parallel rank alone; of both tensor-parallel ranks, which have heads of it.
    assert (without.records.rows, without.records.missing) == (21, {"missing": 3})
    assert without.guided_missing > 0
    assert without.routes_missing == 3 * SHAPE.layers


def export_in_parts(resolved: ResolvedJob, engine: MegatronTrainer) -> dict[str, Any]:
    with leader_of(resolved, engine) as leader:
        own = dict(engine.export())
        exporting = leader.export()
        for _ in range(sum(engine.cut(name) is None for name in own) + 3):
            next(exporting)
        # Whoever stopped there goes on with something else.
        logp = leader.forward(Batch(trajectories(3)), guided=True, temperature=1.0, version=0)
        found, state = dict(leader.export()), leader.state()
        leader.load_state(state)
        again = leader.forward(Batch(trajectories(3)), guided=True, temperature=1.0, version=0)
        leader.close()
    return {"own": own, "found": found, "state": state, "logp": logp, "again": again}


@pytest.mark.parametrize(
    "sizes", [EXPERTS_APART, {"tensor": 2}, {"pipeline": 2}], ids=["experts", "tensors", "stages"]
)
def test_rank_0_gets_all_weights_and_may_stop_in_the_middle(tmp_path, sizes):
    resolved = job_of(tmp_path, sizes)
    expected = dict(initial_weights(SHAPE, resolved.job.spec.warmup.seed))
    seen, followed = two_ranks(resolved, export_in_parts, share_bytes=1)
    assert followed is None
    own, found = seen["own"], seen["found"]
    assert 0 < sum(tensor.nbytes for tensor in own.values()) < sum(t.nbytes for t in expected.values())
    assert set(found) == set(hf_shapes(SHAPE))
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    assert set(seen["state"]) == {"updates"} | {
        f"{part}/{name}" for part in ("weights", "exp_avg", "exp_avg_sq") for name in found
    }
    assert torch.equal(seen["again"], seen["logp"])


def one_alone(resolved: ResolvedJob, engine: MegatronTrainer) -> None:
    with leader_of(resolved, engine) as leader:
        leader.forward(Batch(trajectories(1)), guided=True, temperature=1.0, version=0)


@pytest.mark.parametrize(
    ("weight", "site", "sizes"),
    [
        ("model.layers.1.self_attn.o_proj.weight", "layer 1 ExpertInput", EXPERTS_APART),
        # Of an expert of rank 1, which computes tokens of both.
        ("model.layers.1.mlp.experts.3.up_proj.weight", "layer 1 FC2Input", EXPERTS_APART),
        ("lm_head.weight", "logits", EXPERTS_APART),
        ("model.layers.1.self_attn.v_proj.weight", "layer 1 Value", {"tensor": 2}),
        # In the second stage, in the first, whose values the second has as well, and behind all layers.
        ("model.layers.1.self_attn.v_proj.weight", "layer 1 Value", {"pipeline": 2}),
        ("model.layers.0.self_attn.v_proj.weight", "layer 0 Value", {"pipeline": 2}),
        ("lm_head.weight", "logits", {"pipeline": 2}),
    ],
)
def test_a_value_that_is_not_finite_ends_the_pass_of_all_ranks_with_its_site(tmp_path, weight, site, sizes):
    """One trajectory alone: the other rank has none, and is told."""
    weights = dict(initial_weights(SHAPE, 1))
    weights[weight] = torch.full_like(weights[weight], 3e38)
    resolved = job_of(tmp_path, sizes, method={"name": "QAT"})
    (reason, message), followed = two_ranks(resolved, one_alone, weights)
    assert reason == "NonFinite"
    assert site in message
    # Rank 1 learnt it in the pass and waited for the next word of rank 0, which is gone.
    assert followed[0] == "TrainerLost"


def dismiss_and_ask(resolved: ResolvedJob, engine: MegatronTrainer) -> None:
    with leader_of(resolved, engine) as leader:
        leader.close()
        leader.forward(Batch(trajectories(2)), guided=True, temperature=1.0, version=0)


def test_a_rank_that_is_gone_is_missed_in_a_sentence(tmp_path):
    (reason, message), followed = two_ranks(job_of(tmp_path, EXPERTS_APART), dismiss_and_ask)
    assert followed is None
    assert reason == "TrainerLost"
    assert "trainer-1 is gone" in message


def killed_behind_the_meeting(directory: Path, rank: int) -> None:
    join(directory / "meeting", rank=rank, ranks=2)
    if rank:
        os.kill(os.getpid(), signal.SIGKILL)
    MegatronTrainer(EXPERTS, job({}, data=2))


def test_a_test_whose_rank_is_killed_fails_and_shows_where_the_others_stood(tmp_path):
    """Rank 0 makes Megatron's groups then, and would wait half an hour for the other."""
    works = [partial(killed_behind_the_meeting, tmp_path, rank) for rank in range(2)]
    with pytest.raises(pytest.fail.Exception, match=r"(?s)rank 1 ended with -9.*rank 0.*Fatal .*Aborted"):
        run_ranks(works, tmp_path)


def test_two_data_parallel_processes_equal_one_with_the_whole_batch(tmp_path):
    states = run_processes(train_shares, tmp_path, processes=2)
    expected = train_shares(0, 1)
    for name, value in expected.items():
        assert torch.equal(states[0][name], states[1][name]), name
        torch.testing.assert_close(states[0][name], value, atol=1e-5, rtol=1e-3, msg=name)
