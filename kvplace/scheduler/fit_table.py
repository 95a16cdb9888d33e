"""The answer of every node to a request, kept between calls.

The best node is found without placing the VM on every node (`ranking`). The answers of nodes that have not
changed since the last equal request are used again. The search runs in turns, so that a new kind of VM over
thousands of nodes does not delay other work.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection
from collections.abc import Set as AbstractSet

from kvplace.core.cluster.node_choice import Candidate, Fit, GroupedRefusals, Strategy, grouped_by
from kvplace.core.placement import Reason, Refusal
from kvplace.core.request import Request
from kvplace.core.scalars import NodeName
from kvplace.core.search_budget import UNLIMITED, TurnBudget
from kvplace.kube.concurrency import Turns
from kvplace.nodes.node_machine import NodeSnapshot, Unusable, answer_of
from kvplace.scheduler.ranking import (
    KnownRefusal,
    NodeStates,
    Ranking,
    RememberedAnswers,
    Shortfall,
)

_KEPT = 200_000
"""Bounds and answers that are kept for all requests together, of 100 to 1,000 bytes each."""


class FitTable:
    """Rankings by request, the least recently used first."""

    def __init__(
        self, snapshot_of: Callable[[NodeName], NodeSnapshot | Unusable], strategy: Strategy
    ) -> None:
        self._states = NodeStates(snapshot_of)
        self.node_changed = self._states.node_changed
        """Called with a node: its answer is computed anew at its next use."""
        self._strategy = strategy
        self._rankings: OrderedDict[tuple[object, ...], Ranking] = OrderedDict()
        self._remembered = RememberedAnswers()
        self._asked = frozenset[NodeName]()

    @property
    def kept(self) -> int:
        """The number of bounds and answers in memory."""
        return sum([len(ranking) for ranking in self._rankings.values()])

    async def describe(self, names: Collection[NodeName]) -> None:
        """Describe nodes before the first request for them."""
        asked = self.set_of(names)
        await Turns().decide(lambda budget: self._states.describe(asked, budget))

    async def best(
        self, names: Collection[NodeName], request: Request, *, preferred: AbstractSet[NodeName] = frozenset()
    ) -> Candidate | None:
        """Choose the best of the nodes, or a preferred one near enough; None if the VM fits none of them.

        It is the best at the moment of the return: nothing else runs between the choice and the caller.
        """
        asked = self.set_of(names)
        return await Turns().decide(
            lambda budget: self._ranking(asked, request, budget).best(asked, preferred, self._states, budget)
        )

    async def two_best(
        self, names: Collection[NodeName], request: Request, *, preferred: AbstractSet[NodeName] = frozenset()
    ) -> tuple[Candidate | None, Candidate | None]:
        """Choose in the same way, and the best of the other nodes, too; None where no node is left."""
        asked = self.set_of(names)

        def choose(budget: TurnBudget) -> tuple[Candidate | None, Candidate | None]:
            ranking = self._ranking(asked, request, budget)
            best = ranking.best(asked, preferred, self._states, budget)
            return best, ranking.first(asked - {best.node}, budget) if best is not None else None

        return await Turns().decide(choose)

    async def refusals(self, names: Collection[NodeName], request: Request) -> GroupedRefusals | None:
        """Return the refusals of all nodes, as of one moment; None if a node can hold the VM."""
        asked = self.set_of(names)

        def examine(
            budget: TurnBudget,
        ) -> tuple[Ranking, KnownRefusal | dict[NodeName, Refusal | Shortfall] | None, int]:
            ranking = self._ranking(asked, request, budget)
            refused, version = ranking.refused, self._states.version
            if refused is not None and refused.version == version and refused.asked is asked:
                return ranking, refused, version
            return ranking, self._examined(names, ranking, budget), version

        turns = Turns()
        ranking, found, version = await turns.decide(examine)
        if found is None:
            return None
        if isinstance(found, KnownRefusal):
            return found.groups
        await turns.spend(len(found))
        ranking.refused = KnownRefusal(version, asked, grouped_by(found, lambda one: _in_full(one, request)))
        return ranking.refused.groups

    async def answers(
        self, names: Collection[NodeName], request: Request, turns: Turns
    ) -> dict[NodeName, Candidate | Refusal]:
        """Return for each node the VM's placement there, or the refusal, as of one moment."""
        asked = self.set_of(names)
        return await turns.decide(
            lambda budget: self._answers(names, self._ranking(asked, request, budget), budget)
        )

    def answers_at_once(
        self, names: Collection[NodeName], request: Request
    ) -> dict[NodeName, Candidate | Refusal]:
        """Return the same without giving others their turn."""
        return self._answers(names, self._ranking(self.set_of(names), request, UNLIMITED), UNLIMITED)

    def set_of(self, names: Collection[NodeName]) -> frozenset[NodeName]:
        """Return the names as a set, the same object as the last time if they are equal.

        Calls about this object need not compare it name by name.
        """
        asked = frozenset(names)
        if asked is not self._asked and asked != self._asked:
            self._asked = asked
        return self._asked

    def _answers(
        self, names: Collection[NodeName], ranking: Ranking, budget: TurnBudget
    ) -> dict[NodeName, Candidate | Refusal]:
        answers = ranking.answer_all(self._states, budget)
        budget.spend(len(names))
        found: dict[NodeName, Candidate | Refusal] = {}
        of_node = self._states.of_node
        for node in names:
            state = of_node[node]
            if isinstance(state, Unusable):
                found[node] = _unusable(state)
                continue
            answer = answers[state]
            found[node] = Candidate(node, answer) if isinstance(answer, Fit) else answer
        return found

    def _examined(
        self, names: Collection[NodeName], ranking: Ranking, budget: TurnBudget
    ) -> dict[NodeName, Refusal | Shortfall] | None:
        """Return the resource that every node lacks; None if the VM fits on one of them."""
        known = ranking.examine_all(self._states, budget)
        budget.spend(len(names))
        found: dict[NodeName, Refusal | Shortfall] = {}
        of_node = self._states.of_node
        for node in names:
            state = of_node[node]
            answer = _unusable(state) if isinstance(state, Unusable) else known[state]
            if isinstance(answer, Fit):
                return None
            found[node] = answer
        return found

    def _ranking(self, asked: frozenset[NodeName], request: Request, budget: TurnBudget) -> Ranking:
        """Return the ranking for a request, with the asked nodes as they are now."""
        self._states.describe(asked, budget)
        ranking = self._rankings.get(request.key)
        if ranking is None:
            ranking = self._rankings[request.key] = Ranking(request, self._strategy, self._remembered)
        self._rankings.move_to_end(request.key)
        while self.kept > _KEPT and len(self._rankings) > 1:
            self._rankings.popitem(last=False)
        ranking.count(self._states, budget)
        return ranking


def _unusable(node: Unusable) -> Refusal:
    return Refusal(Reason.NO_TOPOLOGY, node.problem, {}, never=True)


def _in_full(found: Refusal | Shortfall, request: Request) -> Refusal:
    """State it in words."""
    if isinstance(found, Refusal):
        return found
    answer = answer_of(found.node, request)
    assert isinstance(answer, Refusal), "something is missing"
    return answer
