"""Time of the first plan of 64 pods over 5,000 nodes, and the longest time without other work.

    python -m benchmarks.joint_plan [--nodes 5000] [--runs 5]

All 64 wait when kube-scheduler calls Filter for the first of them. `serve` has just begun: it has read the
cluster and answered no call. Filter is the real one, on a cluster in memory that takes the nominations of
the other pods. Almost no two nodes are alike: they are of all machine types and were filled with VMs of 2 to
16 CPUs, each to another degree (*mixed*) or until about a tenth of its CPUs is left (*nearly full*).

* *whole*: from the call to its answer.
* *stretch*: the longest time without a turn of the event loop.
* *collection*: the longest garbage collection, which is part of a stretch.

Milliseconds of CPU, which depend little on other work of the machine: medians of the runs, and in brackets
the longest.
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
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from typing import TypeAlias

from benchmarks._filled_cluster import longest_stretch
from benchmarks._tables import table
from benchmarks.decision import filled
from kvplace.core.ledger import Claim, LedgerChange
from kvplace.core.request import PinningOptions, Request, Scope
from kvplace.core.request_json import PodRequest, write_request
from kvplace.core.scalars import Bytes, NodeName
from kvplace.kube.events import EventRecorder
from kvplace.kube.memory_cluster import MemoryCluster
from kvplace.kube.object_records import PodRecord
from kvplace.machines.server_types import machine_names, read_machine
from kvplace.nodes.node_cache import running_node_cache
from kvplace.scheduler.extender import Extender
from kvplace.scheduler.extender_protocol import ExtenderArgs
from kvplace.scheduler.joint_plan import TOGETHER

SIZES = {"8 CPUs": (8,), "2 to 16 CPUs": (2, 4, 8, 16)}
SHAPE = b"one rollout"
NEARLY_FULL = (0.85, 0.95)
"""Shares of the CPUs that are owned on nearly full nodes."""

Nodes: TypeAlias = Mapping[NodeName, tuple[str, tuple[Claim, ...]]]
"""The machine type of each, and the claims there."""


@dataclass(frozen=True, slots=True)
class Times:
    """CPU seconds of one plan."""

    whole: float
    stretch: float
    collection: float


class Collections:
    """Times the garbage collections from now on."""

    def __init__(self) -> None:
        self.longest = 0.0
        self._began = 0.0
        gc.callbacks.append(self._called)

    def _called(self, phase: str, _: object) -> None:
        now = time.thread_time()
        if phase == "start":
            self._began = now
        else:
            self.longest = max(self.longest, now - self._began)

    def end(self) -> None:
        gc.callbacks.remove(self._called)


def different_nodes(count: int, chance: random.Random, *, full: bool) -> Nodes:
    """Fill machines, and let every state on the way be a node."""
    machines = {name: read_machine(name) for name in machine_names()}
    found: list[tuple[str, tuple[Claim, ...]]] = []
    while len(found) < count:
        name, topology = chance.choice(list(machines.items()))
        every = topology.allocatable.bit_count()
        for ledger in filled(topology, chance):
            share = ledger.owned.bit_count() / every
            if not full or NEARLY_FULL[0] <= share <= NEARLY_FULL[1]:
                found.append((name, tuple(ledger.claims.values())))
    return {NodeName(f"node-{number:05}"): one for number, one in enumerate(found[:count])}


async def cluster_of(nodes: Nodes) -> MemoryCluster:
    """Make a cluster of nodes with these claims."""
    cluster = MemoryCluster()
    machines = {name: read_machine(name) for name in machine_names()}
    for name, (machine, claims) in nodes.items():
        cluster.create_node(name, topology=machines[machine])
        record = await cluster.create_ledger(name)
        await cluster.write_ledger(record, LedgerChange(claims=claims))
    return cluster


def rollout(cluster: MemoryCluster, sizes: Sequence[int]) -> list[PodRecord]:
    """Create the pods."""
    found = []
    for number in range(TOGETHER):
        vcpus = sizes[number % len(sizes)]
        request = Request(vcpus, PinningOptions(scope=Scope.ONE_NUMA), memory=Bytes(vcpus << 31))
        asking = write_request(PodRequest(request))
        found.append(cluster.create_pod(f"vm-{number}", request=asking, shape=SHAPE))
    return found


async def planned(cluster: MemoryCluster, pods: Sequence[PodRecord], nodes: list[NodeName]) -> Times:
    """Let kube-scheduler ask about the first pod."""
    async with running_node_cache(cluster) as cache:
        extender = Extender(cluster, cache, EventRecorder(cluster))
        nominating = asyncio.create_task(extender.nominations.run())
        await extender.describe_nodes()
        gc.freeze()  # as `serve` does once it has read the cluster
        collections = Collections()
        watch = asyncio.create_task(longest_stretch())
        await asyncio.sleep(0)
        began = time.process_time()
        answer = await extender.filter(ExtenderArgs(pods[0], nodes))
        whole = time.process_time() - began
        watch.cancel()
        stretch = await watch
        collections.end()
        assert answer.names
        assert extender.pending.number_held == len(pods)
        nominating.cancel()
    return Times(whole, stretch, collections.longest)


async def in_a_new_process(nodes: Nodes, asked: str) -> Times:
    """Read the cluster and plan."""
    cluster = await cluster_of(nodes)
    return await planned(cluster, rollout(cluster, SIZES[asked]), list(nodes))


def measured(nodes: Nodes, asked: str, runs: int) -> list[str]:
    """Times in milliseconds, each of a process that has planned nothing before."""
    times = []
    for _ in range(runs):
        with ProcessPoolExecutor(1, get_context("spawn")) as process:
            times.append(process.submit(_measure, nodes, asked).result())
    return [
        _median_and_longest([one.whole for one in times]),
        _median_and_longest([one.stretch for one in times]),
        _median_and_longest([one.collection for one in times]),
    ]


def _measure(nodes: Nodes, asked: str) -> Times:
    logging.disable(logging.WARNING)
    return asyncio.run(in_a_new_process(nodes, asked))


def _median_and_longest(seconds: Sequence[float]) -> str:
    return f"{statistics.median(seconds) * 1e3:.1f} ({max(seconds) * 1e3:.1f})"


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--nodes", type=int, default=5000)
    parser.add_argument("--runs", type=int, default=5)
    given = parser.parse_args()
    rows = []
    for kind in ("mixed", "nearly full"):
        nodes = different_nodes(given.nodes, random.Random(1), full=kind == "nearly full")
        rows += [[kind, asked, *measured(nodes, asked, given.runs)] for asked in SIZES]
    print(f"{TOGETHER} pods, {given.nodes} nodes\n")
    print(table(["nodes", "pods", "whole", "stretch", "collection"], rows))


if __name__ == "__main__":
    main()
