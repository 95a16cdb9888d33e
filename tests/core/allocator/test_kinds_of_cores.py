"""Hybrid machines: a VM has cores of one kind where one kind suffices."""

from __future__ import annotations

from kvplace.core.allocator.allocate import place
from kvplace.core.cpuset import mask_of, parse_cpu_list
from kvplace.core.free_resources import free_of
from kvplace.core.ledger import Ledger
from kvplace.core.placement import Placement
from kvplace.core.request import PinningOptions, Policy, Request, Scope, Smt
from tests.core.allocator.shapes import machine

HYBRID = machine(
    packages=["0-27"],
    nodes=["0-27"],
    l3=["0-27"],
    cores=[*[f"{cpu}-{cpu + 1}" for cpu in range(0, 16, 2)], *map(str, range(16, 28))],
)
BIG = parse_cpu_list("0-15")


def placed(vcpus: int, only: str = "0-27", options: PinningOptions | None = None) -> Placement:
    free = free_of(HYBRID, Ledger()).within(parse_cpu_list(only))
    answer = place(HYBRID, free, Request(vcpus, options or PinningOptions()))
    assert isinstance(answer, Placement), answer
    return answer


def test_four_small_cores_are_better_than_a_big_one_and_two_small_ones() -> None:
    assert not placed(4, "14-27").cpus & BIG


def test_big_cores_are_taken_where_they_suffice_since_they_are_fewer() -> None:
    assert placed(14).cpus & ~BIG == 0


def test_an_odd_vcpu_does_not_end_on_another_kind() -> None:
    assert placed(3).cpus & ~BIG == 0
    assert not placed(13, "0-10,16-27").cpus & ~parse_cpu_list("0-10,16-27")


def test_kinds_are_mixed_where_no_kind_suffices() -> None:
    found = placed(20)
    assert mask_of(found.vcpus).bit_count() == 20
    assert found.cpus & BIG == BIG


def test_single_threads_of_big_cores_are_not_taken_for_small_cores() -> None:
    assert placed(4, "0,2,4,6,16-18").cpus == parse_cpu_list("0,2,4,6")


def test_it_holds_for_vms_that_share_and_for_one_vcpu_per_core() -> None:
    shares = PinningOptions(policy=Policy.SHARE)
    assert not placed(4, "14-27", shares).cpus & BIG
    isolated = PinningOptions(smt=Smt.ISOLATE)
    assert placed(4, "10-27", isolated).cpus & BIG == 0


def test_fewer_l3_caches_come_before_kinds() -> None:
    two_caches = machine(
        packages=["0-7"], nodes=["0-7"], l3=["0-2", "3-7"], cores=["0-1", "2", "3-4", "5", "6", "7"]
    )
    answer = place(two_caches, free_of(two_caches, Ledger()), Request(5, PinningOptions(scope=Scope.ANY)))
    assert isinstance(answer, Placement)
    assert answer.cpus == parse_cpu_list("3-7")
