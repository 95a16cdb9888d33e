"""Why kube-scheduler would not send a pod to a node, apart from cores: the filters that are cheap to repeat.

As in kube-scheduler's plugins NodeUnschedulable, NodeName, TaintToleration and NodeAffinity; the others, such
as volumes, ports and affinity to pods, only kube-scheduler answers.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from kvplace.core.errors import BadBody
from kvplace.core.label_terms import LabelTerm, Operator
from kvplace.core.quantity import parse_quantity
from kvplace.kube.object_parts import ApiObject, ConditionObject, Metadata

_OPERATORS = {
    "In": Operator.IN,
    "NotIn": Operator.NOT_IN,
    "Exists": Operator.EXISTS,
    "DoesNotExist": Operator.ABSENT,
    "Gt": Operator.GREATER,
    "Lt": Operator.LESS,
}
_UNSCHEDULABLE = "node.kubernetes.io/unschedulable"
_SCHEDULABLE = "kubevirt.io/schedulable"
"""Label of the nodes with a live virt-handler."""
_READY = "Ready"
_REPELLING = ("NoSchedule", "NoExecute")
_OF_UNREADY_NODES = ("node.kubernetes.io/not-ready", "node.kubernetes.io/unreachable")


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


class NodeStatus(ApiObject, frozen=True):
    """The conditions and resources of a node."""

    conditions: tuple[ConditionObject, ...] | None = None
    allocatable: dict[str, str] | None = None
    """The amount that pods may request, by resource."""


class SchedulableNode(ApiObject, frozen=True):
    """A node, as far as these filters read it."""

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
        raise BadBody(f"{what}: {error}") from None
    return beside_virt_handler(demands) if is_vm else demands


def beside_virt_handler(demands: PodDemands) -> PodDemands:
    """Add the node selector of KubeVirt for the pod of every VM."""
    selector = {_SCHEDULABLE: "true", **(demands.node_selector or {})}
    return msgspec.structs.replace(demands, node_selector=selector)
