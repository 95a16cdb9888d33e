"""Devices of the kubelet, all and by pod, from its podresources socket.

The protocol is `v1.PodResourcesLister` (k8s.io/kubelet, pkg/apis/podresources/v1/api.proto). The kubelet
writes one entry for each device and each of its NUMA nodes, and NUMA node 0 as an empty message. It states no
UID of a pod: by now another pod may have its name and namespace.

Each call is one unary gRPC call on a connection of its own. The server is not trusted to answer in time, in
HTTP/2, or within reason: a call has a deadline and its answer a largest size, and everything else is one
error. h2 does HTTP/2 itself.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote

from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.events import (
    ConnectionTerminated,
    DataReceived,
    Event,
    ResponseReceived,
    StreamEnded,
    StreamReset,
    TrailersReceived,
)
from h2.exceptions import ProtocolError

from kvplace.core.errors import Misconfigured, Unavailable
from kvplace.core.node_devices import NO_NUMA, DeviceCount, PodDevice, is_device
from kvplace.core.protobuf import BadMessage, fields_of, read_bytes_fields
from kvplace.core.scalars import NumaId, ResourceName

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

PluginDevice = tuple[ResourceName, str]
"""A resource and the id that its plugin gave to a device."""
DeviceNodes = Mapping[PluginDevice, frozenset[NumaId]]
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


def read_devices(message: bytes, field: int) -> dict[PluginDevice, frozenset[NumaId]]:
    """Read the ContainerDevices in a field of a message; raises BadMessage or UnicodeDecodeError."""
    found: dict[PluginDevice, frozenset[NumaId]] = {}
    for devices in _messages(message, field):
        resource = _text(devices, 1)
        topologies = _messages(devices, 3)
        nodes = {_node_id(node) for topology in topologies for node in _messages(topology, 1)} - {NO_NUMA}
        if is_device(resource):
            for id_ in _messages(devices, 2):
                key = (ResourceName(resource), id_.decode())
                found[key] = found.get(key, frozenset()) | nodes
    return found


def _pods(message: bytes) -> Iterator[ListedPod]:
    for pod in _messages(message, 1):
        devices: dict[PluginDevice, frozenset[NumaId]] = {}
        for container in _messages(pod, 3):
            devices.update(read_devices(container, 2))
        if devices:
            yield ListedPod(_text(pod, 2), _text(pod, 1), devices)


def _text(message: bytes, field: int) -> str:
    return read_bytes_fields(message).get(field, b"").decode()


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


_PREFIX = 5
_READ_BYTES = 1 << 16
_WINDOW = 1 << 20
_MOST_SHOWN = 200


async def unary_call(
    socket: Path, method: str, request: bytes, *, deadline_s: float, most_bytes: int
) -> bytes:
    """Call `/package.Service/Method` and return the answer's message.

    Raises Misconfigured where the socket may not be opened, and Unavailable for all else that goes wrong.
    """
    try:
        async with asyncio.timeout(deadline_s):
            reader, writer = await asyncio.open_unix_connection(socket)
            try:
                return await _exchange(reader, writer, _GrpcAnswer(method, most_bytes), request)
            finally:
                writer.close()
    except TimeoutError:
        raise Unavailable(f"{socket} did not answer {method} in {deadline_s:g} s") from None
    except PermissionError as error:
        raise Misconfigured(f"{socket} may not be opened: {error.strerror}; run the agent as root") from None
    except OSError as error:
        raise Unavailable(f"{socket} does not answer: {error.strerror or error}") from None
    except ProtocolError as error:
        raise Unavailable(f"{socket} does not speak HTTP/2: {str(error)[:_MOST_SHOWN]}") from None
    except _BadAnswer as error:
        raise Unavailable(f"{socket}: {method}: {error}") from None


class _BadAnswer(Exception):
    """The answer is not one message of gRPC with the status OK."""


class _GrpcAnswer:
    """The part of an answer that has arrived."""

    def __init__(self, method: str, most_bytes: int) -> None:
        self.method = method
        self._most_bytes = most_bytes
        self._body = bytearray()
        self._headers: dict[bytes, bytes] = {}
        self.is_complete = False

    def handle(self, event: Event) -> None:
        match event:
            case ResponseReceived() | TrailersReceived():
                self._headers.update({bytes(name): bytes(value) for name, value in event.headers})
            case DataReceived():
                self._body += event.data
                if len(self._body) > self._most_bytes + _PREFIX:
                    raise _BadAnswer(f"the answer is longer than {self._most_bytes} bytes")
            case StreamEnded():
                self.is_complete = True
            case StreamReset() | ConnectionTerminated():
                raise _BadAnswer(f"the call was ended with the HTTP/2 error {event.error_code}")
            case _:
                pass

    def message(self) -> bytes:
        status = self._headers.get(b":status", b"")
        if status != b"200":
            raise _BadAnswer(f"the HTTP status is {_shown(status)}")
        if (grpc := self._headers.get(b"grpc-status", b"")) != b"0":
            sentence = unquote(_shown(self._headers.get(b"grpc-message", b"")))
            raise _BadAnswer(f"gRPC status {_shown(grpc) or 'missing'}: {sentence}".rstrip(": "))
        if len(self._body) < _PREFIX or self._body[0] != 0:
            raise _BadAnswer("the answer is not one message without compression")
        if int.from_bytes(self._body[1:_PREFIX], "big") != len(self._body) - _PREFIX:
            raise _BadAnswer("the answer is not as long as it states")
        return bytes(self._body[_PREFIX:])


async def _exchange(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, answer: _GrpcAnswer, request: bytes
) -> bytes:
    http = H2Connection(H2Configuration(client_side=True, header_encoding=None))
    http.initiate_connection()
    http.increment_flow_control_window(_WINDOW)
    headers = [
        (":method", "POST"),
        (":scheme", "http"),
        (":path", answer.method),
        (":authority", "localhost"),
        ("content-type", "application/grpc"),
        ("te", "trailers"),
    ]
    http.send_headers(1, headers)
    http.send_data(1, b"\0" + len(request).to_bytes(4, "big") + request, end_stream=True)
    while not answer.is_complete:
        writer.write(http.data_to_send())
        await writer.drain()
        data = await reader.read(_READ_BYTES)
        if not data:
            raise _BadAnswer("the connection was closed before the answer was complete")
        for event in http.receive_data(data):
            answer.handle(event)
            if isinstance(event, DataReceived) and event.flow_controlled_length:
                http.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
    return answer.message()


def _shown(raw: bytes) -> str:
    return raw[:_MOST_SHOWN].decode("ascii", "replace")
