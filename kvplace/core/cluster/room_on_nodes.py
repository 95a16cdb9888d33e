"""The node where the fewest moves of running VMs make room for a VM that fits on none.

Fewest moves first, since each is a risk for a live VM; then fewest bytes that go to another NUMA node. Equal
input gets equal answers: the bounds count steps of the search, not seconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvplace.core.moves.make_room import MAX_MOVES, MovePlan, make_room
from kvplace.core.node_devices import NodeDevices
from kvplace.core.occupant import Occupant
from kvplace.core.request import Request
from kvplace.core.scalars import CpuMask, NodeName
from kvplace.core.topology import Topology

MOST_NODES = 16
"""Nodes that are searched, in the given order."""
STEPS_PER_NODE = 50_000
"""Steps of the search of one node for each number of moves, see `search_budget`: a quarter of a second."""
MOST_STEPS = 300_000
"""Steps of the search of all nodes: one or two seconds."""


@dataclass(frozen=True, slots=True)
class CrowdedNode:
    """A node where the VM does not fit without moves."""

    name: NodeName
    topology: Topology
    occupants: tuple[Occupant, ...]
    allocatable: CpuMask
    """The CPUs that it gives out."""
    devices: NodeDevices | None = None
    """Its free devices; None where nothing is known of them."""


@dataclass(frozen=True, slots=True)
class RoomOnNode:
    """The moves that make the VM fit on a node."""

    node: NodeName
    plan: MovePlan

    @property
    def cost(self) -> tuple[int, int, NodeName]:
        """The smallest is the best."""
        return len(self.plan.moves), self.plan.bytes_moved, self.node


def find_room(nodes: Sequence[CrowdedNode], request: Request) -> RoomOnNode | None:
    """Find the node where the fewest and cheapest moves make room; None where no moves are found.

    A node where the VM fits well without moves is none that needs any, so it is passed over.
    """
    best: RoomOnNode | None = None
    left = MOST_STEPS
    for node in nodes[:MOST_NODES]:
        if left <= 0 or (best is not None and best.cost[:2] == (1, 0)):
            break
        answer = make_room(
            node.topology,
            node.occupants,
            request,
            only=node.allocatable,
            devices=node.devices,
            most_moves=MAX_MOVES if best is None else len(best.plan.moves),
            max_steps=min(left, STEPS_PER_NODE),
        )
        left -= answer.steps
        if isinstance(answer, MovePlan) and answer.moves:
            found = RoomOnNode(node.name, answer)
            best = found if best is None or found.cost < best.cost else best
    return best
