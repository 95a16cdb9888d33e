"""NodeTopologies and NodeResourceTopologies as JSON: how they become records, and the calls that write them.

A new object is owned by its node, so it is deleted together with the node. Every change names the state that
it was decided on, with a resource version. `ApiCluster` makes the calls.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from weakref import WeakValueDictionary

import msgspec

from kvplace.core.cpuset import parse_cpu_list
from kvplace.core.errors import BadTopology
from kvplace.core.free_resources import NOTHING_IN_USE, read_memory_in_use
from kvplace.core.node_devices import DeviceReport, read_device_report
from kvplace.core.node_topology import (
    API_VERSION,
    GROUP,
    RESOURCE_TOPOLOGY_VERSION,
    VERSION,
    Enforcement,
    read_topology,
)
from kvplace.core.scalars import NO_CPUS, NodeName, PodUid
from kvplace.core.topology import Topology
from kvplace.kube.api_errors import NOT_JSON
from kvplace.kube.object_parts import ABSENT, ApiObject, ConditionObject
from kvplace.kube.object_records import (
    NodeRecord,
    PodReport,
    ResourceTopologyRecord,
    TopologyRecord,
)
from kvplace.kube.objects import CustomObject, VersionOnly
from kvplace.kube.session import METADATA_ONLY, Call, path_of


class PodReportObject(ApiObject, frozen=True):
    """An entry of `status.pods` of a NodeTopology."""

    uid: str
    namespace: str = ""
    pod: str = ""
    revision: int = 0
    pinned: bool = False
    running: bool = False
    failed_revision: int = 0
    restored_placement: str = ""
    cpus: str = ""
    drift: str = ""


class StatusObject(ApiObject, frozen=True):
    """The fields of a NodeTopology's status."""

    kubelet_cpus: str = ""
    enforcement: Enforcement = Enforcement.NONE
    pods: tuple[PodReportObject, ...] = ()
    conditions: tuple[ConditionObject, ...] = ()
    observed_generation: int | None = None
    in_use: dict[str, Any] | None = None
    devices: dict[str, Any] | None = None


class TopologyReader:
    """Makes records of NodeTopology objects; nodes with equal specs share one machine, which is read once.

    An agent writes the status far more often than the spec. A machine is remembered for as long as a record
    of it is in use, so that of deleted nodes nothing stays.
    """

    def __init__(self) -> None:
        self._machines: WeakValueDictionary[bytes, Topology] = WeakValueDictionary()
        """Machines by their specs."""

    def record(self, document: CustomObject) -> TopologyRecord:
        """Read a NodeTopology; content that cannot be read becomes the record's problem."""
        metadata = document.metadata
        spec = bytes(document.spec)
        topology, problem = self._machines.get(spec), ""
        kubelet_cpus, enforcement, in_use = NO_CPUS, Enforcement.NONE, NOTHING_IN_USE
        pods: dict[PodUid, PodReport] = {}
        devices: DeviceReport | None = None
        status: StatusObject | None = None
        try:
            if topology is None:
                topology = self._machines[spec] = read_topology(_JSON.decode(spec))
        except (BadTopology, ValueError, *NOT_JSON) as error:
            problem = str(error)
        # Each on its own: an edit of a description does not change what runs on the machine.
        try:
            status = _STATUS.decode(document.status)
            if status is not None:
                kubelet_cpus = parse_cpu_list(status.kubelet_cpus, what="status.kubeletCpus")
                enforcement = status.enforcement
                in_use = read_memory_in_use(status.in_use, "status.inUse")
                devices = read_device_report(status.devices, "status.devices")
                pods = {PodUid(pod.uid): _pod_report(pod) for pod in status.pods}
        except (ValueError, *NOT_JSON) as error:
            topology, problem = None, problem or str(error)
        return TopologyRecord(
            NodeName(metadata.name),
            topology,
            problem,
            kubelet_cpus,
            metadata.resource_version,
            enforcement,
            pods,
            metadata.generation,
            metadata.agents.spec != ABSENT,
            () if status is None else tuple(one.record for one in status.conditions),
            None if status is None else status.observed_generation,
            in_use,
            devices,
        )


def _pod_report(pod: PodReportObject) -> PodReport:
    return PodReport(
        uid=PodUid(pod.uid),
        namespace=pod.namespace,
        pod=pod.pod,
        revision=pod.revision,
        pinned=pod.pinned,
        running=pod.running,
        failed_revision=pod.failed_revision,
        restored_placement=pod.restored_placement,
        cpus=parse_cpu_list(pod.cpus, what="status.pods.cpus"),
        drift=pod.drift,
    )


def resource_topology_record(document: VersionOnly) -> ResourceTopologyRecord:
    """Cut a NodeResourceTopology down to its record."""
    metadata = document.metadata
    return ResourceTopologyRecord(
        NodeName(metadata.name), metadata.resource_version, metadata.agents.zones != ABSENT
    )


_JSON: msgspec.json.Decoder[Any] = msgspec.json.Decoder()
_STATUS: msgspec.json.Decoder[StatusObject | None] = msgspec.json.Decoder(StatusObject | None)


RESOURCE = "nodetopologies"
RESOURCE_TOPOLOGY = "noderesourcetopologies"
"""The kind that other schedulers read about NUMA nodes."""
_encode = msgspec.json.encode


def create_call(node: NodeRecord, spec: Mapping[str, Any], written_by: Mapping[str, str]) -> Call:
    """Create the NodeTopology of a node."""
    return Call(
        "create",
        RESOURCE,
        _path(),
        name=node.name,
        query=written_by,
        body=_encode(
            {
                "apiVersion": API_VERSION,
                "kind": "NodeTopology",
                "metadata": _metadata_of_new(node),
                "spec": spec,
            }
        ),
        accept=METADATA_ONLY,
    )


def change_call(
    node: NodeName, version: str, change: Mapping[str, Any], written_by: Mapping[str, str], *subresource: str
) -> Call:
    """Change a NodeTopology, or a subresource of it, that still has this resource version."""
    return Call(
        "patch",
        "/".join((RESOURCE, *subresource)),
        _path(node, *subresource),
        name=node,
        query=written_by,
        body=_encode({"metadata": {"resourceVersion": version}, **change}),
        accept=METADATA_ONLY,
    )


def read_resource_topology_call(node: NodeName) -> Call:
    """Ask for the metadata of a NodeResourceTopology."""
    return Call("get", RESOURCE_TOPOLOGY, _resource_topology_path(node), name=node, accept=METADATA_ONLY)


def write_resource_topology_call(
    node: NodeRecord,
    document: Mapping[str, Any],
    before: ResourceTopologyRecord | None,
    written_by: Mapping[str, str],
) -> Call:
    """Create a NodeResourceTopology, or replace the one that is still as `before` states."""
    if before is None:
        metadata, name = _metadata_of_new(node), []
    else:
        metadata, name = {"resourceVersion": before.resource_version}, [node.name]
    return Call(
        "create" if before is None else "patch",
        RESOURCE_TOPOLOGY,
        _resource_topology_path(*name),
        name=node.name,
        query=written_by,
        body=_encode({**document, "metadata": {**document["metadata"], **metadata}}),
        accept=METADATA_ONLY,
    )


def _metadata_of_new(node: NodeRecord) -> dict[str, Any]:
    """Name a new object after a node; the API server deletes both together."""
    owner = {"apiVersion": "v1", "kind": "Node", "name": node.name, "uid": node.uid}
    return {"name": node.name, "ownerReferences": [owner]}


def _path(*segments: str) -> str:
    return path_of("apis", GROUP, VERSION, RESOURCE, *segments)


def _resource_topology_path(*segments: str) -> str:
    group, _, version = RESOURCE_TOPOLOGY_VERSION.partition("/")
    return path_of("apis", group, version, RESOURCE_TOPOLOGY, *segments)
