"""Callers that are slow, many or greedy lose their connections; the others are served as before."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, replace

import pytest
from aiohttp import web

from harness.certificates import Certificates
from harness.waiting import PATIENCE_S
from kvplace.core.errors import Misconfigured
from kvplace.service.connections import Address, ConnectionLimits
from kvplace.service.listening import RenewedTls, TlsFiles, listening
from kvplace.service.process import CUT_CONNECTIONS

SHORT = ConnectionLimits(connections=4, handshake_s=0.2, request_s=0.2, idle_s=60, unread_bytes=200_000)
REQUEST = b"POST /echo HTTP/1.1\r\nHost: a\r\nContent-Length: 2\r\n\r\n{}"


@dataclass
class Caller:
    """One connection to the listener."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    async def ask(self, request: bytes = REQUEST) -> bytes:
        """Send a request; returns the status line of the answer, empty if the connection was cut."""
        self.writer.write(request)
        return await self.answered()

    async def answered(self) -> bytes:
        """Wait for an answer; returns its status line, empty if the connection was cut."""
        with contextlib.suppress(ConnectionError):
            head = await self.reader.readuntil(b"\r\n\r\n")
            length = next(
                int(line[15:]) for line in head.split(b"\r\n") if line.startswith(b"Content-Length:")
            )
            await self.reader.readexactly(length)
            return head.split(b"\r\n")[0]
        return b""

    async def is_cut(self) -> bool:
        """Wait until the connection is closed by the other side."""
        with contextlib.suppress(ConnectionError):
            async with asyncio.timeout(PATIENCE_S):
                while await self.reader.read(1 << 16):
                    pass
        return True


class Listener:
    """Where /echo, /large and /later are served, and who called."""

    def __init__(self) -> None:
        self.address = Address("127.0.0.1", 0)
        self.is_asked = asyncio.Event()
        """Set when /later is asked for."""
        self.may_answer = asyncio.Event()
        """Lets /later answer."""
        self.is_given_up = asyncio.Event()
        """Set when an answer of /later is given up."""
        self._callers: list[Caller] = []

    async def call(self) -> Caller:
        """Open a connection."""
        made = Caller(*await asyncio.open_connection(self.address.host, self.address.port))
        self._callers.append(made)
        return made

    async def until_answered(self) -> None:
        """Call until there is room for one more."""
        async with asyncio.timeout(PATIENCE_S):
            answered = b""
            while not answered:
                with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
                    answered = await (await self.call()).ask()

    async def hang_up(self) -> None:
        """Close every connection that is still open."""
        for caller in self._callers:
            caller.writer.transport.abort()
        await asyncio.sleep(0)


@contextlib.asynccontextmanager
async def served(
    limits: ConnectionLimits = SHORT,
    tls: RenewedTls | None = None,
    may_connect: Callable[[str], Awaitable[bool]] | None = None,
) -> AsyncIterator[Listener]:
    """Serve /echo, which answers with the body, /large, with more than a socket holds, and /later."""
    listener = Listener()

    async def echo(request: web.Request) -> web.Response:
        return web.Response(body=await request.read())

    async def large(_: web.Request) -> web.Response:
        return web.Response(body=bytes(64 << 20))

    async def later(request: web.Request) -> web.Response:
        await request.read()
        listener.is_asked.set()
        try:
            await listener.may_answer.wait()
        except asyncio.CancelledError:
            listener.is_given_up.set()
            raise
        return web.Response()

    application = web.Application(client_max_size=1 << 20)
    application.add_routes(
        [
            web.post("/echo", echo),
            web.get("/large", large),
            web.get("/later", later),
            web.post("/later", later),
        ]
    )
    context = tls.context if tls is not None else None
    async with listening(
        "test", application, listener.address, context, may_connect=may_connect, limits=limits
    ) as address:
        listener.address = address
        try:
            yield listener
        finally:
            await listener.hang_up()


def cuts(why: str) -> float:
    return float(CUT_CONNECTIONS.labels("test", why)._value.get())


@pytest.mark.parametrize(
    "beginning",
    [
        b"",
        b"POST /echo HTTP/1.1\r\nHost: a\r\nX-",
        b"POST /echo HTTP/1.1\r\nHost: a\r\nContent-Length: 10\r\n\r\n{",
        b"POST /echo HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nab",
    ],
    ids=["silence", "headers", "body", "chunk"],
)
async def test_a_request_that_does_not_become_complete_is_cut_off(beginning: bytes) -> None:
    before = cuts("slow")
    async with served() as listener:
        slow, quick = await listener.call(), await listener.call()
        slow.writer.write(beginning)
        assert await quick.ask() == b"HTTP/1.1 200 OK"
        assert await slow.is_cut()
        assert (await (await listener.call()).ask()).endswith(b"200 OK")
    assert cuts("slow") >= before + 1


async def test_dripping_bytes_do_not_keep_an_incomplete_request_alive() -> None:
    async with served() as listener:
        slow = await listener.call()
        slow.writer.write(b"POST /echo HTTP/1.1\r\n")
        cut = asyncio.create_task(slow.is_cut())
        dripped = 0
        while not cut.done():
            with contextlib.suppress(ConnectionError):
                slow.writer.write(b"X-%d: a\r\n" % dripped)
            dripped += 1
            await asyncio.sleep(0.02)
        assert dripped > 2


async def test_between_requests_a_connection_may_rest() -> None:
    async with served() as listener:
        caller = await listener.call()
        assert await caller.ask() == b"HTTP/1.1 200 OK"
        await asyncio.sleep(3 * SHORT.request_s)
        assert await caller.ask() == b"HTTP/1.1 200 OK"


async def test_a_client_with_another_call_while_an_answer_is_made_is_not_taken_for_slow() -> None:
    async with served() as listener:
        caller = await listener.call()
        caller.writer.write(b"GET /later HTTP/1.1\r\nHost: a\r\n\r\n")
        await listener.is_asked.wait()
        caller.writer.write(REQUEST)
        await asyncio.sleep(3 * SHORT.request_s)
        listener.may_answer.set()
        assert await caller.ask(b"") == b"HTTP/1.1 200 OK"
        assert await caller.ask(b"") == b"HTTP/1.1 200 OK"


async def test_the_next_request_must_become_complete_in_time_after_an_answer() -> None:
    async with served() as listener:
        caller = await listener.call()
        caller.writer.write(b"GET /later HTTP/1.1\r\nHost: a\r\n\r\n")
        await listener.is_asked.wait()
        caller.writer.write(REQUEST[:-1])
        listener.may_answer.set()
        assert await caller.ask(b"") == b"HTTP/1.1 200 OK"
        assert await caller.is_cut()


async def test_who_does_not_take_his_answer_is_cut_off() -> None:
    before = cuts("slow")
    async with served() as listener:
        deaf = await listener.call()
        deaf.writer.write(b"GET /large HTTP/1.1\r\nHost: a\r\n\r\n")
        async with asyncio.timeout(PATIENCE_S):
            while cuts("slow") == before:  # noqa: ASYNC110
                await asyncio.sleep(0.02)  # a counter has no event


async def test_more_connections_than_the_limit_are_closed_at_once_and_room_is_made_again() -> None:
    before = cuts("full")
    async with served(ConnectionLimits(connections=2)) as listener:
        first, second = await listener.call(), await listener.call()
        assert await first.ask() == await second.ask() == b"HTTP/1.1 200 OK"
        assert await (await listener.call()).is_cut()
        first.writer.close()
        await listener.until_answered()
    assert cuts("full") > before


async def test_a_handshake_that_does_not_end_is_given_up_and_counts_as_a_connection(
    certificates: Certificates,
) -> None:
    before = cuts("handshake")
    # All have called before the first one is given up.
    limits = replace(SHORT, handshake_s=3.0)
    async with served(limits, RenewedTls(TlsFiles(*certificates.serve))) as listener:
        callers = [await listener.call() for _ in range(SHORT.connections + 1)]
        assert await callers[-1].is_cut()
        for caller in callers:
            assert await caller.is_cut()
    assert cuts("handshake") == before + SHORT.connections


async def test_a_client_whose_address_may_not_connect_gets_no_handshake(certificates: Certificates) -> None:
    async def refuse(host: str) -> bool:
        assert host == "127.0.0.1"
        return False

    before, handshakes = cuts("client"), cuts("handshake")
    limits = replace(SHORT, handshake_s=PATIENCE_S)
    async with served(limits, RenewedTls(TlsFiles(*certificates.serve)), refuse) as listener:
        for _ in range(SHORT.connections + 3):
            assert await (await listener.call()).is_cut()
    assert (cuts("client") - before, cuts("handshake")) == (SHORT.connections + 3, handshakes)


async def test_an_open_connection_ends_when_its_address_may_not_connect_any_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("kvplace.service.connections._ASK_AGAIN_S", 0.02)
    may = True

    async def tells(host: str) -> bool:
        return may

    async with served(may_connect=tells) as listener:
        caller = await listener.call()
        assert await caller.ask() == b"HTTP/1.1 200 OK"
        may = False
        assert await caller.is_cut()


async def test_plain_http_is_not_answered_where_tls_is_spoken(certificates: Certificates) -> None:
    async with served(SHORT, RenewedTls(TlsFiles(*certificates.serve))) as listener:
        caller = await listener.call()
        caller.writer.write(REQUEST)
        assert b"200" not in await caller.reader.read(100)


async def test_incomplete_bodies_together_stay_below_the_limit_of_bytes() -> None:
    before = cuts("bytes")
    head = b"POST /echo HTTP/1.1\r\nHost: a\r\nContent-Length: 900000\r\n\r\n"
    async with served(ConnectionLimits(unread_bytes=200_000)) as listener:
        callers = [await listener.call() for _ in range(4)]
        for caller in callers:
            caller.writer.write(head + bytes(80_000))
        async with asyncio.timeout(PATIENCE_S):
            while cuts("bytes") == before:  # noqa: ASYNC110
                await asyncio.sleep(0.01)  # a counter has no event
        for caller in callers:
            caller.writer.transport.abort()
        await listener.until_answered()  # what was cut off no longer counts


LARGE = b"POST /later HTTP/1.1\r\nHost: a\r\nContent-Length: 80000\r\n\r\n" + bytes(80_000)


async def test_large_requests_that_wait_give_way_to_each_other_and_to_usual_ones() -> None:
    before = cuts("bytes")
    usual = b"POST /echo HTTP/1.1\r\nHost: a\r\nContent-Length: 30000\r\n\r\n" + bytes(30_000)
    async with served(ConnectionLimits(unread_bytes=200_000)) as listener:
        waiting = []
        for _ in range(2):
            listener.is_asked.clear()
            waiting.append(await listener.call())
            waiting[-1].writer.write(LARGE)
            await listener.is_asked.wait()
        assert await (await listener.call()).ask(usual) == b"HTTP/1.1 200 OK"
        assert cuts("bytes") == before
        beginning = LARGE[:-10_000]
        third = await listener.call()
        third.writer.write(beginning)
        assert await waiting[0].is_cut()
        assert await (await listener.call()).ask(usual) == b"HTTP/1.1 200 OK"
        assert cuts("bytes") == before + 1
        third.writer.write(LARGE[len(beginning) :])
        listener.may_answer.set()
        assert await third.answered() == await waiting[1].answered() == b"HTTP/1.1 200 OK"


async def test_the_work_for_a_caller_that_has_gone_ends_and_its_bytes_do_not_count() -> None:
    before = cuts("bytes")
    async with served(ConnectionLimits(unread_bytes=100_000)) as listener:
        for _ in range(5):
            listener.is_asked.clear()
            listener.is_given_up.clear()
            caller = await listener.call()
            caller.writer.write(LARGE)
            await listener.is_asked.wait()
            caller.writer.transport.abort()
            await listener.is_given_up.wait()
        assert cuts("bytes") == before


@pytest.mark.parametrize(
    ("request_", "status"),
    [
        (b"POST /echo HTTP/1.1\r\nHost: a\r\nX: " + b"a" * 20_000 + b"\r\n\r\n", b"400"),
        (b"POST /echo HTTP/1.1\r\nHost: a\r\n" + b"X: a\r\n" * 1000 + b"\r\n", b"400"),
        (b"POST /" + b"a" * 20_000 + b" HTTP/1.1\r\nHost: a\r\n\r\n", b"400"),
        (b"POST /echo HTTP/1.1\r\nHost: a\r\nContent-Length: 2000000\r\n\r\n" + bytes(2_000_000), b"413"),
    ],
    ids=["long header", "many headers", "long path", "large body"],
)
async def test_requests_beyond_the_limits_are_refused(request_: bytes, status: bytes) -> None:
    async with served(ConnectionLimits()) as listener:
        caller = await listener.call()
        caller.writer.write(request_)
        assert status in await caller.reader.readline()


async def test_a_compressed_body_is_not_unpacked() -> None:
    body = gzip.compress(bytes(100 << 20))
    head = b"POST /echo HTTP/1.1\r\nHost: a\r\nContent-Encoding: gzip\r\nContent-Length: %d\r\n\r\n" % len(
        body
    )
    async with served(ConnectionLimits()) as listener:
        caller = await listener.call()
        caller.writer.write(head + body)
        assert b"415" in await caller.reader.readline()


@pytest.mark.parametrize(
    ("text", "address"),
    [("0.0.0.0:8443", Address("0.0.0.0", 8443)), ("[::1]:0", Address("::1", 0)), (":80", Address("", 80))],
)
def test_an_address_is_read_and_written_alike(text: str, address: Address) -> None:
    assert Address.parse(text) == address
    assert str(address) == text


@pytest.mark.parametrize(
    "text",
    ["8443", "host:", "host:99999", "host:x", "host:²", "", "fd00::1", ":::80", "[::1:80", "[host]:80"],
)
def test_an_invalid_address_is_named_with_an_example(text: str) -> None:
    with pytest.raises(Misconfigured, match=re.escape(f"'{text}' is not an address; write HOST:PORT")):
        Address.parse(text)
