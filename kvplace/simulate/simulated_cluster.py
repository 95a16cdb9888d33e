"""A cluster in a simulation: its nodes with their VMs, the decisions of the extender, and its use.

Nodes answer through the fit table that answers kube-scheduler's Filter, and the same rule chooses among them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache

from kvplace.core.cluster.node_choice import Candidate, Strategy, best_candidate
from kvplace.core.cluster.victims import OccupiedMachine
from kvplace.core.cpuset import cpus_of
from kvplace.core.device_locality import predicted_held, too_few_devices
from kvplace.core.free_resources import Free, free_of
from kvplace.core.ledger import Ledger, claim_of
from kvplace.core.moves.make_room import MovePlan, make_room
from kvplace.core.occupant import ClusterNode, Occupant
from kvplace.core.placement import Placement, Refusal
from kvplace.core.request import Request
from kvplace.core.scalars import NodeName, PodUid
from kvplace.core.search_budget import MAX_STEPS
from kvplace.core.topology import Topology
from kvplace.nodes.node_machine import NodeMachine, NodeSnapshot
from kvplace.scheduler.fit_table import FitTable
from kvplace.simulate.scenario import SimulatedVm

_MOST_NODES_SEARCHED_FOR_MOVES = 8
"""Nodes where moves are searched for one VM."""


class SimulatedCluster:
    """The nodes, and the decisions that the extender would make about them."""

    def __init__(self, nodes: Sequence[ClusterNode], strategy: Strategy) -> None:
        self._strategy = strategy
        self._nodes = {node.name: node for node in nodes}
        self._free = {node.name: node.free for node in nodes}
        self._node_of: dict[str, NodeName] = {}
        self._fits = FitTable(self._snapshot_of, strategy)

    @property
    def states(self) -> Iterable[tuple[Topology, Free]]:
        """The machine of every node, and its free resources."""
        return ((node.topology, self._free[name]) for name, node in self._nodes.items())

    @property
    def occupied(self) -> dict[NodeName, OccupiedMachine]:
        """Every node's machine and the claims of its VMs."""
        found = {}
        for name, node in self._nodes.items():
            claims = {PodUid(vm.id): claim_of(PodUid(vm.id), vm.placement) for vm in node.running}
            owners = {cpu: uid for uid, claim in claims.items() for cpu in cpus_of(claim.owned)}
            found[name] = OccupiedMachine(node.topology, Ledger(owners, claims))
        return found

    def answers(self, request: Request) -> dict[NodeName, Candidate | Refusal]:
        """Give every node's placement or refusal."""
        if not request.devices:
            return self._fits.answers_at_once(self._nodes, request)
        refused = {
            name: refusal
            for name, free in self._free.items()
            if (refusal := too_few_devices(free.devices, request.devices)) is not None
        }
        enough = [name for name in self._nodes if name not in refused]
        return {**refused, **self._fits.answers_at_once(enough, request)}

    def best(self, answers: dict[NodeName, Candidate | Refusal]) -> Candidate | None:
        """Choose among the nodes that fit."""
        return best_candidate((a for a in answers.values() if isinstance(a, Candidate)), self._strategy)

    def start(self, node: NodeName, vm: SimulatedVm, placement: Placement) -> None:
        """Run a VM on a node."""
        uid = _uid(vm)
        self._node_of[uid] = node
        devices = predicted_held(self._free[node].devices, vm.request.devices)
        one = Occupant(uid, vm.request, placement, devices=devices)
        self._set_running(node, (*self._nodes[node].running, one))

    def end(self, vm: SimulatedVm) -> None:
        """Release the resources of a VM; a refused VM has none."""
        uid = _uid(vm)
        node = self._node_of.pop(uid, None)
        if node is not None:
            self._set_running(node, (one for one in self._nodes[node].running if one.id != uid))

    def find_moves(
        self, request: Request, most_moves: int, first: NodeName | None, *, max_steps: int = MAX_STEPS
    ) -> tuple[NodeName, MovePlan] | None:
        """Find the node where the fewest and cheapest moves let a VM fit well.

        Searches `first`, where the VM would be split, and the nodes with the fewest, but enough, free CPUs.
        """
        enough = [
            (free.cpus.bit_count(), name)
            for name, free in self._free.items()
            if free.cpus.bit_count() >= request.vcpus
            and name != first
            and too_few_devices(free.devices, request.devices) is None
        ]
        names = [name for _, name in sorted(enough)]
        best: tuple[tuple[int, int], NodeName, MovePlan] | None = None
        for name in ([first, *names] if first is not None else names)[:_MOST_NODES_SEARCHED_FOR_MOVES]:
            plan = make_room(self._nodes[name], request, most_moves=most_moves, max_steps=max_steps)
            if isinstance(plan, MovePlan):
                cost = (len(plan.moves), plan.bytes_moved)
                if best is None or cost < best[0]:
                    best = (cost, name, plan)
                if len(plan.moves) <= 1:
                    break
        return (best[1], best[2]) if best is not None else None

    def move(self, node: NodeName, plan: MovePlan) -> None:
        """Make the moves of a plan."""
        after = {move.id: move.after for move in plan.moves}
        self._set_running(
            node,
            (replace(vm, placement=after.get(vm.id, vm.placement)) for vm in self._nodes[node].running),
        )

    def _set_running(self, node: NodeName, running: Iterable[Occupant]) -> None:
        changed = replace(self._nodes[node], running=tuple(running))
        self._nodes[node], self._free[node] = changed, changed.free
        self._fits.node_changed(node)

    def _snapshot_of(self, node: NodeName) -> NodeSnapshot:
        topology = self._nodes[node].topology
        return NodeSnapshot(NodeMachine(topology), self._free[node])


def _uid(vm: SimulatedVm) -> str:
    """Keep VMs of the load apart from the running VMs of the document."""
    return f"load/{vm.id}"


@dataclass(frozen=True, slots=True)
class ClusterState:
    """A cluster at one moment, in shares of the resources of the empty cluster.

    A free CPU is stranded where its node has too little memory left to go with it, in the proportion that
    all VMs together request; free memory is stranded where too few CPUs are left to go with it.
    Memory is counted outside huge pages. Nodes of unknown memory strand nothing.
    """

    cpus_used: float
    memory_used: float
    cpus_stranded: float
    memory_stranded: float


def cluster_state(nodes: Iterable[tuple[Topology, Free]], memory_per_cpu: float) -> ClusterState:
    """Measure the free resources of nodes, for VMs that request so many bytes per CPU."""
    cpus = free_cpus = memory = free_memory = 0
    stranded_cpus = stranded_memory = 0.0
    for topology, free in nodes:
        own_cpus, own_memory = empty_amounts(topology)
        left_cpus = free.cpus.bit_count()
        left_memory = sum(max(0, count) for _, count in free.memory)
        cpus += own_cpus
        memory += own_memory
        free_cpus += left_cpus
        free_memory += left_memory
        if own_memory and memory_per_cpu:
            stranded_cpus += max(0.0, left_cpus - left_memory / memory_per_cpu)
            stranded_memory += max(0.0, left_memory - left_cpus * memory_per_cpu)
    return ClusterState(
        cpus_used=1 - free_cpus / max(1, cpus),
        memory_used=1 - free_memory / max(1, memory),
        cpus_stranded=stranded_cpus / max(1, cpus),
        memory_stranded=stranded_memory / max(1, memory),
    )


@cache
def empty_amounts(topology: Topology) -> tuple[int, int]:
    """Count the CPUs, and the bytes outside huge pages, that an empty machine can give out."""
    free = free_of(topology, Ledger())
    return free.cpus.bit_count(), sum(count for _, count in free.memory)
