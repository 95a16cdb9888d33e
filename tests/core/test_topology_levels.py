"""Whatever is said of a machine's CPUs, its levels are whole, and what was not clear is told."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvplace.core.cpuset import cpus_of, mask_of
from kvplace.core.topology import NumaNode
from kvplace.core.topology_levels import Levels, union

SETS = st.integers(0, 255)


def _levels(online: int = 0b1111) -> Levels:
    return Levels("the kernel", online)


@given(st.lists(SETS, min_size=8, max_size=8), st.integers(1, 255))
def test_whatever_each_cpu_says_the_level_is_a_partition_that_keeps_what_nobody_denies(
    said: list[int], online: int
) -> None:
    levels = _levels(online)
    parts = levels.partition("caches", said.__getitem__, [online], "instead")
    assert union(parts) == online
    assert sum(part.bit_count() for part in parts) == online.bit_count()
    for cpu in cpus_of(online):
        members = said[cpu] & online
        if members >> cpu & 1 and all(said[other] & online == members for other in cpus_of(members)):
            assert members in parts
    unclear = any(said[cpu] & online not in (*parts, 0) for cpu in cpus_of(online))
    assert bool(levels.notes) >= unclear
    assert levels.notes or all(any(said[cpu] & online == part for cpu in cpus_of(part)) for part in parts)


def test_sets_that_meet_where_nothing_is_said_count_as_one() -> None:
    levels = _levels(0b111)
    assert levels.partition("caches", [0b101, 0b110, 0].__getitem__, [], "") == (0b111,)
    assert "contradicts itself" in levels.notes[0]


def _nodes(*cpus: int, memory: int = 4, pages: int = 0) -> list[NumaNode]:
    return [
        NumaNode(number, mask, memory, {1: pages} if pages else {}, {}) for number, mask in enumerate(cpus)
    ]


WHOLE = NumaNode(0, 0b1111, 7)


@pytest.mark.parametrize(
    ("cpus", "note"),
    [
        ((), "says nothing about NUMA nodes"),
        ((0b11, 0b1110), "puts CPU 1 into several NUMA nodes: the machine counts as one"),
        ((0b11, 0b100), "puts CPU 3 into no NUMA node: the machine counts as one"),
    ],
)
def test_nodes_that_are_not_whole_make_one_node_with_the_memory_of_all(
    cpus: tuple[int, ...], note: str
) -> None:
    levels = _levels()
    (node,) = levels.numa_nodes(_nodes(*cpus), WHOLE)
    assert (node.cpus, node.memory) == (0b1111, 4 * len(cpus) or 7)
    assert note in levels.notes[0]


def test_more_huge_pages_than_memory_are_told() -> None:
    levels = _levels()
    levels.numa_nodes(_nodes(0b1111, pages=5), WHOLE)
    assert levels.notes == [
        (
            "the kernel gives NUMA node 0 more huge pages than memory:"
            " no memory is left for VMs without huge pages"
        )
    ]


@pytest.mark.parametrize(
    ("rows", "note"),
    [
        (({0: 10, 1: 21}, {0: 21, 1: 10}), ""),
        (({}, {}), "says nothing about distances"),
        (({0: 10, 1: 21}, {1: 10}), "gives NUMA node 1 no distance to some nodes"),
        (({0: 10, 1: 21}, {0: 31, 1: 10}), "between NUMA nodes 0-1 differ by direction: the larger counts"),
    ],
)
def test_distances_are_kept_as_they_are_and_only_told(rows: tuple[dict[int, int], ...], note: str) -> None:
    levels = _levels()
    nodes = [
        NumaNode(number, mask_of(cpus), 0, {}, rows[number]) for number, cpus in enumerate(((0, 1), (2, 3)))
    ]
    assert [node.distances for node in levels.numa_nodes(nodes, WHOLE)] == list(rows)
    assert [note in told for told in levels.notes] == ([True] if note else [])


def test_sockets_keep_ids_that_are_their_own_and_are_numbered_otherwise() -> None:
    for ids, expected in (((8, 8, 0, 0), [8, 0]), ((3, 3, 3, 3), [0, 1]), ((-1, -1, -1, -1), [0, 1])):
        levels = _levels()
        packages = levels.packages(lambda cpu: 0b11 if cpu < 2 else 0b1100, ids.__getitem__)
        assert [package.id for package in packages] == expected
        assert bool(levels.notes) == (expected == [0, 1])
