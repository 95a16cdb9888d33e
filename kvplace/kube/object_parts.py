"""Parts of API objects as JSON spells them: metadata, conditions, owners, and the spec of a pod.

A full pod or node has hundreds of fields. msgspec skips each field that a class here does not name.

Two pods of one scheduling shape are offered the same nodes, apart from the amounts that they request. A pod
has no shape if its node also depends on other pods, on volumes or on devices: only kube-scheduler knows.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import lru_cache
from hashlib import blake2b
from types import MappingProxyType
from typing import Generic, TypeVar

import msgspec

from kvplace.core.label_terms import LabelTerm, Operator
from kvplace.core.quantity import parse_quantity
from kvplace.kube.api_errors import NOT_JSON
from kvplace.kube.object_records import NO_SHAPE, Condition

S = TypeVar("S")
T = TypeVar("T")

ABSENT = msgspec.Raw(b"")
"""A field that an object does not have."""
VMI = "VirtualMachineInstance"
_KUBEVIRT = "kubevirt.io/"
"""How the API versions of KubeVirt begin; any client can define a kind of the same name in another group."""
_OPERATORS = {
    "In": Operator.IN,
    "NotIn": Operator.NOT_IN,
    "Exists": Operator.EXISTS,
    "DoesNotExist": Operator.ABSENT,
    "Gt": Operator.GREATER,
    "Lt": Operator.LESS,
}


class ApiObject(msgspec.Struct, frozen=True, gc=False, rename="camel"):
    """Base of everything here: keys in camelCase, and not tracked by the garbage collector."""


class OwnerReference(ApiObject, frozen=True):
    """An entry of `metadata.ownerReferences`."""

    api_version: str = ""
    kind: str = ""
    name: str = ""
    uid: str = ""
    controller: bool | None = None

    @property
    def is_vmi(self) -> bool:
        """Whether a VMI controls the object by its metadata, which its creator and editors can write."""
        return self.kind == VMI and self.api_version.startswith(_KUBEVIRT) and self.controller is True


class Metadata(ApiObject, frozen=True):
    """The metadata of an object that no cache holds; for the others there is `objects.ObjectMeta`."""

    name: str = ""
    namespace: str = ""
    labels: dict[str, str] | None = None
    annotations: dict[str, str] | None = None
    uid: str = ""
    resource_version: str = ""
    creation_timestamp: str | None = None
    deletion_timestamp: str | None = None
    owner_references: tuple[OwnerReference, ...] | None = None


class StoredObject(ApiObject, Generic[S, T], frozen=True):
    """An object of any kind with a spec and a status."""

    metadata: Metadata
    spec: S
    status: T | None = None


class ConditionObject(ApiObject, frozen=True):
    """An entry of `status.conditions`."""

    type: str = ""
    status: str = ""
    reason: str = ""
    message: str = ""
    last_transition_time: str | None = None

    @property
    def record(self) -> Condition:
        """The condition as records have it."""
        changed = self.last_transition_time or ""
        return Condition.read(self.type, self.status, self.reason, self.message, changed)


class MatchExpression(ApiObject, frozen=True):
    """An entry of `matchExpressions`, or of `matchFields`."""

    key: str = ""
    operator: str = ""
    values: tuple[str, ...] | None = None

    @property
    def term(self) -> LabelTerm | None:
        """The condition; None for an unknown operator: nothing meets such a condition."""
        operator = _OPERATORS.get(self.operator)
        return None if operator is None else LabelTerm(self.key, operator, self.values or ())


class _VmOfRequest(ApiObject, frozen=True):
    """The VM in a request, `namespace/name`; None if the request names none."""

    vmi: str | None = None


def vmi_of(request: str, owners: Iterable[OwnerReference]) -> OwnerReference:
    """Return the VMI of a pod by its request and owners; without a name for a plain pod.

    Its UID is empty where no owner is of that name. A pod with an unreadable request counts as plain.
    """
    stated: str | None = None
    if request:
        try:
            stated = _VM_OF_REQUEST.decode(request).vmi
        except NOT_JSON:
            return _NO_OWNER
    if stated is None:
        return next((owner for owner in owners if owner.is_vmi), _NO_OWNER)
    name = stated.rpartition("/")[2]
    same = (owner for owner in owners if owner.is_vmi and owner.name == name)
    return next(same, OwnerReference(name=name)) if name else _NO_OWNER


_NO_OWNER = OwnerReference()
_VM_OF_REQUEST = msgspec.json.Decoder(_VmOfRequest)
_NODE_INDEPENDENT = frozenset(
    {"configMap", "downwardAPI", "emptyDir", "hostPath", "image", "name", "nfs", "projected", "secret"}
)
"""The name of a volume, and the kinds of volumes that no filter of kube-scheduler checks."""


class AffinityToPods(ApiObject, frozen=True):
    """The pods that must be near, or must not be; preferences do not decide."""

    required: tuple[msgspec.Raw, ...] | None = msgspec.field(
        name="requiredDuringSchedulingIgnoredDuringExecution", default=None
    )


class Affinity(ApiObject, frozen=True):
    """The nodes that a pod needs, and the other pods that it needs or avoids."""

    node_affinity: msgspec.Raw = ABSENT
    pod_affinity: AffinityToPods | None = None
    pod_anti_affinity: AffinityToPods | None = None


class SpreadConstraint(ApiObject, frozen=True):
    """How evenly pods are spread."""

    when_unsatisfiable: str = ""

    @property
    def is_hard(self) -> bool:
        """Whether it is more than a preference."""
        return self.when_unsatisfiable != "ScheduleAnyway"


class Resources(ApiObject, frozen=True):
    """The requests of a container, by resource."""

    requests: dict[str, msgspec.Raw] | None = None


class Container(ApiObject, frozen=True):
    """The fields of a container that decide about nodes."""

    ports: tuple[dict[str, msgspec.Raw], ...] | None = None
    resources: Resources = Resources()
    restart_policy: str = ""
    """`Always` makes an init container run as long as the pod."""


class PodResourceClaim(ApiObject, frozen=True):
    """A reference to a ResourceClaim."""

    name: str = ""
    """Within the pod."""
    resource_claim_name: str | None = None
    """The object; None where it is made from a template, and the status names it."""


class PodSpec(ApiObject, frozen=True):
    """The node of a pod, and the fields that decide about it."""

    node_name: str = ""
    priority: int = 0
    preemption_policy: str = ""
    overhead: dict[str, msgspec.Raw] | None = None
    scheduler_name: str = ""
    node_selector: msgspec.Raw = ABSENT
    affinity: Affinity | None = None
    tolerations: msgspec.Raw = ABSENT
    topology_spread_constraints: tuple[SpreadConstraint, ...] | None = None
    scheduling_gates: tuple[msgspec.Raw, ...] | None = None
    resource_claims: tuple[PodResourceClaim, ...] | None = None
    containers: tuple[Container, ...] | None = None
    init_containers: tuple[Container, ...] | None = None
    volumes: tuple[dict[str, msgspec.Raw], ...] | None = None

    @property
    def shape(self) -> bytes:
        """The common part of pods that are offered the same nodes; `NO_SHAPE` if a pod is on its own."""
        if self._is_on_its_own:
            return NO_SHAPE
        resources = {name for container in self._containers for name in container.resources.requests or ()}
        parts = (
            self.scheduler_name.encode(),
            bytes(self.node_selector),
            bytes(self.affinity.node_affinity) if self.affinity is not None else b"",
            bytes(self.tolerations),
            *(name.encode() for name in sorted(resources)),
        )
        return blake2b(b"\0".join(parts), digest_size=16).digest()

    @property
    def resources(self) -> Mapping[str, int]:
        """Kube-scheduler's count for the pod, in thousandths of each unit, by resource.

        Its volumes that are attached to nodes are counted as one more resource, `VOLUMES`: nodes have limits.
        """
        ahead = [one for one in self.init_containers or () if one.restart_policy != "Always"]
        beside = [one for one in self.init_containers or () if one.restart_policy == "Always"]
        attached = sum(not volume.keys() <= _NODE_INDEPENDENT for volume in self.volumes or ())
        return _counted(
            tuple(_requested(one.resources.requests) for one in (*(self.containers or ()), *beside)),
            tuple(_requested(one.resources.requests) for one in ahead),
            _requested(self.overhead),
            attached,
        )

    @property
    def repels(self) -> bool:
        """Whether the pod keeps others off its node."""
        return bool(
            self.affinity and self.affinity.pod_anti_affinity and self.affinity.pod_anti_affinity.required
        )

    @property
    def depends_on_pods(self) -> bool:
        """Whether more than amounts decides which other pods must leave a node before this one can come."""
        return bool(
            self.resource_claims
            or self.repels
            or any(spread.is_hard for spread in self.topology_spread_constraints or ())
            or self._takes_host_ports
        )

    @property
    def _takes_host_ports(self) -> bool:
        """Whether it has a port of the host, which is there once."""
        return any(_HOST_PORT in port for container in self._containers for port in container.ports or ())

    @property
    def _containers(self) -> tuple[Container, ...]:
        return (*(self.containers or ()), *(self.init_containers or ()))

    @property
    def _is_on_its_own(self) -> bool:
        affinity = self.affinity or Affinity()
        towards_pods = (affinity.pod_affinity, affinity.pod_anti_affinity)
        return bool(
            self.scheduling_gates
            or self.resource_claims
            or any(pods is not None and pods.required for pods in towards_pods)
            or any(spread.is_hard for spread in self.topology_spread_constraints or ())
            or self._takes_host_ports
            or any(not volume.keys() <= _NODE_INDEPENDENT for volume in self.volumes or ())
        )


VOLUMES = "volumes"
_HOST_PORT = "hostPort"
"""The API server leaves it out where it is 0."""
_Requested = tuple[tuple[str, bytes], ...]


def _requested(resources: Mapping[str, msgspec.Raw] | None) -> _Requested:
    return tuple((name, bytes(amount)) for name, amount in (resources or {}).items())


@lru_cache(maxsize=1024)
def _counted(
    running: tuple[_Requested, ...], ahead: tuple[_Requested, ...], overhead: _Requested, volumes: int
) -> Mapping[str, int]:
    """Add up as kube-scheduler does; pods of one size share the answer."""
    total = _sum(running)
    for container in ahead:
        for name, amount in _sum((container,)).items():
            total[name] = max(total.get(name, 0), amount)
    for name, amount in _sum((overhead,)).items():
        total[name] = total.get(name, 0) + amount
    if volumes:
        total[VOLUMES] = volumes
    return MappingProxyType(total)


def fault_of(error: msgspec.ValidationError) -> str:
    """Name the wrong field and its fault, as in `spec.domain.cpu.cores: expected int, got str`."""
    text = str(error).replace("`", "").replace(" | null", "").replace(" | ", " or ")
    fault, _, path = text.partition(" - at ")
    field = path.removeprefix("key in ").removeprefix("$").removeprefix(".").replace("[...]", "")
    missing = fault.removeprefix("Object missing required field ")
    if missing != fault:
        return f"{field}.{missing} is missing".removeprefix(".")
    if path.startswith("key in "):
        field = f"a key of {field}"
    elif "[...]" in path:
        field = f"a value in {field}"
    fault = f"{fault[0].lower()}{fault[1:]}"
    return f"{field}: {fault}" if field else fault


def _sum(containers: Iterable[_Requested]) -> dict[str, int]:
    total: dict[str, int] = {}
    for container in containers:
        for name, amount in container:
            try:
                value = parse_quantity(msgspec.json.decode(amount, type=str | int)) * 1000
            except (ValueError, msgspec.DecodeError):
                continue  # the API server stores no such pod; one that is sent must not stop anything
            total[name] = total.get(name, 0) + -(-value.numerator // value.denominator)
    return total
