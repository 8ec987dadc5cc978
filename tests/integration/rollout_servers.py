"""Rollouts and record stores as the processes that they are in a run: by entry point, found by their file."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from tracerl.api.frames import Handle
from tracerl.api.job import TraceRLJob
from tracerl.api.model import BUILTIN_MODELS
from tracerl.api.resolved import Endpoint, EndpointFile, Endpoints, ResolvedJob
from tracerl.engines.hf import write_model
from tracerl.engines.reference.model import MoEModel
from tracerl.engines.reference.weights import hf_views, initialise
from tracerl.transport.base import FrameSource, TransportError, Wanted

SHAPE = BUILTIN_MODELS["tiny-moe"]
NODE, TOKEN = "node-0", "s3cret"
WAIT_SECONDS = 90


def wait_until(condition: Callable[[], object]) -> None:
    """Look again and again until something holds; fails the test when it never does."""
    deadline = time.monotonic() + WAIT_SECONDS
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.02)


def resolve(
    directory: Path, *, method: str = "TRACE", records: dict | None = None, rollout: dict | None = None
) -> ResolvedJob:
    """A run directory with a resolved job and a token."""
    job = TraceRLJob.model_validate(
        {
            "metadata": {"name": "rollout"},
            "spec": {
                "model": {"uri": "builtin://tiny-moe", "dtype": "Float32"},
                "task": {"name": "builtin/chain_sum"},
                "algorithm": {
                    "steps": 1,
                    "promptsPerStep": 1,
                    "samplesPerPrompt": 2,
                    "maxPromptTokens": 10,
                    "maxResponseTokens": 120,
                },
                "method": {"name": method},
                "records": records or {},
                "rollout": rollout or {},
                "transport": {"ring": {"size": "16Mi"}},
            },
        }
    )
    return run_directory(directory, job)


def run_directory(directory: Path, job: TraceRLJob) -> ResolvedJob:
    """Make a run directory with a resolved job of one rollout, store and trainer, and a token."""
    (directory / "rings").mkdir(parents=True)
    token = directory / "token"
    token.write_text(f"{TOKEN}\n")
    resolved = ResolvedJob(
        job=job,
        job_uid="uid-1",
        run_dir=directory,
        cache_dir=directory / "cache",
        token_file=token,
        ring_dir=directory / "rings",
        endpoints=Endpoints(
            directory=directory / "endpoints",
            rollout=[Endpoint(name="rollout-0", node=NODE)],
            store=[Endpoint(name="store-0", node=NODE)],
            trainer=[Endpoint(name="trainer-0", node=NODE)],
        ),
    )
    resolved.write(directory / "job.yaml")
    return resolved


def write_weights(directory: Path, seed: int) -> dict:
    """A model directory with initial weights, as a trainer exports them; also the tensors."""
    parameters = {name: p.detach() for name, p in MoEModel(SHAPE).named_parameters()}
    initialise(SHAPE, parameters, seed)
    tensors = {name: view.contiguous() for name, view in hf_views(SHAPE, parameters).items()}
    write_model(directory, SHAPE, tensors.items())
    return tensors


def reader_of(frames: FrameSource) -> Callable[[Handle], memoryview]:
    """What fetches whole frames for `assemble`."""

    def fetch(handle: Handle) -> memoryview:
        with frames.borrow([Wanted(handle)]) as borrowed:
            (piece,) = borrowed.pieces
            if isinstance(piece, TransportError):
                raise piece
            return memoryview(bytes(piece[0]))

    return fetch


class Process:
    """A process of a run."""

    def __init__(
        self,
        resolved: ResolvedJob,
        module: str,
        name: str,
        *,
        python: str = sys.executable,
        seconds: float = WAIT_SECONDS,
        **environment: str,
    ) -> None:
        """Start it; `seconds` is how long it may take until it listens."""
        self.resolved, self._seconds = resolved, seconds
        self.published = resolved.layout.endpoints / f"{name}.json"
        self._log = resolved.run_dir / f"{name}.log"
        job = str(resolved.run_dir / "job.yaml")
        with self._log.open("ab") as file:
            self.process = subprocess.Popen(
                [python, "-m", f"tracerl.runtime.{module}", job, name],
                stdout=file,
                stderr=file,
                env=os.environ | {"OMP_NUM_THREADS": "1"} | environment,
            )

    def wait_until_it_listens(self) -> EndpointFile:
        """Wait; fails the test when it ends or takes too long."""
        deadline = time.monotonic() + self._seconds
        # A process that was killed leaves its own behind.
        while (found := EndpointFile.read(self.published)) is None or found.pid != self.process.pid:
            assert self.process.poll() is None, self.log()
            assert time.monotonic() < deadline, self.log()
            time.sleep(0.02)
        return found

    def log(self) -> str:
        """What it said."""
        return self._log.read_text()

    def end(self, number: signal.Signals = signal.SIGTERM) -> int:
        """Send it a signal and give its exit code."""
        self.process.send_signal(number)
        return self.process.wait(WAIT_SECONDS)


class Store(Process):
    """A record store process."""

    def __init__(self, resolved: ResolvedJob) -> None:
        super().__init__(resolved, "store_main", "store-0")
        self.wait_until_it_listens()


class Server(Process):
    """A rollout process beside a record store, its own unless one is given."""

    def __init__(self, resolved: ResolvedJob, store: Store | None = None) -> None:
        self.store = store or Store(resolved)
        super().__init__(resolved, "rollout_main", "rollout-0")
        found = self.wait_until_it_listens()
        self.url, self.instance_id = found.url, found.instance_id

    def close(self) -> None:
        """End both processes, if they still run."""
        for each in (self, self.store):
            if each.process.poll() is None:
                each.end()
