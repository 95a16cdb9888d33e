"""The scheduler's claims and reservations in a ledger.

A stored claim stands for one placement: the same request, placed inside the claim. A bound pod shows in its
placement whether it was bound with a claim.

The replica that makes room renews its reservation meanwhile. A reservation ends if nothing renews it.
"""

from __future__ import annotations

import contextlib
import logging
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from functools import lru_cache

from kvplace.core.allocator.allocate import try_place
from kvplace.core.claim_changes import RESERVED_S, reserved_for_target
from kvplace.core.errors import BadAnnotation, Conflict, KvplaceError, Unavailable
from kvplace.core.free_resources import Free
from kvplace.core.ledger import Claim, Ledger, LedgerChange
from kvplace.core.placement import Placement, PodPlacement
from kvplace.core.request import Request
from kvplace.core.scalars import NO_BYTES, NO_CPUS, NodeName, PodUid
from kvplace.core.topology import Topology
from kvplace.kube.ledgers import Ledgers
from kvplace.kube.object_records import PodRecord
from kvplace.nodes.node_cache import NodeCache
from kvplace.scheduler.pending_pods import PendingRequest

log = logging.getLogger(__name__)

RENEW_S = 10.0
"""A reservation is renewed this often while room is being made."""


class RoomStopped(Exception):
    """No room is made for a VM any more; the message is the reason in one clause."""


def rfc3339(moment: datetime) -> str:
    """Write the moment of a claim, in UTC; to the microsecond, so that no two attempts make equal claims."""
    return moment.isoformat(timespec="microseconds").replace("+00:00", "Z")


def until_when(now: datetime) -> str:
    """Return when a reservation that is written now ends, for people."""
    ends = now + timedelta(seconds=RESERVED_S)
    return ends.isoformat(timespec="seconds").replace("+00:00", "Z")


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
    if found is None or (found.owned, found.cpus) != (claim.owned, claim.cpus):
        return None
    return found


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


@dataclass(frozen=True, slots=True)
class OwnReservation:
    """A reservation by its place, and by the date of the attempt: no two attempts make equal ones."""

    node: NodeName
    uid: PodUid
    """Its key: the UID of the waiting pod, or of the VMI that migrates."""
    since: str

    def find(self, ledger: Ledger) -> Claim | None:
        """Return it in the ledger of its node, unless it has become a claim, or is another attempt's."""
        claim = ledger.claims.get(self.uid)
        is_ours = claim is not None and claim.reserved is not None and claim.since == self.since
        return claim if is_ours else None

    async def renew(self, ledgers: Ledgers, now: datetime) -> None:
        """Begin its time again; if that fails, the next time may do."""

        def decide(ledger: Ledger) -> tuple[LedgerChange, None]:
            claim = self.find(ledger)
            if claim is None or claim.reserved is None:
                return LedgerChange(), None
            renewed = replace(claim.reserved, until=until_when(now))
            return LedgerChange(claims=(replace(claim, reserved=renewed),)), None

        with contextlib.suppress(Conflict, Unavailable):
            await ledgers.change(self.node, decide)

    async def give_back(self, ledgers: Ledgers) -> None:
        """End it, if it is still there; if that fails, it ends by itself."""

        def decide(ledger: Ledger) -> tuple[LedgerChange, None]:
            return LedgerChange(releases=() if self.find(ledger) is None else (self.uid,)), None

        try:
            await ledgers.change(self.node, decide)
        except KvplaceError as error:
            log.info("a reservation is left to end by itself: %s", error, extra={"node": self.node})
