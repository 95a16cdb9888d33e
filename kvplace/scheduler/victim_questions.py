"""The questions about victims on one node: the rules that kube-scheduler adds to the search for cores.

kube-scheduler also counts other resources. So other victims than its own must request as much of each
resource. Where other rules than amounts decide (affinity, host ports), the answer keeps kube-scheduler's
victims.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from kvplace.core.cluster.victims import (
    DisruptionBudget,
    OccupiedMachine,
    Question,
    Tenant,
    budgets_taken,
    violated_by,
)
from kvplace.core.request import Request
from kvplace.core.scalars import NodeName, PodUid
from kvplace.core.well_known_names import MARKER_RESOURCE
from kvplace.kube.object_records import PodRecord
from kvplace.scheduler.extender_protocol import NodeVictims, PreemptionArgs


@dataclass(frozen=True, slots=True)
class NodeWithVictims:
    """A node that a waiting pod may get room on by evictions, at one moment."""

    name: NodeName
    occupied: OccupiedMachine
    pods: Mapping[PodUid, PodRecord]
    """The known pods with claims in its ledger, and the known victims of kube-scheduler."""
    leaving: frozenset[PodUid]
    """The pods with claims that end without an eviction."""
    staying: frozenset[PodUid]
    """The pods that also end, but that the waiting pod has waited for too long."""


def questions_about(
    node: NodeWithVictims,
    args: PreemptionArgs,
    sent: NodeVictims,
    request: Request,
    budgets: Sequence[DisruptionBudget],
) -> Iterator[Question]:
    """Ask with our own victims, where possible, and with the victims that kube-scheduler needs."""
    if not node.staying.isdisjoint(sent.uids):
        return
    pod, claims = args.pod, node.occupied.ledger.claims
    uids = [uid for uid in sent.uids if uid not in node.leaving]
    here = {
        uid: record
        for uid in (*claims, *uids)
        if (record := node.pods.get(uid)) is not None and record.node == node.name
    }
    tenants = {
        uid: _tenant(record, claims[uid].since if uid in claims else "", budgets)
        for uid, record in here.items()
        if record.priority < pod.priority and uid not in node.leaving | node.staying
    }
    ours = tuple(one for uid, one in tenants.items() if uid in claims)
    amounts_decide = not args.depends_on_pods and not any(here[uid].repels for uid in uids if uid in here)
    if amounts_decide:
        ending = [node.pods[uid] for uid in node.leaving.difference(sent.uids) if uid in node.pods]
        needed = _needed(args, uids, here, ending)
        yield Question(node.occupied, request, ours, node.leaving, needed=needed)
    if not amounts_decide or any(uid not in claims for uid in uids):
        certain = tuple(tenants.get(uid) or Tenant(uid, pod.priority - 1) for uid in uids)
        unknown = 0
        if any(uid not in tenants for uid in uids):  # else the rest is of pods that end anyway
            unknown = sent.violations - violated_by(one for one in certain if one.uid in tenants)
        yield Question(node.occupied, request, ours, node.leaving, certain, violations=max(0, unknown))


def _tenant(pod: PodRecord, since: str, budgets: Sequence[DisruptionBudget]) -> Tenant:
    taken: tuple[DisruptionBudget, ...] = ()
    if any(budget.namespace == pod.namespace for budget in budgets):
        labels = json.loads(pod.labels) if pod.labels else {}
        taken = budgets_taken(budgets, pod.namespace, pod.name, labels)
    return Tenant(pod.uid, pod.priority, since, taken, pod.resources)


def _needed(
    args: PreemptionArgs,
    sent: Sequence[PodUid],
    here: Mapping[PodUid, PodRecord],
    ending: Sequence[PodRecord],
) -> dict[str, int]:
    """The least that victims must request together: as much as the sent ones, or the pod if that is less.

    The requests of pods that end anyway count, too, as long as kube-scheduler counts them. A node that was
    not sent has enough of everything but cores.
    """
    if not sent:
        return {}
    counted = [pod for pod in ending if not pod.is_terminal]
    needed: dict[str, int] = {}
    for name, amount in args.resources.items():
        if name == MARKER_RESOURCE:
            continue
        theirs = sum(here[uid].resources.get(name, 0) for uid in sent if uid in here)
        least = min(amount, theirs) if all(uid in here for uid in sent) else amount
        needed[name] = max(0, least - sum(pod.resources.get(name, 0) for pod in counted))
    return needed
