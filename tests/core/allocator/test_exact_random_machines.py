"""Thousands of random machines of up to 16 CPUs, each with one question that is hard to answer well.

Hypothesis searches for the small and odd; these search for the crowded. A case that fails here is made anew
from its number: `random_case(NUMBER, 16)`.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from unittest.mock import patch

import pytest

from kvplace.core.allocator import serving
from kvplace.core.allocator.allocate import place
from kvplace.core.allocator.serving import Serving
from kvplace.core.free import Free, free_of
from kvplace.core.ledger import Ledger
from kvplace.core.placement import Placement
from kvplace.core.request import Request
from kvplace.core.topology import Topology
from tests.core.allocator.exhaustive import best_key, decided
from tests.core.allocator.random_cases import crossed_case, random_case, scarce_memory_case
from tests.core.allocator.validity import key_of_valid
from tests.core.machines import SPREAD_SCOPES
from tests.effort import rounds

Case = tuple[Topology, Free, Request]
CASES = 20_000 if os.environ.get("KVPLACE_EXHAUSTIVE") else rounds(300, quick=60)
"""Of each kind and in each of the four parts that run side by side."""


@pytest.mark.parametrize("part", range(4))
@pytest.mark.parametrize(
    ("question", "most_cpus"), [(random_case, 16), (scarce_memory_case, 12), (crossed_case, 11)]
)
def test_no_answer_is_worse_than_the_best_of_all_sets_of_cpus(
    question: Callable[[int, int], Case], most_cpus: int, part: int
) -> None:
    placed = 0
    for number in range(part * CASES, (part + 1) * CASES):
        machine, free, request = question(number, most_cpus)
        where = f"{question.__name__}({number}, {most_cpus})"
        best = best_key(machine, free, request)
        answer = place(machine, free, request)
        if isinstance(answer, Placement):
            placed += 1
            found = key_of_valid(machine, free, request, answer)
            assert decided(request, found) == decided(request, best), where
        else:
            assert best is None, where
            hopeless = best_key(machine, free_of(machine, Ledger()), request) is None
            assert answer.never == hopeless, where
    assert CASES / 3 < placed < CASES


def test_past_the_bound_on_shares_over_common_l3_groups_only_these_are_more_than_need_be() -> None:
    across = worse = 0
    for number in range(rounds(4_000, quick=1_000)):
        machine, free, request = random_case(number, 20)
        if request.options.scope not in SPREAD_SCOPES:
            continue
        exact = place(machine, free, request)
        with (
            patch.object(serving, "_CORE_STEPS", 0),
            patch.object(
                Serving, "_serve_across", autospec=True, side_effect=Serving._serve_across
            ) as reached,
        ):
            bounded = place(machine, free, request)
        across += reached.called
        assert isinstance(bounded, Placement) == isinstance(exact, Placement), number
        if isinstance(bounded, Placement) and isinstance(exact, Placement):
            found = key_of_valid(machine, free, request, bounded)
            best = key_of_valid(machine, free, request, exact)
            assert found[:4] == best[:4], number
            assert found >= best, number
            worse += found > best
    assert across > rounds(10, quick=0)
    assert worse <= across - rounds(1, quick=0)
