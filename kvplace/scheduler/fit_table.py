"""What every node could give to a request, cached.

A node that has not changed since the last equal request is not computed again, and nodes in the same state
are computed once. So a filter call costs a look-up for each node and a placement for each changed one.
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
from kvplace.core.scalars import NodeName
from kvplace.nodes.node_machine import NodeSnapshot, Unusable

_REQUESTS = 128
"""Different requests whose answers are cached; the least recently used is dropped first."""
_ANSWERS = 20_000
"""The same for answers by machine, free resources and request."""


class FitTable:
    """Answers by request and node, kept until the node changes."""

    def __init__(self, snapshot_of: Callable[[NodeName], NodeSnapshot | Unusable]) -> None:
        self._snapshot_of = snapshot_of
        self._by_request: OrderedDict[tuple[object, ...], dict[NodeName, Candidate | Refusal]] = OrderedDict()
        self._answers: OrderedDict[tuple[object, ...], Placement | Refusal] = OrderedDict()

    def node_changed(self, node: NodeName) -> None:
        """Drop what was found for a node."""
        for answers in self._by_request.values():
            answers.pop(node, None)

    def answers(self, nodes: Iterable[NodeName], request: Request) -> dict[NodeName, Candidate | Refusal]:
        """Return for each node the VM's placement there, or why it does not fit."""
        key = request.key
        known = self._by_request.get(key)
        if known is None:
            known = self._by_request[key] = {}
            if len(self._by_request) > _REQUESTS:
                self._by_request.popitem(last=False)
        else:
            self._by_request.move_to_end(key)
        found: dict[NodeName, Candidate | Refusal] = {}
        for node in nodes:
            answer = known.get(node)
            if answer is None:
                snapshot = self._snapshot_of(node)
                if isinstance(snapshot, Unusable):  # not cached: the node may no longer exist
                    answer = Refusal(Reason.NO_TOPOLOGY, snapshot.problem, {}, never=True)
                else:
                    answer = known[node] = self._ask(node, snapshot, request)
            found[node] = answer
        return found

    def _ask(self, node: NodeName, snapshot: NodeSnapshot, request: Request) -> Candidate | Refusal:
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
