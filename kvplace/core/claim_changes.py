"""The claims of pods that wait for cores or change them, so that no other pod gets these cores meanwhile.

A CPU cannot go from one owner to the next in one write. So a reservation for a waiting pod has two parts: it
owns the CPUs that are free, and names the CPUs that other VMs still own. Every replica treats the named CPUs
as taken. When their owner has released them, the next write of the ledger makes the waiting pod their owner.
The replica that released them makes this write at once.

A reservation for the target of a live migration exists before the target pod, under the UID of the VMI. It
owns nothing, so that the bind can make the target pod the owner of free CPUs in one write.

While a running pod relocates, its claim holds its present and its next cores, from the decision until the
node's agent has confirmed the next ones. A crash in between loses neither.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TypeVar

from kvplace.core.cpuset import cpus_of
from kvplace.core.free_resources import Free
from kvplace.core.ledger import Claim, Ledger, LedgerChange, Relocation, Reserved
from kvplace.core.placement import Placement, PodPlacement
from kvplace.core.request import Policy
from kvplace.core.scalars import NO_CPUS, CpuMask, PodUid

RESERVED_S = 30.0
"""How long a reservation stays after it was made, renewed or has grown, as each replica measures it."""
LONGEST_S = 900.0
"""The same while the present owner of reserved CPUs ends; longer, since its end is not certain."""


def reserve(ledger: Ledger, whole: Claim, *, but: CpuMask, until: str) -> Claim:
    """Reserve the future claim of a waiting pod, as far as it is free now.

    `but`: CPUs that other VMs still pass on their way; they are reserved by a later call.
    """
    wanted = CpuMask(whole.owned & ~but)
    before = ledger.claims.get(whole.uid)
    owned = CpuMask(before.owned & wanted if before is not None else 0)
    cpus = CpuMask(whole.cpus & ~whole.owned | owned)
    return grown_claim(ledger, replace(whole, cpus=cpus, owned=owned, reserved=Reserved(wanted, until)))


def reserve_for_migration(whole: Claim, migration: str, *, until: str) -> Claim:
    """Reserve the future claim of the target pod of a migration; `whole` is under the VMI's UID."""
    cpus = CpuMask(whole.cpus & ~whole.owned)
    return replace(whole, cpus=cpus, owned=NO_CPUS, reserved=Reserved(whole.owned, until, migration))


def is_for_migration(claim: Claim) -> bool:
    """Whether a claim is reserved for the target pod of a migration."""
    return claim.reserved is not None and bool(claim.reserved.migration)


def reserved_for_target(ledger: Ledger, vmi_uid: str, migration: str) -> Claim | None:
    """Return the reservation for the target pod of a migration, as its future claim.

    Its key is still the UID of the VMI. None without a reservation for this migration, and where an older
    release let it own CPUs: these cannot go to the pod in one write.
    """
    kept = ledger.claims.get(PodUid(vmi_uid))
    if kept is None or kept.reserved is None or not migration or kept.reserved.migration != migration:
        return None
    if kept.owned:
        return None
    owned = kept.reserved.owned
    return replace(kept, cpus=CpuMask(kept.cpus | owned), owned=owned, reserved=None)


def kept_for(whole: Claim, ledger: Ledger, free: Free) -> Claim:
    """Return the claim that reserves the future claim `whole` of a pod; `free` are the resources by then.

    A claim that shares CPUs reserves them as owned, because an exclusive VM would take them; CPUs that other
    pools must keep are left out. It owns CPUs that others share only after their end, and fits before that.
    """
    if whole.owned:
        return whole
    owned = CpuMask(whole.cpus & (free.cpus | ledger.named))
    return replace(whole, policy=Policy.EXCLUSIVE, cpus=owned, owned=owned)


def grown(ledger: Ledger) -> Iterator[Claim]:
    """Return the reservations that may own more by now, each with the CPUs that were released for it.

    A foreign writer may have reserved a CPU twice: the first reservation gets it. A foreign reservation of
    CPUs that another pod owns gets nothing. So the ledger can still be written.
    """
    given = NO_CPUS
    for claim in ledger.claims.values():
        if not claim.still_in_use or is_for_migration(claim) or _is_contested(ledger, claim):
            continue
        if (more := grown_claim(ledger, claim, but=given)) != claim:
            given = CpuMask(given | more.owned)
            yield more


def _is_contested(ledger: Ledger, claim: Claim) -> bool:
    """Whether a claim lists an owned CPU that another pod owns."""
    return any(ledger.owners.get(cpu, claim.uid) != claim.uid for cpu in cpus_of(claim.owned))


def grown_claim(ledger: Ledger, claim: Claim, *, but: CpuMask = NO_CPUS) -> Claim:
    """Let a claim own the reserved CPUs of its pod that have no owner, except for the CPUs `but`."""
    free = CpuMask(claim.still_in_use & ~ledger.owned & ~ledger.named & ~but)
    return replace(claim, cpus=CpuMask(claim.cpus | free), owned=CpuMask(claim.owned | free))


_Key = TypeVar("_Key")
_Amount = TypeVar("_Amount", bound=int)


def claim_while_relocating(claim: Claim, relocation: Relocation) -> Claim:
    """Add the next placement to a claim.

    Memory is counted once per NUMA node, as the larger of both, since it is not copied inside a node. A pool
    may lose CPUs to exclusive VMs, so the claim has policy `numa` only if both placements have it.
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


def claim_after_relocation(claim: Claim, in_effect: PodPlacement) -> Claim | None:
    """Return a claim reduced to one placement; None when it then holds nothing."""
    if in_effect.placement.floats:
        return None
    return claim.at(in_effect.placement, in_effect.revision)


def way_back(claim: Claim, failed: PodPlacement) -> Claim:
    """Make the previous placement the next one, after the agent could not carry `failed` out.

    The claim keeps both placements: only the agent knows which CPUs its node uses meanwhile.
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
    """Restore a claim that a user took out of the ledger during a relocation.

    It keeps the resources of a relocation that was begun since. A pool has lost the CPUs that others own by
    now.
    """
    held, named = claim, claim.cpus
    if claim.relocation is None:
        named = NO_CPUS
        held = claim.at(_before(lost), claim.revision)
    moving = claim_while_relocating(held, lost)
    return _but_for_pools(ledger, moving, named | _named(_before(lost)) | _named(lost.next.placement))


def claim_without_lost_relocation(ledger: Ledger, claim: Claim, lost: Relocation) -> Claim:
    """Return the claim of a pod that goes back at once because others have its next cores by now.

    It keeps its resources until the agent has confirmed that.
    """
    moving = claim_while_relocating(claim, _back_to(lost.previous, lost.next))
    is_pool = claim.policy is Policy.NUMA and claim.relocation is None
    return _but_for_pools(ledger, moving, (NO_CPUS if is_pool else claim.cpus) | _named(_before(lost)))


def _before(lost: Relocation) -> Placement:
    return lost.previous.placement if lost.previous is not None else Placement(Policy.NONE, (), NO_CPUS)


def _named(placement: Placement) -> CpuMask:
    return placement.cpus if placement.policy is not Policy.NUMA else NO_CPUS


def _but_for_pools(ledger: Ledger, claim: Claim, named: int) -> Claim:
    """Leave out CPUs that others own and the claim does not name: they have left its pool."""
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
