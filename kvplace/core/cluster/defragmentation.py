"""Moves that gather the free CPUs of a cluster: first inside nodes, then between them.

No VM waits for these moves, so each one must be worth it: the VM gets fewer sockets or NUMA nodes, or the new
places for later VMs have as many CPUs as the VM. A VM moves once at most. The search is greedy: it takes the
move with the largest gain, and searches again from there; inside a node it tries each first move. The moves
may end after any of them. Equal input gets equal answers: the bounds count placements, not seconds.

`better_placement` is the rule for one VM on its own machine. `serve` decides by it when it places a running
VM again, and `defragment` predicts the answer with it. A move never makes the VM worse. The machine keeps at
least as many places for later VMs, unless the VM itself gets a better placement.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from kvplace.core.allocator.allocate import try_place
from kvplace.core.cluster.draft import ClosedNodes
from kvplace.core.free_resources import BLOCK_LEVELS, Free, free_blocks_of, free_of
from kvplace.core.ledger import Ledger
from kvplace.core.occupant import ClusterNode, Occupant, bytes_moved, locality_of
from kvplace.core.placement import Placement
from kvplace.core.request import Level, Request
from kvplace.core.scalars import Bytes, CpuMask, NodeName
from kvplace.core.search_budget import Watch, unwatched
from kvplace.core.topology import Topology

MOST_PLACEMENTS = 20_000
"""Placements of the search inside all nodes, and again of the search between them: some seconds each."""
MOST_MIGRATIONS = 20
"""Moves between nodes in one answer; each copies the memory of a VM over the network."""
_MOST_VMS = 16
"""VMs that are tried for one move between nodes: the ones that leave the largest gain."""
_MOST_TARGETS = 16
"""Nodes where one of them is tried: the ones with the fewest free CPUs that suffice."""


@dataclass(frozen=True, slots=True)
class DefragmentingMove:
    """One move; the nodes are equal for one inside a node."""

    id: str
    node: NodeName
    target: NodeName
    before: Placement
    after: Placement
    comes_together: bool
    """Whether the VM gets fewer sockets or NUMA nodes than it has."""
    cpus_gained: int
    """CPUs of new places for later VMs, less the CPUs of lost places."""
    bytes_moved: Bytes
    """Memory that goes to another NUMA node, or over the network."""

    @property
    def is_migration(self) -> bool:
        """Whether the VM goes to another node."""
        return self.node != self.target

    @property
    def rank(self) -> tuple[int, int, int, str, NodeName]:
        """The smallest is the best."""
        return -self.comes_together, -self.cpus_gained, self.bytes_moved, self.id, self.target


@dataclass(frozen=True, slots=True)
class FreeRoom:
    """The room that a cluster has for later VMs, by free CPUs alone."""

    largest: Mapping[Level, int]
    """CPUs of the largest free block of any node."""
    places: Mapping[int, int]
    """VMs of each size that fit on single NUMA nodes, if there are no others."""
    split: int
    """Running VMs on more NUMA nodes than they need on their machine when it is empty."""


@dataclass(frozen=True, slots=True)
class Defragmentation:
    """The moves, in their order of execution."""

    moves: tuple[DefragmentingMove, ...]
    before: FreeRoom
    after: FreeRoom
    complete: bool
    """False when the search stopped at a bound: more moves may help."""


def defragment(
    nodes: Sequence[ClusterNode],
    inside: Collection[str],
    between: Mapping[str, ClosedNodes],
    *,
    most_placements: int = MOST_PLACEMENTS,
    watch: Watch = unwatched,
) -> Defragmentation:
    """Find the moves that the owners of the VMs agreed to.

    `inside` are the ids of VMs that may get other cores of their node, `between` of VMs that may migrate,
    each with the nodes that are closed to it. Ids are unique in the cluster. A VM with devices of the host
    does not move. `watch` is called with the number of moves so far, and may end the search.
    """
    search = _Regrouping(nodes, watch)
    before = search.room()
    search.move_inside(inside, most_placements)
    search.move_between(between, most_placements)
    return Defragmentation(tuple(search.moves), before, search.room(), search.complete)


class _Regrouping:
    def __init__(self, nodes: Sequence[ClusterNode], watch: Watch) -> None:
        self._nodes = list(nodes)
        """As the moves so far leave them."""
        self._watch = watch
        self._left = 0
        self._empty: dict[tuple[Topology, tuple[object, ...]], Placement | None] = {}
        self._moved: set[str] = set()
        self.moves: list[DefragmentingMove] = []
        self.complete = True

    # Inside nodes.

    def move_inside(self, movable: Collection[str], most_placements: int) -> None:
        """Find moves on one node after the other, until no single move gains anything.

        Each move that gains something is tried as the first one on its node.
        """
        self._left = most_placements
        for index, start in enumerate(self._nodes):
            if not self._goes_on():
                return
            found: list[tuple[tuple[int, int, int], list[DefragmentingMove]]] = []
            for first in sorted(self._inside(start, movable), key=lambda move: move.rank):
                moves = [first]
                node = _after(start, first)
                while others := list(self._inside(node, set(movable) - {move.id for move in moves})):
                    moves.append(min(others, key=lambda move: move.rank))
                    node = _after(node, moves[-1])
                found.append((_gain(moves), moves))
            if found:
                for move in max(found, key=lambda one: one[0])[1]:
                    self._nodes[index] = _after(self._nodes[index], move)
                    self._take(move)

    def _inside(self, node: ClusterNode, movable: Collection[str]) -> Iterator[DefragmentingMove]:
        name, topology = node.name, node.topology
        for vm in node.running:
            if vm.id not in movable or not self._may_move(vm) or not self._spend():
                continue
            free = _without(node, vm).free
            after = better_placement(topology, free, vm.request, vm.placement)
            if after is None:
                continue
            gained = cpus_in_places(topology, left_by(free, after))
            gained -= cpus_in_places(topology, left_by(free, vm.placement))
            moved = bytes_moved(vm.request, vm.placement, after)
            together = _domains(topology, after) < _domains(topology, vm.placement)
            move = DefragmentingMove(vm.id, name, name, vm.placement, after, together, gained, moved)
            if _is_worth_it(move, vm.request):
                yield move

    # Between nodes.

    def move_between(self, closed: Mapping[str, ClosedNodes], most_placements: int) -> None:
        """Find moves between nodes, until no single move gains anything."""
        self._left = most_placements
        for _ in range(MOST_MIGRATIONS):
            if not self._goes_on():
                return
            best = min(self._between(closed), key=lambda move: move.rank, default=None)
            if best is None:
                return
            index_of = {node.name: index for index, node in enumerate(self._nodes)}
            source, target = index_of[best.node], index_of[best.target]
            vm = next(one for one in self._nodes[source].running if one.id == best.id)
            self._nodes[source] = _without(self._nodes[source], vm)
            arrived = (*self._nodes[target].running, replace(vm, placement=best.after))
            self._nodes[target] = replace(self._nodes[target], running=arrived)
            self._take(best)
        self.complete = False

    def _between(self, closed: Mapping[str, ClosedNodes]) -> Iterator[DefragmentingMove]:
        """Try the VMs that leave the largest gain, on the fullest nodes that can hold them."""
        leaving = []
        for index, node in enumerate(self._nodes):
            for vm in node.running:
                if vm.id not in closed or not self._may_move(vm):
                    continue
                free = _without(node, vm).free
                gained = cpus_in_places(node.topology, free.cpus)
                gained -= cpus_in_places(node.topology, left_by(free, vm.placement))
                if gained >= vm.request.vcpus or self._is_split(node.topology, vm):
                    split = self._is_split(node.topology, vm)
                    leaving.append((-split, -gained, vm.request.vcpus, vm.id, index, vm))
        leaving.sort(key=lambda one: one[:4])
        for _, negative, _, _, index, vm in leaving[:_MOST_VMS]:
            yield from self._targets(self._nodes[index], vm, -negative, closed[vm.id])

    def _targets(
        self, source: ClusterNode, vm: Occupant, gained: int, closed: ClosedNodes
    ) -> Iterator[DefragmentingMove]:
        request = vm.request
        able = sorted(
            (node.free.cpus.bit_count(), node.name, index)
            for index, node in enumerate(self._nodes)
            if node is not source
            and node.name not in closed
            and (node.free.cpus if request.owns_cpus else node.free.pool).bit_count() >= request.vcpus
        )
        for _, name, index in able[:_MOST_TARGETS]:
            if not self._spend():
                return
            node = self._nodes[index]
            after = try_place(node.topology, node.free, request)
            if after is None:
                continue
            was, now = _domains(source.topology, vm.placement), _domains(node.topology, after)
            if now > was:
                continue
            lost = cpus_in_places(node.topology, node.free.cpus)
            lost -= cpus_in_places(node.topology, left_by(node.free, after))
            copied = Bytes(request.memory)
            move = DefragmentingMove(
                vm.id, source.name, name, vm.placement, after, now < was, gained - lost, copied
            )
            if _is_worth_it(move, request):
                yield move

    # Both.

    def room(self) -> FreeRoom:
        """Count the free resources."""
        blocks = [free_blocks_of(node.topology, node.free.cpus) for node in self._nodes]
        return FreeRoom(
            {domain: max((one.largest[domain].cpus for one in blocks), default=0) for domain in BLOCK_LEVELS},
            {
                size: sum(places(node.topology, node.free.cpus, size) for node in self._nodes)
                for size in PLACE_SIZES
            },
            sum(self._is_split(node.topology, vm) for node in self._nodes for vm in node.running),
        )

    def _is_split(self, topology: Topology, vm: Occupant) -> bool:
        if len(vm.placement.numa_nodes) < 2 or not vm.placement.vcpus:
            return False
        key = (topology, vm.request.key)
        if key not in self._empty:
            alone = free_of(topology, Ledger())
            self._empty[key] = try_place(topology, alone, vm.request.without_devices)
        empty = self._empty[key]
        return empty is not None and len(vm.placement.numa_nodes) > len(empty.numa_nodes)

    def _may_move(self, vm: Occupant) -> bool:
        is_new = vm.movable and vm.id not in self._moved
        return is_new and vm.request.options.policy.is_movable and not vm.request.pins_memory

    def _take(self, move: DefragmentingMove) -> None:
        self.moves.append(move)
        self._moved.add(move.id)

    def _spend(self) -> bool:
        self._left -= 1
        self.complete = self.complete and self._left >= 0
        return self._left >= 0

    def _goes_on(self) -> bool:
        if not self._watch(len(self.moves)):
            self.complete = False
            return False
        return True


def _without(node: ClusterNode, vm: Occupant) -> ClusterNode:
    return replace(node, running=tuple(one for one in node.running if one is not vm))


def _after(node: ClusterNode, move: DefragmentingMove) -> ClusterNode:
    """The node after a move inside it."""
    moved = (replace(vm, placement=move.after) if vm.id == move.id else vm for vm in node.running)
    return replace(node, running=tuple(moved))


def _gain(moves: Sequence[DefragmentingMove]) -> tuple[int, int, int]:
    """The larger the better."""
    return (
        sum(move.comes_together for move in moves),
        sum(move.cpus_gained for move in moves),
        -sum(move.bytes_moved for move in moves),
    )


def _domains(topology: Topology, placement: Placement) -> tuple[int, int]:
    """Sockets and NUMA nodes."""
    return locality_of(topology, placement)[:2]


def _is_worth_it(move: DefragmentingMove, request: Request) -> bool:
    return move.comes_together or move.cpus_gained >= request.vcpus


PLACE_SIZES = (4, 8, 16, 32, 64)
"""Sizes of the VMs that places are counted for, in CPUs."""


def better_placement(topology: Topology, free: Free, request: Request, before: Placement) -> Placement | None:
    """Place a running VM again; None where it gets nothing better.

    `free` are the free resources without the VM.
    """
    after = try_place(topology, free, request)
    return after if after is not None and is_better(topology, free, before, after) else None


def is_better(topology: Topology, free: Free, before: Placement, after: Placement) -> bool:
    """Whether a VM sits better, or leaves more places for others and sits as well.

    Sockets, NUMA nodes, distances, L3 groups and cores count in this order, then the CPUs of the places.
    """
    return _standing(topology, free, after) < _standing(topology, free, before)


def cpus_in_places(topology: Topology, free: CpuMask) -> int:
    """Count the CPUs of all VMs of one size that fit on single NUMA nodes, summed over the sizes."""
    return sum(size * places(topology, free, size) for size in PLACE_SIZES)


def places(topology: Topology, free: CpuMask, size: int) -> int:
    """Count the VMs of one size that fit, each on a single NUMA node, by the free CPUs alone."""
    return sum((node.cpus & free).bit_count() // size for node in topology.numa_nodes)


def left_by(free: Free, placement: Placement) -> CpuMask:
    """Return the CPUs that stay free for an exclusive VM beside a placement."""
    return CpuMask(free.cpus & ~(placement.cpus | placement.owned))


def _standing(topology: Topology, free: Free, placement: Placement) -> tuple[int, ...]:
    """The smaller the better."""
    return (
        *locality_of(topology, placement),
        _touched(topology.l3_groups, placement.cpus),
        _touched(topology.cores, placement.cpus),
        -cpus_in_places(topology, left_by(free, placement)),
    )


def _touched(groups: Iterable[CpuMask], cpus: CpuMask) -> int:
    return sum(1 for group in groups if group & cpus)
