"""What this container may use of the machine now: its CPUs, its NUMA nodes.

A pin outside the container's cpuset makes QEMU fail to start, and one that straddles its edge is cut down
by the kernel without a word; both are found out here, before libvirt sees the domain.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from kvplace.core.cpuset import cpus_of, format_cpu_list, parse_cpu_list
from kvplace.core.errors import Misconfigured
from kvplace.core.placement import PodPlacement
from kvplace.hook.surroundings import Surroundings


def check_cpus(placement: PodPlacement, around: Surroundings) -> None:
    """Raise Misconfigured when the placement names a CPU that is offline or outside our cpuset."""
    named = placement.cpus | placement.emulator_cpus
    for cpus in placement.io_thread_cpus:
        named |= cpus
    node = around.node or "this node"
    online = _read_list(Path(around.sys, "devices/system/cpu/online"))
    if online is not None and named & ~online:
        raise Misconfigured(
            f"CPU {format_cpu_list(named & ~online)} of the placement is not online on {node} (online: "
            f"{format_cpu_list(online)}); bring it back, or delete the pod so that it is placed again"
        )
    allowed = allowed_cpus(around)
    if allowed is not None and named & ~allowed:
        raise Misconfigured(
            f"CPU {format_cpu_list(named & ~allowed)} of the placement is outside this pod's cpuset "
            f"{format_cpu_list(allowed)} on {node}; something else manages its CPUs (the kubelet's static "
            "CPU manager?): turn that off, or delete the pod so that it is placed again"
        )


def allowed_cpus(around: Surroundings) -> int | None:
    """The effective cpuset of our cgroup (v2, then v1), else of this process; None when unknown."""
    for path in _cpuset_files(around):
        if cpus := _read_list(path):
            return cpus
    return _status_list(around, "Cpus_allowed_list")


def allowed_memory_nodes(around: Surroundings) -> int | None:
    """The NUMA nodes that this container may take memory from; None when unknown."""
    return _status_list(around, "Mems_allowed_list")


def node_of_cpus(around: Surroundings) -> dict[int, int]:
    """The host's NUMA node of each CPU."""
    return {
        cpu: int(folder.name[4:])
        for folder in Path(around.sys, "devices/system/node").glob("node[0-9]*")
        for cpu in cpus_of(_read_list(folder / "cpulist") or 0)
    }


def _cpuset_files(around: Surroundings) -> Iterator[Path]:
    """Where the cpuset of our own cgroup may stand, most telling first.

    Inside a cgroup namespace our path is `/`; in a v1 container without one the path is the host's while the
    mount shows our own cgroup at its root.
    """
    try:
        lines = Path(around.proc, "self/cgroup").read_text().splitlines()
    except OSError:
        return
    root = Path(around.sys, "fs/cgroup")
    for line in lines:
        hierarchy, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if hierarchy == "0" and not controllers:
            yield root / path.lstrip("/") / "cpuset.cpus.effective"
        elif "cpuset" in controllers.split(","):
            for folder in (root / controllers / path.lstrip("/"), root / controllers):
                yield folder / "cpuset.effective_cpus"
                yield folder / "cpuset.cpus"


def _status_list(around: Surroundings, key: str) -> int | None:
    try:
        for line in Path(around.proc, "self/status").read_text().splitlines():
            name, _, value = line.partition(":")
            if name == key:
                return parse_cpu_list(value)
    except (OSError, ValueError):
        pass
    return None


def _read_list(path: Path) -> int | None:
    try:
        return parse_cpu_list(path.read_text())
    except (OSError, ValueError):
        return None
