"""The targets of a VM: the sets of NUMA nodes that may hold it when room is made.

Counts decide most of a search for moves: a target that has too few CPUs, whole cores or bytes cannot hold a
VM, however its cores lie. Only what the counts allow is then placed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import combinations
from math import comb

from kvplace.core.allocator.available_units import counted_unit, units_needed
from kvplace.core.allocator.layout import layout_of
from kvplace.core.allocator.set_cover import fewest
from kvplace.core.occupant import Occupant, RunningVms, locality_of, memory_of
from kvplace.core.placement import Placement
from kvplace.core.quantity import plain_bytes
from kvplace.core.request import DeviceNuma, NumaMemory, Request, Scope, Smt
from kvplace.core.scalars import Bytes, CpuMask, NumaId
from kvplace.core.topology import NumaNode, Topology

_MAX_NODE_SETS = 2000
"""Sets of NUMA nodes of one scope domain. Where there are more, the whole scope domain is the only target."""


@dataclass(frozen=True, slots=True)
class Target:
    """The part of a machine that is to hold a VM."""

    cpus: CpuMask
    nodes: frozenset[NumaId]
    """Ids of its NUMA nodes."""
    moved: Bytes
    """Bytes that go to another NUMA node, at least, when the VM moves here."""


@dataclass(frozen=True, eq=False)
class VmToPlace:
    """A VM that needs CPUs: the new one, or a running one that moves."""

    id: str
    """Empty for the new VM."""
    request: Request
    targets: tuple[Target, ...]
    """The cheapest first."""
    plain_memory: Bytes
    """Bytes outside huge pages that it takes from its NUMA nodes; 0 where they are not counted."""
    before: Placement | None = None

    @cached_property
    def owns(self) -> bool:
        """Whether it owns its CPUs alone."""
        return self.request.owns_cpus

    @cached_property
    def units(self) -> int:
        """The number of its CPUs, or of its whole cores with `smt: isolate`."""
        return units_needed(self.request)

    @cached_property
    def whole(self) -> bool:
        """Whether it takes whole cores only."""
        return counted_unit(self.request) is not Smt.PREFER

    @cached_property
    def min_owned(self) -> int:
        """How many CPUs it owns at least."""
        return self.units if self.owns else 0

    @cached_property
    def min_owned_whole(self) -> int:
        """How many of these have to be CPUs of whole cores."""
        return self.min_owned if self.whole else 0


@dataclass(frozen=True, slots=True)
class Step:
    """One move in a search: a running VM goes to one of its targets."""

    vm: VmToPlace
    target: Target


def new_vm(running: RunningVms, request: Request, most_nodes: int, reachable: CpuMask) -> VmToPlace:
    """Find the targets of the new VM, of at most so many NUMA nodes.

    `reachable` are the CPUs that are free when every VM that may move is gone.
    """
    vm = VmToPlace("", request, (), _plain_memory(running, request))
    targets = tuple(
        Target(cpus, frozenset(node.id for node in nodes), Bytes(0))
        for cpus, nodes, _ in _node_sets(running.topology, request.options.scope, lambda _: most_nodes)
        if _may_hold(vm, cpus, reachable)
    )
    return VmToPlace("", request, targets, vm.plain_memory)


def moving_vm(running: RunningVms, occupant: Occupant, reachable: CpuMask) -> VmToPlace:
    """Find the targets of a running VM: in its own scope, and with no worse locality than it has."""
    topology, before = running.topology, occupant.placement
    request = _with_known_devices(topology, occupant)
    locality = locality_of(topology, before)
    memory = memory_of(request, before)
    vm = VmToPlace(occupant.id, request, (), _plain_memory(running, request), before)
    targets = []
    for cpus, nodes, uses_all in _node_sets(
        topology, request.options.scope, lambda count: locality[1] if locality[0] == 1 else count
    ):
        ids = frozenset(node.id for node in nodes)
        if request.device_nodes and ids != set(before.numa_nodes):
            continue  # The memory of a VM with devices cannot move.
        if uses_all and _best_locality(vm, topology, cpus, nodes) > locality:
            continue
        if _may_hold(vm, cpus, reachable):
            moved = Bytes(sum(count for node, count in memory.items() if node not in ids))
            targets.append(Target(cpus, ids, moved))
    targets.sort(key=lambda target: (target.moved, len(target.nodes), target.cpus))
    return VmToPlace(occupant.id, request, tuple(targets), vm.plain_memory, before)


def _with_known_devices(topology: Topology, occupant: Occupant) -> Request:
    """The request of a running VM, with its devices where it lies: they are no longer free."""
    request = occupant.request
    if not request.pins_memory:
        return request
    options = replace(request.options, device_numa=DeviceNuma.REQUIRED)
    nodes = frozenset(topology.nodes_of(occupant.placement.cpus))
    return replace(request, options=options, devices={}, device_nodes=nodes)


def _node_sets(
    topology: Topology, scope: Scope, most: Callable[[int], int]
) -> Iterator[tuple[CpuMask, Sequence[NumaNode], bool]]:
    """Yield (CPUs, NUMA nodes, whether a VM placed there is meant to use all of the nodes)."""
    seen: set[int] = set()
    for domain in (one.cpus for one in layout_of(topology).domains[scope.within]):
        nodes = [node for node in topology.numa_nodes if node.cpus & domain]
        largest = min(len(nodes), most(len(nodes)))
        if sum(comb(len(nodes), size) for size in range(1, largest + 1)) > _MAX_NODE_SETS:
            yield CpuMask(domain), nodes, False
            continue
        for size in range(1, largest + 1):
            for group in combinations(nodes, size):
                cpus = 0
                for node in group:
                    cpus |= node.cpus & domain
                if cpus not in seen:
                    seen.add(cpus)
                    yield CpuMask(cpus), group, True


def _best_locality(
    vm: VmToPlace, topology: Topology, cpus: CpuMask, nodes: Sequence[NumaNode]
) -> tuple[int, int, int, int]:
    """The best locality of a VM that uses all of these NUMA nodes."""
    sockets = [socket.cpus & cpus for socket in topology.sockets]
    touched = [[index for index, socket in enumerate(sockets) if socket & node.cpus] for node in nodes]
    needs_memory = bool(vm.plain_memory or vm.request.huge_pages)
    if len(nodes) <= vm.units and not needs_memory and all(len(of_node) == 1 for of_node in touched):
        packages = len({of_node[0] for of_node in touched})
    else:  # Some of the nodes may give memory alone.
        packages = fewest([socket.bit_count() for socket in sockets], vm.units)
    distances = [topology.distance(a.id, b.id) for a, b in combinations(nodes, 2)]
    return packages, len(nodes), max(distances, default=0), sum(distances)


def _may_hold(vm: VmToPlace, cpus: CpuMask, reachable: CpuMask) -> bool:
    return (cpus & reachable).bit_count() >= vm.units


def _plain_memory(running: RunningVms, request: Request) -> Bytes:
    counted = any(node.memory for node in running.topology.numa_nodes)
    if not counted or request.options.numa_memory is NumaMemory.OFF:
        return Bytes(0)
    return plain_bytes(request.memory, request.huge_pages)
