"""Which CPUs and memory one VM gets on one machine.

`place` is the one question that Filter, Bind, the simulator and the offline commands ask; its answer depends
on its arguments alone. Among all placements that the request allows it takes the smallest by `NodeRank`; then
by the same without the nodes that give memory alone, and by the memory of these; then by `CoreRank`, and by
ids.
It goes from coarse to fine:

 1. `available_units` counts the free resources, in the request's own unit: CPUs, or whole free cores.
 2. `layout.Layout` gives the scope's domains: each socket, NUMA node or L3 group that a `one-*` scope names,
    the whole machine for the others. All CPUs lie in one of them.
 3. `numa_sets.best_numa_sets` finds the sets of NUMA nodes in a domain that have the CPUs, the memory and the
    huge pages, with the fewest sockets and nodes and the smallest distances. It counts and chooses no core.
    A set of nodes that are far apart is not searched (branch and bound, `nearest_nodes`). When that search
    reaches its bound, `feasibility` builds a set that serves, if there is any. Where memory needs more nodes
    than the CPUs do, `giving_cpus` states which of them give CPUs.
 4. `group_knapsack.GroupKnapsack.bound` states for each set, cheaply, how many L3 groups and cores it takes
    at least.
 5. `GroupKnapsack.serve` chooses the cores in the sets, best bound first, until no other set can be better:
    L3 groups (`set_cover`), then cores (`core_choice`), in equal shares where the scope spreads.
 6. The cheapest choice becomes a `Placement`: `placement_of` orders the vCPUs and splits the memory.
 7. If there is none, `feasibility.refuse` names the first constraint that fails, and the shortfall.

Every search has a bound in steps (`search_budget`); docs/reference/bounds.md lists them with their cost.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from operator import itemgetter

from kvplace.core.allocator.available_units import AvailableUnits
from kvplace.core.allocator.core_choice import CoreChoice, CoreShare
from kvplace.core.allocator.device_choices import ANYWHERE
from kvplace.core.allocator.feasibility import fits, near_set, refuse, refuse_devices
from kvplace.core.allocator.group_knapsack import GroupKnapsack, fragmentation
from kvplace.core.allocator.numa_sets import NumaSet, best_numa_sets, giving_cpus, rank_of
from kvplace.core.allocator.objectives import LEAST_CORES, CoreRank
from kvplace.core.cpuset import cpus_of, mask_of, union
from kvplace.core.free_resources import Free, free_of
from kvplace.core.guest_cells import mirrored
from kvplace.core.ledger import Ledger
from kvplace.core.placement import Placement, Refusal
from kvplace.core.quantity import bytes_in_pages
from kvplace.core.request import EmulatorThreads, GuestNuma, NumaMemory, Policy, Request, Smt
from kvplace.core.scalars import NO_CPUS, Bytes, CpuId, CpuMask, NumaId, NumaIndex
from kvplace.core.topology import Topology

_MOST_EQUALS = 8
"""NUMA sets with equally few L3 groups and cores that are searched for the least used CPUs and the least
cost."""


def place(topology: Topology, free: Free, request: Request) -> Placement | Refusal:
    """Choose CPUs and memory for one VM, or state the shortfall."""
    available = AvailableUnits(topology, free, request)
    chosen = _best_cores(available)
    if chosen is not None:
        return placement_of(available, chosen)
    if available.device_choices is not ANYWHERE:
        available = available.without_devices()
        if _best_cores(available) is not None:
            return refuse_devices(AvailableUnits(topology, free, request))
    return refuse(
        available,
        never=not _fits_empty(topology, request),
        fits=lambda other: fits(AvailableUnits(topology, free, other).without_devices()),
    )


def try_place(topology: Topology, free: Free, request: Request) -> Placement | None:
    """Choose as `place` does; None instead of a refusal, since its reasons may cost more than the search."""
    available = AvailableUnits(topology, free, request)
    chosen = _best_cores(available)
    return None if chosen is None else placement_of(available, chosen)


def may_fit(topology: Topology, free: Free, request: Request) -> bool:
    """Whether a placement exists; counting is much cheaper than the choice of cores."""
    available = AvailableUnits(topology, free, request)
    return bool(available.device_choices) and fits(available)


@lru_cache(maxsize=4096)
def _fits_empty(topology: Topology, request: Request) -> bool:
    return fits(AvailableUnits(topology, free_of(topology, Ledger()), request).without_devices())


def _best_cores(available: AvailableUnits) -> ChosenCores | None:
    domains = available.layout.domains[available.request.options.scope.within]
    if not available.device_choices or all(available.units_in(domain) < available.need for domain in domains):
        return None
    numa_sets = _unlike(available, giving_cpus(available, _numa_sets(available)))
    knapsack = GroupKnapsack(available)
    if len(numa_sets) > 1:
        bounded = sorted(_bounds(knapsack, numa_sets), key=lambda pair: pair[0])
    else:
        bounded = [(LEAST_CORES, numa_set) for numa_set in numa_sets]
    best: ChosenCores | None = None
    for number, (bound, numa_set) in enumerate(bounded):
        if best is not None and (
            bound > best.rank
            or knapsack.budget.is_spent
            or (number >= _MOST_EQUALS and bound.extent >= best.rank.extent)
        ):
            break
        choice = knapsack.serve(numa_set)
        if choice is not None:
            found = _ranked(available, numa_set, choice)
            if best is None or found.is_better_than(best):
                best = found
    return best


def _numa_sets(available: AvailableUnits) -> list[NumaSet]:
    found = best_numa_sets(available)
    if available.budget.is_spent:
        built = near_set(available)
        if built is not None and (not found or rank_of(available, built) < rank_of(available, found[0])):
            return [built]
    return found


def _bounds(knapsack: GroupKnapsack, numa_sets: list[NumaSet]) -> list[tuple[CoreRank, NumaSet]]:
    """The NUMA sets after their bounds; further sets without a step left are not searched."""
    bounded: list[tuple[CoreRank, NumaSet]] = []
    for numa_set in numa_sets:
        if bounded and knapsack.budget.is_spent:
            break
        segments = sum([len(part.segments) for part in numa_set.parts])
        knapsack.budget.spend(8 * segments if numa_set.domain.shares_l3 else segments)
        bounded.append((knapsack.bound(numa_set), numa_set))
    return bounded


@dataclass(frozen=True, slots=True)
class ChosenCores:
    """The cores of a VM with their rank, and its NUMA nodes by their index in the topology."""

    rank: CoreRank
    cpus: CpuMask
    nodes: tuple[NumaIndex, ...]
    """The NUMA nodes of its cores."""
    every_node: tuple[NumaIndex, ...]
    """These, and the NUMA nodes that give it memory alone."""
    taken: tuple[CoreShare, ...]

    def is_better_than(self, other: ChosenCores) -> bool:
        """Whether the rank is smaller, or equal with the lower ids."""
        if self.rank != other.rank:
            return self.rank < other.rank
        unlike = self.cpus ^ other.cpus
        return bool(self.cpus & unlike & -unlike)


def _ranked(available: AvailableUnits, numa_set: NumaSet, choice: CoreChoice) -> ChosenCores:
    cpus = owned = NO_CPUS
    for taken in choice.taken:
        cpus |= taken.cpus
        owned |= taken.core if available.smt is not Smt.PREFER else taken.cpus
    rank = choice.rank._replace(fragmentation=fragmentation(available, numa_set.parts, owned))
    nodes = dict.fromkeys([part.node for part in numa_set.parts if part.cpus & cpus])
    return ChosenCores(rank, cpus, tuple(nodes), tuple(sorted(numa_set.nodes)), choice.taken)


def _unlike(available: AvailableUnits, numa_sets: list[NumaSet]) -> list[NumaSet]:
    """Leave out NUMA sets that differ from an earlier one in nothing but ids."""
    if len(numa_sets) == 1 or available.uses:
        return numa_sets
    unlike: dict[object, NumaSet] = {}
    for numa_set in numa_sets:
        if numa_set.domain.shares_l3 and len(numa_set.parts) > 1:
            return numa_sets
        kinds = [
            (
                available.count(part).kind,
                (available.free.cpus & part.cpus).bit_count(),
                available.devices_at(part.node),
            )
            for part in numa_set.parts
        ]
        unlike.setdefault(tuple(sorted(kinds)), numa_set)
    return list(unlike.values())


def placement_of(available: AvailableUnits, chosen: ChosenCores) -> Placement:
    """Give every vCPU its CPU, and the VM its memory."""
    topology, request = available.topology, available.request
    placed = sorted(
        [(_place_in_machine(available, taken), taken) for taken in chosen.taken], key=itemgetter(0)
    )
    cores = [taken for _, taken in placed]
    units = [cpu for taken in cores for cpu in cpus_of(taken.cpus)]
    named = union(taken.cpus for taken in cores)
    vcpus: tuple[CpuId, ...]
    if request.options.policy is Policy.NUMA:
        vcpus, emulator_own = (), named
    else:
        own = _emulators_unit(available, cores) if available.need > request.vcpus else None
        vcpus = tuple(cpu for cpu in units if cpu != own)
        emulator_own = NO_CPUS if own is None else mask_of([own])
    whole = named
    if available.smt is not Smt.PREFER:
        for taken in cores:
            whole |= taken.core
    if available.smt is Smt.REQUIRE:
        emulator_own |= whole & ~named
        named = whole
    emulator = emulator_own or _emulator_cpus(available, chosen, mask_of(vcpus) or named)
    nodes = [topology.numa_nodes[index] for index in chosen.every_node]
    placement = Placement(
        policy=request.options.policy,
        vcpus=vcpus,
        cpus=named,
        owned=whole if request.owns_cpus else NO_CPUS,
        emulator_cpus=emulator,
        io_thread_cpus=_io_thread_cpus(request.io_threads, emulator, one_each=bool(emulator_own and vcpus)),
        numa_nodes=tuple(node.id for node in nodes),
        memory=_memory(available, chosen),
        huge_pages=_pages(available, chosen),
        packages=topology.packages_of(named),
        l3_groups=tuple(sorted({place[3] for place, _ in placed})),
        numa_memory=request.options.numa_memory if available.free.memory else NumaMemory.OFF,
    )
    if request.options.guest_numa is GuestNuma.MIRROR:
        pages = {node: bytes_in_pages(counts) for node, counts in placement.huge_pages.items()}
        placement = replace(placement, guest_cells=mirrored(topology, vcpus, placement.memory or pages))
    return placement


def _place_in_machine(available: AvailableUnits, taken: CoreShare) -> tuple[int, int, int, int, int]:
    """Order cores so that siblings, and the CPUs of a package, NUMA node and L3 group, stay side by side.

    Partly taken cores come last in their node, so that they shift no pair of siblings.
    """
    first = CpuId((taken.core & -taken.core).bit_length() - 1)
    socket, node, l3 = available.layout.place_of[first]
    return (socket, node, -taken.cpus.bit_count(), l3, first)


def _emulators_unit(available: AvailableUnits, cores: Sequence[CoreShare]) -> CpuId:
    """The CPU that QEMU's own threads get for themselves: the last one, of a core that is taken in part.

    Where the VM is spread evenly it comes from a part with the larger share, so that the vCPUs are spread
    evenly too.
    """
    named = union(taken.cpus for taken in cores)
    shares = [
        named & domain.cpus for domain in available.layout.domains[available.request.options.scope.over]
    ]
    largest = max([share.bit_count() for share in shares])
    in_largest = union(share for share in shares if share.bit_count() == largest)
    last_of_each = [
        (taken.cpus.bit_count(), -place, CpuId(taken.cpus.bit_length() - 1))
        for place, taken in enumerate(cores)
    ]
    _, _, cpu = min(last for last in last_of_each if in_largest >> last[2] & 1)
    return cpu


def _emulator_cpus(available: AvailableUnits, chosen: ChosenCores, own: CpuMask) -> CpuMask:
    """CPUs for QEMU's own threads that no other VM can ever own.

    These are the reserved CPUs of the VM's NUMA nodes, else the nearest ones of its sockets. Without reserved
    CPUs there they are the VM's own: its emulator may slow down this VM, but no other one.
    """
    topology = available.topology
    if available.request.options.emulator_threads is EmulatorThreads.WITH_VCPUS:
        return own
    reserved = NO_CPUS
    for socket in topology.sockets:
        if socket.cpus & own:
            reserved |= socket.cpus & topology.reserved
    by_distance: dict[tuple[bool, int], CpuMask] = {}
    for index, node in enumerate(topology.numa_nodes):
        if here := node.cpus & reserved:
            nearest = min(available.layout.distances[one][index] for one in chosen.nodes)
            place = (index not in chosen.nodes, nearest)
            by_distance[place] = by_distance.get(place, NO_CPUS) | here
    return by_distance[min(by_distance)] if by_distance else own


def _io_thread_cpus(count: int, emulator: CpuMask, *, one_each: bool) -> tuple[CpuMask, ...]:
    """The CPUs of each I/O thread: all CPUs of the emulator, or one of these in turn.

    QEMU's main loop runs mostly on the first CPU, so the I/O threads begin at the second.
    """
    if not one_each:
        return (emulator,) * count
    cpus = list(cpus_of(emulator))
    return tuple([mask_of([cpus[(number + 1) % len(cpus)]]) for number in range(count)])


def _memory(available: AvailableUnits, chosen: ChosenCores) -> dict[NumaId, Bytes]:
    if not available.counts_memory:
        return {}
    ids = [available.topology.numa_nodes[index].id for index in chosen.every_node]
    pages = _pages(available, chosen)
    capacity = [available.memory_of(index) for index in chosen.every_node]
    near_first = available.request.options.numa_memory is not NumaMemory.INTERLEAVE
    shares = _split(available.small_memory, capacity, chosen, near_first=near_first)
    return {
        node: Bytes(count)
        for node, share in zip(ids, shares, strict=True)
        if (count := share + bytes_in_pages(pages.get(node, {})))
    }


def _pages(available: AvailableUnits, chosen: ChosenCores) -> dict[NumaId, dict[Bytes, int]]:
    split: dict[NumaId, dict[Bytes, int]] = {}
    # Without cells that are bound one by one, pages of several nodes are taken page by page.
    near_first = available.request.options.guest_numa is GuestNuma.MIRROR
    for size, count in sorted(available.request.huge_pages.items()):
        capacity = [available.pages_of(index, size) for index in chosen.every_node]
        shares = _split(count, capacity, chosen, near_first=near_first)
        for index, share in zip(chosen.every_node, shares, strict=True):
            if share:
                split.setdefault(available.topology.numa_nodes[index].id, {})[size] = share
    return split


def _split(amount: int, capacity: Sequence[int], chosen: ChosenCores, *, near_first: bool) -> list[int]:
    """Split an amount over all nodes; `near_first`: the nodes of the cores give as much as they can."""
    if not near_first or len(chosen.nodes) == len(chosen.every_node):
        return _even_split(amount, capacity)
    near = [
        room if index in chosen.nodes else 0 for index, room in zip(chosen.every_node, capacity, strict=True)
    ]
    first = min(amount, sum(near))
    rest = [room - here for room, here in zip(capacity, near, strict=True)]
    shares = zip(_even_split(first, near), _even_split(amount - first, rest), strict=True)
    return [near_share + far_share for near_share, far_share in shares]


def _even_split(amount: int, capacity: Sequence[int]) -> list[int]:
    """Split an amount as evenly as the capacities allow; together they must suffice."""
    shares = [0] * len(capacity)
    ordered = sorted(range(len(capacity)), key=lambda index: (capacity[index], index))
    for done, index in enumerate(ordered):
        share = min(capacity[index], -(-amount // (len(capacity) - done)))
        shares[index] = share
        amount -= share
    return shares
