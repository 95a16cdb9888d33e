"""The settings of the web map."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvplace.service.connections import ConnectionLimits
from kvplace.service.settings import Address, TlsFiles


@dataclass(frozen=True, slots=True)
class WebSettings:
    """Where the web map is, and who stands before it."""

    address: Address
    tls: TlsFiles
    """With a client CA, an authenticating proxy with a certificate of it reports who is asking, and no other
    client may connect; without one, people sign in with tokens."""
    cluster_name: str = ""
    """The name of the cluster on the pages."""
    limits: ConnectionLimits = field(
        default_factory=lambda: ConnectionLimits(connections=256, idle_s=120.0, unread_bytes=4 << 20)
    )
    streams: int = 128
    """How many pages may follow the changes at the same time."""
    heartbeat_s: float = 15.0
    """Pause between signs of life on a stream. Proxies cut idle connections."""
    holds_s: float = 60.0
    """How long an answer of the API server about a person holds."""

    @property
    def behind_proxy(self) -> bool:
        return self.tls.client_ca is not None
