"""The CPUs and NUMA nodes that this container may use now, and whether QEMU will be allowed to bind memory.

Without an agent all containers of the pod have one cpuset. With a pin outside it QEMU does not start, and the
kernel silently cuts down a pin that is partly outside. Both are found here, before libvirt gets the domain.
A limit that cannot be read does not count.

An agent gives the owned CPUs to the container of QEMU and takes them from every other one, ours included. So
our own cpuset is the kernel's proof that the agent protects them.

The sidecar runs under the same seccomp profile as the container that starts QEMU. containerd's default
profile forbids the calls that bind memory without CAP_SYS_NICE; libvirt then refuses to start a domain with a
`<numatune>`. The trial makes these calls. It changes the memory policy of its process and loads ctypes, so it
is for a short-lived process only.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from kvplace.core.cpuset import cpus_of, format_cpu_list, mask_of
from kvplace.core.errors import KvplaceError, Misconfigured
from kvplace.core.placement import Placement, PodPlacement
from kvplace.core.request import NumaMemory, OnFailure
from kvplace.core.scalars import NO_CPUS, CpuId, CpuMask, NumaId
from kvplace.core.well_known_names import ON_FAILURE
from kvplace.hook.process import PodEnvironment
from kvplace.linux import cgroups
from kvplace.linux.kernel_files import allowed_cpus_of, allowed_memory_nodes_of, read_cpu_list

_T = TypeVar("_T")


def check_placed_cpus(bound: PodPlacement, env: PodEnvironment) -> None:
    """Raise Misconfigured when the VM must not start on its CPUs.

    Each must be online and, where no agent sets cpusets, in ours; CPUs that an agent protects must be
    protected.
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
    in_cgroup = _known(cgroups.effective_cpus, process, Path(env.sys, cgroups.MOUNT_POINT))
    return in_cgroup or _known(allowed_cpus_of, process)


def allowed_memory_nodes(env: PodEnvironment) -> int | None:
    """Read the NUMA nodes that this container may take memory from; None when they are not known."""
    return _known(allowed_memory_nodes_of, Path(env.proc, "self"))


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


_SET_MEMPOLICY_AND_MBIND = {
    "x86_64": (238, 237),
    "aarch64": (237, 235),
    "riscv64": (237, 235),
    "s390x": (270, 268),
    "ppc64le": (261, 259),
}
_DEFAULT, _PREFERRED, _BIND, _INTERLEAVE, _PREFERRED_MANY = 0, 1, 2, 3, 5  # linux/mempolicy.h
_STRICT_AND_MOVE = 1 | 2  # as QEMU asks mbind

MemoryTrial = Callable[[NumaMemory, Sequence[int]], str | None]
"""States why memory cannot be bound to these nodes, or None when it can."""


def settle_memory(
    placement: Placement, allowed_nodes: int | None, on_failure: OnFailure, trial: MemoryTrial
) -> tuple[Placement, str | None]:
    """Keep the memory binding where it will work, else remove it and state why.

    Raises Misconfigured instead for `numa-memory: strict` with `on-failure: wait`.
    """
    if placement.numa_memory is NumaMemory.OFF:
        return placement, None
    obstacle = _obstacle(placement, allowed_nodes, trial)
    if obstacle is None:
        return placement, None
    if placement.numa_memory is NumaMemory.STRICT and on_failure is OnFailure.WAIT:
        raise Misconfigured(
            f"numa-memory strict is not possible: {obstacle}; change that, or set numa-memory to preferred "
            "or on-failure to float"
        )
    return replace(placement, numa_memory=NumaMemory.OFF), obstacle


def try_to_bind(mode: NumaMemory, nodes: Sequence[int]) -> str | None:
    """Make the calls that libvirt and QEMU will make; returns one sentence when one fails."""
    import ctypes  # not before: the probe, which needs neither, would start later
    import mmap

    machine = os.uname().machine
    if machine not in _SET_MEMPOLICY_AND_MBIND:
        return f"binding memory is not supported on {machine}"
    set_mempolicy, mbind = _SET_MEMPOLICY_AND_MBIND[machine]
    policy = {
        NumaMemory.PREFERRED: _PREFERRED if len(nodes) == 1 else _PREFERRED_MANY,
        NumaMemory.STRICT: _BIND,
        NumaMemory.INTERLEAVE: _INTERLEAVE,
    }[mode]
    word_bits = 8 * ctypes.sizeof(ctypes.c_ulong)
    words = max(nodes) // word_bits + 1
    mask = (ctypes.c_ulong * words)()
    for node in nodes:
        mask[node // word_bits] |= 1 << node % word_bits
    bits = words * word_bits + 1  # the kernel subtracts one
    syscall = ctypes.CDLL(None, use_errno=True).syscall
    if syscall(set_mempolicy, policy, mask, ctypes.c_ulong(bits)) != 0:
        return _why("set_mempolicy", ctypes.get_errno(), policy, nodes)
    syscall(set_mempolicy, _DEFAULT, None, ctypes.c_ulong(0))
    with mmap.mmap(-1, mmap.PAGESIZE) as page:
        start = ctypes.c_char.from_buffer(page)
        address = ctypes.c_void_p(ctypes.addressof(start))
        answer = syscall(
            mbind, address, ctypes.c_ulong(len(page)), policy, mask, ctypes.c_ulong(bits), _STRICT_AND_MOVE
        )
        del start  # the page cannot be unmapped while ctypes holds a pointer to it
        return None if answer == 0 else _why("mbind", ctypes.get_errno(), policy, nodes)


def _obstacle(placement: Placement, allowed_nodes: int | None, trial: MemoryTrial) -> str | None:
    if not placement.numa_nodes:
        return "the placement has no NUMA node"
    nodes = mask_of(placement.memory_nodes)
    if allowed_nodes is not None and nodes & ~allowed_nodes:
        return (
            f"NUMA node {format_cpu_list(nodes & ~allowed_nodes)} of the placement is outside the NUMA nodes "
            f"{format_cpu_list(allowed_nodes)} that this pod may use"
        )
    return trial(placement.memory_mode, placement.memory_nodes)


def _why(call: str, code: int, policy: int, nodes: Sequence[int]) -> str:
    if code == errno.EPERM:
        return f"the pod's seccomp profile forbids {call}"
    if code == errno.ENOSYS:
        return f"the kernel has no {call}, or the pod's seccomp profile hides it"
    if code == errno.EINVAL and policy == _PREFERRED_MANY:
        return "the kernel cannot prefer several NUMA nodes at once (it needs Linux 5.15)"
    named = format_cpu_list(mask_of(nodes))
    return f"the kernel refuses NUMA node {named} with {call}: {os.strerror(code)}"
