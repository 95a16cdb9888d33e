"""Planning many VMs at once: the node of each VM, and the VMs that fit nowhere.

In a cluster VMs arrive one after the other; a plan knows all of them. It tries several greedy orders
and bin packing, improves the best of them by local search, and keeps the best. It never places fewer
VMs, or as many with fewer vCPUs, than placing them one after the other. On a node the same `place` decides as
everywhere. Equal input gives equal plans.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from enum import Enum
from types import MappingProxyType
from typing import TypeAlias

from kvplace.core.allocator.allocate import place
from kvplace.core.cluster.assignment_heuristics import (
    as_many_as_can_fit,
    assign_all,
    by_strategy,
    exchange,
    hardest_first,
    pack,
    tightest,
)
from kvplace.core.cluster.draft import OPEN, ClosedNodes, Draft, Shape, Stopped, shapes_of
from kvplace.core.cluster.node_choice import Strategy, quality
from kvplace.core.cluster.room_in_cluster import NodeMove, make_room_for_waiting
from kvplace.core.device_locality import located, too_few_devices
from kvplace.core.node_devices import HeldDevices, PodDevice
from kvplace.core.occupant import ClusterNode, Occupant
from kvplace.core.placement import Placement, Refusal
from kvplace.core.request import DeviceNuma, Request
from kvplace.core.scalars import NodeName
from kvplace.core.topology import Topology


@dataclass(frozen=True, slots=True)
class VmRequest:
    """A VM that is to be planned, with an id of its own."""

    id: str
    request: Request
    closed: ClosedNodes = field(default_factory=lambda: OPEN)
    """May name nodes that are not in the plan. VMs with the same mapping are planned faster."""


@dataclass(frozen=True, slots=True)
class PlannedVm:
    """The node and the placement of a VM."""

    id: str
    node: NodeName
    placement: Placement
    devices: HeldDevices = field(default_factory=lambda: MappingProxyType({}))
    """The devices that the kubelet will probably give to it."""


@dataclass(frozen=True, slots=True)
class RefusedVm:
    """A VM that fits nowhere, with the refusal of each node after the plan."""

    id: str
    request: Request
    refusals: Mapping[NodeName, Refusal]


@dataclass(frozen=True, slots=True, order=True)
class Tally:
    """How much is placed; more VMs are more, of any size."""

    vms: int
    vcpus: int


class Stage(Enum):
    """The parts of a search, in their order."""

    ONE_BY_ONE = "one by one"
    HARDEST_FIRST = "the hardest first"
    BIN_PACKING = "bin packing"
    MANY = "as many as can fit"
    EXCHANGE = "exchanging"
    MAKE_ROOM = "making room"


@dataclass(frozen=True, slots=True)
class PlanProgress:
    """How far a search is."""

    stage: Stage
    assigned: int
    """VMs that have a node in the present stage."""
    vms: int


PlanWatch: TypeAlias = Callable[[PlanProgress], bool]
"""Called with the progress of a search; False ends the search with its present result."""


@dataclass(frozen=True, slots=True)
class Plan:
    """The answer for every VM, in the order of the requests."""

    planned: tuple[PlannedVm, ...]
    refused: tuple[RefusedVm, ...]
    moves: tuple[NodeMove, ...]
    """Moves of running VMs that are made first, in this order."""
    placed: Tally
    one_by_one: Tally
    """The VMs that would be placed one by one in the given order, each on the node that Filter chooses."""
    moves_complete: bool = True
    """False when the search for moves of running VMs stopped at a bound: more VMs might fit."""
    stopped: bool = False
    """The search was ended from outside: a longer one might place more."""
    undecided: tuple[VmRequest, ...] = ()
    """VMs that have no node although they fit: the search was ended before it came to them."""


def plan(
    nodes: Sequence[ClusterNode],
    vms: Sequence[VmRequest],
    strategy: Strategy = Strategy.PACK,
    *,
    make_room: bool = False,
    watch: PlanWatch | None = None,
) -> Plan:
    """Place as many VMs as possible, then as many vCPUs, then with the best locality.

    With `make_room` running VMs may move inside their machines for VMs that fit nowhere otherwise. While
    everything fits, VMs go to nodes by the strategy, as they do in a cluster. `watch` is called with the
    progress and can end the search: the plan then has the results so far, and a mark.
    """
    shapes = shapes_of((vm.request for vm in vms), (vm.closed for vm in vms))
    watched = _Watched(watch, len(shapes))
    found = list(_attempts(Draft.empty(nodes, watched.step), shapes, strategy, watched))
    one_by_one = tally(found[0], shapes)
    best = max(found, key=lambda draft: _rank(draft, shapes))
    if len(best.node_of) < len(shapes):
        watched.stage = Stage.EXCHANGE
        widest = max(found, key=lambda draft: (tally(draft, shapes).vcpus, len(draft.node_of)))
        repaired = [draft.copy() for draft in (best, widest)]
        with suppress(Stopped):
            for draft in repaired:
                exchange(draft, shapes)
        best = max([best, *repaired], key=lambda draft: _rank(draft, shapes))
    moves: tuple[NodeMove, ...] = ()
    is_complete = True
    if make_room and len(best.node_of) < len(shapes):
        watched.stage = Stage.MAKE_ROOM
        best = best.copy()
        moves, is_complete = make_room_for_waiting(best, shapes)
    found_plan = _plan(best, vms, shapes, one_by_one, stopped=watched.stopped)
    return replace(found_plan, moves=moves, moves_complete=is_complete or not found_plan.refused)


class _Watched:
    """Reports a search to its watcher, and ends the search."""

    def __init__(self, watch: PlanWatch | None, vms: int) -> None:
        self._watch = watch
        self._vms = vms
        self.stage = Stage.ONE_BY_ONE
        self.stopped = False

    def step(self, assigned: int) -> None:
        """Call the watcher; raises `Stopped` as soon as it has ended the search."""
        if self._watch is not None and not self.stopped:
            self.stopped = not self._watch(PlanProgress(self.stage, assigned, self._vms))
        if self.stopped:
            raise Stopped


def tally(draft: Draft, shapes: Sequence[Shape]) -> Tally:
    """Count the assigned VMs."""
    return Tally(len(draft.node_of), sum(shapes[vm].vcpus for vm in draft.node_of))


def _attempts(
    empty: Draft, shapes: Sequence[Shape], strategy: Strategy, watched: _Watched
) -> Iterator[Draft]:
    """Assign the VMs in several ways, the first one by one as they arrive.

    Ends after the first group with one way that assigns them all: later groups assign more, not better. When
    the search is stopped, it ends with the present assignment.
    """
    arrival = range(len(shapes))
    hardest = hardest_first(empty, shapes)
    ways: list[list[tuple[Stage, Callable[[Draft], None]]]] = [
        [
            (Stage.ONE_BY_ONE, lambda draft: assign_all(draft, arrival, shapes, by_strategy(strategy))),
            (Stage.HARDEST_FIRST, lambda draft: assign_all(draft, hardest, shapes, by_strategy(strategy))),
        ],
        [(Stage.BIN_PACKING, lambda draft: pack(draft, hardest, shapes))],
    ]
    many = as_many_as_can_fit(empty, shapes)
    if many != hardest:
        ways.append(
            [
                (Stage.MANY, lambda draft: assign_all(draft, many, shapes, tightest)),
                (Stage.MANY, lambda draft: pack(draft, many, shapes)),
            ]
        )
    for group in ways:
        all_assigned = False
        for stage, way in group:
            draft = empty.copy()
            watched.stage = stage
            try:
                way(draft)
            except Stopped:
                yield draft
                return
            all_assigned = all_assigned or len(draft.node_of) == len(shapes)
            yield draft
        if all_assigned:
            return


def _rank(draft: Draft, shapes: Sequence[Shape]) -> tuple[int, ...]:
    """Rank a draft: VMs, vCPUs, then their locality; larger is better."""
    counted = tally(draft, shapes)
    locality = [0, 0, 0, 0, 0]
    for node in draft.nodes:
        for vm in node.planned.values():
            packages, nodes, distance, l3_groups = quality(node.node.topology, vm.placement)
            far = _far_devices(node.node.topology, vm) if vm.devices else 0
            for part, amount in enumerate((packages, nodes, far, distance, l3_groups)):
                locality[part] -= amount
    return (counted.vms, counted.vcpus, *locality)


def _far_devices(topology: Topology, vm: Occupant) -> int:
    """Count the resources and NUMA nodes of its devices that are not local."""
    mode = vm.request.options.device_numa
    if mode is DeviceNuma.OFF:
        return 0
    devices = (PodDevice(resource, node) for resource, node in vm.devices)
    return sum(one.is_local is False for one in located(devices, vm.placement, topology, mode))


def _plan(
    draft: Draft,
    vms: Sequence[VmRequest],
    shapes: Sequence[Shape],
    one_by_one: Tally,
    *,
    stopped: bool,
) -> Plan:
    refusals: dict[Shape, Mapping[NodeName, Refusal]] = {}
    fits: dict[Shape, bool] = {}
    planned: list[PlannedVm] = []
    refused: list[RefusedVm] = []
    undecided: list[VmRequest] = []
    for number, (vm, shape) in enumerate(zip(vms, shapes, strict=True)):
        if number in draft.node_of:
            name = draft.nodes[draft.node_of[number]].node.name
            one = draft.planned(number)
            planned.append(PlannedVm(vm.id, name, one.placement, one.devices))
            continue
        if shape not in refusals:
            answers = {
                node.node.name: too_few_devices(node.free.devices, shape.request.devices)
                or place(node.node.topology, node.free, shape.request)
                for node in draft.nodes
                if node.node.name not in shape.closed
            }
            no = {name: answer for name, answer in answers.items() if isinstance(answer, Refusal)}
            refusals[shape] = {**vm.closed, **no}
            fits[shape] = len(no) < len(answers)
        if stopped and fits[shape]:
            undecided.append(vm)
        else:
            refused.append(RefusedVm(vm.id, vm.request, refusals[shape]))
    return Plan(
        tuple(planned),
        tuple(refused),
        (),
        tally(draft, shapes),
        one_by_one,
        stopped=stopped,
        undecided=tuple(undecided),
    )
