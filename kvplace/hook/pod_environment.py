"""Where the hook stands: the folders and names that the pod gives it, read from the environment once.

Paths are plain text here and wherever the server and the probe pass by: importing pathlib takes a tenth of
the CPU time of a start, which every VM pays.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PodEnvironment:
    """Everything outside the process that its answers depend on."""

    pod_folder: str
    """The downward API volume: `placement`, `cpu-map`, `request`, `uid`, `name`, `namespace`."""
    hook_folder: str
    """Where virt-launcher looks for our socket."""
    container: str
    node: str
    """Name of the node, empty when the pod does not say."""
    proc: str = "/proc"
    sys: str = "/sys"

    @classmethod
    def of(cls, environ: Mapping[str, str] = os.environ) -> PodEnvironment:
        """Read KubeVirt's and kvplace's variables."""
        return cls(
            pod_folder=environ.get("KVPLACE_POD_FOLDER") or "/etc/kvplace-pod",
            hook_folder=environ.get("KVPLACE_HOOK_FOLDER") or "/var/run/kubevirt-hooks",
            container=environ.get("CONTAINER_NAME") or "hook-sidecar",
            node=environ.get("NODE_NAME", ""),
            proc=environ.get("KVPLACE_PROC_FOLDER") or "/proc",
            sys=environ.get("KVPLACE_SYS_FOLDER") or "/sys",
        )

    @property
    def socket(self) -> str:
        """Our socket; KubeVirt tells sidecars apart by this file name alone, so it holds the container's."""
        return f"{self.hook_folder}/kvplace-{self.container}.sock"

    @property
    def staging_folder(self) -> str:
        """Where the socket waits until we can answer: virt-launcher tries files one level down, no deeper."""
        return f"{self.hook_folder}/.staging"
