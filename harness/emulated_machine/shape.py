"""The shapes of machines that QEMU can show to a kernel."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

Distances = tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class Node:
    """One NUMA node: its CPUs as a CPU list, empty for a node that has memory alone."""

    cpus: str
    megabytes: int = 1024


@dataclass(frozen=True, slots=True)
class NvmeDisk:
    """An NVMe controller with SR-IOV behind a PCIe root of its own, which is on a NUMA node."""

    bus: int
    """Number of the root's bus; the controller is on the next one."""
    node: int
    virtual_functions: int = 2

    def qemu_arguments(self) -> Iterator[str]:
        """Give QEMU's options for root, port and controller."""
        name = f"disk{self.bus}"
        yield from ("-device", f"pxb-pcie,bus=pcie.0,id={name}r,bus_nr={self.bus},numa_node={self.node}")
        yield from ("-device", f"pcie-root-port,bus={name}r,id={name}p,chassis={self.bus}")
        yield from ("-device", f"nvme-subsys,id={name}s")
        count = self.virtual_functions
        functions = f"sriov_max_vfs={count},sriov_vq_flexible={2 * count},sriov_vi_flexible={count}"
        queues = f"max_ioqpairs={2 + 2 * count},msix_qsize={2 + count}"
        yield from ("-device", f"nvme,serial={name},bus={name}p,subsys={name}s,{functions},{queues}")


@dataclass(frozen=True, slots=True)
class Shape:
    """Sockets, dies (each with an L3 cache of its own), cores, threads, and NUMA nodes laid over them.

    CPUs are numbered as QEMU does it: the threads of a core next to each other, then cores, dies, sockets.
    """

    name: str
    sockets: int
    dies: int
    cores: int
    threads: int
    nodes: tuple[Node, ...]
    distances: Distances
    """Row by row, as /sys/devices/system/node/nodeN/distance has them."""
    kernel_arguments: str = ""
    disks: tuple[NvmeDisk, ...] = ()
    """Devices that a VM can get; with any the machine has an IOMMU."""

    @property
    def cpus(self) -> int:
        return self.sockets * self.dies * self.cores * self.threads

    @property
    def megabytes(self) -> int:
        return sum(node.megabytes for node in self.nodes)

    def qemu_arguments(self) -> Iterator[str]:
        """Give QEMU's options for the CPUs and the memory."""
        levels = f"sockets={self.sockets},dies={self.dies},cores={self.cores},threads={self.threads}"
        # Another vendor than Intel hides the siblings of a core from a kernel that runs without KVM.
        yield from ("-cpu", "max,vendor=GenuineIntel", "-smp", f"{self.cpus},{levels}")
        yield from ("-m", f"{self.megabytes}M")
        for number, node in enumerate(self.nodes):
            yield from ("-object", f"memory-backend-ram,id=memory{number},size={node.megabytes}M")
            cpus = "".join(f",cpus={part}" for part in node.cpus.split(",") if part)
            yield from ("-numa", f"node,nodeid={number},memdev=memory{number}{cpus}")
        for row, distances in enumerate(self.distances):
            for column, distance in enumerate(distances):
                yield from ("-numa", f"dist,src={row},dst={column},val={distance}")

    def device_arguments(self) -> Iterator[str]:
        """Give QEMU's options for the devices: after all others, which would take a place on their buses."""
        if self.disks:
            yield from ("-device", "intel-iommu,intremap=off,caching-mode=on")
        for disk in self.disks:
            yield from disk.qemu_arguments()


TWO_CPUS = Shape(
    "two-cpus",
    sockets=2,
    dies=1,
    cores=1,
    threads=1,
    nodes=(Node("0"), Node("1")),
    distances=((10, 21), (21, 10)),
)
TWO_SOCKETS = Shape(
    "two-sockets",
    sockets=2,
    dies=2,
    cores=2,
    threads=2,
    nodes=(Node("0-7"), Node("8-15")),
    distances=((10, 21), (21, 10)),
)
FOUR_NODES = Shape(
    "four-nodes",
    sockets=2,
    dies=2,
    cores=2,
    threads=2,
    nodes=(Node("0-3", 768), Node("4-7", 768), Node("8-11", 768), Node("12-15", 768)),
    distances=((10, 12, 21, 28), (12, 10, 28, 21), (21, 28, 10, 12), (28, 21, 12, 10)),
)
MEMORY_ONLY_NODE = Shape(
    "memory-only-node",
    sockets=2,
    dies=1,
    cores=2,
    threads=2,
    nodes=(Node("0-3"), Node("4-7"), Node("", 512)),
    distances=((10, 21, 24), (21, 10, 34), (24, 34, 10)),
)
WITH_DEVICES = Shape(
    "with-devices",
    sockets=2,
    dies=1,
    cores=4,
    threads=1,
    nodes=(Node("0-3"), Node("4-7")),
    distances=((10, 21), (21, 10)),
    kernel_arguments="intel_iommu=on",
    disks=(NvmeDisk(bus=0x40, node=0), NvmeDisk(bus=0xC0, node=1)),
)
"""NVMe controllers with virtual functions on both NUMA nodes, at 0000:41:00.0 and 0000:c1:00.0."""
