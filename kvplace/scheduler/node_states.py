"""The states of the nodes: a machine and its free resources.

Nodes in equal states share one `NodeState`, so that every result about it is computed once. A node is
described once after each change, however many kinds of VMs are asked about. What is gone is forgotten: a node
at the next question that does not name it, a state with its last node.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Collection, Iterator, Mapping

from kvplace.core.cluster.node_bound import NodeCounts
from kvplace.core.scalars import NodeName
from kvplace.core.search_budget import TurnBudget
from kvplace.nodes.node_machine import NOT_KNOWN, NodeSnapshot, Unusable

_DESCRIBE = 40
"""Steps that it takes to describe a node."""


class NodeState:
    """A machine and what is free on it, compared by identity; `nodes` are those in this state, sorted."""

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
    """The states that have not been checked yet.

    The next turn does not list the rest of a turn again.
    """

    def __init__(self) -> None:
        self._last = 0
        """The number of the last state that has been checked."""
        self._left: list[NodeState] = []
        """States that are newer, the oldest last."""

    def of(self, states: NodeStates) -> Iterator[NodeState]:
        """Yield them, the oldest first; one during which the caller leaves is yielded again."""
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
        """Those with nodes, by what they are made of; the newest last."""
        self.version = 0
        """Increases with each change of the nodes."""
        self._newest = 0
        self._complete: frozenset[NodeName] | None = None
        """Asked nodes that all have a state: planning asks about the same ones again and again."""

    def __len__(self) -> int:
        return len(self._states)

    @property
    def of_node(self) -> Mapping[NodeName, NodeState | Unusable]:
        """The state of every node that was asked about, or why nothing can be placed on it."""
        return self._of_node

    def node_changed(self, node: NodeName) -> None:
        """Describe a node again when it is next asked about."""
        if node in self._of_node:
            self._changed[node] = None

    def describe(self, asked: frozenset[NodeName], budget: TurnBudget) -> None:
        """Make the states of the asked nodes those of this moment."""
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
