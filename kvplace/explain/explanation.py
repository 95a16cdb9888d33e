"""The explanation of one VM: its request, its stage, and why it is where it is, or nowhere.

For a VM that fits nowhere it has reasons by node, and the changes that make it fit: pure, over a view of all
nodes. Each node is asked with the function that Filter asks with. The first thing that keeps a VM from a node
counts: kube-scheduler's own filters come before kvplace.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from kvplace.core.cluster.node_choice import Candidate, Fit, GroupedRefusals, Strategy, grouped
from kvplace.core.moves.suggestions import Suggestions, find_suggestions
from kvplace.core.occupant import Neighbour, neighbours_of
from kvplace.core.placement import Reason, Refusal
from kvplace.core.request import Request
from kvplace.core.request_json import PodRequest
from kvplace.core.scalars import NO_CPUS, CpuMask, NodeName
from kvplace.kube.object_records import PodReport
from kvplace.nodes.cluster_view import ClusterView, NodeView, VmView
from kvplace.nodes.node_machine import Unusable, answer_of
from kvplace.nodes.planning_cluster import planning_node

_SEARCHED_NODES = 2
"""Changes are searched for so many nodes: dozens of placements each, and other nodes give much the same."""


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


def fit(
    view: ClusterView,
    request: Request,
    obstacles: Mapping[NodeName, str],
    strategy: Strategy = Strategy.PACK,
) -> Fitting:
    """Ask every node; where none can hold the VM, search for the smallest changes that let one hold it.

    `obstacles` are the reasons outside kvplace, by node; empty for a node where none is known.
    """
    known: dict[tuple[object, ...], Fit | Refusal] = {}
    """The answers by state: nodes in equal states share one."""

    def answer_of_node(node: NodeView) -> Fit | Refusal:
        if isinstance(node.snapshot, Unusable):
            return Refusal(Reason.NO_TOPOLOGY, node.problem, {}, never=True)
        if node.snapshot.key not in known:
            known[node.snapshot.key] = answer_of(node.snapshot, request)
        return known[node.snapshot.key]

    candidates: list[Candidate] = []
    refusals: dict[NodeName, Refusal] = {}
    kept_away: dict[str, list[tuple[NodeName, bool]]] = {}
    for name, node in view.nodes.items():
        answer = answer_of_node(node)
        if obstacle := obstacles.get(name):
            kept_away.setdefault(obstacle, []).append((name, isinstance(answer, Fit)))
        elif isinstance(answer, Fit):
            candidates.append(Candidate(name, answer))
        else:
            refusals[name] = answer
    return Fitting(
        tuple(sorted(candidates, key=lambda candidate: candidate.rank(strategy))),
        tuple(
            Obstacle(
                sentence,
                tuple(sorted(name for name, _ in found)),
                tuple(sorted(name for name, fits in found if fits)),
            )
            for sentence, found in sorted(kept_away.items(), key=lambda entry: (-len(entry[1]), entry[0]))
        ),
        grouped(refusals),
        () if candidates else _suggestions(view, refusals, request),
    )


def _suggestions(
    view: ClusterView, refusals: Mapping[NodeName, Refusal], request: Request
) -> tuple[NodeSuggestions, ...]:
    """Search the nodes where least is missing; nodes that are too small even when empty come last."""
    found = []
    for name in _nearest(refusals)[:_SEARCHED_NODES]:
        node = view.nodes[name]
        if isinstance(node.snapshot, Unusable):
            continue
        there, free = planning_node(view, node, node.snapshot), node.snapshot.free
        suggestions = find_suggestions(there, free, request)
        if suggestions.found:
            moved = {move.id for one in suggestions.found for move in one.moves}
            found.append(
                NodeSuggestions(name, refusals[name], suggestions, tuple(sorted(moved - view.agreed)))
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
class VmEvent:
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
    measured_since: str = ""
    """Since when the agent reports the same about its threads, RFC 3339; empty when it reports nothing."""
    is_ready: bool = True
    """Whether the node's kubelet reports; if not, the reports about the VM are old."""

    @cached_property
    def neighbours(self) -> tuple[Neighbour, ...]:
        """The VMs near it, the nearest first; none where its cores are not known."""
        if self.vm.placement is None or isinstance(self.node.machine, Unusable):
            return ()
        placement = self.vm.placement.placement
        cpus = CpuMask(placement.cpus | placement.owned)
        return neighbours_of(self.vm.pod.uid, cpus, self.node.machine.topology, self.node.ledger)

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
        held = self.node.ledger.owned_by(self.vm.pod.uid)
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
    events: tuple[VmEvent, ...] = ()
    """The newest last."""

    @property
    def fits_nowhere(self) -> bool:
        """Whether it waits and no node can hold it."""
        return self.fitting is not None and not self.fitting.candidates
