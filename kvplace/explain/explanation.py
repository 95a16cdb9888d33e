"""The explanation of one VM: its request, its stage, and why it is where it is, or nowhere.

For a VM that fits nowhere it has reasons by node, and the changes that make it fit: pure, over a view of all
nodes. Each node is asked with the function that Filter asks with. The first thing that keeps a VM from a node
counts: kube-scheduler's own filters come before kvplace.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass

from kvplace.core.cluster.node_choice import Candidate, Fit, GroupedRefusals, Strategy, grouped
from kvplace.core.cpuset import mask_of
from kvplace.core.moves.suggestions import Suggestions, find_suggestions
from kvplace.core.occupant import Neighbour, Occupant, neighbours_of, occupant_of_claim
from kvplace.core.placement import Reason, Refusal
from kvplace.core.request import Request
from kvplace.core.request_json import PodRequest
from kvplace.core.scalars import NO_CPUS, CpuMask, NodeName, PodUid
from kvplace.kube.node_filters import PodDemands, SchedulableNode, obstacle
from kvplace.kube.object_records import PodReport
from kvplace.nodes.cluster_view import ClusterView, NodeView, VmView, agrees
from kvplace.nodes.node_machine import NodeMachine, NodeSnapshot, Unusable, answer_of, with_claimed_devices

_SEARCHED_NODES = 2
"""Changes are searched for so many nodes: dozens of placements each, and other nodes give much the same."""

_RUNS_THERE = "the VM runs there, and a live migration goes to another node"


@dataclass(frozen=True, slots=True)
class AskedNode:
    """One node as an explanation sees it."""

    name: NodeName
    state: NodeSnapshot | Unusable
    obstacle: str = ""
    """The reason outside kvplace that keeps the pod away; empty where none is known."""
    occupants: tuple[Occupant, ...] = ()
    """All VMs with claims there; empty where one of them is not known well enough to be moved."""
    movable: frozenset[str] = frozenset()
    """The ids of the VMs that had opted in to moves when their pods were made."""


@dataclass(frozen=True, slots=True)
class Obstacle:
    """Nodes that are out of the question for one reason outside kvplace."""

    sentence: str
    nodes: tuple[NodeName, ...]
    would_fit: tuple[NodeName, ...]
    """The nodes among them that have the cores."""


@dataclass(frozen=True, slots=True)
class NodeSuggestions:
    """Changes that make the VM fit on one node."""

    node: NodeName
    refusal: Refusal
    suggestions: Suggestions
    need_movable: tuple[str, ...] = ()
    """The VMs that would move but had not opted in when their pods were made."""


@dataclass(frozen=True, slots=True)
class Fitting:
    """The answers of all nodes to one request."""

    candidates: tuple[Candidate, ...]
    """Nodes that can hold the VM, the best first."""
    obstacles: tuple[Obstacle, ...]
    """The largest group first."""
    refusals: GroupedRefusals
    suggestions: tuple[NodeSuggestions, ...] = ()
    """Searched for only where no node can hold the VM."""

    @property
    def nodes(self) -> int:
        """How many nodes were asked."""
        return (
            len(self.candidates)
            + sum(len(one.nodes) for one in self.obstacles)
            + sum(len(group.nodes) for group in self.refusals.groups)
        )


def fit(nodes: Iterable[AskedNode], request: Request, strategy: Strategy = Strategy.PACK) -> Fitting:
    """Ask every node; where none can hold the VM, search for the smallest changes that let one hold it."""
    known: dict[tuple[object, ...], Fit | Refusal] = {}
    """The answers by state: nodes in equal states share one."""

    def answer_in(state: NodeSnapshot | Unusable) -> Fit | Refusal:
        if isinstance(state, Unusable):
            return Refusal(Reason.NO_TOPOLOGY, state.problem, {}, never=True)
        machine = state.machine
        key = (machine.topology.fingerprint, machine.allocatable, state.free)
        if key not in known:
            known[key] = answer_of(state, request)
        return known[key]

    candidates: list[Candidate] = []
    refusals: dict[NodeName, Refusal] = {}
    obstacles: dict[str, list[tuple[NodeName, bool]]] = {}
    by_name: dict[NodeName, AskedNode] = {}
    for node in nodes:
        by_name[node.name] = node
        answer = answer_in(node.state)
        if node.obstacle:
            obstacles.setdefault(node.obstacle, []).append((node.name, isinstance(answer, Fit)))
        elif isinstance(answer, Fit):
            candidates.append(Candidate(node.name, answer))
        else:
            refusals[node.name] = answer
    suggestions = () if candidates else _suggestions(by_name, refusals, request)
    return Fitting(
        tuple(sorted(candidates, key=lambda candidate: candidate.rank(strategy))),
        tuple(
            Obstacle(
                sentence,
                tuple(sorted(name for name, _ in found)),
                tuple(sorted(name for name, fits in found if fits)),
            )
            for sentence, found in sorted(obstacles.items(), key=lambda entry: (-len(entry[1]), entry[0]))
        ),
        grouped(refusals),
        suggestions,
    )


def _suggestions(
    nodes: Mapping[NodeName, AskedNode], refusals: Mapping[NodeName, Refusal], request: Request
) -> tuple[NodeSuggestions, ...]:
    """Search the nodes where least is missing; nodes that are too small even when empty come last."""
    found = []
    for name in _nearest(refusals)[:_SEARCHED_NODES]:
        node = nodes[name]
        if isinstance(node.state, Unusable):
            continue
        machine, free = node.state.machine, node.state.free
        suggestions = find_suggestions(
            machine.topology, free, request, node.occupants, only=machine.allocatable
        )
        if suggestions.found:
            moved = {move.id for one in suggestions.found for move in one.moves}
            found.append(
                NodeSuggestions(name, refusals[name], suggestions, tuple(sorted(moved - node.movable)))
            )
    return tuple(found)


def _nearest(refusals: Mapping[NodeName, Refusal]) -> Sequence[NodeName]:
    def distance(name: NodeName) -> tuple[bool, bool, int, NodeName]:
        refusal = refusals[name]
        missing = refusal.shortfall.get("missing", 0)
        return (
            refusal.reason is Reason.NO_TOPOLOGY,
            refusal.never,
            missing if isinstance(missing, int) else 0,
            name,
        )

    return sorted(refusals, key=distance)


@dataclass(frozen=True, slots=True)
class Event:
    """An event about the VM."""

    when: str
    """RFC 3339, the last time."""
    about: str
    """`kind/name`."""
    reason: str
    note: str
    count: int = 1


@dataclass(frozen=True)
class Seat:
    """A pod of the VM that has its node."""

    vm: VmView
    node: NodeView
    neighbours: tuple[Neighbour, ...] = ()
    measured_since: str = ""
    """Since when the agent reports the same about its threads, RFC 3339; empty when it reports nothing."""
    is_ready: bool = True
    """Whether the node's kubelet reports; if not, the reports about the VM are old."""

    @property
    def report(self) -> PodReport | None:
        """The agent's measurement; None without an agent, or before its first check."""
        return self.node.reports.get(self.vm.pod.uid)

    @property
    def unclaimed(self) -> CpuMask:
        """Its own CPUs by its placement that have no owner or another one in the node's ledger.

        None of a VM that has ended: its claim is released by then.
        """
        if self.vm.placement is None or self.vm.is_over:
            return NO_CPUS
        owners, uid = self.node.ledger.owners, self.vm.pod.uid
        held = mask_of(cpu for cpu, owner in owners.items() if owner == uid)
        return CpuMask(self.vm.placement.placement.owned & ~held)

    @property
    def is_relocating(self) -> bool:
        """Whether it is getting other cores at the moment."""
        return self.vm.claim is not None and self.vm.claim.relocation is not None


@dataclass(frozen=True)
class Explanation:
    """The answer to `explain`."""

    kind: str
    namespace: str
    name: str
    state: str
    request: PodRequest | None
    """None for an object without a request."""
    notes: tuple[str, ...] = ()
    """Further sentences, the most important first."""
    fitting: Fitting | None = None
    """The answers of all nodes, for a VM that has none yet."""
    seats: tuple[Seat, ...] = ()
    """More than one during a live migration."""
    events: tuple[Event, ...] = ()
    """The newest last."""

    @property
    def fits_nowhere(self) -> bool:
        """Whether it waits and no node can hold it."""
        return self.fitting is not None and not self.fitting.candidates


def asked_nodes(
    view: ClusterView,
    nodes: Mapping[NodeName, SchedulableNode],
    demands: PodDemands,
    leaving: Container[NodeName] = (),
    pod: PodUid | None = None,
) -> Iterable[AskedNode]:
    """Combine the states of every node of the cluster in kvplace and in kube-scheduler.

    `leaving` are the present nodes of a VM that is to migrate. Claims and reservations of its `pod` do not
    keep it away.
    """
    for name, stored in view.nodes.items():
        node = stored if pod is None else stored.without(pod)
        scheduled = nodes.get(name)
        if scheduled is not None:  # of a deleted node its ledger may be left
            hindered = _RUNS_THERE if name in leaving else obstacle(scheduled, demands)
            yield AskedNode(name, node.snapshot, hindered, occupants_of(view, node), may_move(view, node))


def occupants_of(view: ClusterView, node: NodeView) -> tuple[Occupant, ...]:
    """Return the VMs that a search for moves may move; none where one of them is not known well enough."""
    if any(claim.relocation is not None for claim in node.ledger.claims.values()):
        return ()
    found = []
    for uid in node.ledger.claims:
        vm = view.vms.get(uid)
        request = vm.request if vm is not None else None
        placement = vm.placement if vm is not None else None
        if vm is None or request is None or placement is None:
            return ()
        there = placement.placement
        has_claims = bool(vm.pod.resource_claims)
        running = with_claimed_devices(request.request, there) if has_claims else request.request
        found.append(Occupant(f"{vm.namespace}/{vm.name}", running, there))
    machine = node.machine
    if isinstance(machine, NodeMachine) and (others := machine.others) is not None:
        found.append(occupant_of_claim(others.pod, others, machine.topology))
    names = {occupant.id for occupant in found}
    return tuple(found) if len(names) == len(found) else ()


def may_move(view: ClusterView, node: NodeView) -> frozenset[str]:
    """Name the VMs of a node that had opted in to moves when their pods were made."""
    found = (view.vms.get(uid) for uid in node.ledger.claims)
    return frozenset(f"{vm.namespace}/{vm.name}" for vm in found if vm is not None and agrees(vm))


def seat_of(vm: VmView, node: NodeView, measured_since: str = "", *, is_ready: bool = True) -> Seat:
    """Check a bound VM among its neighbours."""
    placement = vm.placement
    if placement is None or isinstance(node.machine, Unusable):
        return Seat(vm, node, (), measured_since, is_ready)
    cpus = CpuMask(placement.placement.cpus | placement.placement.owned)
    beside = neighbours_of(vm.pod.uid, cpus, node.machine.topology, node.ledger)
    return Seat(vm, node, beside, measured_since, is_ready)
