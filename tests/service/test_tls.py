"""Certificates follow their files: a renewed one is used at once, a broken one never."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import serialization

from harness.certificates import Certificates
from harness.waiting import PATIENCE_S
from kvplace.core.errors import Misconfigured
from kvplace.service.listening import RenewedTls, TlsFiles
from kvplace.service.process import in_background


@contextlib.asynccontextmanager
async def listening(tls: RenewedTls) -> AsyncIterator[int]:
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
    async with listening(tls) as port:
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
    async with listening(tls) as port:
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
    async with listening(tls) as port:
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

    async with listening(tls) as port:
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
    async with listening(tls) as port, in_background(tls.keep_renewed()):
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
    async with listening(tls) as port:
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
