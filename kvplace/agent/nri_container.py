"""A container as the runtime reports it through NRI: its pod, its cgroup and its spec.

Pure: what the cgroup itself states is read by `nri_enforcement`.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from pathlib import Path

from kvplace.agent.containers import Container
from kvplace.agent.repair_history import RepairHistory
from kvplace.core.marks import PLACED_LABEL
from kvplace.core.placement import PLACEMENT
from kvplace.kube.objects import COMPUTE
from kvplace.linux.oci_cgroup import cgroup_folder
from kvplace.nri import values as nri

_VIRT_LAUNCHER = ("kubevirt.io", "virt-launcher")
_MIGRATION = "kubevirt.io/migrationJobUID"
"""Label of the pod that a VM migrates to."""
_QEMU_HOOKS = "/etc/libvirt/hooks/qemu.d"
"""Where the hook that gives an incoming QEMU the CPU numbers of this node is mounted."""


@dataclass(slots=True)
class KnownContainer:
    """A container that is created or running, with what its cgroup and its spec state."""

    container: Container
    """`cpus` is what its cgroup was last seen or set to."""
    sandbox: nri.SandboxId
    folder: Path | None
    spec: nri.Cpuset
    history: RepairHistory = field(default_factory=RepairHistory)
    retry: asyncio.TimerHandle | None = None
    failure: str = ""
    """Why its cgroup could not be set; empty when that has succeeded since."""
    problem: str = ""
    """A failure that has been tried again."""
    limit: str = ""
    """Why it may not use what it is set to."""


def reported(pod: nri.PodSandbox, container: nri.Container, root: Path) -> KnownContainer:
    """Return a container as its sandbox and its spec describe it; `root` is that of the cgroups."""
    key, value = _VIRT_LAUNCHER
    return KnownContainer(
        Container(
            id=container.id,
            name=container.name,
            pod_uid=pod.uid,
            namespace=pod.namespace,
            pod=pod.name,
            in_vm_pod=pod.labels.get(key) == value,
            placement=_placement(pod),
            pid=container.pid,
            cpus=container.cpuset.cpus,
            incoming=(
                container.name == COMPUTE and _MIGRATION in pod.labels and _QEMU_HOOKS not in container.mounts
            ),
        ),
        sandbox=container.sandbox,
        folder=cgroup_folder(root, container.cgroup_path),
        spec=container.cpuset,
    )


def merged(spec: nri.Cpuset, change: nri.Cpuset) -> nri.Cpuset:
    """Return what a spec states after an update; what an update leaves out stays."""
    return nri.Cpuset(change.cpus or spec.cpus, change.memory_nodes or spec.memory_nodes)


def _placement(pod: nri.PodSandbox) -> str:
    """Return the placement that a sandbox was made with; without the label any client may have written it."""
    return pod.annotations.get(PLACEMENT, "") if pod.labels.get(PLACED_LABEL) == "true" else ""
