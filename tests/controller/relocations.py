"""An agent and an owner of VMs, as far as relocation needs them, on the cluster in memory."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any, TypeVar

from kvplace.core.ledger import Ledger
from kvplace.core.node_devices import DeviceReport
from kvplace.core.node_topology import Enforcement
from kvplace.core.placement import PodPlacement
from kvplace.core.request import Scope
from kvplace.core.scalars import CpuMask, NodeName, PodUid
from kvplace.core.topology import Topology
from kvplace.core.well_known_names import RELOCATED
from kvplace.kube.object_records import Condition, PodRecord, PodReport
from kvplace.kube.watches import EVERYTHING, Kind, Selector, WatchEvent
from tests.controller.replicas import Replica, asking_pod
from tests.kube.faulty_cluster import FaultyCluster

K = TypeVar("K")
R = TypeVar("R")

NODE = NodeName("n1")
SHARE = {"cpu-set": "one-socket", "kvplace.io/cpu-policy": "share"}
EXCLUSIVE = {"cpu-set": "one-socket"}
NONE = {"kvplace.io/cpu-policy": "none"}


@dataclass
class NodeAgent:
    """Carries out placements at once or on demand, and checks that it never uses a foreign core."""

    cluster: FaultyCluster
    topology: Topology
    node: NodeName = NODE
    in_force: dict[PodUid, PodPlacement] = field(default_factory=dict)
    failed: dict[PodUid, int] = field(default_factory=dict)
    devices: DeviceReport | None = None

    def report(self) -> None:
        """Publish what is in effect."""
        self.cluster.put_topology(
            self.node,
            self.topology,
            enforcement=Enforcement.NRI,
            devices=self.devices,
            pods=[
                PodReport(
                    uid,
                    revision=bound.revision,
                    pinned=True,
                    running=True,
                    failed_revision=self.failed.get(uid, 0),
                    restored_placement=bound.to_json() if uid in self.failed else "",
                    drift="no free huge pages" if uid in self.failed else "",
                )
                for uid, bound in self.in_force.items()
            ],
        )

    def carry_out(self, pod: PodRecord) -> None:
        """Put the pod's stored placement into force, using both sets of cores in between."""
        bound = self.stored(pod)
        before = self.in_force.get(pod.uid)
        self.check(pod.uid, bound.placement.owned | (before.placement.owned if before else CpuMask(0)))
        self.in_force[pod.uid] = bound
        self.check(pod.uid, bound.placement.owned)
        self.report()

    def fail(self, pod: PodRecord) -> None:
        """Undo the pod's stored placement."""
        self.failed[pod.uid] = self.stored(pod).revision
        self.report()

    def stored(self, pod: PodRecord) -> PodPlacement:
        """Return the placement that is stored on a pod."""
        return PodPlacement.from_json(self.live(pod).placement)

    def live(self, pod: PodRecord) -> PodRecord:
        """Return the pod as the API server has it."""
        found = self.cluster._pods.get((pod.namespace, pod.name))
        assert found is not None
        return found

    @property
    def ledger(self) -> Ledger:
        """The stored ledger of the node."""
        record = self.cluster._ledgers.get(self.node)
        return record.ledger if record is not None else Ledger()

    def check(self, uid: PodUid, cpus: CpuMask) -> None:
        """Every core that a pod runs on alone is its own in the ledger."""
        owners = self.ledger.owners
        assert all(owners.get(cpu) == uid for cpu in owners if cpus >> cpu & 1)
        assert not cpus & ~self.ledger.owned


class LaggingView(FaultyCluster):
    """The same cluster for another replica, whose watches can be made to lag behind."""

    def __init__(self, cluster: FaultyCluster) -> None:
        self.__dict__ |= cluster.__dict__
        self._flows: dict[str, asyncio.Event] = {}
        """Whether the events of a kind are let through, where they were ever held back."""

    def lag(self, kind: str = "pods") -> None:
        """Hold the events of a kind back from now on."""
        self._flows[kind] = asyncio.Event()

    def catch_up(self, *kinds: str) -> None:
        """Let the events of these kinds through again, or all."""
        for kind in kinds or self._flows:
            self._flows[kind].set()

    def watch(self, kind: Kind[K, R], selector: Selector = EVERYTHING) -> AsyncIterator[WatchEvent[R]]:
        return self._held_back(super().watch(kind, selector), kind.name)

    async def _held_back(
        self, events: AsyncIterator[WatchEvent[R]], kind: str
    ) -> AsyncIterator[WatchEvent[R]]:
        async for event in events:
            if kind in self._flows:
                await self._flows[kind].wait()
            yield event


def node_with_agent(topology: Topology) -> FaultyCluster:
    """Make a cluster of one node with an agent."""
    made = FaultyCluster()
    made.create_node(NODE)
    made.put_topology(NODE, topology, enforcement=Enforcement.NRI)
    return made


async def bound(one: Replica, agent: NodeAgent, name: str, vcpus: int = 2, **options: Any) -> PodRecord:
    """Create a VM's pod, bind it, and let the agent put its cores into force."""
    pod = asking_pod(one.cluster, name, vcpus, **options)
    assert await one.bind(pod, "n1") == ""
    agent.carry_out(pod)
    return pod


async def wide(one: Replica, agent: NodeAgent, **request: Any) -> PodRecord:
    """Bind a VM over both sockets, after whose bind there is room for it on one."""
    await bound(one, agent, "first", 6)
    second = await bound(one, agent, "second", 6)
    pod = await bound(one, agent, "wide", 4, scope=Scope.ANY, **request)
    assert len(agent.stored(pod).placement.packages) == 2
    one.cluster.delete_pod("default", "second", force=True)
    del agent.in_force[second.uid]
    agent.report()
    await one.until(lambda: second.uid not in agent.ledger.claims)
    return pod


def edit(cluster: FaultyCluster, pod: PodRecord, asking: dict[str, str]) -> None:
    """Edit the annotations of a VM."""
    cluster.edit_vmi(pod.namespace, pod.vmi, pod.vmi_uid, asking)


def condition(cluster: FaultyCluster, pod: PodRecord) -> Condition | None:
    """Return what the stored pod reports about its relocation."""
    stored = cluster._pods.get((pod.namespace, pod.name))
    return stored.condition(RELOCATED) if stored is not None else None


async def until_written(one: Replica, agent: NodeAgent, pod: PodRecord, revision: int) -> PodPlacement:
    """Wait for a revision of a pod's placement."""
    await one.until(lambda: agent.stored(pod).revision >= revision)
    assert agent.stored(pod).revision == revision
    return agent.stored(pod)
