"""What every node could give to a request, remembered.

Nodes in the same state get the same answer, and a node that has not changed since the last pod of the
same shape is not asked again; so a filter call costs a look-up per node and a placement per changed one.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from kvplace.core.allocator.allocate import place, try_place
from kvplace.core.cluster.node_choice import Candidate
from kvplace.core.free import Free
from kvplace.core.placement import Placement
from kvplace.core.refusal import Reason, Refusal
from kvplace.core.request import Request
from kvplace.core.topology import Topology

_SHAPES = 128
_ANSWERS = 20_000

NO_TOPOLOGY = Refusal(
    Reason.NO_TOPOLOGY,
    "neither a NodeTopology object nor a cpu-map annotation describes the node",
    {},
    never=True,
)


@dataclass(frozen=True, slots=True)
class NodeState:
    """One node at one moment: its machine and what is left of it; no machine means it cannot be used."""

    topology: Topology | None
    free: Free | None
    problem: str = ""
    empty: Free | None = None
    """What the node would have without any VM, where its cpu-map gives out less than its machine has."""


class FitTable:
    """Answers by request shape and node, kept until the node changes."""

    def __init__(self, state_of: Callable[[str], NodeState]) -> None:
        self._state_of = state_of
        self._by_shape: OrderedDict[tuple[object, ...], dict[str, Candidate | Refusal]] = OrderedDict()
        self._answers: OrderedDict[tuple[object, ...], Placement | Refusal] = OrderedDict()

    def node_changed(self, node: str) -> None:
        """Forget what was found for a node."""
        for answers in self._by_shape.values():
            answers.pop(node, None)

    def answers(self, nodes: Iterable[str], request: Request) -> dict[str, Candidate | Refusal]:
        """Say for each node where the VM would sit there, or why it does not fit."""
        shape = request.key
        known = self._by_shape.get(shape)
        if known is None:
            known = self._by_shape[shape] = {}
            if len(self._by_shape) > _SHAPES:
                self._by_shape.popitem(last=False)
        else:
            self._by_shape.move_to_end(shape)
        found: dict[str, Candidate | Refusal] = {}
        for node in nodes:
            answer = known.get(node)
            if answer is None:
                answer = known[node] = self._ask(node, request)
            found[node] = answer
        return found

    def _ask(self, node: str, request: Request) -> Candidate | Refusal:
        state = self._state_of(node)
        if state.topology is None or state.free is None:
            if state.problem:
                return Refusal(Reason.NO_TOPOLOGY, state.problem, {}, never=True)
            return NO_TOPOLOGY
        key = (state.topology.fingerprint, state.free, request.key)
        answer = self._answers.get(key)
        if answer is None:
            answer = self._answers[key] = place(state.topology, state.free, request)
            if len(self._answers) > _ANSWERS:
                self._answers.popitem(last=False)
        else:
            self._answers.move_to_end(key)
        if isinstance(answer, Refusal):
            if state.empty is not None and try_place(state.topology, state.empty, request) is None:
                return replace(answer, never=True)
            return answer
        return Candidate(node, state.topology, answer, state.free, request.vcpus)
