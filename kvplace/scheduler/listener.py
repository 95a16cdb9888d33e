"""The listener of kube-scheduler: HTTP/2 or HTTP/1.1, as each TLS handshake negotiated (ALPN)."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import ssl
from collections.abc import AsyncIterator, Callable, Collection

from kvplace.scheduler.http import Routes, extender_application
from kvplace.scheduler.http2 import Http2Connection
from kvplace.service.connections import Address, ConnectionLimits, Connections, accepting
from kvplace.service.listening import GRACE_S, http1_server, may_call

_log = logging.getLogger(__name__)

ALPN_PROTOCOLS = ("h2", "http/1.1")
"""Protocols that the TLS context offers, best first."""
_LIMITS = ConnectionLimits()


class ExtenderListener:
    """Chooses the protocol of a new connection, and ends open ones."""

    def __init__(
        self,
        routes: Routes,
        http1: Callable[[], asyncio.Protocol],
        clients: Collection[str],
        limits: ConnectionLimits,
    ) -> None:
        """`clients` are the names that may call; empty: all that passed the handshake."""
        self._routes = routes
        self._http1 = http1
        self._clients = frozenset(clients)
        self._limits = limits
        self._http2: set[Http2Connection] = set()

    def choose(self, transport: asyncio.Transport) -> asyncio.Protocol | None:
        """Return the protocol that a connection has negotiated; None if its client may not call."""
        if not may_call(transport, self._clients, "the extender"):
            return None
        tls = transport.get_extra_info("ssl_object")
        if tls is None or tls.selected_alpn_protocol() != "h2":
            return self._http1()
        connection = Http2Connection(self._routes, ended=self._http2.discard, limits=self._limits)
        self._http2.add(connection)
        return connection

    async def finish(self) -> None:
        """Answer the calls under way over HTTP/2 and close these connections."""
        await asyncio.gather(*(connection.finish() for connection in list(self._http2)))


@contextlib.asynccontextmanager
async def extender_listening(
    routes: Routes,
    address: Address,
    tls: ssl.SSLContext | None,
    *,
    clients: Collection[str] = (),
    limits: ConnectionLimits = _LIMITS,
) -> AsyncIterator[tuple[Address, Connections]]:
    """Listen while the block runs; gives the address with the port that is used, and the connections.

    Answers the requests under way before it ends. Raises Misconfigured if the address cannot be used.
    """

    def choose(transport: asyncio.Transport) -> asyncio.Protocol | None:
        return listener.choose(transport)

    connections = Connections("extender", choose, limits)
    async with http1_server(extender_application(routes), connections, limits) as http1:
        listener = ExtenderListener(routes, http1, clients, limits)
        try:
            async with accepting(connections, address, tls) as bound:
                _log.info("extender is on %s", bound)
                yield bound, connections
        finally:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(GRACE_S):
                    await listener.finish()
