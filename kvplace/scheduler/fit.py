"""What every node could give to a request, remembered.

Nodes in the same state get the same answer, and a node that has not changed since the last pod of the
same shape is not asked again; so a filter call costs a look-up per node and a placement per changed one.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import replace

from kvplace.core.allocator.allocate import place, try_place
from kvplace.core.cluster.node_choice import Candidate
from kvplace.core.ledger import Ledger
from kvplace.core.placement import Placement
from kvplace.core.refusal import Reason, Refusal
from kvplace.core.request import Request
from kvplace.nodes.node_machine import NodeSnapshot, Unusable

_SHAPES = 128
_ANSWERS = 20_000


class FitTable:
    """Answers by request shape and node, kept until the node changes."""

    def __init__(self, snapshot_of: Callable[[str], NodeSnapshot | Unusable]) -> None:
        self._snapshot_of = snapshot_of
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
                snapshot = self._snapshot_of(node)
                if isinstance(snapshot, Unusable):  # not remembered: it may be a node that no longer exists
                    answer = Refusal(Reason.NO_TOPOLOGY, snapshot.problem, {}, never=True)
                else:
                    answer = known[node] = self._ask(node, snapshot, request)
            found[node] = answer
        return found

    def _ask(self, node: str, snapshot: NodeSnapshot, request: Request) -> Candidate | Refusal:
        machine, free = snapshot.machine, snapshot.free
        key = (machine.topology.fingerprint, free, request.key)
        answer = self._answers.get(key)
        if answer is None:
            answer = self._answers[key] = place(machine.topology, free, request)
            if len(self._answers) > _ANSWERS:
                self._answers.popitem(last=False)
        else:
            self._answers.move_to_end(key)
        if isinstance(answer, Placement):
            return Candidate(node, machine.topology, answer, free, request.vcpus)
        # The allocator takes the whole machine for empty; a node may give out less of it.
        if machine.is_narrowed and try_place(machine.topology, machine.free(Ledger()), request) is None:
            return replace(answer, never=True)
        return answer
