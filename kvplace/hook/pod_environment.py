"""The pod around the hook: its folders and names, read from the environment once, and its log.

Paths are plain text here and in what the server and the probe import: pathlib would take a tenth of the CPU
time of a start. A log line is one JSON object on stderr, which virt-launcher's pod log collects.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass

from kvplace.core.scalars import NodeName

_STDERR = 2


@dataclass(frozen=True, slots=True)
class PodEnvironment:
    """Everything outside the process that its answers depend on."""

    pod_folder: str
    """The downward API volume: `placement`, `cpu-map`, `request`, `uid`, `name`, `namespace`."""
    hook_folder: str
    """Where virt-launcher searches for our socket."""
    container: str
    node: NodeName
    """Name of the node, empty when it is not known."""
    libvirt_hook_folder: str = "/var/run/kvplace-libvirt-hooks"
    """What the container of libvirt sees as /etc/libvirt/hooks/qemu.d."""
    stays: bool = False
    """Whether the kubelet ends this container with the pod, so that it must not end when KubeVirt reports
    Shutdown: the kubelet would start it again."""
    socket_name: str = ""
    """Name of our socket if a Plugin of KubeVirt sets it; empty for the name of a hook sidecar."""
    proc: str = "/proc"
    sys: str = "/sys"

    @classmethod
    def of(cls, environ: Mapping[str, str] = os.environ) -> PodEnvironment:
        """Read KubeVirt's and kvplace's variables."""
        return cls(
            pod_folder=environ.get("KVPLACE_POD_FOLDER") or "/etc/kvplace-pod",
            hook_folder=environ.get("KVPLACE_HOOK_FOLDER") or "/var/run/kubevirt-hooks",
            container=environ.get("CONTAINER_NAME") or "hook-sidecar",
            node=NodeName(environ.get("NODE_NAME", "")),
            libvirt_hook_folder=environ.get("KVPLACE_LIBVIRT_HOOK_FOLDER")
            or "/var/run/kvplace-libvirt-hooks",
            stays=environ.get("KVPLACE_STAYS_AFTER_SHUTDOWN") == "true",
            socket_name=environ.get("KVPLACE_SOCKET_NAME", ""),
            proc=environ.get("KVPLACE_PROC_FOLDER") or "/proc",
            sys=environ.get("KVPLACE_SYS_FOLDER") or "/sys",
        )

    @property
    def socket(self) -> str:
        """Our socket; its name contains the container's, since KubeVirt distinguishes sidecars by it."""
        return f"{self.hook_folder}/{self.socket_name or f'kvplace-{self.container}.sock'}"

    @property
    def staging_folder(self) -> str:
        """Where the socket is made; virt-launcher finds only files that are one level down."""
        return f"{self.hook_folder}/.staging"


def log(level: str, msg: str, about: Mapping[str, str] | None = None) -> None:
    """Write one line; `about` has the VM and the node. A closed stderr is not an error."""
    now = time.time()
    line = {
        "ts": f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(now))}.{int(now % 1 * 1000):03d}Z",
        "level": level,
        "msg": msg,
        "component": "hook",
        **(about or {}),
    }
    with suppress(OSError):
        os.write(_STDERR, json.dumps(line).encode() + b"\n")
