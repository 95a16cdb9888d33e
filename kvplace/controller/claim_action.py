"""Actions for each claim and each bound pod, as pure decisions about one moment.

The truth, in this order: a bound pod's placement, then the ledger. A claim ends when its pod's QEMU has
ended, never because of its age alone: an unbound pod is read from the API server before its claim is
released.

The age of a claim counts from the moment when this process saw it in its present form, by the process's own
clock: the clocks of two machines differ, and jump. The date in a claim distinguishes attempts, nothing more.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum

from kvplace.core.claim_changes import RESERVED_S, is_for_migration
from kvplace.core.errors import BadAnnotation
from kvplace.core.ledger import Claim, claim_of
from kvplace.core.placement import PodPlacement
from kvplace.core.request import Policy
from kvplace.core.scalars import NodeName, PodUid
from kvplace.kube.object_records import PodRecord

_UNPINNED = f'"policy":"{Policy.NONE.value}"'
"""How the placement of such a pod contains it; few others have to be read."""
SETTLE_S = 2.0
"""The cache may have a claim before its pod; a pod that is missing is searched for only after this."""


class ClaimAction(Enum):
    """The action for a claim."""

    KEEP = "keep"
    COMPARE = "compare"
    """Its pod is bound here: keep it while it agrees with the pod's placement."""
    RELEASE = "release"
    READ_POD = "read pod"
    """The cache alone cannot decide: read the pod from the API server, then decide again."""


def action_for(
    claim: Claim,
    node: NodeName,
    pod: PodRecord | None,
    *,
    is_live: bool,
    runs: bool,
    age_s: float,
    patience_s: float,
    was_deleted: bool = False,
    reserved_s: float = RESERVED_S,
) -> ClaimAction:
    """Decide about a claim, given its pod in the cache, or (`is_live`) as the API server has it now.

    A release that a late cache may get wrong needs a live pod.
    `runs`: the node's agent reports a container that uses the claim's CPUs. A pod can be deleted from the
    API server by force while its QEMU runs.
    `age_s`: how long this process has seen the claim as it is.
    `patience_s`: how long a claim may wait for its binding before its pod is read.
    `was_deleted`: the cache had the pod and no longer has it, so it is searched for at once.
    `reserved_s`: how long a reservation may stay.
    """
    if is_for_migration(claim):  # the UID is not of a pod
        return ClaimAction.RELEASE if age_s > reserved_s else ClaimAction.KEEP
    if pod is None or pod.uid != claim.uid:
        if is_live:
            return ClaimAction.KEEP if runs else ClaimAction.RELEASE
        return ClaimAction.READ_POD if was_deleted or age_s > SETTLE_S else ClaimAction.KEEP
    if _is_reservation(claim):
        return _action_on_reservation(node, pod, age_s, reserved_s)
    if pod.has_ended:
        return _action_on_end(pod, runs=runs)
    release_once_read = ClaimAction.RELEASE if is_live else ClaimAction.READ_POD
    if runs_unpinned(claim, pod):
        return release_once_read
    if pod.node == node:
        return ClaimAction.KEEP if is_live else ClaimAction.COMPARE
    if pod.node:
        return ClaimAction.RELEASE
    return release_once_read if age_s > patience_s else ClaimAction.KEEP


def _action_on_end(pod: PodRecord, *, runs: bool) -> ClaimAction:
    """Decide about a pod after its QEMU ended by its status; the claim stays while the agent sees it run."""
    return ClaimAction.KEEP if runs and not pod.is_terminal else ClaimAction.RELEASE


def _is_reservation(claim: Claim) -> bool:
    """Whether a claim is of a pod that seems to wait.

    A pod that was bound without regard to reservations may get other cores before it is seen to be bound.
    """
    return claim.reserved is not None and claim.relocation is None


def _action_on_reservation(node: NodeName, pod: PodRecord, age_s: float, reserved_s: float) -> ClaimAction:
    """Decide about a reservation: nothing has run there, and the pod's bind writes the ledger first."""
    if pod.node == node and claim_of_bound_pod(pod) is not None:
        return ClaimAction.COMPARE  # bound without regard to reservations
    is_over = bool(pod.node) or pod.deleting or pod.has_ended or age_s > reserved_s
    return ClaimAction.RELEASE if is_over else ClaimAction.KEEP


def waits_for_binding(claim: Claim, pod: PodRecord | None) -> bool:
    """Whether a bind may still come for the claim: its pod, as the API server has it, has no node."""
    return pod is not None and pod.uid == claim.uid and not pod.node and not pod.has_ended


def runs_unpinned(claim: Claim, pod: PodRecord | None) -> bool:
    """Whether a bound pod needs no claim: it has no placement or one without CPUs, and no relocation begins.

    A bind of ours writes node and placement at once, and the API server keeps the placement of a pod with a
    request. So another scheduler has bound a pod that has only a request.
    """
    if pod is None or not pod.node or claim.relocation is not None or not pod.request:
        return False
    if not pod.placement:
        return True
    if _UNPINNED not in pod.placement:
        return False
    try:
        return PodPlacement.from_json(pod.placement).placement.floats
    except BadAnnotation:
        return False


def claim_of_bound_pod(pod: PodRecord) -> Claim | None:
    """Return the claim that a pod must have on its node, by its placement; None if it needs none."""
    if not pod.node or pod.has_ended or not pod.placement:
        return None
    try:
        bound = PodPlacement.from_json(pod.placement)
    except BadAnnotation:
        return None
    if bound.placement.floats or bound.pod_uid != pod.uid or bound.node != pod.node:
        return None
    return claim_of(
        pod.uid,
        bound.placement,
        namespace=pod.namespace,
        pod=pod.name,
        vmi=pod.vmi,
        revision=bound.revision,
    )


def replaces(restored: Claim, stored: Claim | None) -> bool:
    """Whether the claim that a bound pod's placement gives takes the place of the stored one.

    They differ when a binding that had been given up came after all. While other cores are being
    given to the pod, and when they were given since the pod was read, the ledger knows better.
    """
    if stored is None or _is_reservation(stored):
        return True
    if stored.relocation is not None or stored.revision > restored.revision:
        return False
    return (stored.cpus, stored.owned) != (restored.cpus, restored.owned)


class ClaimAges:
    """When each claim was first asked about with its present date."""

    def __init__(self, clock: Callable[[], float]) -> None:
        """`clock` returns seconds and never jumps."""
        self._clock = clock
        self._seen: dict[tuple[NodeName, PodUid], tuple[str, float]] = {}

    def age_s(self, node: NodeName, claim: Claim) -> float:
        """Return how long a claim of a node has been seen as it is; 0 at the first time."""
        now, key, date = self._clock(), (node, claim.uid), claim.since
        if claim.reserved is not None:
            date = f"{claim.reserved.until} {claim.owned}"  # it is renewed, and grows
        if key not in self._seen or self._seen[key][0] != date:
            self._seen[key] = date, now
        return now - self._seen[key][1]

    def keep(self, is_there: Callable[[NodeName, PodUid], bool]) -> None:
        """Forget all other claims."""
        self._seen = {key: seen for key, seen in self._seen.items() if is_there(*key)}
