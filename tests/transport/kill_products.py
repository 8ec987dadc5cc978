"""A record store, a sink and a source of the product, as the kill tests put them into processes."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import traceback
from pathlib import Path
from typing import Any

import xxhash
from aiohttp import web

from tracerl.api.resolved import EndpointFile
from tracerl.transport.base import TransportError
from tracerl.transport.objects.filesystem import open_filesystem
from tracerl.transport.objects.sink import ObjectSink
from tracerl.transport.remote import RemoteSource
from tracerl.transport.ring.client import StoreSink, StoreSource
from tracerl.transport.ring.server import RingServer, Tier
from tracerl.transport.store.http import StoreServer
from tracerl.transport.store.spill import ObjectTier, SpillDirectory


def _identity(store: dict[str, Any]) -> dict[str, Any]:
    """What a client of a scene's store shows it, and how long it waits."""
    fields = {key: store[key] for key in ("job_uid", "run_id", "token", "timeout")}
    return {"store": store["name"], **fields}


def open_sink(store: dict[str, Any], name: str) -> StoreSink:
    """Connect a producer to a scene's store."""
    return StoreSink(Path(store["parent"]) / store["name"], name=name, **_identity(store))


def open_objects(place: dict[str, Any]) -> ObjectSink:
    """Begin to write objects of frames."""
    return ObjectSink(
        open_filesystem(place["uri"]),
        store=place["name"],
        job_uid=place["job_uid"],
        run_id=place["run_id"],
        batch_bytes=64 << 10,
        batch_seconds=0.005,
    )


def open_remote(store: dict[str, Any]) -> RemoteSource:
    """Connect a reader on another node, as it were, to a scene's store."""
    published = Path(store["published"])

    def locate() -> str | None:
        found = EndpointFile.read(published)
        return None if found is None else found.url

    return RemoteSource(
        store["name"], locate, token=store["token"], run_id=store["run_id"], timeout=store["timeout"]
    )


def open_source(store: dict[str, Any], name: str) -> StoreSource:
    """Connect a reader to a scene's store."""
    return StoreSource(Path(store["parent"]) / store["name"], name=name, **_identity(store))


def run_store(control: socket.socket, **store: Any) -> int:
    """Serve until SIGTERM; tell the instance when clients can connect, then answer what is asked."""
    return asyncio.run(_serve(control, store))


async def _serve(control: socket.socket, store: dict[str, Any]) -> int:
    tiers: list[Tier] = []
    if store["spill"] is not None:
        tiers.append(
            SpillDirectory(
                Path(store["spill"]),
                job_uid=store["job_uid"],
                store=store["name"],
                limit_bytes=store["spill_bytes"],
            )
        )
    objects = None
    if store["objects"] is not None:
        objects = ObjectTier(open_filesystem(store["objects"]), job_uid=store["job_uid"], store=store["name"])
        tiers.append(objects)
    server = RingServer(
        Path(store["parent"]) / store["name"],
        store=store["name"],
        job_uid=store["job_uid"],
        token=store["token"],
        ring_bytes=store["ring_bytes"],
        tiers=tiers,
    )
    if objects is not None:
        await objects.open()
    # Before anybody can connect: whoever kills this process must know whose handles went with it.
    control.send(server.instance.encode())
    await server.start()
    runner = await _listen(server, store)
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    loop.add_signal_handler(signal.SIGTERM, stop.set)
    questions: set[asyncio.Task[None]] = set()

    def answered(question: asyncio.Task[None]) -> None:
        questions.discard(question)
        if question.exception() is not None:
            traceback.print_exception(question.exception())
            os._exit(70)

    def asked() -> None:
        data = control.recv(1 << 20)
        if not data:
            os._exit(0)
        question = loop.create_task(_answer(control, server, json.loads(data)))
        questions.add(question)
        question.add_done_callback(answered)

    loop.add_reader(control, asked)
    control.send(b"ready")
    await stop.wait()
    loop.remove_reader(control)
    Path(store["published"]).unlink(missing_ok=True)
    await runner.cleanup()
    await server.close()
    return 0


async def _listen(server: RingServer, store: dict[str, Any]) -> web.AppRunner:
    """Serve HTTP on a free port and publish it, as a store process does."""
    application = StoreServer(server, token=store["token"]).application()
    runner = web.AppRunner(application, handler_cancellation=True, access_log=None, shutdown_timeout=1.0)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    EndpointFile(url=url, pid=os.getpid(), instance_id=server.instance).publish(Path(store["published"]))
    return runner


async def _answer(control: socket.socket, server: RingServer, question: dict[str, Any]) -> None:
    if question["op"] == "audit":
        control.send(json.dumps(await _audit(server)).encode())


async def _audit(server: RingServer) -> dict[str, Any]:
    """Count what is held, and compare the bytes of every committed frame with the hash in its commit."""
    usage = server.usage()  # receives all commits that were sent
    books = server._segments
    damaged = []
    for seq, frame in list(books._frames.items()):
        location = frame.location
        if location.tier == "ring":
            fits = xxhash.xxh3_64_intdigest(server._view(*location[1:])) == frame.xxh3
        else:
            try:
                data = await server._read(location, 0, location.length)
            except TransportError:  # released meanwhile, else damaged
                data = b""
            fits = xxhash.xxh3_64_intdigest(data) == frame.xxh3
        if not fits and books._frames.get(seq) is frame and frame.location == location:
            damaged.append(f"{seq} {location} {frame.trajectory}")
    counts = books.counts()
    return {
        "damaged": damaged,
        "frames": usage.frames,
        "held_bytes": usage.held_bytes,
        "pins": counts.pins,
        "tiers": counts.frames,
        "connections": len(server._connections),
        "counters": usage.counters,
        "resident_bytes": resident_bytes(),
        "descriptors": len(list(Path("/proc/self/fd").iterdir())),
    }


def resident_bytes() -> int:
    """Memory of this process that is its own: without what is mapped from files and shared memory."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) << 10
    raise AssertionError("no RssAnon in /proc/self/status")
