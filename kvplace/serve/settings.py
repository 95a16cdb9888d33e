"""What an operator decides when starting `kvplace serve`."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from kvplace.admission.settings import AdmissionSettings
from kvplace.controller.controller import ControllerSettings
from kvplace.core.errors import Misconfigured
from kvplace.scheduler.extender import ExtenderSettings


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
            raise Misconfigured(f"{text!r} is no address; write HOST:PORT, for instance 0.0.0.0:8443")
        return cls(host.removeprefix("[").removesuffix("]"), int(port))

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """Certificates of the two listeners that can change something; read again when they change."""

    certificate: Path
    key: Path
    client_ca: Path
    """Who may call the extender: whoever holds a certificate of this CA can bind pods."""


@dataclass(frozen=True, slots=True)
class ServeSettings:
    """Everything that `kvplace serve` is told."""

    tls: TlsFiles
    admission: AdmissionSettings
    kubeconfig: Path | None = None
    """None: the service account of the pod we run in, else the user's default kubeconfig."""
    extender: ExtenderSettings = field(default_factory=ExtenderSettings)
    controller: ControllerSettings = field(default_factory=ControllerSettings)
    extender_address: Address = Address("0.0.0.0", 8443)
    admission_address: Address = Address("0.0.0.0", 9443)
    health_address: Address = Address("0.0.0.0", 8081)
    log_level: str = "info"
