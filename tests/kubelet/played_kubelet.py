"""A podresources socket that answers as the kubelet does."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from harness.device_plugin import numa_nodes
from harness.grpc_server import GrpcServer
from kvplace.core.protobuf import bytes_field, bytes_fields

Devices = Mapping[str, Mapping[str, Sequence[int] | None]]
"""NUMA nodes by resource and device; None for a device without a topology."""
_LISTER = "/v1.PodResourcesLister"


def container_devices(devices: Devices) -> list[bytes]:
    """Write one entry for each device and each of its NUMA nodes, as the kubelet does."""
    entries = []
    for resource, by_id in devices.items():
        for id_, nodes in by_id.items():
            entry = bytes_field(1, resource) + bytes_field(2, id_)
            if nodes is None:
                entries.append(entry)
            else:
                entries += [entry + bytes_field(3, numa_nodes([node])) for node in nodes]
    return entries


class PlayedKubelet(GrpcServer):
    """A kubelet with devices; change `devices` and `pods` at any time."""

    def __init__(self, socket: Path) -> None:
        self.devices: Devices = {}
        self.pods: dict[tuple[str, str], Devices] = {}
        """Devices by namespace and name of the pod."""
        self.calls = 0
        super().__init__(
            socket, {f"{_LISTER}/List": self._list, f"{_LISTER}/GetAllocatableResources": self._allocatable}
        )

    def _allocatable(self, _: bytes) -> bytes:
        return bytes_fields(1, container_devices(self.devices))

    def _list(self, _: bytes) -> bytes:
        self.calls += 1
        return bytes_fields(
            1,
            (
                bytes_field(1, name)
                + bytes_field(2, namespace)
                + bytes_field(3, bytes_field(1, "compute") + bytes_fields(2, container_devices(devices)))
                for (namespace, name), devices in self.pods.items()
            ),
        )
