"""Where the hook stands: the folders and names that the pod gives it, read from the environment once."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Surroundings:
    """Everything outside the process that its answers depend on."""

    pod_folder: Path
    """The downward API volume: `placement`, `cpu-map`, `request`, `uid`, `name`, `namespace`."""
    hook_folder: Path
    """Where virt-launcher looks for our socket."""
    container: str
    node: str
    """Name of the node, empty when the pod does not say."""
    proc: Path = Path("/proc")
    sys: Path = Path("/sys")

    @classmethod
    def of(cls, environ: Mapping[str, str] = os.environ) -> Surroundings:
        """Read KubeVirt's and kvplace's variables."""
        return cls(
            pod_folder=Path(environ.get("KVPLACE_POD_FOLDER") or "/etc/kvplace-pod"),
            hook_folder=Path(environ.get("KVPLACE_HOOK_FOLDER") or "/var/run/kubevirt-hooks"),
            container=environ.get("CONTAINER_NAME") or "hook-sidecar",
            node=environ.get("NODE_NAME", ""),
            proc=Path(environ.get("KVPLACE_PROC_FOLDER") or "/proc"),
            sys=Path(environ.get("KVPLACE_SYS_FOLDER") or "/sys"),
        )

    @property
    def socket(self) -> Path:
        """Our socket; KubeVirt tells sidecars apart by this file name alone, so it holds the container's."""
        return self.hook_folder / f"kvplace-{self.container}.sock"

    @property
    def staged_socket(self) -> Path:
        """Where the socket waits until we can answer: virt-launcher tries files one level down, no deeper."""
        return self.hook_folder / ".staging" / self.socket.name
