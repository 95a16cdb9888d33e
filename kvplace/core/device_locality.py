"""Whether the devices of a VM are beside its cores."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from kvplace.core.cpuset import union
from kvplace.core.node_devices import NO_NUMA, PodDevice
from kvplace.core.placement import Placement
from kvplace.core.request import DeviceNuma
from kvplace.core.topology import Topology


@dataclass(frozen=True, slots=True)
class LocatedDevice:
    """A device that the kubelet has given to a VM, compared with the VM's cores."""

    device: PodDevice
    is_local: bool | None
    """None where the NUMA node of the device is not known, or the VM has no cores of its own."""

    @property
    def place(self) -> str:
        """State in a phrase where it is, and whether this is local."""
        if self.device.node == NO_NUMA:
            return "on no known NUMA node"
        local = {True: " (local)", False: " (not local)", None: ""}[self.is_local]
        return f"on NUMA {self.device.node}{local}"


def located(
    devices: Iterable[PodDevice], placement: Placement | None, topology: Topology | None, mode: DeviceNuma
) -> tuple[LocatedDevice, ...]:
    """Compare devices with a placement; with the mode `socket`, the whole package is local."""
    near = set() if placement is None else set(placement.numa_nodes)
    if near and mode is DeviceNuma.SOCKET and topology is not None and placement is not None:
        packages = [package.cpus for package in topology.packages if package.id in placement.packages]
        near |= set(topology.nodes_of(union(packages)))
    return tuple(
        LocatedDevice(device, device.node in near if near and device.node != NO_NUMA else None)
        for device in devices
    )


def device_phrases(devices: Iterable[LocatedDevice]) -> tuple[str, ...]:
    """Count equal devices: `2 intel.com/vf on NUMA 1 (local)`."""
    counts = Counter((device.device.resource, device.place) for device in devices)
    return tuple(f"{count} {resource} {place}" for (resource, place), count in sorted(counts.items()))
