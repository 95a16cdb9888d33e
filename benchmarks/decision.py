"""A decision is everything between a pod's request and its node: what each node could give it (a placement
for every node that changed since the last pod of that shape), and the choice among them. Nodes of mixed
machine types were filled with VMs of 2 to 16 CPUs to a random degree, each to another one, or all alike to
the same. Fresh: no node was ever asked. Warm: nothing changed since the last pod. One changed: one node
did, as after every bound pod. Medians of 30 decisions (fresh: 3) with strategy pack.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable

from benchmarks._tables import table
from kvplace.core.allocator.allocate import place
from kvplace.core.cluster.node_choice import Candidate, Strategy, best_candidate
from kvplace.core.free import Free, free_of
from kvplace.core.ledger import Ledger, LedgerChange, claim_of
from kvplace.core.placement import Placement
from kvplace.core.request import PinningOptions, Request, Scope
from kvplace.core.scalars import Bytes, NodeName, PodUid
from kvplace.core.topology import Topology
from kvplace.machines.shipped import machine_names, read_machine
from kvplace.nodes.node_machine import NodeMachine, NodeSnapshot
from kvplace.scheduler.fit_table import FitTable

GIB = Bytes(1 << 30)
SIZES = (2, 4, 4, 8, 8, 16)
ASKED = {
    "8 CPUs on one NUMA node": Request(8, PinningOptions(scope=Scope.ONE_NUMA), memory=16 * GIB),
    "64 CPUs anywhere": Request(64, PinningOptions(scope=Scope.ANY), memory=128 * GIB),
    "8 CPUs, nowhere enough memory": Request(8, PinningOptions(scope=Scope.ONE_NUMA), memory=4096 * GIB),
}


class Nodes:
    """Nodes in some state, and the table that remembers what they could give."""

    def __init__(self, states: dict[NodeName, NodeSnapshot]) -> None:
        self.states = states
        self.table = FitTable(lambda name: self.states[name])

    def decide(self, request: Request) -> None:
        answers = self.table.answers(self.states, request)
        best_candidate((a for a in answers.values() if isinstance(a, Candidate)), Strategy.PACK)

    def change(self, name: NodeName, free: Free) -> None:
        self.states[name] = NodeSnapshot(self.states[name].machine, free)
        self.table.node_changed(name)


def filled(topology: Topology, chance: random.Random) -> list[Free]:
    """What is left on a machine after each of the VMs that fill it, a few of which ended again."""
    ledger, found = Ledger(), []
    for number in range(200):
        free = free_of(topology, ledger)
        found.append(free)
        size = chance.choice(SIZES)
        placed = place(topology, free, Request(size, memory=size * 2 * GIB))
        if not isinstance(placed, Placement):
            break
        ledger = ledger.after(LedgerChange(claims=(claim_of(PodUid(f"{number}"), placed),)))
        if number % 3 == 2:
            ledger = ledger.after(LedgerChange(releases=(chance.choice(sorted(ledger.claims)),)))
    return found


def different(count: int, chance: random.Random) -> Nodes:
    """Nodes of which hardly two are alike."""
    states: dict[NodeName, NodeSnapshot] = {}
    machines = [read_machine(name) for name in machine_names()]
    while len(states) < count:
        topology = chance.choice(machines)
        machine = NodeMachine(topology, topology.allocatable)
        for free in filled(topology, chance)[2:]:
            states[NodeName(f"node-{len(states):05d}")] = NodeSnapshot(machine, free)
    return Nodes(dict(list(states.items())[:count]))


def alike(count: int, chance: random.Random) -> Nodes:
    """Nodes of one type in one state."""
    topology = read_machine("2x-epyc-7763-nps4")
    frees = filled(topology, chance)
    state = NodeSnapshot(NodeMachine(topology, topology.allocatable), frees[len(frees) // 2])
    return Nodes({NodeName(f"node-{number:05d}"): state for number in range(count)})


def main() -> None:
    rows = []
    for count in (1000, 5000):
        for kind, make in (("different", different), ("alike", alike)):
            nodes = make(count, random.Random(count))
            for asked, request in ASKED.items():
                rows.append([f"{count} {kind}", asked, *measured(nodes, request)])
    print(table(["nodes", "request", "fresh", "warm", "one changed"], rows))


def measured(nodes: Nodes, request: Request) -> list[str]:
    """Times of decisions in milliseconds: fresh, warm, one changed."""
    fresh = []
    for _ in range(3):
        nodes = Nodes(nodes.states)
        fresh.append(seconds(lambda: nodes.decide(request)))  # noqa: B023 - called at once
    warm = [seconds(lambda: nodes.decide(request)) for _ in range(30)]
    chance = random.Random(1)
    changed = []
    for _ in range(30):
        name, other = chance.sample(sorted(nodes.states), 2)
        state, source = nodes.states[name], nodes.states[other]
        if source.machine.topology is state.machine.topology:
            nodes.change(name, source.free)
        else:
            nodes.change(name, Free(state.free.cpus & ~(1 << chance.randrange(64)), state.free.pool))
        changed.append(seconds(lambda: nodes.decide(request)))
    return [f"{statistics.median(times) * 1e3:.2f} ms" for times in (fresh, warm, changed)]


def seconds(call: Callable[[], None]) -> float:
    """How long a call takes."""
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


if __name__ == "__main__":
    main()
