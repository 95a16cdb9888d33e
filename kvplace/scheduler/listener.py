"""Where kube-scheduler connects: HTTP/2 or HTTP/1.1, as the TLS handshake of each connection agreed."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator

from aiohttp import web

from kvplace.scheduler.http import Routes, extender_application
from kvplace.scheduler.http2 import Http2Connection

ALPN_PROTOCOLS = ("h2", "http/1.1")
"""What the TLS context of the listener offers, best first."""


class _Agreed(asyncio.Protocol):
    """Hands a new connection to the protocol that its TLS handshake agreed on."""

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
        """Answer what has begun and hang up."""
        await asyncio.gather(*(connection.finish() for connection in list(self._http2)))


@contextlib.asynccontextmanager
async def listening(
    routes: Routes,
    host: str,
    port: int,
    tls: ssl.SSLContext | None,
    *,
    keep_alive_s: float,
    patience_s: float,
) -> AsyncIterator[tuple[str, int]]:
    """Listen while the block runs; enters with the address, and answers what has begun before it ends.

    Raises OSError when the address cannot be had. `patience_s` bounds the wait at the end.
    """
    runner = web.AppRunner(
        extender_application(routes),
        access_log=None,
        keepalive_timeout=keep_alive_s,
        shutdown_timeout=patience_s,
    )
    await runner.setup()
    try:
        assert runner.server is not None
        listener = _Listener(routes, runner.server)
        server = await asyncio.get_running_loop().create_server(
            lambda: _Agreed(listener), host, port, ssl=tls, backlog=128
        )
        try:
            bound, number = server.sockets[0].getsockname()[:2]
            yield bound, number
        finally:
            server.close()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(patience_s):
                    await listener.finish()
    finally:
        await runner.cleanup()
