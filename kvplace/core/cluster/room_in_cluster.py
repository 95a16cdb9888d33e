"""Room for a VM that fits on no node: moves of running VMs inside a node, or one live migration.

* `find_room` finds the node where the fewest moves make room, and of equally many the moves with the fewest
  bytes. Each move is a risk for a live VM.
* `find_migration` finds one VM that leaves its node. The VM with the least memory goes, because a migration
  copies all of it.
* `make_room_for_waiting` does the same as `find_room` for the VMs of a plan. Its moves come before the
  start of any planned VM. A planned VM may get other CPUs, which costs nothing.

Equal input gets equal answers: the bounds count steps of the search, not seconds.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from kvplace.core.allocator.allocate import try_place
from kvplace.core.allocator.layout import layout_of
from kvplace.core.cluster.draft import PLANNED, Draft, DraftNode, Shape, Stopped
from kvplace.core.cluster.node_choice import Strategy, best_candidate, candidate_on
from kvplace.core.cluster.victims import OccupiedMachine
from kvplace.core.device_locality import too_few_devices
from kvplace.core.free_resources import Free
from kvplace.core.moves.make_room import MAX_MOVES, Move, MovePlan, make_room
from kvplace.core.occupant import ClusterNode
from kvplace.core.placement import Placement
from kvplace.core.request import Request
from kvplace.core.scalars import NodeName, PodUid
from kvplace.core.search_budget import MAX_STEPS

MOST_VMS = 64
"""VMs that are tried, if they have enough CPUs, in ascending order of memory."""
MOST_TARGETS = 64
"""Nodes that are tried for each of them, the emptiest first."""


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
        candidates = (
            candidate_on(node, machines[node].topology, free[node], vm.request)
            for node in targets
            if not vm.request.owns_cpus or free[node].cpus.bit_count() >= vm.request.vcpus
        )
        best = best_candidate((one for one in candidates if one is not None), strategy)
        if best is not None:
            return RoomByMigration(vm, best.node, best.placement, room)
    return None


def _makes_room(
    vm: MigratableVm, machine: OccupiedMachine, free: Mapping[NodeName, Free], waiting: Request
) -> bool:
    """Whether the CPUs that a VM leaves and the free ones suffice, by number, in a domain of the scope.

    This skips most small VMs: they cannot make room for a large one.
    """
    claim = machine.ledger.claims.get(vm.uid)
    if claim is None:
        return False
    cpus = free[vm.node].pool | claim.cpus | claim.owned
    domains = layout_of(machine.topology).domains[waiting.options.scope.within]
    return any((cpus & domain.cpus).bit_count() >= waiting.vcpus for domain in domains)


MOST_NODES = 16
"""Nodes that are searched, in the given order."""
STEPS_PER_NODE = 50_000
"""Steps of the search of one node for each number of moves, see `search_budget`: a quarter of a second."""
MOST_STEPS = 300_000
"""Steps of the search of all nodes: one or two seconds."""


@dataclass(frozen=True, slots=True)
class RoomOnNode:
    """The moves that make the VM fit on a node."""

    node: NodeName
    plan: MovePlan

    @property
    def cost(self) -> tuple[int, int, NodeName]:
        """The smallest is the best."""
        return len(self.plan.moves), self.plan.bytes_moved, self.node


def find_room(nodes: Sequence[ClusterNode], request: Request) -> RoomOnNode | None:
    """Find the node where the fewest and cheapest moves make room; None where no moves are found.

    A node where the VM fits well without moves is passed over.
    """
    best: RoomOnNode | None = None
    left = MOST_STEPS
    for node in nodes[:MOST_NODES]:
        if left <= 0 or (best is not None and best.cost[:2] == (1, 0)):
            break
        answer = make_room(
            node,
            request,
            most_moves=MAX_MOVES if best is None else len(best.plan.moves),
            max_steps=min(left, STEPS_PER_NODE),
        )
        left -= answer.steps
        if isinstance(answer, MovePlan) and answer.moves:
            found = RoomOnNode(node.name, answer)
            best = found if best is None or found.cost < best.cost else best
    return best


_MAX_PLANNED_NODES = 16
"""Nodes where moves are searched for one VM of a plan, the emptiest first."""
_MAX_TOTAL_STEPS = 20 * MAX_STEPS
"""Search steps for all VMs of a plan: minutes at worst."""


@dataclass(frozen=True, slots=True)
class NodeMove:
    """A move of a running VM on a node."""

    node: NodeName
    move: Move


def make_room_for_waiting(draft: Draft, shapes: Sequence[Shape]) -> tuple[tuple[NodeMove, ...], bool]:
    """Assign the waiting VMs of a plan, each where the fewest and cheapest moves make room for it.

    Returns the moves of running VMs in their order, and whether no search ended at a bound: with more search
    more VMs might fit.
    """
    search = _RoomSearch(draft, shapes)
    failed: set[Shape] = set()
    with suppress(Stopped):
        for vm in sorted(draft.waiting(len(shapes)), key=lambda vm: (shapes[vm].vcpus, vm)):
            if shapes[vm] not in failed:
                if search.assign(vm):
                    failed.clear()
                else:
                    failed.add(shapes[vm])
        return tuple(search.moves), search.is_complete
    return tuple(search.moves), False


class _RoomSearch:
    """Room for the VMs of one plan, and the moves so far."""

    def __init__(self, draft: Draft, shapes: Sequence[Shape]) -> None:
        self._draft = draft
        self._shapes = shapes
        self._steps = _MAX_TOTAL_STEPS
        self.moves: list[NodeMove] = []
        self.is_complete = True

    def assign(self, vm: int) -> bool:
        """Make the cheapest moves that make room for a VM, and assign it; False where none are found.

        Fewest moves of running VMs count first, then their bytes, then the fullest node.
        """
        draft, shape = self._draft, self._shapes[vm]
        found = self._on_emptiest_nodes(shape)
        if not found:
            return False
        *_, index, plan = min(found, key=lambda one: one[:4])
        node = draft.nodes[index]
        self.moves += [NodeMove(node.node.name, move) for move in _of_running(plan)]
        draft.nodes[index] = _after(node, plan).with_vm(vm, shape, plan.placement)
        draft.node_of[vm] = index
        return True

    def _on_emptiest_nodes(self, shape: Shape) -> list[tuple[int, int, int, int, MovePlan]]:
        able = sorted(
            (-node.free.cpus.bit_count(), index)
            for index, node in enumerate(self._draft.nodes)
            if node.node.name not in shape.closed
            and (node.free.cpus.bit_count() >= shape.vcpus or not shape.request.owns_cpus)
            and too_few_devices(node.free.devices, shape.request.devices) is None
        )
        found: list[tuple[int, int, int, int, MovePlan]] = []
        cut = len(able) > _MAX_PLANNED_NODES
        for negative, index in able[:_MAX_PLANNED_NODES]:
            if self._steps <= 0:
                cut = True
                break
            self._draft.step()
            node = self._draft.nodes[index]
            now = replace(node.node, running=(*node.running, *node.planned.values()))
            answer = make_room(now, shape.request, max_steps=min(self._steps, MAX_STEPS))
            self._steps -= answer.steps
            if isinstance(answer, MovePlan):
                moves = _of_running(answer)
                found.append((len(moves), sum(move.bytes_moved for move in moves), -negative, index, answer))
            else:
                cut = cut or not answer.exact
        self.is_complete = self.is_complete and (not cut or bool(found))
        return found


def _after(node: DraftNode, plan: MovePlan) -> DraftNode:
    """The node once the moves are made."""
    to = {move.id: move.after for move in plan.moves}
    running = tuple(replace(vm, placement=to.get(vm.id, vm.placement)) for vm in node.running)
    planned = {
        number: replace(vm, placement=to.get(vm.id, vm.placement)) for number, vm in node.planned.items()
    }
    return node.rearranged(running, planned)


def _of_running(plan: MovePlan) -> list[Move]:
    return [move for move in plan.moves if not move.id.startswith(PLANNED)]
