"""A map describes the distances between NUMA nodes: all that the machine reports, in few words."""

from __future__ import annotations

import re
from itertools import permutations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvplace.core.cpuset import cpus_of, parse_cpu_list
from kvplace.core.drawing.core_map import distance_phrases, draw
from kvplace.core.topology import Topology
from kvplace.machines.server_types import machine_names, read_machine
from tests.core.machines import make_numa_node, make_package, make_topology


def _phrases(machine: Topology) -> tuple[str, ...]:
    return distance_phrases(draw("node", machine))


@pytest.mark.parametrize(
    ("name", "phrases"),
    [
        ("2x-epyc-9354-nps2", ("12 inside a socket", "32 between sockets")),
        ("4x-xeon-8280", ("21 between sockets",)),
        ("epyc-7502p", ()),
    ],
)
def test_machines_whose_sockets_are_alike_need_one_number_for_each_relation(
    name: str, phrases: tuple[str, ...]
) -> None:
    assert name in machine_names()
    assert _phrases(read_machine(name)) == phrases


def _machine(table: list[list[int | None]]) -> Topology:
    """A node with one CPU for each row, two in each socket, but for the last one, which has only memory."""
    count = len(table)
    cpus = [0 if node == count - 1 else 1 << node for node in range(count)]
    return make_topology(
        packages=tuple(
            make_package(node // 2, cpus[node] | cpus[node + 1]) for node in range(0, count - 1, 2)
        ),
        numa_nodes=tuple(
            make_numa_node(
                node,
                cpus[node],
                memory=1 << 30,
                distances={other: value for other, value in enumerate(row) if value is not None},
            )
            for node, row in enumerate(table)
        ),
        l3_groups=tuple(cpus[:-1]),
        cores=tuple(cpus[:-1]),
    )


def test_nodes_that_are_unlike_have_a_phrase_each_and_ranges_of_others() -> None:
    table: list[list[int | None]] = [
        [10, 12, 20, 20, None],
        [12, 10, 30, 20, None],
        [20, 30, 10, 12, 40],
        [20, 20, 12, 10, None],
        [None] * 5,
    ]
    assert _phrases(_machine(table)) == (
        "from 0: 12 to 1; 20 to 2-3",
        "from 1: 12 to 0; 20 to 3; 30 to 2",
        "from 2: 12 to 3; 20 to 0; 30 to 1; 40 to 4",
        "from 3: 12 to 2; 20 to 0-1",
    )


def test_memory_without_cpus_is_a_relation_of_its_own() -> None:
    table: list[list[int | None]] = [[10, 12, 80], [12, 10, 80], [80, 80, 10]]
    assert _phrases(_machine(table)) == ("12 inside a socket", "80 to nodes without CPUs")


@given(
    st.integers(2, 6).flatmap(
        lambda count: st.lists(
            st.lists(st.sampled_from([None, 11, 12, 20]), min_size=count, max_size=count),
            min_size=count,
            max_size=count,
        )
    )
)
def test_every_reported_distance_can_be_read_from_the_phrases(table: list[list[int | None]]) -> None:
    machine = _machine(table)
    sockets = {
        node.id: {package.id for package in machine.packages if package.cpus & node.cpus}
        for node in machine.numa_nodes
    }
    read: dict[tuple[int, int], int] = {}
    for phrase in _phrases(machine):
        if origin := re.match(r"from (\d+): ", phrase):
            for part in phrase[origin.end() :].split("; "):
                value, _, nodes = part.partition(" to ")
                read |= {(int(origin[1]), node): int(value) for node in cpus_of(parse_cpu_list(nodes))}
            continue
        value, _, relation = phrase.partition(" ")
        for one, other in permutations(sockets, 2):
            found = "inside a socket" if sockets[one] & sockets[other] else "between sockets"
            if not (sockets[one] and sockets[other]):
                found = "to nodes without CPUs"
            if found == relation:
                read[one, other] = int(value)
    assert read == {
        (one, other): value
        for one, row in enumerate(table)
        for other, value in enumerate(row)
        if one != other and value is not None
    }
