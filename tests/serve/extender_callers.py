"""The allowed and the refused callers of the extender, and one call of each."""

from __future__ import annotations

import asyncio
import ssl
from datetime import timedelta

from cryptography.x509.oid import ExtendedKeyUsageOID

from harness.certificates import Certificates
from harness.waiting import PATIENCE_S
from kvplace.service.connections import Address
from tests.scheduler.http2_client import over_http1, over_http2


async def answer(address: Address, client: ssl.SSLContext | None, protocol: str) -> bytes:
    """Ask for a bind; returns what was answered, nothing if the connection was refused."""
    if client is not None:
        client.set_alpn_protocols([protocol])
    try:
        reader, writer = await asyncio.open_connection(address.host, address.port, ssl=client)
    except (ssl.SSLError, ConnectionError):
        return b""
    ask = over_http2 if protocol == "h2" else over_http1
    try:
        async with asyncio.timeout(PATIENCE_S):
            return await ask(reader, writer)
    except (ssl.SSLError, ConnectionError, EOFError):
        return b""
    finally:
        writer.transport.abort()


def context(
    certificates: Certificates, client: str, tls: ssl.TLSVersion = ssl.TLSVersion.TLSv1_3
) -> ssl.SSLContext:
    ours = certificates.ours
    pairs = {
        "the scheduler": certificates.client,
        "no certificate": None,
        "another CA": certificates.stranger.issue("kvplace-scheduler-of-a-stranger"),
        "another name": ours.issue("somebody"),
        "serve itself": certificates.serve,
        "expired": ours.issue("expired", lasts=-timedelta(hours=1)),
        "a server": ours.issue("server", usage=ExtendedKeyUsageOID.SERVER_AUTH),
    }
    made = certificates.as_client(pairs[client])
    made.minimum_version = made.maximum_version = tls
    return made
