"""VMs that wait together in a nearly full cluster: how many get cores, one by one and planned together.

    python -m benchmarks.batches [--nodes 40] [--runs 12] [--filled 0.85] [--vms 0]

Filter and Bind are the real ones, on a cluster in memory. Nodes are of four server types and were filled
with VMs that came one after the other. Then a rollout of mixed sizes waits that wants more CPUs than are
free. A simple loop takes the place of kube-scheduler: it asks about one pod after the other, in the order of
their creation, and binds it at once. `one by one` are the same pods without a scheduling shape, so that each
is planned alone. The CPU time is that of Filter and Bind.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import logging
import random
import statistics
import time
from dataclasses import dataclass

from benchmarks._tables import table
from kvplace.core.allocator.allocate import try_place
from kvplace.core.free import free_of
from kvplace.core.ledger import Ledger, LedgerChange, claim_of
from kvplace.core.request import PinningOptions, Request, Scope
from kvplace.core.request_document import PodRequest, write_request
from kvplace.core.scalars import Bytes, NodeName, PodUid
from kvplace.core.topology import Topology
from kvplace.kube.events import EventRecorder
from kvplace.kube.memory_cluster import MemoryCluster
from kvplace.kube.records import NO_SHAPE, PodRecord
from kvplace.machines.shipped import read_machine
from kvplace.nodes.node_cache import running_node_cache
from kvplace.scheduler.extender import Extender
from kvplace.scheduler.extender_protocol import BindingArgs, ExtenderArgs

SERVER_TYPES = ("2x-epyc-9354-nps2", "2x-xeon-6338", "epyc-9654p", "2x-xeon-8480plus-snc4")
MIXES = {
    "small": ((2, 4, 8), Scope.ONE_NUMA),
    "mixed": ((2, 4, 6, 8, 12, 16, 24), Scope.ONE_NUMA),
    "large": ((8, 12, 16, 20, 24, 32), Scope.ONE_NUMA),
    "socket": ((4, 8, 16, 24, 32, 48), Scope.ONE_SOCKET),
}
SHAPE = b"one rollout"


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one rollout."""

    vms: int
    vcpus: int
    writes: int
    cpu_ms: float
    """Per VM that was asked about."""
    slowest_ms: float
    """CPU time of the longest stretch without a turn of the event loop."""


def filled_cluster(nodes: int, share: float, chance: random.Random) -> dict[str, tuple[Topology, Ledger]]:
    """Let VMs come and go until so much of every node is taken."""
    types = [read_machine(name) for name in SERVER_TYPES]
    made: dict[str, tuple[Topology, Ledger]] = {}
    for number in range(nodes):
        machine, ledger = types[number % len(types)], Ledger()
        wanted = int(machine.allocatable.bit_count() * min(1.0, chance.gauss(share, 0.05)))
        vms = 0
        while ledger.owned.bit_count() < wanted:
            vms += 1
            request = _request(chance.choice((2, 2, 4, 4, 8, 8, 16)), Scope.ONE_NUMA)
            placement = try_place(machine, free_of(machine, ledger), request)
            if placement is None:
                break
            uid = PodUid(f"running-{number}-{vms}")
            claim = claim_of(uid, placement, since="2026-01-01T00:00:00Z")
            ledger = ledger.after(LedgerChange(claims=(claim,)))
            if chance.random() < 0.35:
                ledger = ledger.after(LedgerChange(releases=(chance.choice(sorted(ledger.claims)),)))
        made[f"node-{number:03}"] = (machine, ledger)
    return made


def rollout(mix: str, free: int, chance: random.Random) -> list[Request]:
    """Ask for a fifth more CPUs than are free."""
    sizes, scope = MIXES[mix]
    asked: list[Request] = []
    while sum(request.vcpus for request in asked) < free * 1.2:
        asked.append(_request(chance.choice(sizes), scope))
    return asked


def _request(vcpus: int, scope: Scope) -> Request:
    return Request(vcpus, PinningOptions(scope=scope), Bytes(0), {}, 0)


async def play(nodes: dict[str, tuple[Topology, Ledger]], asked: list[Request], *, together: bool) -> Outcome:
    """Let kube-scheduler ask about every pod once and bind those that fit."""
    cluster = MemoryCluster()
    for name, (machine, ledger) in nodes.items():
        cluster.create_node(name, topology=machine)
        record = await cluster.create_ledger(NodeName(name))
        await cluster.write_ledger(record, LedgerChange(claims=tuple(ledger.claims.values())))
    pods = [
        cluster.create_pod(
            f"vm-{number:04}",
            request=write_request(PodRequest(request)),
            shape=SHAPE if together else NO_SHAPE,
        )
        for number, request in enumerate(asked)
    ]
    async with running_node_cache(cluster) as cache:
        extender = Extender(cluster, cache, EventRecorder(cluster))
        gc.collect()
        gc.freeze()  # as `serve` does once it has read the cluster
        watch = asyncio.create_task(longest_stretch())
        await asyncio.sleep(0)
        began = time.process_time()
        bound = [await _schedule(extender, pod, list(nodes)) for pod in pods]
        used = time.process_time() - began
        watch.cancel()
        slowest = (await asyncio.gather(watch, return_exceptions=True))[0]
        writes = cache.ledgers.writes
    placed = [request for request, is_bound in zip(asked, bound, strict=True) if is_bound]
    return Outcome(
        len(placed),
        sum(request.vcpus for request in placed),
        writes,
        used * 1000 / len(pods),
        slowest * 1000 if isinstance(slowest, float) else 0.0,
    )


async def longest_stretch() -> float:
    """Wait until cancelled; return the CPU time of the longest stretch without a turn, in seconds."""
    longest, last = 0.0, time.process_time()
    try:
        while True:
            await asyncio.sleep(0)
            now = time.process_time()
            longest, last = max(longest, now - last), now
    except asyncio.CancelledError:
        return longest


async def _schedule(extender: Extender, pod: PodRecord, nodes: list[str]) -> bool:
    found = await extender.filter(ExtenderArgs(pod, [NodeName(node) for node in nodes]))
    if not found.names:
        return False
    args = BindingArgs(pod.name, pod.namespace, pod.uid, found.names[0])
    return not (await extender.bind(args)).error


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--nodes", type=int, default=40)
    parser.add_argument("--runs", type=int, default=12)
    parser.add_argument("--filled", type=float, default=0.85)
    parser.add_argument("--vms", type=int, default=0, help="at most so many in a rollout; 0: as it comes")
    given = parser.parse_args()
    logging.disable(logging.WARNING)
    rows = []
    for mix in MIXES:
        found: dict[bool, list[Outcome]] = {False: [], True: []}
        for run in range(given.runs):
            chance = random.Random(run)
            nodes = filled_cluster(given.nodes, given.filled, chance)
            free = sum(
                (machine.allocatable & ~ledger.owned).bit_count() for machine, ledger in nodes.values()
            )
            asked = rollout(mix, free, chance)[: given.vms or None]
            for together, outcomes in found.items():
                outcomes.append(asyncio.run(play(nodes, asked, together=together)))
        for together, outcomes in found.items():
            vms = sum(outcome.vms for outcome in outcomes)
            more = vms - sum(outcome.vms for outcome in found[False])
            rows.append(
                [
                    mix if not together else "",
                    "together" if together else "one by one",
                    str(vms),
                    f"{more:+}" if together else "",
                    str(sum(outcome.vcpus for outcome in outcomes)),
                    f"{sum(outcome.writes for outcome in outcomes) / vms:.2f}",
                    f"{statistics.mean(outcome.cpu_ms for outcome in outcomes):.2f}",
                    f"{max(outcome.slowest_ms for outcome in outcomes):.0f}",
                ]
            )
    heads = [
        "mix",
        "",
        "VMs",
        "more",
        "vCPUs",
        "ledger writes per VM",
        "CPU-ms per VM",
        "longest stretch, ms",
    ]
    print(f"{given.nodes} nodes, {given.filled:.0%} full, {given.runs} rollouts of each mix\n")
    print(table(heads, rows))


if __name__ == "__main__":
    main()
