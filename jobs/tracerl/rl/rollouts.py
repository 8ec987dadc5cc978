"""The rollout servers of a job: finding them, pushing weights to them, and getting over their restarts.

Every server shows a random instance id. One that changed has lost its weights and what it was generating: its
calls end with `ReplicaLostError`, it gets the current weights again, and whoever waited generates again. A
restart counts against `failurePolicy.maxRestarts`, which whoever starts the processes enforces too: on one
machine that one sees every restart first.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import shutil
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from tracerl.api.constants import Reason
from tracerl.api.errors import JobError
from tracerl.api.pods import weights_by_disk
from tracerl.api.resolved import EndpointFile, ResolvedJob
from tracerl.engines.client import (
    Broadcaster,
    Generation,
    InstanceChangedError,
    RolloutClient,
    RolloutError,
    RolloutInfo,
    RolloutUnreachableError,
    Sampling,
    push_from_disk,
)

_LOOK_SECONDS = 0.2
_LOOK_LEAST_OFTEN = 5.0
_HEALTH_SECONDS = 2.0
_PUSH_ATTEMPTS = 8

_log = logging.getLogger(__name__)

Report = Callable[[str, str], None]
"""Takes a reason and a sentence for the run log."""


class ReplicaLostError(Exception):
    """The server that worked on a request is gone or was restarted; generate again."""


@dataclass(frozen=True)
class Weights:
    """What was pushed last, for servers that come back: a directory or the tensors themselves."""

    version: int
    directory: Path | None
    tensors: tuple[tuple[str, Tensor], ...]


class _Replica:
    def __init__(self, name: str, client: RolloutClient) -> None:
        self.name = name
        self.client = client
        self.up = asyncio.Event()
        self.lost = asyncio.Event()
        """Set when the server that was there is gone; another event then stands for the next one."""


def _passes(error: RolloutError) -> bool:
    """Tell whether an error passes when the server is started again: it is gone, new, or shutting down."""
    gone = isinstance(error, RolloutUnreachableError | InstanceChangedError)
    return gone or error.status == 503 or error.reason == Reason.INTERRUPTED


class Rollouts:
    """All replicas. Made by `open_rollouts`; every method runs in the event loop that made it."""

    def __init__(
        self,
        resolved: ResolvedJob,
        clients: Sequence[RolloutClient],
        *,
        site_table: str,
        restarts: int,
        report: Report,
        spawn: Callable[[Coroutine[Any, Any, None]], object],
    ) -> None:
        self._endpoints = resolved.endpoints
        self._weights_directory = resolved.layout.weights
        on_one_machine = resolved.endpoints.directory is not None
        self._by_disk = weights_by_disk(resolved.job.spec, one_machine=on_one_machine)
        self._appear_seconds = resolved.appear_seconds
        """A rollout must answer this long after the trainer started, and after it was lost."""
        self._max_restarts = resolved.job.spec.failure_policy.max_restarts
        self._site_table = site_table
        self._report = report
        self._spawn = spawn
        self._replicas = [
            _Replica(endpoint.name, client)
            for endpoint, client in zip(resolved.endpoints.rollout, clients, strict=True)
        ]
        self._pushing = asyncio.Lock()
        self._weights: Weights | None = None
        self._broadcaster: Broadcaster | None = None
        self._group_numbers = itertools.count()
        self._restarts_before = restarts
        self.restarts = restarts
        """Restarts of rollouts over the whole job."""

    def __len__(self) -> int:
        return len(self._replicas)

    async def start(self) -> None:
        """Wait for all servers; JobError when one does not answer or would record other sites."""
        await asyncio.gather(*(self._connect(replica) for replica in self._replicas))
        for replica in self._replicas:
            replica.up.set()

    async def watch(self) -> None:
        """Notice servers that are gone although nobody is calling them; runs until cancelled."""
        while True:
            await asyncio.sleep(_HEALTH_SECONDS)
            for replica in self._replicas:
                if replica.up.is_set():
                    await self._check(replica)

    async def generate(
        self,
        number: int,
        prompts: Sequence[Sequence[int]],
        sampling: Sequence[Sampling],
        ids: Sequence[str],
        *,
        record: bool = True,
    ) -> list[Generation]:
        """Generate on replica `number` modulo their count; ReplicaLostError when it was lost meanwhile."""
        replica = self._replicas[number % len(self._replicas)]
        await replica.up.wait()
        lost = asyncio.ensure_future(replica.lost.wait())
        call = asyncio.ensure_future(replica.client.generate_batch(prompts, sampling, ids=ids, record=record))
        try:
            await asyncio.wait((call, lost), return_when=asyncio.FIRST_COMPLETED)
            if not call.done():
                # A node that is gone closes no connection: the answer would be waited for for an hour.
                raise ReplicaLostError(replica.name)
            return call.result()
        except RolloutError as error:
            if not _passes(error):
                raise
            await self._check(replica)
            raise ReplicaLostError(replica.name) from None
        finally:
            lost.cancel()
            call.cancel()

    async def seconds(self, *, of_gpu: bool) -> float:
        """CPU time of all replicas' processes so far, or what they took of their GPUs. RolloutError."""
        infos = await asyncio.gather(*(replica.client.info() for replica in self._replicas))
        return sum((info.gpu_seconds if of_gpu else info.cpu_seconds) or 0.0 for info in infos)

    async def push(self, version: int, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Give all replicas the weights of a version; what runs is retracted and goes on with them.

        Servers that are lost meanwhile get them when they are back, before this returns.
        """
        previous = self._weights
        self._weights = await asyncio.to_thread(self._snapshot, version, weights)
        for _ in range(_PUSH_ATTEMPTS):
            for replica in self._replicas:
                await replica.up.wait()
            async with self._pushing:
                try:
                    await self._push_to([replica.client for replica in self._replicas])
                    break
                except RolloutError as error:
                    if not _passes(error):
                        raise
                    self._broadcaster = None
            for replica in self._replicas:
                await self._check(replica)
        else:
            raise JobError(
                Reason.WEIGHT_SYNC_FAILED,
                f"weights of version {version} could not be pushed in {_PUSH_ATTEMPTS} attempts, since "
                "rollouts were lost each time; see the rollouts' logs",
            )
        if previous is not None and previous.directory is not None and previous.version != version:
            await asyncio.to_thread(shutil.rmtree, previous.directory, ignore_errors=True)

    def _snapshot(self, version: int, weights: Iterable[tuple[str, Tensor]]) -> Weights:
        """Keep a copy of the weights: the trainer goes on changing its own."""
        if not self._by_disk:
            copies = tuple((name, tensor.detach().clone()) for name, tensor in weights)
            return Weights(version, None, copies)
        target = self._weights_directory / f"v-{version:06d}"
        partial = target.with_name(f".{target.name}.partial")
        try:
            for path in (partial, target):
                shutil.rmtree(path, ignore_errors=True)
            partial.mkdir(parents=True)
            tensors = {name: tensor.detach().contiguous() for name, tensor in weights}
            save_file(tensors, partial / "model.safetensors")
            partial.rename(target)
        except (OSError, SafetensorError) as error:
            raise JobError(
                Reason.WEIGHT_SYNC_FAILED,
                f"weights cannot be written to {target} ({error}); free some space there",
            ) from error
        return Weights(version, target, ())

    async def _push_to(self, clients: Sequence[RolloutClient]) -> None:
        weights = self._weights
        assert weights is not None
        await asyncio.gather(*(client.pause_generation("retract") for client in clients))
        if weights.directory is not None:
            await push_from_disk(clients, str(weights.directory), weights.version)
        else:
            if self._broadcaster is None or len(clients) != len(self._replicas):
                address, port = self._address()
                broadcaster = await Broadcaster.open(
                    clients, address=address, port=port, name=f"weights-{next(self._group_numbers)}"
                )
            else:
                broadcaster = self._broadcaster
            await broadcaster.push(weights.tensors, weights.version)
            if len(clients) == len(self._replicas):
                self._broadcaster = broadcaster
        await asyncio.gather(*(client.continue_generation() for client in clients))

    def _address(self) -> tuple[str, int]:
        """Name and port under which rollouts reach this process; port 0 means a free one."""
        host, _, port = (self._endpoints.rendezvous or "127.0.0.1:0").rpartition(":")
        return host, int(port)

    # -- restarts ------------------------------------------------------------------------------------

    async def _check(self, replica: _Replica) -> None:
        """Start over with a replica that is gone, restarted, or lost its weights."""
        if not replica.up.is_set():
            return
        try:
            info = await replica.client.info()
            healthy = info.instance_id == replica.client.instance_id and await replica.client.health()
        except RolloutError as error:
            if not _passes(error):
                raise
            healthy = False
        if healthy:
            return
        if replica.up.is_set():
            replica.up.clear()
            replica.lost.set()
            replica.lost = asyncio.Event()
            self._broadcaster = None
            self._spawn(self._recover(replica))

    async def _recover(self, replica: _Replica) -> None:
        while True:
            before = replica.client.instance_id
            await self._connect(replica)
            if replica.client.instance_id != before:
                self.restarts += 1
                self._report(
                    Reason.ROLLOUT_RESTARTED,
                    f"{replica.name} was restarted; what it was generating is generated again",
                )
                count = self.restarts - self._restarts_before
                if count > self._max_restarts:
                    raise JobError(
                        Reason.RESTARTS_EXHAUSTED,
                        f"rollouts were restarted {count} times, more than failurePolicy.maxRestarts "
                        f"{self._max_restarts}; see the log of {replica.name}, then resume the run",
                    )
            try:
                if self._weights is not None:
                    async with self._pushing:
                        await self._push_to([replica.client])
                replica.up.set()
                return
            except RolloutError as error:
                if not _passes(error):
                    raise
                await asyncio.sleep(_LOOK_SECONDS)

    async def _connect(self, replica: _Replica) -> None:
        """Wait until the replica's server answers, wherever it is now, and adopt it."""
        started, pause = time.monotonic(), _LOOK_SECONDS
        while True:
            url = self._url(replica.name)
            if url is not None:
                replica.client.url = url
                try:
                    self._verify(replica, await replica.client.connect())
                    return
                except RolloutError as error:
                    if not _passes(error):
                        raise
                    if pause == _LOOK_SECONDS:
                        _log.info("waiting for %s: %s", replica.name, error)
            if time.monotonic() - started > self._appear_seconds:
                raise JobError(
                    Reason.ROLLOUT_FAILED,
                    f"{replica.name} {f'at {url} ' if url else ''}did not answer within "
                    f"{self._appear_seconds:.0f} s; see its log",
                )
            await asyncio.sleep(pause)
            if url is not None:
                pause = min(2 * pause, _LOOK_LEAST_OFTEN)

    def _url(self, name: str) -> str | None:
        endpoint = next(found for found in self._endpoints.rollout if found.name == name)
        if endpoint.url is not None:
            return endpoint.url.rstrip("/")
        assert self._endpoints.directory is not None
        published = EndpointFile.read(self._endpoints.directory / f"{name}.json")
        return None if published is None else published.url

    def _verify(self, replica: _Replica, info: RolloutInfo) -> None:
        if info.site_table is not None and info.site_table != self._site_table:
            raise JobError(
                Reason.SITE_TABLE_MISMATCH,
                f"{replica.name} records sites of table {info.site_table[:12]}, the trainer expects "
                f"{self._site_table[:12]}; start both with the same job and the same version of tracerl",
            )


@contextlib.asynccontextmanager
async def open_rollouts(
    resolved: ResolvedJob,
    *,
    run_id: str,
    site_table: str,
    restarts: int,
    report: Report,
    spawn: Callable[[Coroutine[Any, Any, None]], object],
) -> AsyncIterator[Rollouts]:
    """Open clients of all rollouts of a job; `spawn` runs a coroutine whose failure ends the loop."""
    token = resolved.token()
    async with contextlib.AsyncExitStack() as stack:
        clients = [
            await stack.enter_async_context(
                RolloutClient(endpoint.url or "", token, run_id=run_id, site_table=site_table)
            )
            for endpoint in resolved.endpoints.rollout
        ]
        yield Rollouts(
            resolved, clients, site_table=site_table, restarts=restarts, report=report, spawn=spawn
        )
