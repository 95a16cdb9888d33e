"""Claims while a running pod gets other cores.

From the moment it is decided until the node's agent has confirmed it, the pod's claim holds its present
cores and its next ones. So no other pod can get either, after any crash in between.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TypeVar

from kvplace.core.ledger import Claim, Ledger, LedgerChange, Relocation, claim_of
from kvplace.core.placement import Placement, PodPlacement
from kvplace.core.request import Policy
from kvplace.core.scalars import NO_CPUS, CpuMask, PodUid

_Key = TypeVar("_Key")
_Amount = TypeVar("_Amount", bound=int)


def claim_while_relocating(claim: Claim, relocation: Relocation) -> Claim:
    """Add the next placement to a claim.

    Memory is counted once per NUMA node, as the larger of both: what stays on its node is not copied. The
    pool of a `numa` claim may lose CPUs to exclusive VMs, so it is one only while both placements are.
    """
    new = relocation.next.placement
    return replace(
        claim,
        policy=new.policy if claim.policy is Policy.NUMA else claim.policy,
        cpus=claim.cpus | new.cpus,
        owned=claim.owned | new.owned,
        memory=_larger(claim.memory, new.memory),
        huge_pages={
            node: _larger(claim.huge_pages.get(node, {}), new.huge_pages.get(node, {}))
            for node in {**claim.huge_pages, **new.huge_pages}
        },
        relocation=relocation,
    )


def claim_after_relocation(claim: Claim, in_force: PodPlacement) -> Claim | None:
    """Return a claim reduced to one placement; None when it then holds nothing."""
    if in_force.placement.floats:
        return None
    return claim_of(
        claim.uid,
        in_force.placement,
        namespace=claim.namespace,
        pod=claim.pod,
        vmi=claim.vmi,
        since=claim.since,
        revision=in_force.revision,
    )


def way_back(claim: Claim, failed: PodPlacement) -> Claim:
    """Make the previous placement the next one, after the agent could not carry `failed` out.

    The claim still has everything: only the agent knows what its node uses meanwhile.
    """
    before = claim.relocation.previous if claim.relocation is not None else None
    return replace(claim, relocation=_back_to(before, failed))


def _back_to(before: PodPlacement | None, failed: PodPlacement) -> Relocation:
    """Return a relocation to the placement before a failed one.

    The new revision counts as the answer to the same options, so that they are not tried again until a user
    edits them.
    """
    back = before or PodPlacement.floating(pod_uid=failed.pod_uid, node=failed.node)
    again = replace(back, revision=failed.revision + 1, options=failed.options)
    return Relocation(again, again)


def claim_with_lost_relocation(ledger: Ledger, claim: Claim, lost: Relocation) -> Claim:
    """Return what a claim held before a user took it out of the ledger during a relocation.

    What it holds for a relocation that was begun since stays its own. A pool is what others have left of it.
    """
    held, named = claim, claim.cpus
    if claim.relocation is None:
        named = NO_CPUS
        held = claim_of(
            claim.uid,
            _before(lost),
            namespace=claim.namespace,
            pod=claim.pod,
            vmi=claim.vmi,
            since=claim.since,
            revision=claim.revision,
        )
    moving = claim_while_relocating(held, lost)
    return _but_for_pools(ledger, moving, named | _named(_before(lost)) | _named(lost.next.placement))


def claim_without_lost_relocation(ledger: Ledger, claim: Claim, lost: Relocation) -> Claim:
    """Return the claim of a pod that goes back at once because others have its next cores by now.

    What it holds stays its own until the agent has confirmed that.
    """
    moving = claim_while_relocating(claim, _back_to(lost.previous, lost.next))
    is_pool = claim.policy is Policy.NUMA and claim.relocation is None
    return _but_for_pools(ledger, moving, (NO_CPUS if is_pool else claim.cpus) | _named(_before(lost)))


def _before(lost: Relocation) -> Placement:
    return lost.previous.placement if lost.previous is not None else Placement(Policy.NONE, (), NO_CPUS)


def _named(placement: Placement) -> CpuMask:
    return placement.cpus if placement.policy is not Policy.NUMA else NO_CPUS


def _but_for_pools(ledger: Ledger, claim: Claim, named: int) -> Claim:
    """Leave out CPUs that others own and that the claim does not name: they went out of its pool."""
    owned_by_others = _without(ledger, claim.uid).owned
    return replace(claim, cpus=CpuMask(claim.cpus & ~(owned_by_others & ~named)))


def held_by_others(ledger: Ledger, claim: Claim) -> CpuMask:
    """Return the CPUs of a claim that other pods own, or name where it would own them."""
    others = _without(ledger, claim.uid)
    own_pool = claim.cpus & ~claim.owned if claim.policy is Policy.NUMA else NO_CPUS
    return CpuMask(claim.cpus & ~own_pool & others.owned | claim.owned & others.named)


def _without(ledger: Ledger, uid: PodUid) -> Ledger:
    return ledger.after(LedgerChange(releases=(uid,)))


def _larger(one: Mapping[_Key, _Amount], other: Mapping[_Key, _Amount]) -> dict[_Key, _Amount]:
    return {
        key: max(amount for amount in (one.get(key), other.get(key)) if amount is not None)
        for key in {**one, **other}
    }
