"""Settings that every long-running process has: its addresses and certificates."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from kvplace.core.errors import Misconfigured

_HOST_AND_PORT = re.compile(r"(?:\[(?P<ipv6>[^\[\]]*:[^\[\]]*)\]|(?P<host>[^\[\]:]*)):(?P<port>[0-9]{1,5})")


@dataclass(frozen=True, slots=True)
class Address:
    """Where a listener listens: no host means all addresses of both families; port 0 takes a free one."""

    host: str
    port: int

    @classmethod
    def parse(cls, text: str) -> Address:
        """Read `HOST:PORT`, `[IPV6]:PORT` or `:PORT`; raises Misconfigured that names the text."""
        found = _HOST_AND_PORT.fullmatch(text)
        if found is None or int(found["port"]) > 65535:
            raise Misconfigured(
                f"{text!r} is not an address; write HOST:PORT, for example 127.0.0.1:8443 or [::1]:8443, "
                "or :8443 for all addresses"
            )
        return cls(found["ipv6"] or found["host"] or "", int(found["port"]))

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


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
