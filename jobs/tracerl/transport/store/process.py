"""The record store as a process: ring, lower tiers and HTTP, from the resolved job to SIGTERM."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

from aiohttp import web
from prometheus_client import CollectorRegistry

from tracerl.api.constants import Reason
from tracerl.api.errors import JobError
from tracerl.api.job import Spill, quantity_bytes
from tracerl.api.resolved import EndpointFile, ResolvedJob
from tracerl.transport.places import open_objects
from tracerl.transport.ring.server import RingServer
from tracerl.transport.store.http import StoreServer
from tracerl.transport.store.metrics import StoreMetrics
from tracerl.transport.store.spill import ObjectTier, SpillDirectory

_log = logging.getLogger(__name__)

_SHUTDOWN_SECONDS: Final = 1.0


def serve(resolved: ResolvedJob, name: str) -> None:
    """Run the record store `name` of a resolved job until SIGTERM or SIGINT; the whole of a store process.

    Listens on the port of its endpoint's `url`, or on a free one of 127.0.0.1 that it publishes as
    ``<endpoints.directory>/<name>.json`` until it stops. What a killed store of this name left is removed at
    the start, and everything that this one made at the end. Raises InputError when the token cannot be read,
    TransportError when there is no room for the ring or a place cannot be used, and JobError when the port is
    taken.
    """
    asyncio.run(_serve(resolved, name))


async def _serve(resolved: ResolvedJob, name: str) -> None:
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    transport, token = resolved.job.spec.transport, resolved.token()
    async with AsyncExitStack() as stack:
        directory = _spill_directory(resolved, name)
        objects = None
        if transport.spill is Spill.OBJECT_STORE:
            objects = ObjectTier(open_objects(resolved), job_uid=resolved.job_uid, store=name)
        try:
            ring = RingServer(
                resolved.store_place(name).directory,
                store=name,
                job_uid=resolved.job_uid,
                token=token,
                ring_bytes=quantity_bytes(transport.ring.size),
                tiers=[tier for tier in (directory, objects) if tier is not None],
            )
        except BaseException:
            if directory is not None:
                directory.close()
            raise
        stack.push_async_callback(ring.close)
        if objects is not None:
            # The ring's directory is locked by now: no other store of this name has objects there.
            await objects.open()
        await ring.start()
        await _listen(stack, ring, resolved, name, token)
        _log.info("%s serves a ring of %d MiB", name, ring.usage().capacity_bytes >> 20)
        await stop.wait()


def _spill_directory(resolved: ResolvedJob, name: str) -> SpillDirectory | None:
    transport = resolved.job.spec.transport
    if transport.spill_path is None:
        return None
    limit = None if transport.spill_limit is None else quantity_bytes(transport.spill_limit)
    parent = Path(transport.spill_path)
    return SpillDirectory(parent, job_uid=resolved.job_uid, store=name, limit_bytes=limit)


async def _listen(
    stack: AsyncExitStack, ring: RingServer, resolved: ResolvedJob, name: str, token: str
) -> None:
    """Serve HTTP and publish where, until the stack is left."""
    registry = CollectorRegistry()
    server = StoreServer(ring, token=token, registry=registry)
    registry.register(StoreMetrics(ring, server))
    runner = web.AppRunner(
        server.application(), handler_cancellation=True, access_log=None, shutdown_timeout=_SHUTDOWN_SECONDS
    )
    stack.push_async_callback(runner.cleanup)
    await runner.setup()
    [endpoint] = [endpoint for endpoint in resolved.endpoints.store if endpoint.name == name]
    host, port = ("127.0.0.1", 0) if endpoint.url is None else (None, urlsplit(endpoint.url).port or 80)
    try:
        await web.TCPSite(runner, host, port).start()
    except OSError as error:
        raise JobError(
            Reason.CONFIGURATION, f"{name} cannot listen on port {port} ({error.strerror}); free it"
        ) from None
    if endpoint.url is None and resolved.endpoints.directory is not None:
        published = resolved.endpoints.directory / f"{name}.json"
        url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        EndpointFile(url=url, pid=os.getpid(), instance_id=ring.instance).publish(published)
        stack.callback(published.unlink, missing_ok=True)
