"""A cluster on paper: which VM would sit where, changed and undone as often as a search likes.

A node at one moment is never changed, only replaced, so that keeping a copy of a draft costs a list and
going back costs nothing. VMs of one shape get one answer from a node, and nodes in one state give one
answer, so `place` is asked once for all of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from kvplace.core.allocator.allocate import try_place
from kvplace.core.allocator.layout import Domain, layout_of
from kvplace.core.cluster.cluster_node import ClusterNode
from kvplace.core.free import Free, free_of
from kvplace.core.ledger import Ledger, claim_of
from kvplace.core.occupant import Occupant, within
from kvplace.core.placement import Placement
from kvplace.core.request import NumaMemory, Request
from kvplace.core.topology import Topology

_MOST_ANSWERS = 200_000


class Shape:
    """What VMs have in common that get the same answer everywhere; compared by identity."""

    __slots__ = ("memory", "request", "vcpus")

    def __init__(self, request: Request) -> None:
        self.request = request
        self.vcpus = request.vcpus
        pages = sum(size * count for size, count in request.huge_pages.items())
        self.memory = 0 if request.options.numa_memory is NumaMemory.OFF else max(0, request.memory - pages)
        """Bytes outside huge pages that a VM takes from its NUMA nodes, where these are counted."""


def shapes_of(requests: Iterable[Request]) -> list[Shape]:
    """Give every request its shape; equal ones share one."""
    known: dict[tuple[object, ...], Shape] = {}
    return [known.setdefault(request.key, Shape(request)) for request in requests]


@dataclass(frozen=True, slots=True)
class Room:
    """What is left in one domain, in counts."""

    cpus: int
    """All CPUs of the domain."""
    count: int
    """How many of them are available."""
    memory: int | None
    """Free bytes outside huge pages on its NUMA nodes; None when the machine does not say."""
    all_memory: int
    """Bytes of its NUMA nodes, free or not."""

    def may_hold(self, shape: Shape) -> bool:
        """Whether counts alone allow a VM: False is certain, True is not."""
        return self.count >= shape.vcpus and (self.memory is None or self.memory >= shape.memory)


class Answers:
    """What `try_place` has answered, by machine, state and shape."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, Free, Shape], Placement | None] = {}

    def place(self, topology: Topology, free: Free, shape: Shape) -> Placement | None:
        """Answer as `try_place` does."""
        key = (topology.fingerprint, free, shape)
        if key not in self._known:
            if len(self._known) >= _MOST_ANSWERS:
                self._known.clear()
            self._known[key] = try_place(topology, free, shape.request)
        return self._known[key]


class NodeState:
    """One node at one moment of a draft; never changed."""

    def __init__(
        self,
        node: ClusterNode,
        answers: Answers,
        running: tuple[Occupant, ...],
        seated: Mapping[int, Placement],
        free: Free | None = None,
    ) -> None:
        self.node = node
        self.running = running
        self.seated = seated
        """The placements of the planned VMs here, by the number of the VM."""
        self._answers = answers
        self._free = free
        self._here: dict[Shape, Placement | None] = {}
        self._rooms: dict[tuple[object, ...], tuple[Room, ...]] = {}
        self._fitting: dict[Shape, tuple[Room, ...]] = {}

    @cached_property
    def free(self) -> Free:
        """What is left on the node."""
        if self._free is not None:
            return self._free
        claims = [
            *(claim_of(f"running-{number}", vm.placement) for number, vm in enumerate(self.running)),
            *(claim_of(f"planned-{number}", placement) for number, placement in self.seated.items()),
        ]
        return free_of(self.node.topology, Ledger(), claims, only=self.node.only)

    def ask(self, shape: Shape) -> Placement | None:
        """Where a VM would sit on this node beside those that are here; None when it has no room."""
        if shape not in self._here:
            self._here[shape] = self._answers.place(self.node.topology, self.free, shape)
        return self._here[shape]

    def ask_within(self, shape: Shape, cpus: int) -> Placement | None:
        """Where a VM would sit on this node if it had to keep to these CPUs."""
        return self._answers.place(self.node.topology, within(self.free, cpus), shape)

    def rooms(self, shape: Shape) -> tuple[Room, ...]:
        """What is left in every domain that the VM's scope allows, counted and not searched."""
        key = (shape.request.options.scope, shape.request.owns_cpus)
        found = self._rooms.get(key)
        if found is None:
            topology, free = self.node.topology, self.free
            available = free.cpus if shape.request.owns_cpus else free.pool
            found = self._rooms[key] = tuple(
                _room(topology, domain, available, free) for domain in domains_of(topology, shape.request)
            )
        return found

    def fitting(self, shape: Shape) -> tuple[Room, ...]:
        """The domains that can hold a VM as far as counts can tell; without any it certainly has no room."""
        found = self._fitting.get(shape)
        if found is None:
            found = self._fitting[shape] = tuple(room for room in self.rooms(shape) if room.may_hold(shape))
        return found

    def with_seat(self, vm: int, placement: Placement) -> NodeState:
        """The node with one planned VM more."""
        seated = {**self.seated, vm: placement}
        return NodeState(self.node, self._answers, self.running, seated, _changed(self.free, placement, -1))

    def without(self, vm: int) -> NodeState:
        """The node with one planned VM less."""
        left = {number: placement for number, placement in self.seated.items() if number != vm}
        free = _changed(self.free, self.seated[vm], 1)
        return NodeState(self.node, self._answers, self.running, left, free)

    def rearranged(self, running: tuple[Occupant, ...], seated: Mapping[int, Placement]) -> NodeState:
        """The node with its VMs, running and planned, where somebody has put them."""
        return NodeState(self.node, self._answers, running, seated)


class Draft:
    """All nodes, and on which of them each planned VM sits so far."""

    def __init__(self, nodes: Sequence[NodeState], seats: Mapping[int, int]) -> None:
        self.nodes = list(nodes)
        self.seats = dict(seats)
        """The index of the node of each VM that has a seat, by the number of the VM."""

    @classmethod
    def empty(cls, nodes: Sequence[ClusterNode]) -> Draft:
        """The cluster before anything is planned."""
        answers = Answers()
        return cls([NodeState(node, answers, node.running, {}) for node in nodes], {})

    def copy(self) -> Draft:
        """Keep this state: changes of either copy do not touch the other."""
        return Draft(self.nodes, self.seats)

    def become(self, other: Draft) -> None:
        """Go to the state of another draft of the same cluster."""
        self.nodes, self.seats = list(other.nodes), dict(other.seats)

    def seat(self, vm: int, node: int, placement: Placement) -> None:
        """Give a VM a seat."""
        self.nodes[node] = self.nodes[node].with_seat(vm, placement)
        self.seats[vm] = node

    def unseat(self, vm: int) -> None:
        """Take a VM's seat away."""
        node = self.seats.pop(vm)
        self.nodes[node] = self.nodes[node].without(vm)

    def placement_of(self, vm: int) -> Placement:
        """Where a VM sits."""
        return self.nodes[self.seats[vm]].seated[vm]

    def waiting(self, vms: int) -> list[int]:
        """The VMs that have no seat, of the first so many."""
        return [vm for vm in range(vms) if vm not in self.seats]


def domains_of(topology: Topology, request: Request) -> tuple[Domain, ...]:
    """Where all the CPUs of a VM may lie on a machine."""
    return layout_of(topology).domains[request.options.scope]


def _room(topology: Topology, domain: Domain, available: int, free: Free) -> Room:
    nodes = {part.node for part in domain.parts}
    memory = [max(0, count) for index, (_, count) in enumerate(free.memory) if index in nodes]
    return Room(
        domain.cpus,
        (domain.cpus & available).bit_count(),
        sum(memory) if free.memory else None,
        sum(node.memory for index, node in enumerate(topology.numa_nodes) if index in nodes),
    )


def _changed(free: Free, placement: Placement, sign: int) -> Free | None:
    """What is free when a VM has come (-1) or gone (1), as `free_of` says it; None for VMs that share."""
    if placement.cpus & ~placement.owned:
        return None
    pages = {
        (node, size): sign * count
        for node, sizes in placement.huge_pages.items()
        for size, count in sizes.items()
    }
    memory = {node: sign * count for node, count in claim_of("", placement).plain_memory.items()}
    return Free(
        free.cpus ^ placement.owned,
        free.pool ^ placement.owned,
        free.uses,
        tuple((node, count + memory.get(node, 0)) for node, count in free.memory),
        tuple((node, size, count + pages.get((node, size), 0)) for node, size, count in free.huge_pages),
    )
