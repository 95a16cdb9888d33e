"""Plain best fit on every level: NUMA nodes, L3 groups, cores. No client's product, and what to beat."""

from __future__ import annotations

from itertools import combinations

from kvplace.core.cpuset import lowest
from kvplace.core.scalars import NO_CPUS
from kvplace.core.topology import Topology


def best_fit(topology: Topology, free: int, count: int) -> int | None:
    """The fewest NUMA nodes, of these the ones with the fewest free CPUs, filled up one after the other."""
    if free.bit_count() < count:
        return None
    sizes = [((node.cpus & free).bit_count(), node) for node in topology.numa_nodes if node.cpus & free]
    for width in range(1, len(sizes) + 1):
        able = [
            (sum(size for size, _ in group), [node.id for _, node in group], group)
            for group in combinations(sizes, width)
            if sum(size for size, _ in group) >= count
        ]
        if not able:
            continue
        taken = 0
        for _, node in sorted(min(able)[2], key=lambda pair: (-pair[0], pair[1].id)):
            inside = node.cpus & free
            taken |= by_l3(topology, inside, min(inside.bit_count(), count - taken.bit_count()))
        return taken
    return None


def by_l3(topology: Topology, free: int, count: int) -> int:
    """The tightest L3 group that holds the rest, else the largest; inside one the tightest cores."""
    taken = 0
    groups = list(topology.l3_groups)
    while taken.bit_count() < count:
        rest = count - taken.bit_count()
        sizes = [((group & free).bit_count(), -index) for index, group in enumerate(groups)]
        tight = [(size, -index) for size, index in sizes if size >= rest]
        index = min(tight)[1] if tight else -max(sizes)[1]
        inside = groups[index] & free
        taken |= _by_core(topology, inside, min(rest, inside.bit_count()))
        groups[index] = NO_CPUS
    return taken


def _by_core(topology: Topology, free: int, count: int) -> int:
    taken = 0
    cores = [core & free for core in topology.cores if core & free]
    while taken.bit_count() < count:
        rest = count - taken.bit_count()
        tight = [core for core in cores if core.bit_count() >= rest]
        # min and max keep the first of equal ones, which is the lowest core.
        core = min(tight, key=int.bit_count) if tight else max(cores, key=int.bit_count)
        cores.remove(core)
        taken |= lowest(core, rest)
    return taken
