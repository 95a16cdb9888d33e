"""Settings that every long-running process has: where it listens and with which certificates."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from kvplace.core.errors import Misconfigured


@dataclass(frozen=True, slots=True)
class Address:
    """Where a listener listens; port 0 takes a free one."""

    host: str
    port: int

    @classmethod
    def parse(cls, text: str) -> Address:
        """Read `HOST:PORT` or `[IPV6]:PORT`; raises Misconfigured that names the text."""
        host, colon, port = text.rpartition(":")
        if not (colon and port.isascii() and port.isdigit() and int(port) <= 65535):
            raise Misconfigured(f"{text!r} is not an address; write HOST:PORT, for example 0.0.0.0:8443")
        return cls(host.removeprefix("[").removesuffix("]"), int(port))

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
