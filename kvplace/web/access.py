"""Access to the map: requests with the secret path of this run, for a host name of this machine.

Every user of a machine can connect to 127.0.0.1. So all pages are below a path that cannot be guessed, and a
request without it gets nothing. A page of another site can send its reader's browser to 127.0.0.1 by a DNS
name of its own (DNS rebinding), and could then read the answers. Such a request has that name in its Host
header. So only `localhost` and loopback addresses are accepted there.
"""

from __future__ import annotations

import hmac
import ipaddress
import secrets
from collections.abc import Awaitable, Callable
from urllib.parse import urlsplit

from aiohttp import web
from aiohttp.typedefs import Middleware

from kvplace.core.errors import BadBody, Forbidden

_SECRET_BYTES = 24
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def new_secret() -> str:
    """Make the secret of one run, fit for a path."""
    return secrets.token_urlsafe(_SECRET_BYTES)


def only_for_holders(secret: str) -> Middleware:
    """Make the middleware that refuses requests without the secret, for another host, or with a body.

    An empty secret lets every request for this machine pass: a proxy before the map decides then.
    """

    @web.middleware
    async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
        if not is_this_machine(request.headers.get("Host", "")):
            raise Forbidden("the map answers only requests for localhost or 127.0.0.1")
        given = request.path.split("/", 2)[1]
        if secret and not hmac.compare_digest(given.encode(), secret.encode()):
            raise Forbidden("this is not the URL that `kvplace web` printed; each run has its own")
        if request.body_exists:
            raise BadBody("requests of the map have no body")
        return await handler(request)

    return check


def is_this_machine(host: str) -> bool:
    """Return whether a Host header names this machine, on any port: an SSH tunnel may change it."""
    try:
        name = urlsplit(f"//{host}").hostname or ""
        return name == "localhost" or ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False
