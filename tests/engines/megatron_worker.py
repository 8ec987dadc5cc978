"""Processes of a parallel Megatron trainer: `python megatron_worker.py WHAT DIRECTORY RANK PROCESSES`."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from hand_rollout import roll_out, spec_of
from torch import Tensor

from tracerl.api.model import ModelShape
from tracerl.engines.base import Batch
from tracerl.engines.megatron.trainer import MegatronTrainer

SHAPE = ModelShape.uniform(
    2, hidden=32, heads=4, kv_heads=2, head_dim=16, experts=4, top_k=2, expert_hidden=16, vocab=30, context=64
)


def run_processes(what: str, directory: Path, *, processes: int) -> None:
    """Run this file as several processes, and fail with what any of them wrote when it failed."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    started = [
        subprocess.Popen(
            [sys.executable, __file__, what, str(directory), str(rank), str(processes)],
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )
        for rank in range(processes)
    ]
    for process in started:
        _, errors = process.communicate(timeout=600)
        assert process.returncode == 0, errors[-3000:]


def train_shares(rank: int, processes: int) -> dict[str, Tensor]:
    """One warm-up step and two RL-like updates on this rank's share of the same data."""
    torch.set_num_threads(1)
    trainer = MegatronTrainer(
        SHAPE, spec_of("TRACE", layers={"policy": "All"}, trainer={"parallelism": {"data": processes}})
    )
    trainer.set_learning_rate(0.003)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(SHAPE.vocab, (6, 9), generator=generator)
    mask = torch.rand((6, 9), generator=generator) < 0.5
    trainer.supervised_step(tokens[rank::processes], mask[rank::processes])
    for version in range(2):
        prompts = torch.randint(SHAPE.vocab, (6, 5), generator=generator).tolist()
        every = roll_out(SHAPE, trainer.spec, dict(trainer.export()), prompts, [7] * 6, version=version)
        # Divided by what all processes hold together, as the engine asks.
        trainer.accumulate(
            Batch(every[rank::processes]),
            lambda logp: -logp.sum() / 42,
            guided=True,
            temperature=1.0,
            version=version,
        )
        trainer.update()
    return trainer.state()


def main(what: str, directory: Path, rank: int, processes: int) -> None:
    """Meet the others and do this rank's part."""
    dist.init_process_group(
        "gloo", init_method=f"file://{directory}/rendezvous", rank=rank, world_size=processes
    )
    assert what == "data"
    torch.save(train_shares(rank, processes), directory / f"{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))
