"""The extender over HTTP/2: what a client that follows the protocol, breaks it or leaves gets to see."""

from __future__ import annotations

import asyncio
import datetime as dt
import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from ipaddress import IPv4Address
from pathlib import Path
from unittest.mock import patch

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from h2.errors import ErrorCodes

from kvplace.scheduler.extender_protocol import MAX_BODY
from kvplace.scheduler.http import ExtenderReply
from kvplace.scheduler.listener import ALPN_PROTOCOLS, Http2Connection, extender_listening
from kvplace.service.connections import Address
from tests.scheduler.http2_client import PSEUDO_HEADERS, Calls, Client, Wire, over_http1, over_http2

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"


async def test_a_call_is_answered_with_the_answer_of_the_route() -> None:
    calls = Calls(b'{"Error":""}')
    client = Client(calls)
    stream = client.ask(b'{"PodName":"a"}', "/v1/bind")
    await client.until_complete(stream)
    assert calls.asked == [("POST", "/v1/bind", b'{"PodName":"a"}')]
    assert (client.statuses[stream], client.bodies[stream]) == ("200", b'{"Error":""}')


async def test_calls_of_one_connection_do_not_wait_for_each_other() -> None:
    calls = Calls()
    client = Client(calls)
    calls.may_answer.clear()
    slow = client.ask(b"1")
    await calls.were_asked.wait()
    calls.were_asked.clear()
    also_slow = client.ask(b"2")
    await calls.were_asked.wait()
    assert calls.done == []
    calls.may_answer.set()
    await client.until_complete(slow, also_slow)


async def test_an_answer_larger_than_the_callers_window_comes_whole_as_the_window_opens() -> None:
    calls = Calls(bytes(range(256)) * 1000)
    client = Client(calls)
    first, second = client.ask(b"1"), client.ask(b"2")
    await client.until_complete(first, second)
    assert client.bodies == {first: calls.answer, second: calls.answer}


@pytest.mark.parametrize("complete", [True, False])
async def test_a_body_larger_than_the_limit_is_refused_and_the_connection_goes_on(*, complete: bool) -> None:
    calls = Calls()
    client = Client(calls)
    large = client.ask(bytes(MAX_BODY + (1 if complete else 100_000)))
    allowed = client.ask(bytes(MAX_BODY))
    await client.until_complete(large, allowed)
    assert client.statuses == {large: "400", allowed: "200"}
    assert b"nodeCacheCapable" in client.bodies[large]
    assert [len(body) for _, _, body in calls.asked] == [MAX_BODY]
    assert client.reset == ({} if complete else {large: ErrorCodes.NO_ERROR})


async def test_a_call_goes_on_when_its_caller_gives_up() -> None:
    calls = Calls()
    client = Client(calls)
    calls.may_answer.clear()
    stream = client.ask(b"bind", "/v1/bind")
    await calls.were_asked.wait()
    client.http.reset_stream(stream)
    client.exchange()
    calls.may_answer.set()
    other = client.ask(b"next")
    await client.until_complete(other)
    assert "/v1/bind" in calls.done


async def test_of_a_caller_that_gives_up_or_hangs_up_nothing_stays() -> None:
    calls = Calls(bytes(1 << 20))
    client = Client(calls)
    unfinished = client.http.get_next_available_stream_id()
    client.http.send_headers(unfinished, [*PSEUDO_HEADERS, (":path", "/v1/filter")])
    client.exchange()
    unread = client.ask(b"1")
    await calls.were_done.wait()
    await asyncio.gather(*client.connection._answering)
    client.exchange(acknowledge=False)
    assert client.connection._calls
    assert client.connection._unsent
    for stream in (unfinished, unread):
        client.http.reset_stream(stream)
    client.exchange()
    assert not client.connection._calls
    assert not client.connection._unsent
    client.http.close_connection()
    client.exchange()
    assert client.wire.closed


async def test_paths_that_are_missing_or_no_text_reach_the_routes_too() -> None:
    calls = Calls()
    client = Client(calls)
    odd = client.ask(b"", b"/\xff")
    connect = client.http.get_next_available_stream_id()
    client.http.send_headers(connect, [(":method", "CONNECT"), (":authority", "a")], end_stream=True)
    client.exchange()
    await client.until_complete(odd, connect)
    assert calls.asked == [("POST", "/\ufffd", b""), ("CONNECT", "", b"")]


async def test_a_call_goes_on_when_the_connection_is_lost() -> None:
    calls = Calls()
    client = Client(calls)
    calls.may_answer.clear()
    client.ask(b"bind", "/v1/bind")
    await calls.were_asked.wait()
    (answering,) = client.connection._answering
    client.connection.connection_lost(None)
    calls.may_answer.set()
    await calls.were_done.wait()
    await answering
    assert client.ended == [client.connection]


@pytest.mark.parametrize("junk", [b"GET / HTTP/1.1\r\n\r\n", b"\0" * 100, PREFACE + b"\0\0\1\4\0\0\0\0\0\0"])
async def test_who_does_not_speak_http2_is_hung_up_on(junk: bytes) -> None:
    connection = Http2Connection(Calls().as_routes, lambda _: None)
    wire = Wire()
    connection.connection_made(wire)
    connection.data_received(junk)
    assert wire.closed


async def test_the_end_waits_for_answers_that_have_been_begun() -> None:
    calls = Calls()
    client = Client(calls)
    calls.may_answer.clear()
    stream = client.ask(b"bind", "/v1/bind")
    await calls.were_asked.wait()
    finishing = asyncio.create_task(client.connection.finish())
    await asyncio.sleep(0)
    assert not finishing.done()
    calls.may_answer.set()
    await finishing
    client.exchange()
    assert client.bodies[stream] == b"yes"
    assert client.wire.closed


@pytest.mark.parametrize("leaves", [False, True], ids=["reads on", "goes away"])
async def test_the_end_waits_until_answers_are_sent_unless_the_caller_disconnects(leaves: bool) -> None:
    client = Client(Calls(bytes(100_000)))
    stream = client.ask(b"1")
    await asyncio.gather(*client.connection._answering)
    client.exchange(acknowledge=False)
    assert client.connection._unsent
    finishing = asyncio.create_task(client.connection.finish())
    for _ in range(5):  # rounds of the loop in which the end could come
        await asyncio.sleep(0)
    assert not finishing.done()
    if leaves:
        client.connection.connection_lost(None)
    else:
        client.http.increment_flow_control_window(100_000)
        client.http.increment_flow_control_window(100_000, stream)
        client.exchange()
        assert len(client.bodies[stream]) == 100_000
    await finishing
    assert client.wire.closed is not leaves


async def test_the_end_waits_for_calls_whose_bodies_become_complete_meanwhile() -> None:
    class LateIsSlow(Calls):
        late_may_answer = asyncio.Event()

        async def __call__(self, method: str, path: str, body: bytes) -> ExtenderReply:
            reply = await super().__call__(method, path, body)
            if body == b"late":
                await self.late_may_answer.wait()
            return reply

    calls = LateIsSlow()
    client = Client(calls)
    calls.may_answer.clear()
    late = client.http.get_next_available_stream_id()
    client.http.send_headers(late, [*PSEUDO_HEADERS, (":path", "/v1/bind")])
    first = client.ask(b"first")
    await calls.were_asked.wait()
    finishing = asyncio.create_task(client.connection.finish())
    await asyncio.sleep(0)
    client.http.send_data(late, b"late", end_stream=True)
    client.exchange()
    calls.may_answer.set()
    await client.until_complete(first)
    for _ in range(5):  # rounds of the loop in which the end could come
        await asyncio.sleep(0)
    assert not finishing.done()
    calls.late_may_answer.set()
    await finishing
    client.exchange()
    assert client.bodies == {first: b"yes", late: b"yes"}


async def test_a_call_that_comes_at_the_end_is_refused_as_not_begun() -> None:
    calls = Calls()
    client = Client(calls)
    calls.may_answer.clear()
    first = client.ask(b"first")
    await calls.were_asked.wait()
    finishing = asyncio.create_task(client.connection.finish())
    await asyncio.sleep(0)
    late = client.ask(b"late")
    assert client.reset == {late: ErrorCodes.REFUSED_STREAM}
    calls.may_answer.set()
    await finishing
    client.exchange()
    assert client.bodies == {first: b"yes"}
    assert [body for _, _, body in calls.asked] == [b"first"]


async def test_the_end_of_a_connection_is_reported() -> None:
    ended: list[Http2Connection] = []
    connection = Http2Connection(Calls().as_routes, ended=ended.append)
    connection.connection_lost(None)
    assert ended == [connection]


@pytest.mark.parametrize("offered", ["h2", "http/1.1", ""])
async def test_the_listener_speaks_the_protocol_of_the_handshake(offered: str, tmp_path: Path) -> None:
    calls = Calls()
    with certificates(tmp_path) as (server, client):
        if offered:
            client.set_alpn_protocols([offered])
        async with extender_listening(calls.as_routes, Address("127.0.0.1", 0), server) as (address, _):
            reader, writer = await asyncio.open_connection(
                address.host, address.port, ssl=client, server_hostname="localhost"
            )
            answered = await (over_http2 if offered == "h2" else over_http1)(reader, writer)
            writer.close()
    assert answered.endswith(b"yes")
    assert calls.asked == [("POST", "/v1/filter", b"{}")]


async def test_the_listener_forgets_a_closed_connection_and_finishes_an_open_one(tmp_path: Path) -> None:
    made: list[Http2Connection] = []
    finished: list[Http2Connection] = []
    was_lost = asyncio.Event()

    class Watched(Http2Connection):
        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            super().connection_made(transport)
            made.append(self)

        def connection_lost(self, exc: Exception | None) -> None:
            super().connection_lost(exc)
            was_lost.set()

        async def finish(self) -> None:
            finished.append(self)
            await super().finish()

    async def ask(address: Address, client: ssl.SSLContext) -> asyncio.StreamWriter:
        reader, writer = await asyncio.open_connection(
            address.host, address.port, ssl=client, server_hostname="localhost"
        )
        assert await over_http2(reader, writer) == b"yes"
        return writer

    routes, listened = Calls().as_routes, Address("127.0.0.1", 0)
    with certificates(tmp_path) as (server, client):
        client.set_alpn_protocols(["h2"])
        with patch("kvplace.scheduler.listener.Http2Connection", Watched):
            async with extender_listening(routes, listened, server) as (address, _):
                closed = await ask(address, client)
                closed.close()
                await was_lost.wait()
                stays_open = await ask(address, client)
        stays_open.close()
    assert finished == made[1:]
    assert len(made) == 2


@contextmanager
def certificates(folder: Path) -> Iterator[tuple[ssl.SSLContext, ssl.SSLContext]]:
    """Make contexts of a server and of a client that trusts it."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "localhost")])
    now = dt.datetime.now(dt.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - dt.timedelta(hours=1))
        .not_valid_after(now + dt.timedelta(hours=1))
        .add_extension(
            x509.SubjectAlternativeName(
                [x509.DNSName("localhost"), x509.IPAddress(IPv4Address("127.0.0.1"))]
            ),
            critical=False,
        )
        .sign(key, hashes.SHA256())
    )
    (folder / "tls.crt").write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    (folder / "tls.key").write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
    )
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(folder / "tls.crt", folder / "tls.key")
    server.set_alpn_protocols(list(ALPN_PROTOCOLS))
    yield server, ssl.create_default_context(cafile=str(folder / "tls.crt"))
