"""One simulation: VMs come to a cluster and go, each decided as the extender decides it.

Where a VM goes is found by the very code that answers kube-scheduler: the table of what every node could
give, the choice among the nodes, and the allocator inside them. Everything but the measured seconds is the
same for equal scenarios.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from kvplace.core.allocator.allocate import try_place
from kvplace.core.cluster.cluster_node import ClusterNode
from kvplace.core.cluster.node_choice import Candidate, Strategy, best_candidate
from kvplace.core.free import Free, free_of
from kvplace.core.ledger import Ledger, LedgerChange, claim_of
from kvplace.core.moves.make_room import MovePlan, make_room
from kvplace.core.occupant import Occupant
from kvplace.core.placement import Placement
from kvplace.core.refusal import Reason, Refusal
from kvplace.core.request import Request
from kvplace.core.scalars import CpuMask
from kvplace.core.topology import Topology
from kvplace.nodes.node_machine import NodeMachine, NodeSnapshot
from kvplace.scheduler.fit_table import FitTable
from kvplace.simulate.cluster_state import ClusterState, cluster_state, empty_amounts
from kvplace.simulate.load import Arrival, Event, RandomLoad, Vm, trace
from kvplace.simulate.scenario import Scenario

_MOST_NODES_MADE_ROOM_ON = 8
"""Nodes on which moves are looked for, for one VM."""


class SimulatedCluster:
    """The nodes with their VMs, and what the extender would decide about them."""

    def __init__(self, nodes: Sequence[ClusterNode], strategy: Strategy) -> None:
        self._strategy = strategy
        self._topologies = {node.name: node.topology for node in nodes}
        self._ledgers = {node.name: node.ledger for node in nodes}
        self._running = {node.name: {one.id: one for one in node.running} for node in nodes}
        self._frees = {name: free_of(self._topologies[name], self._ledgers[name]) for name in self._ledgers}
        self._node_of: dict[str, str] = {}
        self._fits = FitTable(self._snapshot_of)

    @property
    def states(self) -> Iterable[tuple[Topology, Free]]:
        """Every node's machine and what is left on it."""
        return ((self._topologies[name], free) for name, free in self._frees.items())

    def answers(self, request: Request) -> dict[str, Candidate | Refusal]:
        """Say for every node where a VM would sit there, or why it does not fit."""
        return self._fits.answers(self._topologies, request)

    def best(self, answers: dict[str, Candidate | Refusal]) -> Candidate | None:
        """Choose among the nodes that fit."""
        return best_candidate((a for a in answers.values() if isinstance(a, Candidate)), self._strategy)

    def take(self, node: str, vm: Vm, placement: Placement) -> None:
        """Let a VM run on a node, on what it was given."""
        uid = _uid(vm)
        self._node_of[uid] = node
        self._seat(node, Occupant(uid, vm.request, placement))

    def end(self, vm: Vm) -> None:
        """Give back what a VM holds, if it holds anything."""
        uid = _uid(vm)
        node = self._node_of.pop(uid, None)
        if node is not None:
            del self._running[node][uid]
            self._change(node, LedgerChange(releases=(uid,)))

    def room(self, request: Request, most_moves: int, first: str | None) -> tuple[str, MovePlan] | None:
        """Find the node where the fewest and cheapest moves let a VM fit well.

        Looked at are `first`, where it would sit badly, and the nodes with the fewest, but enough, CPUs free.
        """
        enough = [
            (free.cpus.bit_count(), name)
            for name, free in self._frees.items()
            if free.cpus.bit_count() >= request.vcpus and name != first
        ]
        names = [name for _, name in sorted(enough)]
        best: tuple[tuple[int, int], str, MovePlan] | None = None
        for name in ([first, *names] if first is not None else names)[:_MOST_NODES_MADE_ROOM_ON]:
            running = tuple(self._running[name].values())
            room = make_room(self._topologies[name], running, request, most_moves=most_moves)
            if isinstance(room, MovePlan):
                cost = (len(room.moves), room.bytes_moved)
                if best is None or cost < best[0]:
                    best = (cost, name, room)
                if len(room.moves) <= 1:
                    break
        return (best[1], best[2]) if best is not None else None

    def move(self, node: str, room: MovePlan) -> None:
        """Make the moves, one after the other."""
        for move in room.moves:
            self._seat(node, replace(self._running[node][move.id], placement=move.after))

    def _seat(self, node: str, occupant: Occupant) -> None:
        self._running[node][occupant.id] = occupant
        self._change(node, LedgerChange(claims=(claim_of(occupant.id, occupant.placement),)))

    def _change(self, node: str, change: LedgerChange) -> None:
        self._ledgers[node] = self._ledgers[node].after(change)
        self._frees[node] = free_of(self._topologies[node], self._ledgers[node])
        self._fits.node_changed(node)

    def _snapshot_of(self, node: str) -> NodeSnapshot:
        topology = self._topologies[node]
        return NodeSnapshot(NodeMachine(topology, CpuMask(topology.allocatable)), self._frees[node])


def _uid(vm: Vm) -> str:
    """Name a VM that came, apart from those that the document lists as running."""
    return f"came/{vm.id}"


@dataclass(frozen=True, slots=True)
class Splits:
    """VMs over more parts of a machine than they would need there if it were empty."""

    forced: int = 0
    """No node had room for them in fewer parts."""
    avoidable: int = 0
    """Another node had."""

    def after(self, used: int, needed: int, fewest: int) -> Splits:
        """Count one more VM."""
        if used <= needed:
            return self
        if fewest < used:
            return replace(self, avoidable=self.avoidable + 1)
        return replace(self, forced=self.forced + 1)


@dataclass
class Outcome:
    """What became of the VMs of one simulation."""

    strategy: Strategy
    seed: int | None
    """None for VMs that were given one by one."""
    arrived: int = 0
    placed: int = 0
    refused: int = 0
    refused_cpus: int = 0
    refused_while_cluster_free: int = 0
    """The nodes together had the CPUs free."""
    refused_while_node_free: int = 0
    """One node had the CPUs free, and the memory outside huge pages."""
    reasons: Counter[Reason] = field(default_factory=Counter)
    """Of the refused VMs, what most nodes said."""
    numa: Splits = Splits()
    l3: Splits = Splits()
    first_refusal: ClusterState | None = None
    placed_before_refusal: int = 0
    end: ClusterState = field(default_factory=lambda: ClusterState(0.0, 0.0, 0.0, 0.0))
    made_room: int = 0
    """VMs that fit well only after others moved."""
    moves: int = 0
    bytes_moved: int = 0
    """Memory that moves took to other NUMA nodes."""
    seconds: list[float] = field(default_factory=list)
    """Of every decision: what each node could give, and the choice."""


def simulate(scenario: Scenario, strategy: Strategy, seed: int | None) -> Outcome:
    """Run one simulation; a seed is needed where the VMs are drawn from a mix."""
    return _Run(scenario, strategy, seed).outcome()


class _Run:
    def __init__(self, scenario: Scenario, strategy: Strategy, seed: int | None) -> None:
        self._scenario = scenario
        self._cluster = SimulatedCluster(scenario.nodes, strategy)
        self._found = Outcome(strategy, seed)
        self._drawn: RandomLoad | None = None
        self._alone: dict[tuple[object, ...], Placement | None] = {}
        if scenario.mix is not None:
            amounts = [empty_amounts(node.topology) for node in scenario.nodes]
            self._drawn = RandomLoad(
                scenario.mix,
                seed or 0,
                cpus=sum(cpus for cpus, _ in amounts),
                memory=sum(numa.memory for node in scenario.nodes for numa in node.topology.numa_nodes),
            )

    def outcome(self) -> Outcome:
        events: Iterable[Event] = self._drawn if self._drawn is not None else trace(self._scenario.vms)
        for event in events:
            if isinstance(event, Arrival):
                self._arrive(event.vm)
            else:
                self._cluster.end(event.vm)
        self._found.end = self._state()
        return self._found

    def _arrive(self, vm: Vm) -> None:
        found, request = self._found, vm.request
        began = time.perf_counter()
        answers = self._cluster.answers(request)
        best = self._cluster.best(answers)
        found.seconds.append(time.perf_counter() - began)
        found.arrived += 1
        if self._makes_room(vm, best):
            return
        if best is None:
            self._refuse(vm, answers)
            return
        found.placed += 1
        self._count_splits(best, request, answers)
        self._cluster.take(best.node, vm, best.placement)

    def _makes_room(self, vm: Vm, best: Candidate | None) -> bool:
        """Place a VM after moves of others, where it would not fit or not well without."""
        most = self._scenario.moves
        if not most or (best is not None and not self._is_split(best, vm.request)):
            return False
        found = self._cluster.room(vm.request, most, None if best is None else best.node)
        if found is None:
            return False
        node, room = found
        self._cluster.move(node, room)
        self._cluster.take(node, vm, room.placement)
        self._found.placed += 1
        self._found.made_room += bool(room.moves)
        self._found.moves += len(room.moves)
        self._found.bytes_moved += room.bytes_moved
        return True

    def _refuse(self, vm: Vm, answers: dict[str, Candidate | Refusal]) -> None:
        found, request = self._found, vm.request
        if not found.refused:
            found.first_refusal = self._state()
            found.placed_before_refusal = found.placed
        found.refused += 1
        found.refused_cpus += request.vcpus
        frees = [free for _, free in self._cluster.states]
        cpus = [(free.cpus if request.owns_cpus else free.pool).bit_count() for free in frees]
        plain = request.memory - sum(size * count for size, count in request.huge_pages.items())
        found.refused_while_cluster_free += sum(cpus) >= request.vcpus
        found.refused_while_node_free += any(
            count >= request.vcpus
            and (not free.memory or sum(max(0, left) for _, left in free.memory) >= plain)
            for count, free in zip(cpus, frees, strict=True)
        )
        said = Counter(answer.reason for answer in answers.values() if isinstance(answer, Refusal))
        found.reasons[max(said, key=lambda reason: (said[reason], reason.value))] += 1
        if self._drawn is not None:
            self._drawn.refused(vm)

    def _alone_on(self, topology: Topology, request: Request) -> Placement | None:
        """Where a VM would sit on an empty machine."""
        key = (topology.fingerprint, request.key)
        if key not in self._alone:
            self._alone[key] = try_place(topology, free_of(topology, Ledger()), request)
        return self._alone[key]

    def _is_split(self, best: Candidate, request: Request) -> bool:
        alone = self._alone_on(best.topology, request)
        return alone is not None and len(best.placement.numa_nodes) > len(alone.numa_nodes)

    def _count_splits(
        self, best: Candidate, request: Request, answers: dict[str, Candidate | Refusal]
    ) -> None:
        used, needed = best.placement, self._alone_on(best.topology, request)
        if needed is None:
            return
        if len(used.numa_nodes) > len(needed.numa_nodes) or len(used.l3_groups) > len(needed.l3_groups):
            fitting = [answer.placement for answer in answers.values() if isinstance(answer, Candidate)]
            self._found.numa = self._found.numa.after(
                len(used.numa_nodes),
                len(needed.numa_nodes),
                min(len(placement.numa_nodes) for placement in fitting),
            )
            self._found.l3 = self._found.l3.after(
                len(used.l3_groups),
                len(needed.l3_groups),
                min(len(placement.l3_groups) for placement in fitting),
            )

    def _state(self) -> ClusterState:
        return cluster_state(self._cluster.states, self._scenario.memory_per_cpu)
