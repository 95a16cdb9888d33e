"""The sockets of a session, kept so that none outlives it.

aiohttp closes the connections that it has been given. A request that is cancelled during its TLS handshake
leaves its connection to asyncio alone, which waits for a TLS shutdown for up to 30 s, or forgets it when the
handshake was about to begin (`SSLProtocol._start_shutdown`). Sockets that are opened here can be closed then,
too.
"""

from __future__ import annotations

import asyncio
import socket
from contextlib import suppress
from typing import Any
from weakref import WeakSet

_LAST_ROUNDS = 100
"""Rounds of the loop for closing sockets; a few are enough."""


class Sockets:
    """Opens sockets, as aiohttp's `socket_factory`, and closes the remaining ones."""

    def __init__(self) -> None:
        self._opened: WeakSet[socket.socket] = WeakSet()

    def open(self, address: tuple[Any, Any, int, str, Any]) -> socket.socket:
        """Make a socket that notices a half-open connection within about a minute.

        `address` is an entry of `socket.getaddrinfo`.
        """
        family, kind, protocol, _, _ = address
        made = socket.socket(family, kind, protocol)
        self._opened.add(made)
        made.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in (("TCP_KEEPIDLE", 30), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 3)):
            if hasattr(socket, option):
                made.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
        return made

    async def hang_up(self) -> None:
        """End every connection that is still open, without a TLS shutdown.

        At the end of its stream a transport closes itself and its socket, whatever it was waiting for.
        """
        for left in self._still_open():
            with suppress(OSError):
                left.shutdown(socket.SHUT_RDWR)
        for _ in range(_LAST_ROUNDS):
            if not self._still_open():
                return
            await asyncio.sleep(0)

    def _still_open(self) -> list[socket.socket]:
        return [opened for opened in self._opened if opened.fileno() != -1]
