"""A claim is as old as this process has seen it unchanged, whatever clock has dated it."""

from __future__ import annotations

from dataclasses import replace

from kvplace.controller.claim_action import ClaimAges
from kvplace.core.ledger import claim_of
from kvplace.core.placement import Placement
from kvplace.core.request import Policy
from kvplace.core.scalars import NO_CPUS, NodeName, PodUid

NODE = NodeName("n")
CLAIM = claim_of(PodUid("u"), Placement(Policy.SHARE, (), NO_CPUS), since="1970-01-01T00:00:00.000000Z")


class Clock:
    seconds = 100.0

    def __call__(self) -> float:
        return self.seconds


def test_a_claim_ages_from_the_first_check_of_it_and_a_new_date_makes_it_new() -> None:
    clock = Clock()
    ages = ClaimAges(clock)
    assert ages.age_s(NODE, CLAIM) == 0
    ages.look(NODE, [CLAIM])
    clock.seconds = 130.0
    ages.look(NODE, [CLAIM])
    assert ages.age_s(NODE, CLAIM) == 30
    assert ages.age_s(NodeName("other"), CLAIM) == 0
    again = replace(CLAIM, since="1960-01-01T00:00:00.000000Z")
    assert ages.age_s(NODE, again) == 0
    ages.look(NODE, [again])
    clock.seconds = 150.0
    assert ages.age_s(NODE, again) == 20


def test_what_is_gone_is_forgotten() -> None:
    clock = Clock()
    ages = ClaimAges(clock)
    ages.look(NODE, [CLAIM])
    ages.look(NODE, [])
    assert not ages._seen
    ages.look(NODE, [CLAIM])
    ages.forget(NODE, CLAIM.uid)
    ages.forget(NODE, PodUid("unknown"))
    assert not ages._seen
    clock.seconds = 200.0
    ages.look(NODE, [CLAIM])
    assert ages.age_s(NODE, CLAIM) == 0
