"""An HTTP server that peers without the token cannot wear out.

Whoever reaches the port may open connections. So there is a limit of them, one that has not shown the token
ends after some seconds, or earlier when its place is needed, and nothing is decompressed: who has the token
has no reason to compress, and a few bytes of anybody else could keep the event loop busy for seconds.
"""

from __future__ import annotations

import asyncio
import logging
import resource
import socket
import time
from collections import deque
from typing import Final

from aiohttp import web

_CONNECTIONS: Final = 256
"""Most connections of one server, with and without the token."""
_SHARE: Final = 4
"""No more connections than this part of the files that the process may have open."""
_STRANGER_SECONDS: Final = 10.0
"""How long a connection may take to show the token; also one whose peer waits for a CPU gets by with it."""
_BACKLOG: Final = 128
_PAUSE_SECONDS: Final = 1.0
"""Until connections are accepted again when one could not be."""
_SHUTDOWN_SECONDS: Final = 1.0


class _Seldom(logging.Filter):
    """Lets some records a minute through and counts the others: any peer can bring about any number."""

    _MOST, _SECONDS = 10, 60.0

    def __init__(self) -> None:
        super().__init__()
        self._passed: deque[float] = deque(maxlen=self._MOST)
        self._dropped = 0

    def filter(self, record: logging.LogRecord) -> bool:
        """Decide about one record."""
        now = time.monotonic()
        if len(self._passed) == self._MOST and now - self._passed[0] < self._SECONDS:
            self._dropped += 1
            return False
        if self._dropped:
            record.msg = f"{record.msg} (and {self._dropped} more before that were not logged)"
        self._passed.append(now)
        self._dropped = 0
        return True


_requests = logging.getLogger(f"{__name__}.requests")
"""What aiohttp has to say about requests, and we about connections."""
_requests.addFilter(_Seldom())


class Strangers:
    """Connections that have not shown the token yet, the oldest first."""

    def __init__(self) -> None:
        self._timers: dict[asyncio.Transport, asyncio.TimerHandle] = {}

    def add(self, transport: asyncio.Transport) -> None:
        """End the connection after some seconds, unless it is admitted."""
        loop = asyncio.get_running_loop()
        self._timers[transport] = loop.call_later(_STRANGER_SECONDS, self._end, transport)

    def admit(self, request: web.Request) -> None:
        """Let the connection of this request stay: it has shown the token."""
        timer = None if request.transport is None else self._timers.pop(request.transport, None)
        if timer is not None:
            timer.cancel()

    def end_oldest(self) -> bool:
        """End the oldest connection that is still open; False when there is none."""
        while self._timers:
            transport = next(iter(self._timers))
            is_open = not transport.is_closing()
            self._end(transport)
            if is_open:
                return True
        return False

    def _end(self, transport: asyncio.Transport) -> None:
        self._timers.pop(transport).cancel()
        transport.abort()  # it need not take what waits to be sent


class HttpServer:
    """Serves an application, whose handlers tell `strangers` when a request has shown the token."""

    def __init__(self, application: web.Application, strangers: Strangers) -> None:
        """Take the application over; it may be served once."""
        self._runner = web.AppRunner(
            application,
            handler_cancellation=True,
            access_log=None,
            shutdown_timeout=_SHUTDOWN_SECONDS,
            auto_decompress=False,
            logger=_requests,
        )
        self._strangers = strangers
        self._listener: socket.socket | None = None
        self._opening: dict[web.RequestHandler, asyncio.Task[None]] = {}
        self._most = max(1, min(_CONNECTIONS, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // _SHARE))

    async def start(self, host: str | None, port: int) -> int:
        """Listen on a port of `host`, or of all interfaces; 0 stands for a free port. Give it. OSError."""
        await self._runner.setup()
        self._loop = asyncio.get_running_loop()
        self._listener = _bind(host, port)
        self._listener.setblocking(False)
        self._loop.add_reader(self._listener, self._accept)
        bound: int = self._listener.getsockname()[1]
        return bound

    async def close(self) -> None:
        """Stop listening, answer what is being answered for at most a second, end all connections."""
        if self._listener is not None:
            self._loop.remove_reader(self._listener)
            self._listener.close()
            self._listener = None
        await asyncio.gather(*self._opening.values(), return_exceptions=True)
        await self._runner.cleanup()

    def _accept(self) -> None:
        assert self._listener is not None
        try:
            connection, _ = self._listener.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return
        except OSError as error:
            # Without a descriptor for it, it would wake this loop at once, again and again.
            _requests.warning("no connection can be accepted (%s); see ulimit -n", error.strerror)
            self._loop.remove_reader(self._listener)
            self._loop.call_later(_PAUSE_SECONDS, self._accept_again)
            return
        server = self._runner.server
        assert server is not None
        # A connection that is ended here is gone before the next one is accepted.
        if len({*server.connections, *self._opening}) >= self._most:
            _requests.warning("there are %d connections; the oldest without the token ends", self._most)
            if not self._strangers.end_oldest():
                connection.close()
                return
        connection.setblocking(False)
        protocol = server()
        self._opening[protocol] = self._loop.create_task(self._open(connection, protocol))

    def _accept_again(self) -> None:
        if self._listener is not None:
            self._loop.add_reader(self._listener, self._accept)

    async def _open(self, connection: socket.socket, protocol: web.RequestHandler) -> None:
        try:
            transport, _ = await self._loop.connect_accepted_socket(lambda: protocol, connection)
            self._strangers.add(transport)
        except OSError:  # it has ended meanwhile
            connection.close()
        finally:
            del self._opening[protocol]


def raise_open_files() -> None:
    """Let this process have as many files open as it may."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def _bind(host: str | None, port: int) -> socket.socket:
    if host is None and socket.has_dualstack_ipv6():
        return socket.create_server(("", port), family=socket.AF_INET6, backlog=_BACKLOG, dualstack_ipv6=True)
    return socket.create_server((host or "", port), backlog=_BACKLOG)
