"""The listener of kube-scheduler: HTTP/2 or HTTP/1.1, as each TLS handshake negotiated (ALPN)."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import ssl
from collections.abc import AsyncIterator

from aiohttp import web

from kvplace.scheduler.http import Routes, extender_application
from kvplace.scheduler.http2 import Http2Connection
from kvplace.service.listening import GRACE_S, make_runner, naming
from kvplace.service.settings import Address

_log = logging.getLogger(__name__)

ALPN_PROTOCOLS = ("h2", "http/1.1")
"""Protocols that the TLS context offers, best first."""


class _Negotiated(asyncio.Protocol):
    """Hands a new connection to the protocol that its TLS handshake negotiated."""

    def __init__(self, listener: _Listener) -> None:
        self._listener = listener

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        tls = transport.get_extra_info("ssl_object")
        is_http2 = tls is not None and tls.selected_alpn_protocol() == "h2"
        chosen = self._listener.http2() if is_http2 else self._listener.http1()
        transport.set_protocol(chosen)
        chosen.connection_made(transport)


class _Listener:
    def __init__(self, routes: Routes, http1: web.Server) -> None:
        self._routes = routes
        self._http2: set[Http2Connection] = set()
        self.http1 = http1

    def http2(self) -> Http2Connection:
        connection = Http2Connection(self._routes, ended=self._http2.discard)
        self._http2.add(connection)
        return connection

    async def finish(self) -> None:
        """Answer the calls under way and close the connections."""
        await asyncio.gather(*(connection.finish() for connection in list(self._http2)))


@contextlib.asynccontextmanager
async def extender_listening(
    routes: Routes, address: Address, tls: ssl.SSLContext | None
) -> AsyncIterator[Address]:
    """Listen while the block runs; yields the address with the port that is used.

    Answers the requests under way before it ends. Raises Misconfigured if the address cannot be used.
    """
    runner = make_runner(extender_application(routes))
    await runner.setup()
    try:
        assert runner.server is not None
        listener = _Listener(routes, runner.server)
        with naming(address):
            server = await asyncio.get_running_loop().create_server(
                lambda: _Negotiated(listener), address.host, address.port, ssl=tls, backlog=128
            )
        try:
            bound = Address(*server.sockets[0].getsockname()[:2])
            _log.info("extender is on %s", bound)
            yield bound
        finally:
            server.close()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(GRACE_S):
                    await listener.finish()
    finally:
        await runner.cleanup()
