"""API objects as JSON spells them, cut down to the fields that records need, and how they become records.

msgspec skips every field that is not named here without making Python objects of it: 10 µs for a
virt-launcher pod of 18 KB. Other readers of pods as JSON, such as the extender, use `PodObject`
and `pod_record`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any, TypeAlias

import msgspec

from kvplace.core.cluster.victims import DisruptionBudget
from kvplace.core.label_terms import LabelTerm, Operator
from kvplace.core.scalars import ContainerId, NodeName, PodUid
from kvplace.core.well_known_names import (
    ASKING,
    CPU_MAP,
    CPU_POLICY,
    CPU_SET,
    CRANE_AWARENESS,
    CRANE_MANAGER,
    CRANE_POLICY,
    DEVICE_NUMA,
    EMULATOR_THREADS,
    EXPLAIN,
    GUEST_NUMA,
    KVPLACE_CPU_SET,
    MAKE_ROOM,
    MOVABLE,
    MOVE_LABEL,
    NUMA_MEMORY,
    ON_FAILURE,
    PLACE_AGAIN,
    PLACED_LABEL,
    PLACEMENT,
    REQUEST,
    SMT,
)
from kvplace.kube.migrations import MigrationRecord
from kvplace.kube.object_parts import (
    ABSENT,
    ApiObject,
    ConditionObject,
    MatchExpression,
    OwnerReference,
    PodResourceClaim,
    PodSpec,
    StoredObject,
    vmi_of,
)
from kvplace.kube.object_records import (
    NO_SHAPE,
    OUR_PREFIX,
    AgentPod,
    NodeRecord,
    PodRecord,
    VmiRecord,
)

COMPUTE = "compute"
"""The container of a virt-launcher pod that runs QEMU."""


_MIGRATION = "kubevirt.io/migrationJobName"
"""Annotation of the target pod of a live migration: its name."""
AGENT = "kvplace-agent"
"""The field manager of the agent."""


class Annotations(ApiObject, frozen=True):
    """The annotations that kvplace reads; hundreds of others are skipped."""

    request: str = msgspec.field(name=REQUEST, default="")
    placement: str = msgspec.field(name=PLACEMENT, default="")
    cpu_map: str = msgspec.field(name=CPU_MAP, default="")
    kvplace_cpu_set: str | None = msgspec.field(name=KVPLACE_CPU_SET, default=None)
    cpu_policy: str | None = msgspec.field(name=CPU_POLICY, default=None)
    smt: str | None = msgspec.field(name=SMT, default=None)
    emulator_threads: str | None = msgspec.field(name=EMULATOR_THREADS, default=None)
    numa_memory: str | None = msgspec.field(name=NUMA_MEMORY, default=None)
    guest_numa: str | None = msgspec.field(name=GUEST_NUMA, default=None)
    device_numa: str | None = msgspec.field(name=DEVICE_NUMA, default=None)
    on_failure: str | None = msgspec.field(name=ON_FAILURE, default=None)
    explain: str | None = msgspec.field(name=EXPLAIN, default=None)
    movable: str | None = msgspec.field(name=MOVABLE, default=None)
    make_room: str | None = msgspec.field(name=MAKE_ROOM, default=None)
    place_again: str | None = msgspec.field(name=PLACE_AGAIN, default=None)
    cpu_set: str | None = msgspec.field(name=CPU_SET, default=None)
    migration: str = msgspec.field(name=_MIGRATION, default="")
    crane_policy: str | None = msgspec.field(name=CRANE_POLICY, default=None)
    crane_awareness: str | None = msgspec.field(name=CRANE_AWARENESS, default=None)
    crane_manager: str | None = msgspec.field(name=CRANE_MANAGER, default=None)

    @property
    def asking(self) -> dict[str, str]:
        """The annotations with a request."""
        present = ((key, getattr(self, field)) for key, field in _ASKING_FIELDS.items())
        return {key: value for key, value in present if value is not None}


_NAMES = {field.encode_name: field.name for field in msgspec.structs.fields(Annotations)}
_ASKING_FIELDS = {key: _NAMES[key] for key in (*ASKING, PLACE_AGAIN)}


class ObjectMeta(ApiObject, frozen=True):
    """The part of `metadata` that records are made of."""

    name: str = ""
    namespace: str = ""
    uid: str = ""
    resource_version: str = ""
    generation: int = 0
    creation_timestamp: str | None = None
    deletion_timestamp: str | None = None
    annotations: Annotations | None = None
    labels: msgspec.Raw = ABSENT
    """As JSON: most of them are read only when a user asks."""
    owner_references: tuple[OwnerReference, ...] | None = None


class ContainerStatus(ApiObject, frozen=True):
    """One container of a pod."""

    name: str = ""
    container_id: str = msgspec.field(name="containerID", default="")
    """`runtime://id`; empty until it is created."""
    state: dict[str, msgspec.Raw] | None = None
    """By its name: `terminated` once the container has ended."""

    @property
    def has_terminated(self) -> bool:
        """Whether it has ended."""
        return "terminated" in (self.state or {})


def compute_of(statuses: Iterable[ContainerStatus] | None) -> ContainerStatus:
    """Return the container with QEMU; an empty one until the kubelet reports it."""
    return next((each for each in statuses or () if each.name == COMPUTE), _NOT_REPORTED)


_NOT_REPORTED = ContainerStatus()


class PodStatus(ApiObject, frozen=True):
    """The phase, conditions and containers of a pod."""

    phase: str = ""
    nominated_node_name: str = ""
    conditions: tuple[ConditionObject, ...] | None = None
    container_statuses: tuple[ContainerStatus, ...] | None = None
    resource_claim_statuses: tuple[PodResourceClaim, ...] | None = None
    extended_resource_claim_status: PodResourceClaim | None = None


class PodObject(ApiObject, frozen=True):
    """A pod."""

    metadata: ObjectMeta
    spec: PodSpec = PodSpec()
    status: PodStatus = PodStatus()


class OwnedMetadata(ApiObject, frozen=True):
    """The fields of `metadata` that a writer owns."""

    annotations: dict[str, msgspec.Raw] | None = msgspec.field(name="f:annotations", default=None)


class OwnedFields(ApiObject, frozen=True):
    """The fields that a writer owns; others are skipped."""

    metadata: OwnedMetadata = msgspec.field(name="f:metadata", default=OwnedMetadata())
    spec: msgspec.Raw = msgspec.field(name="f:spec", default=ABSENT)
    zones: msgspec.Raw = msgspec.field(name="f:zones", default=ABSENT)


class ManagedFields(ApiObject, frozen=True):
    """An entry of `metadata.managedFields`: a writer and the fields that it wrote last."""

    manager: str = ""
    fields_v1: OwnedFields = msgspec.field(name="fieldsV1", default=OwnedFields())


class MetaWithWriters(ObjectMeta, frozen=True):
    """Metadata of an object that people and agents write."""

    managed_fields: tuple[ManagedFields, ...] | None = None
    finalizers: tuple[str, ...] | None = None

    @property
    def agents(self) -> OwnedFields:
        """The fields that the agent has written last."""
        writers = (entry for entry in self.managed_fields or () if entry.manager == AGENT)
        return next((entry.fields_v1 for entry in writers if entry.fields_v1 != _NOTHING), _NOTHING)


class RawObject(ApiObject, frozen=True):
    """An object of any kind; its spec and status stay unread until a caller needs them."""

    metadata: MetaWithWriters
    spec: msgspec.Raw = msgspec.Raw(b"{}")
    status: msgspec.Raw = msgspec.Raw(b"{}")


class ListMeta(ApiObject, frozen=True):
    """The resource version of a list, and where its next page is."""

    resource_version: str = ""
    continue_: str = msgspec.field(name="continue", default="")


class ObjectList(ApiObject, frozen=True):
    """One page of a list, as objects or as a table; or the table of one object in a watch."""

    metadata: ListMeta
    items: list[msgspec.Raw] | None = None
    rows: list[msgspec.Raw] | None = None


class NodeRow(ApiObject, frozen=True):
    """A node as a row of the table that kubectl prints."""

    cells: tuple[str | int | float | bool | None, ...]
    object: RawObject


class WatchLine(ApiObject, frozen=True):
    """One line of a watch; the kind of its object depends on its type."""

    type: str
    object: msgspec.Raw


def pod_record(pod: PodObject) -> PodRecord:
    """Cut a pod down to its record; request and placement count only on a pod with the label.

    With it, the API server lets only kvplace write them; without it, any client may have.
    """
    metadata, status = pod.metadata, pod.status
    annotations = metadata.annotations or _NO_ANNOTATIONS
    labels = _LABELS.decode(metadata.labels) if metadata.labels != ABSENT else None
    placed = labels is not None and labels.get(PLACED_LABEL) == "true"
    request = annotations.request if placed else ""
    vmi = vmi_of(request, metadata.owner_references or ())
    compute = compute_of(status.container_statuses)
    return PodRecord(
        namespace=metadata.namespace,
        name=metadata.name,
        uid=PodUid(metadata.uid),
        node=NodeName(pod.spec.node_name),
        phase=status.phase,
        deleting=metadata.deletion_timestamp is not None,
        request=request,
        placement=annotations.placement if placed else "",
        cpu_map=annotations.cpu_map,
        vmi=vmi.name,
        vmi_uid=vmi.uid,
        migration=annotations.migration if vmi.name else "",
        compute_terminated=compute.has_terminated,
        compute_container=ContainerId(compute.container_id.partition("://")[2]),
        conditions=tuple(
            found.record for found in status.conditions or () if found.type.startswith(OUR_PREFIX)
        ),
        asking={} if vmi.name else annotations.asking,
        resource_version=metadata.resource_version,
        # The shape of a bound pod is never used.
        shape=NO_SHAPE if pod.spec.node_name else pod.spec.shape,
        priority=pod.spec.priority,
        was_tried=any(map(_was_tried, status.conditions or ())),
        unschedulable="" if pod.spec.node_name else _why_unscheduled(status.conditions or ()),
        nominated=NodeName(status.nominated_node_name),
        # Only the eviction of a bound pod is ever weighed.
        labels=bytes(metadata.labels).decode() if pod.spec.node_name else "",
        resources=pod.spec.resources,
        repels=pod.spec.repels,
        resource_claims=_resource_claims(pod),
        created=metadata.creation_timestamp or "",
    )


def _resource_claims(pod: PodObject) -> tuple[str, ...]:
    made = {one.name: one.resource_claim_name for one in pod.status.resource_claim_statuses or ()}
    stated = pod.spec.resource_claims or ()
    names = {one.resource_claim_name or made.get(one.name) or "": None for one in stated}
    extended = pod.status.extended_resource_claim_status
    if extended is not None and extended.resource_claim_name:
        names[extended.resource_claim_name] = None
    return tuple(names)


def _was_tried(condition: ConditionObject) -> bool:
    """Whether a condition shows that kube-scheduler has checked a pod; a closed gate is not an attempt."""
    return condition.type == "PodScheduled" and condition.reason != "SchedulingGated"


def _why_unscheduled(conditions: Iterable[ConditionObject]) -> str:
    scheduled = next((one for one in conditions if one.type == "PodScheduled"), None)
    return scheduled.message if scheduled is not None and scheduled.status == "False" else ""


def agent_pod_record(pod: PodObject) -> AgentPod:
    """Cut a pod of an agent down to its node, and whether it is ready and stays."""
    metadata = pod.metadata
    ready = any(one.type == "Ready" and one.status == "True" for one in pod.status.conditions or ())
    is_ready = ready and metadata.deletion_timestamp is None
    return AgentPod(PodUid(metadata.uid), NodeName(pod.spec.node_name), is_ready)


def vmi_record(vmi: RawObject) -> VmiRecord:
    """Cut a VMI down to its record."""
    metadata = vmi.metadata
    return VmiRecord(
        namespace=metadata.namespace,
        name=metadata.name,
        uid=metadata.uid,
        asking=(metadata.annotations or _NO_ANNOTATIONS).asking,
        resource_version=metadata.resource_version,
    )


def node_record(node: RawObject) -> NodeRecord:
    """Cut a node down to its record."""
    metadata = node.metadata
    return NodeRecord(
        name=NodeName(metadata.name),
        uid=metadata.uid,
        cpu_map=(metadata.annotations or _NO_ANNOTATIONS).cpu_map,
        resource_version=metadata.resource_version,
        cpu_map_by_agent=f"f:{CPU_MAP}" in (metadata.agents.metadata.annotations or ()),
    )


def node_of_row(row: NodeRow) -> NodeRecord:
    """Cut a row down to the record of its node, with the second column: STATUS."""
    return replace(node_record(row.object), status=str(row.cells[1]))


_NOTHING = OwnedFields()
_NO_ANNOTATIONS = Annotations()
_LABELS = msgspec.json.Decoder(dict[str, str] | None)


MigrationObject: TypeAlias = StoredObject[dict[str, Any], dict[str, Any]]
"""A VirtualMachineInstanceMigration."""


def migration_record(migration: MigrationObject) -> MigrationRecord:
    """Cut a live migration down to its record."""
    meta = migration.metadata
    return MigrationRecord(
        namespace=meta.namespace,
        name=meta.name,
        vmi=str(migration.spec.get("vmiName", "")),
        phase=str((migration.status or {}).get("phase") or ""),
        created=meta.creation_timestamp or "",
        is_ours=(meta.labels or {}).get(MOVE_LABEL) == "true",
    )


class BudgetSelector(ApiObject, frozen=True):
    """A label selector."""

    match_labels: dict[str, str] | None = None
    match_expressions: tuple[MatchExpression, ...] | None = None


class BudgetSpec(ApiObject, frozen=True):
    """The pods of a budget."""

    selector: BudgetSelector | None = None


class BudgetStatus(ApiObject, frozen=True):
    """The number of these pods that may still be evicted."""

    disruptions_allowed: int = 0
    disrupted_pods: dict[str, msgspec.Raw] | None = None


BudgetObject: TypeAlias = StoredObject[BudgetSpec, BudgetStatus]
"""A PodDisruptionBudget: read when a pod preempts, not watched.

KubeVirt keeps one for each VM that can migrate, and each changes with its VM, while preemption is rare.
"""


def disruption_budget(document: BudgetObject) -> DisruptionBudget:
    """Read a PodDisruptionBudget; a selector with an unknown operator selects nothing."""
    selector, status = document.spec.selector or BudgetSelector(), document.status or BudgetStatus()
    labels = [LabelTerm(key, Operator.IN, (value,)) for key, value in (selector.match_labels or {}).items()]
    expressions = [one.term for one in selector.match_expressions or ()]
    known = [term for term in expressions if term is not None]
    return DisruptionBudget(
        namespace=document.metadata.namespace,
        name=document.metadata.name,
        selector=(*labels, *known) if len(known) == len(expressions) else (),
        allowed=status.disruptions_allowed,
        disrupted=frozenset(status.disrupted_pods or ()),
    )
