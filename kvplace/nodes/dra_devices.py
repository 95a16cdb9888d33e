"""Devices of Dynamic Resource Allocation and their NUMA nodes, as the watches report them.

The NUMA node of a device comes from the surest source that has one: its PCI address on the node's own
machine, its PCIe root there, then the attributes of the driver. A device without a known NUMA node, or on
several nodes, constrains nothing.

The devices are complete only after `run` has read the lists, and the API server may not serve these kinds at
all. Bind therefore reads the resource claims of its pod itself.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence

from kvplace.core.errors import KvplaceError
from kvplace.core.node_devices import NO_NUMA, DeviceReport, PodDevice
from kvplace.core.scalars import NodeName, NumaId, ResourceName
from kvplace.core.topology import Topology
from kvplace.kube.concurrency import together
from kvplace.kube.object_records import (
    CPU_DRIVER,
    DeviceKey,
    DeviceRequest,
    PodRecord,
    ResourceClaimRecord,
    SliceDevice,
    SliceRecord,
)
from kvplace.kube.store import Store
from kvplace.kube.watches import DEVICE_CLASSES, RESOURCE_CLAIMS, SLICES, Apply, ListClient, WatchClient

_log = logging.getLogger(__name__)

_DevicePlace = tuple[DeviceKey, bool, NumaId | None]
"""A device, whether several pods may have it, and its NUMA node if that is known."""

PROBE_S = 300.0
"""The pause before an API server without these kinds is asked again."""


class DraDevices:
    """Devices by node and by the names that an allocation has for them."""

    def __init__(self) -> None:
        self.slices = Store(SLICES)
        self.claims = Store(RESOURCE_CLAIMS)
        self.classes = Store(DEVICE_CLASSES)
        self._slices_on: defaultdict[NodeName, dict[str, SliceRecord]] = defaultdict(dict)
        """Slices by node and name; a slice with devices of several nodes is under each of them."""
        self._generations: dict[tuple[str, str], dict[str, int]] = {}
        """The generation of each slice by driver and pool."""
        self._in_use: dict[DeviceKey, int] = {}
        """The number of resource claims of each device."""
        self._places: dict[NodeName, tuple[Topology, DeviceReport | None, Sequence[_DevicePlace]]] = {}
        """The devices of nodes with the inputs of their places, until a slice changes."""
        self.slices.subscribe(self._slice_seen)
        self.claims.subscribe(self._claim_seen)

    async def run(self, cluster: WatchClient) -> None:
        """Follow the cluster until cancelled, as soon as the API server serves these kinds."""
        while True:
            try:
                await cluster.read_all(DEVICE_CLASSES)
                break
            except KvplaceError as error:
                _log.info("devices of Dynamic Resource Allocation are not read: %s", error)
                await asyncio.sleep(PROBE_S)
        async with asyncio.TaskGroup() as group:
            for store in (self.slices, self.claims, self.classes):
                group.create_task(store.run(cluster))

    @property
    def extended_resources(self) -> frozenset[ResourceName]:
        """The extended resources that kube-scheduler allocates as devices."""
        found = (one.extended_resource for one in self.classes.records.values())
        return frozenset(resource for resource in found if resource is not None)

    def numa_nodes(
        self,
        node: NodeName,
        topology: Topology,
        allocated: Iterable[DeviceKey],
        report: DeviceReport | None,
    ) -> frozenset[NumaId]:
        """Return the NUMA nodes of allocated devices of a node, as far as they are known."""
        wanted = set(allocated)
        located = self._located(node, topology, report) if wanted else ()
        return frozenset(
            numa_node for key, _, numa_node in located if key in wanted and numa_node is not None
        )

    def of_pod(self, pod: PodRecord, topology: Topology, report: DeviceReport | None) -> Iterable[PodDevice]:
        """Return the devices of the resource claims of a pod on its node, without claims for CPUs."""
        known = dict(self._devices_on(pod.node))
        for name in pod.resource_claims:
            claim = self.claims.get((pod.namespace, name))
            for key in claim.allocated or () if claim is not None else ():
                driver, _, device_name = key
                if driver == CPU_DRIVER:
                    continue
                device = known.get(key)
                node = None if device is None else numa_node_of(device, topology, report)
                yield PodDevice(
                    ResourceName(f"{driver} {device_name}"),
                    NO_NUMA if node is None else node,
                    (device.address if device is not None else None) or "",
                    name,
                )

    def free_numa_nodes(
        self, node: NodeName, topology: Topology, driver: str, report: DeviceReport | None
    ) -> frozenset[NumaId | None]:
        """Return the NUMA nodes that have a free device of a driver; None stands for an unknown one."""
        return frozenset(
            numa_node
            for key, is_shared, numa_node in self._located(node, topology, report)
            if key[0] == driver and (is_shared or key not in self._in_use)
        )

    def first_free(
        self, node: NodeName, topology: Topology, wanted: Mapping[str, int], report: DeviceReport | None
    ) -> frozenset[NumaId]:
        """Predict the NUMA nodes of the devices that kube-scheduler allocates; `wanted`: counts by driver.

        It takes the first devices that fit, by pool and slice. Of several devices, devices on one NUMA node
        come first, as `matchAttribute` demands in the resource claims that the documentation recommends.
        """
        located = self._located(node, topology, report)
        if sum(wanted.values()) == 1:  # by far the most usual, and asked of every node
            for key, is_shared, numa_node in located:
                if numa_node is not None and key[0] in wanted and (is_shared or key not in self._in_use):
                    return frozenset((numa_node,))
            return frozenset()
        free: dict[str, Counter[NumaId]] = {driver: Counter() for driver in wanted}
        for key, is_shared, numa_node in located:
            driver = key[0]
            if numa_node is None or driver not in free:
                continue
            if is_shared or key not in self._in_use:
                free[driver][numa_node] += wanted[driver] if is_shared else 1
        known = {driver: counts for driver, counts in free.items() if counts}
        for numa_node in next(iter(known.values()), Counter[NumaId]()):
            if all(counts[numa_node] >= wanted[driver] for driver, counts in known.items()):
                return frozenset((numa_node,))
        return frozenset(next(iter(counts)) for counts in known.values())

    def gives_devices(self, pod: PodRecord) -> bool:
        """Whether resource claims may give a pod devices of the host: all claims but those for CPUs do."""
        for name in pod.resource_claims:
            claim = self.claims.get((pod.namespace, name))
            if claim is None or not claim.allocated:
                return True  # the watch has not shown it yet
            if any(driver != CPU_DRIVER for driver, _, _ in claim.allocated):
                return True
        return False

    def driver_of(self, request: DeviceRequest) -> str:
        """Return the driver that a request demands; empty where that is not certain."""
        found = self.classes.get(request.device_class)
        return found.driver if found is not None else ""

    def drivers_of(self, resources: Iterable[ResourceName]) -> frozenset[str]:
        """Return the drivers of extended resources that are allocated as devices."""
        wanted = set(resources)
        classes = self.classes.records.values()
        return frozenset(one.driver for one in classes if one.driver and one.extended_resource in wanted)

    def _located(
        self, node: NodeName, topology: Topology, report: DeviceReport | None
    ) -> Sequence[_DevicePlace]:
        """Return the devices of a node in the order of allocation; Filter asks for them with every pod."""
        known = self._places.get(node)
        if known is not None and known[0] is topology and known[1] is report:
            return known[2]
        devices = sorted(self._devices_on(node), key=lambda one: one[0][:2])
        found = [(key, one.is_shared, numa_node_of(one, topology, report)) for key, one in devices]
        self._places[node] = (topology, report, found)
        return found

    def _devices_on(self, node: NodeName) -> Iterable[tuple[DeviceKey, SliceDevice]]:
        for _, record in sorted(self._slices_on.get(node, {}).items()):
            if record.generation < max(self._generations[record.driver, record.pool].values()):
                continue  # its driver is replacing it
            for device in record.devices:
                if (record.node or device.node) == node:
                    yield (record.driver, record.pool, device.name), device

    def _slice_seen(self, before: SliceRecord | None, after: SliceRecord | None) -> None:
        self._places.clear()  # a slice of a new generation changes the meaning of others
        if before is not None:
            for node in _nodes_of(before):
                del self._slices_on[node][before.name]
                if not self._slices_on[node]:
                    del self._slices_on[node]
            generations = self._generations[before.driver, before.pool]
            del generations[before.name]
            if not generations:
                del self._generations[before.driver, before.pool]
        if after is not None:
            for node in _nodes_of(after):
                self._slices_on[node][after.name] = after
            self._generations.setdefault((after.driver, after.pool), {})[after.name] = after.generation

    def _claim_seen(self, before: ResourceClaimRecord | None, after: ResourceClaimRecord | None) -> None:
        for key in before.allocated or () if before is not None else ():
            self._in_use[key] -= 1
            if not self._in_use[key]:
                del self._in_use[key]
        for key in after.allocated or () if after is not None else ():
            self._in_use[key] = self._in_use.get(key, 0) + 1


def numa_node_of(device: SliceDevice, topology: Topology, report: DeviceReport | None) -> NumaId | None:
    """Return the NUMA node of a device; None where it is unknown, or is none of the machine's with CPUs.

    `report` comes from the node's agent, which knows the NUMA nodes of PCI buses and PCIe roots.
    """
    sources = (
        report.node_of_address(device.address or "") if report is not None else None,
        report.pci.get(device.pcie_root) if report is not None else None,
        device.numa_node,
    )
    stated = next((one for one in sources if one is not None and one >= 0), None)
    known = topology.node_by_id.get(stated) if stated is not None else None
    return known.id if known is not None and known.cpus else None


def _nodes_of(record: SliceRecord) -> frozenset[NodeName]:
    nodes = {record.node} if record.node else {device.node for device in record.devices if device.node}
    return frozenset(nodes)


async def read_dra_devices(cluster: ListClient) -> DraDevices:
    """Read all devices and resource claims once."""
    devices = DraDevices()
    slices, claims = await together(cluster.read_all(SLICES), cluster.read_all(RESOURCE_CLAIMS))
    for record in slices:
        devices.slices.apply(Apply(record))
    for claim in claims:
        devices.claims.apply(Apply(claim))
    return devices
