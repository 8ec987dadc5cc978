"""Entry point of a trainer process: ``python -m tracerl.runtime.trainer_main <job.yaml> trainer-<rank>``.

SIGTERM ends it at once, like SIGKILL would: the computing threads of torch could not be interrupted, and all
that a trainer keeps (log lines, checkpoints, the warm-up cache) is written so that a reader finds it whole or
not at all. Torch is imported inside, as in `tracerl.runtime.rollout_main`.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tracerl.api.errors import InputError
from tracerl.api.model import file_path, model_shape
from tracerl.api.resolved import EndpointFile, ResolvedJob
from tracerl.observe.metrics import MetricsServer, StepExporter
from tracerl.observe.runlog import RunLog
from tracerl.rl.steprecord import StepRecord
from tracerl.runtime.child import run_process

if TYPE_CHECKING:
    from tracerl.engines.base import TrainerEngine


class Log:
    """The loop's `Log`: the run log, and the same step records as metrics."""

    def __init__(self, run_log: RunLog, exporter: StepExporter) -> None:
        self._exporter = exporter
        self.progress, self.sync = run_log.progress, run_log.sync
        self._write = run_log.write

    def write(self, record: Mapping[str, Any]) -> None:
        """Write a record and, when it is a step's, show it to the next scrape."""
        self._write(record)
        if record["type"] == "step":
            self._exporter.observe(StepRecord.model_validate(record))


def main(path: str, name: str) -> int:
    """Train the resolved job at `path` to its end, or help rank 0 with it; returns the exit code."""

    def work(resolved: ResolvedJob) -> None:
        import torch  # noqa: PLC0415

        from tracerl.rl.parallel import follow, join  # noqa: PLC0415

        spec = resolved.job.spec
        torch.set_num_threads(spec.trainer.threads)
        engine = _engine(resolved)
        rank, ranks = int(name.removeprefix("trainer-")), spec.trainer.parallelism.data
        if ranks > 1:
            join(resolved.layout.meeting, rank=rank, ranks=ranks)
        if rank > 0:
            follow(engine, resolved, name)
        else:
            _lead(resolved, engine, name)

    return run_process(Path(path), name, work)


def _lead(resolved: ResolvedJob, engine: TrainerEngine, name: str) -> None:
    from tracerl.rl.loop import run_loop  # noqa: PLC0415

    exporter = StepExporter(resolved.job)
    with ExitStack() as stack:
        log = Log(stack.enter_context(RunLog(resolved.run_dir)), exporter)
        if resolved.endpoints.directory is not None:
            stack.enter_context(_published(exporter, resolved.endpoints.directory / f"{name}.json"))
        asyncio.run(run_loop(resolved, engine, log))


@contextmanager
def _published(exporter: StepExporter, path: Path) -> Iterator[None]:
    with MetricsServer(exporter) as server:
        url = f"http://127.0.0.1:{server.port}"
        EndpointFile(url=url, pid=os.getpid(), instance_id=secrets.token_hex(16)).publish(path)
        try:
            yield
        finally:
            path.unlink(missing_ok=True)


def _engine(resolved: ResolvedJob) -> TrainerEngine:
    from tracerl.engines.reference.trainer import ReferenceTrainer  # noqa: PLC0415
    from tracerl.engines.reference.weights import read_tensors  # noqa: PLC0415

    spec = resolved.job.spec
    shape = model_shape(spec.model.uri)
    if shape is None:
        raise InputError(
            f"spec.model.uri {spec.model.uri} is not on this machine; give builtin:// or file://"
        )
    if spec.model.uri.startswith("builtin://"):
        return ReferenceTrainer(shape, spec)
    return ReferenceTrainer(shape, spec, read_tensors(file_path(spec.model.uri)))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
