"""Rare machines where a search can take long: many NUMA nodes at odd distances.

Their packages and L3 groups cross the NUMA nodes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from random import Random

from kvplace.core.request import EmulatorThreads, PinningOptions, Policy, Request, Scope, Smt
from kvplace.core.scalars import Bytes, CpuMask, NumaId, PackageId
from kvplace.core.topology import NumaNode, Package, Topology

GIB = Bytes(1 << 30)
PACKAGES: Mapping[str, Callable[[int, int, int, int], int]] = {
    "a package to each NUMA node": lambda node, place, nodes, cpus: node,
    "two packages to each NUMA node": lambda node, place, nodes, cpus: 2 * node + (2 * place >= cpus),
    "two NUMA nodes to each package": lambda node, place, nodes, cpus: node // 2,
    "one package": lambda node, place, nodes, cpus: 0,
    "every NUMA node in two packages": lambda node, place, nodes, cpus: int(2 * place >= cpus),
    "every NUMA node in four packages": lambda node, place, nodes, cpus: 4 * place // cpus,
    "every NUMA node in all packages": lambda node, place, nodes, cpus: place,
    "a ring of packages": lambda node, place, nodes, cpus: (node + (2 * place >= cpus)) % nodes,
}
"""The package of a CPU, by its NUMA node, its place there, the number of nodes and of CPUs in each."""


def odd_machine(chance: Random, nodes: int, packages: str) -> Topology:
    """So many NUMA nodes at odd distances, of cores with odd widths behind odd L3 groups."""
    cpus = chance.choice((2, 4, 8, 16))
    far = _distances(chance, nodes)
    pieces: dict[tuple[int, int], list[int]] = defaultdict(list)
    for cpu in range(nodes * cpus):
        node, place = divmod(cpu, cpus)
        pieces[node, PACKAGES[packages](node, place, nodes, cpus)].append(cpu)
    of_package: dict[int, int] = defaultdict(int)
    of_l3: dict[tuple[int, int], int] = defaultdict(int)
    behind = chance.choice(("piece", "node", "package", "two cores", "anything"))
    widths = chance.choice(((1,), (2,), (2,), (4,), (1, 2, 3, 4)))
    cores = []
    for (node, package), inside in pieces.items():
        while inside:
            width = chance.choice(widths)
            core = sum(1 << cpu for cpu in inside[:width])
            del inside[:width]
            cores.append(core)
            of_package[package] |= core
            l3 = {
                "piece": (node, package),
                "node": (node, 0),
                "package": (package, 0),
                "two cores": (node, len(cores) // 2),
            }.get(behind, (chance.randrange(2 * nodes), 0))
            of_l3[l3] |= core
    mask = (1 << cpus) - 1
    return Topology(
        packages=tuple(
            Package(PackageId(number), CpuMask(inside)) for number, inside in sorted(of_package.items())
        ),
        numa_nodes=tuple(
            NumaNode(
                NumaId(node),
                CpuMask(mask << cpus * node),
                memory=16 * GIB,
                huge_pages={GIB: 8},
                distances={NumaId(other): far(node, other) for other in range(nodes)},
            )
            for node in range(nodes)
        ),
        l3_groups=tuple(map(CpuMask, of_l3.values())),
        cores=tuple(map(CpuMask, cores)),
    )


def odd_request(chance: Random) -> Request:
    """Any request for memory, of one CPU."""
    policy = chance.choice((Policy.EXCLUSIVE,) * 4 + (Policy.SHARE, Policy.NUMA))
    spreads = (Scope.SPREAD_SOCKETS, Scope.SPREAD_NUMA) if policy is not Policy.NUMA else ()
    return Request(
        1,
        PinningOptions(
            scope=chance.choice((Scope.ANY, Scope.ONE_SOCKET, *spreads, *spreads)),
            policy=policy,
            smt=chance.choice(tuple(Smt)) if policy is Policy.EXCLUSIVE else Smt.PREFER,
            emulator_threads=chance.choice(tuple(EmulatorThreads)),
        ),
        memory=GIB * chance.choice((0, 1, 1, 1)),
    )


def _distances(chance: Random, nodes: int) -> Callable[[int, int], int]:
    table = {(a, b): chance.randint(11, 60) for a in range(nodes) for b in range(a)}
    return chance.choice(
        (
            lambda a, b: 10 + 10 * (a != b),
            lambda a, b: 10 + 10 * (a ^ b).bit_count(),
            lambda a, b: 10 + 3 * min((a - b) % nodes, (b - a) % nodes),
            lambda a, b: 10 if a == b else table[max(a, b), min(a, b)],
            lambda a, b: 10 if a == b else 12 if table[max(a, b), min(a, b)] < 35 else 21,
        )
    )
