"""Ranks of a parallel Megatron trainer: each a process of its own, with a log.

They are forked off one that has imported what they need and done nothing else: imports are minutes where
cores are busy. A fork of the process that runs the tests would stand at times. Megatron keeps a group of the
test before until it makes another, and gloo's destructor then joins threads that the fork has not, but whose
ids and stacks its own new ones may have got.
"""

from __future__ import annotations

import contextlib
import dataclasses
import faulthandler
import functools
import multiprocessing
import os
import pickle
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import connection
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from data_parallel_worker import SHAPE, train_share
from hand_rollout import roll_out, spec_of
from megatron.core import parallel_state
from torch import Tensor

from tracerl.api.frames import Handle
from tracerl.api.job import Spec
from tracerl.api.model import ModelShape
from tracerl.engines.base import GROUP_BACKENDS, Batch, EngineStats, Trajectory
from tracerl.engines.megatron.trainer import MegatronTrainer
from tracerl.records.frame import FrameHeader, encode_frame
from tracerl.records.pairing import RecordEntry, TrajectoryRecords, assemble
from tracerl.records.partial import EVERY_KIND, PartialFrame, Selection
from tracerl.records.sites import SiteKind, site_table
from tracerl.rl.dealing import units_of

EXPERTS = ModelShape.uniform(
    2, hidden=32, heads=4, kv_heads=2, head_dim=16, experts=8, top_k=3, expert_hidden=16, vocab=30, context=64
)
RANKS_SECONDS = 600.0
"""How long ranks may take; far more than any do, so that those that wait for each other are seen."""
# Megatron asks for GPUs where it is imported, and a fork of who has asked cannot use them.
_SPAWNS = multiprocessing.get_context("spawn")
_FORKS = multiprocessing.get_context("forkserver")
# Of packages that are installed: the process that forks does not have the path of the tests.
_FORKS.set_forkserver_preload(
    ["pytest", "tracerl.engines.megatron.trainer", "tracerl.engines.reference.server", "tracerl.rl.loop"]
)


def leave() -> None:
    """Leave the groups of other tests: those of a process are of one layout."""
    parallel_state.destroy_model_parallel()
    if dist.is_initialized():
        dist.destroy_process_group()


def run_ranks(works: Sequence[Callable[[], Any]], directory: Path, *, device: str = "cpu") -> list[Any]:
    """Do each of these in a process of its own; gives what they returned.

    A work goes there by pickle: a function by its name, what it is given by value. The test fails with all
    logs as soon as one of them fails or is killed, and when they take too long, then with where each stood.
    """
    logs = [directory / f"{rank}.log" for rank in range(len(works))]
    found = [directory / f"{rank}.pt" for rank in range(len(works))]
    left = {}
    failure = None
    try:
        for rank, (work, log, result) in enumerate(zip(works, logs, found, strict=True)):
            context = _FORKS if device == "cpu" else _SPAWNS
            child = context.Process(target=_do, args=(pickle.dumps(work), log, result), name=f"rank {rank}")
            child.start()
            left[child.sentinel] = child
        # The first start has waited for the imports.
        deadline = time.monotonic() + RANKS_SECONDS
        while left and failure is None:
            ended = connection.wait(list(left), deadline - time.monotonic())
            for sentinel in ended:
                child = left.pop(sentinel)
                child.join()
                if child.exitcode:
                    failure = f"{child.name} ended with {child.exitcode}"
            if not ended:
                failure = f"{[child.name for child in left.values()]} took more than {RANKS_SECONDS:.0f} s"
    finally:
        for child in left.values():
            # With it goes the stack of every thread into the log; one that ends just now is gone.
            with contextlib.suppress(ProcessLookupError):
                os.kill(child.pid, signal.SIGABRT)
            child.join()
    if failure is not None:
        texts = [f"-- rank {rank}\n{log.read_text()}" for rank, log in enumerate(logs) if log.exists()]
        pytest.fail("\n".join([failure, *texts]), pytrace=False)
    return [torch.load(result, weights_only=False) for result in found]


def _do(work: bytes, log: Path, result: Path) -> None:
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for stream in (1, 2):
        os.dup2(file, stream)
    faulthandler.enable()
    torch.set_num_threads(1)
    torch.save(pickle.loads(work)(), result)


def run_processes(
    work: Callable[[int, int], dict[str, Any]], directory: Path, *, processes: int, device: str = "cpu"
) -> list[dict[str, Any]]:
    """Do work(rank, processes) in processes that have met (`run_ranks`), with a GPU each on "cuda"."""
    works = [functools.partial(_met, work, directory, rank, processes, device) for rank in range(processes)]
    return run_ranks(works, directory, device=device)


def _met(
    work: Callable[[int, int], dict[str, Any]], directory: Path, rank: int, processes: int, device: str
) -> dict[str, Any]:
    if device == "cuda":
        torch.cuda.set_device(rank)
    dist.init_process_group(
        GROUP_BACKENDS[device], init_method=f"file://{directory}/rendezvous", rank=rank, world_size=processes
    )
    found = work(rank, processes)
    dist.destroy_process_group()
    return found


def train_shares(rank: int, processes: int) -> dict[str, Tensor]:
    """Do what the reference trainer's worker does, with Megatron."""
    spec = spec_of("TRACE", layers={"policy": "All"}, trainer={"parallelism": {"data": processes}})
    return train_share(MegatronTrainer(SHAPE, spec), spec, rank, processes)


# -- one model over several processes -----------------------------------------------------------------------


def job(options: Mapping[str, Any], **parallelism: int) -> Spec:
    """The job of these tests: everything is quantised and recorded."""
    trainer = {"parallelism": parallelism, "engineArgs": options.get("engineArgs", {})}
    return spec_of(
        options.get("method", "TRACE"),
        dtype=options.get("dtype", "Float32"),
        quantization={"secondInput": "Recorded"} | options.get("quantization", {}),
        trainer=trainer,
        seed=options.get("seed", 1),
        **({"layers": {"policy": "All"}} if options.get("method", "TRACE") == "TRACE" else {}),
    )


def shape_of(options: Mapping[str, Any]) -> ModelShape:
    """The model of these tests, with `tied` one whose output layer is its embedding."""
    return EXPERTS.model_copy(update={"tie_embeddings": options.get("tied", False)})


def sampled(
    spec: Spec, weights: dict[str, Tensor], version: int, count: int = 5, *, shape: ModelShape = EXPERTS
) -> list[Trajectory]:
    """Trajectories of several lengths, the second and last of which are audited."""
    generator = torch.Generator().manual_seed(version)
    lengths = torch.randint(1, 9, (count,), generator=generator).tolist()
    new = torch.randint(1, 20, (count,), generator=generator).tolist()
    prompts = [torch.randint(shape.vocab, (n,), generator=generator).tolist() for n in lengths]
    found = roll_out(shape, spec, weights, prompts, new, version=version, audited=True)
    return [
        one if index in {1, count - 1} else dataclasses.replace(one, audit=None)
        for index, one in enumerate(found)
    ]


def whole(trainer: MegatronTrainer, own: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """What all ranks give, together; each name comes from one of them, or in as many parts as it is cut."""
    if not trainer.sharded:
        return {name: tensor.cpu() for name, tensor in own.items()}
    ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, {name: tensor.cpu().clone() for name, tensor in own.items()})
    parts: dict[str, list[Tensor]] = {}
    for rank in ranks:
        for name, tensor in rank.items():
            parts.setdefault(name, []).append(tensor)
    joined = {}
    for name, found in parts.items():
        cut = trainer.cut(name)
        assert len(found) == (1 if cut is None else cut.parts), name
        joined[name] = found[0] if cut is None else torch.cat(found, dim=cut.axis)
    return joined


def needed(
    trajectory: Trajectory, selections: tuple[Selection | None, Selection | None], longest: int
) -> Trajectory:
    """The trajectory with what a rank's loader reads of its records: out of the bytes of their frames."""
    trajectory = dataclasses.replace(trajectory, longest=longest)
    kinds = zip((trajectory.records, trajectory.audit), selections, strict=True)
    records, audit = (
        found if found is None or selection is None else read(found, selection, trajectory)
        for found, selection in kinds
    )
    return dataclasses.replace(trajectory, records=records, audit=audit)


def read(records: TrajectoryRecords, selection: Selection, trajectory: Trajectory) -> TrajectoryRecords:
    """Write frames of two rows, and read what is selected of those that hold any row of the rank."""
    table, version, zero = records.table, int(records.versions[0]), records.zero_blocks.numpy()
    share = selection.share(records.n_rows, trajectory.longest)
    entries, opened = [], {}
    for start in range(0, records.n_rows, 2):
        stop = min(start + 2, records.n_rows)
        kinds = EVERY_KIND if share is None else share.kinds(start, stop)
        if not kinds:
            continue
        place = ("uid", "run", trajectory.id, 0, 1, start, stop)
        header = FrameHeader(*place, version, table.digest, audit=table.audit)
        inside = zero[(zero[:, 0] >= start) & (zero[:, 0] < stop)] - np.array([start, 0, 0])
        data = encode_frame(header, table, records.rows.numpy()[start:stop], inside)
        part = PartialFrame(selection, len(data), kinds=kinds)
        while part.ranges:
            part.take([memoryview(data)[first:last] for first, last in part.ranges])
        handle = Handle(f"rec://store-0/{start}?len=1&xxh3=0")
        entries.append(RecordEntry(handle, 0, 1, start, stop, table.audit))
        opened[handle] = part.frame
    found = assemble(
        entries,
        lambda _: memoryview(b""),
        selection.table,
        tokens=len(trajectory.tokens),
        prompt_tokens=trajectory.prompt_tokens,
        token_versions=trajectory.token_versions,
        job_uid="uid",
        run_id="run",
        trajectory=trajectory.id,
        opened=opened,
        needed=None if share is None else share.of(selection.table),
    )
    assert not found.missing
    return found


def shares(trajectories: list[Trajectory], units: int, version: int) -> list[list[int]]:
    """Who trains on what: in the last version one unit has nothing."""
    busy = units - 1 if units > 1 and version == 2 else units
    dealt = [list(range(len(trajectories)))[unit::busy] for unit in range(busy)]
    return [*dealt, *[[] for _ in range(units - busy)]]


def train(trainer: MegatronTrainer, spec: Spec, rank: int, count: int = 5) -> dict[str, Any]:
    """One warm-up step and three updates; what was seen on the way."""
    unit, units = units_of(spec.trainer.parallelism)[rank], spec.trainer.parallelism.data
    torch.set_num_threads(1)
    trainer.set_learning_rate(0.003)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(EXPERTS.vocab, (5, 9), generator=generator)
    mask = torch.rand((5, 9), generator=generator) < 0.5
    seen: dict[str, Any] = {
        "supervised": trainer.supervised_step(tokens[unit::units], mask[unit::units]),
        "versions": [],
    }
    for version in range(3):
        weights = whole(trainer, dict(trainer.export()))
        every = sampled(spec, weights, version, count, shape=trainer.shape)
        mine = shares(every, units, version)[unit]
        longest = max(len(trajectory.tokens) for trajectory in every) - 1
        batch = Batch([needed(every[i], trainer.selections, longest) for i in mine])
        how = {"temperature": 1.0, "version": version}
        unguided = trainer.forward(batch, guided=False, **how)
        guided = trainer.accumulate(
            batch,
            lambda logp: -(logp * torch.arange(1, 1 + logp.shape[1])).sum() / 42,
            guided=True,
            **how,
        )
        norm = trainer.update()
        stats: EngineStats = trainer.stats()
        seen["versions"].append(
            {
                "unguided": dict(zip(mine, unguided, strict=True)),
                "guided": dict(zip(mine, guided, strict=True)),
                "rollout": {i: every[i].logp_rollout for i in mine},
                "norm": norm,
                "sites": {key: dataclasses.asdict(counts) for key, counts in stats.sites.items()},
                "rows": [stats.routes_rows, stats.routes_missing, stats.guided_rows, stats.guided_missing],
                "attended_rows": sum(
                    len(t.tokens) - 1
                    for t in batch.trajectories
                    for site in site_table(EXPERTS, spec).sites
                    if site.kind in {SiteKind.KEY, SiteKind.VALUE}
                ),
                "state": whole(trainer, trainer.state()),
            }
        )
    return seen


def train_parts(
    options: Mapping[str, Any], sizes: Mapping[str, int], rank: int, _: int, *, device: str = "cpu"
) -> dict[str, Any]:
    """Do that as one rank of a trainer whose model is apart."""
    spec = job(options, **sizes)
    trainer = MegatronTrainer(shape_of(options), spec, device=here(device))
    return train(trainer, spec, rank, options.get("count", 5))


def here(device: str) -> torch.device:
    """The CPU, or the GPU that this process has."""
    return torch.device(device, torch.cuda.current_device()) if device == "cuda" else torch.device(device)


def merged(parts: Sequence[Mapping[str, Any]], kind: str) -> dict[int, Tensor]:
    """Rows of all trajectories, by number: those of the last rank that gave them."""
    return {i: row for part in parts for i, row in part[kind].items()}


def furthest(found: Mapping[int, Tensor], expected: Mapping[int, Tensor]) -> float:
    """The largest difference of the values that both have, of the same trajectories."""
    assert found.keys() == expected.keys()
    pairs = [(row, expected[i]) for i, row in found.items()]
    return max(float((a[: len(b)] - b[: len(a)]).abs().max()) for a, b in pairs)


def summed(parts: Sequence[Mapping[str, Any]]) -> dict[Any, dict[str, int]]:
    """What all ranks counted at each site."""
    keys = {key for part in parts for key in part["sites"]}
    names = next(iter(parts[0]["sites"].values()))
    return {
        key: {name: sum(part["sites"].get(key, {}).get(name, 0) for part in parts) for name in names}
        for key in keys
    }


def assert_equal(found: Sequence[Mapping[str, Any]], expected: Mapping[str, Any], tensor: int = 1) -> None:
    """What all ranks saw is what one process did: log-probs, norms, counts and state, in FP32.

    `tensor` is the number of tensor-parallel ranks.
    """
    assert {one["supervised"] for one in found} == {found[0]["supervised"]}
    assert found[0]["supervised"] == pytest.approx(expected["supervised"], rel=1e-5)
    for version, one in enumerate(expected["versions"]):
        parts = [each["versions"][version] for each in found]
        for kind in ("guided", "unguided"):
            assert furthest(merged(parts, kind), one[kind]) < 1e-5
        assert furthest(merged(parts, "guided"), merged(parts, "rollout")) < 1e-5
        assert len({part["norm"] for part in parts}) == 1
        assert parts[0]["norm"] == pytest.approx(one["norm"], rel=1e-5)
        # Tensor-parallel ranks count the rows of Key and Value each, of their own heads.
        again = one["attended_rows"] * (tensor - 1)
        rows = [sum(part["rows"][i] for part in parts) for i in range(4)]
        assert rows == [one["rows"][0], 0, one["rows"][2] + again, 0]
        counts = summed(parts)
        assert counts == one["sites"]
        assert all(count["values"] and not count["guided_mismatched"] for count in counts.values())
        for name, value in one["state"].items():
            assert all(torch.equal(parts[0]["state"][name], part["state"][name]) for part in parts), name
            # Adam divides by what may be rounding noise.
            bound = 1e-3 if name.startswith("weights/") else 1e-4
            torch.testing.assert_close(parts[0]["state"][name], value, atol=1e-5, rtol=bound, msg=name)


def update(trainer: MegatronTrainer, every: list[Trajectory], rank: int) -> None:
    """One update on this rank's share."""
    parallelism = trainer.spec.trainer.parallelism
    trainer.set_learning_rate(0.003)
    share = shares(every, parallelism.data, 0)[units_of(parallelism)[rank]]
    longest = max(len(trajectory.tokens) for trajectory in every) - 1
    mine = [needed(every[i], trainer.selections, longest) for i in share]
    how = {"guided": True, "temperature": 1.0, "version": 0}
    trainer.accumulate(Batch(mine), lambda logp: -logp.sum() / 42, **how)
    trainer.update()


def checkpoints(directory: Path, sizes: Mapping[str, int], rank: int, _: int) -> dict[str, Any]:
    """Save and load Megatron's distributed checkpoint."""
    torch.set_num_threads(1)
    spec = job({}, **sizes)
    straight = MegatronTrainer(EXPERTS, spec)
    every = sampled(spec, whole(straight, dict(straight.export())), 0)
    update(straight, every, rank)
    straight.save_sharded(directory / "apart")
    saved = whole(straight, straight.state())
    update(straight, every, rank)
    resumed = MegatronTrainer(EXPERTS, job({"seed": 99}, **sizes))
    resumed.load_sharded(directory / "apart")
    loaded = whole(resumed, resumed.state())
    update(resumed, every, rank)
    return {
        "saved": saved,
        "loaded": loaded,
        "straight": whole(straight, straight.state()),
        "resumed": whole(resumed, resumed.state()),
    }
