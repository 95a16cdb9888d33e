"""Accepting connections within bounds: how many, how long a caller may take, and how much it may send.

A client that reaches a port may open connections and send nothing, or send slowly, or never read. Each of
these ends after a time, and however many callers do it together, their connections and the bytes of their
requests stay limited until these are answered. The application limits a request once it is
complete.

An address without a host means all: IPv6 and IPv4 on one socket, as Go programs do it, so that the same
default works in clusters with either family or both. A kernel without IPv6 gets an IPv4 socket.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import re
import socket
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass
from typing import Protocol, cast, runtime_checkable

from aiohttp import StreamReader
from aiohttp.web_protocol import RequestHandler

from kvplace.core.errors import Misconfigured
from kvplace.service.process import CUT_CONNECTIONS

_log = logging.getLogger(__name__)

_PAUSE_S = 0.1
"""Pause before accepting again when the process has no file descriptors left."""

_HOST_AND_PORT = re.compile(r"(?:\[(?P<ipv6>[^\[\]]*:[^\[\]]*)\]|(?P<host>[^\[\]:]*)):(?P<port>[0-9]{1,5})")

Choose = Callable[[asyncio.Transport], asyncio.Protocol | None]
"""Gives the protocol of a new connection, after its TLS handshake; None refuses the caller."""
MayConnect = Callable[[str], Awaitable[bool]]
"""Returns whether a client with this address may connect, before its TLS handshake, and stay connected."""
_ASK_AGAIN_S = 10.0
"""How often the addresses of open connections are checked again."""
_BACKLOG = 128
_NO_IPV6 = {errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL}
"""The answer of a kernel with ipv6.disable=1, or without an IPv6 address to bind."""


@dataclass(frozen=True, slots=True)
class Address:
    """Where a listener listens: no host means all addresses of both families; port 0 takes a free one."""

    host: str
    port: int

    @classmethod
    def parse(cls, text: str) -> Address:
        """Read `HOST:PORT`, `[IPV6]:PORT` or `:PORT`; raises Misconfigured that names the text."""
        found = _HOST_AND_PORT.fullmatch(text)
        if found is None or int(found["port"]) > 65535:
            raise Misconfigured(
                f"{text!r} is not an address; write HOST:PORT, for example 127.0.0.1:8443 or [::1]:8443, "
                "or :8443 for all addresses"
            )
        return cls(found["ipv6"] or found["host"] or "", int(found["port"]))

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """Bounds for the callers of one listener, together and each."""

    connections: int = 768
    """Three API servers may have 200 changes under way each, and each may need a connection."""
    handshake_s: float = 5.0
    """For the TLS handshake."""
    request_s: float = 10.0
    """For one request from its first byte to its last, and for taking bytes of an answer."""
    idle_s: float = 300.0
    """Without a request. A new connection costs kube-scheduler and the API server a TLS handshake."""
    unread_bytes: int = 128 << 20
    """Of requests that are not answered, all connections together; also of callers that have gone, until the
    work for them has ended."""


@runtime_checkable
class KeepsOwnTime(Protocol):
    """A protocol that knows itself when its caller is too slow: it serves several requests at once."""

    def is_overdue(self, now: float) -> bool:
        """Return whether the connection is to be cut; `now` is the loop's time."""
        ...

    def hang_up(self) -> None:
        """Close the connection as soon as the answers under way are sent."""
        ...


class Connections:
    """The open connections of one listener."""

    def __init__(
        self,
        name: str,
        choose: Choose,
        limits: ConnectionLimits,
        *,
        may_connect: MayConnect | None = None,
        gives_up: bool = False,
    ) -> None:
        """`name` is for metrics; without `may_connect` clients of all addresses may connect.

        `gives_up`: the work for a client ends when its connection does.
        """
        self.gives_up = gives_up
        self._name = name
        self._choose = choose
        self._limits = limits
        self._may_connect = may_connect
        self._handshakes: set[asyncio.Task[None]] = set()
        self._open: dict[asyncio.BaseTransport | None, _ClientConnection] = {}
        self._unread = 0

    @contextlib.contextmanager
    def answering(self, transport: asyncio.BaseTransport | None, body: StreamReader) -> Iterator[None]:
        """Let an answer take its time, once the body of its request has been read, while the block runs."""
        connection = self._open.get(transport)
        if connection is None:
            yield
            return
        body.on_eof(connection.request_is_complete)
        connection.answering(begins=True)
        try:
            yield
        finally:
            connection.answering(begins=False)

    def hang_up(self) -> None:
        """Let every connection end after the answers under way, so that callers connect again, elsewhere."""
        for connection in list(self._open.values()):
            connection.hang_up()

    async def accept(self, listening: socket.socket, tls: ssl.SSLContext | None) -> None:
        """Accept connections until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            try:
                accepted, (host, *_) = await loop.sock_accept(listening)
            except ConnectionError:
                continue
            except OSError as error:
                _log.warning("%s cannot accept connections: %s", self._name, error)
                await asyncio.sleep(_PAUSE_S)
                continue
            if len(self._handshakes) + len(self._open) >= self._limits.connections:
                accepted.close()
                self.count_cut("full")
                continue
            task = loop.create_task(self._take(accepted, host, tls))
            self._handshakes.add(task)
            task.add_done_callback(self._handshakes.discard)

    async def sweep(self) -> None:
        """Cut off callers that are too slow, until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(min(1.0, self._limits.request_s / 4))
            now = loop.time()
            for connection in list(self._open.values()):
                if connection.is_overdue(now):
                    connection.cut("slow")

    async def check_callers(self) -> None:
        """Cut off the clients of addresses that may not connect any more, until cancelled."""
        while self._may_connect is not None:
            await asyncio.sleep(_ASK_AGAIN_S)
            by_host: dict[str, list[_ClientConnection]] = {}
            for connection in self._open.values():
                by_host.setdefault(connection.host, []).append(connection)
            for host, connections in by_host.items():
                if not await self._may_connect(host):
                    for connection in connections:
                        connection.cut("client")

    async def end_handshakes(self) -> None:
        """Give up the handshakes that are under way."""
        for task in list(self._handshakes):
            task.cancel()
        await asyncio.gather(*self._handshakes, return_exceptions=True)

    def count_cut(self, why: str) -> None:
        """Count a connection that was not served."""
        CUT_CONNECTIONS.labels(self._name, why).inc()

    async def _take(self, accepted: socket.socket, host: str, tls: ssl.SSLContext | None) -> None:
        """Make the handshake; the connection then serves itself."""
        if self._may_connect is not None and not await self._may_connect(host):
            accepted.close()
            self.count_cut("client")
            return
        try:
            await asyncio.get_running_loop().connect_accepted_socket(
                lambda: _ClientConnection(self, self._limits, host),
                accepted,
                ssl=tls,
                ssl_handshake_timeout=self._limits.handshake_s if tls is not None else None,
            )
        except (OSError, TimeoutError) as error:  # ssl.SSLError is an OSError
            accepted.close()
            self.count_cut("handshake")
            _log.debug("a TLS handshake with %s failed: %s", self._name, error)

    # Called by connections.

    def opened(self, transport: asyncio.Transport, connection: _ClientConnection) -> asyncio.Protocol | None:
        """Note a connection; returns the protocol that serves it."""
        self._open[transport] = connection
        return self._choose(transport)

    def closed(self, transport: asyncio.Transport) -> None:
        """Forget a connection."""
        self._open.pop(transport, None)

    def make_room(self, sender: _ClientConnection) -> bool:
        """Cut the connections with most bytes of requests, so that a usual request stays beside large ones.

        Returns whether the bytes are within the limit then; the connection of `sender` is not cut here.
        """
        while self.gives_up and not self.has_room(0):
            largest = max(self._open.values(), key=lambda connection: connection.unread)
            if largest is sender:
                break
            largest.cut("bytes")
        return self.has_room(0)

    def has_room(self, more_bytes: int) -> bool:
        """Count bytes of requests, or take some off; returns whether they are within the limit."""
        self._unread += more_bytes
        return self._unread <= self._limits.unread_bytes


class _ClientConnection(asyncio.Protocol):
    """One connection: passes everything on to the protocol that serves it, and watches the time."""

    def __init__(self, all_connections: Connections, limits: ConnectionLimits, host: str) -> None:
        self._all = all_connections
        self.host = host
        """The address of the client."""
        self._limits = limits
        self._loop = asyncio.get_running_loop()
        self._reading_since: float | None = self._loop.time()
        """Since when a request is awaited or incomplete; None while one is answered, and between requests."""
        self._blocked_since: float | None = None
        """Since when the caller takes no more bytes."""
        self.unread = 0
        """Bytes of requests that are not answered."""
        self._timed: KeepsOwnTime | None = None
        self._is_answering = False
        self._next_has_begun = False
        """Whether bytes of another request have come that waits for the answer under way."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports are none of asyncio's classes.
        self._transport = cast(asyncio.Transport, transport)
        self._inner = self._all.opened(self._transport, self)
        if self._inner is None:
            self.cut("client")
            return
        if isinstance(self._inner, KeepsOwnTime):
            self._timed = self._inner
        self._inner.connection_made(transport)

    def data_received(self, data: bytes) -> None:
        if self._inner is None:
            return
        if self._timed is None:
            if self._reading_since is None:
                if self._is_answering:
                    self._next_has_begun = True
                else:
                    self._reading_since = self._loop.time()
            self.unread += len(data)
            if not self._all.has_room(len(data)) and not self._all.make_room(self):
                self.cut("bytes")
                return
        self._inner.data_received(data)

    def eof_received(self) -> bool | None:
        return None if self._inner is None else self._inner.eof_received()

    def pause_writing(self) -> None:
        self._blocked_since = self._loop.time()
        if self._inner is not None:
            self._inner.pause_writing()

    def resume_writing(self) -> None:
        self._blocked_since = None
        if self._inner is not None:
            self._inner.resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._all.gives_up or not self._is_answering or self._reading_since is not None:
            self._forget_unread()  # the reader of an incomplete body gives it up now
        self._all.closed(self._transport)
        if self._inner is not None:
            self._inner.connection_lost(exc)

    def answering(self, *, begins: bool) -> None:
        self._is_answering = begins
        if not begins:
            self._forget_unread()
        if not begins and self._next_has_begun:
            self._next_has_begun = False
            self._reading_since = self._loop.time()

    def request_is_complete(self) -> None:
        self._reading_since = None

    def is_overdue(self, now: float) -> bool:
        allowed = self._limits.request_s
        if self._blocked_since is not None and now - self._blocked_since > allowed:
            return True
        if self._timed is not None:
            return self._timed.is_overdue(now)
        return self._reading_since is not None and now - self._reading_since > allowed

    def hang_up(self) -> None:
        if self._timed is not None:
            self._timed.hang_up()
            return
        if isinstance(self._inner, RequestHandler):
            self._inner.close()  # ends after the answer under way
        if not self._is_answering:
            self._transport.close()

    def cut(self, why: str) -> None:
        self._all.count_cut(why)
        self._transport.abort()
        if self._all.gives_up:
            self._forget_unread()

    def _forget_unread(self) -> None:
        self._all.has_room(-self.unread)
        self.unread = 0


@contextlib.asynccontextmanager
async def accepting(
    connections: Connections, address: Address, tls: ssl.SSLContext | None
) -> AsyncIterator[Address]:
    """Accept connections while the block runs; gives the address with the port really used.

    Raises Misconfigured when the address cannot be used. Open connections are left to their handlers.
    """
    listening = await listening_socket(address)
    with listening:
        tasks = [
            asyncio.create_task(connections.accept(listening, tls)),
            asyncio.create_task(connections.sweep()),
            asyncio.create_task(connections.check_callers()),
        ]
        try:
            yield Address(*listening.getsockname()[:2])
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await connections.end_handshakes()


async def listening_socket(address: Address) -> socket.socket:
    """Return a socket that listens and does not block; raises Misconfigured if the address cannot be used."""
    try:
        return await _on_host(address) if address.host else _on_all_addresses(address.port)
    except OSError as error:
        raise Misconfigured(f"cannot listen on {address}: {error.strerror or error}") from None


def _on_all_addresses(port: int) -> socket.socket:
    try:
        return _listen(socket.AF_INET6, ("::", port))
    except OSError as error:
        if error.errno not in _NO_IPV6:
            raise
    return _listen(socket.AF_INET, ("0.0.0.0", port))


async def _on_host(address: Address) -> socket.socket:
    (family, _, _, _, where), *_ = await asyncio.get_running_loop().getaddrinfo(
        address.host, address.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )
    return _listen(family, where)


def _listen(family: int, where: tuple[object, ...]) -> socket.socket:
    # With the protocol named, asyncio switches Nagle's algorithm off for accepted connections: an answer that
    # follows another one would wait for the caller's delayed acknowledgement, 40 ms on Linux.
    made = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        if family == socket.AF_INET6:  # `::` takes IPv4, too, with any net.ipv6.bindv6only of the host
            made.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind(where)
        made.listen(_BACKLOG)
        made.setblocking(False)
    except OSError:
        made.close()
        raise
    return made
