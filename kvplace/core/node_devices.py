"""Devices of a node: their resources, their number by NUMA node, and the agent's report about them.

kube-scheduler counts devices of device plugins and the kubelet chooses them, so a request states only how
many it needs of each resource: `{"intel.com/vf": 1}`. The agent reports the devices of its node as
`status.devices` of the NodeTopology. A node without a report has unknown devices: its agent cannot read them,
or it has no agent.

Devices are not part of the machine's fingerprint: a device that comes or goes must not make running VMs
immovable.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from kvplace.core.json_fields import Fields
from kvplace.core.scalars import NumaId, PodUid, ResourceName
from kvplace.core.strict_json import Json, shown
from kvplace.core.well_known_names import MARKER_RESOURCE

NO_NUMA = NumaId(-1)
"""Of a device that is on no known NUMA node, as Linux writes it."""
_ALIGNING = {"best-effort": "BestEffort", "restricted": "Restricted", "single-numa-node": "SingleNUMANode"}


@dataclass(frozen=True, slots=True)
class TopologyPolicy:
    """How the kubelet's Topology Manager is set."""

    policy: str = "none"
    scope: str = "container"

    @property
    def joined(self) -> str:
        """Both in one word, as `topologyPolicies` of a NodeResourceTopology has them."""
        name = _ALIGNING.get(self.policy)
        return "None" if name is None else f"{name}{self.scope.capitalize()}Level"

    @property
    def aligns(self) -> bool:
        """Whether the kubelet chooses devices by NUMA node at all."""
        return self.policy in _ALIGNING

    @property
    def rejects(self) -> bool:
        """Whether it fails a pod rather than start it with devices that it cannot align."""
        return self.policy in ("restricted", "single-numa-node")


@dataclass(frozen=True, slots=True)
class DeviceCount:
    """Devices of one resource on one NUMA node; a device on several counts on the lowest of them."""

    resource: ResourceName
    node: NumaId
    """NO_NUMA for devices without a known NUMA node."""
    total: int
    free: int


@dataclass(frozen=True, slots=True)
class PodDevice:
    """One device that the kubelet has given to a pod."""

    resource: ResourceName
    node: NumaId
    """NO_NUMA where it is not known."""
    address: str = ""
    """PCI address or UUID of a mediated device; empty where only the kubelet's id is known."""
    claim: str = ""
    """The ResourceClaim of a device that a driver of DRA has; `resource` is then its driver and its name."""


HeldDevices: TypeAlias = Mapping[tuple[ResourceName, NumaId], int]
"""How many devices pods have, by resource and NUMA node."""


@dataclass(frozen=True, slots=True)
class NodeDevices:
    """All devices of a node at one moment; hashable, so that nodes in equal states are found."""

    counts: tuple[DeviceCount, ...] = ()
    """Ascending by resource and NUMA node; every resource that the kubelet has devices of."""
    policy: TopologyPolicy = TopologyPolicy()

    @classmethod
    def of(cls, counts: Iterable[DeviceCount], policy: TopologyPolicy) -> NodeDevices:
        """Put counts into their order."""
        return cls(tuple(sorted(counts, key=lambda one: (one.resource, one.node))), policy)

    @classmethod
    def all_free(
        cls, stated: Iterable[tuple[ResourceName, NumaId, int]], policy: TopologyPolicy
    ) -> NodeDevices:
        """Add up counts by resource and NUMA node of devices that no pod has."""
        counts: dict[tuple[ResourceName, NumaId], int] = {}
        for resource, node, count in stated:
            counts[resource, node] = counts.get((resource, node), 0) + count
        return cls.of((DeviceCount(*place, count, count) for place, count in counts.items()), policy)

    def by_node(self, resource: ResourceName) -> dict[NumaId, DeviceCount]:
        """Return the counts of one resource by NUMA node; empty for a resource that is not reported."""
        return {one.node: one for one in self.counts if one.resource == resource}

    @property
    def phrase(self) -> str:
        """Write the free and all devices of each resource by NUMA node: `intel.com/vf 0:3/4,1:4/4`."""
        places: dict[str, list[str]] = {}
        for one in self.counts:
            node = "?" if one.node == NO_NUMA else str(one.node)
            places.setdefault(one.resource, []).append(f"{node}:{one.free}/{one.total}")
        return "; ".join(f"{resource} {','.join(each)}" for resource, each in places.items())

    def without(self, held: HeldDevices) -> NodeDevices:
        """Count these devices as taken."""
        return self._changed(held, -1)

    def returned(self, held: HeldDevices) -> NodeDevices:
        """Count these devices as free again."""
        return self._changed(held, 1)

    def _changed(self, held: HeldDevices, sign: int) -> NodeDevices:
        if not held:
            return self
        counts = (
            replace(one, free=min(one.total, max(0, one.free + sign * held.get((one.resource, one.node), 0))))
            for one in self.counts
        )
        return replace(self, counts=tuple(counts))


MOST_DEVICES = 2**31 - 1
"""Most of one resource: some plugins count other things than devices."""
_MOST_RESOURCES = 64
_OF_KUBERNETES = "kubernetes.io/"
_OF_KUBEVIRT = "devices.kubevirt.io/"
_COUNTERS = frozenset(
    ("kvm", "mshv", "tun", "vhost-net", "vhost-vsock", "sev", "sev-snp", "tdx", "pr-helper")
)
"""Resources of KubeVirt that count users of a file of the whole machine; they are on no NUMA node."""
_NAME = re.compile(
    r"[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?/[A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?", re.ASCII
)


def is_device(resource: str) -> bool:
    """Whether a resource of a container may be on a NUMA node: no CPUs, memory, huge pages or counters."""
    if not _NAME.fullmatch(resource) or _OF_KUBERNETES in resource or resource == MARKER_RESOURCE:
        return False
    return resource.removeprefix(_OF_KUBEVIRT) not in _COUNTERS


def write_device_counts(devices: Mapping[ResourceName, int]) -> dict[str, int]:
    """Write counts by resource, in alphabetical order."""
    return {str(resource): count for resource, count in sorted(devices.items())}


def read_device_counts(devices: object, at: str) -> dict[ResourceName, int]:
    """Read counts by resource, without zeros; raises ValueError that names the entry."""
    if not isinstance(devices, Mapping):
        raise ValueError(  # noqa: TRY004
            f"{at} is {shown(devices)}; it must be an object of counts by resource such as "
            '{"intel.com/vf": 1}'
        )
    if len(devices) > _MOST_RESOURCES:
        raise ValueError(f"{at} has {len(devices)} resources, more than {_MOST_RESOURCES}")
    counts: dict[ResourceName, int] = {}
    for resource, count in devices.items():
        if not isinstance(resource, str) or not is_device(resource):
            raise ValueError(f"{at}: {shown(resource)} is not the resource of a device, such as intel.com/vf")
        if type(count) is not int or not 0 <= count <= MOST_DEVICES:
            raise ValueError(
                f"{at}[{shown(resource)}] is {shown(count)}; it must be a whole number from 0 to "
                f"{MOST_DEVICES}"
            )
        if count:
            counts[ResourceName(resource)] = count
    return counts


_HIGHEST_NODE = 99_999


@dataclass(frozen=True, slots=True)
class DeviceReport:
    """Devices of a node and of each pod with a claim, and the NUMA nodes of the PCI buses."""

    devices: NodeDevices
    pods: Mapping[PodUid, tuple[PodDevice, ...]] = field(default_factory=dict)
    """Devices of pods with a claim; the devices of a missing pod still count as free."""
    pci: Mapping[str, NumaId] = field(default_factory=dict)
    """NUMA nodes of PCI roots (`pci0000:c0`) and buses (`0000:c1`); buses without one are absent."""

    def node_of_address(self, address: str) -> NumaId:
        """Return the NUMA node of a PCI device, `0000:c1:00.1`; NO_NUMA where it is not known."""
        return self.pci.get(address.rpartition(":")[0], NO_NUMA)

    def document(self) -> Json:
        """Write it as JSON; lists, because a merge patch replaces these as a whole."""
        return {
            "topologyPolicy": self.devices.policy.policy,
            "topologyScope": self.devices.policy.scope,
            "resources": [
                {"resource": one.resource, "numaNode": one.node, "total": one.total, "free": one.free}
                for one in self.devices.counts
            ],
            "pods": [
                {"uid": uid, "devices": [_pod_device(device) for device in found]}
                for uid, found in sorted(self.pods.items())
            ],
            "pci": [{"name": name, "numaNode": node} for name, node in sorted(self.pci.items())],
        }


def read_device_report(document: object, at: str) -> DeviceReport | None:
    """Read the JSON form, None where there is none; raises ValueError that names the entry below `at`."""
    if document is None:
        return None
    report = Fields(document, at)
    policy = TopologyPolicy(
        report.text("topologyPolicy", "") or TopologyPolicy().policy,
        report.text("topologyScope", "") or TopologyPolicy().scope,
    )
    counts = [_read_count(entry) for entry in _each(report, "resources")]
    pods = {
        PodUid(entry.text("uid")): tuple(_read_pod_device(device) for device in _each(entry, "devices"))
        for entry in _each(report, "pods")
    }
    pci = {entry.text("name"): _node(entry) for entry in _each(report, "pci")}
    return DeviceReport(NodeDevices.of(counts, policy), pods, pci)


def _pod_device(device: PodDevice) -> Json:
    document: Json = {"resource": device.resource, "numaNode": device.node}
    if device.address:
        document["address"] = device.address
    return document


def _read_pod_device(device: Fields) -> PodDevice:
    resource = ResourceName(device.text("resource"))
    return PodDevice(resource, _node(device), device.text("address", ""))


def _read_count(count: Fields) -> DeviceCount:
    resource = count.text("resource")
    if not is_device(resource):
        raise count.bad("resource", "the resource of a device, such as intel.com/vf")
    total = count.whole("total", MOST_DEVICES)
    return DeviceCount(ResourceName(resource), _node(count), total, count.whole("free", total))


def _each(fields: Fields, key: str) -> Iterator[Fields]:
    """Read a list of objects; a missing one is empty."""
    return fields.each(key) if fields.raw.get(key) else iter(())


def _node(entry: Fields) -> NumaId:
    return NumaId(entry.whole("numaNode", _HIGHEST_NODE, least=NO_NUMA))
