"""Whether a VM fits at all: the answer by counting is compared with every set of CPUs there is."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest

from kvplace.core.allocator.allocate import try_place
from kvplace.core.allocator.available_units import AvailableUnits, cpus_owned
from kvplace.core.allocator.feasibility import fits, near_set
from kvplace.core.allocator.numa_sets import best_numa_sets, rank_of
from kvplace.core.free_resources import Free
from kvplace.core.request import Request, Smt
from kvplace.core.topology import Topology
from tests.core.allocator.exhaustive import best_key, levels_nest
from tests.core.allocator.random_cases import crossed_case, random_case, scarce_memory_case
from tests.profiles import rounds

Case = tuple[Topology, Free, Request]


@pytest.mark.parametrize("question", [random_case, scarce_memory_case, crossed_case])
def test_counting_states_of_every_vm_whether_it_fits(question: Callable[[int, int], Case]) -> None:
    answers: Counter[bool] = Counter()
    for number in range(500_000, 500_000 + rounds(600, quick=100)):
        case = question(number, 11)
        answer = fits(AvailableUnits(*case))
        answers[answer] += 1
        assert answer == (best_key(*case) is not None), number
    assert min(answers[True], answers[False]) > rounds(60, quick=8)


@pytest.mark.parametrize("question", [scarce_memory_case, crossed_case])
def test_a_set_that_is_built_serves_and_is_rarely_worse_than_the_best(
    question: Callable[[int, int], Case],
) -> None:
    built = worse = 0
    for number in range(600_000, 600_000 + rounds(600, quick=100)):
        machine, free, request = question(number, 12)
        if not levels_nest(machine):
            continue
        available = AvailableUnits(machine, free, request)
        best = best_numa_sets(available)
        found = near_set(available)
        assert found is None or best, number
        if found is not None:
            built += 1
            assert rank_of(available, found) >= rank_of(available, best[0]), number
            worse += rank_of(available, found) > rank_of(available, best[0])
    assert built > rounds(150, quick=20)
    assert worse < built / 4


def test_the_number_of_cpus_that_a_vm_will_own_is_known_before_its_cores_are() -> None:
    known: Counter[Smt] = Counter()
    for number in range(501_000, 501_000 + rounds(1_000, quick=200)):
        machine, free, request = random_case(number, 11)
        placed, expected = try_place(machine, free, request), cpus_owned(machine, request)
        if placed is not None and expected is not None:
            assert placed.owned.bit_count() == expected, number
            known[request.options.smt] += 1
    assert min(known[smt] for smt in Smt) > rounds(20, quick=2), known
