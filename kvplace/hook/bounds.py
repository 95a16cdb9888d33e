"""The CPUs and NUMA nodes that this container may use now.

Without an agent all containers of the pod have one cpuset. With a pin outside it QEMU does not start, and the
kernel silently cuts down a pin that is partly outside. Both are found here, before libvirt gets the domain.
What cannot be read limits nothing.

An agent gives the owned CPUs to the container of QEMU and takes them from every other one, ours included. So
our own cpuset is the kernel's proof that the agent protects them.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from kvplace.core.cpuset import cpus_of, format_cpu_list
from kvplace.core.errors import KvplaceError, Misconfigured
from kvplace.core.placement import Placement, PodPlacement
from kvplace.core.request import OnFailure
from kvplace.core.scalars import NO_CPUS, CpuId, CpuMask, NumaId
from kvplace.core.well_known_names import ON_FAILURE
from kvplace.hook.pod_environment import PodEnvironment
from kvplace.linux import affinity, cgroup
from kvplace.linux.kernel_files import read_cpu_list

_T = TypeVar("_T")


def check_cpus(bound: PodPlacement, env: PodEnvironment) -> None:
    """Raise Misconfigured when the VM must not start on its CPUs.

    Each must be online and, where no agent sets cpusets, in ours; what an agent protects must be protected.
    """
    _check_online(bound.placement, env)
    if bound.enforced:
        check_protected(bound, env)
    else:
        _check_in_cpuset(bound.placement, env)


def check_protected(bound: PodPlacement, env: PodEnvironment) -> None:
    """Raise Misconfigured when the VM must wait because others may still use the CPUs that it owns."""
    obstacle = unprotected(bound, env)
    if obstacle is not None and bound.on_failure is OnFailure.WAIT:
        raise Misconfigured(f"{obstacle}; the VM waits for that because its {ON_FAILURE} is wait")


def unprotected(bound: PodPlacement, env: PodEnvironment) -> str | None:
    """State which owned CPUs the agent does not protect yet; None when it protects all, or was never to.

    A CPU that is offline is in no cpuset, which proves nothing.
    """
    owned = bound.placement.owned
    if not bound.enforced or not owned:
        return None
    node, allowed = _node(env), allowed_cpus(env)
    look = f"check the pod of kvplace-agent on {node} and kubectl get nodetopology {env.node} -o yaml"
    if allowed is None:
        return (
            f"the hook sidecar's cpuset cannot be read, so nothing shows that the CPUs are protected; {look}"
        )
    online = _online(env)
    if online is not None and owned & ~online:
        offline = format_cpu_list(owned & ~online)
        return (
            f"CPU {offline}, which this VM owns, is not online on {node}; bring it online, or delete the pod"
        )
    if not owned & allowed:
        return None
    return (
        f"other containers may still use CPU {format_cpu_list(owned & allowed)}, which this VM owns: the "
        f"agent on {node} has not taken it from the hook sidecar, which has the cpuset "
        f"{format_cpu_list(allowed)}; {look}"
    )


def _check_online(placement: Placement, env: PodEnvironment) -> None:
    named = _named(placement)
    online = _online(env)
    if online is not None and named & ~online:
        raise Misconfigured(
            f"CPU {format_cpu_list(named & ~online)} of the placement is not online on {_node(env)} (online: "
            f"{format_cpu_list(online)}); bring it online, or delete the pod so that it is placed again"
        )


def _check_in_cpuset(placement: Placement, env: PodEnvironment) -> None:
    named = _named(placement)
    allowed = allowed_cpus(env)
    if allowed is not None and named & ~allowed:
        raise Misconfigured(
            f"CPU {format_cpu_list(named & ~allowed)} of the placement is outside this pod's cpuset "
            f"{format_cpu_list(allowed)} on {_node(env)}; something else manages its CPUs (the kubelet's "
            "static CPU manager?): turn that off, or delete the pod so that it is placed again"
        )


def _online(env: PodEnvironment) -> CpuMask | None:
    return _known(read_cpu_list, Path(env.sys, "devices/system/cpu/online"))


def _named(placement: Placement) -> CpuMask:
    """Return every CPU that some thread of the VM is to run on."""
    named = placement.cpus | placement.emulator_cpus
    for cpus in placement.io_thread_cpus:
        named |= cpus
    return named


def _node(env: PodEnvironment) -> str:
    return env.node or "this node"


def allowed_cpus(env: PodEnvironment) -> CpuMask | None:
    """Read the effective cpuset of our cgroup, else of this process; None when neither is known."""
    process = Path(env.proc, "self")
    in_cgroup = _known(cgroup.effective_cpus, process, Path(env.sys, cgroup.MOUNT_POINT))
    return in_cgroup or _known(affinity.allowed_cpus, process)


def allowed_memory_nodes(env: PodEnvironment) -> int | None:
    """Read the NUMA nodes that this container may take memory from; None when they are not known."""
    return _known(affinity.allowed_memory_nodes, Path(env.proc, "self"))


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
