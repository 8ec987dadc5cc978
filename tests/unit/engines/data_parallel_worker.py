"""A process of a data-parallel trainer: `python data_parallel_worker.py DIRECTORY RANK PROCESSES DEVICE`."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from hand_rollout import roll_out, spec_of
from torch import Tensor

from tracerl.api.job import Spec
from tracerl.api.model import ModelShape
from tracerl.engines.base import GROUP_BACKENDS, Batch, TrainerEngine
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


def train(rank: int, processes: int, device: str) -> dict[str, Tensor]:
    """Do that with the reference trainer, on "cuda" with a GPU of its own."""
    if device == "cuda":
        torch.cuda.set_device(rank)
    spec = spec_of("TRACE", layers={"policy": "All"})
    return train_share(ReferenceTrainer(SHAPE, spec, device=device), spec, rank, processes)


def assert_two_equal_one(directory: Path, device: str) -> None:
    """Two processes end where one does that has the whole batch."""
    processes = [
        subprocess.Popen(
            [sys.executable, __file__, str(directory), str(rank), "2", device],
            env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    for process in processes:
        _, errors = process.communicate(timeout=100)
        assert process.returncode == 0, errors
    alone = train(0, 1, device)
    states = [torch.load(directory / f"{rank}.pt", weights_only=True) for rank in range(2)]
    for name, expected in alone.items():
        assert torch.equal(states[0][name], states[1][name]), name
        torch.testing.assert_close(states[0][name], expected, atol=1e-5, rtol=1e-4, msg=name)


if __name__ == "__main__":
    directory, rank, processes, device = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
    dist.init_process_group(
        GROUP_BACKENDS[device], init_method=f"file://{directory}/rendezvous", rank=rank, world_size=processes
    )
    torch.save(train(rank, processes, device), directory / f"{rank}.pt")
    dist.destroy_process_group()
