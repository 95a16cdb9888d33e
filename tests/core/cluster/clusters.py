"""Nearly full clusters and VMs for them, and checks that a plan is valid."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from random import Random

from kvplace.core.allocator.allocate import place
from kvplace.core.cluster.node_choice import Candidate, Fit, Strategy, best_candidate
from kvplace.core.cluster.planning import Plan, Tally, VmRequest
from kvplace.core.free_resources import free_of
from kvplace.core.ledger import Ledger, claim_of
from kvplace.core.occupant import ClusterNode, Occupant
from kvplace.core.placement import Placement
from kvplace.core.request import PinningOptions, Policy, Request, Scope, Smt
from kvplace.core.scalars import NodeName, PodUid
from kvplace.core.topology import Topology
from tests.core.allocator.validity import check_cpus
from tests.core.machines import (
    OFFERED_SCOPES,
    SPREAD_SCOPES,
    make_numa_node,
    make_package,
    make_topology,
    requests,
)
from tests.core.moves.fragmented import MIXED, fragmented

ANY_REQUEST = requests(
    most_vcpus=8,
    scopes=(*OFFERED_SCOPES, *SPREAD_SCOPES),
    policies=(Policy.EXCLUSIVE, Policy.EXCLUSIVE, Policy.SHARE, Policy.IMMOVABLE, Policy.NUMA),
)


@dataclass(frozen=True, slots=True)
class Problem:
    """A nearly full, fragmented cluster, and more VMs than fit on it."""

    nodes: list[ClusterNode]
    vms: list[VmRequest]
    strategy: Strategy


def problems(count: int) -> Iterator[Problem]:
    """Draw so many problems, the same in every run."""
    for seed in range(count):
        chance = Random(seed)
        cases = [fragmented(chance, most_cpus=12, policies=MIXED) for _ in range(chance.randint(1, 3))]
        nodes = [
            ClusterNode(
                NodeName(f"node-{number}"),
                case.topology,
                tuple(Occupant(f"node-{number}/{vm.id}", vm.request, vm.placement) for vm in case.occupants),
            )
            for number, case in enumerate(cases)
        ]
        found = [case.request for case in cases]
        for _ in range(chance.choice([0, 0, 1, 4])):
            small = replace(chance.choice(found), vcpus=chance.randint(1, 3))
            options = replace(small.options, scope=chance.choice(list(Scope)))
            found.append(replace(small, options=options))
        chance.shuffle(found)
        vms = [VmRequest(f"vm-{number}", request) for number, request in enumerate(found)]
        yield Problem(nodes, vms, chance.choice(list(Strategy)))


def machine(*cpus_of_nodes: int, memory: int = 0) -> Topology:
    """One socket of NUMA nodes with so many cores of one thread each."""
    sets, first = [], 0
    for cpus in cpus_of_nodes:
        sets.append(((1 << cpus) - 1) << first)
        first += cpus
    return make_topology(
        packages=(make_package(0, (1 << first) - 1),),
        numa_nodes=tuple(make_numa_node(number, cpus, memory) for number, cpus in enumerate(sets)),
        l3_groups=tuple(sets),
        cores=tuple(1 << cpu for cpu in range(first)),
    )


def nodes_of(*topologies: Topology) -> list[ClusterNode]:
    return [ClusterNode(NodeName(f"node-{number}"), topology) for number, topology in enumerate(topologies)]


def vms_of(*sizes: int, scope: Scope = Scope.ONE_NUMA) -> list[VmRequest]:
    return [
        VmRequest(f"vm-{number}", Request(size, PinningOptions(scope=scope)))
        for number, size in enumerate(sizes)
    ]


def occupants_of(node: ClusterNode, found: Plan, vms: Sequence[VmRequest]) -> list[Occupant]:
    """The VMs on a node once the moves are made, each checked, and the planned VMs have started."""
    requests = {vm.id: vm.request for vm in vms}
    running = {vm.id: vm for vm in node.running}
    for one in found.moves:
        if one.node == node.name:
            vm = running[one.move.id]
            assert vm.placement == one.move.before
            free = free_of(
                node.topology,
                Ledger(),
                [claim_of(PodUid(other.id), other.placement) for other in running.values()],
            )
            assert not one.move.after.owned & ~vm.placement.owned & ~free.cpus
            running[vm.id] = Occupant(vm.id, vm.request, one.move.after)
            check_sound(node, list(running.values()))
    planned = [Occupant(s.id, requests[s.id], s.placement) for s in found.planned if s.node == node.name]
    return [*running.values(), *planned]


def one_by_one(nodes: Sequence[ClusterNode], vms: Sequence[VmRequest], strategy: Strategy) -> Tally:
    """Count what is placed when every VM goes where Filter sends it, one after the other."""
    claims = {node.name: [claim_of(PodUid(vm.id), vm.placement) for vm in node.running] for node in nodes}
    placed = vcpus = 0
    for vm in vms:
        candidates = []
        for node in nodes:
            free = free_of(node.topology, Ledger(), claims[node.name])
            answer = place(node.topology, free, vm.request)
            if isinstance(answer, Placement):
                candidates.append(Candidate(node.name, Fit(node.topology, answer, free, vm.request.vcpus)))
        best = best_candidate(candidates, strategy)
        if best is not None:
            claims[best.node].append(claim_of(PodUid(vm.id), best.placement))
            placed += 1
            vcpus += vm.request.vcpus
    return Tally(placed, vcpus)


def check_sound(node: ClusterNode, occupants: Sequence[Occupant]) -> None:
    """Check that no VM has what another one has, or what the node does not have."""
    for vm in occupants:
        others = [claim_of(PodUid(other.id), other.placement) for other in occupants if other is not vm]
        free = free_of(node.topology, Ledger(), others)
        if vm.request.owns_cpus or vm.request.options.smt is Smt.PREFER:
            check_cpus(node.topology, free, vm.request, vm.placement)
        else:  # whole cores when it came; their other threads may have found an owner since
            assert not vm.placement.cpus & ~free.pool
    claims = [claim_of(PodUid(vm.id), vm.placement) for vm in occupants]
    left = free_of(node.topology, Ledger(), claims)
    assert all(count >= 0 for _, count in left.memory)
    assert all(count >= 0 for _, _, count in left.huge_pages)
