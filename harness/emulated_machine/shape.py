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
