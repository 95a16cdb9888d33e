"""The best placement that any search could find, to prove the allocator exact on small machines.

Nothing here is taken from the allocator. Sets of CPUs are tried, all of them, and judged one by one by the
words of the contract; no choice is ever made before it has been compared. `best_key` answers one
question, `BestKeys` answers for every free set of a machine at once.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import combinations, combinations_with_replacement

from kvplace.core.cpuset import cpus_of, lowest, mask_of
from kvplace.core.free_resources import Free
from kvplace.core.request import EmulatorThreads, NumaMemory, Policy, Request, Scope, Smt
from kvplace.core.scalars import CpuMask
from kvplace.core.topology import NumaNode, Package, Topology
from tests.core.machines import make_package

Key = tuple[int, int, int, int, tuple[int, ...], int, int, int]
"""Objectives 1-4: sockets, NUMA nodes, largest distance, sum of distances, the same of the CPUs alone (where
the scope spreads, how many parts share them) and the memory they lack, L3 groups, kinds of cores, cores.
"""

WORST: Key = (1 << 30, 0, 0, 0, (), 0, 0, 0)
"""Greater than the key of any placement."""


def best_key(machine: Topology, free: Free, request: Request) -> Key | None:
    """The smallest key of all placements there are; None when there is none."""
    judge = Judge(machine, free, request)
    available = judge.usable(free.cpus if request.owns_cpus else free.pool)
    if request.options.policy is Policy.NUMA:
        return min(judge.pools(available), default=None)
    return min(
        (
            key
            for cpus in unlike_sets(machine, available, judge.need, judge.one_per_core)
            for key in judge.sittings(cpus)
        ),
        default=None,
    )


def key_of(
    machine: Topology, free: Free, request: Request, cpus: int, nodes: Sequence[NumaNode], domain: int
) -> Key:
    """Objectives 1-4 of CPUs whose VM uses these NUMA nodes; a divided core counts as its parts."""
    own = [node for node in nodes if node.cpus & cpus]
    return (
        sockets_of(machine, cpus, [node for node in nodes if node not in own], domain),
        *nearness(machine, nodes),
        (*place_of_cpus(machine, request, cpus, own), far_bytes(free, request, own)),
        sum(1 for l3 in machine.l3_groups if l3 & cpus),
        0
        if request.options.policy is Policy.NUMA
        else sum(kinds_of_cores(machine, share) for share in shares(machine, request, cpus)),
        sum(1 for part in core_parts(machine) if part & cpus),
    )


def kinds_of_cores(machine: Topology, cpus: int) -> int:
    """How many kinds of cores some CPUs lie on; hybrid machines have cores of several widths."""
    return len({core.bit_count() for core in machine.cores if core & cpus})


def shares(machine: Topology, request: Request, cpus: int) -> list[int]:
    """The parts that CPUs are spread over, where the scope spreads."""
    parts: Sequence[int] = [machine.cpus]
    if request.options.scope is Scope.SPREAD_SOCKETS:
        parts = [package.cpus for package in sockets(machine)]
    elif request.options.scope is Scope.SPREAD_NUMA:
        parts = [node.cpus for node in machine.numa_nodes]
    return [part & cpus for part in parts if part & cpus]


def sockets(machine: Topology) -> Sequence[Package]:
    """The packages; where each of several is one core, the NUMA nodes or the machine stand in for them."""
    if len(machine.packages) > 1 and all(package.cpus in machine.cores for package in machine.packages):
        nodes = [make_package(node.id, node.cpus) for node in machine.numa_nodes if node.cpus]
        single = all(node.cpus in machine.cores for node in nodes)
        return [make_package(0, machine.cpus)] if single else nodes
    return machine.packages


def sockets_of(machine: Topology, cpus: int, alone: Sequence[NumaNode], domain: int) -> int:
    """The sockets of CPUs, and as few others as have a part of each node that gives memory alone."""
    own = [package.cpus for package in sockets(machine) if package.cpus & cpus]
    rest = [node.cpus & domain for node in alone if not any(node.cpus & domain & one for one in own)]
    holds = {frozenset(node for node in rest if node & package.cpus) for package in sockets(machine)}
    holds = {one for one in holds if not any(one < other for other in holds)}
    count = 0
    while not any(frozenset().union(*chosen) >= {*rest} for chosen in combinations(holds, count)):
        count += 1
    return len(own) + count


def levels_nest(machine: Topology) -> bool:
    """Whether of any two levels one divides the parts of the other."""
    levels: list[Sequence[int]] = [
        machine.cores,
        machine.l3_groups,
        [node.cpus for node in machine.numa_nodes if node.cpus],
        [package.cpus for package in sockets(machine)],
    ]
    return all(divides(one, other) or divides(other, one) for one, other in combinations(levels, 2))


def divides(parts: Sequence[int], wholes: Sequence[int]) -> bool:
    """Whether each part lies in one of the wholes."""
    return all(any(not part & ~whole for whole in wholes) for part in parts)


def nearness(machine: Topology, nodes: Sequence[NumaNode]) -> tuple[int, int, int]:
    """How many nodes there are, and the largest and the summed distance between them."""
    distances = [machine.distance(one.id, other.id) for one, other in combinations(nodes, 2)]
    return (len(nodes), max(distances, default=0), sum(distances))


def far_bytes(free: Free, request: Request, own: Sequence[NumaNode]) -> int:
    """The memory that the nodes of the CPUs lack for a VM; it does not count where the scope spreads."""
    spreads = request.options.scope in (Scope.SPREAD_SOCKETS, Scope.SPREAD_NUMA)
    if spreads or request.options.policy is Policy.NUMA:
        return 0
    plain: int = request.memory - sum(size * count for size, count in request.huge_pages.items())
    if not free.memory or request.options.numa_memory is NumaMemory.OFF:
        plain = 0
    have = sum(max(0, dict(free.memory).get(node.id, 0)) for node in own)
    pages = {
        size: sum(max(0, free.pages_by_node.get((node.id, size), 0)) for node in own)
        for size in request.huge_pages
    }
    return max(0, plain - have) + sum(
        size * max(0, count - pages[size]) for size, count in request.huge_pages.items()
    )


def place_of_cpus(machine: Topology, request: Request, cpus: int, own: Sequence[NumaNode]) -> tuple[int, ...]:
    """How well the CPUs lie among themselves, which have these nodes."""
    packages = sum(1 for package in sockets(machine) if package.cpus & cpus)
    if request.options.policy is Policy.NUMA:
        return ()  # the pools of all nodes are used
    match request.options.scope:
        case Scope.SPREAD_SOCKETS:
            return (-packages,)
        case Scope.SPREAD_NUMA:
            return (-len(own),)
        case _:
            return (packages, *nearness(machine, own))


def decided(request: Request, key: Key | None) -> tuple[object, ...] | None:
    """The part of a key that the VM's policy leaves open; `numa` takes whatever CPUs the nodes have."""
    return key[:4] if key is not None and request.options.policy is Policy.NUMA else key


def units(request: Request) -> int:
    """How many CPUs, or whole cores, the request counts: one more when the emulator has its own."""
    own = (
        request.options.policy is not Policy.NUMA
        and request.options.emulator_threads is EmulatorThreads.ISOLATE
    )
    return request.vcpus + own


def domains(machine: Topology, scope: Scope) -> list[int]:
    """The sets of CPUs; one of them must hold the whole VM."""
    match scope:
        case Scope.ONE_SOCKET:
            return [package.cpus for package in sockets(machine)]
        case Scope.ONE_NUMA:
            return [node.cpus for node in machine.numa_nodes if node.cpus]
        case Scope.ONE_L3:
            return list(machine.l3_groups)
        case Scope.ANY | Scope.SPREAD_SOCKETS | Scope.SPREAD_NUMA:
            return [machine.cpus]


def cell_of(machine: Topology, cpus: int) -> tuple[int, ...]:
    """Package, NUMA node and L3 group, by their places in the machine, of CPUs that lie in one of each."""
    levels = (
        [package.cpus for package in sockets(machine)],
        [node.cpus for node in machine.numa_nodes],
        machine.l3_groups,
    )
    return tuple(next(place for place, part in enumerate(level) if part & cpus) for level in levels)


_PARTS: dict[Topology, tuple[int, ...]] = {}


def core_parts(machine: Topology) -> tuple[int, ...]:
    """The cores, those divided over several packages, nodes or caches as their parts."""
    if machine not in _PARTS:
        parts: dict[tuple[object, ...], int] = defaultdict(int)
        for core in machine.cores:
            for cpu in cpus_of(core):
                parts[core, cell_of(machine, 1 << cpu)] |= 1 << cpu
        _PARTS[machine] = tuple(parts.values())
    return _PARTS[machine]


def unlike_sets(machine: Topology, available: int, count: int, one_per_core: bool) -> Iterator[int]:
    """Every set of so many CPUs; sets that differ only in like CPUs or like cores count as one."""
    alike: dict[tuple[object, ...], list[int]] = defaultdict(list)
    for part in core_parts(machine):
        if here := part & available:
            core = next(core for core in machine.cores if core & part)
            alike[*cell_of(machine, part), here.bit_count(), core.bit_count()].append(here)
    choices = []
    for cores in alike.values():
        width = 1 if one_per_core else cores[0].bit_count()
        uses = combinations_with_replacement(range(width, -1, -1), len(cores))
        choices.append([(sum(use), mask_of_uses(cores, use)) for use in uses if sum(use) <= count])

    def extended(place: int, missing: int) -> Iterator[int]:
        if place == len(choices):
            if not missing:
                yield 0
            return
        for taken, cpus in choices[place]:
            if taken <= missing:
                for others in extended(place + 1, missing - taken):
                    yield cpus | others

    yield from extended(0, count)


def mask_of_uses(cores: Sequence[int], uses: Sequence[int]) -> int:
    """The lowest CPUs of each core, as many as it is used for."""
    return mask_of(
        cpu for core, use in zip(cores, uses, strict=True) for cpu in cpus_of(lowest(CpuMask(core), use))
    )


def mask_of_nodes(nodes: Sequence[NumaNode]) -> int:
    """The CPUs of NUMA nodes."""
    return mask_of(cpu for node in nodes for cpu in cpus_of(node.cpus))


class Judge:
    """States of any set of CPUs whether it may serve a request, over which NUMA nodes, and how well."""

    def __init__(self, machine: Topology, free: Free, request: Request) -> None:
        self.machine = machine
        self.request = request
        self._free = free
        self.domains = domains(machine, request.options.scope)
        self.one_per_core = request.owns_cpus and request.options.smt is Smt.ISOLATE
        self.need = units(request)
        self._memory = dict(free.memory)
        self._pages = {(node, size): count for node, size, count in free.huge_pages}
        paged = sum(size * count for size, count in request.huge_pages.items())
        counts = free.memory and request.options.numa_memory is not NumaMemory.OFF
        self._plain = max(0, request.memory - paged) if counts else 0
        self._nodes = [node for node in machine.numa_nodes if node.cpus]

    def usable(self, available: int) -> int:
        """The available CPUs that may carry a thread of the VM."""
        if self.request.options.smt is Smt.PREFER:
            return available
        return mask_of(
            cpu for core in self.machine.undivided_cores if not core & ~available for cpu in cpus_of(core)
        )

    def room(self, nodes: Sequence[NumaNode]) -> bool:
        """Whether these nodes together have the memory and the huge pages."""
        if sum(max(0, self._memory.get(node.id, 0)) for node in nodes) < self._plain:
            return False
        return all(
            sum(max(0, self._pages.get((node.id, size), 0)) for node in nodes) >= count
            for size, count in self.request.huge_pages.items()
        )

    def shares_are_equal(self, cpus: int) -> bool:
        """Whether the parts of a VM that is spread differ by at most one CPU."""
        sizes = [share.bit_count() for share in shares(self.machine, self.request, cpus)]
        return max(sizes) - min(sizes) <= 1

    def sittings(self, cpus: int) -> Iterator[Key]:
        """The keys of the ways for the VM to sit on exactly these CPUs, with any nodes for its memory."""
        if not self.shares_are_equal(cpus):
            return
        own = [node for node in self._nodes if node.cpus & cpus]
        for domain in self.domains:
            if cpus & ~domain:
                continue
            others = [node for node in self._nodes if node not in own and node.cpus & domain]
            for count in range(len(others) + 1):
                for more in combinations(others, count):
                    nodes = [*own, *more]
                    if self.room(nodes):
                        yield key_of(self.machine, self._free, self.request, cpus, nodes, domain)
                if self.room(own):
                    break

    def pools(self, pool: int) -> Iterator[Key]:
        """The keys of the sets of nodes whose pools can carry a VM of policy `numa`."""
        for domain in self.domains:
            nodes = [node for node in self._nodes if node.cpus & domain]
            for count in range(1, len(nodes) + 1):
                for chosen in combinations(nodes, count):
                    cpus = mask_of_nodes(chosen) & domain & pool
                    if cpus.bit_count() >= self.need and self.room(chosen):
                        yield key_of(self.machine, self._free, self.request, cpus, chosen, domain)


class BestKeys:
    """The best key for every number of CPUs and every free set of a machine whose CPUs are 0 to n - 1.

    What a set of CPUs can do, every larger set can: so each set is judged once and its key handed on to
    the sets with one CPU more, until it has reached them all.
    """

    def __init__(self, machine: Topology, free: Free, request: Request) -> None:
        count = machine.cpus.bit_count()
        assert machine.cpus == (1 << count) - 1, "CPUs must be numbered without gaps"
        assert request.options.policy is not Policy.NUMA, "its CPUs follow from its nodes: ask best_key"
        self._judge = Judge(machine, free, request)
        self._extra = self._judge.need - request.vcpus
        self._of_need = [[WORST] * (machine.cpus + 1) for _ in range(count + 1)]
        for cpus in range(1, machine.cpus + 1):
            self._enter(cpus)
        for keys in self._of_need:
            for bit in range(count):
                for cpus in range(machine.cpus + 1):
                    if cpus >> bit & 1 and keys[cpus ^ 1 << bit] < keys[cpus]:
                        keys[cpus] = keys[cpus ^ 1 << bit]

    def key(self, vcpus: int, available: int) -> Key | None:
        """The best key of a VM of so many vCPUs; None when it does not fit."""
        need = vcpus + self._extra
        key = self._of_need[need][available] if need < len(self._of_need) else WORST
        return None if key == WORST else key

    def _enter(self, cpus: int) -> None:
        judge = self._judge
        wanted = self._with_siblings(cpus)
        if wanted is None:
            return
        keys = self._of_need[cpus.bit_count()]
        keys[wanted] = min([keys[wanted], *judge.sittings(cpus)])

    def _with_siblings(self, cpus: int) -> int | None:
        """The CPUs that must be free for these to be used; None when these cannot be, whatever is free."""
        request, machine = self._judge.request, self._judge.machine
        if request.options.smt is Smt.PREFER:
            return cpus
        cores = [machine.core_of[cpu] for cpu in cpus_of(CpuMask(cpus))]
        if any(core not in machine.undivided_cores for core in cores):
            return None
        if self._judge.one_per_core and len(set(cores)) < len(cores):
            return None
        return mask_of(cpu for core in cores for cpu in cpus_of(core))


def with_cpus(free: Free, request: Request, cpus: int) -> Free:
    """The same with exactly these CPUs for the request, and none for requests of the other kind."""
    return replace(free, cpus=CpuMask(cpus if request.owns_cpus else 0), pool=CpuMask(cpus), uses=())
