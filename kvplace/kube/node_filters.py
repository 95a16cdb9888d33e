"""Why a pod would not be sent to a node, apart from cores: the filters that are cheap to repeat.

They are the plugins NodeUnschedulable, NodeName, TaintToleration and NodeAffinity of kube-scheduler; only
kube-scheduler answers the others, such as volumes, ports and affinity to pods. For a live migration the VMI
counts, too. It is read when a VM fits nowhere, not watched: migrations are rare, and the VMIs of a cluster
change all the time. No HTTP client is loaded with this module.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from kvplace.core.errors import BadBody
from kvplace.core.quantity import parse_quantity
from kvplace.core.scalars import NodeName
from kvplace.kube.object_parts import ApiObject, ConditionObject, MatchExpression, Metadata, fault_of
from kvplace.kube.objects import ObjectMeta
from kvplace.kube.watches import NAME_FIELD, NODES, VMIS, Kind

_UNSCHEDULABLE = "node.kubernetes.io/unschedulable"
_SCHEDULABLE = "kubevirt.io/schedulable"
"""Label of the nodes with a live virt-handler."""
_READY = "Ready"
_REPELLING = ("NoSchedule", "NoExecute")
_OF_UNREADY_NODES = ("node.kubernetes.io/not-ready", "node.kubernetes.io/unreachable")
_CHANGES = ("HotVCPUChange", "HotMemoryChange", "MigrationRequired", "VolumesChange")
"""Conditions of a VMI when KubeVirt itself is about to migrate it."""
_HOST_MODEL = "host-model-cpu.node.kubevirt.io/"
_REQUIRED_FEATURE = "host-model-required-features.node.kubevirt.io/"
_VENDOR = "cpu-vendor.node.kubevirt.io/"
_LIKE_SOURCE = {
    _HOST_MODEL: "cpu-model-migration.node.kubevirt.io/",
    _REQUIRED_FEATURE: "cpu-feature.node.kubevirt.io/",
}
"""Labels of the source, each with its label on the target of a host-model VM."""


class Taint(ApiObject, frozen=True):
    """A taint of a node."""

    key: str = ""
    value: str = ""
    effect: str = ""

    def __str__(self) -> str:
        return f"{self.key}={self.value}:{self.effect}" if self.value else f"{self.key}:{self.effect}"


class Toleration(ApiObject, frozen=True):
    """A toleration of a pod."""

    key: str = ""
    operator: str = ""
    value: str = ""
    effect: str = ""

    def tolerates(self, taint: Taint) -> bool:
        """Return whether a taint does not keep the pod away."""
        if self.effect and self.effect != taint.effect:
            return False
        if self.key and self.key != taint.key:
            return False
        return self.operator == "Exists" or (bool(self.key) and self.value == taint.value)


class Term(ApiObject, frozen=True):
    """Conditions that must all hold; a term without any selects nothing."""

    match_expressions: tuple[MatchExpression, ...] | None = None
    match_fields: tuple[MatchExpression, ...] | None = None

    def selects(self, node: SchedulableNode) -> bool:
        """Return whether a node meets them."""
        expressions, fields = self.match_expressions or (), self.match_fields or ()
        name = {"metadata.name": node.metadata.name}
        return bool(expressions or fields) and (
            all(_holds(one, node.metadata.labels or {}) for one in expressions)
            and all(_holds(one, name) for one in fields)
        )


class NodeAffinity(ApiObject, frozen=True):
    """A pod's demand on its node; preferences do not matter here."""

    required: dict[str, tuple[Term, ...]] | None = msgspec.field(
        name="requiredDuringSchedulingIgnoredDuringExecution", default=None
    )


class AffinityToNodes(ApiObject, frozen=True):
    """The part of a pod's affinity that is about nodes."""

    node_affinity: NodeAffinity | None = None


class PodDemands(ApiObject, frozen=True):
    """The demands of a pod's or a VMI's spec on its node."""

    node_selector: dict[str, str] | None = None
    affinity: AffinityToNodes | None = None
    tolerations: tuple[Toleration, ...] | None = None


class NodeSpec(ApiObject, frozen=True):
    """The parts of a node's spec that keep pods away."""

    unschedulable: bool = False
    taints: tuple[Taint, ...] | None = None


class NodeSystem(ApiObject, frozen=True):
    """The programs of a node."""

    kubelet_version: str = ""


class NodeStatus(ApiObject, frozen=True):
    """The conditions, resources and programs of a node."""

    conditions: tuple[ConditionObject, ...] | None = None
    allocatable: dict[str, str] | None = None
    """The amount that pods may request, by resource."""
    node_info: NodeSystem = NodeSystem()


class SchedulableNode(ApiObject, frozen=True):
    """The fields of a node that these filters read."""

    metadata: Metadata = Metadata()
    spec: NodeSpec = NodeSpec()
    status: NodeStatus = NodeStatus()

    @property
    def is_ready(self) -> bool:
        """Whether its kubelet reports Ready; a node without the condition has not begun."""
        return any(one.type == _READY and one.status == "True" for one in self.status.conditions or ())


def obstacle(node: SchedulableNode, demands: PodDemands) -> str:
    """State in one clause why a pod cannot go to a node; empty when none of these filters objects."""
    tolerations = demands.tolerations or ()
    taints = [one for one in node.spec.taints or () if one.effect in _REPELLING]
    if node.spec.unschedulable and not _tolerated(Taint(_UNSCHEDULABLE, "", "NoSchedule"), tolerations):
        return "the node is cordoned (spec.unschedulable)"
    repelling = [one for one in taints if not _tolerated(one, tolerations)]
    if not node.is_ready and (not repelling or repelling[0].key in _OF_UNREADY_NODES):
        return "the node is not Ready"
    if repelling:
        return f"the taint {repelling[0]} is not tolerated"
    labels = node.metadata.labels or {}
    for key, value in (demands.node_selector or {}).items():
        if labels.get(key) != value:
            return f"the node does not have the label {key}={value}"
    required = demands.affinity and demands.affinity.node_affinity and demands.affinity.node_affinity.required
    if required and not any(term.selects(node) for term in required.get("nodeSelectorTerms", ())):
        return "the node is not one that the pod's nodeAffinity allows"
    return ""


def lacking(node: SchedulableNode, wanted: Mapping[str, int], taken: Iterable[Mapping[str, int]]) -> bool:
    """Whether a node has too little of a resource for one more pod, by requests in thousandths of each unit.

    A resource that the node does not report is not checked.
    """
    left = {name: int(parse_quantity(text) * 1000) for name, text in (node.status.allocatable or {}).items()}
    for resources in taken:
        for name, amount in resources.items():
            if name in left:
                left[name] -= amount
    return any(amount > left.get(name, amount) for name, amount in wanted.items())


def _holds(expression: MatchExpression, labels: Mapping[str, str]) -> bool:
    term = expression.term
    return term is not None and term.holds(labels)


def _tolerated(taint: Taint, tolerations: Iterable[Toleration]) -> bool:
    return any(one.tolerates(taint) for one in tolerations)


def demands_of(spec: Mapping[str, Any], what: str, *, is_vm: bool = False) -> PodDemands:
    """Read the demands of a pod's or VMI's spec on its node; raises BadBody that begins with `what`.

    The pod of a VMI goes only where virt-handler runs.
    """
    try:
        demands = msgspec.convert(spec, PodDemands)
    except msgspec.ValidationError as error:
        raise BadBody(f"{what}: {fault_of(error)}") from None
    return beside_virt_handler(demands) if is_vm else demands


def beside_virt_handler(demands: PodDemands) -> PodDemands:
    """Add the node selector of KubeVirt for the pod of every VM."""
    selector = {_SCHEDULABLE: "true", **(demands.node_selector or {})}
    return msgspec.structs.replace(demands, node_selector=selector)


class _MigrationState(ApiObject, frozen=True):
    completed: bool = False
    failed: bool = False


class _VmiCpu(ApiObject, frozen=True):
    model: str = ""


class _RunningDomain(ApiObject, frozen=True):
    cpu: _VmiCpu | None = None


class _RunningSpec(PodDemands, frozen=True):
    domain: _RunningDomain = _RunningDomain()


class VmiStatus(ApiObject, frozen=True):
    """The status of a VMI."""

    phase: str = ""
    evacuation_node_name: str = ""
    conditions: tuple[ConditionObject, ...] | None = None
    migration_state: _MigrationState | None = None


class RunningVmi(ApiObject, frozen=True):
    """The fields of a VirtualMachineInstance that decide about a migration."""

    metadata: ObjectMeta
    spec: _RunningSpec = _RunningSpec()
    status: VmiStatus = VmiStatus()

    @property
    def uid(self) -> str:
        """Its UID."""
        return self.metadata.uid

    @property
    def asking(self) -> Mapping[str, str]:
        """The annotations with its request."""
        return {} if self.metadata.annotations is None else self.metadata.annotations.asking

    @property
    def is_evacuated(self) -> bool:
        """Whether its node is being emptied."""
        return bool(self.status.evacuation_node_name)

    @property
    def has_just_started(self) -> bool:
        """Whether KubeVirt has not stated yet if it can migrate."""
        return all(one.type != "LiveMigratable" for one in self.status.conditions or ())

    @property
    def never_migrates(self) -> str:
        """KubeVirt's reason and message why it cannot migrate live; empty if none is stated."""
        found = (one for one in self.status.conditions or () if one.type == "LiveMigratable")
        stated = next((one for one in found if one.status == "False"), None)
        return "" if stated is None else ": ".join(filter(None, (stated.reason, stated.message)))

    @property
    def obstacle(self) -> str:
        """The reason why it cannot migrate now, in one clause; empty if it can."""
        conditions = {one.type: one for one in self.status.conditions or ()}
        migratable, state = conditions.get("LiveMigratable"), self.status.migration_state
        under_way = [kind for kind in _CHANGES if kind in conditions and conditions[kind].status == "True"]
        if self.status.phase != "Running" or self.metadata.deletion_timestamp is not None:
            return "it does not run"
        if migratable is None or migratable.status != "True":
            reason = (
                migratable.reason if migratable is not None and migratable.reason else "no reason is given"
            )
            return f"it is not LiveMigratable ({reason})"
        if under_way:
            return f"KubeVirt is about to migrate it ({under_way[0]})"
        if state is not None and not (state.completed or state.failed):
            return "it migrates already"
        return ""

    def obstacle_on(self, target: SchedulableNode, source: SchedulableNode) -> str:
        """State why its new pod would not be scheduled on a node, apart from cores; empty if it would be.

        KubeVirt adds the CPU model and vendor of the source to the node selector of the new pod.
        """
        there = target.metadata.labels or {}
        model = self.spec.domain.cpu.model if self.spec.domain.cpu is not None else ""
        for label, value in (source.metadata.labels or {}).items():
            wanted = label if label.startswith(_VENDOR) else ""
            for prefix, selected in _LIKE_SOURCE.items() if model in ("", "host-model") else ():
                if label.startswith(prefix):
                    wanted = selected + label.removeprefix(prefix)
            if wanted and there.get(wanted) != value:
                return f"the node does not have the label {wanted}={value}"
        return obstacle(target, beside_virt_handler(self.spec))


RUNNING_VMIS: Kind[str, RunningVmi] = Kind(VMIS.api, lambda vmi: vmi.metadata.uid, {})
SCHEDULABLE_NODES: Kind[NodeName, SchedulableNode] = Kind(
    NODES.api,
    lambda node: NodeName(node.metadata.name),
    {NAME_FIELD: lambda node: node.metadata.name},
)
