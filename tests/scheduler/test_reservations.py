"""Reservations last while those end who were evicted, and not for ever."""

from __future__ import annotations

import pytest

from kvplace.core.scalars import NodeName, PodUid
from kvplace.scheduler.reservations import LONGEST_SECONDS, SECONDS, Reservation, Reservations
from tests.core.claims import claim

A, B = NodeName("a"), NodeName("b")
VICTIMS = frozenset({PodUid("victim")})


class Kept:
    """Reservations with a clock that the test moves."""

    def __init__(self) -> None:
        self.now = 0.0
        self.changed: list[NodeName] = []
        self.all = Reservations(clock=lambda: self.now, changed=self.changed.append)

    def uids(self, node: NodeName = A, least: int | None = None, but: str = "") -> list[str]:
        return [one.uid for one in self.all.on_node(node, but=PodUid(but), least=least)]


@pytest.fixture
def kept() -> Kept:
    return Kept()


def test_what_is_reserved_counts_for_everybody_but_its_pod_and_those_above_it(kept: Kept) -> None:
    kept.all.reserve(Reservation(A, claim("vm", 0b11), 5, VICTIMS))
    assert kept.uids() == kept.uids(least=5) == ["vm"]
    assert kept.uids(least=6) == kept.uids(but="vm") == kept.uids(B) == []


def test_a_pod_has_one_reservation_and_its_nodes_are_told(kept: Kept) -> None:
    kept.all.reserve(Reservation(A, claim("vm", 0b11), 5, VICTIMS))
    kept.all.reserve(Reservation(B, claim("vm", 0b11), 5, VICTIMS))
    assert (kept.uids(A), kept.uids(B)) == ([], ["vm"])
    kept.all.drop(PodUid("vm"))
    kept.all.drop(PodUid("vm"))
    assert kept.uids(B) == []
    assert kept.changed == [A, A, B, B]


def test_it_ends_some_time_after_it_was_renewed_last(kept: Kept) -> None:
    kept.all.reserve(Reservation(A, claim("vm", 0b11), 5, VICTIMS))
    kept.now = SECONDS - 1
    kept.all.renew(PodUid("vm"))
    kept.now += SECONDS - 1
    kept.all.drop_expired()
    assert kept.uids() == ["vm"]
    kept.now += 1
    kept.all.drop_expired()
    assert kept.uids() == []


def test_renewed_again_and_again_it_ends_all_the_same(kept: Kept) -> None:
    kept.all.reserve(Reservation(A, claim("vm", 0b11), 5, VICTIMS))
    while kept.now < LONGEST_SECONDS:
        assert kept.uids() == ["vm"]
        kept.all.renew(PodUid("vm"))
        kept.now += SECONDS / 2
        kept.all.drop_expired()
    assert kept.uids() == []
