"""Where one VM may go when room is made, as regions of the machine, and what it takes there in counts.

Counts decide most of a search for room: a region that lacks CPUs, whole cores or memory by count can never
hold a VM, however its CPUs lie. What the counts allow is then tried in earnest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations
from math import comb

from kvplace.core.occupant import Occupant, RunningVms, locality_of, memory_of
from kvplace.core.placement import Placement
from kvplace.core.request import EmulatorThreads, NumaMemory, Policy, Request, Scope, Smt
from kvplace.core.topology import NumaNode, Topology

_MOST_GROUPS = 2000
"""Groups of NUMA nodes looked at for one VM and domain; beyond that only the whole domain is."""


@dataclass(frozen=True, slots=True)
class Region:
    """A part of the machine that a VM is to lie in."""

    cpus: int
    nodes: frozenset[int]
    """Ids of the NUMA nodes that it touches."""
    moved: int
    """Bytes that must at least go to another NUMA node when the VM moves here."""


@dataclass(frozen=True, eq=False)
class Wish:
    """A VM that has to find a place: the new one, or a running one that makes room."""

    id: str
    """Empty for the new VM."""
    request: Request
    regions: tuple[Region, ...]
    """Cheapest first."""
    small_memory: int
    before: Placement | None = None

    @cached_property
    def owns(self) -> bool:
        """Whether it takes its CPUs from everybody else."""
        return self.request.owns_cpus

    @cached_property
    def units(self) -> int:
        """CPUs that it names, or whole cores with `smt: isolate`."""
        isolated = self.request.options.emulator_threads is EmulatorThreads.ISOLATE
        return self.request.vcpus + (isolated and self.request.options.policy is not Policy.NUMA)

    @cached_property
    def whole(self) -> bool:
        """Whether only whole cores will do."""
        return self.request.options.smt is not Smt.PREFER and self.request.options.policy is not Policy.NUMA

    @cached_property
    def owned_at_least(self) -> int:
        """How many CPUs it takes from everybody else, at least; none when it shares them."""
        return self.units if self.owns else 0

    @cached_property
    def owned_whole(self) -> int:
        """How many of these have to be CPUs of whole cores."""
        return self.owned_at_least if self.whole else 0


def newcomer(running_vms: RunningVms, request: Request, most_nodes: int, movable: int) -> Wish:
    """Say where a new VM would lie well: over no more than so many NUMA nodes.

    `movable` are all CPUs that can come free at best.
    """
    wish = Wish("", request, (), _small_memory(running_vms, request))
    regions = [
        Region(cpus, frozenset(node.id for node in nodes), 0)
        for cpus, nodes, _ in _regions(running_vms.topology, request.options.scope, lambda _: most_nodes)
        if _may_hold(wish, cpus, movable)
    ]
    return Wish("", request, tuple(regions), wish.small_memory)


def mover(running_vms: RunningVms, occupant: Occupant, movable: int) -> Wish:
    """Say where a running VM may go: within its own constraints, and strewn no further than it is."""
    topology, request, before = running_vms.topology, occupant.request, occupant.placement
    sits = locality_of(topology, before)
    there = memory_of(request, before)
    wish = Wish(occupant.id, request, (), _small_memory(running_vms, request), before)
    regions = []
    for cpus, nodes, all_used in _regions(
        topology, request.options.scope, lambda count: sits[1] if sits[0] == 1 else count
    ):
        ids = frozenset(node.id for node in nodes)
        if all_used and _at_best(wish, topology, cpus, nodes) > sits:
            continue
        if _may_hold(wish, cpus, movable):
            regions.append(Region(cpus, ids, sum(n for node, n in there.items() if node not in ids)))
    regions.sort(key=lambda region: (region.moved, len(region.nodes), region.cpus))
    return Wish(occupant.id, request, tuple(regions), wish.small_memory, before)


def _regions(
    topology: Topology, scope: Scope, most: Callable[[int], int]
) -> Iterator[tuple[int, Sequence[NumaNode], bool]]:
    """Yield (CPUs, NUMA nodes, whether a VM there is meant to use all the nodes)."""
    seen: set[int] = set()
    for domain in _domains(topology, scope):
        nodes = [node for node in topology.numa_nodes if node.cpus & domain]
        largest = min(len(nodes), most(len(nodes)))
        if sum(comb(len(nodes), size) for size in range(1, largest + 1)) > _MOST_GROUPS:
            yield domain, nodes, False
            continue
        for size in range(1, largest + 1):
            for group in combinations(nodes, size):
                cpus = 0
                for node in group:
                    cpus |= node.cpus & domain
                if cpus not in seen:
                    seen.add(cpus)
                    yield cpus, group, True


def _domains(topology: Topology, scope: Scope) -> Sequence[int]:
    match scope:
        case Scope.ONE_SOCKET:
            return [package.cpus for package in topology.packages]
        case Scope.ONE_NUMA:
            return [node.cpus for node in topology.numa_nodes if node.cpus]
        case Scope.ONE_L3:
            return topology.l3_groups
        case Scope.ANY | Scope.SPREAD_SOCKETS | Scope.SPREAD_NUMA:
            return [topology.cpus]


def _at_best(
    wish: Wish, topology: Topology, cpus: int, nodes: Sequence[NumaNode]
) -> tuple[int, int, int, int]:
    """The best that a VM over all these NUMA nodes can sit."""
    touched = [topology.packages_of(node.cpus & cpus) for node in nodes]
    exact = len(nodes) <= wish.units and all(len(of_node) == 1 for of_node in touched)
    packages = len(set(touched)) if exact else 1
    distances = [topology.distance(a.id, b.id) for a, b in combinations(nodes, 2)]
    return packages, len(nodes), max(distances, default=0), sum(distances)


def _may_hold(wish: Wish, cpus: int, movable: int) -> bool:
    return (cpus & movable).bit_count() >= wish.units


def _small_memory(running_vms: RunningVms, request: Request) -> int:
    counted = any(node.memory for node in running_vms.topology.numa_nodes)
    if not counted or request.options.numa_memory is NumaMemory.OFF:
        return 0
    return max(0, request.memory - sum(size * count for size, count in request.huge_pages.items()))
