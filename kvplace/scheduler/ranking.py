"""The states of the nodes, and their ranking for one request, the best first.

A state is a machine and its free resources. Nodes in equal states share one `NodeState`, so every result
about it is computed once. A node is described once after each change, for all kinds of VMs. A node is
forgotten at the next question that does not name it, a state with its last node.

A ranking orders the states by the best known bound: at first a bound by counting, then the placement itself
when the state comes to the front. The first state with a placement is the best, since no bound after it can
win.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import NamedTuple

from kvplace.core.allocator.feasibility import ShortageCount
from kvplace.core.cluster.node_bound import NodeCounts, StandingBound
from kvplace.core.cluster.node_choice import (
    Candidate,
    Fit,
    GroupedRefusals,
    Standing,
    Strategy,
    best_candidate,
    near_enough,
)
from kvplace.core.placement import Refusal
from kvplace.core.request import Request
from kvplace.core.scalars import CpuMask, NodeName
from kvplace.core.search_budget import TurnBudget
from kvplace.nodes.node_machine import NOT_KNOWN, NodeSnapshot, Unusable, answer_of

_DESCRIBE = 40
"""Steps that it takes to describe a node."""


class NodeState:
    """A machine and its free resources, compared by identity; `nodes` are the nodes in this state, sorted."""

    __slots__ = ("counts", "nodes", "number", "snapshot")

    def __init__(self, number: int, snapshot: NodeSnapshot) -> None:
        self.number = number
        """Later states have higher numbers."""
        self.snapshot = snapshot
        self.counts = NodeCounts(snapshot.machine.topology, snapshot.free)
        self.nodes: list[NodeName] = []

    def first_of(self, asked: Collection[NodeName]) -> NodeName | None:
        """Return the first by name of the asked nodes that is in this state."""
        return next((node for node in self.nodes if node in asked), None)


class Unseen:
    """The states that have not been checked yet; the next turn continues with the rest of this one."""

    def __init__(self) -> None:
        self._last = 0
        """The number of the last state that has been checked."""
        self._left: list[NodeState] = []
        """States that are newer, the oldest last."""

    def of(self, states: NodeStates) -> Iterator[NodeState]:
        """Yield the states, the oldest first; if the caller leaves during one, it is yielded again."""
        while left := self._left or states.since(self._last)[::-1]:
            self._left = left
            state = left[-1]
            if state.nodes:
                yield state
            self._last = state.number
            left.pop()


class NodeStates:
    """The state of every node that was asked about."""

    def __init__(self, snapshot_of: Callable[[NodeName], NodeSnapshot | Unusable]) -> None:
        self._snapshot_of = snapshot_of
        self._of_node: dict[NodeName, NodeState | Unusable] = {}
        self._changed: dict[NodeName, None] = {}
        """Nodes to be described again, in the order of their changes."""
        self._gone: set[NodeName] = set()
        """Nodes that were asked about although there is no such node."""
        self._states: dict[tuple[object, ...], NodeState] = {}
        """The states with nodes, by machine and free resources; the newest last."""
        self.version = 0
        """Increases with each change of the nodes."""
        self._newest = 0
        self._complete: frozenset[NodeName] | None = None
        """Asked nodes that all have a state: planning asks about the same ones again and again."""

    def __len__(self) -> int:
        return len(self._states)

    @property
    def of_node(self) -> Mapping[NodeName, NodeState | Unusable]:
        """The state of every node that was asked about, or the reason against any placement on it."""
        return self._of_node

    def node_changed(self, node: NodeName) -> None:
        """Describe a node again when it is next asked about."""
        if node in self._of_node:
            self._changed[node] = None

    def describe(self, asked: frozenset[NodeName], budget: TurnBudget) -> None:
        """Bring the states of the asked nodes up to date."""
        if asked is not self._complete:
            self._complete = None
        for node in self._gone - asked:
            self._leave(node)
        while self._changed:
            budget.spend(_DESCRIBE)
            node = next(iter(self._changed))
            del self._changed[node]
            if node in asked:
                self._describe(node)
            else:
                self._leave(node)
        if self._complete is None:
            for node in asked.difference(self._of_node):
                budget.spend(_DESCRIBE)
                self._describe(node)
            self._complete = asked

    def since(self, number: int) -> list[NodeState]:
        """Return the states newer than the state of that number, the oldest first."""
        found = []
        for state in reversed(self._states.values()):
            if state.number <= number:
                break
            found.append(state)
        return found[::-1]

    def _describe(self, node: NodeName) -> None:
        self.version += 1
        snapshot = self._snapshot_of(node)
        if isinstance(snapshot, Unusable):
            self._leave(node)
            self._of_node[node] = snapshot
            if snapshot is NOT_KNOWN:
                self._gone.add(node)
            return
        key = snapshot.key
        before = self._of_node.get(node)
        state = self._states.get(key)
        if state is None:
            self._newest += 1
            state = self._states[key] = NodeState(self._newest, snapshot)
        if state is not before:
            self._leave(node)
            insort(state.nodes, node)
            self._of_node[node] = state

    def _leave(self, node: NodeName) -> None:
        self.version += 1
        self._gone.discard(node)
        state = self._of_node.pop(node, None)
        if isinstance(state, NodeState):
            del state.nodes[bisect_left(state.nodes, node)]
            if not state.nodes:
                del self._states[state.snapshot.key]


_REMEMBERED = 4096
"""Answers, of about 2 KB each; the least recently used is forgotten first."""


class RememberedAnswers:
    """Answers, by the values that they depend on."""

    def __init__(self) -> None:
        self._answers: OrderedDict[tuple[object, ...], Fit | Refusal] = OrderedDict()

    def of(self, node: NodeSnapshot, request: Request) -> Fit | Refusal:
        """Return the placement of a VM on a node in this state, or the refusal."""
        key = (node.key, request.key)
        answer = self._answers.get(key)
        if answer is None:
            answer = self._answers[key] = answer_of(node, request)
            if len(self._answers) > _REMEMBERED:
                self._answers.popitem(last=False)
        else:
            self._answers.move_to_end(key)
        return answer


_BOUND_STEPS, _PLACE_STEPS, _REFUSE_STEPS, _EXAMINE_STEPS = 4, 200, 50, 8
_MANY = 16
"""From this number of new entries on, sorting is faster than inserting."""
_SPARE = 64
"""States without nodes that are kept at least until the next sweep."""


_Entry = tuple[Standing, NodeName, int, Fit | None, NodeState]
"""Standing or bound, first node at the time of entry, number of the state (no two are equal), fit, state."""


@dataclass(frozen=True, slots=True)
class KnownRefusal:
    """The refusals of all nodes, as of one version of the states."""

    version: int
    asked: frozenset[NodeName]
    groups: GroupedRefusals


class Shortfall(NamedTuple):
    """The shortfall of a node, and the group of its refusal."""

    group: tuple[str, bool, str]
    missing: int
    node: NodeSnapshot


@dataclass(frozen=True, slots=True)
class _MachineShortage:
    """The shortage on machines of one kind."""

    shortage: ShortageCount
    groups: dict[str, tuple[str, bool, str]] = field(default_factory=dict)
    """The groups of their refusals, by the missing resource."""


class Ranking:
    """Knowledge about every state for one request."""

    def __init__(self, request: Request, strategy: Strategy, remembered: RememberedAnswers) -> None:
        """`remembered` are the answers of all rankings together."""
        self._request = request
        self._remembered = remembered
        self._strategy = strategy
        self._bound = StandingBound(request, strategy)
        self._seen = 0
        """The number of the newest state that has been counted."""
        self._unanswered = Unseen()
        self._unexamined = Unseen()
        self._order: list[_Entry] = []
        self._answers: dict[NodeState, Fit | Refusal] = {}
        self._examined: dict[NodeState, Fit | Refusal | Shortfall] = {}
        self._shortages: dict[tuple[str, CpuMask], _MachineShortage] = {}
        self.refused: KnownRefusal | None = None
        """The last such answer: many VMs of one size wait together."""

    def __len__(self) -> int:
        return len(self._order) + len(self._answers) + len(self._examined)

    def count(self, states: NodeStates, budget: TurnBudget) -> None:
        """Enter new states, and forget unused ones when they are many."""
        kept = self._order, self._answers, self._examined, self._shortages
        if max([len(one) for one in kept]) > 2 * len(states) + _SPARE:
            self._order = [entry for entry in self._order if entry[-1].nodes]
            self._answers = {state: answer for state, answer in self._answers.items() if state.nodes}
            self._examined = {state: found for state, found in self._examined.items() if state.nodes}
            self._shortages.clear()
        entered: list[_Entry] = []
        try:
            for state in states.since(self._seen):
                budget.spend(_BOUND_STEPS)
                self._seen = state.number
                bound = self._bound.of(state.counts)
                if bound is not None:
                    entered.append((bound, state.nodes[0], state.number, None, state))
        finally:
            if len(entered) < _MANY:
                for entry in entered:
                    insort(self._order, entry)
            else:
                self._order += entered
                self._order.sort()

    def best(
        self,
        asked: frozenset[NodeName],
        preferred: AbstractSet[NodeName],
        states: NodeStates,
        budget: TurnBudget,
    ) -> Candidate | None:
        """Choose the best of the asked nodes, or a preferred one of them that is near enough to it.

        None if none of them can hold the VM.
        """
        best = self.first(asked, budget)
        if best is None or best.node in preferred:
            return best
        standing = best.fit.standing(self._strategy)
        limit = near_enough(standing, self._strategy)
        near: list[Candidate] = []
        for name in preferred & asked if limit != standing else ():
            state = states.of_node[name]
            if isinstance(state, Unusable):
                continue
            bound = self._bound.of(state.counts)
            if bound is not None and bound < limit:
                answer = self._answer(state, budget)
                if isinstance(answer, Fit) and answer.standing(self._strategy) < limit:
                    near.append(Candidate(name, answer))
        return best_candidate(near, self._strategy) or best

    def first(self, asked: frozenset[NodeName], budget: TurnBudget) -> Candidate | None:
        """Choose the best of the asked nodes; None if none of them can hold the VM."""
        best: tuple[Standing, NodeName, Fit] | None = None
        order, index = self._order, 0
        while index < len(order):
            standing, entered_as, number, fit, state = order[index]
            if best is not None and standing > best[0]:
                break
            name = state.first_of(asked)
            if not state.nodes:
                del order[index]
                self._answers.pop(state, None)
            elif name is None or (best is not None and (standing, name) > best[:2]):
                index += 1
            elif fit is not None:
                best = (standing, name, fit)
                index += 1
            elif state not in self._answers and self._lacks_something(state, budget):
                del order[index]
            else:
                answer = self._answer(state, budget)
                del order[index]
                if isinstance(answer, Fit):
                    insort(order, (answer.standing(self._strategy), entered_as, number, answer, state))
        return Candidate(best[1], best[2]) if best is not None else None

    def answer_all(self, states: NodeStates, budget: TurnBudget) -> Mapping[NodeState, Fit | Refusal]:
        """Return the placement of the VM in every state, or the refusal."""
        for state in self._unanswered.of(states):
            self._answer(state, budget)
        return self._answers

    def examine_all(
        self, states: NodeStates, budget: TurnBudget
    ) -> Mapping[NodeState, Fit | Refusal | Shortfall]:
        """Return the same, but only the shortfall if a resource is missing by count.

        This takes a tenth of the time.
        """
        for state in self._unexamined.of(states):
            if state in self._examined:
                budget.spend(1)
            elif not self._lacks_something(state, budget):
                self._examined[state] = self._answer(state, budget)
        return self._examined

    def _lacks_something(self, state: NodeState, budget: TurnBudget) -> bool:
        """Whether a resource is missing by count; `_examined` then has the shortfall."""
        known = self._examined.get(state)
        if known is not None:
            return not isinstance(known, Fit)
        node = state.snapshot
        machine = self._shortages.get(node.machine.key)
        if machine is None:
            shortage = ShortageCount(node.machine.topology, self._request)
            machine = self._shortages[node.machine.key] = _MachineShortage(shortage)
        missing = machine.shortage.missing(node.free)
        if missing is None:
            return False
        if missing.what in machine.groups:
            self._examined[state] = Shortfall(machine.groups[missing.what], missing.amount, node)
            budget.spend(_EXAMINE_STEPS)  # when it is kept: a turn that ends here has got on
            return True
        answer = self._examined[state] = self._answer(state, budget)
        if isinstance(answer, Refusal):
            machine.groups[missing.what] = answer.group
        return True

    def _answer(self, state: NodeState, budget: TurnBudget) -> Fit | Refusal:
        answer = self._answers.get(state)
        if answer is None:
            fits = self._bound.of(state.counts) is not None
            budget.spend(_PLACE_STEPS if fits else _REFUSE_STEPS)
            # A refusal by counting alone is found as fast as remembered.
            find = self._remembered.of if fits else answer_of
            answer = self._answers[state] = find(state.snapshot, self._request)
            if isinstance(answer, Fit):
                answer.standing(self._strategy)  # computed here, where its steps are counted
        return answer
