"""The protocol buffers of NRI and ttrpc, to and from our own values.

Only the fields that we use are described (github.com/containerd/nri, pkg/api/api.proto;
github.com/containerd/ttrpc, request.proto); protocol buffers skip the others. The descriptors are made when
this module is imported: no compiler, no generated file, and no coupling of that file's version to the
library's. The library costs about 4 MiB and 25 ms.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import DecodeError

from kvplace.core.cpuset import format_cpu_list, parse_cpu_list
from kvplace.core.errors import Unavailable
from kvplace.core.scalars import NO_CPUS, ContainerId, CpuMask, PodUid
from kvplace.nri.values import (
    DEFAULT_REQUEST_TIMEOUT_S,
    NO_CPUSET,
    ContainerUpdate,
    Cpuset,
    Creation,
    NriContainer,
    NriEvent,
    PodSandbox,
    Runtime,
    SandboxId,
)

_PACKAGE = "kvplace.nri"
_POD_AND_CONTAINER = ((1, "pod", "PodSandbox"), (2, "container", "Container"))
_SCHEMA: Mapping[str, tuple[tuple[int, str, str], ...]] = {
    # Messages of ttrpc
    "Request": (
        (1, "service", "string"),
        (2, "method", "string"),
        (3, "payload", "bytes"),
        (4, "timeout_nano", "int64"),
    ),
    "Response": ((1, "status", "Status"), (2, "payload", "bytes")),
    "Status": ((1, "code", "int32"), (2, "message", "string")),
    # Calls of NRI
    "RegisterPluginRequest": ((1, "plugin_name", "string"), (2, "plugin_idx", "string")),
    "ConfigureRequest": (
        (2, "runtime_name", "string"),
        (3, "runtime_version", "string"),
        (5, "request_timeout", "int64"),
    ),
    "ConfigureResponse": ((2, "events", "int32"),),
    "SynchronizeRequest": (
        (1, "pods", "PodSandbox*"),
        (2, "containers", "Container*"),
        (3, "more", "bool"),
    ),
    "SynchronizeResponse": ((1, "update", "ContainerUpdate*"), (2, "more", "bool")),
    "ContainerRequest": _POD_AND_CONTAINER,
    "CreateContainerResponse": ((1, "adjust", "ContainerAdjustment"), (2, "update", "ContainerUpdate*")),
    "UpdateContainerRequest": (*_POD_AND_CONTAINER, (3, "linux_resources", "LinuxResources")),
    "UpdateResponse": ((1, "update", "ContainerUpdate*"),),
    "StateChangeEvent": ((1, "event", "int32"), (2, "pod", "PodSandbox"), (3, "container", "Container")),
    # Contents of these calls
    "PodSandbox": (
        (1, "id", "string"),
        (2, "name", "string"),
        (3, "uid", "string"),
        (4, "namespace", "string"),
        (5, "labels", "Entry*"),
        (6, "annotations", "Entry*"),
    ),
    "Container": (
        (1, "id", "string"),
        (2, "pod_sandbox_id", "string"),
        (3, "name", "string"),
        (4, "state", "int32"),
        (8, "env", "string*"),
        (9, "mounts", "Mount*"),
        (11, "linux", "LinuxContainer"),
        (20, "cdi_devices", "CdiDevice*"),
    ),
    # A map is a list of these on the wire.
    "Entry": ((1, "key", "string"), (2, "value", "string")),
    "Mount": ((1, "destination", "string"),),
    "CdiDevice": ((1, "name", "string"),),
    "LinuxContainer": ((3, "resources", "LinuxResources"), (5, "cgroups_path", "string")),
    "LinuxResources": ((2, "cpu", "LinuxCPU"),),
    "LinuxCPU": ((6, "cpus", "string"), (7, "mems", "string")),
    "ContainerAdjustment": ((6, "linux", "LinuxContainerAdjustment"),),
    "LinuxContainerAdjustment": ((2, "resources", "LinuxResources"),),
    "ContainerUpdate": (
        (1, "container_id", "string"),
        (2, "linux", "LinuxContainerUpdate"),
        (3, "ignore_failure", "bool"),
    ),
    "LinuxContainerUpdate": ((1, "resources", "LinuxResources"),),
}


def _message_classes() -> Mapping[str, Any]:
    kinds = descriptor_pb2.FieldDescriptorProto
    file = descriptor_pb2.FileDescriptorProto(name="kvplace/nri.proto", package=_PACKAGE, syntax="proto3")
    for message, fields in _SCHEMA.items():
        described = file.message_type.add(name=message)
        for number, name, kind in fields:
            label = kinds.LABEL_REPEATED if kind.endswith("*") else kinds.LABEL_OPTIONAL
            field = described.field.add(number=number, name=name, label=label)
            kind = kind.removesuffix("*")
            if kind in _SCHEMA:
                field.type, field.type_name = kinds.TYPE_MESSAGE, f".{_PACKAGE}.{kind}"
            else:
                field.type = kinds.Type.Value(f"TYPE_{kind.upper()}")
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    find = pool.FindMessageTypeByName
    return {name: message_factory.GetMessageClass(find(f"{_PACKAGE}.{name}")) for name in _SCHEMA}


_CLASSES = _message_classes()
_EVENTS = frozenset(event.value for event in NriEvent)
_STOPPED = 4
"""The state of a container that has ended."""


class PluginCall(NamedTuple):
    """A ttrpc request."""

    service: str
    method: str
    payload: bytes


class BadPeer(Unavailable):
    """The other end does not speak NRI; the connection cannot be used any more."""


class CallFailed(Unavailable):
    """A ttrpc call was answered with an error."""

    def __init__(self, code: int, message: str) -> None:
        self.code = code
        super().__init__(f"the NRI runtime answered with error {code}: {message}")


def write_call(call: PluginCall, timeout_s: float) -> bytes:
    """Write a ttrpc request."""
    return _written("Request", **call._asdict(), timeout_nano=int(timeout_s * 1e9))


def read_call(body: bytes) -> PluginCall:
    """Read a ttrpc request; raises BadPeer."""
    request = _read("Request", body)
    return PluginCall(request.service, request.method, request.payload)


def write_result(payload: bytes) -> bytes:
    """Write a ttrpc response to a call that succeeded."""
    return _written("Response", payload=payload)


def write_failure(code: int, message: str) -> bytes:
    """Write a ttrpc response to a call that failed."""
    return _written("Response", status={"code": code, "message": message})


def read_result(body: bytes) -> bytes:
    """Read a ttrpc response; raises CallFailed or BadPeer."""
    response = _read("Response", body)
    if response.status.code:
        raise CallFailed(response.status.code, response.status.message)
    return bytes(response.payload)


def write_registration(name: str, index: str) -> bytes:
    """Write the payload of RegisterPlugin."""
    return _written("RegisterPluginRequest", plugin_name=name, plugin_idx=index)


def read_runtime(payload: bytes) -> Runtime:
    """Read the payload of Configure; raises BadPeer."""
    request = _read("ConfigureRequest", payload)
    timeout_s = request.request_timeout / 1000 or DEFAULT_REQUEST_TIMEOUT_S
    return Runtime(request.runtime_name, request.runtime_version, timeout_s)


def write_subscription(events: Iterable[NriEvent]) -> bytes:
    """Write the answer to Configure; `events` must not be empty, which NRI takes for all."""
    return _written("ConfigureResponse", events=sum(1 << (event - 1) for event in set(events)))


def read_synchronization(payload: bytes) -> tuple[list[PodSandbox], list[NriContainer], bool]:
    """Read pods and containers from the payload of Synchronize, and whether more follow; raises BadPeer.

    Only the answer to the last part may carry updates.
    """
    request = _read("SynchronizeRequest", payload)
    return [*map(_pod, request.pods)], [*map(_container, request.containers)], request.more


def write_synchronized(updates: Iterable[ContainerUpdate], *, more: bool) -> bytes:
    """Write the answer to Synchronize; `more` repeats the request's."""
    return _written("SynchronizeResponse", update=map(_update, updates), more=more)


def read_subject(payload: bytes) -> tuple[PodSandbox, NriContainer]:
    """Read the payload of any call about a container, or about a pod alone; raises BadPeer."""
    request = _read("ContainerRequest", payload)
    return _pod(request.pod), _container(request.container)


def write_creation(creation: Creation) -> bytes:
    """Write the answer to CreateContainer."""
    adjust = {"linux": {"resources": _resources(creation.cpuset)}} if creation.cpuset != NO_CPUSET else None
    return _written("CreateContainerResponse", adjust=adjust, update=map(_update, creation.updates))


def read_asked_cpuset(payload: bytes) -> Cpuset:
    """Read the cpuset that UpdateContainer asks for; raises BadPeer."""
    return _cpuset(_read("UpdateContainerRequest", payload).linux_resources)


def write_updates(updates: Iterable[ContainerUpdate]) -> bytes:
    """Write the answer to UpdateContainer or StopContainer."""
    return _written("UpdateResponse", update=map(_update, updates))


def read_state_change(payload: bytes) -> tuple[NriEvent | None, PodSandbox, NriContainer]:
    """Read the payload of StateChange; the event is None where we do not know it. Raises BadPeer."""
    change = _read("StateChangeEvent", payload)
    event = NriEvent(change.event) if change.event in _EVENTS else None
    return event, _pod(change.pod), _container(change.container)


def _read(name: str, payload: bytes) -> Any:
    try:
        return _CLASSES[name].FromString(payload)
    except DecodeError:
        raise BadPeer(f"the NRI runtime sent {len(payload)} bytes that are not a {name}") from None


def _written(name: str, **fields: object) -> bytes:
    return bytes(_CLASSES[name](**fields).SerializeToString())


def _pod(pod: Any) -> PodSandbox:
    return PodSandbox(
        id=SandboxId(pod.id),
        name=pod.name,
        namespace=pod.namespace,
        uid=PodUid(pod.uid),
        labels={entry.key: entry.value for entry in pod.labels},
        annotations={entry.key: entry.value for entry in pod.annotations},
    )


def _container(container: Any) -> NriContainer:
    return NriContainer(
        id=ContainerId(container.id),
        sandbox=SandboxId(container.pod_sandbox_id),
        name=container.name,
        has_stopped=container.state == _STOPPED,
        mounts=frozenset(mount.destination for mount in container.mounts),
        environment=tuple(container.env),
        cdi_devices=tuple(device.name for device in container.cdi_devices),
        cgroup_path=container.linux.cgroups_path,
        cpuset=_cpuset(container.linux.resources),
    )


def _cpuset(resources: Any) -> Cpuset:
    return Cpuset(_ids(resources.cpu.cpus), _ids(resources.cpu.mems))


def _ids(text: str) -> CpuMask:
    """Read a list of ids; one that the kernel would not take either counts as not set."""
    try:
        return parse_cpu_list(text)
    except ValueError:
        return NO_CPUS


def _resources(cpuset: Cpuset) -> Mapping[str, object]:
    return {"cpu": {"cpus": format_cpu_list(cpuset.cpus), "mems": format_cpu_list(cpuset.memory_nodes)}}


def _update(update: ContainerUpdate) -> Mapping[str, object]:
    # A failure that is not ignored would end the runtime's work on the updates after it.
    return {
        "container_id": update.container,
        "linux": {"resources": _resources(update.cpuset)},
        "ignore_failure": True,
    }
