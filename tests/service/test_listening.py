"""Listeners: their addresses, certificates that follow their files, and the end of a certificate."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import socket
import ssl
from collections.abc import AsyncIterator
from contextlib import closing
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from cryptography import x509
from cryptography.hazmat.primitives import serialization
from hypothesis import given
from hypothesis import strategies as st

from harness.certificates import Certificates
from harness.waiting import PATIENCE_S
from kvplace.core.errors import Misconfigured
from kvplace.service.connections import Address, listening_socket
from kvplace.service.listening import RenewedTls, TlsFiles, certificate_end, listening
from kvplace.service.process import in_background


@contextlib.asynccontextmanager
async def greeting(tls: RenewedTls) -> AsyncIterator[int]:
    """Greet everybody who may connect; gives the port."""

    async def greet(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"hello")
        writer.close()

    async with await asyncio.start_server(greet, "127.0.0.1", 0, ssl=tls.context) as server:
        yield server.sockets[0].getsockname()[1]


async def serial_shown(port: int, context: ssl.SSLContext) -> int | None:
    """Serial number of the certificate that the server shows; None when it refuses the client.

    In TLS 1.3 a refusal comes only with the first read.
    """
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context)
    except (ssl.SSLError, ConnectionError):
        return None
    try:
        shown = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
        return x509.load_der_x509_certificate(shown).serial_number if await reader.read() else None
    except (ssl.SSLError, ConnectionError):
        return None
    finally:
        writer.close()


async def test_a_renewed_certificate_is_shown_to_the_next_caller_without_a_restart(
    certificates: Certificates,
) -> None:
    client = certificates.as_client(None)
    tls = RenewedTls(TlsFiles(*certificates.serve))
    async with greeting(tls) as port:
        before = await serial_shown(port, client)
        certificates.ours.issue("serve")
        assert tls.renew()
        after = await serial_shown(port, client)
    assert None not in (before, after)
    assert before != after
    assert not tls.renew()


@pytest.mark.parametrize("broken", [0, 1], ids=["certificate", "key"])
async def test_a_broken_file_leaves_the_old_certificate_in_use_until_it_is_repaired(
    certificates: Certificates, broken: int, caplog: pytest.LogCaptureFixture
) -> None:
    client = certificates.as_client(None)
    tls = RenewedTls(TlsFiles(*certificates.serve))
    async with greeting(tls) as port:
        before = await serial_shown(port, client)
        good = [file.read_bytes() for file in certificates.ours.issue("serve")]
        certificates.serve[broken].write_text("half a file")
        assert not tls.renew()
        assert await serial_shown(port, client) == before is not None
        assert f"the old certificates stay in use: TLS certificate {certificates.serve[0]}" in caplog.text
        certificates.serve[broken].write_bytes(good[broken])
        assert tls.renew()
        assert await serial_shown(port, client) not in (None, before)


async def test_a_missing_file_leaves_the_old_certificate_in_use(certificates: Certificates) -> None:
    client = certificates.as_client(None)
    tls = RenewedTls(TlsFiles(*certificates.serve))
    async with greeting(tls) as port:
        before = await serial_shown(port, client)
        certificates.serve[1].unlink()
        assert not tls.renew()
        assert await serial_shown(port, client) == before is not None


async def test_a_file_that_goes_while_it_is_loaded_leaves_the_old_certificate_in_use(
    certificates: Certificates, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = certificates.as_client(None)
    tls = RenewedTls(TlsFiles(*certificates.serve))

    def is_gone(path: Path) -> bytes:
        raise FileNotFoundError(2, "No such file or directory", str(path))

    async with greeting(tls) as port:
        before = await serial_shown(port, client)
        certificates.ours.issue("serve")
        with monkeypatch.context() as gone:
            gone.setattr(Path, "read_bytes", is_gone)
            assert not tls.renew()
        assert await serial_shown(port, client) == before
        assert tls.renew()
        assert await serial_shown(port, client) not in (None, before)


async def test_changed_files_are_noticed_while_we_run(certificates: Certificates) -> None:
    client = certificates.as_client(None)
    tls = RenewedTls(TlsFiles(*certificates.serve, check_every_s=0.01))
    async with greeting(tls) as port, in_background(tls.keep_renewed()):
        before = await serial_shown(port, client)
        certificates.ours.issue("serve")
        async with asyncio.timeout(PATIENCE_S):
            while await serial_shown(port, client) == before:
                pass


async def test_a_replaced_client_ca_admits_its_clients_and_no_longer_those_of_the_old_one(
    certificates: Certificates, tmp_path: Path
) -> None:
    client_ca = tmp_path / "client-ca.crt"
    client_ca.write_bytes(certificates.ours.file.read_bytes())
    tls = RenewedTls(TlsFiles(*certificates.serve, client_ca))
    ours = certificates.as_client(certificates.client)
    strangers = certificates.as_client(certificates.stranger.issue("other-client"))
    async with greeting(tls) as port:
        assert await serial_shown(port, ours)
        assert not await serial_shown(port, strangers)
        client_ca.write_bytes(certificates.stranger.file.read_bytes())
        assert tls.renew()
        assert not await serial_shown(port, ours)
        assert await serial_shown(port, strangers)


@pytest.mark.parametrize("broken", ["serve.crt", "serve.key", "ours.crt"])
def test_a_file_that_cannot_be_used_is_named_at_the_start(certificates: Certificates, broken: str) -> None:
    (certificates.ours.folder / broken).write_text("nonsense")
    with pytest.raises(Misconfigured, match=f"{broken}.* cannot be used"):
        RenewedTls(TlsFiles(*certificates.serve, certificates.ours.file))


def test_an_encrypted_key_is_refused_and_no_user_is_asked_for_its_passphrase(
    certificates: Certificates,
) -> None:
    certificate, key = certificates.serve
    plain = serialization.load_pem_private_key(key.read_bytes(), None)
    key.write_bytes(
        plain.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.BestAvailableEncryption(b"secret"),
        )
    )
    with pytest.raises(Misconfigured, match=f"with key {key} cannot be used"):
        RenewedTls(TlsFiles(certificate, key))


def test_the_end_is_that_of_the_certificate_that_ends_first(certificates: Certificates) -> None:
    leaf, authority = certificates.serve[0].read_bytes(), certificates.ours.file.read_bytes()
    expected = [x509.load_pem_x509_certificate(one).not_valid_after_utc for one in (leaf, authority)]
    assert [certificate_end(leaf), certificate_end(authority)] == expected
    assert certificate_end(leaf + authority) == min(expected)


@given(st.binary())
def test_bytes_that_are_not_a_certificate_have_no_end(junk: bytes) -> None:
    assert certificate_end(junk) is None
    framed = b"-----BEGIN CERTIFICATE-----" + junk + b"-----END CERTIFICATE-----"
    assert certificate_end(framed) is None


@given(st.data())
def test_a_certificate_that_is_cut_off_or_disturbed_does_no_harm(data: st.DataObject) -> None:
    import base64

    der = data.draw(st.binary(min_size=1, max_size=400))
    certificate_end(
        b"-----BEGIN CERTIFICATE-----\n" + base64.b64encode(der) + b"\n-----END CERTIFICATE-----\n"
    )


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
