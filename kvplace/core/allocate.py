"""Which CPUs and memory one VM gets on one machine.

`place` is the one question that Filter, Bind, the demo and the offline commands ask; its answer depends
on its arguments alone. It works down the machine: the domains that the scope allows, inside one of them
the fewest and nearest NUMA nodes, inside those the L3 groups that fit best, inside those whole cores,
and of equal choices the lowest ids.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import combinations

from kvplace.core.cpuset import cpus_of, lowest, mask_of
from kvplace.core.errors import Corrupt
from kvplace.core.free import Free, free_of
from kvplace.core.ledger import Ledger
from kvplace.core.placement import Placement
from kvplace.core.quantity import format_bytes
from kvplace.core.refusal import THE_MACHINE, Reason, Refusal
from kvplace.core.request import EmulatorThreads, NumaMemory, Request, Scope, Smt
from kvplace.core.topology import NumaNode, Topology


def place(topology: Topology, free: Free, request: Request) -> Placement | Refusal:
    """Choose CPUs and memory for one VM, or say what is missing.

    1. Take the domains that the scope allows: sockets, NUMA nodes, L3 groups, or the machine.
    2. In each, find the fewest sockets, then the fewest and nearest NUMA nodes that hold the VM's
       CPUs, memory and huge pages.
    3. In those take the fewest L3 groups, in those the fewest cores, whole ones first.
    4. Of the domains keep the one with the best fit, then the lowest ids.
    """
    supply = _Supply(topology, free, request)
    best: _Choice | None = None
    for domain in _domains(topology, request.scope):
        choice = _choose_nodes(supply, domain)
        if choice is not None and (best is None or choice.key < best.key):
            best = choice
    if best is None:
        return _refuse(supply)
    return _placement(supply, best)


@dataclass(frozen=True, slots=True)
class _Domain:
    name: str
    cpus: int


def _domains(topology: Topology, scope: Scope) -> Sequence[_Domain]:
    match scope:
        case Scope.ONE_SOCKET:
            return [_Domain(f"socket {package.id}", package.cpus) for package in topology.packages]
        case Scope.ONE_NUMA:
            return [_Domain(f"numa {node.id}", node.cpus) for node in topology.numa_nodes if node.cpus]
        case Scope.ONE_L3:
            return [_Domain(f"L3 group {index}", cpus) for index, cpus in enumerate(topology.l3_groups)]
        case Scope.ANY:
            return [_Domain(THE_MACHINE, topology.cpus)]
        case Scope.SPREAD_SOCKETS | Scope.SPREAD_NUMA:
            raise Corrupt(f"scope {scope.value} reached the allocator, which does not offer it")


class _Supply:
    """What the machine can give to this request, counted in the request's own unit.

    The unit is a CPU; with `smt: isolate` it is a whole free core, of which one thread is used. With
    `smt: require` only CPUs of whole free cores count.
    """

    def __init__(self, topology: Topology, free: Free, request: Request) -> None:
        self.topology = topology
        self.free = free
        self.request = request
        self.need = request.vcpus + (
            1 if request.owns_cpus and request.emulator_threads is EmulatorThreads.ISOLATE else 0
        )
        self.memory = free.memory_by_node
        self.pages = free.pages_by_node
        self.uses = dict(free.uses)
        if request.owns_cpus:
            self.cpus = free.cpus
            if request.smt is not Smt.PREFER:
                self.cpus = mask_of_whole_cores(topology, free.cpus)
        else:
            self.cpus = free.pool
        self.counts_cores = request.owns_cpus and request.smt is Smt.ISOLATE
        self.counts_memory = bool(
            free.memory and request.memory and request.numa_memory is not NumaMemory.OFF
        )
        pages_bytes = sum(size * count for size, count in request.huge_pages.items())
        self.small_memory = max(0, request.memory - pages_bytes) if self.counts_memory else 0

    def capacity(self, cpus: int) -> int:
        """How many units lie in a set of CPUs."""
        available = self.cpus & cpus
        if not self.counts_cores:
            return available.bit_count()
        return sum(1 for core in self.topology.cores_in(cpus) if core & available)

    def memory_fits(self, nodes: Sequence[NumaNode]) -> bool:
        """Whether the nodes together have the memory and the huge pages."""
        if self.small_memory > sum(max(0, self.memory.get(node.id, 0)) for node in nodes):
            return False
        return all(
            count <= sum(max(0, self.pages.get((node.id, size), 0)) for node in nodes)
            for size, count in self.request.huge_pages.items()
        )


def mask_of_whole_cores(topology: Topology, cpus: int) -> int:
    """Keep the CPUs of those cores that lie in the set with all their threads.

    A core that lies in two NUMA nodes or caches is in none of them with all its threads.
    """
    mask = 0
    for core in topology.undivided_cores:
        if core & ~cpus == 0:
            mask |= core
    return mask


@dataclass(frozen=True, slots=True)
class _Choice:
    """NUMA nodes inside a domain, with the units taken of each core; smaller keys are better."""

    key: tuple[int, int, int, int, int, int, int, int, list[int], int]
    nodes: tuple[NumaNode, ...]
    taken: tuple[tuple[int, int], ...]
    """(free CPUs of a core, units taken there), in vCPU order."""


def _choose_nodes(supply: _Supply, domain: _Domain) -> _Choice | None:
    nodes = [
        (node, capacity)
        for node in supply.topology.numa_nodes
        if (capacity := supply.capacity(node.cpus & domain.cpus))
    ]
    fewest_packages = _fewest(supply, [p.cpus & domain.cpus for p in supply.topology.packages])
    best: _Choice | None = None
    for size in range(_fewest(supply, [node.cpus & domain.cpus for node, _ in nodes]), len(nodes) + 1):
        for group in combinations(nodes, size):
            if sum(capacity for _, capacity in group) < supply.need:
                continue
            members = tuple(node for node, _ in group)
            if best is not None and _at_best(supply, domain, members) > best.key[:4]:
                continue
            if not supply.memory_fits(members):
                continue
            choice = _inside(supply, domain, group)
            if best is None or choice.key < best.key:
                best = choice
        if best is not None and best.key[0] <= fewest_packages:
            break
    return best


def _at_best(supply: _Supply, domain: _Domain, nodes: Sequence[NumaNode]) -> tuple[int, int, int, int]:
    """The first parts of the best key that these nodes can have; far cheaper than their choice itself."""
    packages = 1
    if len(nodes) <= supply.need:  # every node then gives CPUs
        touched = [supply.topology.packages_of(node.cpus & domain.cpus) for node in nodes]
        if all(len(of_node) == 1 for of_node in touched):
            packages = len(set(touched))
    distances = [supply.topology.distance(a.id, b.id) for a, b in combinations(nodes, 2)]
    return (packages, len(nodes), max(distances, default=0), sum(distances))


def _fewest(supply: _Supply, parts: Sequence[int]) -> int:
    """How many of these sets of CPUs the VM needs at least; more than there are when all do not suffice."""
    counts = [_how_many([supply.capacity(part) for part in parts], supply.need)]
    members = [list(_nodes_with_room(supply, part)) for part in parts]
    if supply.small_memory:
        room = [sum(max(0, supply.memory.get(node.id, 0)) for node in nodes) for nodes in members]
        counts.append(_how_many(room, supply.small_memory))
    for size, count in supply.request.huge_pages.items():
        pages = [sum(max(0, supply.pages.get((node.id, size), 0)) for node in nodes) for nodes in members]
        counts.append(_how_many(pages, count))
    return max(counts)


def _how_many(amounts: Sequence[int], need: int) -> int:
    total = 0
    for count, amount in enumerate(sorted(amounts, reverse=True), start=1):
        total += amount
        if total >= need:
            return count
    return len(amounts) + 1


def _inside(supply: _Supply, domain: _Domain, group: Sequence[tuple[NumaNode, int]]) -> _Choice:
    topology = supply.topology
    taken: list[tuple[int, int]] = []
    shares = _shares([capacity for _, capacity in group], supply.need)
    groups_used = 0
    for (node, _), share in zip(group, shares, strict=True):
        cpus = node.cpus & domain.cpus
        if supply.request.owns_cpus:
            l3_groups = [(supply.capacity(l3 & cpus), l3 & cpus) for l3 in topology.l3_in(cpus)]
        else:
            l3_groups = [(supply.capacity(cpus), cpus)]
        for index, amount in fewest_bins([capacity for capacity, _ in l3_groups], share):
            groups_used += 1
            taken += _take_cores(supply, l3_groups[index][1], amount)
    taken.sort(key=lambda entry: _place_in_machine(topology, entry[0]))
    cpus = mask_of(cpu for mask, _ in taken for cpu in cpus_of(mask))
    ids = [node.id for node, _ in group]
    distances = [topology.distance(a, b) for a, b in combinations(ids, 2)]
    left = sum(capacity for _, capacity in group) - supply.need
    uses = sum(supply.uses.get(cpu, 0) for cpu in cpus_of(cpus)) if not supply.request.owns_cpus else 0
    key = (
        len(topology.packages_of(cpus)),
        len(group),
        max(distances, default=0),
        sum(distances),
        uses,
        groups_used,
        len(taken),
        left if supply.request.owns_cpus else -left,
        ids,
        cpus,
    )
    return _Choice(key, tuple(node for node, _ in group), tuple(taken))


def _shares(capacities: Sequence[int], need: int) -> list[int]:
    """Split the need over nodes that are all wanted: largest first, at least one unit each."""
    shares = [1] * len(capacities)
    rest = need - len(capacities)
    if rest < 0:
        return [1 if index < need else 0 for index in range(len(capacities))]
    for index in sorted(range(len(capacities)), key=lambda i: (-capacities[i], i)):
        more = min(rest, capacities[index] - 1)
        shares[index] += more
        rest -= more
    return shares


def fewest_bins(capacities: Sequence[int], need: int) -> Iterator[tuple[int, int]]:
    """Cover a need with the fewest bins, the last one as tight as possible: (index, amount) each.

    The capacities must suffice. Largest-first gives the fewest bins; ties go to the lowest index.
    """
    left = dict(enumerate(capacities))
    while need > 0:
        tight = [(capacity, index) for index, capacity in left.items() if capacity >= need]
        if tight:
            yield min(tight)[1], need
            return
        capacity, negative = max((capacity, -index) for index, capacity in left.items())
        yield -negative, capacity
        need -= capacity
        del left[-negative]


def _take_cores(supply: _Supply, cpus: int, amount: int) -> list[tuple[int, int]]:
    available = supply.cpus & cpus
    if not supply.request.owns_cpus:
        ordered = sorted(cpus_of(available), key=lambda cpu: (supply.uses.get(cpu, 0), cpu))
        return [(1 << cpu, 1) for cpu in ordered[:amount]]
    cores = [core & available for core in supply.topology.cores_in(cpus) if core & available]
    capacities = [1 if supply.counts_cores else core.bit_count() for core in cores]
    return [(cores[index], units) for index, units in fewest_bins(capacities, amount)]


def _place_in_machine(topology: Topology, cpus: int) -> tuple[int, int, int, int]:
    first = (cpus & -cpus).bit_length() - 1
    node = topology.nodes_of(cpus)
    return (
        topology.package_of[first],
        node[0] if node else -1,
        next(index for index, l3 in enumerate(topology.l3_groups) if l3 & cpus),
        first,
    )


def _placement(supply: _Supply, choice: _Choice) -> Placement:
    topology, request = supply.topology, supply.request
    ordered: list[int] = []
    owned = 0
    for core, units in choice.taken:
        used = lowest(core, units)
        ordered += cpus_of(used)
        whole = request.smt is not Smt.PREFER
        owned |= (core if whole else used) if request.owns_cpus else 0
    vcpus = tuple(ordered[: request.vcpus])
    emulator_own = mask_of(ordered[request.vcpus :])
    named = mask_of(ordered)
    if request.owns_cpus and request.smt is Smt.REQUIRE:
        emulator_own |= owned & ~named
        named = owned
    return Placement(
        policy=request.policy,
        vcpus=vcpus,
        cpus=named,
        owned=owned,
        emulator_cpus=emulator_own or _emulator_cpus(supply, choice, mask_of(vcpus)),
        io_thread_cpus=(),
        numa_nodes=tuple(node.id for node in choice.nodes),
        memory=_split_memory(supply, choice.nodes, supply.small_memory),
        huge_pages=_split_pages(supply, choice.nodes),
        packages=topology.packages_of(named),
        l3_groups=tuple(index for index, l3 in enumerate(topology.l3_groups) if l3 & named),
        numa_memory=request.numa_memory if supply.free.memory else NumaMemory.OFF,
    )


def _emulator_cpus(supply: _Supply, choice: _Choice, vcpus: int) -> int:
    """CPUs for QEMU's own threads that can never become another VM's exclusive ones.

    That is the reserved CPUs of the VM's NUMA nodes, else those of the machine; without any, the VM's
    own: its emulator may slow itself down, never a neighbour.
    """
    if supply.request.emulator_threads is EmulatorThreads.WITH_VCPUS:
        return vcpus
    near = mask_of(cpu for node in choice.nodes for cpu in cpus_of(node.cpus & supply.topology.reserved))
    return near or supply.topology.reserved or vcpus


def _split_memory(supply: _Supply, nodes: Sequence[NumaNode], amount: int) -> dict[int, int]:
    if not supply.counts_memory:
        return {}
    room = [max(0, supply.memory.get(node.id, 0)) for node in nodes]
    pages = _split_pages(supply, nodes)
    return {
        node.id: share + sum(size * count for size, count in pages.get(node.id, {}).items())
        for node, share in zip(nodes, _even_split(amount, room), strict=True)
    }


def _split_pages(supply: _Supply, nodes: Sequence[NumaNode]) -> dict[int, dict[int, int]]:
    split: dict[int, dict[int, int]] = {}
    for size, count in sorted(supply.request.huge_pages.items()):
        room = [max(0, supply.pages.get((node.id, size), 0)) for node in nodes]
        for node, share in zip(nodes, _even_split(count, room), strict=True):
            if share:
                split.setdefault(node.id, {})[size] = share
    return split


def _even_split(amount: int, room: Sequence[int]) -> list[int]:
    """Split an amount as evenly as the room allows; the room must suffice in sum."""
    shares = [0] * len(room)
    open_bins = sorted(range(len(room)), key=lambda index: (room[index], index))
    for done, index in enumerate(open_bins):
        share = min(room[index], -(-amount // (len(room) - done)))
        shares[index] = share
        amount -= share
    return shares


_SCOPE_REASONS = {
    Scope.ONE_SOCKET: (Reason.NO_SOCKET_FITS, "socket"),
    Scope.ONE_NUMA: (Reason.NO_NUMA_NODE_FITS, "NUMA node"),
    Scope.ONE_L3: (Reason.NO_L3_FITS, "L3 group"),
    Scope.ANY: (Reason.NO_NODE_FITS, "machine"),
}


def _refuse(supply: _Supply) -> Refusal:
    request = supply.request
    reason, noun = _SCOPE_REASONS[request.scope]
    domains = _domains(supply.topology, request.scope)
    never = not _fits_empty(supply.topology, request)
    best, best_capacity = max(
        ((domain, supply.capacity(domain.cpus)) for domain in domains), key=lambda pair: pair[1]
    )
    kind = _unit_name(request, supply.need)
    if best_capacity < supply.need:
        return Refusal(
            reason,
            f"no {noun} with {supply.need} {kind}, best {best_capacity} on {best.name}",
            {
                "needed": supply.need,
                "best": best_capacity,
                "missing": supply.need - best_capacity,
                "where": best.name,
            },
            never,
        )
    able = [domain for domain in domains if supply.capacity(domain.cpus) >= supply.need]
    for size, count in sorted(request.huge_pages.items()):
        everywhere = max(_pages_in(supply, domain, size) for domain in domains)
        most, where = _most([(_pages_in(supply, domain, size), domain.name) for domain in able])
        if most < count:
            also = f"{supply.need} {kind} and " if everywhere >= count else ""
            return Refusal(
                Reason.NOT_ENOUGH_HUGE_PAGES,
                f"no {noun} with {also}{count} free huge pages of {format_bytes(size)}, "
                f"best {most} on {where}",
                {"needed": count, "best": most, "missing": count - most, "where": where},
                never,
            )
        able = [domain for domain in able if _pages_in(supply, domain, size) >= count]
    most, where = _most([(_memory_in(supply, domain), domain.name) for domain in able])
    return Refusal(
        Reason.NOT_ENOUGH_MEMORY,
        f"no {noun} with {supply.need} {kind} and {format_bytes(supply.small_memory)} of free memory, "
        f"most memory {format_bytes(most)} on {where}",
        {
            "needed": supply.small_memory,
            "best": most,
            "missing": supply.small_memory - most,
            "where": where,
        },
        never,
    )


def _most(amounts: Sequence[tuple[int, str]]) -> tuple[int, str]:
    """The largest amount and where it is; the first of equal ones."""
    return max(amounts, key=lambda pair: pair[0])


def _unit_name(request: Request, need: int) -> str:
    one = need == 1
    if not request.owns_cpus:
        return "CPU of the shared pool" if one else "CPUs of the shared pool"
    match request.smt:
        case Smt.ISOLATE:
            return "whole free core" if one else "whole free cores"
        case Smt.REQUIRE:
            return "free CPU on whole cores" if one else "free CPUs on whole cores"
        case Smt.PREFER:
            return "free CPU" if one else "free CPUs"


def _memory_in(supply: _Supply, domain: _Domain) -> int:
    return sum(max(0, supply.memory.get(node.id, 0)) for node in _nodes_with_room(supply, domain.cpus))


def _pages_in(supply: _Supply, domain: _Domain, size: int) -> int:
    return sum(max(0, supply.pages.get((node.id, size), 0)) for node in _nodes_with_room(supply, domain.cpus))


def _nodes_with_room(supply: _Supply, cpus: int) -> Iterator[NumaNode]:
    """The NUMA nodes whose memory counts: those that have a CPU for the VM there."""
    for node in supply.topology.numa_nodes:
        if supply.capacity(node.cpus & cpus):
            yield node


@lru_cache(maxsize=4096)
def _fits_empty(topology: Topology, request: Request) -> bool:
    supply = _Supply(topology, free_of(topology, Ledger()), request)
    return any(_choose_nodes(supply, domain) is not None for domain in _domains(topology, request.scope))
