"""Replicas of kvplace on a cluster in memory: what a process holds, without its listeners."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime

from kvplace.controller.controller import Controller, ControllerSettings
from kvplace.core.annotations import REQUEST
from kvplace.core.cpuset import mask_of
from kvplace.core.request import Request, Scope
from kvplace.core.request_document import PodRequest, write_request
from kvplace.core.topology import NumaNode, Package, Topology
from kvplace.kube.memory_cluster import MemoryCluster
from kvplace.kube.records import PodRecord
from kvplace.scheduler.extender import Extender, ExtenderSettings
from kvplace.scheduler.node_book import NodeBook
from kvplace.scheduler.wire import BindingArgs, ExtenderArgs, FilterResult, Metadata, WirePod

EIGHT = Topology(
    packages=(Package(0, mask_of(range(8))),),
    numa_nodes=(NumaNode(0, mask_of(range(8)), 0),),
    l3_groups=(mask_of(range(8)),),
    cores=tuple(1 << cpu for cpu in range(8)),
)
"""One socket of eight cores without siblings."""

QUICK = ControllerSettings(spread_s=0.0, confirm_s=0.0, round_s=0.05, patience_s=60.0, wake_pause_s=0.0)


@dataclass
class Replica:
    """One process's view of the cluster and its parts."""

    cluster: MemoryCluster
    book: NodeBook
    extender: Extender
    controller: Controller

    async def filter(self, pod: PodRecord) -> FilterResult:
        """Ask for nodes as kube-scheduler does."""
        metadata = Metadata(pod.name, pod.namespace, pod.uid, {REQUEST: pod.request})
        return await self.extender.filter(ExtenderArgs(WirePod(metadata), list(self.book.nodes.records)))

    async def bind(self, pod: PodRecord, node: str) -> str:
        """Bind as kube-scheduler does; answers the error, empty when bound."""
        return (await self.extender.bind(BindingArgs(pod.name, pod.namespace, pod.uid, node))).error

    async def until(self, holds: object) -> None:
        """Wait until something comes true, letting everybody work."""
        assert callable(holds)
        async with asyncio.timeout(10):
            while not holds():  # noqa: ASYNC110
                await asyncio.sleep(0.005)  # whatever it waits for has no event of its own

    def claims(self, node: str = "n1") -> Mapping[str, object]:
        """The claims on a node as the API server has them."""
        record = self.cluster._ledgers.records.get(node)
        return record.ledger.claims if record is not None else {}


@contextlib.asynccontextmanager
async def replica(
    cluster: MemoryCluster,
    *,
    settings: ControllerSettings = QUICK,
    controller: bool = True,
    now: datetime | None = None,
) -> AsyncIterator[Replica]:
    """Run a replica; leaving the block by an exception or otherwise is its sudden end."""
    async with asyncio.TaskGroup() as group:
        book = NodeBook(cluster)
        watching = [group.create_task(store.run(cluster)) for store in book.stores]
        for store in book.stores:
            await store.wait_until_synced()
        clock = (lambda: now) if now is not None else (lambda: datetime.now(UTC))
        extender = Extender(
            cluster, book, ExtenderSettings(bind_seconds=0.3, bind_pause_seconds=0.01), now=clock
        )
        keeper = Controller(cluster, book.pods, book.nodes, book.ledgers, settings, now=clock)
        if controller:
            watching.append(group.create_task(keeper.run()))
        try:
            yield Replica(cluster, book, extender, keeper)
        finally:
            await book.ledgers.stop()
            for task in watching:
                task.cancel()


def asking_pod(cluster: MemoryCluster, name: str, vcpus: int = 2) -> PodRecord:
    """Create a pod that asks for CPUs of one socket."""
    request = write_request(PodRequest(Request(vcpus, scope=Scope.ONE_SOCKET), vmi=f"default/{name}"))
    return cluster.create_pod(name, request=request, vmi=name)
