"""PodDisruptionBudgets as JSON spells them, and how core gets them.

They are read when a user preempts, not watched: KubeVirt keeps one for each VM that can migrate, and each
changes with its VM, while preemption is rare.
"""

from __future__ import annotations

import msgspec

from kvplace.core.cluster.victims import DisruptionBudget
from kvplace.core.label_terms import LabelTerm, Operator
from kvplace.kube.node_filters import MatchExpression
from kvplace.kube.object_parts import ApiObject, Metadata

PATH = ("apis", "policy", "v1", "poddisruptionbudgets")


class LabelSelector(ApiObject, frozen=True):
    """A label selector."""

    match_labels: dict[str, str] | None = None
    match_expressions: tuple[MatchExpression, ...] | None = None


class BudgetSpec(ApiObject, frozen=True):
    """Which pods a budget is about."""

    selector: LabelSelector | None = None


class BudgetStatus(ApiObject, frozen=True):
    """How many more of them may be evicted."""

    disruptions_allowed: int = 0
    disrupted_pods: dict[str, msgspec.Raw] | None = None


class BudgetObject(ApiObject, frozen=True):
    """A PodDisruptionBudget."""

    metadata: Metadata
    spec: BudgetSpec = BudgetSpec()
    status: BudgetStatus = BudgetStatus()


def disruption_budget(document: BudgetObject) -> DisruptionBudget:
    """Read a PodDisruptionBudget; a selector with an operator that it is unknown selects nothing."""
    selector = document.spec.selector or LabelSelector()
    labels = [LabelTerm(key, Operator.IN, (value,)) for key, value in (selector.match_labels or {}).items()]
    expressions = [one.term for one in selector.match_expressions or ()]
    known = [term for term in expressions if term is not None]
    terms = [*labels, *known] if len(known) == len(expressions) else []
    return DisruptionBudget(
        namespace=document.metadata.namespace,
        name=document.metadata.name,
        selector=tuple(terms),
        allowed=document.status.disruptions_allowed,
        disrupted=frozenset(document.status.disrupted_pods or ()),
    )
