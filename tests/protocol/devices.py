"""The devices of a simulated node, and the kubelet that gives them to pods.

The kubelet chooses as in the benchmarks, which is written apart from the prediction of kvplace.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from random import Random

from benchmarks.peers.topology_manager import Wanted, admitted, amounts_of, take_devices
from kvplace.core.node_devices import DeviceCount, DeviceReport, NodeDevices, PodDevice, TopologyPolicy
from kvplace.core.placement import PodPlacement
from kvplace.core.request import DeviceNuma
from kvplace.core.request_json import read_pod_request
from kvplace.core.scalars import NumaId, PodUid, ResourceName
from kvplace.core.topology import Topology
from kvplace.kube.object_records import PodRecord

VF, GPU = ResourceName("intel.com/vf"), ResourceName("nvidia.com/gpu")
STRICT = (DeviceNuma.REQUIRED, DeviceNuma.SOCKET)
REQUESTS: tuple[Mapping[ResourceName, int], ...] = ({VF: 1}, {VF: 1}, {VF: 2}, {GPU: 1}, {VF: 1, GPU: 1})
MODES = (DeviceNuma.REQUIRED,) * 3 + (DeviceNuma.PREFERRED,) * 3 + (DeviceNuma.SOCKET, DeviceNuma.OFF)
_POLICIES = ("none", "best-effort", "best-effort", "restricted", "single-numa-node")
FOREIGN = PodUid("foreign")
"""Has the devices of pods without options."""


class NodeDeviceState:
    """Devices by resource and NUMA node, and the pods that have them: the truth, not what a process knows."""

    def __init__(self, random: Random, topology: Topology) -> None:
        self._random = random
        self.policy = random.choice(_POLICIES)
        self._drawn = {
            resource: (random.choice((0, 1, 2, 2)), random.choice((1, 2, 3))) for resource in (VF, GPU)
        }
        self.given: dict[PodUid, tuple[PodDevice, ...]] = {}
        self.use(topology)

    def use(self, topology: Topology) -> None:
        """Be part of another machine: no pod has a device there."""
        self.given.clear()
        nodes = [node.id for node in topology.numa_nodes]
        self._every = sum(1 << node for node in nodes)
        self.total = {
            resource: {node: count for node, count in zip(nodes, counts, strict=False) if count}
            for resource, counts in self._drawn.items()
        }

    def free(self) -> dict[ResourceName, dict[NumaId, int]]:
        """Return the devices that no pod has."""
        taken = Counter((one.resource, one.node) for some in self.given.values() for one in some)
        return {
            resource: {node: count - taken[resource, node] for node, count in by_node.items()}
            for resource, by_node in self.total.items()
        }

    def has_room(self, pod: PodRecord, others: Iterable[PodRecord]) -> bool:
        """Whether kube-scheduler finds enough devices for a pod: it counts all that bound pods request."""
        used = Counter(one.resource for one in self.given.get(FOREIGN, ()))
        for other in others:
            used.update(requested_devices(other))
        return all(
            sum(self.total[resource].values()) - used[resource] >= count
            for resource, count in requested_devices(pod).items()
        )

    def admit(self, pod: PodRecord) -> str:
        """Give a pod its devices; returns the reason why the kubelet fails the pod instead, or nothing."""
        requested = requested_devices(pod)
        if not requested or pod.uid in self.given:
            return ""
        free = self.free()
        if any(sum(free[resource].values()) < count for resource, count in requested.items()):
            return "UnexpectedAdmissionError"
        wanted = tuple(
            Wanted(amounts_of(self.total[resource], free[resource]), count)
            for resource, count in sorted(requested.items())
        )
        hint = admitted(self.policy, self._every, wanted)
        if hint is None:
            return "TopologyAffinityError"
        inside = None if hint.nodes is None else [node for node in range(2) if hint.nodes >> node & 1]
        given: list[PodDevice] = []
        for resource, count in requested.items():
            taken = take_devices(free[resource], count, inside, self._random)
            assert taken is not None
            given += [PodDevice(resource, node) for node, number in taken.items() for _ in range(number)]
        self.given[pod.uid] = tuple(given)
        return ""

    def take(self, uid: PodUid) -> bool:
        """Let another pod take or leave a device; returns whether anything changed."""
        free = [(resource, node) for resource, by in self.free().items() for node, n in by.items() if n]
        if self.given.pop(uid, None) is not None:
            return True
        if free:
            self.given[uid] = (PodDevice(*self._random.choice(free)),)
        return bool(free)

    def nodes_of(self, uid: PodUid) -> frozenset[NumaId]:
        """Return the NUMA nodes of a pod's devices."""
        return frozenset(device.node for device in self.given.get(uid, ()))

    def report(self) -> DeviceReport:
        """Return what an agent reads now."""
        free = self.free()
        counts = [
            DeviceCount(resource, node, total, free[resource][node])
            for resource, by_node in self.total.items()
            for node, total in by_node.items()
        ]
        pods = {uid: given for uid, given in self.given.items() if uid != FOREIGN}
        return DeviceReport(NodeDevices.of(counts, TopologyPolicy(self.policy)), pods)


def requested_devices(pod: PodRecord) -> Mapping[ResourceName, int]:
    """Return the devices that a pod requests."""
    return read_pod_request(pod.request).request.devices if pod.request else {}


def is_local(bound: PodPlacement, nodes: Iterable[NumaId], topology: Topology) -> bool:
    """Whether the cores of a placement are local to devices on these NUMA nodes."""
    near = set(bound.placement.numa_nodes)
    if bound.device_numa is DeviceNuma.SOCKET:
        packages = [package for package in topology.packages if package.cpus & bound.placement.cpus]
        near = {node for package in packages for node in topology.nodes_of(package.cpus)}
    return set(nodes) <= near
