"""Replicas of kvplace on a cluster in memory: what a process holds, without its listeners."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, ParamSpec, TypeVar

from kvplace.controller.controller import Controller, ControllerSettings
from kvplace.core.ledger import Claim
from kvplace.core.node_topology import Enforcement
from kvplace.core.request_json import PodRequest, write_request
from kvplace.core.scalars import NodeName, PodUid
from kvplace.core.topology import Topology
from kvplace.kube.events import EventRecorder
from kvplace.kube.object_records import NO_SHAPE, PodRecord, PodReport
from kvplace.kube.watches import PLACED_PODS
from kvplace.nodes.node_cache import NodeCache
from kvplace.nodes.node_machine import NodeMachine
from kvplace.scheduler.extender import Extender, ExtenderSettings
from kvplace.scheduler.extender_protocol import (
    BindingArgs,
    ExtenderArgs,
    FilterResult,
)
from tests.core.requests import request_with
from tests.kube.faulty_cluster import FaultyCluster
from tests.nodes.machines import EIGHT

P = ParamSpec("P")
T = TypeVar("T")

EPOCH = datetime(2026, 1, 2, tzinfo=UTC)
"""The wall clock at time 0 of the event loop."""


@dataclass
class Replica:
    """One process's view of the cluster and its parts."""

    cluster: FaultyCluster
    cache: NodeCache
    events: EventRecorder
    extender: Extender
    controller: Controller

    async def filter(self, pod: PodRecord, *nodes: str) -> FilterResult:
        """Ask for nodes, all or these, as kube-scheduler does."""
        return await self.extender.filter(asking_args(pod, *(nodes or self.cache.nodes.records)))

    async def scores(self, pod: PodRecord, *nodes: str) -> dict[str, int]:
        """Ask for scores of nodes, all or these, as kube-scheduler does."""
        args = asking_args(pod, *(nodes or self.cache.nodes.records))
        return {one.host: one.score for one in await self.extender.prioritize(args)}

    async def bind(self, pod: PodRecord, node: str) -> str:
        """Bind as kube-scheduler does; answers the error, empty when bound."""
        return (await self.extender.bind(BindingArgs(pod.name, pod.namespace, pod.uid, NodeName(node)))).error

    def topology(self, node: str) -> Topology | None:
        """Answer the machine of a node as this replica sees it; None when it cannot be used."""
        machine = self.cache.machine(NodeName(node))
        return machine.topology if isinstance(machine, NodeMachine) else None

    def held(self) -> int:
        """Count the pods that have a hold."""
        pending = self.extender.pending
        return sum(len(pending.held_on(node)) for node in self.cache.nodes.records)

    async def until(self, holds: object) -> None:
        """Wait until something comes true, letting everybody work."""
        assert callable(holds)
        async with asyncio.timeout(120):
            while not holds():  # noqa: ASYNC110
                await asyncio.sleep(0.01)  # whatever it waits for has no event of its own

    def claims(self, node: str = "n1") -> Mapping[PodUid, Claim]:
        """The claims on a node as the API server has them."""
        record = self.cluster._ledgers.records.get(node)
        return record.ledger.claims if record is not None else {}


@contextlib.asynccontextmanager
async def replica(
    cluster: FaultyCluster,
    *,
    settings: ControllerSettings | None = None,
    extending: ExtenderSettings | None = None,
    controller: bool = True,
    now: datetime | Callable[[], datetime] | None = None,
) -> AsyncIterator[Replica]:
    """Run a replica; leaving the block by an exception or otherwise is its sudden end.

    `now` is its wall clock, or the one moment that it shows; else it goes with the event loop's.
    """
    async with asyncio.TaskGroup() as group:
        cache = NodeCache(cluster)
        watching = [group.create_task(store.run(cluster)) for store in (*cache.stores, cache.edited_vmis)]
        watching.append(group.create_task(cache.dra.run(cluster)))
        for store in cache.stores:
            await store.wait_until_synced()
        clock = asyncio.get_running_loop().time
        wall = now if callable(now) else (lambda: now or EPOCH + timedelta(seconds=clock()))
        events = EventRecorder(cluster)
        extender = Extender(cluster, cache, events, extending, now=wall, clock=clock, background=at_once)
        keeper = Controller(cluster, cache, events, settings, now=wall)
        extender.pending.subscribe(keeper.hold_ended)
        if controller:
            watching.append(group.create_task(keeper.run()))
        watching.append(group.create_task(extender.pending.run()))
        watching.append(group.create_task(extender.nominations.run()))
        watching.append(group.create_task(extender.room.run()))
        try:
            yield Replica(cluster, cache, events, extender, keeper)
        finally:
            binds = [task for _, task in extender.binder.under_way.values()]
            for task in binds:
                task.cancel()
            await asyncio.gather(*binds, return_exceptions=True)
            await cache.ledgers.stop()
            for task in watching:
                task.cancel()


@contextlib.asynccontextmanager
async def bound_vm(
    cluster: FaultyCluster, *, settings: ControllerSettings | None = None, controller: bool = True
) -> AsyncIterator[tuple[Replica, PodRecord]]:
    """Run a replica that has bound pod `default/vm` to node n1."""
    async with replica(cluster, settings=settings, controller=controller) as one:
        pod = asking_pod(cluster, "vm")
        assert await one.bind(pod, "n1") == ""
        yield one, pod


def report_running(cluster: FaultyCluster, pod: PodRecord) -> None:
    """Report on node n1, as its agent does, that the container of a pod runs."""
    running = PodReport(pod.uid, revision=1, pinned=True, running=True)
    cluster.put_topology("n1", EIGHT, enforcement=Enforcement.NRI, pods=[running])


async def at_once(work: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
    """Compute without a thread, so that stories run in one order."""
    return work(*args, **kwargs)


def asking_pod(
    cluster: FaultyCluster,
    name: str,
    vcpus: int = 2,
    *,
    explain: bool = False,
    movable: bool = False,
    may_migrate: bool = False,
    make_room: bool = False,
    shape: bytes = NO_SHAPE,
    priority: int = 0,
    labels: Mapping[str, str] | None = None,
    **options: Any,
) -> PodRecord:
    """Create a pod with a request of one socket, or for what `options` state of its Request."""
    asked = PodRequest(
        request_with(vcpus, **options),
        f"default/{name}",
        explain,
        movable=movable or may_migrate,
        may_migrate=may_migrate,
        make_room=make_room,
    )
    counted: dict[str, int] = {"cpu": vcpus * 1000, "kvplace.io/vm": 0}
    counted |= {str(resource): count for resource, count in asked.request.devices.items()}
    return cluster.create_pod(
        name,
        request=write_request(asked),
        vmi=name,
        shape=shape,
        priority=priority,
        labels=None if labels is None else {**PLACED_PODS.labels, **labels},
        resources=counted,
    )


def asking_args(pod: PodRecord, *nodes: str) -> ExtenderArgs:
    """The request of kube-scheduler about a pod."""
    return ExtenderArgs(pod, [NodeName(node) for node in nodes])
