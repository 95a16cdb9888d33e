"""Time of one placement, by request and by free CPUs.

    python -m benchmarks.placement [--quick] [--odd]

The server has 256 CPUs, 8 NUMA nodes and 32 L3 groups (two sockets, 64 cores of two threads each). The time
is that of the whole decision from the free CPUs to the answer. Nothing is remembered from an equal question;
the free CPUs of each L3 group and NUMA node are already counted, as after one VM that came or went since the
last question. The kubelet's packed algorithm, written without optimisations in the same language
(benchmarks/peers), chooses as many CPUs from the same sets in the same run. It knows no scope, caches or
memory, and chooses CPUs only.

* *fresh*: all CPUs are free.
* *filled*: half of the CPUs are free, as VMs of 2 to 32 CPUs that came and went left them.
* *torn*: every thread is free or not at random, which VMs on whole cores never cause.

Medians over 200 sets of free CPUs. *worst* is the slowest of them. It is timed again five times and the
fastest time counts, so that the figure belongs to the set and not to other work of the machine.

*sought*: the slowest question of its kind that 900 steps of search find: 300 random questions, then small
changes of the slowest so far. The search changes which CPUs are free, the VMs that share each CPU, the
memory of each NUMA node (at most 16 GiB) and the sizes of the VM. Nothing is counted before the question.
The median is that of the random questions.

With `--odd` the same search also takes 40 steps on each of many unusual machines, which takes long: 12 to 64
NUMA nodes at irregular distances, with packages and L3 groups that cross them. Every search of kvplace has a
bound in steps, which these questions reach. That table has CPU time, because other processes run meanwhile.
"""

from __future__ import annotations

import random
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import ParamSpec

from benchmarks._adversary import Question, slowest
from benchmarks._machines import SHAPES
from benchmarks._odd_machines import PACKAGES, odd_machine, odd_request
from benchmarks._plots import Figure, NotInstalled, legend_beside, write_plot
from benchmarks._tables import table
from benchmarks.peers.kubelet import packed
from kvplace.core.allocator.allocate import place
from kvplace.core.allocator.layout import layout_of
from kvplace.core.cpuset import cpus_of
from kvplace.core.free_resources import Free, free_of
from kvplace.core.ledger import Ledger
from kvplace.core.placement import Placement
from kvplace.core.request import PinningOptions, Policy, Request, Scope, Smt
from kvplace.core.scalars import Bytes, CpuMask
from kvplace.core.topology import Topology

GIB = Bytes(1 << 30)
_Asked = ParamSpec("_Asked")
SIZES = (2, 4, 4, 8, 8, 16, 16, 32)
ASKED = {
    "8, one socket": Request(8),
    "8, one NUMA node": Request(8, PinningOptions(scope=Scope.ONE_NUMA)),
    "8, one NUMA node, 16 GiB": Request(8, PinningOptions(scope=Scope.ONE_NUMA), memory=16 * GIB),
    "8, one L3 group": Request(8, PinningOptions(scope=Scope.ONE_L3)),
    "8, anywhere": Request(8, PinningOptions(scope=Scope.ANY)),
    "8, isolated": Request(8, PinningOptions(smt=Smt.ISOLATE)),
    "48, anywhere": Request(48, PinningOptions(scope=Scope.ANY)),
    "100, anywhere": Request(100, PinningOptions(scope=Scope.ANY)),
    "40, spread over NUMA nodes": Request(40, PinningOptions(scope=Scope.SPREAD_NUMA)),
    "40, one NUMA node (never)": Request(40, PinningOptions(scope=Scope.ONE_NUMA)),
    "32, one NUMA node": Request(32, PinningOptions(scope=Scope.ONE_NUMA)),
    "8, one socket, 4 TiB (never)": Request(8, memory=4096 * GIB),
}
SOUGHT = {
    "anywhere": Request(1, PinningOptions(scope=Scope.ANY)),
    "one socket, memory": Request(1, memory=GIB),
    "anywhere, memory": Request(1, PinningOptions(scope=Scope.ANY), memory=GIB),
    "anywhere, whole cores, memory": Request(1, PinningOptions(scope=Scope.ANY, smt=Smt.REQUIRE), memory=GIB),
    "isolated, spread over sockets, memory": Request(
        1, PinningOptions(scope=Scope.SPREAD_SOCKETS, smt=Smt.ISOLATE), memory=GIB
    ),
    "spread over sockets, memory": Request(1, PinningOptions(scope=Scope.SPREAD_SOCKETS), memory=GIB),
    "spread over NUMA nodes, memory": Request(1, PinningOptions(scope=Scope.SPREAD_NUMA), memory=GIB),
    "sharing, one L3 group": Request(1, PinningOptions(scope=Scope.ONE_L3, policy=Policy.SHARE)),
    "sharing, one socket, memory": Request(1, PinningOptions(policy=Policy.SHARE), memory=GIB),
    "sharing, anywhere": Request(1, PinningOptions(scope=Scope.ANY, policy=Policy.SHARE)),
    "sharing, anywhere, memory": Request(1, PinningOptions(scope=Scope.ANY, policy=Policy.SHARE), memory=GIB),
    "sharing, spread over sockets, memory": Request(
        1, PinningOptions(scope=Scope.SPREAD_SOCKETS, policy=Policy.SHARE), memory=GIB
    ),
    "sharing, spread over NUMA nodes, memory": Request(
        1, PinningOptions(scope=Scope.SPREAD_NUMA, policy=Policy.SHARE), memory=GIB
    ),
    "pools of NUMA nodes, anywhere, memory": Request(
        1, PinningOptions(scope=Scope.ANY, policy=Policy.NUMA), memory=GIB
    ),
}
"""The kinds of requests that are searched for their slowest question."""


def filled(machine: Topology, chance: random.Random) -> int:
    """Free CPUs after VMs on whole cores came and went at random."""
    free = machine.cpus
    running: list[int] = []
    for _ in range(200):
        if running and free.bit_count() < machine.cpus.bit_count() // 2:
            free |= running.pop(chance.randrange(len(running)))
            continue
        taken = place(
            machine, _only(machine, free), Request(chance.choice(SIZES), PinningOptions(scope=Scope.ANY))
        )
        if isinstance(taken, Placement):
            running.append(taken.owned)
            free &= ~taken.owned
    return free


def torn(machine: Topology, chance: random.Random) -> int:
    """Every CPU free or not by a coin."""
    return sum(1 << cpu for cpu in cpus_of(machine.cpus) if chance.random() < 0.5)


def _only(machine: Topology, cpus: int) -> Free:
    return replace(free_of(machine, Ledger()), cpus=CpuMask(cpus), pool=CpuMask(cpus))


def timed(call: Callable[_Asked, object], *asked: _Asked.args, **named: _Asked.kwargs) -> float:
    """Seconds that a call takes."""
    began = time.perf_counter()
    call(*asked, **named)
    return time.perf_counter() - began


def sought(machine: Topology, steps: int) -> str:
    """A table of the slowest questions found, by kind."""
    layout = layout_of(machine)

    def seconds(question: Question) -> float:
        layout.l3_parts.clear()
        layout.part_counts.clear()
        return timed(place, machine, question.free, question.request)

    rows = []
    for name, request in SOUGHT.items():
        found, beginnings = slowest(machine, request, random.Random(name), seconds, steps)
        worst = min(seconds(found) for _ in range(5))
        rows.append(
            [
                name,
                f"{statistics.median(beginnings) * 1e6:.0f}",
                f"{worst * 1e6:.0f}",
                str(found.request.vcpus),
            ]
        )
    return table(["where", "median µs", "worst µs", "its CPUs"], rows)


def odd(quick: bool) -> str:
    """A table of the slowest questions found on odd machines."""
    rows = []
    for name in ("a package to each NUMA node, 9 to 16", *PACKAGES):
        chance = random.Random(name)
        found: list[float] = []
        medians: list[float] = []
        for _ in range(2 if quick else 25):
            few = name not in PACKAGES
            nodes = chance.randint(9, 16) if few else chance.choice((12, 14, 17, 24, 32, 48, 64))
            machine = odd_machine(chance, nodes, "a package to each NUMA node" if few else name)
            seconds = partial(_cpu_seconds, machine)
            slow, beginnings = slowest(machine, odd_request(chance), chance, seconds, 10 if quick else 40)
            found.append(min(seconds(slow) for _ in range(2)))
            medians += beginnings
        rows.append([name, f"{statistics.median(medians) * 1e3:.1f}", f"{max(found) * 1e3:.0f}"])
    return table(["machine", "median ms", "worst ms"], rows)


def _cpu_seconds(machine: Topology, question: Question) -> float:
    layout = layout_of(machine)
    layout.l3_parts.clear()
    layout.part_counts.clear()
    began = time.process_time()
    place(machine, question.free, question.request)
    return time.process_time() - began


def draw(medians: Mapping[str, Sequence[float]], figure: Figure) -> None:
    """Draw the medians, a point for each kind of free set."""
    panel = figure.subplots()
    names = list(ASKED)[::-1]
    looks = (("#2a6f97", "o"), ("#e09f3e", "s"), ("#9e2a2b", "D"))
    for (kind, found), (colour, mark) in zip(medians.items(), looks, strict=True):
        microseconds = [seconds * 1e6 for seconds in found[::-1]]
        panel.plot(
            microseconds,
            range(len(names)),
            mark,
            color=colour,
            fillstyle="none",
            markeredgewidth=1.8,
            label=kind,
        )
    panel.set_yticks(range(len(names)), names)
    panel.set_xscale("log", subs=(2, 5))
    panel.xaxis.set_major_formatter("{x:g}")
    panel.xaxis.set_minor_formatter("{x:g}")
    panel.grid(axis="x", which="minor")
    panel.set_xlabel("median, µs")
    legend_beside(figure, panel, columns=len(medians))


def main(quick: bool, with_odd_machines: bool) -> int:
    """Print a table for each kind of free set."""
    machine = SHAPES["Rome NPS4"]
    chance = random.Random(0)
    number = 20 if quick else 200
    kinds: dict[str, Sequence[int]] = {
        "fresh": [machine.cpus] * number,
        "filled": [filled(machine, chance) for _ in range(number)],
        "torn": [torn(machine, chance) for _ in range(number)],
    }
    medians: dict[str, list[float]] = {kind: [] for kind in kinds}
    for kind, sets in kinds.items():
        frees = [_only(machine, cpus) for cpus in sets]
        rows = []
        for name, request in ASKED.items():
            ours: list[float] = []
            theirs: list[float] = []
            fits = 0
            for free in frees:
                fits += isinstance(place(machine, free, request), Placement)
                ours.append(timed(place, machine, free, request))
                theirs.append(timed(packed, machine, free.cpus, request.vcpus))
            slowest = frees[max(range(len(ours)), key=ours.__getitem__)]
            worst = min(timed(place, machine, slowest, request) for _ in range(5))
            mine, others = statistics.median(ours), statistics.median(theirs)
            medians[kind].append(mine)
            rows.append(
                [
                    name,
                    f"{100 * fits // len(frees)} %",
                    f"{mine * 1e6:.0f}",
                    f"{worst * 1e6:.0f}",
                    f"{others * 1e6:.0f}",
                    f"{mine / others:.2f}",
                ]
            )
        print(f"{kind}:\n")
        heads = ["CPUs, where", "fits", "median µs", "worst µs", "kubelet µs", "ratio"]
        print(table(heads, rows))
        print()
    print(f"sought:\n\n{sought(machine, 30 if quick else 900)}\n")
    if with_odd_machines:
        print(f"odd machines:\n\n{odd(quick)}\n")
    if quick:
        return 0
    try:
        print(
            write_plot(
                "placement", partial(draw, medians), title="One placement, by request and by free CPUs"
            )
        )
    except NotInstalled as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main("--quick" in sys.argv[1:], "--odd" in sys.argv[1:]))
