"""Who may call what: client certificates for the extender, TLS for admission, renewed while we run."""

from __future__ import annotations

import asyncio
import io
import json
import socket
import ssl
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from ipaddress import IPv4Address
from pathlib import Path

import aiohttp
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from kvplace.admission.settings import AdmissionSettings
from kvplace.core.errors import Misconfigured
from kvplace.kube.memory_cluster import MemoryCluster
from kvplace.serve.process import run, serving
from kvplace.serve.settings import Address, ServeSettings, TlsFiles
from kvplace.service.tls import RenewedTls

LOOPBACK = Address("127.0.0.1", 0)


class Authority:
    """A CA that issues certificates into a folder."""

    def __init__(self, folder: Path, name: str) -> None:
        self.folder = folder
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
        certificate = self._builder(self._name, self._key).add_extension(
            x509.BasicConstraints(ca=True, path_length=None), critical=True
        )
        self.file = folder / f"{name}.crt"
        self.file.write_bytes(
            certificate.sign(self._key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)
        )

    def issue(self, name: str) -> tuple[Path, Path]:
        """Write a certificate for loopback and its key; again under the same name replaces both."""
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
        certificate = self._builder(subject, key).add_extension(
            x509.SubjectAlternativeName([x509.IPAddress(IPv4Address("127.0.0.1"))]), critical=False
        )
        files = self.folder / f"{name}.crt", self.folder / f"{name}.key"
        files[0].write_bytes(
            certificate.sign(self._key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)
        )
        files[1].write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM,
                serialization.PrivateFormat.PKCS8,
                serialization.NoEncryption(),
            )
        )
        return files

    def _builder(self, subject: x509.Name, key: ec.EllipticCurvePrivateKey) -> x509.CertificateBuilder:
        now = datetime.now(UTC)
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - timedelta(minutes=1))
            .not_valid_after(now + timedelta(days=1))
        )


@dataclass(frozen=True)
class Certificates:
    """The operator's CA, a stranger's, and what the first one issued."""

    ours: Authority
    stranger: Authority
    serve: tuple[Path, Path]
    client: tuple[Path, Path]

    def settings(self) -> ServeSettings:
        return ServeSettings(
            tls=TlsFiles(*self.serve, client_ca=self.ours.file),
            admission=AdmissionSettings("hook"),
            extender_address=LOOPBACK,
            admission_address=LOOPBACK,
            health_address=LOOPBACK,
        )

    def as_client(self, pair: tuple[Path, Path] | None) -> ssl.SSLContext:
        context = ssl.create_default_context(cafile=str(self.ours.file))
        if pair is not None:
            context.load_cert_chain(*pair)
        return context


@pytest.fixture
def certificates(tmp_path: Path) -> Certificates:
    """Issue what an installation needs."""
    ours = Authority(tmp_path, "ours")
    return Certificates(ours, Authority(tmp_path, "stranger"), ours.issue("serve"), ours.issue("client"))


FILTER = json.dumps({"Pod": {"metadata": {"name": "p", "uid": "u"}}, "NodeNames": ["n1"]})


async def test_a_caller_with_a_certificate_of_the_client_ca_is_answered(certificates: Certificates) -> None:
    async with (
        serving(certificates.settings(), MemoryCluster()) as addresses,
        aiohttp.ClientSession() as session,
        session.post(
            f"https://{addresses['extender']}/v1/filter",
            data=FILTER,
            ssl=certificates.as_client(certificates.client),
        ) as answer,
    ):
        assert answer.status == 200
        assert "carries no kvplace.io/request" in (await answer.json())["Error"]


@pytest.mark.parametrize("whose", ["nobody's", "a stranger's"])
async def test_without_a_certificate_of_the_client_ca_nobody_reaches_the_extender(
    certificates: Certificates, whose: str
) -> None:
    pair = None if whose == "nobody's" else certificates.stranger.issue("intruder")
    async with (
        serving(certificates.settings(), MemoryCluster()) as addresses,
        aiohttp.ClientSession() as session,
    ):
        with pytest.raises((aiohttp.ClientError, ssl.SSLError, ConnectionError)):
            async with session.post(
                f"https://{addresses['extender']}/v1/bind", data="{}", ssl=certificates.as_client(pair)
            ) as answer:
                await answer.read()


async def test_admission_takes_the_api_server_without_a_certificate_and_refuses_a_body_of_ten_megabytes(
    certificates: Certificates,
) -> None:
    async with (
        serving(certificates.settings(), MemoryCluster()) as addresses,
        aiohttp.ClientSession() as session,
        session.post(
            f"https://{addresses['admission']}/admit/pod",
            data=io.BytesIO(b" " * (10 << 20) + b"{}"),
            ssl=certificates.as_client(None),
        ) as answer,
    ):
        assert answer.status in (400, 413)


async def test_health_says_ready_and_metrics_count(certificates: Certificates) -> None:
    async with (
        serving(certificates.settings(), MemoryCluster()) as addresses,
        aiohttp.ClientSession() as session,
    ):
        async with session.get(f"http://{addresses['health']}/readyz") as answer:
            assert (answer.status, await answer.text()) == (200, "ok\n")
        async with session.get(f"http://{addresses['health']}/metrics") as answer:
            assert "kvplace_extender_filter_seconds_count" in await answer.text()


def _serial_shown(address: Address, certificates: Certificates) -> int:
    context = certificates.as_client(certificates.client)
    with (
        socket.create_connection((address.host, address.port), timeout=10) as plain,
        context.wrap_socket(plain, server_hostname="127.0.0.1") as connection,
    ):
        shown = connection.getpeercert(binary_form=True)
    assert shown is not None
    return x509.load_der_x509_certificate(shown).serial_number


async def test_a_renewed_certificate_is_shown_to_the_next_caller_without_a_restart(
    certificates: Certificates,
) -> None:
    tls = RenewedTls(*certificates.serve, certificates.ours.file)
    server = await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.1", 0, ssl=tls.context)
    async with server:
        host, port = server.sockets[0].getsockname()[:2]
        before = await asyncio.to_thread(_serial_shown, Address(host, port), certificates)
        certificates.ours.issue("serve")
        assert tls.renew()
        after = await asyncio.to_thread(_serial_shown, Address(host, port), certificates)
    assert before != after
    assert not tls.renew()


def test_a_certificate_that_breaks_while_we_run_leaves_the_old_one_in_force(
    certificates: Certificates,
) -> None:
    tls = RenewedTls(*certificates.serve)
    certificates.serve[0].write_text("half a certificate")
    assert not tls.renew()


@pytest.mark.parametrize("broken", ["serve.crt", "serve.key", "ours.crt"])
def test_a_file_that_cannot_be_used_is_named_at_the_start(certificates: Certificates, broken: str) -> None:
    (certificates.ours.folder / broken).write_text("nonsense")
    with pytest.raises(Misconfigured, match=broken):
        RenewedTls(*certificates.serve, certificates.ours.file)


@pytest.mark.parametrize("text", ["8443", "host:", "host:99999", "host:x", ""])
def test_an_address_that_is_none_is_named_with_the_mend(text: str) -> None:
    with pytest.raises(Misconfigured, match="write HOST:PORT"):
        Address.parse(text)


async def test_a_port_that_is_taken_is_named(certificates: Certificates) -> None:
    settings = certificates.settings()
    async with serving(settings, MemoryCluster()) as addresses:
        taken = replace(settings, health_address=addresses["health"])
        with pytest.raises(Misconfigured, match=f"cannot listen on {addresses['health']}"):
            async with serving(taken, MemoryCluster()):
                pass


def test_a_port_that_is_taken_ends_the_process_with_one_sentence(
    certificates: Certificates, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        settings = replace(
            certificates.settings(), extender_address=Address("127.0.0.1", taken.getsockname()[1])
        )

        async def serve_it(_: ServeSettings) -> None:
            async with serving(settings, MemoryCluster()):
                pass

        monkeypatch.setattr("kvplace.serve.process._run", serve_it)
        monkeypatch.setattr("kvplace.serve.process.log_as_json", lambda _: None)
        with pytest.raises(Misconfigured, match=f"cannot listen on {settings.extender_address}"):
            run(settings)
