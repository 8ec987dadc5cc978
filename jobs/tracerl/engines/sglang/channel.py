"""How the server's process and SGLang's scheduler processes talk: JSON lines over a Unix socket.

SGLang starts its schedulers itself, so the only thing that both sides share is an address in the environment.
A scheduler says hello when its hooks hold, tells what became of requests' records, and answers calls.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import os
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

_log = logging.getLogger(__name__)

SOCKET_VARIABLE = "TRACERL_RECORDER"
"""Path of the socket."""
_LINE_BYTES = 64 * 2**20
_CONNECT_SECONDS = 30.0


class PluginEnd:
    """A scheduler's end."""

    def __init__(self, path: str) -> None:
        """Connect; OSError when nobody listens."""
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.settimeout(_CONNECT_SECONDS)
        self._socket.connect(path)
        self._socket.settimeout(None)
        self._lock = threading.Lock()

    def send(self, message: dict[str, Any]) -> None:
        """Send a message; one to a server that is gone is lost, as all that follows is."""
        line = json.dumps(message).encode() + b"\n"
        with self._lock, suppress(OSError):
            self._socket.sendall(line)

    def answer(self, handlers: dict[str, Callable[..., Any]]) -> None:
        """Start a thread that answers calls; a handler's exception is answered as a problem."""

        def run() -> None:
            with self._socket.makefile("rb") as lines:
                for line in lines:
                    call = json.loads(line)
                    result, problem = None, None
                    try:
                        result = handlers[call["method"]](**call["arguments"])
                    except Exception as error:  # noqa: BLE001  told to the server, which waits for it
                        problem = str(error) or type(error).__name__
                    self.send({"reply": call["id"], "result": result, "problem": problem})

        threading.Thread(target=run, name="recorder-calls", daemon=True).start()


class PluginError(Exception):
    """A scheduler's recorder could not do what it was asked; says why."""


class ServerEnd:
    """The server's end: listens from the start, and is served by the event loop once there is one."""

    def __init__(self, path: Path) -> None:
        """Listen. Schedulers connect and send before `start`: what they say waits."""
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(str(path))
        self._listener.listen(64)
        self._writers: list[asyncio.StreamWriter] = []
        self._numbers = itertools.count()
        self._calls: dict[int, asyncio.Future[Any]] = {}
        self._server: asyncio.AbstractServer | None = None
        self._came = asyncio.Event()
        self.hellos: list[dict[str, Any]] = []
        """What schedulers said first, in the order in which they came."""
        self.on_message: Callable[[dict[str, Any]], None] = lambda _: None
        """What is done with a message that is no reply."""
        self.on_lost: Callable[[], None] = lambda: None
        """What is done when a scheduler is gone."""
        self._closed = False

    async def start(self) -> None:
        """Take what came and comes."""
        self._server = await asyncio.start_unix_server(self._serve, sock=self._listener, limit=_LINE_BYTES)

    async def wait_for_hellos(self, count: int, seconds: float) -> bool:
        """Wait until so many schedulers said hello; False when they did not in time."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while len(self.hellos) < count:
                    self._came.clear()
                    await self._came.wait()
        return len(self.hellos) >= count

    async def call(self, method: str, **arguments: Any) -> list[Any]:
        """Let every scheduler do something; gives their results, or raises the first PluginError."""
        loop = asyncio.get_running_loop()
        waiting: list[asyncio.Future[Any]] = []
        for writer in self._writers:
            number = next(self._numbers)
            self._calls[number] = loop.create_future()
            waiting.append(self._calls[number])
            call = {"id": number, "method": method, "arguments": arguments}
            writer.write(json.dumps(call).encode() + b"\n")
        return list(await asyncio.gather(*waiting))

    def close(self) -> None:
        """Let go of all connections."""
        self._closed = True
        self._listener.close()
        for writer in self._writers:
            writer.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.append(writer)
        try:
            while line := await reader.readline():
                self._take(json.loads(line))
        except (ConnectionError, ValueError) as error:
            _log.error("a scheduler's recorder is lost: %s", error)
        if not self._closed:
            self.on_lost()

    def _take(self, message: dict[str, Any]) -> None:
        if "hello" in message:
            self.hellos.append(message["hello"])
            self._came.set()
        elif "reply" in message:
            future = self._calls.pop(message["reply"])
            if future.done():
                return
            if message["problem"] is None:
                future.set_result(message["result"])
            else:
                future.set_exception(PluginError(message["problem"]))
        else:
            self.on_message(message)


def socket_path() -> str | None:
    """Where the server of this process tree listens; None outside a rollout."""
    return os.environ.get(SOCKET_VARIABLE)
