"""The NUMA nodes that should give CPUs, so that the devices of a VM are local to these.

Local means that the VM has a CPU on the NUMA node of each device. A device without a known NUMA node, and
one on a NUMA node without CPUs, restricts nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import combinations
from typing import NamedTuple

from kvplace.core.device_locality import Certainty, local_nodes, predicted_devices
from kvplace.core.node_devices import NodeDevices
from kvplace.core.request import DeviceNuma, Request
from kvplace.core.scalars import CpuMask, NumaId, NumaIndex
from kvplace.core.topology import Topology

MOST_NODES = 4
"""If more NUMA nodes have devices, all of them count or none."""


class DeviceChoice(NamedTuple):
    """One way to lie beside the devices."""

    far: int
    """NUMA nodes with devices that have no CPU of the VM. Where the kubelet may take any device, the number
    of other NUMA nodes with more free devices.
    """
    beside: tuple[frozenset[NumaIndex], ...] = ()
    """Of each of these sets of NUMA nodes one must give a CPU; no node is in two of them."""


ANYWHERE: tuple[DeviceChoice, ...] = (DeviceChoice(0),)
"""The choice where devices do not matter."""


def device_choices(
    topology: Topology, devices: NodeDevices | None, request: Request
) -> tuple[DeviceChoice, ...] | str:
    """Return the ways to lie beside the devices, the best one first; a way that is not listed is refused.

    A VM that must lie beside devices on unknown NUMA nodes gets the reason instead.
    """
    mode = request.options.device_numa
    if mode is DeviceNuma.OFF or not (request.devices or request.device_nodes):
        return ANYWHERE
    places = {node.id: NumaIndex(index) for index, node in enumerate(topology.numa_nodes) if node.cpus}
    known = request.device_nodes & places.keys()
    groups = _groups(topology, places, known, mode)
    if request.devices:
        predicted = predicted_devices(devices or NodeDevices(), request.devices)
        nodes = predicted.nodes & places.keys()
        there = _groups(topology, places, nodes, mode)
        foreseen = predicted.certainty in (Certainty.CERTAIN, Certainty.PREDICTED)
        if not foreseen and mode is DeviceNuma.PREFERRED:
            return _any_of(places, groups, _most_free_first(devices, request, nodes))
        if not (foreseen or (predicted.certainty is Certainty.UNKNOWN and len(there) == 1)):
            return _why_unknown(devices, request, predicted.certainty, predicted.nodes)
        groups = tuple(dict.fromkeys((*groups, *there)))
    if mode is DeviceNuma.PREFERRED:
        return _most_of(groups)
    return (DeviceChoice(0, groups),)


def far_devices(topology: Topology, devices: NodeDevices | None, request: Request, cpus: CpuMask) -> int:
    """Rate the distance of a placement to the devices, as `DeviceChoice.far` does; 0 for the best way.

    Unknown devices count as far.
    """
    if not (request.devices or request.device_nodes) or request.options.device_numa is DeviceNuma.OFF:
        return 0
    if request.devices and devices is None:
        return 1
    nodes = {index for index, node in enumerate(topology.numa_nodes) if node.cpus & cpus}
    choices = device_choices(topology, devices, request)
    if isinstance(choices, str):
        return 1
    return next((far for far, beside in choices if not any(map(nodes.isdisjoint, beside))), len(choices))


def _groups(
    topology: Topology, places: dict[NumaId, NumaIndex], nodes: Iterable[NumaId], mode: DeviceNuma
) -> tuple[frozenset[NumaIndex], ...]:
    """For each of some NUMA nodes, the nodes that are local to it."""
    groups: dict[frozenset[NumaIndex], None] = {}
    for node in sorted(nodes):
        near = local_nodes(topology, mode, (node,), topology.node_by_id[node].cpus)
        groups[frozenset(places[other] for other in near if other in places)] = None
    return tuple(groups)


def _most_of(groups: Sequence[frozenset[NumaIndex]]) -> tuple[DeviceChoice, ...]:
    """Beside all of the nodes, else beside as many as can be."""
    if len(groups) > MOST_NODES:
        return (DeviceChoice(0, tuple(groups)), DeviceChoice(len(groups)))
    return tuple(
        DeviceChoice(len(groups) - count, some)
        for count in range(len(groups), -1, -1)
        for some in combinations(groups, count)
    )


def _any_of(
    places: dict[NumaId, NumaIndex], groups: Sequence[frozenset[NumaIndex]], nodes: Sequence[NumaId]
) -> tuple[DeviceChoice, ...]:
    """Beside the known devices and one of the nodes, in their order."""
    beside_one = [(frozenset([places[node]]),) for node in nodes[:MOST_NODES]]
    ways: list[tuple[frozenset[NumaIndex], ...]] = [*beside_one, ()]
    choices = [
        DeviceChoice(far + order, tuple(dict.fromkeys((*beside, *there))))
        for far, beside in _most_of(groups)
        for order, there in enumerate(ways)
    ]
    return tuple(sorted(choices, key=lambda choice: choice.far))


def _most_free_first(devices: NodeDevices | None, request: Request, nodes: Iterable[NumaId]) -> list[NumaId]:
    """Order NUMA nodes by the requested devices that are free there, then by all free ones."""
    if devices is None:
        return []
    free = {resource: devices.by_node(resource) for resource in request.devices}

    def amount(node: NumaId) -> tuple[int, int]:
        here = [(free[r][node].free, count) for r, count in request.devices.items() if node in free[r]]
        return sum(min(has, count) for has, count in here), sum(has for has, _ in here)

    return sorted(nodes, key=lambda node: (*(-one for one in amount(node)), node))


def _why_unknown(
    devices: NodeDevices | None, request: Request, certainty: Certainty, nodes: frozenset[NumaId]
) -> str:
    mode = f"device-numa: {request.options.device_numa.value}"
    if devices is None:
        names = " and ".join(sorted(request.devices))
        return f"nothing reports the NUMA nodes of {names}: run the agent there, or do not use {mode}"
    missing = [resource for resource in sorted(request.devices) if not devices.by_node(resource)]
    if missing:
        return f"the node has no {' and no '.join(missing)}"
    names = " and ".join(sorted(request.devices))
    if certainty is Certainty.REJECTED:
        return f"topologyManagerPolicy {devices.policy.policy} cannot align the free {names} on one NUMA node"
    where = ", ".join(map(str, sorted(nodes)))
    return (
        f"the kubelet may take {names} from NUMA nodes {where}: set its topologyManagerPolicy to"
        f" best-effort, or do not use {mode}"
    )


def names_of_nodes(nodes: Iterable[NumaId]) -> str:
    """Write NUMA nodes as in `NUMA nodes 0 and 1`."""
    written = [str(node) for node in sorted(nodes)]
    return f"NUMA node{'s' * (len(written) > 1)} {' and '.join(written)}"
