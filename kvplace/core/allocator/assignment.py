"""From the chosen cores to a placement: the order of the vCPUs, emulator CPUs, memory by NUMA node."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from operator import itemgetter

from kvplace.core.allocator.available_units import AvailableUnits
from kvplace.core.allocator.core_choice import CoreShare
from kvplace.core.cpuset import cpus_of, mask_of
from kvplace.core.guest_cells import mirrored
from kvplace.core.placement import Placement
from kvplace.core.quantity import bytes_in_pages
from kvplace.core.request import EmulatorThreads, GuestNuma, Level, NumaMemory, Policy, Smt
from kvplace.core.scalars import NO_CPUS, Bytes, CpuId, CpuMask, NumaId, NumaIndex


@dataclass(frozen=True, slots=True)
class ChosenCores:
    """The cores of a VM, and its NUMA nodes by their index in the topology."""

    nodes: tuple[NumaIndex, ...]
    """Those of its cores."""
    every_node: tuple[NumaIndex, ...]
    """These, and the NUMA nodes that give it memory alone."""
    taken: tuple[CoreShare, ...]


def placement_of(available: AvailableUnits, chosen: ChosenCores) -> Placement:
    """Give every vCPU its CPU, and the VM its memory."""
    topology, request = available.topology, available.request
    placed = sorted(
        [(_place_in_machine(available, taken), taken) for taken in chosen.taken], key=itemgetter(0)
    )
    cores = [taken for _, taken in placed]
    units = [cpu for taken in cores for cpu in cpus_of(taken.cpus)]
    named = NO_CPUS
    for taken in cores:
        named |= taken.cpus
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
        placement = replace(placement, guest_cells=mirrored(topology, vcpus, placement.memory))
    return placement


def _place_in_machine(available: AvailableUnits, taken: CoreShare) -> tuple[int, int, int, int, int]:
    """Siblings stay side by side, and so do the CPUs of a package, of a NUMA node, of an L3 group.

    Partly taken cores come last in their node, so that they shift no pair of siblings.
    """
    layout = available.layout
    first = CpuId((taken.core & -taken.core).bit_length() - 1)
    return (
        layout.socket_of[first],
        layout.node_of[first],
        -taken.cpus.bit_count(),
        layout.l3_of[first],
        first,
    )


def _emulators_unit(available: AvailableUnits, cores: Sequence[CoreShare]) -> CpuId:
    """The CPU that QEMU's own threads get for themselves: the last one, of a core that is taken in part.

    Where the VM is spread evenly it comes from a part with the larger share, so that the vCPUs are spread
    evenly too.
    """
    layout = available.layout
    scope = available.request.options.scope
    where: Mapping[CpuId, int] | None = None
    if scope.evenly:
        where = layout.socket_of if scope.level is Level.SOCKET else layout.node_of
    shares: dict[int, int] = {}
    if where is not None:
        for taken in cores:
            for cpu in cpus_of(taken.cpus):
                shares[where[cpu]] = shares.get(where[cpu], 0) + 1
    largest = max(shares.values(), default=0)
    _, _, cpu = min(
        (taken.cpus.bit_count(), -place, CpuId(taken.cpus.bit_length() - 1))
        for place, taken in enumerate(cores)
        if where is None or shares[where[CpuId(taken.cpus.bit_length() - 1)]] == largest
    )
    return cpu


def _emulator_cpus(available: AvailableUnits, chosen: ChosenCores, own: CpuMask) -> CpuMask:
    """CPUs for QEMU's own threads that can never become another VM's exclusive ones.

    That is the reserved CPUs of the VM's NUMA nodes, else the nearest ones of its sockets. Without any, the
    VM's own: its emulator may slow itself down, but no neighbour, and it does not work from another socket.
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
    """The CPUs of each I/O thread: those of the emulator, or one each of these in turn.

    QEMU's main loop runs on all of them, mostly on the first: with several the I/O threads begin at the next.
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
