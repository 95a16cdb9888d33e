"""Fragmented machines: nearly full, with free CPUs in blocks that are too small for the new VM.

Random machines and random VMs seldom need moves: of 100 such cases none did. These are made so that most of
them do, and the tests that use them count how many did. They are drawn from a seeded `Random`, so that the
counts are the same in every run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from random import Random

from kvplace.core.allocator.allocate import place
from kvplace.core.cpuset import mask_of
from kvplace.core.free_resources import Free
from kvplace.core.occupant import ClusterNode, Occupant
from kvplace.core.placement import Placement
from kvplace.core.request import EmulatorThreads, NumaMemory, PinningOptions, Policy, Request, Scope, Smt
from kvplace.core.scalars import NO_BYTES
from kvplace.core.topology import Topology
from tests.core.machines import GIB, make_node, make_numa_node, make_package, make_topology

PLAIN = (Policy.EXCLUSIVE,)
PINNED = (Policy.EXCLUSIVE, Policy.EXCLUSIVE, Policy.EXCLUSIVE, Policy.SHARE, Policy.IMMOVABLE)
MIXED = (*PINNED, Policy.NUMA)


@dataclass(frozen=True, slots=True)
class Case:
    """A machine, the VMs that run there, and one more that is wanted."""

    topology: Topology
    occupants: list[Occupant]
    request: Request

    @property
    def node(self) -> ClusterNode:
        """The node with the VMs that run there."""
        return make_node(self.topology, self.occupants)

    @property
    def free(self) -> Free:
        """The resources that are free for the new VM."""
        return self.node.free


def fragmented(chance: Random, *, most_cpus: int, policies: Sequence[Policy] = PLAIN) -> Case:
    """Draw a machine of at most so many CPUs on which the new VM fits well when it is empty, but not now."""
    while True:
        case = _case(chance, most_cpus, policies)
        empty = place(case.topology, make_node(case.topology, []).free, case.request)
        now = place(case.topology, case.free, case.request)
        if isinstance(empty, Placement) and (
            not isinstance(now, Placement) or len(now.numa_nodes) > len(empty.numa_nodes)
        ):
            return case


def _case(chance: Random, most_cpus: int, policies: Sequence[Policy]) -> Case:
    topology = _machine(chance, most_cpus)
    widest = max(node.cpus.bit_count() for node in topology.numa_nodes)
    with_memory = any(node.memory for node in topology.numa_nodes)
    occupants: list[Occupant] = []
    for number in range(12):
        free = make_node(topology, occupants).free
        if free.cpus.bit_count() <= widest:
            break
        request = _request(chance, chance.randint(1, max(1, widest - 1)), policies, with_memory)
        node = chance.choice(topology.numa_nodes)
        found = place(topology, free.within(node.cpus), request)
        if not isinstance(found, Placement):
            found = place(topology, free, request)
        if isinstance(found, Placement):
            occupants.append(Occupant(f"vm-{number}", request, found))
    free = make_node(topology, occupants).free
    holes = [(free.cpus & node.cpus).bit_count() for node in topology.numa_nodes]
    most = max(1, min(widest, free.cpus.bit_count()))
    policies = (Policy.EXCLUSIVE, Policy.EXCLUSIVE, *policies)  # a VM that shares fits nearly always
    request = _request(chance, chance.randint(min(most, max(holes) + 1), most), policies, with_memory)
    return Case(topology, occupants, request)


def _machine(chance: Random, most_cpus: int) -> Topology:
    """Two to four NUMA nodes of cores with one or two threads, on one or two sockets."""
    threads = chance.choice([1, 1, 2])
    nodes = chance.randint(2, 4 if most_cpus >= 8 * threads else 3)
    most = most_cpus // nodes // threads
    widths = [chance.randint(max(1, most - 1), most) * threads for _ in range(nodes)]
    ends = list(accumulate(widths))
    each = [mask_of(range(end - width, end)) for end, width in zip(ends, widths, strict=True)]
    packages = [each[:2], each[2:]] if nodes == 4 and chance.random() < 0.4 else [each]
    memory = chance.choice([0, 0, 4 * GIB, 8 * GIB])
    pages = chance.choice([0, 2]) if memory else 0
    return make_topology(
        packages=tuple(make_package(number, mask_sum(sets)) for number, sets in enumerate(packages)),
        numa_nodes=tuple(
            make_numa_node(number, cpus, memory + pages * GIB, {GIB: pages} if pages else {})
            for number, cpus in enumerate(each)
        ),
        l3_groups=tuple(each),
        cores=tuple(mask_of(range(first, first + threads)) for first in range(0, ends[-1], threads)),
    )


def mask_sum(sets: Sequence[int]) -> int:
    """Unite disjoint sets of CPUs."""
    return sum(sets)


def _request(chance: Random, vcpus: int, policies: Sequence[Policy], with_memory: bool) -> Request:
    policy = chance.choice(policies)
    pages = int(with_memory and chance.random() < 0.2)
    scopes = [Scope.ONE_NUMA, Scope.ONE_NUMA, Scope.ONE_NUMA, Scope.ONE_L3, Scope.ONE_SOCKET, Scope.ANY]
    options = PinningOptions(
        scope=chance.choice(scopes),
        policy=policy,
        smt=chance.choice([Smt.PREFER, Smt.PREFER, Smt.PREFER, Smt.REQUIRE, Smt.ISOLATE])
        if policy is not Policy.NUMA
        else Smt.PREFER,
        emulator_threads=chance.choice([EmulatorThreads.SHARED] * 5 + [EmulatorThreads.ISOLATE]),
        numa_memory=chance.choice([NumaMemory.PREFERRED] * 3 + [NumaMemory.OFF]),
    )
    memory = (pages + chance.choice([0, 0, 1, 2])) * GIB if with_memory else NO_BYTES
    return Request(vcpus, options, memory=memory, huge_pages={GIB: pages} if pages else {})
