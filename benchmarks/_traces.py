"""One machine, one load of VMs that come and go, one way to choose CPUs: what became of the VMs."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import combinations
from typing import Protocol

from benchmarks._load import ConstantLoad, Sizes
from benchmarks.peers import Allocator
from benchmarks.peers.best_fit import best_fit
from kvplace.core.allocator.allocate import place
from kvplace.core.allocator.set_cover import fewest
from kvplace.core.cpuset import cpus_of, mask_of
from kvplace.core.free_resources import Free
from kvplace.core.moves.make_room import MovePlan, make_room
from kvplace.core.occupant import ClusterNode, Occupant
from kvplace.core.placement import Refusal
from kvplace.core.request import PinningOptions, Request, Scope
from kvplace.core.scalars import CpuMask, NodeName
from kvplace.core.topology import Topology
from kvplace.simulate.scenario import Departure, SimulatedVm


@dataclass(frozen=True, slots=True)
class Tally:
    """Counts of the VMs that arrived after the machine had filled up."""

    arrived: int = 0
    sockets: int = 0
    """Over more sockets than the CPUs free at that moment made necessary."""
    numa: int = 0
    """Over more NUMA nodes than necessary in no more sockets."""
    l3: int = 0
    """Over no more NUMA nodes than necessary, but over more L3 groups in no more of both."""
    forced: int = 0
    """The free CPUs made more NUMA nodes necessary than the empty machine would have."""
    refused: int = 0
    """Not taken, because it would have been forced."""
    in_use: int = 0
    """Given a CPU that another VM has."""
    moves: int = 0

    def percent(self, column: str) -> float:
        """A column in percent of the VMs that arrived."""
        return 100 * int(getattr(self, column)) / self.arrived

    def with_refusals_of(self, strict: Tally) -> Tally:
        """Put in how many were refused in a run of as many VMs that refused them."""
        return replace(self, refused=strict.refused)


class Machine(Protocol):
    """One way to choose CPUs, at work on one machine."""

    moves: int

    @property
    def free(self) -> int:
        """The free CPUs."""

    def take(self, vm: SimulatedVm) -> int | None:
        """Give a VM its CPUs, after making room where that is its way."""

    def leave(self, vm: SimulatedVm) -> None:
        """Take the CPUs of a VM back."""


class PeerMachine:
    """A machine with an allocator without state."""

    def __init__(self, topology: Topology, choose: Allocator) -> None:
        self.moves = 0
        self.free = topology.cpus
        self._topology = topology
        self._choose = choose
        self._cpus: dict[str, int] = {}

    def take(self, vm: SimulatedVm) -> int | None:
        """Ask the allocator; a set with CPUs in use is handed on, but a correct one is kept in the books."""
        chosen = self._choose(self._topology, self.free, vm.request.vcpus)
        if chosen is None:
            return None
        kept = chosen
        if chosen & ~self.free or chosen.bit_count() != vm.request.vcpus:
            kept = best_fit(self._topology, self.free, vm.request.vcpus) or 0
        self._cpus[vm.id] = kept
        self.free &= ~kept
        return chosen

    def leave(self, vm: SimulatedVm) -> None:
        """Take the CPUs of a VM back."""
        self.free |= self._cpus.pop(vm.id, 0)


def kvplace(topology: Topology, free: int, count: int) -> int | None:
    """The project's own allocator in the form of the peers."""
    answer = place(topology, Free(CpuMask(free), CpuMask(free)), Request(count, PinningOptions(Scope.ANY)))
    return None if isinstance(answer, Refusal) else answer.cpus


class RoomMakingMachine:
    """A machine where running VMs move when a new one would be forced over more NUMA nodes."""

    def __init__(self, topology: Topology, most_moves: int) -> None:
        self.moves = 0
        self.free = topology.cpus
        self._topology = topology
        self._most_moves = most_moves
        self._running: dict[str, Occupant] = {}

    def take(self, vm: SimulatedVm) -> int | None:
        """Place the VM, with moves only when it would be forced without."""
        request = Request(vm.request.vcpus, PinningOptions(Scope.ANY))
        placement = place(self._topology, Free(CpuMask(self.free), CpuMask(self.free)), request)
        if isinstance(placement, Refusal):
            return None
        if len(placement.numa_nodes) > nodes_when_empty(self._topology, vm.request.vcpus):
            node = ClusterNode(NodeName("node"), self._topology, tuple(self._running.values()))
            room = make_room(node, request, most_moves=self._most_moves)
            if isinstance(room, MovePlan):
                for move in room.moves:
                    self._running[move.id] = Occupant(move.id, self._running[move.id].request, move.after)
                self.moves += len(room.moves)
                placement = room.placement
        self._running[vm.id] = Occupant(vm.id, request, placement)
        self._count()
        return placement.cpus

    def leave(self, vm: SimulatedVm) -> None:
        """Take the CPUs of a VM back."""
        self._running.pop(vm.id, None)
        self._count()

    def _count(self) -> None:
        self.free = self._topology.cpus
        for occupant in self._running.values():
            self.free &= ~occupant.placement.cpus


def run(
    topology: Topology,
    machine: Machine,
    mix: Sizes,
    seed: int,
    *,
    count: int,
    uncounted: int = 0,
    strict: bool = False,
) -> Tally:
    """Let `count` VMs come; the first of them, `uncounted`, only fill the machine.

    With `strict` a VM that would be forced is refused, and the next one of the seed's order comes in its
    place; else every VM is taken, so that all ways to choose meet the same events.
    """
    size = topology.cpus.bit_count()
    load = ConstantLoad(mix.up_to(size // 2), seed, cpus=size, count=count)
    seen = 0
    found = dict.fromkeys(("arrived", "sockets", "numa", "l3", "forced", "refused", "in_use", "moves"), 0)
    for event in load:
        if isinstance(event, Departure):
            machine.leave(event.vm)
            continue
        seen += 1
        moves = machine.moves
        outcome = outcome_of(topology, machine, event.vm)
        refused = outcome["forced"] and strict
        if refused:
            machine.leave(event.vm)
            load.refused(event.vm)
        if seen > uncounted:
            outcome |= {"arrived": 1, "refused": int(refused), "moves": machine.moves - moves}
            for name, number in outcome.items():
                found[name] += number
    return Tally(**found)


def outcome_of(topology: Topology, machine: Machine, vm: SimulatedVm) -> dict[str, int]:
    """Place one VM and state which columns of a tally count it."""
    before = machine.free
    count = vm.request.vcpus
    chosen = machine.take(vm)
    if chosen is None:
        raise AssertionError(f"a VM of {count} CPUs was refused while {before.bit_count()} were free")
    if chosen & ~before and not machine.moves:
        return {"in_use": 1, "forced": 0}
    # What was free when the VM was placed: after the moves, if there were some.
    free = machine.free | chosen
    sockets, nodes = len(topology.packages_of(CpuMask(chosen))), len(topology.nodes_of(CpuMask(chosen)))
    l3_groups = sum(1 for l3 in topology.l3_groups if l3 & chosen)
    fewest_nodes, fewest_l3_groups = _best_within(topology, free, count, sockets)
    return {
        "sockets": int(sockets > fewest([(p.cpus & free).bit_count() for p in topology.packages], count)),
        "numa": int(nodes > fewest_nodes),
        "l3": int(nodes == fewest_nodes and l3_groups > fewest_l3_groups),
        "forced": int(_fewest_nodes(topology, free, count) > nodes_when_empty(topology, count)),
    }


@lru_cache(maxsize=4096)
def nodes_when_empty(topology: Topology, count: int) -> int:
    """The fewest NUMA nodes that hold so many CPUs when the machine is empty."""
    return _fewest_nodes(topology, topology.cpus, count)


def _fewest_nodes(topology: Topology, free: int, count: int) -> int:
    return fewest([(node.cpus & free).bit_count() for node in topology.numa_nodes], count)


def _best_within(topology: Topology, free: int, count: int, sockets: int) -> tuple[int, int]:
    """The fewest NUMA nodes that hold the CPUs in no more sockets, and in those the fewest L3 groups."""
    best = (len(topology.numa_nodes) + 1, 0)
    for packages in combinations(topology.packages, sockets):
        inside = free & mask_of(cpu for package in packages for cpu in cpus_of(package.cpus))
        nodes = [node.cpus & inside for node in topology.numa_nodes if node.cpus & inside]
        fewest_nodes = fewest([cpus.bit_count() for cpus in nodes], count)
        if fewest_nodes > min(best[0], len(nodes)):
            continue
        for group in combinations(nodes, fewest_nodes):
            cpus = sum(group)
            if cpus.bit_count() >= count:
                l3_groups = fewest([(l3 & cpus).bit_count() for l3 in topology.l3_groups], count)
                best = min(best, (fewest_nodes, l3_groups))
    return best
