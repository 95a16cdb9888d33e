"""Victims for a VM of high priority that fits nowhere, and the time of the search for them.

    python -m benchmarks.preemption [--runs 6] [--vms 3] [--nodes 20 100 500]

Filter and Preempt are the real ones, on a cluster in memory. Nodes are of four server types and were filled
with VMs of four low priorities until none fitted; some of the small ones have ended. kube-scheduler is
simulated: on up to 100 nodes with too few CPUs it removes all pods of lower priority, and puts back those
without which the count of CPUs is sufficient, the most important first.

* *by count*: for how many VMs the victims on the best node by this count would have left cores that fit the
  VM's scope, and how many victims there are. For the other VMs the evictions would have been useless.
* *by cores*: for how many VMs kvplace names victims; their cores always suffice. For the other VMs nothing
  is evicted.

Milliseconds of CPU per call: the median, and the longest in brackets. *stretch* is the longest time without
other work.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import logging
import random
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from benchmarks._filled_cluster import filled_cluster, longest_stretch
from benchmarks._plots import Figure, legend_beside, pairs_of_bars, print_plot
from benchmarks._tables import table
from kvplace.core.allocator.allocate import try_place
from kvplace.core.cluster.victims import OccupiedMachine, Tenant, by_importance, eviction_cost
from kvplace.core.free_resources import free_of
from kvplace.core.ledger import Claim, Ledger, LedgerChange, claim_of
from kvplace.core.request import PinningOptions, Request, Scope
from kvplace.core.request_json import PodRequest, write_request
from kvplace.core.scalars import NodeName, PodUid
from kvplace.core.topology import Topology
from kvplace.kube.events import EventRecorder
from kvplace.kube.memory_cluster import MemoryCluster
from kvplace.kube.object_records import PodRecord
from kvplace.nodes.node_cache import running_node_cache
from kvplace.scheduler.extender import Extender
from kvplace.scheduler.extender_protocol import ExtenderArgs, NodeVictims, PreemptionArgs

FILLED = 0.9
"""By VMs of all sizes; the rest by small ones; some have ended."""
SMALL = Request(2, PinningOptions(scope=Scope.ONE_NUMA))
ENDED = 0.3
HIGH = 1000
MOST_SENT = 100
"""Nodes that kube-scheduler checks for victims, at most, in clusters of this size."""
ASKED = {
    "16 CPUs on one NUMA node": Request(16, PinningOptions(scope=Scope.ONE_NUMA)),
    "24 CPUs on one NUMA node": Request(24, PinningOptions(scope=Scope.ONE_NUMA)),
    "48 CPUs on one socket": Request(48, PinningOptions(scope=Scope.ONE_SOCKET)),
    "64 CPUs anywhere": Request(64, PinningOptions(scope=Scope.ANY)),
}
States = Mapping[str, tuple[Topology, Ledger]]


@dataclass
class Outcome:
    """The outcome for VMs of one kind."""

    asked: int = 0
    """VMs that no node can hold while kube-scheduler finds pods to evict."""
    useful: int = 0
    by_count: list[int] = field(default_factory=list)
    by_cores: list[int] = field(default_factory=list)
    """Numbers of victims."""
    seconds: list[float] = field(default_factory=list)
    stretch: float = 0.0


def full_cluster(nodes: int, chance: random.Random) -> States:
    """Fill nodes until nothing fits, and let some small VMs end."""
    full: dict[str, tuple[Topology, Ledger]] = {}
    for name, (topology, filled) in filled_cluster(nodes, FILLED, chance).items():
        small: list[Claim] = []
        ledger = filled
        while (placement := try_place(topology, free_of(topology, ledger), SMALL)) is not None:
            small.append(claim_of(PodUid(f"small-{name}-{len(small)}"), placement))
            ledger = ledger.after(LedgerChange(claims=(small[-1],)))
        ended = tuple(claim.uid for claim in small if chance.random() < ENDED)
        full[name] = (topology, ledger.after(LedgerChange(releases=ended)))
    return full


class KubeScheduler:
    """Which victims kube-scheduler finds: it counts CPUs, and does not know which ones."""

    def __init__(self, states: States, chance: random.Random) -> None:
        self._states = states
        self.tenants = {
            name: [
                Tenant(uid, chance.randrange(4), resources={"cpu": claim.cpus.bit_count() * 1000})
                for uid, claim in ledger.claims.items()
            ]
            for name, (_, ledger) in states.items()
        }

    def victims(self, node: str, request: Request) -> tuple[Tenant, ...]:
        """Return the pods that it would evict on a node; none where the count suffices, or never does."""
        machine, ledger = self._states[node]
        free = (machine.allocatable & ~ledger.owned).bit_count() * 1000 - request.vcpus * 1000
        if free >= 0:
            return ()
        free += sum(one.resources["cpu"] for one in self.tenants[node])
        evicted = []
        for one in by_importance(self.tenants[node]):
            if free >= one.resources["cpu"]:
                free -= one.resources["cpu"]
            else:
                evicted.append(one)
        return tuple(evicted) if free >= 0 else ()

    def help(self, node: str, victims: Sequence[Tenant], request: Request) -> bool:
        """Return whether the cores of victims make a VM fit."""
        topology, ledger = self._states[node]
        free = OccupiedMachine(topology, ledger).free_without(one.uid for one in victims)
        return try_place(topology, free, request) is not None


async def play(states: States, request: Request, vms: int, chance: random.Random, outcome: Outcome) -> None:
    """Ask for one VM after the other, in the same cluster: no client is evicted."""
    scheduler, cluster = KubeScheduler(states, chance), MemoryCluster()
    for name, (topology, ledger) in states.items():
        cluster.create_node(name, topology=topology)
        record = await cluster.create_ledger(NodeName(name))
        await cluster.write_ledger(record, LedgerChange(claims=tuple(ledger.claims.values())))
        for one in scheduler.tenants[name]:
            asked = write_request(PodRequest(Request(2)))
            cluster.create_pod(
                one.uid, uid=one.uid, request=asked, node=name, priority=one.priority, resources=one.resources
            )
    cpu = {"cpu": request.vcpus * 1000}
    pods = [
        cluster.create_pod(
            f"vm-{number}", request=write_request(PodRequest(request)), priority=HIGH, resources=cpu
        )
        for number in range(vms)
    ]
    async with running_node_cache(cluster) as cache:
        extender = Extender(cluster, cache, EventRecorder(cluster))
        gc.collect()
        gc.freeze()  # as `serve` does once it has read the cluster
        for pod in pods:
            shuffled = chance.sample(list(states), len(states))
            for node in await _ask(extender, scheduler, pod, request, shuffled, outcome):
                await cache.ledgers.change(node, partial(_given_up, pod))


def _given_up(pod: PodRecord, _ledger: Ledger) -> tuple[LedgerChange, None]:
    """Give up what is reserved for a VM."""
    return LedgerChange(releases=(pod.uid,)), None


async def _ask(
    extender: Extender,
    scheduler: KubeScheduler,
    pod: PodRecord,
    request: Request,
    nodes: list[str],
    outcome: Outcome,
) -> tuple[NodeName, ...]:
    """Ask for one VM; returns the nodes in the answer."""
    if (await extender.filter(ExtenderArgs(pod, [NodeName(node) for node in nodes]))).names:
        return ()
    found = {node: victims for node in nodes if (victims := scheduler.victims(node, request))}
    sent = dict(list(found.items())[:MOST_SENT])
    if not sent:
        return ()
    outcome.asked += 1
    node = min(sent, key=lambda name: (eviction_cost(sent[name], 0), name))
    outcome.by_count.append(len(sent[node]))
    outcome.useful += scheduler.help(node, sent[node], request)
    args = PreemptionArgs(
        pod,
        pod.resources,
        depends_on_pods=False,
        never=False,
        victims={
            NodeName(name): NodeVictims(tuple(PodUid(one.uid) for one in victims), 0)
            for name, victims in sent.items()
        },
    )
    watch = asyncio.create_task(longest_stretch())
    await asyncio.sleep(0)
    began = time.process_time()
    answer = await extender.preempt(args)
    outcome.seconds.append(time.process_time() - began)
    watch.cancel()
    outcome.stretch = max(outcome.stretch, await watch)
    outcome.by_cores += [len(victims.uids) for victims in answer.values()]
    return tuple(answer)


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--runs", type=int, default=6, help="clusters")
    parser.add_argument("--vms", type=int, default=3, help="VMs of each kind in each of them")
    parser.add_argument("--nodes", type=int, nargs="+", default=[20, 100, 500])
    given = parser.parse_args()
    logging.disable(logging.WARNING)
    rows, shares = [], dict[str, tuple[float, float]]()
    for count in given.nodes:
        outcomes = {name: Outcome() for name in ASKED}
        for run in range(given.runs):
            states = full_cluster(count, random.Random(run))
            for name, request in ASKED.items():
                asyncio.run(play(states, request, given.vms, random.Random(run), outcomes[name]))
        rows += [[f"{count} nodes, {name}", *_cells(outcome)] for name, outcome in outcomes.items()]
        shares |= {
            f"{count} nodes, {name}": (100 * one.useful / one.asked, 100 * len(one.by_cores) / one.asked)
            for name, one in outcomes.items()
            if one.asked
        }
    print(table(["VM", "asked", "by count", "by cores", "ms per call", "stretch"], rows))
    print_plot("preemption", partial(draw, shares), title="Evictions that make a VM fit")


def draw(shares: Mapping[str, tuple[float, float]], figure: Figure) -> None:
    """Draw for how many VMs the victims make room, two bars for each kind of VM."""
    panel = figure.subplots()
    labels = ("victims by the number of CPUs", "victims by kvplace")
    pairs_of_bars(panel, list(shares), list(shares.values()), labels)
    panel.set_xlabel("VMs that fit after the evictions, %")
    legend_beside(figure, panel, columns=2)


def _cells(outcome: Outcome) -> list[str]:
    if not outcome.by_cores:
        return [f"{outcome.asked}", "", "", "", ""]
    return [
        f"{outcome.asked}",
        f"{outcome.useful / outcome.asked:.0%}, {statistics.mean(outcome.by_count):.1f} victims",
        f"{len(outcome.by_cores) / outcome.asked:.0%}, {statistics.mean(outcome.by_cores):.1f} victims",
        f"{statistics.median(outcome.seconds) * 1e3:.0f} ({max(outcome.seconds) * 1e3:.0f})",
        f"{outcome.stretch * 1e3:.0f}",
    ]


if __name__ == "__main__":
    main()
