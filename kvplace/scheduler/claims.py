"""A pod's claim: what a placement claims, and how it is found again behind a claim that is stored already."""

from __future__ import annotations

from datetime import datetime

from kvplace.core.allocator.allocate import try_place
from kvplace.core.errors import BadAnnotation
from kvplace.core.free import Free
from kvplace.core.ledger import Claim, Ledger, LedgerChange
from kvplace.core.placement import Placement, PodPlacement
from kvplace.core.request import Request
from kvplace.core.topology import Topology
from kvplace.kube.records import PodRecord


def rfc3339(moment: datetime) -> str:
    """Write the moment of a claim, to the second, in UTC."""
    return moment.isoformat(timespec="seconds").replace("+00:00", "Z")


def placed_again(topology: Topology, request: Request, claim: Claim) -> Placement | None:
    """The placement behind a stored claim: the same request, placed inside the claim; None if it has none.

    So a bind that comes again after a crash writes the cores that the ledger says, in the same order.
    """
    plain = claim.plain_memory
    inside = Free(
        cpus=claim.owned,
        pool=claim.cpus,
        memory=tuple((node.id, plain.get(node.id, 0)) for node in topology.numa_nodes)
        if any(node.memory for node in topology.numa_nodes)
        else (),
        huge_pages=tuple(
            (node, size, count)
            for node, pages in sorted(claim.huge_pages.items())
            for size, count in pages.items()
        ),
    )
    found = try_place(topology, inside, request)
    if found is None or (found.owned, found.cpus) != (claim.owned, claim.cpus):
        return None
    return found


def release_of(ledger: Ledger, uid: str) -> LedgerChange:
    """Give back what a pod has claimed, if anything."""
    return LedgerChange(releases=(uid,) if uid in ledger.claims else ())


def is_bound_as_meant(pod: PodRecord | None, *, uid: str, node: str, claim: Claim | None) -> bool:
    """Whether the pod is bound to the node with just the CPUs of its claim; None stands for floating."""
    if pod is None or pod.uid != uid or pod.node != node:
        return False
    try:
        bound = PodPlacement.from_json(pod.placement)
    except BadAnnotation:
        return False
    cpus = claim.cpus if claim is not None else 0
    return bound.pod_uid == uid and bound.placement.cpus == cpus
