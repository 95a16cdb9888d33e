"""Whatever is reported about its CPUs, the levels of a machine are complete, with notes where unclear."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvplace.core.cpuset import cpus_of, mask_of, union
from kvplace.core.scalars import NO_CPUS, Bytes, CpuMask
from kvplace.core.topology import NumaNode
from kvplace.core.topology_levels import Levels
from tests.core.machines import make_numa_node

SETS = st.integers(0, 255).map(CpuMask)


def _levels(online: int = 0b1111) -> Levels:
    return Levels("the kernel", CpuMask(online))


@given(st.lists(SETS, min_size=8, max_size=8), st.integers(1, 255))
def test_whatever_each_cpu_reports_the_level_is_a_partition_with_all_undisputed_groups(
    said: list[CpuMask], online: int
) -> None:
    levels = _levels(online)
    parts = levels.partition("caches", said.__getitem__, [CpuMask(online)], "instead")
    assert union(parts) == online
    assert sum(part.bit_count() for part in parts) == online.bit_count()
    for cpu in cpus_of(CpuMask(online)):
        members = said[cpu] & online
        if members >> cpu & 1 and all(said[other] & online == members for other in cpus_of(members)):
            assert members in parts
    unclear = any(said[cpu] & online not in (*parts, 0) for cpu in cpus_of(CpuMask(online)))
    assert bool(levels.notes) >= unclear
    assert levels.notes or all(any(said[cpu] & online == part for cpu in cpus_of(part)) for part in parts)


def test_sets_that_meet_where_nothing_is_reported_count_as_one() -> None:
    levels = _levels(0b111)
    assert levels.partition("caches", [CpuMask(0b101), CpuMask(0b110), NO_CPUS].__getitem__, [], "") == (
        0b111,
    )
    assert "contradicts itself" in levels.notes[0]


def _nodes(*cpus: int, memory: int = 4, pages: int = 0) -> list[NumaNode]:
    return [
        make_numa_node(number, mask, memory, {Bytes(1): pages} if pages else {}, {})
        for number, mask in enumerate(cpus)
    ]


WHOLE = make_numa_node(0, 0b1111, 7)
CORES = (CpuMask(0b0011), CpuMask(0b1100))


@pytest.mark.parametrize(
    ("cpus", "note"),
    [
        ((), "does not describe NUMA nodes"),
    ],
)
def test_a_machine_that_describes_no_nodes_is_one(cpus: tuple[int, ...], note: str) -> None:
    levels = _levels()
    assert levels.numa_nodes(_nodes(*cpus), WHOLE, CORES) == (WHOLE,)
    assert note in levels.notes[0]


@pytest.mark.parametrize(
    ("cpus", "dealt", "note"),
    [
        ((0b11, 0b1110), (0b11, 0b1100), "puts CPU 1 into several NUMA nodes: they are shared out evenly"),
        ((0b1111, 0b1111), (0b0011, 0b1100), "puts CPU 0-3 into several NUMA nodes"),
        ((0b1111, 0b1111, 0b1111), (0b0011, 0b1100, 0), "puts CPU 0-3 into several NUMA nodes"),
        ((0b0111, 0b1100), (0b0011, 0b1100), "puts CPU 2 into several NUMA nodes"),
        ((0b0110, 0b0111, 0b1000), (0b0100, 0b0011, 0b1000), "puts CPU 1-2 into several NUMA nodes"),
        ((0b11, 0b100), (0b1011, 0b100), "puts CPU 3 into no NUMA node: NUMA node 0 counts as theirs"),
    ],
)
def test_nodes_that_overlap_share_their_cpus_and_keep_their_memory(
    cpus: tuple[int, ...], dealt: tuple[int, ...], note: str
) -> None:
    levels = _levels()
    nodes = levels.numa_nodes(_nodes(*cpus), WHOLE, CORES)
    assert tuple(node.cpus for node in nodes) == dealt
    assert [(node.id, node.memory) for node in nodes] == [(number, 4) for number in range(len(cpus))]
    assert note in levels.notes[0]


@given(st.lists(SETS, min_size=1, max_size=5), st.integers(1, 255))
def test_every_cpu_has_one_node_that_lists_it_or_the_first(sets: list[int], online: int) -> None:
    levels = _levels(online)
    cores = [core for core in (0b11 << shift & online for shift in range(0, 8, 2)) if core]
    nodes = levels.numa_nodes(_nodes(*(cpus & online for cpus in sets)), WHOLE, tuple(map(CpuMask, cores)))
    assert union(node.cpus for node in nodes) == online
    assert sum(node.cpus.bit_count() for node in nodes) == online.bit_count()
    unlisted = online & ~union(tuple(map(CpuMask, sets)))
    assert not any(
        node.cpus & ~cpus & ~(0 if node.id else unlisted) for node, cpus in zip(nodes, sets, strict=True)
    )


def test_more_huge_pages_than_memory_are_reported() -> None:
    levels = _levels()
    levels.numa_nodes(_nodes(0b1111, pages=5), WHOLE, CORES)
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
        (({}, {}), "does not describe distances"),
        (({0: 10, 1: 21}, {1: 10}), "gives NUMA node 1 no distance to some nodes"),
        (({0: 10, 1: 21}, {0: 31, 1: 10}), "between NUMA nodes 0-1 differ by direction: the larger counts"),
    ],
)
def test_distances_are_kept_as_they_are_and_only_reported(
    rows: tuple[dict[int, int], ...], note: str
) -> None:
    levels = _levels()
    nodes = [
        make_numa_node(number, mask_of(cpus), 0, {}, rows[number])
        for number, cpus in enumerate(((0, 1), (2, 3)))
    ]
    assert [node.distances for node in levels.numa_nodes(nodes, WHOLE, CORES)] == list(rows)
    assert [note in told for told in levels.notes] == ([True] if note else [])


def test_sockets_keep_ids_that_are_their_own_and_are_numbered_otherwise() -> None:
    for ids, expected in (((8, 8, 0, 0), [8, 0]), ((3, 3, 3, 3), [0, 1]), ((-1, -1, -1, -1), [0, 1])):
        levels = _levels()
        packages = levels.packages(lambda cpu: CpuMask(0b11 if cpu < 2 else 0b1100), ids.__getitem__)
        assert [package.id for package in packages] == expected
        assert bool(levels.notes) == (expected == [0, 1])
