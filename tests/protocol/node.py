"""A node: a kubelet that starts and stops containers, an agent that carries placements out, and the truth."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from functools import lru_cache
from random import Random

from kvplace.core.enforcement import Enforcement
from kvplace.core.placement import PodPlacement
from kvplace.core.scalars import NO_CPUS, CpuMask, NodeName, PodUid
from kvplace.core.topology import Topology
from kvplace.kube.records import PodRecord, PodReport
from kvplace.kube.store import Store
from kvplace.kube.watches import NODE_FIELD, PODS, Selector
from tests.protocol.chaos import Chaos, View


@lru_cache(maxsize=256)
def read_placement(text: str) -> PodPlacement:
    """Read a placement, once."""
    return PodPlacement.from_json(text)


@dataclass
class Running:
    """A container with QEMU in it, whether anybody knows of it or not."""

    in_force: PodPlacement | None
    moving_to: PodPlacement | None = None
    failed: int = 0

    @property
    def alone_on(self) -> CpuMask:
        """The CPUs that it uses and that nobody else may use."""
        cpus = NO_CPUS
        for bound in (self.in_force, self.moving_to):
            cpus |= bound.placement.owned if bound is not None else NO_CPUS
        return cpus


@dataclass
class SimulatedNode:
    """One node; `containers` is what really runs there."""

    name: NodeName
    topology: Topology
    view: View
    random: Random
    chaos: Chaos
    containers: dict[PodUid, Running] = field(default_factory=dict)
    reported: list[PodReport] | None = None
    refuses: float = 0.2
    """How often the agent cannot carry a revision out."""

    async def run(self) -> None:
        """Play kubelet and agent until cancelled."""
        pods = Store(PODS, Selector(fields={NODE_FIELD: self.name}))
        async with asyncio.TaskGroup() as group:
            group.create_task(pods.run(self.view))
            await pods.wait_until_synced()
            group.create_task(self._kubelet(pods))
            group.create_task(self._agent(pods))

    # The kubelet.

    async def _kubelet(self, pods: Store[PodUid, PodRecord]) -> None:
        while True:
            await asyncio.sleep(2.0 if self.chaos.calm else 0.2 + self.chaos.pause())
            for pod in list(pods.records.values()):
                live = self.view._pods.get((pod.namespace, pod.name))
                if live is None or live.uid != pod.uid:
                    continue
                if live.deleting:
                    await self._stop(live)
                elif live.phase == "Pending" and live.placement and pod.uid not in self.containers:
                    self.containers[pod.uid] = Running(read_placement(live.placement))
                    self.view.change_pod(pod.namespace, pod.name, phase="Running")
            # Pods that are gone from the API server: the kubelet learns of it late, and kills them then.
            for uid in [uid for uid in self.containers if uid not in pods.records]:
                await asyncio.sleep(self.chaos.pause())
                self.containers.pop(uid, None)

    async def _stop(self, pod: PodRecord) -> None:
        await asyncio.sleep(self.chaos.pause())
        self.containers.pop(pod.uid, None)
        live = self.view._pods.get((pod.namespace, pod.name))
        if live is None or live.uid != pod.uid:
            return
        if self.random.random() < 0.5:
            self.view.change_pod(pod.namespace, pod.name, phase="Succeeded", compute_terminated=True)
            await asyncio.sleep(self.chaos.pause())
        live = self.view._pods.get((pod.namespace, pod.name))
        if live is not None and live.uid == pod.uid:
            self.view.delete_pod(pod.namespace, pod.name, force=True)

    # The agent.

    async def _agent(self, pods: Store[PodUid, PodRecord]) -> None:
        while True:
            await asyncio.sleep(1.0 if self.chaos.calm else 0.1 + self.chaos.pause())
            if not self.chaos.calm and self.random.random() < 0.05:
                await asyncio.sleep(self.random.uniform(1, 20))  # it was killed, and starts again
            for uid, running in list(self.containers.items()):
                pod = pods.get(uid)
                if pod is not None and pod.placement:
                    await self._carry_out(running, read_placement(pod.placement))
            await self._report()

    async def _carry_out(self, running: Running, bound: PodPlacement) -> None:
        present = running.in_force.revision if running.in_force is not None else 0
        if bound.revision <= max(present, running.failed):
            return
        running.moving_to = bound
        await asyncio.sleep(self.chaos.pause())
        is_way_back = running.in_force is not None and running.in_force.placement == bound.placement
        refuses = 0.0 if self.chaos.calm or is_way_back else self.refuses
        if bound.revision > 1 and self.random.random() < refuses:
            running.failed = bound.revision
        else:
            running.in_force = bound
        running.moving_to = None

    async def _report(self) -> None:
        reports = [
            PodReport(
                uid,
                namespace="default",
                pod="",
                revision=running.in_force.revision if running.in_force is not None else 0,
                running=True,
                pinned=running.moving_to is None,
                failed_revision=running.failed,
                drift="it could not be moved" if running.failed else "",
            )
            for uid, running in self.containers.items()
        ]
        if reports == self.reported:
            return
        await asyncio.sleep(self.chaos.pause())
        self.reported = reports
        self.view.put_topology(self.name, self.topology, enforcement=Enforcement.NRI, pods=reports)
