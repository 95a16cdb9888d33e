"""The running VM that leaves its node by one live migration so that a VM fits that fits on no node.

The VM with the least guest memory goes, because a migration copies all of it. It goes to the best of the
nodes that can hold it. Equal input gets equal answers.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from kvplace.core.allocator.allocate import try_place
from kvplace.core.allocator.layout import layout_of
from kvplace.core.cluster.node_choice import Candidate, Fit, Strategy, best_candidate
from kvplace.core.free_resources import Free
from kvplace.core.placement import Placement
from kvplace.core.preemption.victims import OccupiedMachine
from kvplace.core.request import Request
from kvplace.core.scalars import NodeName, PodUid

MOST_VMS = 64
"""VMs that are tried, of those with enough CPUs, those with the least memory first."""
MOST_TARGETS = 64
"""Nodes that are tried for each of them, those with the most free CPUs first."""


@dataclass(frozen=True, slots=True)
class MigratableVm:
    """A running VM that may go to another node."""

    uid: PodUid
    """Of its pod."""
    node: NodeName
    request: Request
    barred: frozenset[NodeName] = frozenset()
    """Nodes where it must not go."""


@dataclass(frozen=True, slots=True)
class RoomByMigration:
    """One migration, and the placement that it makes possible for the waiting VM."""

    vm: MigratableVm
    target: NodeName
    placement: Placement
    """Of the VM on the target."""
    room: Placement
    """Of the waiting VM on the node that the other one leaves."""


def find_migration(
    machines: Mapping[NodeName, OccupiedMachine],
    vms: Iterable[MigratableVm],
    waiting: Request,
    nodes: Collection[NodeName],
    strategy: Strategy,
) -> RoomByMigration | None:
    """Find the cheapest migration that lets a waiting VM fit on one of the nodes.

    `machines` are the possible targets and the nodes of the VMs.
    """
    free = {node: machine.free_without(()) for node, machine in machines.items()}
    emptiest = sorted(machines, key=lambda node: (-free[node].cpus.bit_count(), node))
    able = (
        vm
        for vm in vms
        if vm.node in nodes and vm.node in machines and _makes_room(vm, machines[vm.node], free, waiting)
    )
    for vm in sorted(able, key=lambda vm: (vm.request.memory or 0, vm.uid))[:MOST_VMS]:
        machine = machines[vm.node]
        room = try_place(machine.topology, machine.free_without((vm.uid,)), waiting)
        if room is None:
            continue
        targets = [node for node in emptiest if node != vm.node and node not in vm.barred][:MOST_TARGETS]
        candidates = (_candidate(node, machines[node], free[node], vm.request) for node in targets)
        best = best_candidate((one for one in candidates if one is not None), strategy)
        if best is not None:
            return RoomByMigration(vm, best.node, best.placement, room)
    return None


def _makes_room(
    vm: MigratableVm, machine: OccupiedMachine, free: Mapping[NodeName, Free], waiting: Request
) -> bool:
    """Whether the CPUs that a VM leaves and the free ones suffice, by number, in a domain of the scope.

    Of the VMs with the least memory most are too small to make room for a large one.
    """
    claim = machine.ledger.claims.get(vm.uid)
    if claim is None:
        return False
    cpus = free[vm.node].pool | claim.cpus | claim.owned
    domains = layout_of(machine.topology).domains[waiting.options.scope.within]
    return any((cpus & domain.cpus).bit_count() >= waiting.vcpus for domain in domains)


def _candidate(node: NodeName, machine: OccupiedMachine, free: Free, request: Request) -> Candidate | None:
    if request.owns_cpus and free.cpus.bit_count() < request.vcpus:
        return None
    placement = try_place(machine.topology, free, request)
    if placement is None:
        return None
    return Candidate(node, Fit.of(machine.topology, free, request, placement))
