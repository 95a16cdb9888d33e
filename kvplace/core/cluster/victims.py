"""The values of preemption: candidates, question, and the answer with the violated budgets.

kube-scheduler prefers nodes where fewer PodDisruptionBudgets are violated, and believes the number that an
extender gives. So budgets are counted by the rules of its package `preemption`: pods are checked from the
most important one down, each takes one from every budget that selects it, and a pod that exceeds a budget
counts once.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from types import MappingProxyType

from kvplace.core.free_resources import Free, free_of
from kvplace.core.label_terms import LabelTerms
from kvplace.core.ledger import Claim, Ledger
from kvplace.core.node_devices import HeldDevices, NodeDevices
from kvplace.core.placement import Placement
from kvplace.core.request import Request
from kvplace.core.scalars import PodUid
from kvplace.core.topology import Topology


def _nothing() -> Mapping[str, int]:
    return MappingProxyType({})


_WEIGHT = 1 << 31
"""Added to each priority before they are summed, as kube-scheduler does: more victims never weigh less."""


@dataclass(frozen=True, slots=True)
class Tenant:
    """A pod on the node that may be evicted."""

    uid: PodUid
    priority: int
    since: str = ""
    """Time of its arrival, RFC 3339; of two with equal priority the younger one goes first."""
    budgets: Taken = ()
    """The disruption budgets that its eviction takes from."""
    resources: Mapping[str, int] = field(default_factory=_nothing)
    """Its requests, as kube-scheduler counts them."""

    @property
    def weight(self) -> int:
        """The part of its eviction in the sum of priorities."""
        return self.priority + _WEIGHT


@dataclass(frozen=True)
class OccupiedMachine:
    """One node: its resources and their holders."""

    topology: Topology
    ledger: Ledger
    holds: tuple[Claim, ...] = ()
    pools_shrink: bool = False
    devices: NodeDevices | None = None
    """Its free devices."""
    held_devices: Mapping[PodUid, HeldDevices] = field(default_factory=lambda: MappingProxyType({}))
    """The devices of each pod, which are released with it."""

    def free_without(self, gone: Iterable[PodUid]) -> Free:
        """Compute the free resources once these pods are gone."""
        left, devices = frozenset(gone), self.devices
        if devices is not None:
            for uid in left & self.held_devices.keys():
                devices = devices.returned(self.held_devices[uid])
        ledger = Ledger(
            {cpu: owner for cpu, owner in self.ledger.owners.items() if owner not in left},
            {uid: claim for uid, claim in self.ledger.claims.items() if uid not in left},
        )
        return free_of(self.topology, ledger, self.holds, pools_shrink=self.pools_shrink, devices=devices)


@dataclass(frozen=True, slots=True)
class Question:
    """The question for the tenants that must leave a node so that a VM fits."""

    machine: OccupiedMachine
    request: Request
    tenants: tuple[Tenant, ...]
    """Pods with a claim and a lower priority than the VM's."""
    leaving: frozenset[PodUid] = frozenset()
    """Pods with cores that are released anyway."""
    certain: tuple[Tenant, ...] = ()
    """Pods that are evicted in any case: kube-scheduler needs them gone. They may have no claim."""
    needed: Mapping[str, int] = field(default_factory=_nothing)
    """Resources that the victims must request together: kube-scheduler needs them for the VM, too."""
    violations: int = 0
    """Violations of `certain` pods with unknown budgets."""


Cost = tuple[int, int, int, int]


@dataclass(frozen=True)
class Victims:
    """The answer: the pods to evict, and the VM's placement then."""

    tenants: tuple[Tenant, ...]
    """The most important one first, as kube-scheduler expects them."""
    violations: int
    placement: Placement
    quality: tuple[int, ...] = ()
    """Locality of the placement; smaller is better."""
    exact: bool = True
    """Whether there is none of less cost; False when the search stopped at its bound."""

    @cached_property
    def cost(self) -> Cost:
        """The key of kube-scheduler for comparing nodes; smaller is better."""
        return eviction_cost(self.tenants, self.violations)


def eviction_cost(tenants: tuple[Tenant, ...], violated: int) -> Cost:
    """Rate victims: budgets violated, highest priority, sum of priorities, number."""
    return (
        violated,
        max((one.priority for one in tenants), default=-_WEIGHT),
        sum(one.weight for one in tenants),
        len(tenants),
    )


def by_importance(tenants: Iterable[Tenant]) -> tuple[Tenant, ...]:
    """Sort pods as kube-scheduler does: highest priority first, then the oldest."""
    return tuple(sorted(tenants, key=lambda one: (-one.priority, one.since, one.uid)))


def violated_by(tenants: Iterable[Tenant]) -> int:
    """Count the evictions that violate a budget."""
    return violations(one.budgets for one in by_importance(tenants))


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
