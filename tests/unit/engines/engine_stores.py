"""Record stores for engine tests, both ends in this process: a ring with its server, and objects in files."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine, Iterable
from pathlib import Path
from typing import Any

from tracerl.api.frames import Handle
from tracerl.api.job import Retention
from tracerl.transport.base import FrameSink, FrameSource, TransportError, Wanted
from tracerl.transport.objects.filesystem import open_filesystem
from tracerl.transport.objects.sink import ObjectSink
from tracerl.transport.objects.source import ObjectSource
from tracerl.transport.ring.client import StoreSink, StoreSource
from tracerl.transport.ring.server import RingServer

JOB, RUN, TOKEN = "uid", "run", "secret"
WAIT_SECONDS = 60


class RecordStore:
    """A sink and a source of the run RUN of the job JOB; `close` it when nothing is put any more."""

    sink: FrameSink
    source: FrameSource

    def get(self, handle: Handle) -> memoryview:
        """A copy of a frame; raises the TransportError that reading it met."""
        with self.source.borrow([Wanted(handle)]) as borrowed:
            (piece,) = borrowed.pieces
            if isinstance(piece, TransportError):
                raise piece
            return memoryview(bytes(piece[0]))

    def release(self, handles: Iterable[Handle]) -> None:
        """Drop a reference each, as a trainer does."""
        self.source.release(handles)

    def frames(self) -> int:
        """Frames that have references, after everything that either end has asked for."""
        raise NotImplementedError

    def close(self) -> None:
        self.sink.close()
        self.source.close()


class RingStore(RecordStore):
    """A ring whose server runs on a thread of its own."""

    def __init__(self, directory: Path, *, ring_bytes: int = 2**21) -> None:
        self._directory, self._ring_bytes = directory, ring_bytes
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._start_server()
        self.sink = StoreSink(
            directory,
            store="store-0",
            job_uid=JOB,
            run_id=RUN,
            token=TOKEN,
            name="rollout-0",
            timeout=WAIT_SECONDS,
        )
        self.source = StoreSource(
            directory,
            store="store-0",
            job_uid=JOB,
            run_id=RUN,
            token=TOKEN,
            name="trainer-0",
            timeout=WAIT_SECONDS,
        )

    def frames(self) -> int:
        # Each answer comes after what was sent by the same end before.
        self.source.usage()
        return self.sink.usage().frames

    def _start_server(self) -> None:
        self.server = RingServer(
            self._directory, store="store-0", job_uid=JOB, token=TOKEN, ring_bytes=self._ring_bytes
        )
        self._finish(self.server.start())

    def _finish(self, work: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop).result(WAIT_SECONDS)

    def start_run(self, run_id: str) -> None:
        """Make another run the store's: it keeps no frames but those."""

        async def start() -> None:
            self.server.start_run(run_id)

        self._finish(start())

    def restart_server(self) -> None:
        """Start the store again: what it held is gone."""
        self._finish(self.server.close())
        self._start_server()

    def stop_server(self) -> None:
        """End the store: what it held is gone."""
        self._finish(self.server.close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    def close(self) -> None:
        super().close()
        if self._thread.is_alive():
            self.stop_server()
        self._loop.close()


class ObjectStore(RecordStore):
    """Objects in files below a directory."""

    def __init__(self, directory: Path) -> None:
        uri = directory.as_uri()
        self.sink = ObjectSink(
            open_filesystem(uri, deadline_seconds=0.1),
            store="rollout-0",
            job_uid=JOB,
            run_id=RUN,
            batch_bytes=2**18,
            batch_seconds=0.0,
        )
        self.source = ObjectSource(open_filesystem(uri), job_uid=JOB, run_id=RUN, retention=Retention.TRAINED)

    def frames(self) -> int:
        settled = threading.Event()
        self.sink.settle(settled.set)
        assert settled.wait(WAIT_SECONDS)
        return self.source.usage().frames
