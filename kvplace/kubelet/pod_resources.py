"""Devices of the kubelet, all and by pod, from its podresources socket.

The protocol is `v1.PodResourcesLister` (k8s.io/kubelet, pkg/apis/podresources/v1/api.proto). The kubelet
writes one entry for each device and each of its NUMA nodes, and NUMA node 0 as an empty message. It states no
UID of a pod: by now another pod may have its name and namespace.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from kvplace.core.errors import Unavailable
from kvplace.core.node_devices import NO_NUMA, DeviceCount, PodDevice, is_device
from kvplace.core.protobuf import BadMessage, fields_of
from kvplace.core.scalars import NumaId, ResourceName
from kvplace.kubelet.grpc_call import unary_call

SOCKET = Path("pod-resources/kubelet.sock")
"""Below the kubelet's folder."""
_DEADLINE_S = 5.0
_MOST_BYTES = 16 * 1024 * 1024
"""As long as the kubelet lets its own answers become."""
_HIGHEST_NODE = 99_999
_PCI_ADDRESS = re.compile(r"[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]", re.ASCII)
"""Some plugins name devices so."""
_LIST = "/v1.PodResourcesLister/List"
_ALLOCATABLE = "/v1.PodResourcesLister/GetAllocatableResources"

DeviceKey = tuple[ResourceName, str]
"""A resource and the id that its plugin gave to a device."""
DeviceNodes = Mapping[DeviceKey, frozenset[NumaId]]
"""The NUMA nodes of devices; none where the plugin states none."""


@dataclass(frozen=True, slots=True)
class ListedPod:
    """The devices of one pod."""

    namespace: str
    name: str
    devices: DeviceNodes


async def read_pod_resources(
    socket: Path, *, deadline_s: float = _DEADLINE_S
) -> tuple[DeviceNodes, list[ListedPod]]:
    """Read all healthy devices, and the devices of each pod; raises Unavailable or Misconfigured."""
    pods = await unary_call(socket, _LIST, b"", deadline_s=deadline_s, most_bytes=_MOST_BYTES)
    devices = await unary_call(socket, _ALLOCATABLE, b"", deadline_s=deadline_s, most_bytes=_MOST_BYTES)
    try:
        return read_devices(devices, 1), list(_pods(pods))
    except (BadMessage, UnicodeDecodeError) as error:
        raise Unavailable(f"{socket} sent an answer that podresources does not define: {error}") from None


def count_devices(allocatable: DeviceNodes, pods: Iterable[ListedPod]) -> list[DeviceCount]:
    """Count the devices of each resource by NUMA node; a device on several counts on the lowest of them."""
    given = {key for pod in pods for key in pod.devices}
    counts: dict[tuple[ResourceName, NumaId], list[int]] = {}
    for key, nodes in allocatable.items():
        count = counts.setdefault((key[0], min(nodes, default=NO_NUMA)), [0, 0])
        count[0] += 1
        count[1] += key not in given
    return [DeviceCount(resource, node, *count) for (resource, node), count in sorted(counts.items())]


def devices_of_pod(pod: ListedPod) -> tuple[PodDevice, ...]:
    """Return the devices of a pod with their NUMA nodes, in a stable order."""
    return tuple(
        PodDevice(resource, min(nodes, default=NO_NUMA), id_ if _PCI_ADDRESS.fullmatch(id_) else "")
        for (resource, id_), nodes in sorted(pod.devices.items())
    )


def read_devices(message: bytes, field: int) -> dict[DeviceKey, frozenset[NumaId]]:
    """Read the ContainerDevices in a field of a message; raises BadMessage or UnicodeDecodeError."""
    found: dict[DeviceKey, frozenset[NumaId]] = {}
    for devices in _messages(message, field):
        resource, ids, nodes = "", [], frozenset[NumaId]()
        for number, value in fields_of(devices):
            if not isinstance(value, bytes):
                continue
            if number == 1:
                resource = value.decode()
            elif number == 2:
                ids.append(value.decode())
            elif number == 3:
                nodes |= {_node_id(node) for node in _messages(value, 1)} - {NO_NUMA}
        if is_device(resource):
            for id_ in ids:
                key = (ResourceName(resource), id_)
                found[key] = found.get(key, frozenset()) | nodes
    return found


def _pods(message: bytes) -> Iterator[ListedPod]:
    for pod in _messages(message, 1):
        name = namespace = ""
        devices: dict[DeviceKey, frozenset[NumaId]] = {}
        for number, value in fields_of(pod):
            if not isinstance(value, bytes):
                continue
            if number == 1:
                name = value.decode()
            elif number == 2:
                namespace = value.decode()
            elif number == 3:
                devices.update(read_devices(value, 2))
        if devices:
            yield ListedPod(namespace, name, devices)


def _node_id(message: bytes) -> NumaId:
    """Read a NUMANode; 0 is not written, and a number that no NUMA node has stands for none."""
    found = 0
    for number, value in fields_of(message):
        if number == 1 and isinstance(value, int):
            found = value
    return NumaId(found) if found <= _HIGHEST_NODE else NO_NUMA


def _messages(message: bytes, field: int) -> Iterator[bytes]:
    for number, value in fields_of(message):
        if number == field and isinstance(value, bytes):
            yield value
