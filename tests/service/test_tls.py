"""A client CA that is replaced decides from the next connection on; a key under a passphrase asks nobody."""

from __future__ import annotations

import asyncio
import ssl
from pathlib import Path

import pytest
from cryptography.hazmat.primitives import serialization

from kvplace.core.errors import Misconfigured
from kvplace.service.tls import RenewedTls
from tests.serve.test_listeners import Certificates, certificates

__all__ = ["certificates"]


async def is_answered(port: int, context: ssl.SSLContext) -> bool:
    """Whether the server talks to who connects so; in TLS 1.3 a refusal comes only with the first read."""
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context)
    except (ssl.SSLError, ConnectionError):
        return False
    try:
        return await reader.read() == b"hello"
    except (ssl.SSLError, ConnectionError):
        return False
    finally:
        writer.close()


async def hello(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(b"hello")
    writer.close()


async def test_a_replaced_client_ca_lets_its_clients_in_and_those_of_the_old_one_no_more(
    certificates: Certificates, tmp_path: Path
) -> None:
    authority = tmp_path / "client-ca.crt"
    authority.write_bytes(certificates.ours.file.read_bytes())
    tls = RenewedTls(*certificates.serve, authority)
    server = await asyncio.start_server(hello, "127.0.0.1", 0, ssl=tls.context)
    port = server.sockets[0].getsockname()[1]
    ours = certificates.as_client(certificates.client)
    strangers = certificates.as_client(certificates.stranger.issue("other-client"))
    async with server:
        assert [await is_answered(port, context) for context in (ours, strangers)] == [True, False]
        authority.write_bytes(certificates.stranger.file.read_bytes())
        assert tls.renew()
        assert [await is_answered(port, context) for context in (ours, strangers)] == [False, True]


def test_a_key_under_a_passphrase_is_refused_and_nobody_is_asked_for_it(
    certificates: Certificates, monkeypatch: pytest.MonkeyPatch
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
        RenewedTls(certificate, key)
