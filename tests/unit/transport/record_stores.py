"""Record stores for tests: on a thread of the test, or as the processes that they are in a run."""

from __future__ import annotations

import asyncio
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import xxhash

from tracerl.api.frames import FrameKey, Handle, parse_handle
from tracerl.api.job import TraceRLJob
from tracerl.api.resolved import Endpoint, EndpointFile, Endpoints, ResolvedJob
from tracerl.transport.base import Wanted
from tracerl.transport.listen import HttpServer
from tracerl.transport.remote import RemoteSource
from tracerl.transport.ring.client import StoreSink, StoreSource
from tracerl.transport.ring.server import RingServer, Tier
from tracerl.transport.store.http import StoreServer

JOB_UID = "0b7a1f7c-0000-4000-8000-000000000001"
RUN_ID = "run-1"
TOKEN = "s3cret"
WAIT_SECONDS = 60


def wait_until(condition: Callable[[], object]) -> None:
    """Look again and again until something holds; fails the test when it never does."""
    deadline = time.monotonic() + WAIT_SECONDS
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.01)


def files_below(directory: Path) -> list[Path]:
    """Files of a directory from which others may remove some while this looks (`rglob` raises then)."""
    return [Path(where, name) for where, _, names in os.walk(directory) for name in names]


@contextmanager
def shared_directory() -> Iterator[Path]:
    """A directory in shared memory with a short name: a socket's path has 107 bytes at most."""
    directory = Path(tempfile.mkdtemp(prefix="trt-", dir="/dev/shm"))
    try:
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def key(trajectory: str = "t-0", run_id: str = RUN_ID, row: int = 0) -> FrameKey:
    return FrameKey(JOB_UID, run_id, trajectory, 0, 1, row, row + 1, 0)


def frames_of(seed: int, sizes: Sequence[int]) -> list[bytes]:
    chance = random.Random(seed)
    return [chance.randbytes(size) for size in sizes]


def right(handle: Handle, views: Sequence[memoryview]) -> bool:
    """Whether these are the bytes of a whole frame."""
    [view] = views
    return xxhash.xxh3_64_intdigest(view) == parse_handle(handle).xxh3


def wanted(handles: Sequence[Handle]) -> list[Wanted]:
    return [Wanted(handle) for handle in handles]


class ThreadStore:
    """A store with ring and HTTP on an event loop of its own; `on_loop` runs something there."""

    def __init__(
        self, directory: Path, *, name: str = "store-0", ring_bytes: int = 2**21, tiers: Sequence[Tier] = ()
    ) -> None:
        self.directory, self.name = directory, name
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self._thread.start()
        self.on_loop(self._start(ring_bytes, tiers))

    async def _start(self, ring_bytes: int, tiers: Sequence[Tier]) -> None:
        self.ring = RingServer(
            self.directory,
            store=self.name,
            job_uid=JOB_UID,
            token=TOKEN,
            ring_bytes=ring_bytes,
            tiers=tiers,
        )
        await self.ring.start()
        self.server = StoreServer(self.ring, token=TOKEN)
        self._http = HttpServer(self.server.application(), self.server.strangers)
        self.url = f"http://127.0.0.1:{await self._http.start('127.0.0.1', 0)}"

    def on_loop(self, work):
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(WAIT_SECONDS)

    async def _stop(self) -> None:
        await self._http.close()
        await self.ring.close()

    def close(self) -> None:
        self.on_loop(self._stop())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()

    def sink(self, run_id: str = RUN_ID) -> StoreSink:
        return StoreSink(
            self.directory,
            store=self.name,
            job_uid=JOB_UID,
            run_id=run_id,
            token=TOKEN,
            name="rollout-0",
            timeout=WAIT_SECONDS,
        )

    def near(self, run_id: str = RUN_ID) -> StoreSource:
        return StoreSource(
            self.directory,
            store=self.name,
            job_uid=JOB_UID,
            run_id=run_id,
            token=TOKEN,
            name="trainer-0",
            timeout=WAIT_SECONDS,
        )

    def far(self, run_id: str = RUN_ID, *, token: str = TOKEN, timeout: float = WAIT_SECONDS) -> RemoteSource:
        return RemoteSource(self.name, lambda: self.url, token=token, run_id=run_id, timeout=timeout)


def resolve(directory: Path, ring_dir: Path, *, nodes: int = 1, transport: dict | None = None) -> ResolvedJob:
    """A run directory with a resolved job: on each node a store, a rollout and a trainer."""
    job = TraceRLJob.model_validate(
        {
            "metadata": {"name": "stores"},
            "spec": {
                "model": {"uri": "builtin://tiny-moe"},
                "task": {"name": "builtin/chain_sum"},
                "algorithm": {"steps": 1, "promptsPerStep": 1, "samplesPerPrompt": 2},
                "method": {"name": "TRACE"},
                "transport": {"ring": {"size": "2Mi"}, "deadlineSeconds": 30, **(transport or {})},
            },
        }
    )
    directory.mkdir(exist_ok=True)
    token = directory / "token"
    token.write_text(f"{TOKEN}\n")

    def endpoints(role: str) -> list[Endpoint]:
        return [Endpoint(name=f"{role}-{node}", node=f"node-{node}") for node in range(nodes)]

    resolved = ResolvedJob(
        job=job,
        job_uid=JOB_UID,
        run_dir=directory,
        cache_dir=directory / "cache",
        token_file=token,
        ring_dir=ring_dir,
        endpoints=Endpoints(
            directory=directory / "endpoints",
            rollout=endpoints("rollout"),
            store=[] if job.spec.transport.only_object else endpoints("store"),
            trainer=endpoints("trainer"),
        ),
    )
    resolved.write(directory / "job.yaml")
    return resolved


class ProcessStore:
    """A store process, once it listens."""

    def __init__(self, resolved: ResolvedJob, name: str = "store-0") -> None:
        self.published = resolved.layout.endpoints / f"{name}.json"
        before = EndpointFile.read(self.published)
        self._log = resolved.run_dir / f"{name}.log"
        with self._log.open("ab") as file:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tracerl.runtime.store_main", str(resolved.layout.job), name],
                stdout=file,
                stderr=file,
                env=os.environ | {"OMP_NUM_THREADS": "1"},
            )

        def listens() -> bool:
            assert self.process.poll() is None, self.log()
            return EndpointFile.read(self.published) not in {None, before}

        wait_until(listens)
        found = EndpointFile.read(self.published)
        assert found is not None
        self.url, self.instance_id = found.url, found.instance_id

    def log(self) -> str:
        return self._log.read_text()

    def end(self, number: signal.Signals = signal.SIGTERM) -> int:
        self.process.send_signal(number)
        return self.process.wait(WAIT_SECONDS)
