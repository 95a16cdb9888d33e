"""Listening for HTTP/1.1: an application on an address, with or without TLS, for callers within limits.

A listener may accept only certain names in a verified client certificate, because a CA may sign for other
clients, too.

cert-manager and the kubelet replace mounted certificates in place. A server context never checks its files
again, so every new connection gets the newest context that could be loaded. OpenSSL shows Python the end of a
certificate only when it has verified it. So the few fields before the validity of an X.509 certificate are
skipped by their lengths (RFC 5280, 4.1).
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import logging
import re
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from aiohttp import web
from aiohttp.typedefs import Handler

from kvplace.core.errors import Misconfigured
from kvplace.service.connections import Address, ConnectionLimits, Connections, MayConnect, accepting
from kvplace.service.process import CERTIFICATE_END

_log = logging.getLogger(__name__)

GRACE_S = 10.0
"""How long the end waits for requests that have begun; longer than a bind may take."""
_PEM = re.compile(rb"-----BEGIN CERTIFICATE-----(.+?)-----END CERTIFICATE-----", re.DOTALL)
_VERSION, _UTC_TIME, _GENERALIZED_TIME = 0xA0, 0x17, 0x18
_LIMITS = ConnectionLimits()


@contextlib.asynccontextmanager
async def listening(
    name: str,
    application: web.Application,
    address: Address,
    tls: ssl.SSLContext | None = None,
    *,
    clients: Collection[str] = (),
    may_connect: MayConnect | None = None,
    limits: ConnectionLimits = _LIMITS,
) -> AsyncIterator[Address]:
    """Serve an application while the block runs; gives the address with the port really used.

    `clients` are the names of certificates that may call; empty: all that passed the handshake. `may_connect`
    checks addresses; None: all may connect. Answers the requests that have begun before it ends. Raises
    Misconfigured when the address cannot be used.
    """

    def choose(transport: asyncio.Transport) -> asyncio.Protocol | None:
        return server() if may_call(transport, clients, name) else None

    connections = Connections(name, choose, limits, may_connect=may_connect, gives_up=True)
    async with (
        http1_server(application, connections, limits) as server,
        accepting(connections, address, tls) as bound,
    ):
        _log.info("%s is on %s", name, bound)
        yield bound


@contextlib.asynccontextmanager
async def http1_server(
    application: web.Application, connections: Connections, limits: ConnectionLimits
) -> AsyncIterator[web.Server]:
    """Make the server of an application over HTTP/1.1, one protocol a connection, while the block runs."""
    application.middlewares.append(_noting_complete_requests(connections))
    runner = web.AppRunner(
        application,
        access_log=None,
        handler_cancellation=connections.gives_up,
        keepalive_timeout=limits.idle_s,
        shutdown_timeout=GRACE_S,
        auto_decompress=False,
    )
    await runner.setup()
    assert runner.server is not None
    try:
        yield runner.server
    finally:
        await runner.cleanup()


def _noting_complete_requests(connections: Connections) -> Callable[..., Awaitable[web.StreamResponse]]:
    @web.middleware
    async def note(request: web.Request, handler: Handler) -> web.StreamResponse:
        # A compressed body may unpack to a thousand times its size; no caller needs to send one.
        if request.headers.get("Content-Encoding", "identity") != "identity":
            return web.Response(status=415, text="compressed bodies are not read\n")
        with connections.answering(request.transport, request.content):
            try:
                return await handler(request)
            except ConnectionResetError:
                if request.transport is not None:
                    raise
                return (
                    web.Response()
                )  # the caller is gone; aiohttp would log a traceback for each caller that goes

    return note


def may_call(transport: asyncio.Transport, allowed: Collection[str], listener: str) -> bool:
    """Return whether the client of a connection has one of the allowed names; without any, all have.

    Its certificate must have been verified in this handshake, not in an earlier one that it resumes.
    """
    if not allowed:
        return True
    tls = transport.get_extra_info("ssl_object")
    if tls is not None and tls.session_reused:
        _log.warning("%s refuses a client that resumes a TLS session", listener)
        return False
    names = names_of(tls.getpeercert()) if tls is not None else frozenset()
    if names.isdisjoint(allowed):
        _log.warning(
            "%s refuses a client with the certificate of %s; only %s may call it",
            listener,
            ", ".join(sorted(names)) or "no name",
            ", ".join(sorted(allowed)),
        )
        return False
    return True


def names_of(certificate: Mapping[str, Any] | None) -> frozenset[str]:
    """List the names in a verified certificate: common name, DNS names, and URIs, as SPIFFE uses them."""
    if not certificate:
        return frozenset()
    common = {value for part in certificate.get("subject", ()) for key, value in part if key == "commonName"}
    others = {value for kind, value in certificate.get("subjectAltName", ()) if kind in ("DNS", "URI")}
    return frozenset(common | others)


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """The certificate files of a listener."""

    certificate: Path
    key: Path
    client_ca: Path | None = None
    """Every client must have a certificate of this CA; None: clients need none."""
    client_names: tuple[str, ...] = ()
    """Names of the clients that may call: common name, DNS name or URI; empty: all of the CA."""
    check_every_s: float = 10.0
    """How often a running process checks whether the files have changed."""


def certificate_end(pem: bytes) -> datetime | None:
    """Return when the first of the certificates in a file ends; None if none can be read."""
    return min(certificate_ends(pem), default=None)


def certificate_ends(pem: bytes) -> tuple[datetime, ...]:
    """Return when each of the certificates in a file ends that can be read."""
    return tuple(end for found in _PEM.findall(pem) if (end := _end_of(found)) is not None)


def _end_of(text: bytes) -> datetime | None:
    try:
        _, certificate, _ = _field(base64.b64decode(text))
        _, fields, _ = _field(certificate)
        if fields[0] == _VERSION:
            _, _, fields = _field(fields)
        for _ in ("serial number", "signature", "issuer"):
            _, _, fields = _field(fields)
        _, validity, _ = _field(fields)
        _, _, validity = _field(validity)
        kind, moment, _ = _field(validity)
        form = {_UTC_TIME: "%y%m%d%H%M%SZ", _GENERALIZED_TIME: "%Y%m%d%H%M%SZ"}[kind]
        return datetime.strptime(moment.decode("ascii"), form).replace(tzinfo=UTC)
    except (IndexError, KeyError, ValueError):
        return None


def _field(der: bytes) -> tuple[int, bytes, bytes]:
    """Split DER into the tag of its first field, the content of that field, and the rest."""
    length, start = der[1], 2
    if length & 0x80:
        start += length & 0x7F
        length = int.from_bytes(der[2:start], "big")
    if start + length > len(der):
        raise ValueError("a field is cut off")
    return der[0], der[start : start + length], der[start + length :]


class RenewedTls:
    """A server context that follows its files."""

    def __init__(self, files: TlsFiles, *, alpn: Sequence[str] = ()) -> None:
        """Load the files; `alpn` lists the protocols to offer, best first.

        Raises Misconfigured that names the file.
        """
        self._files = files
        self._alpn = list(alpn)
        self._stamps = self._read_stamps()
        self._newest = self._load()
        self.context = self._newest
        self.context.sni_callback = self._use_newest

    def renew(self) -> bool:
        """Load the files again if one has changed; returns whether new certificates are in use.

        Files that cannot be used leave the old certificates in use and are tried again.
        """
        stamps = self._read_stamps()
        if stamps == self._stamps:
            return False
        try:
            self._newest = self._load()
        except Misconfigured as error:
            _log.warning("the old certificates stay in use: %s", error)
            return False
        self._stamps = stamps
        _log.info("certificates loaded again from %s", self._files.certificate)
        return True

    async def keep_renewed(self) -> None:
        """Renew whenever the files change, until cancelled."""
        while True:
            await asyncio.sleep(self._files.check_every_s)
            self.renew()

    def _use_newest(self, connection: ssl.SSLObject, _name: str | None, _context: ssl.SSLContext) -> None:
        connection.context = self._newest

    def _load(self) -> ssl.SSLContext:
        files = self._files
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        if self._alpn:
            context.set_alpn_protocols(self._alpn)
        try:
            # Without a passphrase, OpenSSL would ask the terminal for one when the key is encrypted.
            context.load_cert_chain(files.certificate, files.key, password="")
        except (OSError, ssl.SSLError) as error:
            raise Misconfigured(
                f"TLS certificate {files.certificate} with key {files.key} cannot be used: {error}"
            ) from None
        if files.client_ca is not None:
            try:
                context.load_verify_locations(files.client_ca)
            except (OSError, ssl.SSLError) as error:
                raise Misconfigured(f"client CA {files.client_ca} cannot be used: {error}") from None
            context.verify_mode = ssl.CERT_REQUIRED
            # A resumed session is not verified again: it would outlive its certificate and its CA.
            context.num_tickets = 0
            context.options |= ssl.OP_NO_TICKET
        self._report_ends()
        return context

    def _report_ends(self) -> None:
        for use, path in (("server", self._files.certificate), ("client-ca", self._files.client_ca)):
            if path is None:
                continue
            try:
                end = certificate_end(path.read_bytes())
            except OSError as error:  # it was there when OpenSSL read it
                raise Misconfigured(f"{path} cannot be read: {error.strerror or error}") from None
            if end is not None:
                CERTIFICATE_END.labels(use).set(end.timestamp())

    def _read_stamps(self) -> list[tuple[int, int] | None]:
        files = (self._files.certificate, self._files.key, self._files.client_ca)
        return [_stamp(path) for path in files if path is not None]


def _stamp(path: Path) -> tuple[int, int] | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_ino
