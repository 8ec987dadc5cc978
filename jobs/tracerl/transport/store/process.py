"""The record store as a process: ring, lower tiers and HTTP, from the resolved job to SIGTERM."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from contextlib import AsyncExitStack
from pathlib import Path
from urllib.parse import urlsplit

from tracerl.api.constants import Reason
from tracerl.api.errors import JobError
from tracerl.api.job import Spill, quantity_bytes
from tracerl.api.resolved import EndpointFile, ResolvedJob
from tracerl.transport.listen import HttpServer, raise_open_files
from tracerl.transport.places import open_objects
from tracerl.transport.ring.server import RingServer
from tracerl.transport.store.http import StoreServer
from tracerl.transport.store.spill import ObjectTier, SpillDirectory

_log = logging.getLogger(__name__)


def serve(resolved: ResolvedJob, name: str) -> None:
    """Run the record store `name` of a resolved job until SIGTERM or SIGINT; the whole of a store process.

    Listens on the port of its endpoint's `url`, or on a free one of 127.0.0.1 that it publishes as
    ``<endpoints.directory>/<name>.json`` until it stops. What a killed store of this name left is removed at
    the start, and everything that this one made at the end. Raises InputError when the token cannot be read,
    TransportError when there is no room for the ring or a place cannot be used, and JobError when the port is
    taken.
    """
    raise_open_files()
    asyncio.run(_serve(resolved, name))


async def _serve(resolved: ResolvedJob, name: str) -> None:
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    transport, token = resolved.job.spec.transport, resolved.token()
    async with AsyncExitStack() as stack:
        directory, objects = _spill_directory(resolved, name), None
        try:
            if transport.spill is Spill.OBJECT_STORE:
                objects = ObjectTier(open_objects(resolved), job_uid=resolved.job_uid, store=name)
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
        await ring.start()
        await _listen(stack, ring, directory, resolved, name)
        if objects is not None:
            # After all else, for whoever waits for this store need not wait for the object store. The ring's
            # directory is locked by now: no other store of this name has objects there.
            await objects.open()
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
    stack: AsyncExitStack, ring: RingServer, spill: SpillDirectory | None, resolved: ResolvedJob, name: str
) -> None:
    """Serve HTTP and publish where, until the stack is left."""
    server = StoreServer(ring, token=resolved.token(), spill=spill)
    http = HttpServer(server.application(), server.strangers)
    stack.push_async_callback(http.close)
    [endpoint] = [endpoint for endpoint in resolved.endpoints.store if endpoint.name == name]
    host, port = ("127.0.0.1", 0) if endpoint.url is None else (None, urlsplit(endpoint.url).port or 80)
    try:
        port = await http.start(host, port)
    except OSError as error:
        raise JobError(
            Reason.CONFIGURATION, f"{name} cannot listen on port {port} ({error.strerror}); free it"
        ) from None
    if endpoint.url is None and resolved.endpoints.directory is not None:
        published = resolved.endpoints.directory / f"{name}.json"
        url = f"http://127.0.0.1:{port}"
        EndpointFile(url=url, pid=os.getpid(), instance_id=ring.instance).publish(published)
        stack.callback(published.unlink, missing_ok=True)
