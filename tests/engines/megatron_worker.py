"""Processes of a parallel Megatron trainer, forked: imports are minutes where cores are busy."""

from __future__ import annotations

import dataclasses
import functools
import gc
import multiprocessing.util
import os
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from data_parallel_worker import SHAPE, train_share
from hand_rollout import roll_out, spec_of
from megatron.core import parallel_state
from torch import Tensor

from tracerl.api.errors import JobError
from tracerl.api.job import Spec
from tracerl.api.model import ModelShape
from tracerl.engines.base import Batch, EngineStats, Trajectory
from tracerl.engines.megatron.trainer import MegatronTrainer

EXPERTS = ModelShape.uniform(
    2, hidden=32, heads=4, kv_heads=2, head_dim=16, experts=8, top_k=3, expert_hidden=16, vocab=30, context=64
)


def leave() -> None:
    """Leave the groups of other tests: those of a process are of one layout."""
    parallel_state.destroy_model_parallel()
    if dist.is_initialized():
        dist.destroy_process_group()


def fork(work: Callable[[], None], log: Path | None = None) -> int:
    """Do work in a child, which ends with 0, 1 after a JobError and 2 after anything else; gives its id."""
    child = os.fork()
    if child:
        return child
    code = 2
    try:
        # Groups that earlier tests left to the collector end with threads, which a fork has not.
        gc.freeze()
        work()
        code = 0
    except JobError:
        code = 1
    except BaseException:  # noqa: BLE001 - the parent fails with it
        if log is not None:
            log.write_text(traceback.format_exc())
    finally:
        # What Megatron's checkpoints start beside them ends with it.
        multiprocessing.util._exit_function()
        os._exit(code)


def ended(child: int) -> int:
    """Wait for a child's exit code."""
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def run_processes(
    work: Callable[[int, int], dict[str, Any]], directory: Path, *, processes: int
) -> list[dict[str, Any]]:
    """Do work(rank, processes) in as many processes that have met; gives what each returned."""
    leave()

    def part(rank: int) -> None:
        dist.init_process_group(
            "gloo", init_method=f"file://{directory}/rendezvous", rank=rank, world_size=processes
        )
        torch.save(work(rank, processes), directory / f"{rank}.pt")
        dist.destroy_process_group()

    logs = [directory / f"{rank}.log" for rank in range(processes)]
    children = [fork(functools.partial(part, rank), log) for rank, log in enumerate(logs)]
    codes = [ended(child) for child in children]
    assert not any(codes), [log.read_text() for log in logs if log.exists()]
    return [torch.load(directory / f"{rank}.pt", weights_only=False) for rank in range(processes)]


def train_shares(rank: int, processes: int) -> dict[str, Tensor]:
    """Do what the reference trainer's worker does, with Megatron."""
    spec = spec_of("TRACE", layers={"policy": "All"}, trainer={"parallelism": {"data": processes}})
    return train_share(MegatronTrainer(SHAPE, spec), spec, rank, processes)


# -- experts apart ------------------------------------------------------------------------------------------


def job(options: Mapping[str, Any], *, data: int, expert: int) -> Spec:
    """The job of these tests: everything is quantised and recorded."""
    trainer = {"parallelism": {"data": data, "expert": expert}, "engineArgs": options.get("engineArgs", {})}
    return spec_of(
        options.get("method", "TRACE"),
        dtype=options.get("dtype", "Float32"),
        quantization={"secondInput": "Recorded"} | options.get("quantization", {}),
        trainer=trainer,
        seed=options.get("seed", 1),
        **({"layers": {"policy": "All"}} if options.get("method", "TRACE") == "TRACE" else {}),
    )


def sampled(spec: Spec, weights: dict[str, Tensor], version: int, count: int = 5) -> list[Trajectory]:
    """Trajectories of several lengths, the second and last of which are audited."""
    generator = torch.Generator().manual_seed(version)
    lengths = torch.randint(1, 9, (count,), generator=generator).tolist()
    new = torch.randint(1, 20, (count,), generator=generator).tolist()
    prompts = [torch.randint(EXPERTS.vocab, (n,), generator=generator).tolist() for n in lengths]
    found = roll_out(EXPERTS, spec, weights, prompts, new, version=version, audited=True)
    return [
        one if index in {1, count - 1} else dataclasses.replace(one, audit=None)
        for index, one in enumerate(found)
    ]


def whole(own: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """What all ranks give, together; each name comes from one of them."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return dict(own)
    parts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(parts, {name: tensor.clone() for name, tensor in own.items()})
    joined: dict[str, Tensor] = {}
    for part in parts:
        assert part.keys() & joined.keys() <= {"updates"}
        joined |= part
    return joined


def shares(trajectories: list[Trajectory], processes: int, version: int) -> list[list[int]]:
    """Who trains on what: in the last version one rank has nothing."""
    ranks = processes - 1 if processes > 1 and version == 2 else processes
    dealt = [list(range(len(trajectories)))[rank::ranks] for rank in range(ranks)]
    return [*dealt, *[[] for _ in range(processes - ranks)]]


def train(trainer: MegatronTrainer, spec: Spec, rank: int, processes: int) -> dict[str, Any]:
    """One warm-up step and three updates; what was seen on the way."""
    torch.set_num_threads(1)
    trainer.set_learning_rate(0.003)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(EXPERTS.vocab, (5, 9), generator=generator)
    mask = torch.rand((5, 9), generator=generator) < 0.5
    seen: dict[str, Any] = {
        "supervised": trainer.supervised_step(tokens[rank::processes], mask[rank::processes]),
        "versions": [],
    }
    for version in range(3):
        every = sampled(spec, whole(dict(trainer.export())), version)
        mine = shares(every, processes, version)[rank]
        how = {"temperature": 1.0, "version": version}
        unguided = trainer.forward(Batch([every[i] for i in mine]), guided=False, **how)
        guided = trainer.accumulate(
            Batch([every[i] for i in mine]),
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
                "state": whole(trainer.state()),
            }
        )
    return seen


def train_experts(options: Mapping[str, Any], rank: int, processes: int) -> dict[str, Any]:
    """Do that as one rank of a trainer whose experts are apart."""
    spec = job(options, data=processes, expert=options.get("expert", processes))
    return train(MegatronTrainer(EXPERTS, spec), spec, rank, processes)


def update(trainer: MegatronTrainer, every: list[Trajectory], rank: int, processes: int) -> None:
    """One update on this rank's share."""
    trainer.set_learning_rate(0.003)
    mine = [every[i] for i in shares(every, processes, 0)[rank]]
    how = {"guided": True, "temperature": 1.0, "version": 0}
    trainer.accumulate(Batch(mine), lambda logp: -logp.sum() / 42, **how)
    trainer.update()


def checkpoints(directory: Path, rank: int, processes: int) -> dict[str, Any]:
    """Save and load Megatron's distributed checkpoint."""
    torch.set_num_threads(1)
    spec = job({}, data=processes, expert=processes)
    straight = MegatronTrainer(EXPERTS, spec)
    every = sampled(spec, whole(dict(straight.export())), 0)
    update(straight, every, rank, processes)
    straight.save_sharded(directory / "apart")
    saved = whole(straight.state())
    update(straight, every, rank, processes)
    resumed = MegatronTrainer(EXPERTS, job({"seed": 99}, data=processes, expert=processes))
    resumed.load_sharded(directory / "apart")
    loaded = whole(resumed.state())
    update(resumed, every, rank, processes)
    return {
        "saved": saved,
        "loaded": loaded,
        "straight": whole(straight.state()),
        "resumed": whole(resumed.state()),
    }
