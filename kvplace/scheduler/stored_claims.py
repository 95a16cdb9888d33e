"""The scheduler's claims in a ledger.

A stored claim stands for one placement: the same request, placed inside the claim. A bound pod shows in its
placement whether it was bound with a claim.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime
from functools import lru_cache

from kvplace.core.allocator.allocate import try_place
from kvplace.core.claim_changes import reserved_for_target
from kvplace.core.errors import BadAnnotation
from kvplace.core.free_resources import Free
from kvplace.core.ledger import Claim, Ledger
from kvplace.core.placement import Placement, PodPlacement
from kvplace.core.request import Request
from kvplace.core.scalars import NO_BYTES, NO_CPUS, NodeName, PodUid
from kvplace.core.topology import Topology
from kvplace.kube.object_records import PodRecord
from kvplace.nodes.node_cache import NodeCache
from kvplace.scheduler.pending_pods import PendingRequest


def rfc3339(moment: datetime) -> str:
    """Write the moment of a claim, in UTC; to the microsecond, so that no two attempts make equal claims."""
    return moment.isoformat(timespec="microseconds").replace("+00:00", "Z")


@dataclass(frozen=True, slots=True)
class _ClaimQuestion:
    """Where a request is placed inside a claim; equal for equal machines, claims and requests."""

    fingerprint: str
    inside: Free
    key: tuple[object, ...]
    topology: Topology = field(compare=False)
    request: Request = field(compare=False)


@lru_cache(maxsize=1024)  # VMs of one size on equal machines have equal claims
def _placed_inside(question: _ClaimQuestion) -> Placement | None:
    return try_place(question.topology, question.inside, question.request)


def placement_of_claim(topology: Topology, request: Request, claim: Claim) -> Placement | None:
    """Return the placement that a stored claim stands for: the same request, placed inside the claim.

    So a bind that is repeated after a crash writes the cores of the ledger, in the same order. None if the
    request no longer fills just this claim, because the machine has changed.
    """
    plain = claim.plain_memory
    inside = Free(
        cpus=claim.owned,
        pool=claim.cpus,
        memory=tuple((node.id, plain.get(node.id, NO_BYTES)) for node in topology.numa_nodes)
        if any(node.memory for node in topology.numa_nodes)
        else (),
        huge_pages=tuple(
            (node, size, count)
            for node, pages in sorted(claim.huge_pages.items())
            for size, count in pages.items()
        ),
    )
    found = _placed_inside(_ClaimQuestion(topology.fingerprint, inside, request.key, topology, request))
    if found is None or found.owned != claim.owned:
        return None
    # The CPUs of a reservation include the sibling threads that will be idle.
    return found if claim.cpus in (found.cpus, found.cpus | found.owned) else None


def migration_target(cache: NodeCache, requested: PendingRequest) -> tuple[NodeName, Claim] | None:
    """Return the node that is reserved for the target pod of a migration, and its claim there."""
    if not requested.migration or requested.vmi is None:
        return None
    for node in sorted(cache.ledgers.nodes_claimed_by(PodUid(requested.vmi.uid))):
        kept = target_claim(cache.ledger(node), requested)
        if kept is not None:
            return node, kept
    return None


def target_claim(ledger: Ledger, requested: PendingRequest) -> Claim | None:
    """Return the reservation of a node's ledger for the target pod of a migration, as its claim."""
    vmi = requested.vmi
    if vmi is None:
        return None
    kept = reserved_for_target(ledger, vmi.uid, requested.migration)
    return kept if kept is not None and (kept.namespace, kept.vmi) == (vmi.namespace, vmi.name) else None


def is_bound_with(pod: PodRecord | None, claim: Claim | None, *, uid: PodUid, node: NodeName) -> bool:
    """Whether a pod is bound to the node with just the CPUs of its claim; None stands for unpinned.

    A later revision may have any CPUs: the pod has been relocated since.
    """
    if pod is None or pod.uid != uid or pod.node != node:
        return False
    try:
        bound = PodPlacement.from_json(pod.placement)
    except BadAnnotation:
        return False
    expected = (claim.cpus, claim.owned) if claim is not None else (NO_CPUS, NO_CPUS)
    is_ours = bound.revision > 1 or (bound.placement.cpus, bound.placement.owned) == expected
    return bound.pod_uid == uid and is_ours
