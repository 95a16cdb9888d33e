"""The socket of a listener, on one address or on all addresses of the host.

An address without a host means all: IPv6 and IPv4 on one socket, as Go programs do it, so that the same
default works in clusters with either family or both. A kernel without IPv6 gets an IPv4 socket.
"""

from __future__ import annotations

import asyncio
import errno
import socket

from kvplace.core.errors import Misconfigured
from kvplace.service.settings import Address

_BACKLOG = 128
_NO_IPV6 = {errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL}
"""The answer of a kernel with ipv6.disable=1, or without an IPv6 address to bind."""


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
    # With the protocol named, asyncio switches Nagle's algorithm off for what is accepted: an answer that
    # follows another one would wait for the caller's delayed acknowledgement, 40 ms on Linux.
    made = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        if family == socket.AF_INET6:  # `::` takes IPv4, too, whatever the host's net.ipv6.bindv6only states
            made.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind(where)
        made.listen(_BACKLOG)
        made.setblocking(False)
    except OSError:
        made.close()
        raise
    return made
