"""Where a VM would fit, why it does not, and what would change that: pure, over a view of all nodes.

Each node is asked with the function that Filter asks with, so what it reports here is what it would state
there. The first thing that keeps a VM from a node is what counts: kube-scheduler's own filters come before
kvplace.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from kvplace.core.cluster.grouped_refusals import GroupedRefusals, grouped
from kvplace.core.cluster.node_choice import Candidate, Fit, Strategy
from kvplace.core.moves.suggestions import Suggestions, find_suggestions
from kvplace.core.occupant import Occupant
from kvplace.core.refusal import Reason, Refusal
from kvplace.core.request import Request
from kvplace.core.scalars import NodeName
from kvplace.nodes.node_answer import answer_of
from kvplace.nodes.node_machine import NodeSnapshot, Unusable

_LOOKED_INTO = 2
"""Changes are searched for so many nodes: dozens of placements each, and other nodes give much the same."""


@dataclass(frozen=True, slots=True)
class AskedNode:
    """One node as an explanation sees it."""

    name: NodeName
    state: NodeSnapshot | Unusable
    obstacle: str = ""
    """What keeps the pod away before kvplace is asked; empty when nothing is known to."""
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
    """Those of them that have the cores."""


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
    answers = _Answers(request)
    candidates: list[Candidate] = []
    refusals: dict[NodeName, Refusal] = {}
    obstacles: dict[str, list[tuple[NodeName, bool]]] = {}
    by_name: dict[NodeName, AskedNode] = {}
    for node in nodes:
        by_name[node.name] = node
        answer = answers.of(node.state)
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


class _Answers:
    """The answers to one request; nodes in equal states share one."""

    def __init__(self, request: Request) -> None:
        self._request = request
        self._known: dict[tuple[object, ...], Fit | Refusal] = {}

    def of(self, state: NodeSnapshot | Unusable) -> Fit | Refusal:
        if isinstance(state, Unusable):
            return Refusal(Reason.NO_TOPOLOGY, state.problem, {}, never=True)
        machine = state.machine
        key = (machine.topology.fingerprint, machine.allocatable, state.free)
        if key not in self._known:
            self._known[key] = answer_of(state, self._request)
        return self._known[key]


def _suggestions(
    nodes: Mapping[NodeName, AskedNode], refusals: Mapping[NodeName, Refusal], request: Request
) -> tuple[NodeSuggestions, ...]:
    """Search the nodes where least is missing; nodes that are too small even when empty come last."""
    found = []
    for name in _nearest(refusals)[:_LOOKED_INTO]:
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
