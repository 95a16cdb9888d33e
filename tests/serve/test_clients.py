"""The extender answers only a client with a valid certificate of the CA that carries an allowed name."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest

from harness.certificates import Certificates
from harness.waiting import PATIENCE_S
from kvplace.serve.process import serving
from kvplace.service.connections import Address
from tests.kube.faulty_cluster import FaultyCluster
from tests.serve.extender_callers import answer, context
from tests.serve.served import settings_for

TLS = [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3]
PROTOCOLS = ["h2", "http/1.1"]


@contextlib.asynccontextmanager
async def serve(certificates: Certificates, client_ca: Path | None = None) -> AsyncIterator[Address]:
    """Serve as the manifests do: only the scheduler's name may call."""
    tls = replace(
        settings_for(certificates).tls,
        client_ca=client_ca or certificates.ours.file,
        client_names=("kvplace-scheduler",),
    )
    settings = replace(settings_for(certificates), tls=tls)
    async with serving(settings, FaultyCluster()) as addresses:
        yield addresses["extender"]


@pytest.mark.parametrize("tls", TLS)
@pytest.mark.parametrize("protocol", PROTOCOLS)
async def test_the_scheduler_is_answered(
    certificates: Certificates, protocol: str, tls: ssl.TLSVersion
) -> None:
    async with serve(certificates) as address:
        assert b"missing" in await answer(address, context(certificates, "the scheduler", tls), protocol)


@pytest.mark.parametrize("tls", TLS)
@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize(
    "client", ["no certificate", "another CA", "another name", "serve itself", "expired", "a server"]
)
async def test_no_other_client_is_answered(
    certificates: Certificates, client: str, protocol: str, tls: ssl.TLSVersion
) -> None:
    async with serve(certificates) as address:
        assert await answer(address, context(certificates, client, tls), protocol) == b""


@pytest.mark.parametrize("protocol", PROTOCOLS)
async def test_plain_http_is_not_answered(certificates: Certificates, protocol: str) -> None:
    async with serve(certificates) as address:
        assert b"200" not in await answer(address, None, protocol)


async def test_old_tls_is_not_spoken(certificates: Certificates) -> None:
    with pytest.warns(DeprecationWarning, match="TLSv1_1"):
        old = context(certificates, "the scheduler", ssl.TLSVersion.TLSv1_1)
    async with serve(certificates) as address:
        assert await answer(address, old, "http/1.1") == b""


async def test_a_refused_client_is_named_in_the_log(
    certificates: Certificates, caplog: pytest.LogCaptureFixture
) -> None:
    async with serve(certificates) as address:
        await answer(address, context(certificates, "another name"), "h2")
    assert (
        "the extender refuses a client with the certificate of somebody; only kvplace-scheduler may call it"
        in caplog.messages
    )


@pytest.fixture
def client_ca(certificates: Certificates) -> Path:
    """Give the file of the schedulers' CA, apart from the one that clients trust."""
    file = certificates.ours.folder / "client-ca.crt"
    file.write_bytes(certificates.ours.file.read_bytes())
    return file


def ask_on(connection: ssl.SSLSocket) -> bytes:
    """Ask once on an open connection; returns the status line."""
    connection.sendall(b"POST /v1/filter HTTP/1.1\r\nHost: a\r\nContent-Length: 2\r\n\r\n{}")
    return connection.recv(10_000).split(b"\r\n")[0]


async def test_after_a_change_of_the_ca_an_open_connection_goes_on_and_a_new_one_is_refused(
    certificates: Certificates, client_ca: Path
) -> None:
    old = context(certificates, "the scheduler")
    async with serve(certificates, client_ca) as address:
        connection = await asyncio.to_thread(connected, address, old, None)
        with connection:
            assert b"400" in await asyncio.to_thread(ask_on, connection)
            await asyncio.to_thread(trust_strangers, certificates, client_ca)
            async with asyncio.timeout(PATIENCE_S):
                while await answer(address, old, "http/1.1"):
                    pass
            assert b"400" in await asyncio.to_thread(ask_on, connection)


@pytest.mark.parametrize("tls", TLS)
async def test_a_session_does_not_outlive_the_ca_of_its_certificate(
    certificates: Certificates, client_ca: Path, tls: ssl.TLSVersion
) -> None:
    old = context(certificates, "the scheduler", tls)
    async with serve(certificates, client_ca) as address:
        with await asyncio.to_thread(connected, address, old, None) as connection:
            assert b"400" in await asyncio.to_thread(ask_on, connection)
            session = connection.session
        await asyncio.to_thread(trust_strangers, certificates, client_ca)
        async with asyncio.timeout(PATIENCE_S):
            while await answer(address, old, "http/1.1"):
                pass
        assert await asyncio.to_thread(ask_resuming, address, old, session) == b""


def ask_resuming(address: Address, client: ssl.SSLContext, session: ssl.SSLSession | None) -> bytes:
    """Ask on a connection that resumes a session; returns nothing if it is refused."""
    try:
        with connected(address, client, session) as connection:
            return ask_on(connection)
    except (ssl.SSLError, ConnectionError):
        return b""


def trust_strangers(certificates: Certificates, client_ca: Path) -> None:
    """Replace the schedulers' CA by another one."""
    client_ca.write_bytes(certificates.stranger.file.read_bytes())


def connected(address: Address, client: ssl.SSLContext, session: ssl.SSLSession | None) -> ssl.SSLSocket:
    """Connect, resuming a session if there is one."""
    plain = socket.create_connection((address.host, address.port), timeout=PATIENCE_S)
    try:
        return client.wrap_socket(plain, server_hostname=address.host, session=session)
    except BaseException:
        plain.close()
        raise


@pytest.mark.parametrize(
    ("pod", "namespaces", "is_answered"),
    [
        (None, ("kube-system",), True),
        ("team-a/shell", ("kube-system",), False),
        ("team-a/shell", ("kube-system", "team-a"), True),
        ("kube-system/konnectivity-agent", ("kube-system",), True),
    ],
)
async def test_admission_answers_no_pod_except_where_api_servers_call_through_pods(
    certificates: Certificates, pod: str | None, namespaces: tuple[str, ...], is_answered: bool
) -> None:
    cluster = FaultyCluster()
    cluster.addresses["127.0.0.1", False] = () if pod is None else (pod,)
    settings = replace(settings_for(certificates), admission_client_namespaces=namespaces)
    async with serving(settings, cluster) as addresses:
        answered = await answer(addresses["admission"], context(certificates, "no certificate"), "http/1.1")
        assert (answered != b"") is is_answered


async def test_a_pod_with_the_certificate_of_the_api_server_is_answered(certificates: Certificates) -> None:
    cluster = FaultyCluster()
    cluster.addresses["127.0.0.1", False] = ("hosted/kube-apiserver",)
    settings = replace(settings_for(certificates), admission_client_ca=certificates.ours.file)
    async with serving(settings, cluster) as addresses:
        assert await answer(addresses["admission"], context(certificates, "the scheduler"), "http/1.1")


async def test_admission_asks_the_api_server_for_its_certificate_where_it_is_configured_to(
    certificates: Certificates,
) -> None:
    settings = replace(
        settings_for(certificates),
        admission_client_ca=certificates.ours.file,
        admission_client_names=("kube-apiserver",),
    )
    certificates.ours.issue("kube-apiserver")
    api_server = certificates.as_client(
        (certificates.ours.folder / "kube-apiserver.crt", certificates.ours.folder / "kube-apiserver.key")
    )
    async with serving(settings, FaultyCluster()) as addresses:
        address = addresses["admission"]
        for client in ("no certificate", "another CA", "the scheduler"):
            assert await answer(address, context(certificates, client), "http/1.1") == b""
        assert b"404" in await answer(address, api_server, "http/1.1")
