"""TLS for the listeners, with certificates that may be renewed while we run.

cert-manager and kubelet replace mounted files in place; a context that was made from the old ones would
serve them until the process ends. So every new connection gets the newest context.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import Sequence
from pathlib import Path

from kvplace.core.errors import Misconfigured

log = logging.getLogger(__name__)


class RenewedTls:
    """A server context whose certificates follow their files."""

    def __init__(
        self, certificate: Path, key: Path, client_ca: Path | None = None, *, alpn: Sequence[str] = ()
    ) -> None:
        """Load the files; `client_ca` makes a certificate signed by it a condition of every connection.

        `alpn` names the protocols to offer, best first. Raises Misconfigured that names the file.
        """
        self._alpn = list(alpn)
        self._files = [path for path in (certificate, key, client_ca) if path is not None]
        self._certificate, self._key, self._client_ca = certificate, key, client_ca
        self._newest = self._load()
        self._stamps = self._stamp()
        self.context = self._newest
        self.context.sni_callback = self._give_newest

    def renew(self) -> bool:
        """Load the files again if one of them has changed; answers whether new ones are in force."""
        stamps = self._stamp()
        if stamps == self._stamps:
            return False
        try:
            self._newest = self._load()
        except Misconfigured as error:
            log.warning("the old certificates stay: %s", error)
            return False
        self._stamps = stamps
        log.info("certificates renewed from %s", self._certificate)
        return True

    async def keep_renewed(self, *, every_s: float = 10.0) -> None:
        """Look at the files now and then, until cancelled."""
        while True:
            await asyncio.sleep(every_s)
            self.renew()

    def _give_newest(self, connection: ssl.SSLObject, _name: str | None, _context: ssl.SSLContext) -> None:
        connection.context = self._newest

    def _load(self) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        if self._alpn:
            context.set_alpn_protocols(self._alpn)
        try:
            # An empty passphrase, since without one OpenSSL asks the terminal for that of a locked key.
            context.load_cert_chain(self._certificate, self._key, password="")
        except (OSError, ssl.SSLError) as error:
            raise Misconfigured(
                f"TLS certificate {self._certificate} with key {self._key} cannot be used: {error}"
            ) from None
        if self._client_ca is not None:
            try:
                context.load_verify_locations(self._client_ca)
            except (OSError, ssl.SSLError) as error:
                raise Misconfigured(f"client CA {self._client_ca} cannot be used: {error}") from None
            context.verify_mode = ssl.CERT_REQUIRED
        return context

    def _stamp(self) -> list[tuple[int, int]]:
        stamps = []
        for path in self._files:
            try:
                status = path.stat()
            except OSError:
                stamps.append((0, 0))
                continue
            stamps.append((status.st_mtime_ns, status.st_ino))
        return stamps
