"""Claims for tests, made the way the extender makes them."""

from __future__ import annotations

from kvplace.core.allocator.allocate import place
from kvplace.core.free import free_of
from kvplace.core.ledger import Claim, ClaimState, Ledger, LedgerChange
from kvplace.core.placement import Placement
from kvplace.core.request import Request
from kvplace.core.topology import Topology


def with_vm(topology: Topology, ledger: Ledger, name: str, request: Request) -> Ledger:
    """Place one VM more and claim what it got; fails when it does not fit."""
    placement = place(topology, free_of(topology, ledger), request)
    assert isinstance(placement, Placement), placement
    claim = Claim(
        uid=f"uid-{name}",
        namespace="default",
        pod=f"virt-launcher-{name}",
        vmi=name,
        policy=placement.policy,
        state=ClaimState.CLAIMED,
        cpus=placement.cpus,
        owned=placement.owned,
        memory=placement.memory,
        huge_pages=placement.huge_pages,
        since="2026-01-01T00:00:00Z",
    )
    return ledger.after(LedgerChange(claims=(claim,)))
