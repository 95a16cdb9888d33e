"""Every arrangement is one that the nodes can give, better than the last, and keeps the first VM."""

from __future__ import annotations

from random import Random

import pytest

from kvplace.core.allocator.allocate import try_place
from kvplace.core.cluster.rearranging import Arrangement, better_arrangements
from kvplace.core.free import free_of
from kvplace.core.ledger import Ledger, LedgerChange, claim_of
from kvplace.core.request import Request, Scope
from kvplace.core.scalars import NodeName, PodUid
from tests.core.requests import request_with
from tests.nodes.machines import EIGHT, TWO

NODES = {NodeName("a"): EIGHT, NodeName("b"): TWO, NodeName("c"): EIGHT}


def one_by_one(requests: list[Request]) -> dict[int, tuple[NodeName, object]]:
    """Place each VM on the first node that takes it."""
    ledgers = {name: Ledger() for name in NODES}
    found: dict[int, tuple[NodeName, object]] = {}
    for vm, request in enumerate(requests):
        for name, machine in NODES.items():
            placement = try_place(machine, free_of(machine, ledgers[name]), request)
            if placement is not None:
                claim = claim_of(PodUid(str(vm)), placement)
                ledgers[name] = ledgers[name].after(LedgerChange(claims=(claim,)))
                found[vm] = (name, placement)
                break
    return found


def fits(arrangement: Arrangement) -> bool:
    """Whether no CPU is given twice."""
    ledgers = {name: Ledger() for name in NODES}
    for vm, (name, placement) in arrangement.items():
        claim = claim_of(PodUid(str(vm)), placement)
        if not free_of(NODES[name], ledgers[name]).can_give(claim):
            return False
        ledgers[name] = ledgers[name].after(LedgerChange(claims=(claim,)))
    return True


@pytest.mark.parametrize("seed", range(20))
def test_arrangements_get_better_and_the_first_vm_stays(seed: int) -> None:
    random = Random(seed)
    requests = [request_with(random.choice((2, 3, 4, 5, 6)), scope=Scope.ONE_NUMA) for _ in range(12)]
    known: Arrangement = one_by_one(requests)  # type: ignore[assignment]
    free = {name: (machine, free_of(machine, Ledger())) for name, machine in NODES.items()}
    size = (len(known), sum(requests[vm].vcpus for vm in known))
    for better in better_arrangements(free, requests, known, first=0):
        if better is None:
            continue
        now = (len(better), sum(requests[vm].vcpus for vm in better))
        assert now > size
        assert 0 in better
        assert fits(better)
        size = now


def test_nothing_is_better_where_every_vm_has_a_place() -> None:
    requests = [request_with(2, scope=Scope.ONE_NUMA) for _ in range(4)]
    known: Arrangement = one_by_one(requests)  # type: ignore[assignment]
    free = {name: (machine, free_of(machine, Ledger())) for name, machine in NODES.items()}
    assert list(better_arrangements(free, requests, known, first=None)) == [None]
