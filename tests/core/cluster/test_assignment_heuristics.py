"""The set of sizes that fills a room fullest, against all sets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product

from hypothesis import given
from hypothesis import strategies as st

from kvplace.core.cluster.assignment_heuristics import best_filling, exchange
from kvplace.core.cluster.draft import Draft, Shape, shapes_of
from kvplace.core.occupant import ClusterNode
from kvplace.core.request import PinningOptions, Request, Scope
from kvplace.core.scalars import NodeName
from tests.core.cluster.clusters import machine


@given(
    st.integers(0, 40),
    st.dictionaries(st.integers(1, 18), st.integers(0, 4), max_size=5),
)
def test_no_other_set_leaves_less(room: int, numbers: dict[int, int]) -> None:
    chosen = best_filling(room, numbers)
    assert all(0 < count <= numbers[size] for size, count in chosen)
    assert len({size for size, _ in chosen}) == len(chosen)
    sums = (
        sum(size * count for size, count in zip(numbers, counts, strict=True))
        for counts in product(*(range(number + 1) for number in numbers.values()))
    )
    assert sum(size * count for size, count in chosen) == max(one for one in sums if one <= room)


def test_of_equal_sets_the_one_with_the_largest_sizes_is_taken() -> None:
    assert best_filling(12, {12: 1, 4: 9, 3: 1}) == [(12, 1)]


def shapes(*sizes: int) -> list[Shape]:
    return shapes_of([Request(size, PinningOptions(scope=Scope.ONE_NUMA)) for size in sizes])


def planned(nodes: Sequence[int], shapes: Sequence[Shape], nodes_of_vms: Mapping[int, int]) -> Draft:
    """Machines of so many CPUs, and VMs on them by their number."""
    draft = Draft.empty(
        [ClusterNode(NodeName(f"node-{number}"), machine(cpus)) for number, cpus in enumerate(nodes)]
    )
    for vm, node in nodes_of_vms.items():
        answer = draft.nodes[node].place(shapes[vm])
        assert answer is not None
        draft.assign(vm, shapes[vm], node, answer)
    return draft


def test_one_vm_is_exchanged_for_two() -> None:
    wanted = shapes(4, 2, 2)
    draft = planned([4], wanted, {0: 0})
    exchange(draft, wanted)
    assert draft.node_of == {1: 0, 2: 0}


def test_a_vm_is_exchanged_for_a_larger_one_and_not_the_reverse() -> None:
    wanted = shapes(3, 4, 2)
    draft = planned([4], wanted, {0: 0})
    exchange(draft, wanted)
    assert draft.node_of == {1: 0}


def test_a_vm_is_not_exchanged_for_one_of_equal_size() -> None:
    wanted = shapes_of(Request(3, PinningOptions(scope=scope)) for scope in (Scope.ONE_NUMA, Scope.ANY))
    draft = planned([4], wanted, {0: 0})
    exchange(draft, wanted)
    assert draft.node_of == {0: 0}


def test_a_vm_that_gives_up_its_node_gets_another_one_where_it_fits() -> None:
    wanted = shapes(4, 2, 2)
    draft = planned([4, 4], wanted, {0: 0})
    exchange(draft, wanted)
    assert draft.node_of == {0: 1, 1: 0, 2: 0}
