"""Listening for HTTP: an application on an address, with or without TLS."""

from __future__ import annotations

import contextlib
import logging
import ssl
from collections.abc import AsyncIterator, Iterator

from aiohttp import web

from kvplace.core.errors import Misconfigured
from kvplace.service.settings import Address

_log = logging.getLogger(__name__)

KEEP_ALIVE_S = 300.0
"""Closing an idle connection of kube-scheduler or the API server costs them a TLS handshake."""
GRACE_S = 10.0
"""How long the end waits for requests that have begun; longer than a bind may take."""


@contextlib.asynccontextmanager
async def listening(
    name: str, application: web.Application, address: Address, tls: ssl.SSLContext | None = None
) -> AsyncIterator[Address]:
    """Serve an application while the block runs; gives the address with the port really used.

    Answers the requests that have begun before it ends. Raises Misconfigured when the address cannot be used.
    """
    runner = make_runner(application)
    await runner.setup()
    try:
        with naming(address):
            await web.TCPSite(runner, address.host, address.port, ssl_context=tls).start()
        bound = Address(*runner.addresses[0][:2])
        _log.info("%s is on %s", name, bound)
        yield bound
    finally:
        await runner.cleanup()


def make_runner(application: web.Application) -> web.AppRunner:
    """Make a runner that keeps connections open and lets requests finish."""
    return web.AppRunner(
        application, access_log=None, keepalive_timeout=KEEP_ALIVE_S, shutdown_timeout=GRACE_S
    )


@contextlib.contextmanager
def naming(address: Address) -> Iterator[None]:
    """Turn the failure to listen into Misconfigured that names the address."""
    try:
        yield
    except OSError as error:
        raise Misconfigured(f"cannot listen on {address}: {error.strerror or error}") from None
