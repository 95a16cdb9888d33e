"""Thousands of random machines of up to 16 CPUs, each with one question that is hard to answer well.

Hypothesis searches for the small and odd; these search for the crowded. Where levels cross, only whether a VM
fits is exact. A case that fails here is made anew
from its number: `random_case(NUMBER, 16)`.
"""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest

from kvplace.core.allocator.allocate import place
from kvplace.core.free_resources import Free, free_of
from kvplace.core.ledger import Ledger
from kvplace.core.placement import Placement
from kvplace.core.request import Request
from kvplace.core.topology import Topology
from tests.core.allocator.exhaustive import best_key, decided, levels_nest
from tests.core.allocator.random_cases import crossed_case, random_case, scarce_memory_case
from tests.core.allocator.validity import key_of_valid
from tests.profiles import rounds

Case = tuple[Topology, Free, Request]
CASES = 20_000 if os.environ.get("KVPLACE_EXHAUSTIVE") else rounds(300, quick=60)
"""Of each kind and in each of the four parts that run side by side."""


@pytest.mark.parametrize("part", range(4))
@pytest.mark.parametrize(
    ("question", "most_cpus", "least_nested"),
    [(random_case, 16, 2 / 5), (scarce_memory_case, 12, 1 / 3), (crossed_case, 11, 1 / 6)],
)
def test_no_answer_is_worse_than_the_best_of_all_sets_of_cpus_where_levels_nest(
    question: Callable[[int, int], Case], most_cpus: int, least_nested: float, part: int
) -> None:
    placed = nested = 0
    for number in range(part * CASES, (part + 1) * CASES):
        machine, free, request = question(number, most_cpus)
        where = f"{question.__name__}({number}, {most_cpus})"
        best = best_key(machine, free, request)
        answer = place(machine, free, request)
        if isinstance(answer, Placement):
            placed += 1
            found = key_of_valid(machine, free, request, answer)
            assert best is not None, where
            if levels_nest(machine):
                nested += 1
                assert decided(request, found) == decided(request, best), where
        else:
            assert best is None, where
            hopeless = best_key(machine, free_of(machine, Ledger()), request) is None
            assert answer.never == hopeless, where
    assert CASES / 3 < placed < CASES
    assert nested > CASES * least_nested
