"""One process of a data-parallel trainer: `python data_parallel_worker.py DIRECTORY RANK PROCESSES`."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from hand_rollout import roll_out, spec_of
from torch import Tensor

from tracerl.api.job import Spec
from tracerl.api.model import ModelShape
from tracerl.engines.base import Batch, TrainerEngine
from tracerl.engines.reference.trainer import ReferenceTrainer

SHAPE = ModelShape.uniform(
    2, hidden=32, heads=4, kv_heads=2, head_dim=16, experts=4, top_k=2, expert_hidden=16, vocab=30, context=64
)


def train_share(trainer: TrainerEngine, spec: Spec, rank: int, processes: int) -> dict[str, Tensor]:
    """One warm-up step and two RL-like updates on this rank's share of the same data."""
    torch.set_num_threads(1)
    trainer.set_learning_rate(0.003)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(SHAPE.vocab, (6, 9), generator=generator)
    mask = torch.rand((6, 9), generator=generator) < 0.5
    trainer.supervised_step(tokens[rank::processes], mask[rank::processes])
    for version in range(2):
        prompts = torch.randint(SHAPE.vocab, (6, 5), generator=generator).tolist()
        every = roll_out(SHAPE, spec, dict(trainer.export()), prompts, [7] * 6, version=version)
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


def train(rank: int, processes: int) -> dict[str, Tensor]:
    """Do that with the reference trainer."""
    spec = spec_of("TRACE", layers={"policy": "All"})
    return train_share(ReferenceTrainer(SHAPE, spec), spec, rank, processes)


if __name__ == "__main__":
    directory, rank, processes = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    dist.init_process_group(
        "gloo", init_method=f"file://{directory}/rendezvous", rank=rank, world_size=processes
    )
    torch.save(train(rank, processes), directory / f"{rank}.pt")
    dist.destroy_process_group()
