"""Put the parts together and run them until the process is told to end."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import signal
import socket
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from aiohttp import web

from tracerl_operator.shell import logs
from tracerl_operator.shell.api import Api, ApiError, NoClusterError, load_configuration
from tracerl_operator.shell.controller import Controller
from tracerl_operator.shell.endpoint import Check, listen
from tracerl_operator.shell.events import Events
from tracerl_operator.shell.informer import Informer
from tracerl_operator.shell.kinds import JOB, JobKey
from tracerl_operator.shell.lease import LEASE, Lease
from tracerl_operator.shell.metrics import Metrics
from tracerl_operator.shell.options import Options, parse
from tracerl_operator.shell.store import Store
from tracerl_operator.shell.watches import Watches
from tracerl_operator.shell.workers import Workers
from tracerl_operator.shell.workqueue import WorkQueue

RECURSION = 50_000
"""API servers take JSON of 10,000 levels, and one such object must not keep the others from being read.

Parsing takes one level of recursion for each of them, copying two; 8 MiB of stack are enough for both.
"""
_WORKERS = 8
_START_SECONDS = 20.0
_STOP_SECONDS = 8.0
_TASK_SECONDS, _RELEASE_SECONDS, _WATCH_SECONDS = 2.0, 1.0, 3.0
_ACCOUNT_NAMESPACE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
_LOG = logging.getLogger("tracerl_operator")


class CannotStartError(Exception):
    """Why the operator cannot work here, in a sentence."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the operator; the exit code is 1 when it cannot work here, 2 when the command line is wrong."""
    options = parse(arguments)
    logs.configure(options.log_level, options.log_format)
    sys.setrecursionlimit(RECURSION)
    try:
        return asyncio.run(_run(options))
    except (CannotStartError, NoClusterError) as error:
        sys.stderr.write(f"tracerl_operator: {error}\n")
        return 1


async def _run(options: Options) -> int:
    ended = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, ended.set)
    identity = f"{os.environ.get('POD_NAME') or socket.gethostname()}-{secrets.token_hex(4)}"
    metrics = Metrics()
    api = Api(await load_configuration(), metrics.count)
    store, queue, tasks = Store(), WorkQueue[JobKey](), list[asyncio.Task[None]]()
    watches = Watches(options.namespaces, identity, metrics.count)
    informer = Informer(api, store, queue, watches, options=options, saw=metrics.saw)
    events = Events(api, identity)
    controller = Controller(api, store, events, options.installation, informer.optional_kinds)
    workers = Workers(queue, controller, api, store, metrics)
    metrics.show_jobs(lambda: map(store.job, store.job_keys()))
    metrics.show("tracerl_operator_queue_depth", lambda: {"": float(len(queue))})
    metrics.show("tracerl_operator_leads", lambda: {"": float(informer.leads)})

    def health() -> str | None:
        return "a task ended" if any(task.done() for task in tasks) else informer.illness()

    async with contextlib.AsyncExitStack() as stack:
        stack.push_async_callback(api.close)
        endpoint = await _listen(options, health, lambda: informer.unready() or health(), metrics)
        stack.push_async_callback(endpoint.cleanup)
        checked = asyncio.create_task(_check(api, options))
        if not await _done_before(ended, checked):
            return 0
        stack.push_async_callback(asyncio.to_thread, watches.stop, _WATCH_SECONDS)
        work = [informer.discover(), informer.sync(), *(workers.work() for _ in range(_WORKERS))]
        if options.peering is None:
            informer.lead(True)
        else:
            lease = Lease(api, _own_namespace(options), options.peering, identity, informer.lead)
            stack.push_async_callback(_release, lease)
            work.append(lease.keep())
        tasks += [asyncio.create_task(coroutine) for coroutine in work]
        _LOG.info("started as %s", identity)
        code = await _until(ended, tasks)
        _LOG.info("ends")
        _end_after(_STOP_SECONDS, code)
        queue.run(False)
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks, timeout=_TASK_SECONDS)
    return code


def _end_after(seconds: float, code: int) -> None:
    """End the process when it has not ended by itself in time: a kubelet would do it less kindly."""
    timer = threading.Timer(seconds, os._exit, [code])
    timer.daemon = True
    timer.start()


async def _done_before(ended: asyncio.Event, task: asyncio.Task[None]) -> bool:
    """Wait for a task, or for the signal; say which it was, and raise what the task raised."""
    signalled = asyncio.create_task(ended.wait())
    await asyncio.wait([signalled, task], return_when=asyncio.FIRST_COMPLETED)
    signalled.cancel()
    if task.done():
        task.result()
        return True
    task.cancel()
    return False


async def _until(ended: asyncio.Event, tasks: Sequence[asyncio.Task[None]]) -> int:
    """Wait for the signal, or for the end of a task that has none; give the exit code."""
    signalled = asyncio.create_task(ended.wait())
    done, _ = await asyncio.wait([signalled, *tasks], return_when=asyncio.FIRST_COMPLETED)
    if signalled in done:
        return 0
    signalled.cancel()
    for task in done & set(tasks):
        _LOG.error("a task ended that must not", exc_info=task.exception(), extra={"reason": "Unexpected"})
    return 1


async def _check(api: Api, options: Options) -> None:
    """Say at once what would never go by itself; wait a little for an API server that starts."""
    until = time.monotonic() + _START_SECONDS
    while True:
        try:
            if not await api.served(JOB):
                raise CannotStartError(
                    f"the cluster has no {JOB.name} ({JOB.api_version}); apply crds/tracerljobs.yaml"
                )
            for namespace in options.namespaces or (None,):
                async for _ in api.list_all(JOB, namespace):
                    break
            if options.peering is not None:
                await api.get(LEASE, _own_namespace(options), options.peering)
            return
        except ApiError as error:
            if time.monotonic() > until or error.code in (401, 403):
                raise CannotStartError(str(error)) from error
            await asyncio.sleep(1)


async def _listen(options: Options, health: Check, readiness: Check, metrics: Metrics) -> web.AppRunner:
    try:
        return await listen(
            options.host, options.port, health=health, readiness=readiness, metrics=metrics.text
        )
    except OSError as error:
        where = f"{options.host}:{options.port}"
        raise CannotStartError(f"cannot listen on {where}: {error.strerror}") from error


async def _release(lease: Lease) -> None:
    # A Lease that is not released runs out.
    with contextlib.suppress(ApiError, TimeoutError):
        await asyncio.wait_for(lease.release(), _RELEASE_SECONDS)


def _own_namespace(options: Options) -> str:
    """Give the namespace of the Lease: the pod's own, or the first that is looked at."""
    if named := os.environ.get("POD_NAMESPACE"):
        return named
    if _ACCOUNT_NAMESPACE.exists():
        return _ACCOUNT_NAMESPACE.read_text(encoding="utf-8").strip()
    return options.namespaces[0] if options.namespaces else "default"
