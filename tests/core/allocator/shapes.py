"""Small machines of every build that real ones have, for tests that check all their free sets.

CPUs are numbered without gaps. Siblings are far apart where Linux numbers them so, next to each other
elsewhere; the order of the domains is not always the order of their CPUs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kvplace.core.cpuset import parse_cpu_list
from kvplace.core.topology import Topology
from tests.core.machines import GIB, make_numa_node, make_package, make_topology


def machine(
    *,
    packages: Sequence[str],
    nodes: Sequence[str],
    l3: Sequence[str],
    cores: Sequence[str],
    distances: Sequence[Mapping[int, int]] = (),
    memory: Sequence[int] = (),
    pages: Sequence[int] = (),
) -> Topology:
    """Write a machine in Linux's own form: CPU lists by level, memory in GiB, pages of 1 GiB."""
    return make_topology(
        packages=tuple(make_package(number, parse_cpu_list(cpus)) for number, cpus in enumerate(packages)),
        numa_nodes=tuple(
            make_numa_node(
                place,
                parse_cpu_list(cpus),
                memory=memory[place] * GIB if memory else 0,
                huge_pages={GIB: pages[place]} if pages else {},
                distances=distances[place] if distances else {},
            )
            for place, cpus in enumerate(nodes)
        ),
        l3_groups=tuple(map(parse_cpu_list, l3)),
        cores=tuple(map(parse_cpu_list, cores)),
    )


def slit(*rows: Sequence[int]) -> list[dict[int, int]]:
    """A distance table as `numactl -H` prints it; 0 where the machine reports none."""
    return [{other: far for other, far in enumerate(row) if far} for row in rows]


TWO_SOCKETS = machine(
    packages=["0-2,6-8", "3-5,9-11"],
    nodes=["0-2,6-8", "3-5,9-11"],
    l3=["0-2,6-8", "3-5,9-11"],
    cores=["0,6", "1,7", "2,8", "3,9", "4,10", "5,11"],
    distances=slit([10, 21], [21, 10]),
)
SMALL_TWO_SOCKETS = machine(
    packages=["0,2,4,6", "1,3,5,7"],
    nodes=["0,2,4,6", "1,3,5,7"],
    l3=["0,2,4,6", "1,3,5,7"],
    cores=["0,4", "2,6", "1,5", "3,7"],
)
SUB_NUMA_CLUSTERS = machine(
    packages=["0-3", "4-7"],
    nodes=["0-1", "2-3", "4-5", "6-7"],
    l3=["0-3", "4-7"],
    cores=["0-1", "2-3", "4-5", "6-7"],
    distances=slit([10, 12, 21, 22], [12, 10, 22, 21], [21, 22, 10, 12], [22, 21, 12, 10]),
)
SEVERAL_L3 = machine(
    packages=["0-11"],
    nodes=["0-5", "6-11"],
    l3=["0-2", "3-5", "6-8", "9-11"],
    cores=[str(cpu) for cpu in range(12)],
)
SMALL_L3 = machine(
    packages=["0-7"],
    nodes=["0-1,4-5", "2-3,6-7"],
    l3=["0,4", "1,5", "2,6", "3,7"],
    cores=["0,4", "1,5", "2,6", "3,7"],
    distances=slit([10, 11], [11, 10]),
)
HYBRID = machine(
    packages=["0-8"],
    nodes=["0-8"],
    l3=["0-4", "5-8"],
    cores=["0-1", "2-3", "4", "5-6", "7", "8"],
)
OFFLINE_SIBLINGS = machine(
    packages=["0-2,6", "3-5,7-8"],
    nodes=["0-2,6", "3-5,7-8"],
    l3=["0-2,6", "3-5,7-8"],
    cores=["0", "1,6", "2", "3,7", "4,8", "5"],
    distances=slit([10, 20], [20, 10]),
)
UNEVEN_SOCKETS = machine(
    packages=["0-1", "2-5", "6-8"],
    nodes=["0-1", "2-5", "6-8"],
    l3=["6-8", "0-1", "2-3", "4-5"],
    cores=["0-1", "2-3", "4-5", "6-7", "8"],
    distances=slit([10, 32, 21], [32, 10, 21], [21, 21, 10]),
)
NODE_INTERLEAVING = machine(
    packages=["0-1,4-5", "2-3,6-7"],
    nodes=["0-7"],
    l3=["0,4", "1,5", "2-3,6-7"],
    cores=["0,4", "1,5", "2,6", "3,7"],
)
FOUR_THREADS = machine(
    packages=["0-7", "8"],
    nodes=["0-3", "4-7", "8"],
    l3=["0-3", "4-7", "8"],
    cores=["0-3", "4-7", "8"],
    distances=slit([10, 40, 40], [40, 10, 20], [40, 20, 10]),
)
PARTIAL_DISTANCES = machine(
    packages=["0-3", "4-7"],
    nodes=["0-1", "2-3", "4-5", "6-7"],
    l3=["0-1", "2-3", "4-5", "6-7"],
    cores=[str(cpu) for cpu in range(8)],
    distances=slit([10, 16, 0, 22], [15, 10, 28, 0], [0, 16, 10, 16], [16, 0, 22, 10]),
)
FAR_NODES = machine(
    packages=["0-7"],
    nodes=["0-1", "2", "3-4", "5", "6-7"],
    l3=["0-1", "2", "3-4", "5", "6-7"],
    cores=[str(cpu) for cpu in range(8)],
    distances=slit(
        [10, 16, 22, 28, 16],
        [16, 10, 16, 22, 28],
        [22, 16, 10, 16, 22],
        [28, 22, 16, 10, 16],
        [16, 28, 22, 16, 10],
    ),
)
SCARCE_MEMORY = machine(
    packages=["0-3", "4-7"],
    nodes=["0-1", "2-3", "4-6", "7", ""],
    l3=["0-1", "2-3", "4-7"],
    cores=["0-1", "2-3", "4", "5", "6-7"],
    distances=slit(
        [10, 11, 21, 21, 17],
        [11, 10, 21, 21, 28],
        [21, 21, 10, 11, 28],
        [21, 21, 11, 10, 28],
        [17, 28, 28, 28, 10],
    ),
    memory=[3, 5, 0, 4, 16],
    pages=[1, 3, 0, 2, 8],
)
EACH_CORE_A_SOCKET = machine(
    packages=["0-1", "2-3", "4-5", "6-7"],
    nodes=["0-3", "4-7"],
    l3=["0-1", "2-3", "4-5", "6-7"],
    cores=["0-1", "2-3", "4-5", "6-7"],
    distances=slit([10, 21], [21, 10]),
)
EACH_CORE_A_SOCKET_AND_A_NODE = machine(
    packages=["0-1", "2-3", "4-5", "6-7"],
    nodes=["0-1", "2-3", "4-5", "6-7"],
    l3=["0-3", "4-7"],
    cores=["0-1", "2-3", "4-5", "6-7"],
    distances=slit([10, 12, 21, 21], [12, 10, 21, 21], [21, 21, 10, 12], [21, 21, 12, 10]),
    memory=[4, 3, 2, 4],
    pages=[2, 0, 1, 2],
)
TANGLED = machine(
    packages=["0-2", "3-7"],
    nodes=["0-3", "4-5", "6-7"],
    l3=["0,4", "1-3", "5-7"],
    cores=["0,4", "1-2", "3", "5", "6-7"],
    distances=slit([10, 12, 20], [14, 10, 20], [20, 20, 10]),
)

SHAPES: dict[str, Topology] = {
    name.lower().replace("_", "-"): value
    for name, value in list(globals().items())
    if isinstance(value, Topology) and value is not TANGLED
}
"""Those with levels that nest."""
