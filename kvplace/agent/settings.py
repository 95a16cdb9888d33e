"""The settings of `kvplace agent`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from kvplace.core.node_topology import Enforcement
from kvplace.core.scalars import CpuMask, NodeName
from kvplace.service.connections import Address


@dataclass(frozen=True, slots=True)
class AgentSettings:
    """The settings of `kvplace agent`."""

    node: NodeName
    """The node that it runs on."""
    health_address: Address
    host: Path = Path("/")
    """Root of the host's proc, sys, run and var; another folder in tests."""
    reserved: CpuMask | None = None
    """CPUs that are never given out; None: those of the kubelet, else the core of the lowest online CPU."""
    enforcement: Enforcement | None = None
    """How cpusets are set; None: as an NRI plugin where the runtime offers NRI, else by writing cgroups."""
    nri_socket: Path = Path("/var/run/nri/nri.sock")
    kubelet_folder: Path = Path("/var/lib/kubelet")
    """Where the kubelet keeps its state, below `host`."""
    kubelet_config: Path = Path("/var/lib/kubelet/config.yaml")
    """The kubelet's configuration file, below `host`; it may be missing."""
    check_machine_every_s: float = 5.0
    """How often the files are compared that no event of the kernel is about."""
    kubeconfig: Path | None = None
    """None: the service account of the pod we run in, else the user's default kubeconfig."""
    log_level: str = "info"

    def on_host(self, path: Path) -> Path:
        """Return where a file of the host is found."""
        return self.host / path.relative_to("/")
