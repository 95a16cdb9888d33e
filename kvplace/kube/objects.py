"""API objects as they come over the wire, cut down to what records need, and how they become records.

msgspec skips everything that is not named here without making Python objects of it: 10 µs for a
virt-launcher pod of 18 KB. Nothing leaves this module but records.
"""

from __future__ import annotations

from typing import Any

import msgspec

from kvplace.core.annotations import REQUEST
from kvplace.core.cpu_map import CPU_MAP
from kvplace.core.cpuset import parse_cpu_list
from kvplace.core.errors import BadTopology, Corrupt
from kvplace.core.ledger import Ledger, read_ledger
from kvplace.core.placement import PLACEMENT
from kvplace.core.topology import Topology
from kvplace.core.topology_document import read_topology
from kvplace.kube.api_errors import NOT_JSON
from kvplace.kube.records import LedgerRecord, NodeRecord, PodRecord, TopologyRecord

COMPUTE = "compute"


class _Wire(msgspec.Struct, gc=False, rename="camel"):
    """Base of everything here: camelCase on the wire, and out of the garbage collector's sight."""


class Annotations(_Wire):
    """The annotations that kvplace reads; hundreds of others are skipped."""

    request: str = msgspec.field(name=REQUEST, default="")
    placement: str = msgspec.field(name=PLACEMENT, default="")
    cpu_map: str = msgspec.field(name=CPU_MAP, default="")


class OwnerReference(_Wire):
    """Who made an object."""

    kind: str = ""
    name: str = ""


class Metadata(_Wire):
    """The part of ObjectMeta that anybody here reads."""

    name: str = ""
    namespace: str = ""
    uid: str = ""
    resource_version: str = ""
    generation: int = 0
    deletion_timestamp: str | None = None
    annotations: Annotations | None = None
    owner_references: tuple[OwnerReference, ...] | None = None


class PodSpec(_Wire):
    """Where a pod is, and who was to put it there."""

    node_name: str = ""
    scheduler_name: str = ""


class Terminated(_Wire):
    """A container's end; that it is there says enough."""


class ContainerState(_Wire):
    """Whether a container has ended."""

    terminated: Terminated | None = None


class ContainerStatus(_Wire):
    """One container of a pod."""

    name: str = ""
    state: ContainerState | None = None


class Condition(_Wire):
    """One condition of a pod."""

    type: str = ""
    status: str = ""


class PodStatus(_Wire):
    """How a pod is."""

    phase: str = ""
    conditions: tuple[Condition, ...] | None = None
    container_statuses: tuple[ContainerStatus, ...] | None = None


class PodObject(_Wire):
    """A pod."""

    metadata: Metadata
    spec: PodSpec = msgspec.field(default_factory=PodSpec)
    status: PodStatus = msgspec.field(default_factory=PodStatus)


class NodeSpec(_Wire):
    """What an operator says about a node."""

    unschedulable: bool | None = None


class NodeObject(_Wire):
    """A node."""

    metadata: Metadata
    spec: NodeSpec = msgspec.field(default_factory=NodeSpec)


class CustomObject(_Wire):
    """A NodeTopology or NodeLedger; its spec stays unread until its version turns out to be new."""

    metadata: Metadata
    spec: msgspec.Raw = msgspec.Raw(b"{}")
    status: msgspec.Raw = msgspec.Raw(b"{}")


class TopologyStatus(_Wire):
    """The one thing that agents report of a machine and that placing depends on."""

    kubelet_cpus: str = ""


class ListMetadata(_Wire):
    """Where a list is in time, and where its next page is."""

    resource_version: str = ""
    continue_: str = msgspec.field(name="continue", default="")


class ObjectList(_Wire):
    """One page of a list."""

    metadata: ListMetadata
    items: list[msgspec.Raw] | None = None


class WatchLine(_Wire):
    """One line of a watch; what the object is depends on the type."""

    type: str
    object: msgspec.Raw


class VersionOnly(_Wire):
    """The object of a bookmark, and the answer to a write of which nothing else matters."""

    metadata: Metadata


def pod_record(pod: PodObject) -> PodRecord:
    """Cut a pod down to its record."""
    metadata, status = pod.metadata, pod.status
    annotations = metadata.annotations or _NO_ANNOTATIONS
    return PodRecord(
        namespace=metadata.namespace,
        name=metadata.name,
        uid=metadata.uid,
        node=pod.spec.node_name,
        phase=status.phase,
        deleting=metadata.deletion_timestamp is not None,
        scheduler_name=pod.spec.scheduler_name,
        request=annotations.request,
        placement=annotations.placement,
        cpu_map=annotations.cpu_map,
        vmi=next(
            (
                owner.name
                for owner in metadata.owner_references or ()
                if owner.kind == "VirtualMachineInstance"
            ),
            "",
        ),
        compute_terminated=any(
            container.name == COMPUTE
            and container.state is not None
            and container.state.terminated is not None
            for container in status.container_statuses or ()
        ),
        unschedulable=any(
            condition.type == "PodScheduled" and condition.status == "False"
            for condition in status.conditions or ()
        ),
        resource_version=metadata.resource_version,
    )


def node_record(node: NodeObject) -> NodeRecord:
    """Cut a node down to its record."""
    metadata = node.metadata
    return NodeRecord(
        name=metadata.name,
        uid=metadata.uid,
        unschedulable=bool(node.spec.unschedulable),
        cpu_map=(metadata.annotations or _NO_ANNOTATIONS).cpu_map,
        resource_version=metadata.resource_version,
    )


class TopologyReader:
    """Makes records of NodeTopology objects; reads a machine only when its spec has really changed.

    An agent writes the status far more often than the spec, and only the spec moves the generation.
    """

    def __init__(self) -> None:
        self._read: dict[str, tuple[str, int, Topology | None, str]] = {}

    def record(self, document: CustomObject) -> TopologyRecord:
        metadata = document.metadata
        known = self._read.get(metadata.name)
        if known is None or not metadata.generation or known[:2] != (metadata.uid, metadata.generation):
            known = (metadata.uid, metadata.generation, *_machine(document.spec))
            self._read[metadata.name] = known
        topology, problem = known[2:]
        kubelet_cpus = 0
        try:
            status = _STATUS.decode(document.status)
            kubelet_cpus = parse_cpu_list(status.kubelet_cpus if status else "", what="status.kubeletCpus")
        except (ValueError, *NOT_JSON) as error:
            topology, problem = None, problem or str(error)
        return TopologyRecord(metadata.name, topology, problem, kubelet_cpus, metadata.resource_version)

    def forget(self, node: str) -> None:
        """Drop what is kept of a node that is gone."""
        self._read.pop(node, None)


def ledger_record(document: CustomObject) -> LedgerRecord:
    """Read a NodeLedger; content that cannot be read becomes the record's problem."""
    metadata = document.metadata
    ledger, problem = Ledger(), ""
    try:
        ledger = read_ledger(_JSON.decode(document.spec))
    except (Corrupt, *NOT_JSON) as error:
        problem = str(error)
    return LedgerRecord(metadata.name, ledger, metadata.resource_version, metadata.uid, problem)


def _machine(spec: msgspec.Raw) -> tuple[Topology | None, str]:
    try:
        return read_topology(_JSON.decode(spec)), ""
    except (BadTopology, *NOT_JSON) as error:
        return None, str(error)


_NO_ANNOTATIONS = Annotations()
_JSON: msgspec.json.Decoder[Any] = msgspec.json.Decoder()
_STATUS: msgspec.json.Decoder[TopologyStatus | None] = msgspec.json.Decoder(TopologyStatus | None)
