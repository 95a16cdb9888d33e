"""Reservations: claims of waiting pods on cores that other VMs leave for them, and that no other client gets.

Running VMs move to other cores or nodes, or VMs of lower priority are evicted.

A CPU cannot go from one owner to the next in one write. So a reservation has two parts. What is free when it
is made it owns at once, and the API server keeps all others off. What others still own is written in it,
and every replica takes that for given away. When it has been released, the next write of the ledger
makes the waiting pod its owner; the replica that released it makes that write at once.

What a live migration needs on its target is reserved before its pod exists, under the UID of the VMI. It owns
nothing, so that the bind of that pod can make the pod the owner of free CPUs in one write.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from kvplace.core.cpuset import cpus_of
from kvplace.core.free_resources import Free
from kvplace.core.ledger import Claim, Ledger, Reserved
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

    Its key is still the UID of the VMI. None where nothing is reserved for this migration, and where an older
    release has let the reservation own CPUs: they cannot go to the pod in one write.
    """
    kept = ledger.claims.get(PodUid(vmi_uid))
    if kept is None or kept.reserved is None or not migration or kept.reserved.migration != migration:
        return None
    if kept.owned:
        return None
    owned = kept.reserved.owned
    return replace(kept, cpus=CpuMask(kept.cpus | owned), owned=owned, reserved=None)


def kept_for(whole: Claim, ledger: Ledger, free: Free) -> Claim:
    """Return the claim to be reserved for a pod that is to get the `whole` one of what will be `free`.

    For one that shares CPUs they are reserved as its own, since an exclusive VM would take them: all but
    the CPUs that others' pools must keep. CPUs that others share it owns only when they end, and fits before.
    """
    if whole.owned:
        return whole
    owned = CpuMask(whole.cpus & (free.cpus | ledger.named))
    return replace(whole, policy=Policy.EXCLUSIVE, cpus=owned, owned=owned)


def grown(ledger: Ledger) -> Iterator[Claim]:
    """Return the reservations that may own more by now, each with what has been released for it.

    A foreign writer may have reserved a CPU twice: the first one gets it, and the ledger can still be
    written. So it can where a foreign reservation claims CPUs that another pod owns: it gets nothing.
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
