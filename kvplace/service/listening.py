"""Listening for HTTP/1.1: an application on an address, with or without TLS, for callers within limits.

A caller may be limited by the names in its verified certificate: a client certificate of the right CA is not
enough where that CA signs for others, too.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping
from typing import Any

from aiohttp import web

from kvplace.service.connections import Address, ConnectionLimits, Connections, accepting

_log = logging.getLogger(__name__)

GRACE_S = 10.0
"""How long the end waits for requests that have begun; longer than a bind may take."""
_LIMITS = ConnectionLimits()
_CONNECTIONS = web.RequestKey("connections", Connections)

_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@contextlib.asynccontextmanager
async def listening(
    name: str,
    application: web.Application,
    address: Address,
    tls: ssl.SSLContext | None = None,
    *,
    clients: Collection[str] = (),
    limits: ConnectionLimits = _LIMITS,
) -> AsyncIterator[Address]:
    """Serve an application while the block runs; gives the address with the port really used.

    `clients` are the names of certificates that may call; empty: all that passed the handshake. Answers the
    requests that have begun before it ends. Raises Misconfigured when the address cannot be used.
    """

    def choose(transport: asyncio.Transport) -> asyncio.Protocol | None:
        return server() if may_call(transport, clients, name) else None

    connections = Connections(name, choose, limits)
    async with (
        http1_server(application, connections, limits) as server,
        accepting(connections, address, tls) as bound,
    ):
        _log.info("%s is on %s", name, bound)
        yield bound


@contextlib.asynccontextmanager
async def http1_server(
    application: web.Application, connections: Connections, limits: ConnectionLimits
) -> AsyncIterator[web.Server]:
    """Make what serves an application over HTTP/1.1, one protocol a connection, while the block runs."""
    application.middlewares.append(_noting_complete_requests(connections))
    runner = web.AppRunner(
        application,
        access_log=None,
        keepalive_timeout=limits.idle_s,
        shutdown_timeout=GRACE_S,
        auto_decompress=False,
    )
    await runner.setup()
    assert runner.server is not None
    try:
        yield runner.server
    finally:
        await runner.cleanup()


@contextlib.asynccontextmanager
async def while_connected(request: web.Request) -> AsyncIterator[None]:
    """Give the block up as soon as the caller disconnects; a long answer would notice at its next bytes."""
    limit = asyncio.timeout(None)
    try:
        async with limit:
            with request[_CONNECTIONS].noticing_loss(request.transport, lambda: limit.reschedule(0.0)):
                yield
    except TimeoutError:
        if not limit.expired():
            raise


def _noting_complete_requests(connections: Connections) -> Callable[..., Awaitable[web.StreamResponse]]:
    @web.middleware
    async def note(request: web.Request, handler: _Handler) -> web.StreamResponse:
        # A compressed body may be a thousand times larger than what was sent; nothing needs to send one.
        if request.headers.get("Content-Encoding", "identity") != "identity":
            return web.Response(status=415, text="compressed bodies are not read\n")
        request[_CONNECTIONS] = connections
        with connections.answering(request.transport, request.content):
            try:
                return await handler(request)
            except ConnectionResetError:
                if request.transport is not None:
                    raise
                return (
                    web.Response()
                )  # the caller is gone; aiohttp would log a traceback for each caller that goes

    return note


def may_call(transport: asyncio.Transport, allowed: Collection[str], listener: str) -> bool:
    """Return whether the client of a connection has one of the allowed names; without any, all have.

    Its certificate must have been verified in this handshake, not in that of a session which it resumes.
    """
    if not allowed:
        return True
    tls = transport.get_extra_info("ssl_object")
    if tls is not None and tls.session_reused:
        _log.warning("%s refuses a client that resumes a TLS session", listener)
        return False
    names = names_of(tls.getpeercert()) if tls is not None else frozenset()
    if names.isdisjoint(allowed):
        _log.warning(
            "%s refuses a client with the certificate of %s; only %s may call it",
            listener,
            ", ".join(sorted(names)) or "no name",
            ", ".join(sorted(allowed)),
        )
        return False
    return True


def names_of(certificate: Mapping[str, Any] | None) -> frozenset[str]:
    """List the names in a verified certificate: common name, DNS names, and URIs, as SPIFFE uses them."""
    if not certificate:
        return frozenset()
    common = {value for part in certificate.get("subject", ()) for key, value in part if key == "commonName"}
    others = {value for kind, value in certificate.get("subjectAltName", ()) if kind in ("DNS", "URI")}
    return frozenset(common | others)
