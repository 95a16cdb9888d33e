"""Time of one decision over all nodes, from the pod's request to its node.

The call is read, the best of all nodes is chosen (or the reason why none can hold the VM, as with the last
four requests), and the answer is written. TLS and HTTP are not part of it. Nodes are of mixed machine types
and were filled with VMs of 2 to 16 CPUs: each to another degree (*different*), until almost no other VM fits
(*nearly full*), or all equally (*alike*). The strategy is pack.

* *new*: the first VM of its kind; the nodes are known.
* *stretch*: the longest time without other work.
* *warm*: nothing has changed since the last VM.
* *one changed*: one node has changed, as after every bound pod.

Milliseconds of CPU, which depend little on other work of the machine: medians (new: of 5), and in brackets
the 99th of 100.
"""

from __future__ import annotations

import gc
import random
import statistics
import time
from dataclasses import dataclass, replace

import msgspec

from benchmarks._tables import table
from kvplace.core.allocator.allocate import place
from kvplace.core.cluster.node_choice import Strategy
from kvplace.core.free_resources import Free, free_of
from kvplace.core.ledger import Ledger, LedgerChange, claim_of
from kvplace.core.placement import Placement
from kvplace.core.request import PinningOptions, Policy, Request, Scope, Smt
from kvplace.core.scalars import Bytes, CpuMask, NodeName, PodUid
from kvplace.core.topology import Topology
from kvplace.machines.server_types import machine_names, read_machine
from kvplace.nodes.node_machine import NodeMachine, NodeSnapshot
from kvplace.scheduler.extender_protocol import FilterResult, read_extender_args
from kvplace.scheduler.fit_table import FitTable

encode = msgspec.json.Encoder().encode
GIB = Bytes(1 << 30)
SIZES = (2, 4, 4, 8, 8, 16)
ASKED = {
    "8 CPUs on one NUMA node": Request(8, PinningOptions(scope=Scope.ONE_NUMA), memory=16 * GIB),
    "64 CPUs anywhere": Request(64, PinningOptions(scope=Scope.ANY), memory=128 * GIB),
    "4 whole cores in one L3": Request(
        8, PinningOptions(scope=Scope.ONE_L3, smt=Smt.REQUIRE), memory=16 * GIB
    ),
    "8 shared CPUs": Request(8, PinningOptions(policy=Policy.SHARE), memory=16 * GIB),
    "600 CPUs on one NUMA node": Request(600, PinningOptions(scope=Scope.ONE_NUMA), memory=16 * GIB),
    "300 whole cores": Request(300, PinningOptions(scope=Scope.ANY, smt=Smt.ISOLATE), memory=16 * GIB),
    "8 CPUs with 1 PiB": Request(8, memory=Bytes(1 << 50)),
    "8 CPUs with 500 huge pages": Request(8, memory=Bytes(500 * GIB), huge_pages={GIB: 500}),
}
OTHER = Request(1, PinningOptions(scope=Scope.ANY))
"""An earlier request, so that the states of the nodes are known."""


@dataclass
class Times:
    """CPU seconds of a decision, and of its longest slice."""

    whole: float = 0.0
    stretch: float = 0.0


class Nodes:
    """Nodes in some state, and the table that remembers what they could give."""

    def __init__(self, states: dict[NodeName, NodeSnapshot]) -> None:
        self.states = states
        self.names = list(states)
        self.body = encode({"Pod": {"metadata": {"uid": "u", "name": "vm"}}, "NodeNames": self.names})
        self.table = FitTable(lambda name: self.states[name], Strategy.PACK)

    async def _decide(self, request: Request) -> None:
        args = read_extender_args(self.body)
        best = await self.table.best(args.names, request)
        if best is not None:
            encode(FilterResult.passing(args, [best.node]))
            return
        groups = await self.table.refusals(args.names, request)
        assert groups is not None
        assert groups.summary
        encode(FilterResult.rejecting(args, groups.texts))

    def decide(self, request: Request) -> Times:
        """Decide slice by slice, as a loop would that has nothing else to do."""
        times = Times()
        work = self._decide(request)
        while True:
            began = time.thread_time()
            try:
                work.send(None)
            except StopIteration:
                return times
            finally:
                took = time.thread_time() - began
                times.whole += took
                times.stretch = max(times.stretch, took)

    def change(self, name: NodeName, free: Free) -> None:
        self.states[name] = NodeSnapshot(self.states[name].machine, free)
        self.table.node_changed(name)


def filled(topology: Topology, chance: random.Random) -> list[Ledger]:
    """The ledger of a machine after each of the VMs that fill it; a few have ended again."""
    ledger, found = Ledger(), []
    for number in range(200):
        found.append(ledger)
        size = chance.choice(SIZES)
        placed = place(topology, free_of(topology, ledger), Request(size, memory=size * 2 * GIB))
        if not isinstance(placed, Placement):
            break
        ledger = ledger.after(LedgerChange(claims=(claim_of(PodUid(f"{number}"), placed),)))
        if number % 3 == 2:
            ledger = ledger.after(LedgerChange(releases=(chance.choice(sorted(ledger.claims)),)))
    return found


def different(count: int, chance: random.Random, *, full: bool = False) -> Nodes:
    """Nodes; hardly two of them are alike."""
    states: dict[NodeName, NodeSnapshot] = {}
    machines = [read_machine(name) for name in machine_names()]
    while len(states) < count:
        topology = chance.choice(machines)
        machine = NodeMachine(topology)
        found = filled(topology, chance)
        for ledger in found[-len(found) // 10 :] if full else found[2:]:
            states[NodeName(f"node-{len(states):05d}")] = NodeSnapshot(machine, machine.free(ledger))
    return Nodes(dict(list(states.items())[:count]))


def nearly_full(count: int, chance: random.Random) -> Nodes:
    """Different nodes with the last VMs that they can hold."""
    return different(count, chance, full=True)


def alike(count: int, chance: random.Random) -> Nodes:
    """Nodes of one type in one state."""
    topology = read_machine("2x-epyc-7763-nps4")
    ledgers = filled(topology, chance)
    machine = NodeMachine(topology)
    state = NodeSnapshot(machine, machine.free(ledgers[len(ledgers) // 2]))
    return Nodes({NodeName(f"node-{number:05d}"): state for number in range(count)})


COUNTS = (1000, 5000)
KINDS = {"different": different, "nearly full": nearly_full, "alike": alike}


def main() -> None:
    rows = []
    for count in COUNTS:
        for kind, make in KINDS.items():
            nodes = make(count, random.Random(count))
            for asked, request in ASKED.items():
                rows.append([f"{count} {kind}", asked, *measured(nodes, request)])
    print(table(["nodes", "request", "new", "stretch", "warm", "one changed"], rows))


def measured(nodes: Nodes, request: Request) -> list[str]:
    """Times of decisions in milliseconds: of a new kind of VM, its longest stretch, warm, one changed."""
    new = []
    for _ in range(5):
        nodes = Nodes(nodes.states)
        nodes.decide(OTHER)
        gc.collect()
        new.append(nodes.decide(request))
    warm = [nodes.decide(request).whole for _ in range(100)]
    chance = random.Random(1)
    changed = []
    for _ in range(100):
        name, other = chance.sample(nodes.names, 2)
        state, source = nodes.states[name], nodes.states[other]
        if source.machine.topology is state.machine.topology:
            nodes.change(name, source.free)
        else:
            left = CpuMask(state.free.cpus & ~(1 << chance.randrange(64)))
            nodes.change(name, replace(state.free, cpus=left))
        changed.append(nodes.decide(request).whole)
    return [
        f"{statistics.median(times.whole for times in new) * 1e3:.1f}",
        f"{max(times.stretch for times in new) * 1e3:.1f}",
        *[
            f"{statistics.median(times) * 1e3:.2f} ({sorted(times)[98] * 1e3:.2f})"
            for times in (warm, changed)
        ],
    ]


if __name__ == "__main__":
    main()
