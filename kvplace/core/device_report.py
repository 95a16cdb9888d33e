"""An agent's report about the devices of its node: `status.devices` of the NodeTopology.

A node without a report has unknown devices: its agent cannot read them, or it has no agent.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from kvplace.core.device_resources import MOST_DEVICES, is_device
from kvplace.core.node_devices import NO_NUMA, DeviceCount, NodeDevices, PodDevice, TopologyPolicy
from kvplace.core.scalars import NumaId, PodUid, ResourceName
from kvplace.core.strict_json import Json, shown

_MOST = {"resources": 4096, "pods": 1024, "devices": 1024, "pci": 4096}
"""Entries of each list, as in the CRD."""
_HIGHEST_NODE = 99_999


@dataclass(frozen=True, slots=True)
class DeviceReport:
    """Devices of a node, those of each pod with a claim, and where the PCI buses are."""

    devices: NodeDevices
    pods: Mapping[PodUid, tuple[PodDevice, ...]] = field(default_factory=dict)
    """Devices of pods with a claim; those of a pod that is missing here are still counted as free."""
    pci: Mapping[str, NumaId] = field(default_factory=dict)
    """NUMA nodes of PCI roots (`pci0000:c0`) and buses (`0000:c1`); those without one are absent."""

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
    report = _object(document, at)
    policy = TopologyPolicy(
        _text(report, "topologyPolicy", at) or TopologyPolicy().policy,
        _text(report, "topologyScope", at) or TopologyPolicy().scope,
    )
    counts = [_read_count(entry, place) for entry, place in _entries(report, "resources", at)]
    pods = {
        PodUid(_text(entry, "uid", place)): tuple(
            _read_pod_device(device, inside) for device, inside in _entries(entry, "devices", place)
        )
        for entry, place in _entries(report, "pods", at)
    }
    pci = {_text(entry, "name", place): _node(entry, place) for entry, place in _entries(report, "pci", at)}
    return DeviceReport(NodeDevices.of(counts, policy), pods, pci)


def _pod_device(device: PodDevice) -> Json:
    document: Json = {"resource": device.resource, "numaNode": device.node}
    if device.address:
        document["address"] = device.address
    return document


def _read_pod_device(device: Mapping[str, object], at: str) -> PodDevice:
    resource = ResourceName(_text(device, "resource", at))
    return PodDevice(resource, _node(device, at), _text(device, "address", at))


def _read_count(count: Mapping[str, object], at: str) -> DeviceCount:
    resource = _text(count, "resource", at)
    if not is_device(resource):
        raise ValueError(f"{at}.resource {shown(resource)} is not that of a device, such as intel.com/vf")
    total, free = count.get("total"), count.get("free")
    if type(total) is not int or type(free) is not int or not 0 <= free <= total <= MOST_DEVICES:
        raise ValueError(
            f"{at} has the total {shown(total)} and {shown(free)} free; they must be whole numbers, "
            f"total at least as large as free and at most {MOST_DEVICES}"
        )
    return DeviceCount(ResourceName(resource), _node(count, at), total, free)


def _entries(document: Mapping[str, object], key: str, at: str) -> Iterator[tuple[Mapping[str, object], str]]:
    """Yield the entries of a list with the place of each."""
    entries = document.get(key) or []
    if not isinstance(entries, list) or len(entries) > _MOST[key]:
        raise ValueError(f"{at}.{key} must be a list of at most {_MOST[key]} entries")
    for index, entry in enumerate(entries):
        place = f"{at}.{key}[{index}]"
        yield _object(entry, place), place


def _object(document: object, at: str) -> Mapping[str, object]:
    if not isinstance(document, Mapping):
        raise ValueError(f"{at} is {shown(document)}; it must be an object")  # noqa: TRY004
    return document


def _node(entry: Mapping[str, object], at: str) -> NumaId:
    found = entry.get("numaNode")
    if type(found) is not int or not NO_NUMA <= found <= _HIGHEST_NODE:
        raise ValueError(f"{at}.numaNode is {shown(found)}; it must be the id of a NUMA node, or {NO_NUMA}")
    return NumaId(found)


def _text(document: Mapping[str, object], key: str, at: str) -> str:
    found = document.get(key, "")
    if not isinstance(found, str):
        raise ValueError(f"{at}.{key} is {shown(found)}; it must be a text")  # noqa: TRY004
    return found
