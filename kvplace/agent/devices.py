"""Reports the devices of this node: their numbers by resource and NUMA node, and the devices of each pod.

The kubelet's podresources socket is read after each write of its devices' checkpoint, after each change of a
pod of this node or of its containers, and every ten seconds: never more than twice a second. Where the
runtime states the devices of a container, too, their addresses and NUMA nodes come from there and from sysfs.

While the kubelet does not answer, its last answer counts for a minute, longer than it takes to restart.
Then the devices are unknown.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import chain

from kvplace.agent.given_devices import GivenDevice, numa_nodes_of, with_addresses
from kvplace.agent.machine_watch import MachineWatch
from kvplace.agent.node_objects import NodeObjects
from kvplace.agent.node_report import NodeReport
from kvplace.agent.pinning_guard import PlannedNode
from kvplace.agent.settings import AgentSettings
from kvplace.core.errors import KvplaceError, Misconfigured
from kvplace.core.node_devices import DeviceReport, NodeDevices, PodDevice, TopologyPolicy
from kvplace.core.scalars import NumaId, PodUid
from kvplace.kube.object_records import PodRecord
from kvplace.kubelet.pod_resources import (
    SOCKET,
    DeviceNodes,
    ListedPod,
    count_devices,
    devices_of_pod,
    read_pod_resources,
)
from kvplace.linux.kernel_events import FileChange, Inotify, calling
from kvplace.linux.kernel_files import Gone
from kvplace.linux.pci_devices import numa_nodes_of_buses

log = logging.getLogger(__name__)

READ_EVERY_S = 10.0
_PAUSE_S = 0.5
"""Shortest time between two reads: changes in between are read together."""
_KEEP_S = 60.0
_CHECKPOINT = "device-plugins"
"""The folder, below the kubelet's, where it notes each device that it gives to a container."""


class DeviceWatch:
    """Keeps the report about devices up to date."""

    def __init__(
        self,
        settings: AgentSettings,
        own: NodeObjects,
        node: PlannedNode,
        machine: MachineWatch,
        report: NodeReport,
    ) -> None:
        folder = settings.on_host(settings.kubelet_folder)
        self._socket = folder / SOCKET
        self._checkpoint = folder / _CHECKPOINT
        self._sys = settings.host / "sys"
        self._own = own
        self._node = node
        self._machine = machine
        self._report = report
        self._changed = asyncio.Event()
        self._read_at: float | None = None
        """When the kubelet answered last."""
        machine.subscribe(self._changed.set)
        node.subscribe(self._changed.set)
        own.pods.subscribe(lambda _before, _after: self._changed.set())

    async def run(self) -> None:
        """Watch until cancelled."""
        await self._own.wait_until_known()
        with self._checkpoint_events():
            while True:
                self._changed.clear()
                await self.read()
                await asyncio.sleep(_PAUSE_S)
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(READ_EVERY_S):
                        await self._changed.wait()

    async def read(self) -> None:
        """Read once and report."""
        loop = asyncio.get_running_loop()
        try:
            allocatable, pods = await read_pod_resources(self._socket)
        except KvplaceError as error:
            log.debug("the devices of this node cannot be read: %s", error)
            if self._read_at is None or loop.time() > self._read_at + _KEEP_S:
                self._report.use_devices(None, str(error))
            return
        self._read_at = loop.time()
        given: dict[PodUid, list[GivenDevice]] = {}
        for container in self._node.containers():
            given.setdefault(container.pod_uid, []).extend(container.devices)
        buses = await asyncio.to_thread(numa_nodes_of_buses, self._sys)
        nodes = await asyncio.to_thread(numa_nodes_of, chain.from_iterable(given.values()), self._sys)
        policy = self._machine.machine.kubelet.topology
        found = device_report(allocatable, pods, self._own.pods.records.values(), policy, buses)
        self._report.use_devices(
            replace(
                found,
                pods={
                    uid: with_addresses(devices, given.get(uid, ()), nodes)
                    for uid, devices in found.pods.items()
                },
            )
        )

    @contextlib.contextmanager
    def _checkpoint_events(self) -> Iterator[None]:
        try:
            inotify = Inotify()
        except Misconfigured as error:
            log.warning("%s; the kubelet's devices are read every %g s", error, READ_EVERY_S)
            yield
            return
        with contextlib.suppress(Gone, Misconfigured):
            inotify.watch(self._checkpoint, FileChange.WRITTEN | FileChange.MOVED_HERE)

        def arrived() -> None:
            if any(True for _ in inotify.read()):
                self._changed.set()

        with calling(arrived, inotify):
            yield


def device_report(
    allocatable: DeviceNodes,
    pods: Iterable[ListedPod],
    known: Iterable[PodRecord],
    policy: TopologyPolicy,
    buses: Mapping[str, NumaId],
) -> DeviceReport:
    """Put together what the kubelet and sysfs state; of the pods those with a placement here are named.

    The kubelet names pods without their UID. The devices of a pod that was deleted by force may thus be taken
    for those of one that was created under its name a moment ago.
    """
    pods = list(pods)
    uids = {(pod.namespace, pod.name): pod.uid for pod in known if pod.placement and not pod.is_terminal}
    given: dict[PodUid, tuple[PodDevice, ...]] = {}
    for pod in pods:
        uid = uids.get((pod.namespace, pod.name))
        if uid is not None:
            given[uid] = devices_of_pod(pod)
    counts = count_devices(allocatable, pods)
    return DeviceReport(NodeDevices.of(counts, policy), given, buses)
