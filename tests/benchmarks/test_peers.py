"""A peer wrongly rebuilt proves nothing: the kubelet against its own tests' rows, the others by their rules.

Of the kubelet's 22 `allocate` rows those apply that are about choosing CPUs. Left out: containers that get no
exclusive CPUs, one that has its CPUs already, and `full-pcpus-only` refusing a request, none of which is a
choice. No row has more than one L3 group, so that option is tested by cases worked out by hand.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.peers import PEERS
from benchmarks.peers.best_fit import best_fit
from benchmarks.peers.crane import crane
from benchmarks.peers.koordinator import least_allocated, most_allocated
from benchmarks.peers.kubelet import distributed, packed, packed_by_l3, with_numa_mask
from kvplace.core.cpuset import cpus_of, format_cpu_list, mask_of, parse_cpu_list
from kvplace.core.scalars import CpuMask, NumaId
from kvplace.core.topology import Topology
from kvplace.machines.server_types import ServerType, topology_of
from tests.captured import captured_folder
from tests.core.machines import make_numa_node, make_package, make_topology
from tests.profiles import examples

Json = dict[str, Any]

ROME_LIKE = topology_of(
    ServerType("rome-like", sockets=1, cores=16, threads=2, nodes=2, l3_cores=4, far=32, dimms=64)
)
"""Two NUMA nodes of two L3 groups of four cores; CPU c has the sibling c + 16."""
TWO_NODES = parse_cpu_list("0-31")


@pytest.fixture(scope="module")
def table() -> Json:
    content: Json = json.loads((captured_folder("tables") / "kubelet_static_policy.json").read_text())
    return content


def test_the_kubelet_chooses_the_cpus_of_its_own_tests(table: Json) -> None:
    compared = 0
    for row in table["allocate"]:
        if not _is_a_choice(row):
            continue
        topology = _topology(table["topologies"][row["topology"]])
        reserved = parse_cpu_list(row["reserved_effective"])
        free = parse_cpu_list(row["default_cpuset"]) & ~reserved
        count = int(row["cpu_request"].removesuffix("m")) // 1000
        for options in row["options_variants"]:
            if row["numa_affinity_hint"] is None:
                chosen = packed(topology, free, count)
            else:
                nodes = row["numa_affinity_hint"]
                if options["align_by_socket"]:
                    nodes = _nodes_of_their_sockets(topology, nodes)
                chosen = with_numa_mask(topology, free, count, nodes=nodes)
            assert _text(chosen) == row["expect"], row["description"]
            compared += 1
    assert compared == 23


def test_the_kubelet_takes_masked_cpus_first_as_in_its_own_tests(table: Json) -> None:
    for row in table["allocate_with_numa_mask"]:
        topology = _topology(table["topologies"][row["topology"]])
        free = parse_cpu_list(row["default_cpuset"])
        if row["numa_mask"] is None:
            chosen = packed(topology, free, row["request"])
        else:
            chosen = with_numa_mask(topology, free, row["request"], nodes=row["numa_mask"])
        assert _text(chosen) == row["expect"], row["description"]


def test_the_kubelet_gives_a_cpu_in_use_away_on_a_hybrid_machine() -> None:
    cores = [1 << cpu for cpu in range(8)] + [mask_of((cpu, cpu + 8)) for cpu in range(8, 16)]
    hybrid = _flat(cores)
    assert _text(packed(hybrid, parse_cpu_list("9-23"), 2)) == "8,16"


def test_the_kubelet_breaks_a_whole_l3_group_of_a_node_that_comes_earlier() -> None:
    whole_on_node_0 = mask_of([*range(4), *range(16, 20)])
    half_on_node_1 = mask_of([8, 9, 24, 25])
    others = mask_of([12, 13, 14, 28, 29, 30])  # node 1 has more free CPUs, so it comes later
    chosen = packed_by_l3(ROME_LIKE, whole_on_node_0 | half_on_node_1 | others, 4)
    assert _text(chosen) == "0-1,16-17"
    assert _text(best_fit(ROME_LIKE, whole_on_node_0 | half_on_node_1, 4)) == "8-9,24-25"


def test_the_kubelet_takes_whole_l3_groups_then_the_first_that_covers_the_rest() -> None:
    free = TWO_NODES & ~mask_of([8, 24])
    assert _text(packed_by_l3(ROME_LIKE, free, 12)) == "9-10,12-15,25-26,28-31"
    assert _text(packed_by_l3(ROME_LIKE, free, 3)) == "9-10,25"


def test_the_kubelet_distributes_over_the_nodes_that_are_left_most_even() -> None:
    fuller = TWO_NODES & ~mask_of([0, 16])
    assert _text(distributed(ROME_LIKE, fuller, 4)) == "8-9,24-25"
    assert _text(distributed(ROME_LIKE, TWO_NODES, 20)) == "0-4,8-12,16-20,24-28"


def test_the_topology_managers_hint_is_the_first_narrow_one_not_the_best() -> None:
    tight_on_node_1 = TWO_NODES & ~mask_of([*range(10, 16), *range(26, 32)])
    assert _nodes(with_numa_mask(ROME_LIKE, tight_on_node_1, 4)) == (0,)
    assert _nodes(best_fit(ROME_LIKE, tight_on_node_1, 4)) == (1,)


def test_koordinator_fills_the_fullest_or_the_emptiest_node_and_crane_the_emptiest() -> None:
    fuller_node_1 = TWO_NODES & ~mask_of([8, 24])
    assert _nodes(most_allocated(ROME_LIKE, fuller_node_1, 6)) == (1,)
    assert _nodes(least_allocated(ROME_LIKE, fuller_node_1, 6)) == (0,)
    assert _nodes(crane(ROME_LIKE, fuller_node_1, 6)) == (0,)


@settings(max_examples=examples(60), deadline=None)
@given(free=st.integers(0, TWO_NODES), count=st.integers(1, 34))
def test_every_peer_gives_as_many_free_cpus_as_wanted_where_cores_are_alike(free: int, count: int) -> None:
    for name, choose in PEERS.items():
        chosen = choose(ROME_LIKE, free, count)
        if count > free.bit_count():
            assert chosen is None, name
        else:
            assert chosen is not None, name
            assert chosen & ~free == 0, name
            assert chosen.bit_count() == count, name


def _is_a_choice(row: Json) -> bool:
    return (
        row["cpu_request"] == row["cpu_limit"]
        and row["cpu_request"].endswith("000m")
        and row["container"] not in row["assigned"]
        and row["expect_error"] != "SMTAlignmentError"
    )


def _topology(fixture: Json) -> Topology:
    levels: list[dict[int, int]] = [{}, {}, {}]
    for cpu, *ids in fixture["cpus"]:
        for level, id_ in zip(levels, ids[:3], strict=True):
            level[id_] = level.get(id_, 0) | 1 << cpu
    cores, sockets, nodes = (sorted(level.items()) for level in levels)
    return make_topology(
        packages=tuple(make_package(id_, cpus) for id_, cpus in sockets),
        numa_nodes=tuple(make_numa_node(id_, cpus, memory=0) for id_, cpus in nodes),
        l3_groups=tuple(cpus for _, cpus in sockets),
        cores=tuple(cpus for _, cpus in cores),
    )


def _flat(cores: list[int]) -> Topology:
    cpus = mask_of(cpu for core in cores for cpu in cpus_of(CpuMask(core)))
    return make_topology(
        (make_package(0, cpus),), (make_numa_node(0, cpus, memory=0),), (cpus,), tuple(cores)
    )


def _nodes_of_their_sockets(topology: Topology, nodes: list[int]) -> list[int]:
    sockets = [
        p.cpus for p in topology.packages if any(topology.node_by_id[NumaId(n)].cpus & p.cpus for n in nodes)
    ]
    return [node.id for node in topology.numa_nodes if any(node.cpus & cpus for cpus in sockets)]


def _nodes(chosen: int | None) -> tuple[int, ...]:
    assert chosen is not None
    return ROME_LIKE.nodes_of(CpuMask(chosen))


def _text(chosen: int | None) -> str | None:
    return None if chosen is None else format_cpu_list(chosen)
