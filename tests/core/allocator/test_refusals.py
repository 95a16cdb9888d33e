"""The refusal of a VM that does not fit: the constraint, the shortfall in numbers, and where it is least."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvplace.core.allocator.allocate import place
from kvplace.core.allocator.feasibility import ShortageCount
from kvplace.core.cpuset import parse_cpu_list
from kvplace.core.free_resources import Free, free_of
from kvplace.core.ledger import Ledger
from kvplace.core.placement import Placement, Reason, Refusal
from kvplace.core.request import EmulatorThreads, PinningOptions, Policy, Request, Scope, Smt
from kvplace.core.scalars import Bytes
from tests.core.allocator.random_cases import random_case, scarce_memory_case
from tests.core.example_ledgers import with_vm
from tests.core.machines import make_numa_node, make_package, make_topology
from tests.profiles import rounds

GIB = Bytes(1 << 30)
# Two sockets of two NUMA nodes of four cores with two threads each; CPU 16 is the sibling of CPU 0.
MACHINE = make_topology(
    packages=(
        make_package(0, parse_cpu_list("0-7,16-23")),
        make_package(1, parse_cpu_list("8-15,24-31")),
    ),
    numa_nodes=(
        make_numa_node(0, parse_cpu_list("0-3,16-19"), 16 * GIB),
        make_numa_node(1, parse_cpu_list("4-7,20-23"), 16 * GIB),
        make_numa_node(2, parse_cpu_list("8-11,24-27"), 16 * GIB),
        make_numa_node(3, parse_cpu_list("12-15,28-31"), 24 * GIB, {GIB: 8}),
    ),
    l3_groups=tuple(parse_cpu_list(f"{2 * l3}-{2 * l3 + 1},{2 * l3 + 16}-{2 * l3 + 17}") for l3 in range(8)),
    cores=tuple(1 << core | 1 << core + 16 for core in range(16)),
)


def left(free: str, taken_memory: dict[int, int] | None = None) -> Free:
    whole = free_of(MACHINE, Ledger())
    cpus = parse_cpu_list(free)
    taken = taken_memory or {}
    return Free(
        cpus=cpus,
        pool=cpus,
        memory=tuple((node, count - taken.get(node, 0)) for node, count in whole.memory),
        huge_pages=whole.huge_pages,
    )


@pytest.mark.parametrize(
    ("free", "request_", "reason", "sentence"),
    [
        (
            left("0-5,8"),
            Request(8),
            Reason.NO_SOCKET_FITS,
            "no socket with 8 free CPUs, best 6 on socket 0",
        ),
        (
            left("0-2,4-7,20,21"),
            Request(8, PinningOptions(scope=Scope.ONE_NUMA)),
            Reason.NO_NUMA_NODE_FITS,
            "no NUMA node with 8 free CPUs, best 6 on numa 1",
        ),
        (
            left("0-31"),
            Request(5, PinningOptions(scope=Scope.ONE_L3)),
            Reason.NO_L3_FITS,
            "no L3 group with 5 free CPUs, best 4 on L3 group 0",
        ),
        (
            left("0-31"),
            Request(33, PinningOptions(scope=Scope.ANY)),
            Reason.NO_NODE_FITS,
            "no machine with 33 free CPUs, best 32 on the machine",
        ),
        (
            left("0-3,16"),
            Request(2, PinningOptions(smt=Smt.ISOLATE)),
            Reason.NO_SOCKET_FITS,
            "no socket with 2 whole free cores, best 1 on socket 0",
        ),
        (
            left("0-3,16"),
            Request(3, PinningOptions(smt=Smt.REQUIRE)),
            Reason.NO_SOCKET_FITS,
            "no socket with 3 free CPUs on whole cores, best 2 on socket 0",
        ),
        (
            left("1-3"),
            Request(1, PinningOptions(smt=Smt.REQUIRE)),
            Reason.NO_SOCKET_FITS,
            "no socket with 1 free CPU on whole cores, best 0 on socket 0",
        ),
        (
            left("0-3"),
            Request(4, PinningOptions(emulator_threads=EmulatorThreads.ISOLATE)),
            Reason.NO_SOCKET_FITS,
            "no socket with 5 free CPUs, best 4 on socket 0",
        ),
        (
            left("0"),
            Request(2, PinningOptions(policy=Policy.SHARE)),
            Reason.NO_SOCKET_FITS,
            "no socket with 2 CPUs of the shared pool, best 1 on socket 0",
        ),
        (
            left("0-31"),
            Request(2, PinningOptions(scope=Scope.ONE_NUMA), memory=17 * GIB),
            Reason.NOT_ENOUGH_MEMORY,
            "no NUMA node with 2 free CPUs and 17Gi of free memory, best 16Gi on numa 0",
        ),
        (
            left("0-3,8-11"),
            Request(2, memory=33 * GIB),
            Reason.NOT_ENOUGH_MEMORY,
            "no socket with 2 free CPUs and 33Gi of free memory, best 32Gi on socket 0",
        ),
        (
            left("0-7,8", {0: 12 * GIB, 1: 12 * GIB}),
            Request(4, memory=9 * GIB),
            Reason.NOT_ENOUGH_MEMORY,
            (
                "no socket with 4 free CPUs and 9Gi of free memory, best 8Gi on socket 0 "
                "(socket 1 has 32Gi, but 1 free CPU)"
            ),
        ),
        (
            left("0-31"),
            Request(2, PinningOptions(scope=Scope.ONE_NUMA), memory=9 * GIB, huge_pages={GIB: 9}),
            Reason.NOT_ENOUGH_HUGE_PAGES,
            "no NUMA node with 9 free huge pages of 1Gi, best 8 on numa 3",
        ),
        (
            left("0-7"),
            Request(2, memory=4 * GIB, huge_pages={GIB: 4}),
            Reason.NOT_ENOUGH_HUGE_PAGES,
            "no socket with 2 free CPUs and 4 free huge pages of 1Gi, best 0 on socket 0",
        ),
        (
            left("0-7"),
            Request(2, memory=GIB, huge_pages={GIB: 1}),
            Reason.NOT_ENOUGH_HUGE_PAGES,
            "no socket with 2 free CPUs and 1 free huge page of 1Gi, best 0 on socket 0",
        ),
        (
            left("0-3,12"),
            Request(2, PinningOptions(scope=Scope.ONE_NUMA), memory=4 * GIB, huge_pages={GIB: 4}),
            Reason.NOT_ENOUGH_HUGE_PAGES,
            "no NUMA node with 2 free CPUs and 4 free huge pages of 1Gi, best 0 on numa 0",
        ),
        (
            left("0-31", {3: 16 * GIB}),
            Request(2, PinningOptions(scope=Scope.ONE_NUMA), memory=5 * GIB, huge_pages={GIB: 4}),
            Reason.NOT_ENOUGH_MEMORY,
            "no NUMA node with 2 free CPUs and 1Gi of free memory, best 0 on numa 3",
        ),
    ],
    ids=lambda part: part if isinstance(part, str) else "",
)
def test_the_sentence_names_constraint_shortfall_and_the_nearest_place(
    free: Free, request_: Request, reason: Reason, sentence: str
) -> None:
    answer = place(MACHINE, free, request_)
    assert isinstance(answer, Refusal), answer
    assert (answer.message, answer.reason) == (sentence, reason)


def test_the_numbers_of_the_sentence_are_there_for_programs_too() -> None:
    answer = place(MACHINE, left("0-2,4-7,20,21"), Request(8, PinningOptions(scope=Scope.ONE_NUMA)))
    assert isinstance(answer, Refusal)
    assert answer.shortfall == {"needed": 8, "best": 6, "missing": 2, "where": "numa 1"}
    assert not answer.never


def test_a_vm_larger_than_the_machine_is_hopeless_and_one_that_only_waits_is_not() -> None:
    full = left("0-1")
    for request, never in (
        (Request(16), False),
        (Request(17), True),
        (Request(17, PinningOptions(scope=Scope.ANY)), False),
        (Request(2, memory=41 * GIB), True),
        (Request(2, PinningOptions(scope=Scope.ONE_NUMA), huge_pages={GIB: 9}, memory=9 * GIB), True),
        (Request(8, PinningOptions(smt=Smt.ISOLATE)), False),
        (Request(9, PinningOptions(smt=Smt.ISOLATE)), True),
        (Request(16, PinningOptions(emulator_threads=EmulatorThreads.ISOLATE)), True),
    ):
        answer = place(MACHINE, full, request)
        assert isinstance(answer, Refusal)
        assert answer.never is never, request


@pytest.mark.parametrize(
    ("vms", "more"), [(0, ""), (1, " (1 more is named by VMs that share CPUs)"), (2, " (2 more are")]
)
def test_cpus_that_only_seem_free_are_counted_as_those_of_vms_that_share(vms: int, more: str) -> None:
    ledger = Ledger()
    for number in range(vms):
        ledger = with_vm(MACHINE, ledger, f"shares-{number}", Request(1, PinningOptions(policy=Policy.SHARE)))
    asked = Request(8, PinningOptions(scope=Scope.ONE_NUMA))
    answer = place(MACHINE, free_of(MACHINE, ledger).within(parse_cpu_list("0-3,16-18")), asked)
    assert isinstance(answer, Refusal)
    assert answer.message.startswith(f"no NUMA node with 8 free CPUs, best {7 - vms} on numa 0{more}")
    sharing = Request(8, PinningOptions(scope=Scope.ONE_NUMA, policy=Policy.SHARE))
    there = place(MACHINE, free_of(MACHINE, ledger).within(parse_cpu_list("0-3,16-18")), sharing)
    assert isinstance(there, Refusal)
    assert there.message == "no NUMA node with 8 CPUs of the shared pool, best 7 on numa 0"


def test_the_largest_vm_that_could_be_spread_is_named_when_the_shares_do_not_come_out_even() -> None:
    seen = 0
    for seed in range(1, rounds(1500, quick=300), 3):
        machine, free, request = (random_case, scarce_memory_case)[seed % 2](seed, 32)
        scope = (Scope.SPREAD_NUMA, Scope.SPREAD_SOCKETS)[seed // 3 % 2]
        request = replace(request, options=replace(request.options, scope=scope, policy=Policy.EXCLUSIVE))
        answer = place(machine, free, request)
        if isinstance(answer, Refusal) and "equal shares" in answer.message:
            seen += 1
            sizes = [
                vcpus
                for vcpus in range(1, request.vcpus)
                if isinstance(place(machine, free, replace(request, vcpus=vcpus)), Placement)
            ]
            assert answer.shortfall["best"] == max(sizes, default=0)
    assert seen > rounds(10, quick=1)


@pytest.mark.parametrize("seed", range(rounds(300, quick=60)))
def test_the_counted_shortage_is_the_shortage_in_the_refusal(seed: int) -> None:
    machine, free, request = random_case(seed, 16)
    more = replace(request, vcpus=3 * request.vcpus), replace(request, memory=Bytes(64 * GIB))
    for asked in (request, *more, replace(request, huge_pages={GIB: 3})):
        missing = ShortageCount(machine, asked).missing(free)
        answer = place(machine, free, asked)
        if missing is not None:
            assert isinstance(answer, Refusal)
            assert (answer.missing, "where" in answer.shortfall) == (missing.amount, True)
            by_reason = {Reason.NOT_ENOUGH_MEMORY: "memory", Reason.NOT_ENOUGH_HUGE_PAGES: "pages"}
            assert missing.what == by_reason.get(answer.reason, "cpus")
        elif isinstance(answer, Refusal):
            assert "equal shares" in answer.message
