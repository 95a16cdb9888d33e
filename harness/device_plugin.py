"""A device plugin for a real kubelet: devices with NUMA nodes, and environment variables as an SR-IOV plugin
writes them. Its devices do not exist.

The protocol is `v1beta1` (k8s.io/kubelet, pkg/apis/deviceplugin/v1beta1/api.proto). Run it in the kubelet's
machine: `python -m harness.device_plugin '{"resource": ..., "devices": {"0000:c1:00.1": [1]}}'`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from harness.grpc_server import GrpcServer
from kvplace.core.errors import Unavailable
from kvplace.core.protobuf import bytes_field, bytes_fields, fields_of
from kvplace.kubelet.pod_resources import unary_call

FOLDER = Path("/var/lib/kubelet/device-plugins")
_SERVICE = "/v1beta1.DevicePlugin"


class DevicePlugin:
    """One resource with its devices."""

    def __init__(self, resource: str, devices: Mapping[str, Sequence[int]], folder: Path = FOLDER) -> None:
        """`devices` are NUMA nodes by the id of a device; none means that the plugin states none."""
        self.resource = resource
        self._devices = devices
        self._folder = folder
        self._name = resource.replace("/", "_") + ".sock"
        self._server = GrpcServer(
            folder / self._name,
            {
                f"{_SERVICE}/GetDevicePluginOptions": lambda _: b"",
                f"{_SERVICE}/ListAndWatch": self._list,
                f"{_SERVICE}/Allocate": self._allocate,
            },
        )

    def register(self) -> None:
        """Make it known to the kubelet."""
        request = bytes_field(1, "v1beta1") + bytes_field(2, self._name) + bytes_field(3, self.resource)
        call = unary_call(
            self._folder / "kubelet.sock",
            "/v1beta1.Registration/Register",
            request,
            deadline_s=10,
            most_bytes=1 << 16,
        )
        asyncio.run(call)

    def _list(self, _: bytes) -> Iterator[bytes]:
        yield bytes_fields(1, (self._device(id_, nodes) for id_, nodes in self._devices.items()))

    @staticmethod
    def _device(id_: str, nodes: Sequence[int]) -> bytes:
        device = bytes_field(1, id_) + bytes_field(2, "Healthy")
        return device + bytes_field(3, numa_nodes(nodes)) if nodes else device

    def _allocate(self, request: bytes) -> bytes:
        """Answer with the ids in a variable of the container: `PCIDEVICE_INTEL_COM_VF=0000:c1:00.1`."""
        answer = b""
        for _, container in fields_of(request):
            assert isinstance(container, bytes)
            ids = [id_.decode() for _, id_ in fields_of(container) if isinstance(id_, bytes)]
            name = "PCIDEVICE_" + self.resource.upper().replace("/", "_").replace(".", "_")
            variable = bytes_field(1, name) + bytes_field(2, ",".join(ids))
            answer += bytes_field(1, bytes_field(1, variable))
        return answer


def numa_nodes(nodes: Sequence[int]) -> bytes:
    """Write a TopologyInfo of NUMA nodes below 128; as in Go, a 0 is not written."""
    return bytes_fields(1, (bytes((8, node)) if node else b"" for node in nodes))


def main() -> None:
    """Serve until ended; begin again whenever the kubelet has started, which removes all sockets."""
    asked = json.loads(sys.argv[1])
    known = 0
    while True:
        with contextlib.suppress(FileNotFoundError, Unavailable):
            now = (FOLDER / "kubelet.sock").stat().st_ino
            if now != known:
                DevicePlugin(asked["resource"], asked["devices"]).register()
                known = now
        time.sleep(0.2)


if __name__ == "__main__":
    main()
