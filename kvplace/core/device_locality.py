"""Whether the devices of a VM are beside its cores, as reported or as predicted.

Nothing outside the kubelet chooses a device of a device plugin, and the kubelet chooses when it admits the
pod, after the bind. So the NUMA nodes of the devices are predicted from the free devices and the kubelet's
topology manager policy. Afterwards the agent reports the devices.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from itertools import combinations

from kvplace.core.node_devices import NO_NUMA, DeviceCount, HeldDevices, NodeDevices, PodDevice
from kvplace.core.placement import THE_MACHINE, Placement, Reason, Refusal
from kvplace.core.request import DeviceNuma
from kvplace.core.scalars import CpuMask, NumaId, ResourceName
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


def local_nodes(
    topology: Topology, mode: DeviceNuma, nodes: Iterable[NumaId], cpus: CpuMask
) -> frozenset[NumaId]:
    """Find the NUMA nodes of a machine where a device is local to a VM on these NUMA nodes and CPUs."""
    cpus_of_nodes = {node.id: node.cpus for node in topology.numa_nodes}
    return mode.local_nodes(nodes, cpus, (socket.cpus for socket in topology.sockets), cpus_of_nodes)


def located(
    devices: Iterable[PodDevice], placement: Placement | None, topology: Topology | None, mode: DeviceNuma
) -> tuple[LocatedDevice, ...]:
    """Compare devices with a placement; with the mode `socket`, the whole package is local."""
    near = frozenset[NumaId]() if placement is None else frozenset(placement.numa_nodes)
    if near and topology is not None and placement is not None:
        near = local_nodes(topology, mode, near, placement.cpus)
    return tuple(
        LocatedDevice(device, device.node in near if near and device.node != NO_NUMA else None)
        for device in devices
    )


def device_phrases(devices: Iterable[LocatedDevice]) -> tuple[str, ...]:
    """Count equal devices: `2 intel.com/vf on NUMA 1 (local)`."""
    counts = Counter((device.device.resource, device.place) for device in devices)
    return tuple(f"{count} {resource} {place}" for (resource, place), count in sorted(counts.items()))


_MOST_ALIGNED_NODES = 16
"""The kubelet aligns on at most 8 NUMA nodes unless configured otherwise."""


class Certainty(Enum):
    """How sure the NUMA nodes of the devices are that a pod will get."""

    CERTAIN = "certain"
    """The resource has its devices on these NUMA nodes only, or none of them is on a known NUMA node."""
    PREDICTED = "predicted"
    """The kubelet takes these unless other pods take or leave devices at the same time."""
    UNKNOWN = "unknown"
    """The kubelet may take any of these; without NUMA nodes such devices are unknown."""
    REJECTED = "rejected"
    """The kubelet would fail the pod: its policy does not allow the devices that are free."""


@dataclass(frozen=True, slots=True)
class DevicePrediction:
    """NUMA nodes of the devices that a pod will get: cores on all of these are local to them."""

    certainty: Certainty
    nodes: frozenset[NumaId] = frozenset()


def predicted_devices(devices: NodeDevices, requested: Mapping[ResourceName, int]) -> DevicePrediction:
    """Predict the NUMA nodes of the devices that the kubelet will give to a pod.

    With a policy other than `none` the kubelet takes the smallest set of NUMA nodes with enough free devices
    of all resources, and of several such sets the one with the lowest ids. Where it aligns nothing it takes
    any free device. Devices without a NUMA node restrict nothing.
    """
    wanted = {resource: count for resource, count in requested.items() if count > 0}
    counts = {resource: devices.by_node(resource) for resource in wanted}
    if not all(counts.values()):
        return DevicePrediction(Certainty.UNKNOWN)
    aligned = {
        resource: {node: one for node, one in by_node.items() if node != NO_NUMA}
        for resource, by_node in counts.items()
        if by_node.keys() != {NO_NUMA}
    }
    if all(len(by_node) == 1 for by_node in aligned.values()):
        nodes = frozenset(node for by_node in aligned.values() for node in by_node)
        rejected = devices.policy.rejects and _aligned_nodes(aligned, wanted) is None
        return DevicePrediction(Certainty.REJECTED if rejected else Certainty.CERTAIN, nodes)
    if devices.policy.aligns:
        best = _aligned_nodes(aligned, wanted)
        if best is not None and not (devices.policy.policy == "single-numa-node" and len(best) > 1):
            return DevicePrediction(Certainty.PREDICTED, best)
        if devices.policy.rejects:
            return DevicePrediction(Certainty.REJECTED, _any_of(aligned, wanted))
    return _any_free(counts, aligned, wanted)


def _aligned_nodes(
    aligned: Mapping[ResourceName, Mapping[NumaId, DeviceCount]], wanted: Mapping[ResourceName, int]
) -> frozenset[NumaId] | None:
    """Find the NUMA nodes that the kubelet prefers; None where it finds none.

    It prefers sets of the size that each resource needs at least when all of its devices are free, and only
    where that size is the same for all resources.
    """
    sizes = {_least_nodes(by_node.values(), wanted[resource]) for resource, by_node in aligned.items()}
    every = sorted({node for by_node in aligned.values() for node in by_node})
    if len(sizes) != 1 or len(every) > _MOST_ALIGNED_NODES:
        return None
    # Sets in the order of their bit masks: by the highest id first.
    for nodes in sorted(combinations(every, sizes.pop()), key=lambda nodes: nodes[::-1]):
        if nodes and all(
            sum(by_node[node].free for node in nodes if node in by_node) >= wanted[resource]
            for resource, by_node in aligned.items()
        ):
            return frozenset(nodes)
    return None


def _least_nodes(counts: Iterable[DeviceCount], wanted: int) -> int:
    """How many NUMA nodes hold so many devices when all are free; 0 where all together do not."""
    total = 0
    for number, one in enumerate(sorted((one.total for one in counts), reverse=True), 1):
        total += one
        if total >= wanted:
            return number
    return 0


def _any_free(
    counts: Mapping[ResourceName, Mapping[NumaId, DeviceCount]],
    aligned: Mapping[ResourceName, Mapping[NumaId, DeviceCount]],
    wanted: Mapping[ResourceName, int],
) -> DevicePrediction:
    """The kubelet takes any free device: foreseeable only where it has no choice between NUMA nodes."""
    nodes = _any_of(aligned, wanted)
    for resource, by_node in aligned.items():
        free = [one.free for one in by_node.values() if one.free]
        has_no_choice = (
            len(free) == 1 or sum(one.free for one in counts[resource].values()) == wanted[resource]
        )
        if not has_no_choice:
            return DevicePrediction(Certainty.UNKNOWN, nodes)
    return DevicePrediction(Certainty.PREDICTED, nodes)


def _any_of(
    aligned: Mapping[ResourceName, Mapping[NumaId, DeviceCount]], wanted: Mapping[ResourceName, int]
) -> frozenset[NumaId]:
    """Every NUMA node with a free device; with any device where too few are free."""
    nodes: set[NumaId] = set()
    for resource, by_node in aligned.items():
        enough = sum(one.free for one in by_node.values()) >= wanted[resource]
        nodes.update(node for node, one in by_node.items() if one.free or not enough)
    return frozenset(nodes)


def predicted_held(devices: NodeDevices | None, requested: Mapping[ResourceName, int]) -> HeldDevices:
    """Predict the devices that the kubelet gives to a pod; as many as are free where it requests more.

    It takes them from the NUMA nodes that `predicted_devices` returns, most free devices first.
    """
    if devices is None or not requested:
        return {}
    missing = dict(requested)
    nodes = predicted_devices(devices, requested).nodes
    held: dict[tuple[ResourceName, NumaId], int] = {}
    for one in sorted(devices.counts, key=lambda one: (one.node not in nodes, -one.free, one.node)):
        count = max(0, min(one.free, missing.get(one.resource, 0)))
        if count:
            missing[one.resource] -= count
            held[one.resource, one.node] = count
    return held


def too_few_devices(devices: NodeDevices | None, requested: Mapping[ResourceName, int]) -> Refusal | None:
    """Refuse a machine with fewer free devices than a VM requests; None also where nothing is known of them.

    In a cluster kube-scheduler counts devices before it calls kvplace.
    """
    if devices is None:
        return None
    for resource, needed in sorted(requested.items()):
        counts = devices.by_node(resource).values()
        best = sum(one.free for one in counts)
        if best < needed:
            return Refusal(
                Reason.NOT_ENOUGH_DEVICES,
                f"no {needed} free {resource} on {THE_MACHINE}, best {best}",
                {"needed": needed, "best": best, "missing": needed - best, "where": THE_MACHINE},
                never=sum(one.total for one in counts) < needed,
            )
    return None
