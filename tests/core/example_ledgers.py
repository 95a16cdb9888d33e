"""Claims and ledgers for tests: of placed VMs as the extender makes them, or of given CPUs."""

from __future__ import annotations

from kvplace.core.allocator.allocate import place
from kvplace.core.cpuset import cpus_of
from kvplace.core.free_resources import free_of
from kvplace.core.ledger import Claim, Ledger, LedgerChange
from kvplace.core.placement import Placement
from kvplace.core.request import Policy, Request
from kvplace.core.scalars import CpuMask, PodUid
from kvplace.core.topology import Topology


def with_vm(topology: Topology, ledger: Ledger, name: str, request: Request) -> Ledger:
    """Place one VM more and claim what it got; fails when it does not fit."""
    placement = place(topology, free_of(topology, ledger), request)
    assert isinstance(placement, Placement), placement
    claim = Claim(
        uid=PodUid(f"uid-{name}"),
        namespace="default",
        pod=f"virt-launcher-{name}",
        vmi=name,
        policy=placement.policy,
        cpus=placement.cpus,
        owned=placement.owned,
        memory=placement.memory,
        huge_pages=placement.huge_pages,
        since="2026-01-01T00:00:00Z",
    )
    return ledger.after(LedgerChange(claims=(claim,)))


def claim(name: str, cpus: int, owned: int | None = None, policy: Policy = Policy.EXCLUSIVE) -> Claim:
    return Claim(
        uid=PodUid(name),
        namespace="shop",
        pod=f"virt-launcher-{name}",
        vmi=name,
        policy=policy,
        cpus=CpuMask(cpus),
        owned=CpuMask(cpus if owned is None else owned),
        memory={},
        huge_pages={},
        since="",
    )


def ledger_of(*claims: Claim) -> Ledger:
    """A ledger in which the last one who owns a CPU is its owner, as a careless writer would leave it."""
    owners = {cpu: claim.uid for claim in claims for cpu in cpus_of(claim.owned)}
    return Ledger(owners, {claim.uid: claim for claim in claims})
