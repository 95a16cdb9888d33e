"""How many PodDisruptionBudgets an eviction violates, counted as kube-scheduler counts.

kube-scheduler prefers nodes where fewer budgets are violated, and believes the number that an extender gives.
So the rules are those of its package `preemption`: pods are checked from the most important one down, each
takes one from every budget that selects it, and a pod that takes what is not there counts once.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from kvplace.core.label_terms import LabelTerms


@dataclass(frozen=True, slots=True)
class DisruptionBudget:
    """A PodDisruptionBudget, as far as evictions are counted."""

    namespace: str
    name: str
    selector: LabelTerms
    """Without terms it selects nothing, as kube-scheduler reads an empty one."""
    allowed: int
    """Pods that may be evicted now."""
    disrupted: frozenset[str] = frozenset()
    """Names of pods with an eviction that is counted already."""

    def counts(self, namespace: str, name: str, labels: Mapping[str, str]) -> bool:
        """Return whether the eviction of a pod takes one from this budget."""
        return (
            namespace == self.namespace
            and bool(labels)
            and bool(self.selector)
            and name not in self.disrupted
            and all(term.holds(labels) for term in self.selector)
        )


Taken = tuple[DisruptionBudget, ...]
"""The budgets that the eviction of one pod takes from."""


def violations(evicted: Iterable[Taken]) -> int:
    """Count the pods, the most important one first, that take from a budget that has nothing left."""
    left: dict[tuple[str, str], int] = {}
    violating = 0
    for taken in evicted:
        is_violating = False
        for budget in taken:
            key = (budget.namespace, budget.name)
            left[key] = left.get(key, budget.allowed) - 1
            is_violating |= left[key] < 0
        violating += is_violating
    return violating


def budgets_taken(
    budgets: Sequence[DisruptionBudget], namespace: str, name: str, labels: Mapping[str, str]
) -> Taken:
    """Return the budgets that the eviction of a pod takes from."""
    return tuple(budget for budget in budgets if budget.counts(namespace, name, labels))
