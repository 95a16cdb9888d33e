"""A node: a kubelet that starts and stops containers, an agent that carries placements out, and the truth."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import lru_cache
from random import Random

from kvplace.core.errors import KvplaceError
from kvplace.core.node_devices import DeviceReport
from kvplace.core.node_topology import Enforcement
from kvplace.core.placement import PodPlacement
from kvplace.core.request import OnFailure
from kvplace.core.scalars import NO_CPUS, CpuMask, NodeName, PodUid
from kvplace.core.topology import Topology
from kvplace.kube.list_watch import is_newer
from kvplace.kube.object_records import PodRecord, PodReport, TopologyRecord, TopologyStatus
from kvplace.kube.store import Store
from kvplace.kube.watches import NAME_FIELD, NODE_FIELD, PODS, TOPOLOGIES, Selector
from tests.protocol.devices import STRICT, NodeDeviceState, is_local
from tests.protocol.network import View
from tests.protocol.run_counts import Diary


@lru_cache(maxsize=1024)
def read_placement(text: str) -> PodPlacement:
    """Read a placement, once."""
    return PodPlacement.from_json(text)


@dataclass
class Running:
    """A container with QEMU in it, whether any client knows of it or not."""

    in_force: PodPlacement | None
    moving_to: PodPlacement | None = None
    has_hook: bool = False
    """Whether its QEMU starts only with the consent of a hook."""
    qemu: PodPlacement | None = None
    """The placement that its QEMU started with; None before, and in stories without devices."""
    failed: int = 0

    @property
    def alone_on(self) -> CpuMask:
        """The CPUs that it uses and that no other process may use."""
        cpus = NO_CPUS
        for bound in (self.in_force, self.moving_to):
            cpus |= bound.placement.owned if bound is not None else NO_CPUS
        return cpus


@dataclass
class ContainerChanges:
    """Which nodes have containers that began, ended, or use other CPUs now."""

    nodes: set[NodeName] = field(default_factory=set)

    def note(self, node: NodeName) -> None:
        """Note a change on a node."""
        self.nodes.add(node)

    def take(self) -> set[NodeName]:
        """Return the nodes with changes since the last call."""
        taken, self.nodes = self.nodes, set()
        return taken


@dataclass
class SimulatedNode:
    """One node; `containers` is what really runs there."""

    name: NodeName
    machines: tuple[Topology, ...]
    """The states that it can have, the first one to begin with."""
    view: View
    random: Random
    changes: ContainerChanges
    diary: Diary
    enforcement: Enforcement = Enforcement.NRI
    topology: Topology = field(init=False)
    check_admitted: Callable[[PodUid], None] = lambda _uid: None
    """Called with each pod that the kubelet has admitted."""
    kubelet_cpus: CpuMask = NO_CPUS
    """CPUs of pods that the kubelet's own static policy pins."""
    is_forgotten: bool = False
    """Whether its Node and its NodeTopology are deleted, so that no client can know what runs here."""
    containers: dict[PodUid, Running] = field(default_factory=dict)
    devices: NodeDeviceState | None = None
    """None in stories without devices."""
    reads_devices: bool = True
    """Whether the agent notices what the kubelet gives to pods; else its report stays as it is."""
    _devices_read: DeviceReport | None = None
    _failed: set[PodUid] = field(default_factory=set)
    """Pods that the kubelet did not admit; it learns late that their phase is Failed."""
    _opens_at: dict[PodUid, float] = field(default_factory=dict)
    """When the gate before each admitted pod's container with QEMU opens."""
    _reported: TopologyStatus | None = None
    """The agent's last write."""
    _version: str = ""
    """The version of the NodeTopology with that; empty while the outcome of the last write is unknown."""
    _agent_wakes: asyncio.Event = field(default_factory=asyncio.Event)
    _kubelet_wakes: asyncio.Event = field(default_factory=asyncio.Event)
    _restarts: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self.topology = self.machines[0]

    async def run(self) -> None:
        """Play kubelet and agent until cancelled, each time from what the API server knows then."""
        while True:
            self._restarts.clear()
            async with asyncio.TaskGroup() as group:
                life = group.create_task(self._live())
                await self._restarts.wait()
                life.cancel()

    async def _live(self) -> None:
        pods = Store(PODS, Selector(fields={NODE_FIELD: self.name}))
        pods.subscribe(lambda _before, _after: self.wake())
        topologies = Store(TOPOLOGIES, Selector(fields={NAME_FIELD: self.name}))
        topologies.subscribe(lambda _before, _after: self._agent_wakes.set())
        async with asyncio.TaskGroup() as group:
            group.create_task(pods.run(self.view))
            group.create_task(topologies.run(self.view))
            await pods.wait_until_synced()
            await topologies.wait_until_synced()
            self.wake()
            group.create_task(self._kubelet(pods))
            group.create_task(self._agent(pods, topologies))

    def wake(self) -> None:
        """Make kubelet and agent check again."""
        self._kubelet_wakes.set()
        self._agent_wakes.set()

    def replace_machine(self, topology: Topology) -> None:
        """End everything that runs, and be another machine of the same name."""
        self.containers.clear()
        self.topology, self.kubelet_cpus = topology, NO_CPUS
        if self.devices is not None:
            self.devices.use(topology)
        self._changed()

    def register(self, pods: Iterable[PodUid]) -> None:
        """Register with the API server, again if need be; `pods` are the pods that it knows.

        A kubelet registers when it starts only, so one whose Node was deleted has been started again. What
        no other client can know of, containers of pods that are gone, has been ended by then.
        """
        if self.view._nodes.get(self.name) is None:
            self._restarts.set()
        if self.is_forgotten:
            for uid in self.containers.keys() - set(pods):
                self._kill(uid)
        self.is_forgotten = False
        self.view.create_node(self.name)
        self.wake()

    def _changed(self) -> None:
        self.changes.note(self.name)
        self._agent_wakes.set()

    # The kubelet.

    async def _kubelet(self, pods: Store[PodUid, PodRecord]) -> None:
        while True:
            await self._kubelet_wakes.wait()
            self._kubelet_wakes.clear()
            await self.view.network.take_time()
            for pod in list(pods.records.values()):
                if pod.deleting:
                    await self._stop(pod)
                elif self._is_due(pod, pods) and self._is_admitted(pod):
                    await self._start(pod)
                if self.devices is not None:
                    self._call_hook(pod)
            # Pods that are gone from the API server: the kubelet learns of it late, and kills them then.
            admitted = [uid for uid in self._opens_at if uid not in self.containers]
            for uid in [uid for uid in [*self.containers, *admitted] if uid not in pods.records]:
                await self.view.network.take_time()
                self._kill(uid)

    def _is_due(self, pod: PodRecord, pods: Store[PodUid, PodRecord]) -> bool:
        return pod.phase == "Pending" and pod.uid not in self.containers and pod.uid in pods.records

    async def _start(self, pod: PodRecord) -> None:
        """Start the container of a pod as the kubelet knows it; it may be gone by now."""
        if self._restarts.is_set():
            return
        in_force = read_placement(pod.placement) if pod.placement else None
        self.containers[pod.uid] = Running(in_force, has_hook=bool(pod.vmi) and in_force is not None)
        self._changed()
        live = self.view._pods.get((pod.namespace, pod.name))
        if live is not None and live.uid == pod.uid:
            container = None if self.devices is None else f"compute-{pod.uid}"
            self.view.change_pod(pod.namespace, pod.name, phase="Running", compute_container=container)

    def _is_admitted(self, pod: PodRecord) -> bool:
        """Admit a pod, give it its devices, and keep its container with QEMU behind the gate for a while."""
        if self.devices is None:
            return True
        now = asyncio.get_running_loop().time()
        if pod.uid not in self._opens_at:
            if pod.uid in self._failed:
                return False
            if why := self.devices.admit(pod):
                self._failed.add(pod.uid)
                self.diary.count(why)
                if self._is_there(pod):
                    self.view.change_pod(pod.namespace, pod.name, phase="Failed")
                return False
            pause = 0.0 if self.view.network.calm else self.random.choice((0.0, 0.0, 0.1, 1.0, 5.0))
            self._opens_at[pod.uid] = now + pause
            self.check_admitted(pod.uid)
            self._agent_wakes.set()
            self._wake_kubelet_later(pause)
        return now >= self._opens_at[pod.uid]

    def _call_hook(self, pod: PodRecord) -> None:
        """Start QEMU, unless the hook finds a device that must be local and is not: KubeVirt tries again."""
        running = self.containers.get(pod.uid)
        if running is None or running.qemu is not None or running.in_force is None or not running.has_hook:
            return
        assert self.devices is not None
        bound = read_placement(pod.placement) if pod.placement else None
        if bound != running.in_force or running.moving_to is not None:
            self._wake_kubelet_later(1.0)  # its cpuset is that of another revision
            return
        local = bound.placement.floats or is_local(bound, self.devices.nodes_of(pod.uid), self.topology)
        waits = bound.device_numa in STRICT and bound.on_failure is OnFailure.WAIT
        if waits and not local:
            self.diary.count("refused by the hook")
            self._wake_kubelet_later(2.0)
            return
        self.diary.count("started beside its devices" if local else "started apart from its devices")
        running.qemu = bound
        self._changed()

    def _waits_for_hook(self, uid: PodUid) -> bool:
        """Whether a container has no QEMU yet, in stories with devices."""
        running = self.containers.get(uid)
        return self.devices is not None and running is not None and running.has_hook and running.qemu is None

    def _wake_kubelet_later(self, seconds: float) -> None:
        asyncio.get_running_loop().call_later(seconds, self._kubelet_wakes.set)

    async def _stop(self, pod: PodRecord) -> None:
        await self.view.network.take_time()
        self._kill(pod.uid)
        if self._is_there(pod) and self.random.random() < 0.5:
            self.view.change_pod(pod.namespace, pod.name, phase="Succeeded", compute_terminated=True)
            await self.view.network.take_time()
        if self._is_there(pod):
            self.view.delete_pod(pod.namespace, pod.name, force=True)

    def _is_there(self, pod: PodRecord) -> bool:
        live = self.view._pods.get((pod.namespace, pod.name))
        return live is not None and live.uid == pod.uid

    def _kill(self, uid: PodUid) -> None:
        self._opens_at.pop(uid, None)
        if self.devices is not None and self.devices.given.pop(uid, ()):
            self._agent_wakes.set()
        if self.containers.pop(uid, None) is not None:
            self._changed()

    # The agent.

    async def _agent(
        self, pods: Store[PodUid, PodRecord], topologies: Store[NodeName, TopologyRecord]
    ) -> None:
        network = self.view.network
        while True:
            await self._agent_wakes.wait()
            self._agent_wakes.clear()
            await network.take_time()
            if not network.calm and self.random.random() < network.mix.agent_away:
                await asyncio.sleep(self.random.uniform(1, 20))  # it was killed, and starts again
            for uid, running in list(self.containers.items()):
                pod = pods.get(uid)
                if pod is not None and pod.placement:
                    await self._carry_out(running, read_placement(pod.placement))
            await self._report(topologies)

    async def _carry_out(self, running: Running, bound: PodPlacement) -> None:
        network = self.view.network
        present = running.in_force.revision if running.in_force is not None else 0
        if bound.revision <= max(present, running.failed):
            return
        running.moving_to = bound
        self._changed()
        await network.take_time()
        is_way_back = running.in_force is not None and running.in_force.placement == bound.placement
        fails = 0.0 if network.calm or is_way_back else network.mix.agent_fails
        if self._waits_for_hook(bound.pod_uid):
            fails = 0.0  # there is no thread yet
        elif self._leaves_memory_of_devices(running, bound):
            fails = 1.0
        if bound.revision > 1 and self.random.random() < fails:
            running.failed = bound.revision
        else:
            running.in_force = bound
        running.moving_to = None
        self._changed()

    def _leaves_memory_of_devices(self, running: Running, bound: PodPlacement) -> bool:
        """Whether cores would leave memory that devices access: the agent cannot move it."""
        if self.devices is None or running.qemu is None or running.qemu.placement.floats:
            return False
        nodes = set(running.qemu.placement.numa_nodes)
        return bool(self.devices.nodes_of(bound.pod_uid)) and not set(bound.placement.numa_nodes) <= nodes

    async def _report(self, topologies: Store[NodeName, TopologyRecord]) -> None:
        reports = [
            PodReport(
                uid,
                namespace="default",
                pod="",
                revision=running.in_force.revision if running.in_force is not None else 0,
                running=True,
                pinned=running.moving_to is None and not self._waits_for_hook(uid),
                failed_revision=running.failed,
                restored_placement=running.in_force.to_json() if running.failed and running.in_force else "",
                drift="it could not be moved" if running.failed else "",
            )
            for uid, running in self.containers.items()
        ]
        await self._describe()
        status = TopologyStatus(
            enforcement=self.enforcement,
            kubelet_cpus=self.kubelet_cpus,
            pods=tuple(reports),
            devices=self._reported_devices(),
        )
        stored = topologies.get(self.name)
        version = stored.resource_version if stored is not None else ""
        if is_newer(self._version, version):
            version = self._version
        if status == self._reported and self._version:
            return
        self._version = ""
        try:
            self._version = await self.view.write_topology_status(self.name, status, version)
            self._reported = status
        except KvplaceError:
            self._agent_wakes.set()
            await asyncio.sleep(1.0)  # as the agent does, which then writes what is so by then

    def _reported_devices(self) -> DeviceReport | None:
        if self.devices is None:
            return None
        if self.reads_devices or self._devices_read is None:
            self._devices_read = self.devices.report()
        return self._devices_read

    async def _describe(self) -> None:
        """Publish the machine unless that has been done; the status stays."""
        stored = self.view._topologies.get(self.name)
        if stored is not None and stored.topology == self.topology:
            return
        await self.view.network.take_time()
        if not self.is_forgotten:  # what an agent writes then is collected again
            pods = stored.pods.values() if stored is not None else ()
            devices = stored.devices if stored is not None else None
            self.view.put_topology(
                self.name, self.topology, enforcement=self.enforcement, pods=pods, devices=devices
            )
            self._version = ""
