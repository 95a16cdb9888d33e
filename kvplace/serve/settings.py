"""The settings of `kvplace serve`."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from kvplace.admission.review import AdmissionSettings
from kvplace.controller.controller import ControllerSettings
from kvplace.scheduler.extender import ExtenderSettings
from kvplace.service.connections import ConnectionLimits
from kvplace.service.settings import Address, TlsFiles


@dataclass(frozen=True, slots=True)
class ServeSettings:
    """The settings of `kvplace serve`."""

    tls: TlsFiles
    """Certificate of the extender and of admission; CA and names of clients are for the extender alone.

    Whoever has a certificate of that CA with one of those names can bind pods.
    """
    admission: AdmissionSettings
    extender_address: Address
    admission_address: Address
    health_address: Address
    admission_client_ca: Path | None = None
    """Callers of admission must have a certificate of this CA; None: nothing needs one."""
    admission_client_names: tuple[str, ...] = ()
    """Names that those certificates must carry one of; empty: any."""
    limits: ConnectionLimits = field(default_factory=ConnectionLimits)
    kubeconfig: Path | None = None
    """None: the service account of the pod we run in, else the user's default kubeconfig."""
    extender: ExtenderSettings = field(default_factory=ExtenderSettings)
    controller: ControllerSettings = field(default_factory=ControllerSettings)
    log_level: str = "info"
