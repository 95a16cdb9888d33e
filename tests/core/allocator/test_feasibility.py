"""Whether a VM fits at all: what counting and matching say is compared with every set of CPUs there is."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from itertools import product
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvplace.core.allocator.feasibility import fits, near_set
from kvplace.core.allocator.numa_sets import best_numa_sets, rank_of
from kvplace.core.allocator.spreading import Matching
from kvplace.core.allocator.supply import Supply
from kvplace.core.free import Free
from kvplace.core.request import Request
from kvplace.core.topology import Topology
from tests.core.allocator.exhaustive import best_key
from tests.core.allocator.random_cases import crossed_case, random_case, scarce_memory_case

Case = tuple[Topology, Free, Request]


@pytest.mark.parametrize("question", [random_case, scarce_memory_case, crossed_case])
def test_counting_and_matching_say_of_nearly_every_vm_whether_it_fits_and_are_never_wrong(
    question: Callable[[int, int], Case],
) -> None:
    answers: Counter[bool | None] = Counter()
    for number in range(500_000, 500_600):
        case = question(number, 11)
        answer = fits(Supply(*case), search=False)
        answers[answer] += 1
        if answer is not None:
            assert answer == (best_key(*case) is not None), number
    assert answers[None] <= 6
    assert min(answers[True], answers[False]) > 60


@pytest.mark.parametrize("question", [scarce_memory_case, crossed_case])
def test_a_set_that_is_built_serves_and_is_rarely_worse_than_the_best(
    question: Callable[[int, int], Case],
) -> None:
    built = worse = 0
    for number in range(600_000, 600_400):
        supply = Supply(*question(number, 12))
        best = best_numa_sets(supply)
        found = near_set(supply)
        assert found is None or best, number
        if found is not None:
            built += 1
            assert rank_of(supply, found) >= rank_of(supply, best[0]), number
            worse += rank_of(supply, found) > rank_of(supply, best[0])
    assert built > 150
    assert worse < built / 4


@given(st.integers(0, 1 << 32))
def test_a_matching_takes_a_node_exactly_when_some_assignment_to_groups_does(seed: int) -> None:
    chance = Random(seed)
    groups, low, over = chance.randint(1, 3), chance.randint(0, 2), chance.randint(0, 2)
    units = [chance.choice((low, low + 1)) for _ in range(groups)]
    homes = [[group for group in range(groups) if chance.random() < 0.5] for _ in range(chance.randint(1, 6))]
    matching = Matching(units, low, over)
    taken: list[list[int]] = []
    for node, of_node in enumerate(homes):
        possible = any(
            all(load <= low + (amount > low) for load, amount in zip(loads, units, strict=True))
            and sum(load > low for load in loads) <= over
            for chosen in product(*taken, of_node)
            for loads in [[chosen.count(group) for group in range(groups)]]
        )
        assert matching.add(node, of_node) == possible
        if possible:
            taken.append(of_node)
    assert matching.size == len(taken)
