"""VMs split or refused over a long time on 50 machines, with moves of running VMs inside and between nodes.

    python -m benchmarks.moves_in_a_cluster [--quick] [--seeds 3] [--vms 4000]

The machines are five of each of ten server types. VMs arrive and end as in the benchmark `fragmentation`,
with its two mixes of sizes and whole cores; about 95 % of all CPUs are in use. The first quarter of the VMs
fills the cluster and is not counted. Columns are percentages of the VMs that arrived, mean and standard
deviation over seeds:

* *split*: a VM gets more NUMA nodes than it needs on its machine when that is empty.
* *refused*: the same loads with a scope that forbids this. The next VM of the seed replaces a refused one, so
  the use stays equal.
* *moves* and *migrations*: running VMs that got other cores of their node, or went to another node, for every
  100 VMs placed. A migration copies the memory of the VM over the network.

kvplace decides with the code of its extender, strategy `pack`, and moves VMs only for a new one that would be
split or refused otherwise: at most two inside a node, or one between nodes. The search inside nodes has a
tenth of its usual steps. With `both` a VM migrates only if no moves inside a node help. All VMs may move, and
all nodes hold all VMs. *best fit* takes the NUMA node with the fewest CPUs that suffice, of all machines.
Koordinator is its CPU accumulator on the most allocated node. kube-scheduler is its default profile with a
kubelet of Topology Manager policy best-effort. The descheduler works beside it as the plugin
LowNodeUtilization does: after every 20 VMs that arrive, each node with more than 10 points above the mean use
evicts one VM if another node is as much below the mean, and kube-scheduler places that VM again. Peers are
re-implementations from their descriptions (benchmarks/peers).
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Protocol

from benchmarks._load import EVEN, GIB, MIXES, ConstantLoad, Sizes
from benchmarks._tables import table
from benchmarks._traces import nodes_when_empty
from benchmarks.peers import Allocator
from benchmarks.peers.best_fit import best_fit
from benchmarks.peers.koordinator import most_allocated as koordinator
from benchmarks.peers.kube_scheduler import Score, default_profile, most_allocated
from benchmarks.peers.kubelet import with_numa_mask
from kvplace.core.cluster.node_choice import Strategy
from kvplace.core.cluster.room_in_cluster import MigratableVm, find_migration
from kvplace.core.occupant import ClusterNode
from kvplace.core.placement import Placement
from kvplace.core.request import NumaMemory, PinningOptions, Request, Scope
from kvplace.core.scalars import Bytes, CpuMask, NodeName, PodUid
from kvplace.core.topology import Topology
from kvplace.machines.server_types import machine_names, read_machine
from kvplace.simulate.scenario import Departure, SimulatedVm
from kvplace.simulate.simulated_cluster import SimulatedCluster

OF_EACH = 5
FILL = 0.95
CYCLE = 20
"""The descheduler works after so many arrivals."""
DEVIATION = 0.10
MOST_MOVES = 2
MOST_STEPS = 5_000
"""Steps of the search on one of eight nodes, a tenth of those of the extender on one of sixteen."""


@lru_cache
def machines() -> tuple[Topology, ...]:
    """The cluster's machines, as whole cores to give out."""
    return tuple(topology for topology in map(read_machine, machine_names()) for _ in range(OF_EACH))


class Way(Protocol):
    """One way to place VMs, at work on the cluster."""

    moves: int
    migrations: int

    def take(self, vm: SimulatedVm) -> bool | None:
        """Place a VM; returns whether it is split, and None where it is refused."""

    def leave(self, vm: SimulatedVm) -> None:
        """Release the CPUs of a VM that was placed."""


def is_split(topology: Topology, cpus: int) -> bool:
    """Whether CPUs are on more NUMA nodes than so many need on the empty machine."""
    nodes = len(topology.nodes_of(CpuMask(cpus)))
    return nodes > 1 and nodes > nodes_when_empty(topology, cpus.bit_count())


class Kvplace:
    """kvplace, with the moves that it may make."""

    def __init__(self, *, strict: bool, inside: bool, between: bool) -> None:
        self.moves = self.migrations = 0
        self._strict, self._inside, self._between = strict, inside, between
        nodes = [ClusterNode(NodeName(f"n{n:02d}"), topology) for n, topology in enumerate(machines())]
        self._cluster = SimulatedCluster(nodes, Strategy.PACK)
        self._vms: dict[str, tuple[NodeName, SimulatedVm, Placement]] = {}

    def take(self, vm: SimulatedVm) -> bool | None:
        cpus = vm.request.vcpus
        options = PinningOptions(Scope.ANY, numa_memory=NumaMemory.OFF)
        request = Request(cpus, options, memory=Bytes(cpus * 4 * GIB))
        vm = replace(vm, request=request)
        best = self._cluster.best(self._cluster.answers(request))
        if best is not None and not is_split(best.fit.topology, best.placement.cpus):
            self._start(best.node, vm, best.placement)
            return False
        if self._inside and self._moved_inside(vm, None if best is None else best.node):
            return False
        if self._between and self._migrated(vm):
            return False
        if best is None or self._strict:
            return None
        self._start(best.node, vm, best.placement)
        return True

    def leave(self, vm: SimulatedVm) -> None:
        if self._vms.pop(vm.id, None) is not None:
            self._cluster.end(vm)

    def _moved_inside(self, vm: SimulatedVm, first: NodeName | None) -> bool:
        found = self._cluster.find_moves(vm.request, MOST_MOVES, first, max_steps=MOST_STEPS)
        if found is None:
            return False
        node, plan = found
        self._cluster.move(node, plan)
        for move in plan.moves:
            name = move.id.removeprefix("load/")
            self._vms[name] = (node, self._vms[name][1], move.after)
        self.moves += len(plan.moves)
        self._start(node, vm, plan.placement)
        return True

    def _migrated(self, vm: SimulatedVm) -> bool:
        occupied = self._cluster.occupied
        vms = [
            MigratableVm(PodUid(f"load/{one.id}"), node, _on_one_node(one.request, placement))
            for node, one, placement in self._vms.values()
        ]
        waiting = replace(vm.request, options=replace(vm.request.options, scope=Scope.ONE_NUMA))
        found = find_migration(occupied, vms, waiting, list(occupied), Strategy.PACK)
        if found is None:
            return False
        moved = self._vms[found.vm.uid.removeprefix("load/")][1]
        self._cluster.end(moved)
        self._start(found.target, moved, found.placement)
        self._start(found.vm.node, vm, found.room)
        self.migrations += 1
        return True

    def _start(self, node: NodeName, vm: SimulatedVm, placement: Placement) -> None:
        self._cluster.start(node, vm, placement)
        self._vms[vm.id] = (node, vm, placement)


def _on_one_node(request: Request, placement: Placement) -> Request:
    """A VM on one NUMA node goes to one only."""
    if len(placement.numa_nodes) > 1:
        return request
    return replace(request, options=replace(request.options, scope=Scope.ONE_NUMA))


@dataclass
class Host:
    """A machine as a peer sees it."""

    topology: Topology
    free: int

    @property
    def size(self) -> int:
        return self.topology.allocatable.bit_count()

    @property
    def use(self) -> float:
        return 1 - self.free.bit_count() / self.size


class Peer:
    """A scheduler that ranks nodes, and an allocator of CPUs on the chosen one."""

    def __init__(
        self,
        rank: Callable[[Host, int], tuple[float, ...]],
        choose: Allocator,
        *,
        strict: bool,
        filters: bool = False,
        deschedules: bool = False,
    ) -> None:
        """The smallest rank is the best; with `filters` and `strict` only nodes without a split count."""
        self.moves = self.migrations = 0
        self._hosts = [Host(topology, topology.allocatable) for topology in machines()]
        self._rank, self._choose = rank, choose
        self._strict, self._filters, self._deschedules = strict, filters, deschedules
        self._vms: dict[str, tuple[Host, int]] = {}
        self._arrived = 0

    def take(self, vm: SimulatedVm) -> bool | None:
        self._arrived += 1
        if self._deschedules and self._arrived % CYCLE == 0:
            self._deschedule()
        return self._place(vm.id, vm.request.vcpus)

    def leave(self, vm: SimulatedVm) -> None:
        found = self._vms.pop(vm.id, None)
        if found is not None:
            host, cpus = found
            host.free |= cpus

    def _place(self, name: str, count: int) -> bool | None:
        able = [host for host in self._hosts if host.free.bit_count() >= count]
        if self._strict and self._filters:
            able = [host for host in able if _fits_one(host, count)]
        if not able:
            return None
        host = min(able, key=lambda host: self._rank(host, count))
        cpus = self._choose(host.topology, CpuMask(host.free), count)
        if cpus is None:
            return None
        split = is_split(host.topology, cpus)
        if split and self._strict:
            return None
        host.free &= ~cpus
        self._vms[name] = (host, cpus)
        return split

    def _deschedule(self) -> None:
        mean = statistics.fmean(host.use for host in self._hosts)
        if all(host.use >= mean - DEVIATION for host in self._hosts):
            return
        for host in sorted(self._hosts, key=lambda host: -host.use):
            if host.use <= mean + DEVIATION:
                return
            name = next(name for name, (there, _) in self._vms.items() if there is host)
            _, cpus = self._vms.pop(name)
            host.free |= cpus
            if self._place(name, cpus.bit_count()) is None:
                host.free &= ~cpus
                self._vms[name] = (host, cpus)
            else:
                self.migrations += 1


def _fits_one(host: Host, count: int) -> bool:
    needed = nodes_when_empty(host.topology, count)
    frees = sorted(((node.cpus & host.free).bit_count() for node in host.topology.numa_nodes), reverse=True)
    return sum(frees[:needed]) >= count


def _tightest(host: Host, count: int) -> tuple[float, ...]:
    nodes = [(node.cpus & host.free).bit_count() for node in host.topology.numa_nodes]
    enough = [free for free in nodes if free >= count]
    return (0, min(enough)) if enough else (not _fits_one(host, count), host.free.bit_count())


def _by(score: Score) -> Callable[[Host, int], tuple[float, ...]]:
    def rank(host: Host, count: int) -> tuple[float, ...]:
        used = host.size - host.free.bit_count()
        return (-score((used + count, 0), (used, 0), (host.size, 1)),)

    return rank


WAYS: Mapping[str, Callable[[bool], Way]] = {
    "kvplace": lambda strict: Kvplace(strict=strict, inside=False, between=False),
    "kvplace, moves inside nodes": lambda strict: Kvplace(strict=strict, inside=True, between=False),
    "kvplace, moves between nodes": lambda strict: Kvplace(strict=strict, inside=False, between=True),
    "kvplace, both": lambda strict: Kvplace(strict=strict, inside=True, between=True),
    "best fit": lambda strict: Peer(_tightest, best_fit, strict=strict, filters=True),
    "Koordinator": lambda strict: Peer(_by(most_allocated), koordinator, strict=strict, filters=True),
    "kube-scheduler": lambda strict: Peer(_by(default_profile), with_numa_mask, strict=strict),
    "kube-scheduler, descheduler": lambda strict: Peer(
        _by(default_profile), with_numa_mask, strict=strict, deschedules=True
    ),
}
COLUMNS = ("split", "refused", "moves", "migrations")


def tried(way: str, mix: Sizes, seed: int, count: int, *, strict: bool) -> dict[str, float]:
    """Run one load; returns the columns that it fills."""
    placing = WAYS[way](strict)
    cpus = sum(topology.allocatable.bit_count() for topology in machines())
    load = ConstantLoad(mix, seed, cpus=cpus, count=count, fill=FILL)
    arrived = split = refused = begun_moves = begun_migrations = 0
    for event in load:
        if isinstance(event, Departure):
            placing.leave(event.vm)
            continue
        arrived += 1
        if arrived == count // 4:
            split = refused = 0
            begun_moves, begun_migrations = placing.moves, placing.migrations
        answer = placing.take(event.vm)
        split += answer is True
        if answer is None:
            refused += 1
            load.refused(event.vm)
    counted = count - count // 4 + 1
    if strict:
        return {"refused": 100 * refused / counted}
    placed = counted - refused
    return {
        "split": 100 * (split + refused) / counted,
        "moves": 100 * (placing.moves - begun_moves) / placed,
        "migrations": 100 * (placing.migrations - begun_migrations) / placed,
    }


def written(numbers: Sequence[float]) -> str:
    """Write a mean and its standard deviation; nothing at all is a 0."""
    if not any(numbers):
        return "0"
    return f"{statistics.fmean(numbers):.2f} ± {statistics.stdev(numbers) if len(numbers) > 1 else 0:.2f}"


def main() -> int:
    """Run all loads and print the tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="one seed, few VMs, one mix")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--vms", type=int, default=4000)
    given = parser.parse_args()
    seeds, vms = (1, 1200) if given.quick else (given.seeds, given.vms)
    mixes = (EVEN,) if given.quick else MIXES
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        found = {
            (mix.name, way, seed, strict): pool.submit(tried, way, mix, seed, vms, strict=strict)
            for way in sorted(WAYS, key=lambda way: "between" not in way and "both" not in way)
            for mix in mixes
            for seed in range(seeds)
            for strict in (False, True)
        }
        for mix in mixes:
            rows = []
            for way in WAYS:
                results = [
                    found[mix.name, way, seed, False].result() | found[mix.name, way, seed, True].result()
                    for seed in range(seeds)
                ]
                rows.append([way, *(written([one[column] for one in results]) for column in COLUMNS)])
                print(f"{mix.name}: {rows[-1]}", file=sys.stderr, flush=True)
            print(f"VMs of the mix '{mix.name}', percent ± over seeds")
            print(table(["", *COLUMNS], rows), end="\n\n", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
