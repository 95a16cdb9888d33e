"""The targets of a VM when room is made: sets of NUMA nodes that may hold it, and the shortages there.

Counts decide most of a search for moves: a target with too few CPUs, whole cores or bytes cannot hold a VM,
however its cores lie. A shortage by counts is certain. Without a shortage the VMs may still not fit, because
of the positions of their cores. Only targets without a shortage are placed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import combinations
from math import comb
from typing import TypeVar

from kvplace.core.allocator.available_units import counted_unit, units_needed
from kvplace.core.allocator.layout import layout_of
from kvplace.core.allocator.set_cover import fewest
from kvplace.core.ledger import claim_of
from kvplace.core.occupant import Occupant, RunningVms, locality_of, memory_of
from kvplace.core.placement import Placement
from kvplace.core.quantity import plain_bytes
from kvplace.core.request import DeviceNuma, NumaMemory, Policy, Request, Scope, Smt
from kvplace.core.scalars import NO_CPUS, Bytes, CpuMask, NumaId, PodUid
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


_Key = TypeVar("_Key", NumaId, tuple[NumaId, Bytes])
"""A NUMA node, or a NUMA node and a page size."""


@dataclass(frozen=True, slots=True)
class Shortage:
    """A resource that a target has too little of."""

    missing: int
    gains: tuple[tuple[int, str], ...]
    """The resources that each movable VM would give back, the largest first."""

    def must_move(self, gone: frozenset[str], left: int) -> list[str]:
        """Name the VMs if one of them must move; empty when `left` VMs cannot end the shortage."""
        open_ = [(gain, uid) for gain, uid in self.gains if uid not in gone]
        if sum(gain for gain, _ in open_[:left]) < self.missing:
            return []
        return [uid for gain, uid in open_ if gain * left >= self.missing]  # the largest of them, at least


class ResourceCounts:
    """The free CPUs and memory of a machine, and the amounts that each running VM would give back."""

    def __init__(self, running: RunningVms, movable: Mapping[str, Occupant]) -> None:
        self._topology = running.topology
        self._movable = movable
        free = running.free({})
        self._pool = free.pool
        self._shared = {
            uid: one.placement.cpus & ~one.placement.owned
            for uid, one in running.occupants.items()
            if one.placement.policy in (Policy.SHARE, Policy.IMMOVABLE)
        }
        self._owned = {
            uid: one.placement.owned & running.topology.allocatable for uid, one in movable.items()
        }
        self._memory = dict(free.memory)
        self._pages = {(node, size): count for node, size, count in free.huge_pages}
        claims = {uid: claim_of(PodUid(uid), one.placement) for uid, one in movable.items()}
        self._plain_memory_of = {uid: claim.plain_memory for uid, claim in claims.items()}
        self._pages_of = {
            uid: {(node, size): n for node, sizes in claim.huge_pages.items() for size, n in sizes.items()}
            for uid, claim in claims.items()
        }
        self._gains: dict[object, tuple[tuple[int, str], ...]] = {}
        self._frees: dict[frozenset[str], tuple[CpuMask, CpuMask]] = {}
        self._wholes: dict[frozenset[str], CpuMask] = {}

    def suffice_in_total(self, vm: VmToPlace) -> bool:
        """Whether the machine as a whole has enough: moves change the places of VMs, not their resources.

        Only VMs of whole cores may own fewer CPUs elsewhere, where cores have unequal numbers of threads.
        """
        free, pool = self._free_without(frozenset())
        needed = vm.min_owned - self._saved_at_most()
        if all(uid not in self._shared for uid in self._movable) and needed > free.bit_count():
            return False
        if needed > pool.bit_count():
            return False
        memory = sum(max(0, count) for count in self._memory.values())
        return not self._memory or vm.plain_memory <= memory

    def has_cpus(self, target: Target, vm: VmToPlace, gone: frozenset[str]) -> bool:
        """Whether a VM's CPUs are free in a target when these VMs are gone: the quickest check."""
        return vm.min_owned <= (self._free_without(gone)[0] & target.cpus).bit_count()

    def shortages(
        self, items: Sequence[tuple[VmToPlace, Target]], gone: frozenset[str]
    ) -> Iterator[Shortage]:
        """Yield the shortages after these VMs have moved to these targets, without the VMs in `gone`."""
        free, pool = self._free_without(gone)
        sets = {target.cpus: target.nodes for _, target in reversed(items)}  # the newest fails soonest
        if len(sets) > 1:
            everything, nodes = NO_CPUS, frozenset[NumaId]()
            for _, target in items:
                everything |= target.cpus
                nodes |= target.nodes
            sets.setdefault(everything, nodes)
        whole = any(vm.min_owned_whole for vm, _ in items)
        for cpus, nodes in sets.items():
            inside = [vm for vm, target in items if not target.cpus & ~cpus]
            owned = shared = needed = 0
            for vm in inside:
                owned += vm.min_owned
                needed += vm.min_owned_whole
                if not vm.min_owned and vm.units > shared:
                    shared = vm.units
            missing = owned - (free & cpus).bit_count()
            if shared:
                missing = max(missing, owned + shared - (pool & cpus).bit_count())
            if missing > 0:
                yield Shortage(missing, self._cpu_gains(cpus))
            elif whole and needed > (self._whole_cores(gone, free) & cpus).bit_count():
                yield Shortage(1, self._cpu_gains(cpus))
            yield from self._memory_shortages(inside, nodes, gone)

    def allow_in_order(self, steps: Sequence[Step]) -> bool:
        """Whether each step finds enough free CPUs in its target, by count, in this order of steps."""
        gone: frozenset[str] = frozenset()
        placed: dict[str, Step] = {}
        for step in steps:
            gone |= {step.vm.id}
            placed[step.vm.id] = step
            free, pool = self._free_without(gone)
            cpus = step.target.cpus
            owned = sum(one.vm.min_owned for one in placed.values() if not one.target.cpus & ~cpus)
            if owned > (free & cpus).bit_count():
                return False
            if not step.vm.owns and owned + step.vm.units > (pool & cpus).bit_count():
                return False
        return True

    def _saved_at_most(self) -> int:
        """The number of CPUs that all VMs may save by moves."""
        if len({core.bit_count() for core in self._topology.cores}) == 1:
            return 0
        return sum(
            max(0, owned.bit_count() - self._movable[uid].request.vcpus)  # a VM with fewer here may stay
            for uid, owned in self._owned.items()
        )

    def _free_without(self, gone: frozenset[str]) -> tuple[CpuMask, CpuMask]:
        """The CPUs that an exclusive VM may take, and that a sharing VM may take, when these are gone."""
        known = self._frees.get(gone)
        if known is None:
            pool = self._pool
            for uid in gone:
                pool |= self._owned[uid]
            free = pool
            for uid, cpus in self._shared.items():
                if uid not in gone:
                    free &= ~cpus
            known = self._frees[gone] = (free, pool)
        return known

    def _whole_cores(self, gone: frozenset[str], free: CpuMask) -> CpuMask:
        mask = self._wholes.get(gone)
        if mask is None:
            mask = NO_CPUS
            for core in self._topology.undivided_cores:
                if not core & ~free:
                    mask |= core
            self._wholes[gone] = mask
        return mask

    def _cpu_gains(self, cpus: CpuMask) -> tuple[tuple[int, str], ...]:
        if cpus not in self._gains:
            self._gains[cpus] = _descending(
                (((one.placement.cpus | one.placement.owned) & cpus).bit_count(), uid)
                for uid, one in self._movable.items()
            )
        return self._gains[cpus]

    def _memory_shortages(
        self, inside: Sequence[VmToPlace], nodes: frozenset[NumaId], gone: frozenset[str]
    ) -> Iterator[Shortage]:
        needed: int = sum(vm.plain_memory for vm in inside)
        if needed and self._memory:
            free = sum(_free_at(self._memory, self._plain_memory_of, node, gone) for node in nodes)
            if needed > free:
                yield Shortage(needed - free, self._memory_gains(self._plain_memory_of, nodes))
        for size in sorted({size for vm in inside for size in vm.request.huge_pages}):
            pages = frozenset((node, size) for node in nodes)
            needed = sum(vm.request.huge_pages.get(size, 0) for vm in inside)
            free = sum(_free_at(self._pages, self._pages_of, page, gone) for page in pages)
            if needed > free:
                yield Shortage(needed - free, self._memory_gains(self._pages_of, pages))

    def _memory_gains(
        self, held: Mapping[str, Mapping[_Key, int]], keys: frozenset[_Key]
    ) -> tuple[tuple[int, str], ...]:
        if keys not in self._gains:
            self._gains[keys] = _descending(
                (sum(of.get(key, 0) for key in keys), uid) for uid, of in held.items()
            )
        return self._gains[keys]


def _free_at(
    free: Mapping[_Key, int], held: Mapping[str, Mapping[_Key, int]], key: _Key, gone: frozenset[str]
) -> int:
    count = free.get(key, 0)
    for uid in gone:
        count += held[uid].get(key, 0)
    return max(0, count)


def _descending(gains: Iterable[tuple[int, str]]) -> tuple[tuple[int, str], ...]:
    """Keep the gains above zero, the largest first, equal ones by id."""
    return tuple(sorted((gain for gain in gains if gain[0] > 0), key=lambda gain: (-gain[0], gain[1])))
