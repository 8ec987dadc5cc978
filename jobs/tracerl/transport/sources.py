"""Which store a frame is read from and put into: the one place that knows a job's stores and nodes."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Literal, Protocol

from tracerl.api.frames import Handle, HandleError, parse_handle
from tracerl.api.job import quantity_bytes
from tracerl.api.resolved import Endpoint, EndpointFile, ResolvedJob
from tracerl.transport.base import Borrowed, FrameSink, FrameSource, TransportError, Usage, Wanted
from tracerl.transport.objects.sink import ObjectSink
from tracerl.transport.objects.source import ObjectSource
from tracerl.transport.places import open_objects
from tracerl.transport.remote import RemoteSource
from tracerl.transport.retry import Deadline
from tracerl.transport.ring.client import StoreSink, StoreSource

_log = logging.getLogger(__name__)

_PAUSE_SECONDS = 2.0
"""Between two tries to reach stores whose pods may be being started."""

ReadPath = Literal["ring", "http", "object"]

_COUNTERS = {
    "read_bytes": "read_bytes_object",
    "borrowed_frames": "read_frames",
    "retries": "object_retries",
}
"""Names here of what an `ObjectSource` counts."""


class RunSource(FrameSource, Protocol):
    """A `FrameSource` of one store, or of all objects of a job, that can begin a run."""

    def start_run(self) -> None:
        """Make this source's run the store's run: frames of other runs are dropped. TransportError."""
        ...


@dataclass(frozen=True, eq=False)
class Route:
    """How the frames of a store are read; several stores may share a source."""

    path: ReadPath
    source: RunSource


class RecordSources:
    """A `FrameSource` over the stores of a job: each handle goes to the store that it names."""

    def __init__(self, routes: Mapping[str, Route]) -> None:
        """Take the sources over, by the stores' names: `close` closes them."""
        self._routes = dict(routes)
        self._sources = [*{id(route.source): route.source for route in routes.values()}.values()]
        self._lock = threading.Lock()
        self._counters: Counter[str] = Counter()

    def borrow(self, wanted: Sequence[Wanted]) -> Borrowed:
        """Read frames from all their stores; those on other nodes are read at the same time."""
        pieces: list[list[memoryview] | TransportError] = [[] for _ in wanted]
        groups = self._groups([handle for handle, _ in wanted])
        borrowed: list[Borrowed] = []
        try:
            # Other threads read what is on other nodes while this one does the rest.
            started = [
                (route, indices, _start(route.source, [wanted[index] for index in indices]))
                for route, indices in groups.items()
                if route is not None
            ]
            for route, indices, finish in started:
                answer = self._timed(route.path, finish, len(indices))
                borrowed.append(answer)
                for index, piece in zip(indices, answer.pieces, strict=True):
                    pieces[index] = piece
        except BaseException:
            _each(answer.release for answer in borrowed)
            raise
        for index in groups.get(None, ()):
            handle = wanted[index].handle
            pieces[index] = TransportError("missing", f"{handle[:200]!r} is no handle of a store of this job")
        return Borrowed(pieces, lambda: _each(answer.release for answer in borrowed))

    def present(self, handles: Sequence[Handle]) -> list[bool]:
        """Tell which frames could be read now; those of a store that does not answer could not."""
        flags = [False] * len(handles)
        for route, indices in self._groups(handles).items():
            if route is None:
                continue
            try:
                found = route.source.present([handles[index] for index in indices])
            except TransportError as error:
                _log.warning("%d frames count as lost: %s", len(indices), error)
                continue
            for index, flag in zip(indices, found, strict=True):
                flags[index] = flag
        return flags

    def release(self, handles: Iterable[Handle]) -> None:
        """Drop a reference each, in every store that answers. TransportError when one does not."""
        asked = list(handles)
        _each(
            partial(route.source.release, [asked[index] for index in indices])
            for route, indices in self._groups(asked).items()
            if route is not None
        )

    def forget(self, trajectories: Iterable[str]) -> None:
        """Drop these trajectories' frames in every store that answers. TransportError when one does not."""
        asked = list(trajectories)
        _each(partial(source.forget, asked) for source in self._sources)

    def start_run(self) -> None:
        """Make this source's run every store's run: frames of other runs are dropped. TransportError."""
        _each(source.start_run for source in self._sources)

    def usage(self) -> Usage:
        """Sum over all stores. One that does not answer, as while it is started again, counts as congested.

        counters: totals of this object as ``read_bytes_PATH`` (ring, spill, http, object),
        ``read_nanoseconds_PATH`` (ring with the tiers below it, http, object), ``read_frames`` and
        ``PATH_retries`` (http, object); and ``silent_stores`` now.
        """
        total = Usage(0, 0, 0, 0)
        with self._lock:
            counters = Counter(self._counters)
        for source in self._sources:
            try:
                found = source.usage()
            except TransportError as error:
                _log.warning("a record store does not answer: %s", error)
                counters["silent_stores"] += 1
                total = replace(total, congested=True)
                continue
            total = Usage(
                total.capacity_bytes + found.capacity_bytes,
                total.held_bytes + found.held_bytes,
                total.frames + found.frames,
                total.frame_bytes + found.frame_bytes,
                total.congested or found.congested,
                cpu_seconds=total.cpu_seconds + found.cpu_seconds,
            )
            counters.update({_COUNTERS.get(name, name): total for name, total in found.counters.items()})
        return replace(total, counters=dict(counters))

    def close(self) -> None:
        """End all pins and connections; frames stay."""
        _each(source.close for source in self._sources)

    def _groups(self, handles: Sequence[Handle]) -> dict[Route | None, list[int]]:
        """Indices of handles by where they lead; None: nowhere."""
        groups: dict[Route | None, list[int]] = {}
        for index, handle in enumerate(handles):
            try:
                route = self._routes.get(parse_handle(handle).store)
            except HandleError:
                route = None
            groups.setdefault(route, []).append(index)
        return groups

    def _timed(self, path: ReadPath, finish: Callable[[], Borrowed], asked: int) -> Borrowed:
        start = time.monotonic_ns()
        try:
            answer = finish()
        except TransportError as error:
            answer = Borrowed([error] * asked)
        with self._lock:
            self._counters[f"read_nanoseconds_{path}"] += time.monotonic_ns() - start
        return answer


def _start(source: FrameSource, wanted: Sequence[Wanted]) -> Callable[[], Borrowed]:
    """Begin to read where that happens on other threads; the answer is waited for, or made, by the call."""
    return source.start(wanted) if isinstance(source, RemoteSource) else partial(source.borrow, wanted)


def _each(calls: Iterable[Callable[[], None]]) -> None:
    """Make all calls, whichever fails; the first TransportError is raised after the last call."""
    first: TransportError | None = None
    for call in calls:
        try:
            call()
        except TransportError as error:
            if first is not None:
                _log.warning("%s", error)
            first = first or error
    if first is not None:
        raise first


def open_source(
    resolved: ResolvedJob, run_id: str, node: str | None, *, starts_run: bool = False
) -> RecordSources:
    """Open what a trainer process reads frames of the run `run_id` with.

    `node` is the node that this process runs on, `ResolvedJob.node` of its own name: stores of that node are
    read in place, others over the network. `starts_run` is for the loop alone, trainer rank 0: every store
    then drops the frames of earlier runs and refuses new ones. Stores that are being started are waited for,
    here and in every later call, at most ``spec.transport.deadlineSeconds``; on a cluster, whose pods start
    minutes apart, here as long as a pod may take to appear. InputError when the token cannot be read,
    TransportError.
    """
    stores = resolved.on_cluster and bool(resolved.endpoints.store)
    patience = Deadline(resolved.appear_seconds if stores else 0.0)
    while True:
        try:
            return _open_source(resolved, run_id, node, starts_run=starts_run)
        except TransportError as error:
            if error.fault != "failed" or patience.passed():
                raise
            _log.info("waiting for the record stores: %s", error)
            time.sleep(_PAUSE_SECONDS)


def _open_source(resolved: ResolvedJob, run_id: str, node: str | None, *, starts_run: bool) -> RecordSources:
    transport, token = resolved.job.spec.transport, resolved.token()
    routes: dict[str, Route] = {}
    try:
        if transport.only_object:
            objects = ObjectSource(
                open_objects(resolved),
                job_uid=resolved.job_uid,
                run_id=run_id,
                retention=transport.object.retention,
            )
            # Frames in objects are named after the rollout that put them.
            routes = {rollout.name: Route("object", objects) for rollout in resolved.endpoints.rollout}
        for endpoint in resolved.endpoints.store:
            routes[endpoint.name] = _route(resolved, endpoint, run_id, node, token)
        sources = RecordSources(routes)
        if starts_run:
            sources.start_run()
    except BaseException:
        for route in routes.values():
            route.source.close()
        raise
    return sources


def _route(resolved: ResolvedJob, endpoint: Endpoint, run_id: str, node: str | None, token: str) -> Route:
    timeout = resolved.job.spec.transport.deadline_seconds
    if node is not None and endpoint.node == node and resolved.ring_dir is not None:
        near = StoreSource(
            resolved.store_place(endpoint.name).directory,
            store=endpoint.name,
            job_uid=resolved.job_uid,
            run_id=run_id,
            token=token,
            name=f"a trainer on {node}",
            timeout=timeout,
        )
        return Route("ring", near)
    locate = partial(_url, endpoint, resolved.endpoints.directory)
    return Route("http", RemoteSource(endpoint.name, locate, token=token, run_id=run_id, timeout=timeout))


def _url(endpoint: Endpoint, directory: Path | None) -> str | None:
    """Where a server listens now; None while it does not."""
    if endpoint.url is not None or directory is None:
        return endpoint.url
    published = EndpointFile.read(directory / f"{endpoint.name}.json")
    return None if published is None else published.url


def open_sink(resolved: ResolvedJob, name: str, run_id: str) -> FrameSink:
    """Open where the rollout `name` puts its frames: the store beside it, or objects with onlyObject.

    A new run id needs a new sink. A store that is being started is waited for, at most
    ``spec.transport.deadlineSeconds``. InputError when the token cannot be read, TransportError.
    """
    spec = resolved.job.spec.transport
    if spec.only_object:
        return ObjectSink(
            open_objects(resolved),
            store=name,
            job_uid=resolved.job_uid,
            run_id=run_id,
            batch_bytes=quantity_bytes(spec.object.batch_size),
            batch_seconds=spec.object.batch_milliseconds / 1000,
        )
    [store] = [
        store.name
        for rollout, store in zip(resolved.endpoints.rollout, resolved.endpoints.store, strict=True)
        if rollout.name == name
    ]
    return StoreSink(
        resolved.store_place(store).directory,
        store=store,
        job_uid=resolved.job_uid,
        run_id=run_id,
        token=resolved.token(),
        name=name,
        timeout=spec.deadline_seconds,
    )
