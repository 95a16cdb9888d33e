"""The states of all nodes for one request, the best first.

States stand in the order of what is known about them: at first a bound by counting, a finer one or the
placement itself when they come to the front. The first that is placed is the best, since no bound after it
can win.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from functools import lru_cache
from typing import NamedTuple

from kvplace.core.allocator.feasibility import ShortageCount
from kvplace.core.cluster.node_bound import StandingBound
from kvplace.core.cluster.node_choice import Candidate, Fit, GroupedRefusals, Standing, Strategy
from kvplace.core.placement import Refusal
from kvplace.core.request import Request
from kvplace.core.scalars import CpuMask, NodeName
from kvplace.core.search_budget import TurnBudget
from kvplace.nodes.node_machine import NodeSnapshot, answer_of
from kvplace.scheduler.node_states import NodeState, NodeStates, Unseen

_REMEMBERED = 4096
"""Answers, of about 2 KB each; the least recently used is forgotten first."""


@dataclass(frozen=True, slots=True)
class _Question:
    """A request to a node; equal for equal requests to nodes in equal states."""

    state: tuple[object, ...]
    asked: tuple[object, ...]
    node: NodeSnapshot = field(compare=False)
    request: Request = field(compare=False)


class RememberedAnswers:
    """Answers, by the values that they depend on."""

    def __init__(self) -> None:
        self._answer = lru_cache(maxsize=_REMEMBERED)(_answer)

    def of(self, node: NodeSnapshot, request: Request) -> Fit | Refusal:
        """Return the placement of a VM on a node in this state, or the refusal."""
        return self._answer(_Question(node.key, request.key, node, request))


def _answer(question: _Question) -> Fit | Refusal:
    return answer_of(question.node, question.request)


_COARSE_STEPS, _FINE_STEPS, _PLACE_STEPS, _REFUSE_STEPS, _EXAMINE_STEPS = 4, 30, 200, 50, 8
_MANY = 16
"""From so many new entries on it is faster to sort than to insert."""
_SPARE = 64
"""States without nodes that are kept at least until the next sweep."""


class _Bound(Enum):
    COARSE = "coarse"
    FINE = "fine"


_Entry = tuple[Standing, NodeName, int, _Bound | Fit, NodeState]
"""Standing, first node when it was entered, number of the state (no two are equal), what is known."""


@dataclass(frozen=True, slots=True)
class KnownRefusal:
    """Why no node can hold the VM, as of one version of the states."""

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
                budget.spend(_COARSE_STEPS)
                self._seen = state.number
                bound = self._bound.coarse(state.counts)
                if bound is not None:
                    entered.append((bound, state.nodes[0], state.number, _Bound.COARSE, state))
        finally:
            if len(entered) < _MANY:
                for entry in entered:
                    insort(self._order, entry)
            else:
                self._order += entered
                self._order.sort()

    def best(self, asked: frozenset[NodeName], budget: TurnBudget) -> Candidate | None:
        """Choose the best of the asked nodes; None if none of them can hold the VM."""
        best: tuple[Standing, NodeName, Fit] | None = None
        order, index = self._order, 0
        while index < len(order):
            standing, entered_as, number, known, state = order[index]
            if best is not None and standing > best[0]:
                break
            name = state.first_of(asked)
            if not state.nodes:
                del order[index]
                self._answers.pop(state, None)
            elif name is None or (best is not None and (standing, name) > best[:2]):
                index += 1
            elif isinstance(known, Fit):
                best = (standing, name, known)
                index += 1
            else:
                closer = self._look_closer(state, known, budget)
                del order[index]
                if closer is not None:
                    entry = (closer[0], entered_as, number, closer[1], state)
                    insert_at = bisect_left(order, entry)
                    order.insert(insert_at, entry)
                    index = min(index, insert_at)
        return Candidate(best[1], best[2]) if best is not None else None

    def answer_all(self, states: NodeStates, budget: TurnBudget) -> Mapping[NodeState, Fit | Refusal]:
        """Return the placement of the VM in every state, or the refusal."""
        for state in self._unanswered.of(states):
            self._answer(state, budget)
        return self._answers

    def examine_all(
        self, states: NodeStates, budget: TurnBudget
    ) -> Mapping[NodeState, Fit | Refusal | Shortfall]:
        """Return the same, but where something is missing by count only how much.

        That takes a tenth of the time.
        """
        for state in self._unexamined.of(states):
            if state in self._examined:
                budget.spend(1)
            elif not self._lacks_something(state, budget):
                self._examined[state] = self._answer(state, budget)
        return self._examined

    def _lacks_something(self, state: NodeState, budget: TurnBudget) -> bool:
        """Whether something is missing by count; what, is then in `_examined`."""
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
            fits = self._bound.coarse(state.counts) is not None
            budget.spend(_PLACE_STEPS if fits else _REFUSE_STEPS)
            # A refusal by counting alone is found as fast as remembered.
            find = self._remembered.of if fits else answer_of
            answer = self._answers[state] = find(state.snapshot, self._request)
            if isinstance(answer, Fit):
                answer.standing(self._strategy)  # computed here, where its steps are counted
        return answer

    def _look_closer(
        self, state: NodeState, known: _Bound, budget: TurnBudget
    ) -> tuple[Standing, _Bound | Fit] | None:
        """Return a better bound of a state or what it stands at; None if the VM does not fit."""
        if known is _Bound.COARSE and state not in self._answers:
            if self._lacks_something(state, budget):
                return None
            budget.spend(_FINE_STEPS)
            bound = self._bound.fine(state.counts)
            return (bound, _Bound.FINE) if bound is not None else None
        answer = self._answer(state, budget)
        return (answer.standing(self._strategy), answer) if isinstance(answer, Fit) else None
