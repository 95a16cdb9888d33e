"""What this container may use of the machine now: its CPUs and NUMA nodes.

With a pin outside the container's cpuset QEMU does not start, and the kernel silently cuts down a pin that is
partly outside. Both are found here, before libvirt gets the domain. What cannot be read limits nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from kvplace.core.cpuset import cpus_of, format_cpu_list
from kvplace.core.errors import KvplaceError, Misconfigured
from kvplace.core.placement import Placement
from kvplace.core.scalars import NO_CPUS, CpuId, CpuMask, NumaId
from kvplace.hook.pod_environment import PodEnvironment
from kvplace.linux import cgroup, proc
from kvplace.linux.kernel_files import read_cpu_list

_T = TypeVar("_T")


def check_cpus(placement: Placement, env: PodEnvironment) -> None:
    """Raise Misconfigured when the placement names a CPU that is offline or outside our cpuset."""
    named = placement.cpus | placement.emulator_cpus
    for cpus in placement.io_thread_cpus:
        named |= cpus
    node = env.node or "this node"
    online = _known(read_cpu_list, Path(env.sys, "devices/system/cpu/online"))
    if online is not None and named & ~online:
        raise Misconfigured(
            f"CPU {format_cpu_list(named & ~online)} of the placement is not online on {node} (online: "
            f"{format_cpu_list(online)}); bring it online, or delete the pod so that it is placed again"
        )
    allowed = allowed_cpus(env)
    if allowed is not None and named & ~allowed:
        raise Misconfigured(
            f"CPU {format_cpu_list(named & ~allowed)} of the placement is outside this pod's cpuset "
            f"{format_cpu_list(allowed)} on {node}; something else manages its CPUs (the kubelet's static "
            "CPU manager?): turn that off, or delete the pod so that it is placed again"
        )


def allowed_cpus(env: PodEnvironment) -> CpuMask | None:
    """Read the effective cpuset of our cgroup, else of this process; None when neither is known."""
    process = Path(env.proc, "self")
    in_cgroup = _known(cgroup.effective_cpus, process, Path(env.sys, cgroup.MOUNT_POINT))
    return in_cgroup or _known(proc.allowed_cpus, process)


def allowed_memory_nodes(env: PodEnvironment) -> int | None:
    """Read the NUMA nodes that this container may take memory from; None when they are not known."""
    return _known(proc.allowed_memory_nodes, Path(env.proc, "self"))


def node_of_cpus(env: PodEnvironment) -> dict[CpuId, NumaId]:
    """Map each CPU of the host to its NUMA node."""
    return {
        CpuId(cpu): NumaId(int(folder.name[4:]))
        for folder in Path(env.sys, "devices/system/node").glob("node[0-9]*")
        for cpu in cpus_of(_known(read_cpu_list, folder / "cpulist") or NO_CPUS)
    }


def _known(read: Callable[..., _T], *paths: Path) -> _T | None:
    try:
        return read(*paths)
    except KvplaceError:
        return None
