"""What should become of each claim and each bound pod, as pure decisions about one moment.

The truth, in this order: a bound pod's placement, then the ledger, then nothing. A claim ends when its
pod's QEMU is gone (promise 6), never by its age alone: an unbound pod is looked at live before its claim
is given back.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from enum import Enum

from kvplace.core.errors import BadAnnotation
from kvplace.core.ledger import Claim, ClaimState, claim_of
from kvplace.core.placement import PodPlacement
from kvplace.kube.records import PodRecord


class Verdict(Enum):
    """What is to be done about a claim."""

    KEEP = "keep"
    CONFIRM = "confirm"
    RELEASE = "release"
    LOOK = "look"
    """Read the pod live, then judge again: memory alone cannot tell."""


def judge(
    claim: Claim, node: str, pod: PodRecord | None, *, vanished: bool, now: datetime, patience_s: float
) -> Verdict:
    """Say what is to be done about a claim, given what the cache has of its pod.

    `vanished` tells that the cache had the pod and has it no more, which is worth a look at once.
    `patience_s` is how long a claim may wait for its binding before somebody looks.
    """
    if pod is None:
        return Verdict.LOOK if vanished or _age_s(claim, now) > _SETTLE_S else Verdict.KEEP
    if has_ended(pod):
        return Verdict.RELEASE
    if pod.node == node:
        return Verdict.CONFIRM if claim.state is ClaimState.CLAIMED else Verdict.KEEP
    if pod.node:
        return Verdict.RELEASE
    return Verdict.LOOK if _age_s(claim, now) > patience_s else Verdict.KEEP


def judge_live(
    claim: Claim, node: str, pod: PodRecord | None, *, now: datetime, patience_s: float
) -> Verdict:
    """Say what is to be done about a claim, given its pod as the API server has it now."""
    if pod is None or pod.uid != claim.uid or has_ended(pod):
        return Verdict.RELEASE
    if pod.node:
        return Verdict.KEEP if pod.node == node else Verdict.RELEASE
    return Verdict.RELEASE if _age_s(claim, now) > patience_s else Verdict.KEEP


def may_be_bound_yet(claim: Claim, pod: PodRecord | None) -> bool:
    """Whether a bind may still come for the claim: its pod, as the API server has it, waits for a node."""
    return pod is not None and pod.uid == claim.uid and not pod.node and not has_ended(pod)


def has_ended(pod: PodRecord) -> bool:
    """Whether the pod's QEMU is gone: the pod is terminal, or the compute container of its VM has ended.

    A VM's containers are never started again; those of a plain pod may be, whatever they are called.
    """
    return pod.phase in ("Succeeded", "Failed") or bool(pod.vmi and pod.compute_terminated)


@dataclass(frozen=True, slots=True)
class Lost:
    """A bound pod whose claim is missing, and the claim that it should have."""

    node: str
    claim: Claim


def lost_claim(pod: PodRecord) -> Lost | None:
    """Make the claim of a bound, living pod from its placement; None when it has none to make."""
    if not pod.node or has_ended(pod) or not pod.placement:
        return None
    try:
        bound = PodPlacement.from_json(pod.placement)
    except BadAnnotation:
        return None
    if bound.placement.floats or bound.pod_uid != pod.uid or bound.node != pod.node:
        return None
    claim = claim_of(
        pod.uid,
        bound.placement,
        namespace=pod.namespace,
        pod=pod.name,
        vmi=pod.vmi,
        state=ClaimState.BOUND,
    )
    return Lost(pod.node, claim)


_SETTLE_S = 10.0
"""A pod may be younger in our cache than its claim; only after this is a missing pod looked for."""


def _age_s(claim: Claim, now: datetime) -> float:
    try:
        return (now - datetime.fromisoformat(claim.since)).total_seconds()
    except (ValueError, TypeError):
        return float("inf")
