"""An HTTP proxy on this machine that delays, refuses, cuts or falsifies what goes through it.

``python fault_proxy.py PORT SECONDS`` serves alone, before a server on PORT, with an added latency, and
prints its own port.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass

_CHUNK = 256 * 1024


@dataclass(frozen=True)
class Request:
    """A request that came; `number` counts all of this proxy from 0."""

    number: int
    method: str
    path: str
    query: str


@dataclass(frozen=True)
class Fault:
    """What happens to a request: all that is set, in this order."""

    delay_seconds: float = 0
    """Wait before anything else."""
    status: int | None = None
    """Answer with this instead of asking the server."""
    code: str = "InternalError"
    """S3's error code of that answer."""
    lose_answer: bool = False
    """Ask the server, then cut the connection."""
    cut_after: int | None = None
    """Cut the connection after so many bytes of the answer's body."""


class FaultProxy:
    """Between clients and a server on `upstream`. Set `rule` at any time."""

    def __init__(self, upstream: int) -> None:
        self.upstream = upstream
        self.port = 0
        self.rule: Callable[[Request], Fault | None] = lambda _: None
        self.requests: list[Request] = []
        self._server: asyncio.Server | None = None
        self._connections: set[asyncio.StreamWriter] = set()
        self.loop = asyncio.new_event_loop()

    @property
    def endpoint_url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def listen(self) -> None:
        """Accept connections, after an outage on the same port again."""
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        """Refuse connections and cut all that there are."""
        if self._server is not None:
            self._server.close()
        for writer in list(self._connections):
            writer.transport.abort()

    def down(self) -> None:
        """Begin an outage."""
        asyncio.run_coroutine_threadsafe(self.stop(), self.loop).result()

    def up(self) -> None:
        """End an outage."""
        asyncio.run_coroutine_threadsafe(self.listen(), self.loop).result()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._connections.add(writer)
        upstream: asyncio.StreamWriter | None = None
        try:
            from_server, upstream = await asyncio.open_connection("127.0.0.1", self.upstream)
            self._connections.add(upstream)
            while await self._exchange(reader, writer, from_server, upstream):
                pass
        except (OSError, asyncio.IncompleteReadError):
            pass
        finally:
            for each in filter(None, (writer, upstream)):
                self._connections.discard(each)
                each.transport.abort() if each.transport.is_closing() else each.close()

    async def _exchange(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        from_server: asyncio.StreamReader,
        upstream: asyncio.StreamWriter,
    ) -> bool:
        """Pass one request and its answer; False when the connection ends."""
        try:
            head = await reader.readuntil(b"\r\n\r\n")
        except asyncio.IncompleteReadError:
            return False
        method, target, _ = head.split(b"\r\n", 1)[0].decode().split(" ")
        path, _, query = target.partition("?")
        request = Request(len(self.requests), method, path, query)
        self.requests.append(request)
        fault = self.rule(request) or Fault()
        if fault.delay_seconds:
            await asyncio.sleep(fault.delay_seconds)
        length = int(_header(head, b"content-length") or 0)
        if fault.status is not None:
            waits = _header(head, b"expect") is not None
            if not waits:
                async for _ in _pieces(reader, length):
                    pass
            body = f"<Error><Code>{fault.code}</Code><Message>no</Message></Error>".encode()
            if method == "HEAD":
                body = b""
            answer = f"HTTP/1.1 {fault.status} Fault\r\nContent-Length: {len(body)}\r\n\r\n".encode()
            writer.write(answer + body)
            await writer.drain()
            return not waits
        upstream.write(head)
        if _header(head, b"expect"):  # another round trip, before the body
            writer.write(await from_server.readuntil(b"\r\n\r\n"))
            await asyncio.sleep(fault.delay_seconds)
        async for piece in _pieces(reader, length):
            upstream.write(piece)
            await upstream.drain()
        head = await from_server.readuntil(b"\r\n\r\n")
        if fault.lose_answer:
            return False
        writer.write(head)
        status = int(head.split(b" ", 2)[1])
        left = fault.cut_after
        if method == "HEAD" or status in {204, 304}:
            pieces = _pieces(from_server, 0)
        elif _header(head, b"transfer-encoding") == b"chunked":
            pieces = _chunks(from_server)
        else:
            pieces = _pieces(from_server, int(_header(head, b"content-length") or 0))
        async for piece in pieces:
            if left is not None:
                writer.write(piece[:left])
                left -= len(piece)
                if left <= 0:
                    await writer.drain()
                    return False
            else:
                writer.write(piece)
            await writer.drain()
        return True


def _header(head: bytes, name: bytes) -> bytes | None:
    for line in head.split(b"\r\n")[1:]:
        key, _, value = line.partition(b":")
        if key.strip().lower() == name:
            return value.strip().lower()
    return None


async def _pieces(reader: asyncio.StreamReader, length: int):
    while length:
        piece = await reader.read(min(length, _CHUNK))
        if not piece:
            raise asyncio.IncompleteReadError(b"", length)
        length -= len(piece)
        yield piece


async def _chunks(reader: asyncio.StreamReader):
    while True:
        line = await reader.readuntil(b"\r\n")
        size = int(line, 16)
        yield line + await reader.readexactly(size + 2)
        if not size:
            return


@contextlib.contextmanager
def start_fault_proxy(upstream: int) -> Iterator[FaultProxy]:
    """Serve on a thread of its own."""
    proxy = FaultProxy(upstream)
    thread = threading.Thread(target=proxy.loop.run_forever, name="fault-proxy")
    thread.start()
    proxy.up()
    try:
        yield proxy
    finally:
        proxy.down()
        proxy.loop.call_soon_threadsafe(proxy.loop.stop)
        thread.join()
        proxy.loop.close()


async def _alone(upstream: int, seconds: float) -> None:
    proxy = FaultProxy(upstream)
    proxy.rule = lambda _: Fault(delay_seconds=seconds)
    await proxy.listen()
    print(proxy.port, flush=True)  # noqa: T201
    await asyncio.Event().wait()


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(_alone(int(sys.argv[1]), float(sys.argv[2])))
