"""Which CPU each I/O thread gets."""

from __future__ import annotations

import pytest

from kvplace.core.allocator.allocate import place
from kvplace.core.cpuset import format_cpu_list
from kvplace.core.free_resources import free_of
from kvplace.core.ledger import Ledger
from kvplace.core.placement import Placement
from kvplace.core.request import EmulatorThreads, PinningOptions, Policy, Request, Smt
from tests.core.allocator.shapes import TWO_SOCKETS


@pytest.mark.parametrize(
    ("options", "emulator", "io_threads"),
    [
        # A core for the emulator: its first CPU serves the main loop alone as long as there are others.
        (PinningOptions(smt=Smt.REQUIRE, emulator_threads=EmulatorThreads.ISOLATE), "2,8", ["8", "2", "8"]),
        (PinningOptions(emulator_threads=EmulatorThreads.ISOLATE), "2", ["2", "2", "2"]),
        # The emulator's CPUs are the vCPUs' or the pool: no I/O thread is held on one of them.
        (PinningOptions(emulator_threads=EmulatorThreads.WITH_VCPUS), "0-1,6-7", ["0-1,6-7"] * 3),
        (PinningOptions(), "0-1,6-7", ["0-1,6-7"] * 3),
        (PinningOptions(policy=Policy.NUMA), "0-2,6-8", ["0-2,6-8"] * 3),
    ],
)
def test_each_io_thread_has_one_of_the_emulators_own_cpus_in_turn_or_all_of_its_cpus(
    options: PinningOptions, emulator: str, io_threads: list[str]
) -> None:
    request = Request(4, options, io_threads=3)
    answer = place(TWO_SOCKETS, free_of(TWO_SOCKETS, Ledger()), request)
    assert isinstance(answer, Placement)
    assert format_cpu_list(answer.emulator_cpus) == emulator
    assert [format_cpu_list(cpus) for cpus in answer.io_thread_cpus] == io_threads


def test_a_thread_left_over_serves_all_io_threads() -> None:
    request = Request(3, PinningOptions(smt=Smt.REQUIRE), io_threads=2)
    answer = place(TWO_SOCKETS, free_of(TWO_SOCKETS, Ledger()), request)
    assert isinstance(answer, Placement)
    assert len(answer.vcpus) == 3
    assert answer.io_thread_cpus == (answer.emulator_cpus,) * 2
    assert answer.emulator_cpus.bit_count() == 1


def test_requests_with_other_io_threads_have_other_keys() -> None:
    assert Request(3, io_threads=1).key != Request(3, io_threads=2).key
