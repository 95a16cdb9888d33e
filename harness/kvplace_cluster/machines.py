"""Machines for hollow nodes, small enough that one test can fill them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from harness.control_plane.hollow_node import NodeShape
from kvplace.core.cpuset import format_cpu_list, mask_of
from kvplace.core.node_topology import topology_document
from kvplace.core.scalars import Bytes, CpuMask, NumaId, PackageId
from kvplace.core.topology import NumaNode, Package, Topology

GIB = Bytes(1 << 30)


def two_socket_machine(
    cores_per_socket: int = 8,
    *,
    threads: int = 2,
    memory_gib: int = 64,
    huge_pages: Mapping[Bytes, int] | None = None,
    reserved_cores: int = 1,
) -> Topology:
    """Two sockets of one NUMA node and one L3 each; siblings N apart; socket 0's first cores reserved."""
    cores = 2 * cores_per_socket
    siblings = [mask_of(core + thread * cores for thread in range(threads)) for core in range(cores)]
    sockets = [
        mask_of(
            core + thread * cores
            for core in range(first, first + cores_per_socket)
            for thread in range(threads)
        )
        for first in (0, cores_per_socket)
    ]
    reserved = 0
    for core in siblings[:reserved_cores]:
        reserved |= core
    return Topology(
        packages=tuple(Package(PackageId(number), cpus) for number, cpus in enumerate(sockets)),
        numa_nodes=tuple(
            NumaNode(
                NumaId(number),
                cpus,
                memory_gib * GIB,
                dict(huge_pages or {}),
                {NumaId(number): 10, NumaId(1 - number): 21},
            )
            for number, cpus in enumerate(sockets)
        ),
        l3_groups=tuple(sockets),
        cores=tuple(siblings),
        reserved=CpuMask(reserved),
    )


def node_topology(name: str, topology: Topology) -> dict[str, Any]:
    """Write the NodeTopology object that the agent of a node would write."""
    return {
        "apiVersion": "kvplace.io/v1alpha1",
        "kind": "NodeTopology",
        "metadata": {"name": name},
        "spec": topology_document(topology),
    }


def write_machine(folder: Path, topology: Topology) -> dict[str, str]:
    """Write a container's view of this machine; answers the variables that point the hook there."""
    files = {
        "sys/devices/system/cpu/online": format_cpu_list(topology.cpus),
        "proc/self/cgroup": "",
        "proc/self/status": (
            f"Cpus_allowed_list:\t{format_cpu_list(topology.cpus)}\n"
            f"Mems_allowed_list:\t{format_cpu_list(mask_of(node.id for node in topology.numa_nodes))}\n"
        ),
    } | {
        f"sys/devices/system/node/node{node.id}/cpulist": format_cpu_list(node.cpus)
        for node in topology.numa_nodes
    }
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return {"KVPLACE_PROC_FOLDER": str(folder / "proc"), "KVPLACE_SYS_FOLDER": str(folder / "sys")}


def node_shape(name: str, topology: Topology) -> NodeShape:
    """Describe the hollow node around a machine."""
    pages: dict[str, int] = {}
    for node in topology.numa_nodes:
        for size, count in node.huge_pages.items():
            key = f"{size >> 30}Gi" if size >= GIB else f"{size >> 20}Mi"
            pages[key] = pages.get(key, 0) + (size * count >> 20)
    return NodeShape(
        name,
        cpus=topology.cpus.bit_count(),
        memory=f"{sum(node.memory for node in topology.numa_nodes) >> 20}Mi",
        hugepages={size: f"{amount}Mi" for size, amount in pages.items()},
        reserved_cpus=topology.reserved.bit_count(),
    )
