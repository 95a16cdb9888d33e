"""VMs placed in a nearly full cluster: planned together, and one by one.

    python -m benchmarks.planning [--quick] [--seeds 10] [--seconds 3]

Nodes have two sockets of two NUMA nodes with 30 allocatable CPUs each. Two VMs run on each node, each in a
NUMA node of its own; `make room` may move them. The VMs to place request `one-numa`, and together as many
CPUs as are free. There are four mixes of sizes: `mixed` has 2 to 24 vCPUs; `chunky` 6, 10, 14 or 18;
`memory` 2 to 12 with 1 to 6 GiB for each vCPU, so that memory runs out on some nodes and CPUs on others;
`large` 8, 16, 24 or 28.

* *one by one*: VMs arrive in the given order, and each goes where Filter sends it, as in a cluster.
* *bound*: the upper bound that HiGHS finds within its time limit, for plans without moves.
* *reached* counts the seeds where the plan reaches the bound, so it is optimal.

Percentages are means over the seeds, of all requested VMs and vCPUs; seconds are medians.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random

from benchmarks._mip_bound import mip_bound
from benchmarks._tables import table
from kvplace.core.allocator.allocate import place
from kvplace.core.cluster.planning import Plan, Tally, VmRequest, plan
from kvplace.core.free_resources import free_of
from kvplace.core.ledger import Ledger, claim_of
from kvplace.core.occupant import ClusterNode, Occupant
from kvplace.core.placement import Placement
from kvplace.core.request import PinningOptions, Request, Scope
from kvplace.core.scalars import Bytes, NodeName, PodUid
from kvplace.core.topology import Topology
from kvplace.machines.server_types import read_machine

MACHINE = "2x-epyc-9354-nps2"
GIB = Bytes(1 << 30)
RUNNING = 2
"""VMs that run on each node already."""


def mixed(chance: Random) -> tuple[int, int]:
    """Give vCPUs and GiB of a VM."""
    vcpus = chance.randrange(2, 25, 2)
    return vcpus, vcpus


def chunky(chance: Random) -> tuple[int, int]:
    """Give vCPUs and GiB of a VM of a size that leaves odd numbers of CPUs free."""
    vcpus = chance.choice((6, 10, 14, 18))
    return vcpus, vcpus


def memory(chance: Random) -> tuple[int, int]:
    """Give vCPUs and GiB of a VM with much or little memory."""
    vcpus = chance.choice((2, 4, 8, 12))
    return vcpus, vcpus * chance.choice((1, 2, 4, 6))


def large(chance: Random) -> tuple[int, int]:
    """Give vCPUs and GiB of a VM that few NUMA nodes have room for."""
    vcpus = chance.choice((8, 16, 24, 28))
    return vcpus, vcpus


MIXES: dict[str, Callable[[Random], tuple[int, int]]] = {
    "mixed": mixed,
    "chunky": chunky,
    "memory": memory,
    "large": large,
}


@dataclass(frozen=True, slots=True)
class Run:
    """The results of all ways with one seed."""

    asked: Tally
    placed: dict[str, Tally]
    seconds: dict[str, float]
    moves: int
    finished: bool


def cluster(count: int, chance: Random) -> list[ClusterNode]:
    """Nodes with VMs of 2 to 8 vCPUs that run wherever they happen to be."""
    machine = read_machine(MACHINE)
    return [
        ClusterNode(NodeName(f"node-{number:03}"), machine, running(machine, number, chance))
        for number in range(count)
    ]


def running(machine: Topology, number: int, chance: Random) -> tuple[Occupant, ...]:
    """VMs that were put into NUMA nodes by the dice, as departures leave them behind."""
    found: list[Occupant] = []
    for numa in chance.sample(machine.numa_nodes, RUNNING):
        vcpus = chance.choice((2, 4, 6, 8))
        request = Request(vcpus, PinningOptions(Scope.ONE_NUMA), memory=vcpus * 4 * GIB)
        free = free_of(machine, Ledger(), [claim_of(PodUid(vm.id), vm.placement) for vm in found])
        answer = place(machine, free.within(numa.cpus), request)
        assert isinstance(answer, Placement)
        found.append(Occupant(f"running-{number}-{numa.id}", request, answer))
    return tuple(found)


def asked(
    nodes: Sequence[ClusterNode], mix: Callable[[Random], tuple[int, int]], chance: Random
) -> list[VmRequest]:
    """VMs that together ask for the CPUs that are free, no more."""
    free = sum(node.topology.allocatable.bit_count() for node in nodes)
    free -= sum(vm.placement.owned.bit_count() for node in nodes for vm in node.running)
    found: list[VmRequest] = []
    while True:
        vcpus, memory_gib = mix(chance)
        if vcpus > free:
            return found
        free -= vcpus
        request = Request(vcpus, PinningOptions(Scope.ONE_NUMA), memory=memory_gib * GIB)
        found.append(VmRequest(f"vm-{len(found)}", request))


def measure(nodes: Sequence[ClusterNode], wanted: Sequence[VmRequest], seconds: float) -> Run:
    """Place the same VMs in every way."""
    placed: dict[str, Tally] = {}
    took: dict[str, float] = {}

    def timed(name: str, work: Callable[[], Plan]) -> Plan:
        began = time.perf_counter()
        found = work()
        took[name] = time.perf_counter() - began
        placed[name] = found.placed
        return found

    simple = timed("plan", lambda: plan(nodes, wanted))
    placed["one by one"] = simple.one_by_one
    moved = timed("plan, make room", lambda: plan(nodes, wanted, make_room=True))
    bound = mip_bound(nodes, wanted, seconds=seconds)
    placed["bound"], took["bound"] = bound.bound, bound.seconds
    total = Tally(len(wanted), sum(vm.request.vcpus for vm in wanted))
    return Run(total, placed, took, len(moved.moves), bound.finished)


def report(name: str, nodes: int, runs: Sequence[Run]) -> None:
    """Print one mix's table."""
    vms = statistics.mean(run.asked.vms for run in runs)
    print(f"{name}: {nodes} nodes, {vms:.0f} VMs on average, {len(runs)} seeds\n")
    rows = []
    for way in ("one by one", "plan", "plan, make room", "bound"):
        shares = [run.placed[way].vms / run.asked.vms for run in runs]
        vcpus = [_vcpus(run, way) for run in runs]
        known = [one for one in vcpus if one is not None]
        rows.append(
            [
                way,
                f"{statistics.mean(shares):.2%}",
                f"{min(shares):.2%}",
                f"{statistics.mean(known):.2%}" if len(known) == len(runs) else "",
                f"{statistics.median(run.seconds[way] for run in runs):.2f}"
                if way in runs[0].seconds
                else "",
            ]
        )
    print(table(["", "VMs placed", "worst seed", "vCPUs placed", "seconds"], rows))
    reached = sum(run.placed["plan"] == run.placed["bound"] for run in runs)
    full = sum(run.placed["plan"].vms == run.placed["bound"].vms for run in runs)
    solved = sum(run.finished for run in runs)
    moves = statistics.mean(run.moves for run in runs)
    print(
        f"\nbound solved in time in {solved} of {len(runs)} seeds; reached by the plan in {reached} "
        f"(in VMs: {full}); moves of running VMs per seed {moves:.1f}\n"
    )


def _vcpus(run: Run, way: str) -> float | None:
    """The share of vCPUs; unknown for a bound with VMs that no plan places."""
    if way == "bound" and run.placed["plan"].vms < run.placed["bound"].vms:
        return None
    return run.placed[way].vcpus / run.asked.vcpus


def speed(count: int) -> None:
    """Print how long large plans take."""
    rows = []
    for name, mix in MIXES.items():
        chance = Random(1)
        nodes = cluster(count, chance)
        everything = asked(nodes, mix, chance)
        for wanted, fill in ((everything[: len(everything) // 2], "half full"), (everything, "full")):
            began = time.perf_counter()
            found = plan(nodes, wanted)
            took = time.perf_counter() - began
            share = found.placed.vms / len(wanted)
            rows.append([f"{name}, {fill}", str(len(wanted)), f"{share:.1%}", f"{took:.2f}"])
    print(f"{count} nodes, plan alone\n")
    print(table(["", "VMs asked", "placed", "seconds"], rows))


def main() -> None:
    """Measure and print tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="small and in seconds")
    parser.add_argument("--nodes", type=int, default=16)
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--seconds", type=float, default=3.0, help="what the solver may take for each seed")
    given = parser.parse_args()
    nodes, seeds, seconds = (4, 2, 1.0) if given.quick else (given.nodes, given.seeds, given.seconds)
    for name, mix in MIXES.items():
        runs = []
        for seed in range(seeds):
            chance = Random(seed)
            there = cluster(nodes, chance)
            runs.append(measure(there, asked(there, mix, chance), seconds))
            print(f"{name}, seed {seed}: {runs[-1].placed}", file=sys.stderr, flush=True)
        report(name, nodes, runs)
    speed(10 if given.quick else 100)


if __name__ == "__main__":
    main()
