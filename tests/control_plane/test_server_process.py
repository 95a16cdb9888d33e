"""The port of a server is its own before it listens, while it does, and between two starts."""

from __future__ import annotations

import asyncio
import socket
from contextlib import closing

import pytest

from harness.control_plane.server_process import reserve_port


async def test_a_server_listens_on_the_port_that_is_reserved_for_it_again_and_again() -> None:
    async def greet(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"here")
        writer.close()

    reservation, port = reserve_port()
    with closing(reservation):
        for _ in range(2):
            async with await asyncio.start_server(greet, "127.0.0.1", port):
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
                assert await reader.read() == b"here"
                writer.close()
                await writer.wait_closed()
            with pytest.raises(ConnectionRefusedError):
                await asyncio.open_connection("127.0.0.1", port)


def test_no_other_client_is_given_a_reserved_port() -> None:
    reservation, port = reserve_port()
    with closing(reservation), closing(socket.socket()) as other, pytest.raises(OSError, match="in use"):
        other.bind(("127.0.0.1", port))
