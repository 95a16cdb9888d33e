"""On which addresses a listener is reached, with IPv4, with IPv6 and on a kernel that has no IPv6."""

from __future__ import annotations

import asyncio
import errno
import socket
from contextlib import closing
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from kvplace.core.errors import Misconfigured
from kvplace.service.connections import Address, listening_socket
from kvplace.service.listening import listening

OF_BOTH_FAMILIES = ["127.0.0.1", "::1"]


async def reached_at(address: Address, hosts: list[str]) -> list[str]:
    """Listen on an address, and return the hosts at which /hello answers."""

    async def hello(_: web.Request) -> web.Response:
        return web.Response(text="hello")

    application = web.Application()
    application.add_routes([web.get("/hello", hello)])
    found = []
    async with listening("test", application, address) as bound, aiohttp.ClientSession() as session:
        for host in hosts:
            try:
                async with session.get(f"http://{Address(host, bound.port)}/hello") as answer:
                    assert await answer.text() == "hello"
                    found.append(host)
            except aiohttp.ClientConnectorError:
                pass
    return found


@pytest.fixture
def no_ipv6(monkeypatch: pytest.MonkeyPatch) -> None:
    """Answer as a kernel does that was started with ipv6.disable=1."""
    make = socket.socket.__init__

    def make_but_not_ipv6(self: socket.socket, family: int = -1, *rest: Any, **named: Any) -> None:
        if family == socket.AF_INET6:
            raise OSError(errno.EAFNOSUPPORT, "Address family not supported by protocol")
        make(self, family, *rest, **named)

    monkeypatch.setattr(socket.socket, "__init__", make_but_not_ipv6)


@pytest.mark.parametrize("text", [":0", "[::]:0"])
async def test_all_addresses_are_those_of_both_families(text: str) -> None:
    assert await reached_at(Address.parse(text), OF_BOTH_FAMILIES) == OF_BOTH_FAMILIES


@pytest.mark.parametrize("host", OF_BOTH_FAMILIES)
async def test_a_listener_on_one_address_is_reached_there_only(host: str) -> None:
    assert await reached_at(Address(host, 0), OF_BOTH_FAMILIES) == [host]


async def test_ipv4_alone_can_be_asked_for() -> None:
    assert await reached_at(Address.parse("0.0.0.0:0"), OF_BOTH_FAMILIES) == ["127.0.0.1"]


async def test_without_ipv6_in_the_kernel_all_addresses_are_those_of_ipv4(no_ipv6: None) -> None:
    assert await reached_at(Address.parse(":0"), ["127.0.0.1"]) == ["127.0.0.1"]


@pytest.mark.parametrize("host", ["0.0.0.0", "::1"])
async def test_a_port_that_one_family_uses_already_is_not_taken_for_the_other_alone(host: str) -> None:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with closing(socket.create_server((host, 0), family=family)) as taken:
        address = Address("", taken.getsockname()[1])
        with pytest.raises(Misconfigured, match=f"cannot listen on {address}: Address already in use"):
            await reached_at(address, [])


@pytest.mark.parametrize("host", ["127.0.0.1", ""])
async def test_an_answer_does_not_wait_until_the_one_before_it_is_acknowledged(host: str) -> None:
    """Nagle's algorithm would hold it back: kube-scheduler gets many small ones over one connection."""
    loop = asyncio.get_running_loop()
    with closing(await listening_socket(Address(host, 0))) as listener:
        _, caller = await asyncio.open_connection("127.0.0.1", listener.getsockname()[1])
        accepted, _ = await loop.sock_accept(listener)
        transport, _ = await loop.connect_accepted_socket(asyncio.Protocol, accepted)
        assert transport.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        transport.close()
        caller.close()
        await caller.wait_closed()
