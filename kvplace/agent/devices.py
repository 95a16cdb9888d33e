"""Reports the devices of this node: their numbers by resource and NUMA node, and the devices of each pod.

The kubelet's podresources socket is read after each write of its devices' checkpoint, after each change of a
pod of this node or of its containers, and every ten seconds: never more than twice a second. While the
kubelet does not answer, its last answer counts for a minute, longer than it takes to restart. Then the
devices are unknown.

Device plugins also state devices to the container, in its environment (KubeVirt and NVIDIA in PCI_RESOURCE_*
and MDEV_PCI_RESOURCE_*, SR-IOV in PCIDEVICE_*) and in the names of its CDI devices. Only there is the address
of a device of KubeVirt's plugin, which lists IOMMU groups to the kubelet. NVIDIA's plugin lists NUMA node 0
for a device with a node that it cannot read. The author of a pod can set such variables, too. So they count
only where the kubelet lists as many devices of that resource for the pod, and sysfs knows them.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from itertools import chain, groupby, islice
from pathlib import Path

from kvplace.agent.node_objects import NodeObjects
from kvplace.agent.node_plan import GivenDevice
from kvplace.agent.node_report import NodeReport
from kvplace.agent.pinning_guard import PlannedNode
from kvplace.agent.this_machine import AgentSettings, MachineWatch
from kvplace.core.errors import KvplaceError
from kvplace.core.node_devices import NO_NUMA, DeviceReport, NodeDevices, PodDevice, TopologyPolicy
from kvplace.core.scalars import NumaId, PciAddress, PodUid
from kvplace.kube.object_records import PodRecord
from kvplace.kubelet.pod_resources import (
    SOCKET,
    DeviceNodes,
    ListedPod,
    count_devices,
    devices_of_pod,
    read_pod_resources,
)
from kvplace.linux.inotify import FileChange, noticing
from kvplace.linux.kernel_files import Gone, KernelError, NotPermitted
from kvplace.linux.pci_devices import numa_node_of_mediated, numa_node_of_pci, numa_nodes_of_buses

log = logging.getLogger(__name__)

READ_EVERY_S = 10.0
_PAUSE_S = 0.5
"""Shortest time between two reads: changes in between are read together."""
_KEEP_S = 60.0
_CHECKPOINT = "device-plugins"
"""The folder, below the kubelet's, where it notes each device that it gives to a container."""
_REPLACED = FileChange.WRITTEN | FileChange.MOVED_HERE


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
        otherwise = f"the kubelet's devices are read every {READ_EVERY_S:g} s"
        with noticing(lambda _: self._changed.set(), [self._checkpoint], _REPLACED, otherwise):
            while True:
                self._changed.clear()
                await self.read()
                await asyncio.sleep(_PAUSE_S)
                with suppress(TimeoutError):
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


def device_report(
    allocatable: DeviceNodes,
    pods: Iterable[ListedPod],
    known: Iterable[PodRecord],
    policy: TopologyPolicy,
    buses: Mapping[str, NumaId],
) -> DeviceReport:
    """Put together the reports of the kubelet and of sysfs; only pods with a placement here are named.

    The kubelet names pods without their UID. So the devices of a pod that was deleted by force may be taken
    for the devices of a new pod with its name.
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


MOST_GIVEN = 256
"""Devices of one container that are read; more can only be the work of a tenant."""
_PREFIXES = ("MDEV_PCI_RESOURCE_", "PCI_RESOURCE_", "PCIDEVICE_")
_DETAILS = re.compile(r"PCIDEVICE_.*_INFO", re.DOTALL)
"""The description of its devices, as JSON, by the plugin for SR-IOV."""
_LONGEST = 64 * MOST_GIVEN
"""Characters of a variable; a device has at most 36 and a comma."""
_PCI = re.compile(r"[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]", re.ASCII)
_UUID = re.compile(r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}", re.ASCII)


def given_devices(environment: Iterable[str], cdi_names: Iterable[str]) -> tuple[GivenDevice, ...]:
    """Read the devices out of `NAME=value` and out of CDI names (`vendor.com/class=name`), each once."""
    stated = {*_in_variables(environment), *_in_names(cdi_names)}
    return tuple(islice(sorted(stated), MOST_GIVEN))


def with_addresses(
    listed: Iterable[PodDevice], given: Iterable[GivenDevice], nodes: Mapping[str, NumaId]
) -> tuple[PodDevice, ...]:
    """Add addresses, and the NUMA nodes that sysfs states for them, to the kubelet's list for a pod.

    The list stays as it is where the containers state another number of devices.
    """
    by_variable: dict[str, set[str]] = {}
    for device in given:
        if device.address in nodes:
            by_variable.setdefault(device.variable, set()).add(device.address)
    found: list[PodDevice] = []
    for resource, devices in groupby(sorted(listed, key=_resource), key=_resource):
        of_resource = list(devices)
        addresses = by_variable.get(_variable(resource), set())
        if len(addresses) == len(of_resource):
            of_resource = [
                PodDevice(of_resource[0].resource, nodes[address], address) for address in sorted(addresses)
            ]
        found += of_resource
    return tuple(found)


def numa_nodes_of(given: Iterable[GivenDevice], sys: Path) -> dict[str, NumaId]:
    """Read the NUMA node of each address from sysfs, NO_NUMA for -1; an address that it lacks is absent."""
    nodes: dict[str, NumaId] = {}
    for address in {device.address for device in given}:
        with suppress(Gone, NotPermitted, KernelError):
            if _PCI.fullmatch(address):
                node = numa_node_of_pci(PciAddress(address), sys)
            else:
                node = numa_node_of_mediated(address, sys)
            nodes[address] = NO_NUMA if node is None else node
    return nodes


def _in_variables(environment: Iterable[str]) -> Iterator[GivenDevice]:
    for entry in environment:
        name, _, value = entry.partition("=")
        prefix = next((prefix for prefix in _PREFIXES if name.startswith(prefix)), None)
        if prefix is None or _DETAILS.fullmatch(name) or len(value) > _LONGEST:
            continue
        for word in value.lower().split(","):
            if address := _address(word.strip()):
                yield GivenDevice(name.removeprefix(prefix), address)


def _in_names(cdi_names: Iterable[str]) -> Iterator[GivenDevice]:
    for name in cdi_names:
        kind, _, device = name.partition("=")
        if address := _address(device.lower()):
            yield GivenDevice(_variable(kind), address)


def _address(word: str) -> str:
    return word if _PCI.fullmatch(word) or _UUID.fullmatch(word) else ""


def _resource(device: PodDevice) -> str:
    return device.resource


def _variable(resource: str) -> str:
    return resource.upper().replace("/", "_").replace(".", "_")
