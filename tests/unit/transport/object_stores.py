"""Sinks and sources of objects for tests, and a filesystem whose writes wait or fail as a test says."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import fsspec
from fsspec.implementations.memory import MemoryFileSystem

from tracerl.api.frames import FrameKey, Handle
from tracerl.api.job import Retention
from tracerl.transport.base import FrameSink, FrameSource, TransportError, Wanted
from tracerl.transport.objects.filesystem import open_filesystem
from tracerl.transport.objects.sink import ObjectSink
from tracerl.transport.objects.source import ObjectSource

JOB, RUN = "0b7c-uid", "run/1"


def key(trajectory: str = "t-0", *, job_uid: str = JOB, run_id: str = RUN) -> FrameKey:
    return FrameKey(job_uid, run_id, trajectory, 0, 1, 0, 9, 3)


class Place:
    """One place of records; opens sinks and sources on it."""

    def __init__(self, uri: str, stack: ExitStack) -> None:
        self.uri, self._stack = uri, stack

    def sink(self, store: str = "rollout-0", **options: Any) -> ObjectSink:
        filesystem = open_filesystem(self.uri, deadline_seconds=options.pop("deadline", 20))
        values = {"job_uid": JOB, "run_id": RUN, "batch_bytes": 4096, "batch_seconds": 0, **options}
        sink = ObjectSink(filesystem, store=store, **values)
        self._stack.callback(sink.close)
        as_contract: FrameSink = sink
        assert as_contract
        return sink

    def source(
        self, *, job_uid: str = JOB, run_id: str = RUN, retention: Retention = Retention.TRAINED
    ) -> ObjectSource:
        filesystem = open_filesystem(self.uri, deadline_seconds=20)
        source = ObjectSource(filesystem, job_uid=job_uid, run_id=run_id, retention=retention)
        self._stack.callback(source.close)
        as_contract: FrameSource = source
        assert as_contract
        return source

    def files(self) -> list[str]:
        filesystem, root = fsspec.core.url_to_fs(self.uri, use_listings_cache=False)
        if not filesystem.exists(root):
            return []
        return sorted(path.removeprefix(root) for path in filesystem.find(root))


def settle(sink: ObjectSink) -> None:
    done = threading.Event()
    sink.settle(done.set)
    assert done.wait(30)


def read(source: ObjectSource, handle: Handle) -> bytes:
    with source.borrow([Wanted(handle)]) as borrowed:
        (answer,) = borrowed.pieces
        if isinstance(answer, TransportError):
            raise answer
        return bytes(answer[0])


class GateFileSystem(MemoryFileSystem):
    """fsspec's memory filesystem behind a gate: writes wait while it is closed, and fail with `errors`."""

    protocol = "gate"
    store: dict[str, Any] = {}  # noqa: RUF012  as fsspec's own
    pseudo_dirs = [""]  # noqa: RUF012
    gate = threading.Event()
    errors: Iterator[Exception] = iter(())

    def mv(self, path1: str, path2: str, **options: Any) -> None:
        self.store[path2] = self.store.pop(path1)

    def _open(self, path: str, mode: str = "rb", **options: Any) -> Any:
        if mode == "wb":
            assert self.gate.wait(30)
            error = next(type(self).errors, None)
            if error is not None:
                raise error
        return super()._open(path, mode, **options)


def gate_uri() -> str:
    fsspec.register_implementation("gate", GateFileSystem, clobber=True)
    GateFileSystem.gate.set()
    GateFileSystem.errors = iter(())
    return f"gate://{secrets.token_hex(8)}"
