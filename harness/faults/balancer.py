"""One TCP address before several servers, as a Service is; it can hold and cut its connections."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Iterator
from urllib.parse import urlsplit

from harness.loop_thread import LoopThread, loop_thread

_CHUNK = 1 << 16


class Balancer:
    """Spreads connections in turn over the servers that accept them; knows nothing of their reports."""

    def __init__(self, thread: LoopThread, url: str) -> None:
        """Begin with one server, by its https address on loopback."""
        self._thread = thread
        self._servers = [url]
        self._flowing = asyncio.Event()
        self._flowing.set()
        self._open: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self.connections: Counter[str] = Counter()
        """How many connections each server has been given, by its address."""

    @contextlib.contextmanager
    def also(self, url: str) -> Iterator[None]:
        """Spread new connections over one more server while the block runs."""
        self._servers.append(url)
        try:
            yield
        finally:
            self._servers.remove(url)
            self.cut_all()

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Accept connections and let nothing through while the block runs."""
        self._thread.do(self._let_flow(flow=False))
        try:
            yield
        finally:
            self._thread.do(self._let_flow(flow=True))

    def cut_all(self) -> None:
        """Cut every connection; new ones are accepted at once."""
        self._thread.do(self._cut_all())

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.url = f"https://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def stop(self) -> None:
        self._server.close()
        await self._cut_all()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _let_flow(self, *, flow: bool) -> None:
        if flow:
            self._flowing.set()
        else:
            self._flowing.clear()

    async def _cut_all(self) -> None:
        for writer in list(self._open):
            writer.transport.abort()

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.get_running_loop().create_task(self._carry(reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._open.add(writer)
        try:
            await self._flowing.wait()
            upstream = await self._connect()
            if upstream is None:
                return
            self._open.add(upstream[1])
            try:
                async with asyncio.TaskGroup() as both:
                    both.create_task(self._pump(reader, upstream[1]))
                    both.create_task(self._pump(upstream[0], writer))
            finally:
                self._open.discard(upstream[1])
                upstream[1].transport.abort()
        finally:
            self._open.discard(writer)
            writer.transport.abort()

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter] | None:
        # The server with the fewest connections first, as a round-robin over equal ones gives it.
        for url in sorted(self._servers, key=lambda url: self.connections[url]):
            with contextlib.suppress(OSError):
                address = urlsplit(url)
                opened = await asyncio.open_connection(address.hostname, address.port)
                self.connections[url] += 1
                return opened
        return None

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while chunk := await reader.read(_CHUNK):
                await self._flowing.wait()
                writer.write(chunk)
                await writer.drain()
        writer.close()  # a stream that one side ends is ended for the other


@contextlib.contextmanager
def balancer(url: str) -> Iterator[Balancer]:
    """Run a balancer before a server while the block runs."""
    with loop_thread("balancer") as thread:
        running = Balancer(thread, url)
        thread.do(running.start())
        try:
            yield running
        finally:
            thread.do(running.stop())
