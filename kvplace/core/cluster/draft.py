"""A draft of a plan: the node of each VM, changed and undone as often as a search likes.

The state of a node is never changed, only replaced. So a copy of a draft costs a list, and undoing a change
costs nothing. VMs of one shape get one answer from a node, and nodes in equal states give equal answers, so
each placement is computed once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import repeat
from types import MappingProxyType
from typing import TypeAlias

from kvplace.core.allocator.allocate import try_place
from kvplace.core.allocator.layout import ScopeDomain, layout_of
from kvplace.core.device_locality import predicted_held, too_few_devices
from kvplace.core.free_resources import Free
from kvplace.core.ledger import claim_of
from kvplace.core.occupant import ClusterNode, Occupant
from kvplace.core.placement import Placement, Refusal
from kvplace.core.quantity import plain_bytes
from kvplace.core.request import NumaMemory, Request
from kvplace.core.scalars import Bytes, CpuMask, NodeName, PodUid
from kvplace.core.topology import Topology

_MAX_CACHED = 200_000
"""Placements that are kept, about 1 KB each."""
PLANNED = "\0"
"""Prefix of the ids of planned VMs in a draft; no other id has it."""

ClosedNodes: TypeAlias = Mapping[NodeName, Refusal]
"""Nodes that a VM never goes to, with any free CPUs, each with the reason."""
OPEN: ClosedNodes = MappingProxyType({})
"""All nodes are open."""

SearchStep: TypeAlias = Callable[[int], None]
"""Called with the number of assigned VMs whenever a search checks the next one; raises `Stopped` to end
it."""


class Stopped(Exception):
    """A search was ended from outside. Its draft is consistent: the assignments so far."""


class Shape:
    """The common part of several VMs; compared by identity."""

    __slots__ = ("closed", "memory", "request", "vcpus")

    def __init__(self, request: Request, closed: ClosedNodes = OPEN) -> None:
        self.request = request
        self.closed = closed
        self.vcpus = request.vcpus
        self.memory = (
            0
            if request.options.numa_memory is NumaMemory.OFF
            else plain_bytes(request.memory, request.huge_pages)
        )
        """Bytes outside huge pages that a VM takes from its NUMA nodes."""


def shapes_of(requests: Iterable[Request], closed: Iterable[ClosedNodes] = repeat(OPEN)) -> list[Shape]:
    """Give every request its shape; equal requests with the same `closed` nodes share one."""
    known: dict[tuple[object, ...], Shape] = {}
    return [
        known.setdefault((request.key, id(nodes) if nodes else None), Shape(request, nodes))
        for request, nodes in zip(requests, closed, strict=False)
    ]


@dataclass(frozen=True, slots=True)
class Headroom:
    """Free CPUs and memory in one scope domain, in counts."""

    cpus: CpuMask
    """All CPUs of the scope domain."""
    count: int
    """How many of them the VM could take."""
    memory: Bytes | None
    """Free bytes outside huge pages on its NUMA nodes; None when the machine does not report memory."""

    def may_hold(self, shape: Shape) -> bool:
        """Whether counts alone allow a VM: False is certain, True is not."""
        return self.count >= shape.vcpus and (self.memory is None or self.memory >= shape.memory)


class PlacementCache:
    """Placements by machine, free resources and shape."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, Free, Shape], Placement | None] = {}

    def place(self, topology: Topology, free: Free, shape: Shape) -> Placement | None:
        """Answer as `try_place` does; None also where too few devices are free."""
        key = (topology.fingerprint, free, shape)
        if key not in self._known:
            if len(self._known) >= _MAX_CACHED:
                self._known.clear()
            has_devices = too_few_devices(free.devices, shape.request.devices) is None
            self._known[key] = try_place(topology, free, shape.request) if has_devices else None
        return self._known[key]


class DraftNode:
    """One state of a node in a draft; never changed."""

    def __init__(
        self,
        node: ClusterNode,
        cache: PlacementCache,
        running: tuple[Occupant, ...],
        planned: Mapping[int, Occupant],
        free: Free | None = None,
    ) -> None:
        self.node = node
        self.running = running
        self.planned = planned
        """The planned VMs by their number."""
        self._cache = cache
        self._free = free
        self._headrooms: dict[tuple[object, ...], tuple[Headroom, ...]] = {}
        self._fitting: dict[Shape, tuple[Headroom, ...]] = {}

    @cached_property
    def free(self) -> Free:
        """Free CPUs and memory of the node."""
        if self._free is not None:
            return self._free
        running = [replace(vm, id=f"running-{number}") for number, vm in enumerate(self.running)]
        return replace(self.node, running=(*running, *self.planned.values())).free

    def place(self, shape: Shape) -> Placement | None:
        """Place one more VM on this node."""
        if self.node.name in shape.closed:
            return None
        return self._cache.place(self.node.topology, self.free, shape)

    def place_within(self, shape: Shape, cpus: CpuMask) -> Placement | None:
        """Place one more VM on these CPUs of the node."""
        if self.node.name in shape.closed:
            return None
        return self._cache.place(self.node.topology, self.free.within(cpus), shape)

    def headrooms(self, shape: Shape) -> tuple[Headroom, ...]:
        """Count the free units in every scope domain of a VM."""
        key = (shape.request.options.scope, shape.request.owns_cpus)
        found = self._headrooms.get(key)
        if found is None:
            topology, free = self.node.topology, self.free
            available = free.cpus if shape.request.owns_cpus else free.pool
            found = self._headrooms[key] = tuple(
                _headroom(domain, available, free) for domain in scope_domains(topology, shape.request)
            )
        return found

    def fitting(self, shape: Shape) -> tuple[Headroom, ...]:
        """The scope domains that can hold a VM by counts; without any it certainly does not fit."""
        found = self._fitting.get(shape)
        if found is None:
            open_ = self.node.name not in shape.closed
            found = self._fitting[shape] = tuple(
                headroom for headroom in self.headrooms(shape) if open_ and headroom.may_hold(shape)
            )
        return found

    def with_vm(self, vm: int, shape: Shape, placement: Placement) -> DraftNode:
        """The node with one planned VM more."""
        devices = predicted_held(self.free.devices, shape.request.devices)
        one = Occupant(f"{PLANNED}{vm}", shape.request, placement, devices=devices)
        planned = {**self.planned, vm: one}
        return DraftNode(self.node, self._cache, self.running, planned, _changed(self.free, one, -1))

    def without(self, vm: int) -> DraftNode:
        """The node with one planned VM less."""
        left = {number: one for number, one in self.planned.items() if number != vm}
        free = _changed(self.free, self.planned[vm], 1)
        return DraftNode(self.node, self._cache, self.running, left, free)

    def rearranged(self, running: tuple[Occupant, ...], planned: Mapping[int, Occupant]) -> DraftNode:
        """The node with other placements of its VMs."""
        return DraftNode(self.node, self._cache, running, planned)


class Draft:
    """All nodes, and the node of each planned VM so far."""

    def __init__(
        self, nodes: Sequence[DraftNode], node_of: Mapping[int, int], step: SearchStep | None = None
    ) -> None:
        self._step = step
        self.nodes = list(nodes)
        self.node_of = dict(node_of)
        """The index of the node of each assigned VM, by the number of the VM."""

    @classmethod
    def empty(cls, nodes: Sequence[ClusterNode], step: SearchStep | None = None) -> Draft:
        """The cluster before anything is planned."""
        cache = PlacementCache()
        return cls([DraftNode(node, cache, node.running, {}) for node in nodes], {}, step)

    def step(self) -> None:
        """State that a search checks the next VM; raises `Stopped` when it is to end."""
        if self._step is not None:
            self._step(len(self.node_of))

    def copy(self) -> Draft:
        """Copy this draft: changes of one copy do not touch the other."""
        return Draft(self.nodes, self.node_of, self._step)

    def become(self, other: Draft) -> None:
        """Take over the state of another draft of the same cluster."""
        self.nodes, self.node_of = list(other.nodes), dict(other.node_of)

    def assign(self, vm: int, shape: Shape, node: int, placement: Placement) -> None:
        """Assign a VM to a node."""
        self.nodes[node] = self.nodes[node].with_vm(vm, shape, placement)
        self.node_of[vm] = node

    def unassign(self, vm: int) -> None:
        """Take a VM off its node."""
        node = self.node_of.pop(vm)
        self.nodes[node] = self.nodes[node].without(vm)

    def planned(self, vm: int) -> Occupant:
        """An assigned VM on its node."""
        return self.nodes[self.node_of[vm]].planned[vm]

    def waiting(self, vms: int) -> list[int]:
        """The VMs that have no node, of the first so many."""
        return [vm for vm in range(vms) if vm not in self.node_of]


def scope_domains(topology: Topology, request: Request) -> tuple[ScopeDomain, ...]:
    """The parts of a machine; one of them must hold all the CPUs of a VM."""
    return layout_of(topology).domains[request.options.scope.within]


def _headroom(domain: ScopeDomain, available: CpuMask, free: Free) -> Headroom:
    nodes = {part.node for part in domain.parts}
    memory = [max(0, count) for index, (_, count) in enumerate(free.memory) if index in nodes]
    return Headroom(
        CpuMask(domain.cpus),
        (domain.cpus & available).bit_count(),
        Bytes(sum(memory)) if free.memory else None,
    )


def _changed(free: Free, vm: Occupant, sign: int) -> Free | None:
    """Compute the free resources after a VM has come (-1) or gone (1); None where VMs share CPUs."""
    placement = vm.placement
    if free.uses or placement.cpus & ~placement.owned:
        return None
    pages = {
        (node, size): sign * count
        for node, sizes in placement.huge_pages.items()
        for size, count in sizes.items()
    }
    memory = {node: sign * count for node, count in claim_of(PodUid(""), placement).plain_memory.items()}
    devices = free.devices
    if devices is not None and vm.devices:
        devices = devices.without(vm.devices) if sign < 0 else devices.returned(vm.devices)
    return Free(
        free.cpus ^ placement.owned,
        free.pool ^ placement.owned,
        (),
        tuple((node, count + memory.get(node, 0)) for node, count in free.memory),
        tuple((node, size, count + pages.get((node, size), 0)) for node, size, count in free.huge_pages),
        devices,
    )
