"""CPUs and memory of a cluster in use when the first VM is refused, and CPUs and memory that no VM can use.

VMs of 4 to 32 CPUs, with 1 to 8 GiB for each CPU, fill clusters of ten server types, equally many of each,
one after the other until one is refused. The table shows the state at that moment; means over 5 seeds, with
the standard deviation of the CPUs in use.

* *stranded*: CPUs that are free on a node without memory for them, or memory without CPUs, in the proportion
  of all requests together.
* *split VMs*: VMs on more NUMA nodes than this machine needs when it is empty.
* *far memory*: VMs with memory on a NUMA node where they have no CPU.

kvplace decides with the code of its extender. Every VM may take CPUs anywhere on a machine, and has all of
its memory on the NUMA nodes of its CPUs. The placement of the VM has priority; what would be stranded comes
second. kube-scheduler is re-implemented with its scores of version 1.36 and counts CPUs and memory of whole
nodes. Then the kubelet's static policy takes the CPUs, with the TopologyManager policy that the row names:
best-effort takes what is there, single-numa-node rejects VMs that kube-scheduler has sent. Memory is taken
from the NUMA nodes of the CPUs first, the rest from where most is free.
"""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import cache, partial
from statistics import fmean, stdev

from benchmarks._plots import Figure, NotInstalled, legend_beside, write_plot
from benchmarks._tables import table
from benchmarks.peers.kube_scheduler import (
    Score,
    balanced_allocation,
    default_profile,
    least_allocated,
    most_allocated,
)
from benchmarks.peers.kubelet import with_numa_mask
from kvplace.core.cluster.node_choice import Strategy
from kvplace.core.free_resources import Free, free_of
from kvplace.core.ledger import Ledger
from kvplace.core.occupant import ClusterNode
from kvplace.core.request import PinningOptions, Request, Scope
from kvplace.core.scalars import Bytes, CpuMask, NodeName, NumaId
from kvplace.core.topology import Topology
from kvplace.documents.cluster import MixEntry
from kvplace.machines.server_types import machine_names, read_machine
from kvplace.simulate.scenario import Arrival, Mix, RandomLoad, SimulatedVm
from kvplace.simulate.simulated_cluster import ClusterState, SimulatedCluster, cluster_state, empty_amounts

GIB = Bytes(1 << 30)
SIZES = (50, 250, 1000)
SEEDS = (1, 2, 3, 4, 5)
MIX = tuple(
    MixEntry(request=Request(cpus, PinningOptions(scope=Scope.ANY), memory=memory * GIB))
    for cpus, memory in ((4, 4), (4, 16), (8, 16), (8, 32), (8, 64), (16, 32), (16, 64), (32, 128))
)
PER_CPU = sum(kind.request.memory for kind in MIX) / sum(kind.request.vcpus for kind in MIX)


@dataclass(frozen=True, slots=True)
class End:
    """A cluster when the first VM was refused."""

    state: ClusterState
    vms: int
    split: int
    far: int
    """Of memory that is not beside the CPUs."""


Filling = Callable[[list[Topology], int], End]


@cache
def nodes_needed(topology: Topology, cpus: int) -> int:
    """NUMA nodes that so many CPUs need on an empty machine."""
    sizes = sorted((node.cpus & topology.allocatable).bit_count() for node in topology.numa_nodes)
    needed = 0
    while cpus > 0 and sizes:
        cpus -= sizes.pop()
        needed += 1
    return needed


def arriving(topologies: list[Topology], seed: int) -> list[SimulatedVm]:
    """More VMs than fit, in the seed's order."""
    cpus = sum(topology.allocatable.bit_count() for topology in topologies)
    load = RandomLoad(Mix(MIX, requests=cpus // 8, load=None), seed, cpus=cpus, memory=0)
    return [event.vm for event in load if isinstance(event, Arrival)]


def kvplace(strategy: Strategy) -> Filling:
    """Fill a cluster as kvplace does."""

    def fill(topologies: list[Topology], seed: int) -> End:
        cluster = SimulatedCluster(
            [ClusterNode(NodeName(f"n{number:04d}"), topology) for number, topology in enumerate(topologies)],
            strategy,
        )
        split = far = 0
        for count, vm in enumerate(arriving(topologies, seed)):
            best = cluster.best(cluster.answers(vm.request))
            if best is None:
                return End(cluster_state(cluster.states, PER_CPU), count, split, far)
            split += len(best.placement.numa_nodes) > nodes_needed(best.fit.topology, vm.request.vcpus)
            far += not set(best.placement.memory) <= set(best.fit.topology.nodes_of(best.placement.cpus))
            cluster.start(best.node, vm, best.placement)
        raise AssertionError("the cluster was not filled")

    return fill


class BlindNode:
    """A node as kube-scheduler counts it, and the CPUs that its kubelet has left."""

    def __init__(self, topology: Topology) -> None:
        self.topology = topology
        self.free = topology.allocatable
        self.capacity = empty_amounts(topology)
        self.used = (0, 0)
        self.memory = dict(free_of(topology, Ledger()).memory)

    def after(self, request: Request) -> tuple[int, int]:
        """The requests there with one more VM."""
        return self.used[0] + request.vcpus, self.used[1] + request.memory

    def score(self, request: Request, score: Score) -> int:
        """The score that kube-scheduler gives it; -1 when the VM does not fit."""
        after = self.after(request)
        if after[0] > self.capacity[0] or after[1] > self.capacity[1]:
            return -1
        return score(after, self.used, self.capacity)

    def taken(self, cpus: int, *, one_node: bool) -> int | None:
        """CPUs that the kubelet gives; None when its TopologyManager turns the VM away."""
        if one_node and all((node.cpus & self.free).bit_count() < cpus for node in self.topology.numa_nodes):
            return None
        return with_numa_mask(self.topology, self.free, cpus)

    def take(self, request: Request, cpus: int) -> bool:
        """Give a VM its CPUs, and memory beside them first; returns whether some of it is elsewhere."""
        self.free &= ~cpus
        self.used = self.after(request)
        beside = self.topology.nodes_of(CpuMask(cpus))
        missing = request.memory
        far = False
        for node in sorted(self.memory, key=lambda node: (node not in beside, -self.memory[node])):
            part = min(missing, self.memory[node])
            self.memory[node] -= part
            missing -= part
            far |= part > 0 and node not in beside
        return far


def kube_scheduler(score: Score, *, one_node: bool = False) -> Filling:
    """Fill a cluster as kube-scheduler and kubelets do."""

    def fill(topologies: list[Topology], seed: int) -> End:
        nodes = [BlindNode(topology) for topology in topologies]
        chance = random.Random(seed)
        scores = {kind.request: [node.score(kind.request, score) for node in nodes] for kind in MIX}
        split = far = 0
        for count, vm in enumerate(arriving(topologies, seed)):
            known = scores[vm.request]
            best = max(known)
            chosen = chance.choice([number for number, found in enumerate(known) if found == best])
            node = nodes[chosen]
            taken = node.taken(vm.request.vcpus, one_node=one_node) if best >= 0 else None
            if taken is None:
                states = [
                    (
                        node.topology,
                        Free(
                            CpuMask(node.free),
                            CpuMask(node.free),
                            memory=((NumaId(0), Bytes(node.capacity[1] - node.used[1])),),
                        ),
                    )
                    for node in nodes
                ]
                return End(cluster_state(states, PER_CPU), count, split, far)
            split += len(node.topology.nodes_of(CpuMask(taken))) > nodes_needed(
                node.topology, vm.request.vcpus
            )
            far += node.take(vm.request, taken)
            for request, found in scores.items():
                found[chosen] = node.score(request, score)
        raise AssertionError("the cluster was not filled")

    return fill


FILLINGS: dict[str, Filling] = {
    "kvplace, pack": kvplace(Strategy.PACK),
    "kvplace, balance": kvplace(Strategy.BALANCE),
    "kvplace, spread": kvplace(Strategy.SPREAD),
    "kube-scheduler's default, best-effort": kube_scheduler(default_profile),
    "kube-scheduler's default, single-numa-node": kube_scheduler(default_profile, one_node=True),
    "LeastAllocated, best-effort": kube_scheduler(least_allocated),
    "BalancedAllocation, best-effort": kube_scheduler(balanced_allocation),
    "MostAllocated, best-effort": kube_scheduler(most_allocated),
    "MostAllocated, single-numa-node": kube_scheduler(most_allocated, one_node=True),
}


def filled(name: str, size: int, seed: int) -> End:
    """Fill one cluster."""
    topologies = [read(machine) for machine in machine_names() for _ in range(size // len(machine_names()))]
    return FILLINGS[name](topologies, seed)


@cache
def read(machine: str) -> Topology:
    """Read each machine once."""
    return read_machine(machine)


def draw(ends: Mapping[str, list[End]], figure: Figure) -> None:
    """Draw what is in use and what is stranded of the CPUs and of the memory, a bar for each way."""
    names = list(ends)[::-1]
    panels = figure.subplots(1, 2, sharey=True)
    for panel, kind in zip(panels, ("CPUs", "memory"), strict=True):
        shares = [
            [
                (end.state.cpus_used, end.state.cpus_stranded)
                if kind == "CPUs"
                else (end.state.memory_used, end.state.memory_stranded)
                for end in ends[name]
            ]
            for name in names
        ]
        used = [100 * fmean(one for one, _ in found) for found in shares]
        stranded = [100 * fmean(other for _, other in found) for found in shares]
        panel.barh(range(len(names)), used, color="#2a6f97", label="in use")
        panel.barh(range(len(names)), stranded, left=used, color="#c8553d", label="stranded")
        panel.set_yticks(range(len(names)), names)
        panel.grid(visible=False, axis="y")
        panel.set_xlim(0, 100)
        panel.set_xlabel(f"% of the {kind}")
    legend_beside(figure, panels[0], columns=2)


def main(sizes: tuple[int, ...], seeds: tuple[int, ...], *, plot: bool) -> int:
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        # The long ones first, so that no processor waits for a last one.
        found = {
            (name, size, seed): pool.submit(filled, name, size, seed)
            for size in reversed(sizes)
            for name in FILLINGS
            for seed in seeds
        }
        for size in sizes:
            rows = [row(name, [found[name, size, seed].result() for seed in seeds]) for name in FILLINGS]
            heads = [
                f"{size} nodes",
                "CPUs in use",
                "CPUs stranded",
                "memory stranded",
                "split VMs",
                "far memory",
            ]
            print(table(heads, rows), end="\n\n")
        if not plot:
            return 0
        ends = {name: [found[name, sizes[-1], seed].result() for seed in seeds] for name in FILLINGS}
    try:
        title = f"{sizes[-1]} nodes at the first refusal"
        print(write_plot("across_nodes", partial(draw, ends), title=title))
    except NotInstalled as error:
        print(error, file=sys.stderr)
        return 1
    return 0


def row(name: str, ends: list[End]) -> list[str]:
    """One line of a table."""
    used = [end.state.cpus_used for end in ends]
    spread = f" ± {stdev(used) * 100:.1f}" if len(used) > 1 else ""
    return [
        name,
        f"{fmean(used) * 100:.1f}{spread} %",
        f"{fmean(end.state.cpus_stranded for end in ends) * 100:.1f} %",
        f"{fmean(end.state.memory_stranded for end in ends) * 100:.1f} %",
        f"{sum(end.split for end in ends) / sum(end.vms for end in ends) * 100:.1f} %",
        f"{sum(end.far for end in ends) / sum(end.vms for end in ends) * 100:.1f} %",
    ]


if __name__ == "__main__":
    if "--quick" in sys.argv[1:]:
        sys.exit(main((50,), (1, 2), plot=False))
    sys.exit(main(SIZES, SEEDS, plot=True))
