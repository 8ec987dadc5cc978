"""kopf in a thread of its own: it watches and hands every event over; nothing else of it is used.

A thread, because kopf at its end cancels every task of its event loop, and it ends whenever a watch meets
what it does not expect, such as a definition that was removed; it is started again, then. Only `on.event`
handlers are registered, so kopf writes nothing, neither finalizers nor annotations. It is told not to look
for definitions and namespaces by itself, which would need rights in the whole cluster.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import Awaitable, Callable, Collection, Sequence
from typing import Any

import aiohttp
import kopf
from kubernetes.aio.client import Configuration

from tracerl_operator.shell.api import CHUNK, Count, load_configuration, tls
from tracerl_operator.shell.kinds import Kind
from tracerl_operator.types import Document

_FIRST_PAUSE, _LAST_PAUSE = 1.0, 30.0
_WATCH_SECONDS, _STILL_SECONDS = 120, 360.0
_END_SECONDS = 10.0
_STACK_BYTES = 64 * 2**20
_LOG = logging.getLogger(__name__)

Seen = Callable[[Kind, str | None, Document], None]
"""Takes what a watch brought: the kind, how it changed (None when listed) and the object."""


class Watches:
    """Watches of some kinds, in some namespaces or in the whole cluster."""

    def __init__(self, namespaces: Sequence[str], identity: str, count: Count) -> None:
        self._namespaces, self._identity = namespaces, identity
        self._count = count
        self._seen: Seen = _nobody
        self._loop = asyncio.get_running_loop()
        self._thread: threading.Thread | None = None
        self._end = threading.Event()
        self._change = threading.Event()
        self._kinds: tuple[Kind, ...] = ()
        self._wake: Callable[[], object] = lambda: None
        self._open: set[str] = set()
        self._asked: dict[str, float] = {}
        self._began = time.monotonic()
        self._sessions: list[aiohttp.ClientSession] = []
        self.round = 0
        """Counts up when the watches are begun anew."""

    def start(self, kinds: Collection[Kind], seen: Seen) -> None:
        """Begin to watch these kinds, instead of those so far."""
        self._kinds, self._seen = tuple(kinds), seen
        self._began = time.monotonic()
        if self._thread is None:
            # As deep as the recursion that `run` allows; only what is used of it becomes memory.
            before = threading.stack_size(_STACK_BYTES)
            self._thread = threading.Thread(target=self._run, name="watches", daemon=True)
            self._thread.start()
            threading.stack_size(before)
        else:
            self._interrupt()

    def stop(self, seconds: float) -> None:
        """End all watches; what has not ended by then is left to the end of the process."""
        self._end.set()
        self._interrupt()
        if self._thread is not None:
            self._thread.join(seconds)

    @property
    def alive(self) -> bool:
        """Whether somebody watches, or tries to."""
        return self._thread is not None and self._thread.is_alive()

    @property
    def complete(self) -> bool:
        """Whether all watches have been open since they were begun."""
        paths = self._paths()
        return bool(paths) and paths <= self._open

    @property
    def stands_still(self) -> bool:
        """Whether a watch was not even tried for long; each is opened anew every two minutes, or fails."""
        since = time.monotonic() - _STILL_SECONDS
        return any(max(self._asked.get(path, 0.0), self._began) < since for path in self._paths())

    def _paths(self) -> set[str]:
        return {kind.path(space) for kind in self._kinds for space in self._namespaces or (None,)}

    def _interrupt(self) -> None:
        """End this round of the watches, or the pause between two."""
        self._change.set()
        with contextlib.suppress(RuntimeError):  # that round's loop is closed already
            self._wake()

    def _run(self) -> None:
        pause = _FIRST_PAUSE
        while not self._end.is_set():
            self._change = change = threading.Event()
            if self._end.is_set():
                return
            began = time.monotonic()
            loop = asyncio.new_event_loop()
            try:
                loop.run_until_complete(self._watch(self._kinds, self._seen, change))
            except asyncio.CancelledError:
                pass
            except Exception as error:  # noqa: BLE001  # whatever ended the watches, they are needed again
                _LOG.warning("the watches ended and are begun again: %s", _cause(error))
            finally:
                _close(loop, self._sessions)
            if time.monotonic() - began > _LAST_PAUSE:
                pause = _FIRST_PAUSE
            if not change.is_set():
                change.wait(pause)
                pause = min(2 * pause, _LAST_PAUSE)

    async def _watch(self, kinds: Sequence[Kind], seen: Seen, change: threading.Event) -> None:
        # Not the thread's event: kopf would wait for it in another thread, which outlives kopf.
        stop, loop = asyncio.Event(), asyncio.get_running_loop()
        self._wake = lambda: loop.call_soon_threadsafe(stop.set)
        if change.is_set():
            return
        # What the last round's requests have yet to say goes into the last round's set.
        self._open = opened = set[str]()
        self.round += 1
        self._began = time.monotonic()
        registry = kopf.OperatorRegistry()
        settings = kopf.OperatorSettings()
        settings.posting.enabled = False
        settings.scanning.disabled = True
        settings.process.ultimate_exiting_timeout = None
        settings.networking.request_timeout, settings.networking.connect_timeout = 60, 10
        settings.networking.error_backoffs = (1, 2, 4)
        settings.watching.server_timeout, settings.watching.chunk_size = _WATCH_SECONDS, CHUNK
        # A worker is a task of one object; more of them only take memory while everything is listed.
        settings.queueing.worker_limit, settings.queueing.idle_timeout = 64, 0.1
        kopf.on.login(registry=registry)(self._login(opened))
        for kind in kinds:
            kopf.on.event(kind.group, kind.version, kind.plural, registry=registry)(self._handler(kind, seen))
            if kind.selector is not None:
                settings.watching.label_selectors[kind.group, kind.version, kind.plural] = kind.selector
        # When one of its tasks fails, kopf.operator() waits for the others, and that can be for ever: a
        # cancellation that comes while a request is tried again gets lost in it.
        tasks = await kopf.spawn_tasks(
            registry=registry,
            settings=settings,
            identity=self._identity,  # type: ignore[arg-type]  # a str by another name, which is not public
            standalone=True,
            clusterwide=not self._namespaces,
            namespaces=self._namespaces,
            stop_flag=stop,
        )
        ended, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in ended:
            task.result()

    def _handler(self, kind: Kind, seen: Seen) -> Callable[..., Awaitable[None]]:
        async def hand_over(event: Any, **_: object) -> None:
            self._loop.call_soon_threadsafe(seen, kind, event["type"], event["object"])

        return hand_over

    def _login(self, opened: set[str]) -> Callable[..., Awaitable[kopf.AiohttpSession]]:
        async def login(**_: object) -> kopf.AiohttpSession:
            """Give kopf a session with the credentials that the rest of the operator has, always fresh."""
            configuration = await load_configuration()
            session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0, ssl=tls(configuration)),
                middlewares=[self._middleware(configuration, opened)],
                read_bufsize=2**21,
            )
            self._sessions.append(session)
            return kopf.AiohttpSession(server=configuration.host, aiohttp_session=session)

        return login

    def _middleware(self, configuration: Configuration, opened: set[str]) -> aiohttp.ClientMiddlewareType:
        """Authorise each request, count it, and note which watches are open: kopf does not tell."""

        async def middleware(
            request: aiohttp.ClientRequest, handler: aiohttp.ClientHandlerType
        ) -> aiohttp.ClientResponse:
            for setting in (await configuration.auth_settings()).values():
                request.headers[setting["key"]] = setting["value"]
            path, watches = request.url.path, "watch" in request.url.query
            plural = path.rpartition("/")[2]
            kind = next((one.name for one in self._kinds if one.plural == plural), None)
            verb = "GET" if kind is None else "WATCH" if watches else "LIST"
            self._asked[path] = time.monotonic()
            code = 0
            try:
                response = await handler(request)
                code = response.status
            finally:
                self._loop.call_soon_threadsafe(self._count, verb, kind or "APIResourceList", code)
            if watches and code == 200:
                opened.add(path)
            return response

        return middleware


def _close(loop: asyncio.AbstractEventLoop, sessions: list[aiohttp.ClientSession]) -> None:
    """End a loop with all that is in it; what does not end when it is told to, again and again, is left."""
    until = time.monotonic() + _END_SECONDS
    while (tasks := asyncio.all_tasks(loop)) and time.monotonic() < until:
        for task in tasks:
            task.cancel()
        loop.run_until_complete(asyncio.wait(tasks, timeout=_END_SECONDS / 10))
    while sessions:
        loop.run_until_complete(sessions.pop().close())
    loop.close()


def _nobody(_kind: Kind, _change: str | None, _document: Document) -> None:
    pass


def _cause(error: BaseException) -> str:
    while error.__cause__ is not None:
        error = error.__cause__
    return f"{type(error).__name__}: {error}"
