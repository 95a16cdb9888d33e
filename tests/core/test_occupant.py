"""The neighbours of a VM, and the level that they share with it."""

from __future__ import annotations

from kvplace.core.cpuset import parse_cpu_list
from kvplace.core.occupant import Nearness, neighbours_of
from kvplace.core.scalars import PodUid
from tests.core.example_ledgers import claim, ledger_of
from tests.nodes.machines import TWO

ME = PodUid("me")
"""On CPU 0 of a machine with the cores 0,8 1,9 2,10 3,11 in socket 0 and 4,12 5,13 6,14 7,15 in socket 1."""


def nearness_to(cpus: str, *, mine: str = "0") -> list[Nearness]:
    other = claim("other", parse_cpu_list(cpus))
    ledger = ledger_of(claim("me", parse_cpu_list(mine)), other)
    return [one.nearness for one in neighbours_of(ME, parse_cpu_list(mine), TWO, ledger)]


def test_the_sibling_of_a_core_is_nearer_than_another_core_of_the_cache() -> None:
    assert nearness_to("8") == [Nearness.CORE]
    assert nearness_to("1") == [Nearness.L3]


def test_the_nearest_thing_in_common_counts_when_there_are_several() -> None:
    assert nearness_to("4,8") == [Nearness.CORE]


def test_a_vm_on_another_socket_is_not_a_neighbour() -> None:
    assert nearness_to("4-7") == []
    assert nearness_to("4-7", mine="0,12") == [Nearness.CORE]


def test_the_nearest_come_first_and_no_vm_is_its_own_neighbour() -> None:
    ledger = ledger_of(
        *(claim(name, parse_cpu_list(cpus)) for name, cpus in (("me", "0"), ("b", "1"), ("a", "8")))
    )
    found = neighbours_of(ME, parse_cpu_list("0"), TWO, ledger)
    assert [(one.claim.uid, one.shared) for one in found] == [("a", 1 << 8), ("b", 1 << 1)]
