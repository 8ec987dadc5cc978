"""Processes of a parallel Megatron trainer: `python megatron_worker.py WHAT DIRECTORY RANK PROCESSES`."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from data_parallel_worker import SHAPE, train_share
from hand_rollout import spec_of
from torch import Tensor

from tracerl.engines.megatron.trainer import MegatronTrainer


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
    """Do what the reference trainer's worker does, with Megatron."""
    spec = spec_of("TRACE", layers={"policy": "All"}, trainer={"parallelism": {"data": processes}})
    return train_share(MegatronTrainer(SHAPE, spec), spec, rank, processes)


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
