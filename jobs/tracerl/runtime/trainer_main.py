"""Entry point of a trainer process: ``python -m tracerl.runtime.trainer_main <job.yaml> trainer-<rank>``.

On one machine SIGTERM ends it at once, like SIGKILL would: the computing threads of torch could not be
interrupted, and all that a trainer keeps (log lines, checkpoints, the warm-up cache) is written so that a
reader finds it whole or not at all. On a cluster SIGTERM means that the pod goes, and what it has with it:
see `tracerl.runtime.cluster`. Torch is imported inside, as in `tracerl.runtime.rollout_main`.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from tracerl.api.constants import Reason
from tracerl.api.errors import InputError, JobError
from tracerl.api.job import TrainerEngine as TrainerEngineName
from tracerl.api.model import file_path, model_shape
from tracerl.api.resolved import EndpointFile, ResolvedJob
from tracerl.observe.metrics import MetricsServer, StepExporter
from tracerl.observe.runlog import RunLog
from tracerl.rl.steprecord import StartRecord, StepRecord
from tracerl.runtime.child import EXIT_SIGTERM, at_sigterm, run_process
from tracerl.runtime.interpreters import require_here
from tracerl.runtime.results import event_files

if TYPE_CHECKING:
    import torch

    from tracerl.engines.base import TrainerEngine
    from tracerl.observe.tensorboard import EventFiles


class Log:
    """The loop's `Log` on one machine: the run log, and the same step records as metrics."""

    def __init__(self, run_log: RunLog, exporter: StepExporter, board: EventFiles | None = None) -> None:
        self._exporter, self._board = exporter, board
        self.progress, self.sync = run_log.progress, run_log.sync
        self._write = run_log.write

    def write(self, record: Mapping[str, Any]) -> None:
        """Write a record, and show what it says to the next scrape."""
        self._write(record)
        if record["type"] == "start":
            start = StartRecord.model_validate(record)
            self._exporter.start(start)
            if self._board is not None:
                self._board.started(start.resumed_from)
        if record["type"] == "step":
            step = StepRecord.model_validate(record)
            self._exporter.observe(step)
            if self._board is not None:
                self._board.step(step)

    def saved(self, step: int) -> None:
        """Leave the checkpoint where it is."""


def main(path: str, name: str) -> int:
    """Train the resolved job at `path` to its end, or help rank 0 with it; returns the exit code."""

    def work(resolved: ResolvedJob) -> None:
        exporter = StepExporter(resolved.job)
        with _metrics(resolved, name, exporter):
            _train(resolved, name, exporter)

    return run_process(Path(path), name, work)


def _train(resolved: ResolvedJob, name: str, exporter: StepExporter) -> None:
    import torch  # noqa: PLC0415

    from tracerl.rl.loop import run_loop  # noqa: PLC0415
    from tracerl.rl.parallel import follow, join  # noqa: PLC0415

    spec = resolved.job.spec
    torch.set_num_threads(spec.trainer.threads)
    rank, ranks = int(name.removeprefix("trainer-")), spec.trainer.parallelism.ranks
    device = _device(resolved, rank)
    if ranks > 1:
        meeting = resolved.endpoints.meeting or resolved.layout.meeting
        join(meeting, rank=rank, ranks=ranks, seconds=resolved.appear_seconds, device=device.type)
    # Behind the meeting: Megatron makes its groups of the processes that are there.
    engine = _engine(resolved, device)
    if rank > 0:
        if resolved.on_cluster:
            from tracerl.runtime.cluster import STOP_SECONDS  # noqa: PLC0415

            at_sigterm(lambda: _linger(STOP_SECONDS))
        follow(engine, resolved, name)
    elif resolved.on_cluster:
        from tracerl.runtime.cluster import lead  # noqa: PLC0415

        lead(resolved, name, exporter, lambda log, stop: run_loop(resolved, engine, log, asked_to_stop=stop))
    else:
        with RunLog(resolved.run_dir) as run_log, event_files(resolved, exporter) as board:
            asyncio.run(run_loop(resolved, engine, Log(run_log, exporter, board)))


def _linger(seconds: float) -> None:
    """Let rank 0 finish its step with this rank, should it have been asked to stop too."""
    time.sleep(seconds)
    os._exit(EXIT_SIGTERM)


@contextmanager
def _metrics(resolved: ResolvedJob, name: str, exporter: StepExporter) -> Iterator[None]:
    """Serve metrics and health: of each pod's first rank on a cluster, of trainer 0 alone on one machine."""
    if resolved.endpoints.directory is None:
        [url] = [endpoint.url for endpoint in resolved.endpoints.trainer if endpoint.name == name]
        if url is None:
            yield
            return
        port = urlsplit(url).port or 80
        try:
            server = MetricsServer(exporter, host=None, port=port, token=resolved.token())
        except OSError as error:
            raise JobError(
                Reason.CONFIGURATION, f"{name} cannot listen on port {port} ({error.strerror}); free it"
            ) from None
        with server:
            yield
    elif name != "trainer-0":
        yield
    else:
        with MetricsServer(exporter) as server, _published(server, resolved.endpoints.directory, name):
            yield


@contextmanager
def _published(server: MetricsServer, directory: Path, name: str) -> Iterator[None]:
    path = directory / f"{name}.json"
    url = f"http://127.0.0.1:{server.port}"
    EndpointFile(url=url, pid=os.getpid(), instance_id=secrets.token_hex(16)).publish(path)
    try:
        yield
    finally:
        path.unlink(missing_ok=True)


def _device(resolved: ResolvedJob, rank: int) -> torch.device:
    """Take the CPU, or the one GPU that this process computes on.

    A pod's processes all see its GPUs; on one machine each is shown its own.
    """
    from tracerl.engines.device import device_of  # noqa: PLC0415

    gpus = resolved.job.spec.trainer.gpus_per_node
    return device_of(gpus, "spec.trainer.gpusPerNode", rank % gpus if gpus and resolved.on_cluster else 0)


def _engine(resolved: ResolvedJob, device: torch.device) -> TrainerEngine:
    from tracerl.engines.hf import read_tensors  # noqa: PLC0415

    spec = resolved.job.spec
    require_here(spec, "trainer")
    shape = model_shape(spec.model.uri)
    if shape is None:
        raise InputError(
            f"spec.model.uri {spec.model.uri} is not on this machine; give builtin:// or file://"
        )
    weights = None
    if not spec.model.uri.startswith("builtin://"):
        weights = read_tensors(file_path(spec.model.uri))
    if spec.trainer.engine is TrainerEngineName.MEGATRON:
        from tracerl.engines.megatron.trainer import MegatronTrainer  # noqa: PLC0415

        return MegatronTrainer(shape, spec, weights, device=device)
    from tracerl.engines.reference.trainer import ReferenceTrainer  # noqa: PLC0415

    return ReferenceTrainer(shape, spec, weights, device)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
