"""The view of a mirroring guest: cells, cores and distances are the host's, as far as QEMU can state them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvplace.core.cpuset import cpus_of, mask_of
from kvplace.core.guest_cells import CELL_GRANULE, GuestCell, apportion, mirrored, read_guest_cells
from kvplace.core.json_fields import Fields
from kvplace.core.placement import Placement, PodPlacement
from kvplace.core.request import NumaMemory, OnFailure, Policy
from kvplace.core.scalars import NO_CPUS, Bytes, CpuId, CpuMask, NodeName, NumaId, PodUid
from kvplace.core.topology import Topology
from tests.core.machines import make_numa_node, make_package, make_topology, topologies

GIB = Bytes(1 << 30)


def placed(
    topology: Topology, vcpus: Sequence[int], memory: Mapping[int, int], policy: Policy = Policy.EXCLUSIVE
) -> Placement:
    cpus = mask_of(vcpus)
    nodes = {*topology.nodes_of(cpus), *(node for node, count in memory.items() if count)}
    return Placement(
        policy=policy,
        vcpus=tuple(map(CpuId, vcpus)),
        cpus=cpus,
        owned=cpus if policy is Policy.EXCLUSIVE else NO_CPUS,
        emulator_cpus=cpus,
        io_thread_cpus=(),
        numa_nodes=tuple(map(NumaId, sorted(nodes))),
        memory={NumaId(node): Bytes(count) for node, count in memory.items()},
        huge_pages={},
        packages=topology.packages_of(cpus),
        l3_groups=(),
        numa_memory=NumaMemory.STRICT,
    )


def cells_of(topology: Topology, placement: Placement) -> tuple[GuestCell, ...]:
    return mirrored(topology, placement.vcpus, placement.memory)


def machine(
    *nodes: tuple[int, Sequence[Sequence[int]]], distances: Mapping[int, Mapping[int, int]] | None = None
) -> Topology:
    """One package and one L3 per node: (node id, its cores as lists of siblings)."""
    sets = [(number, mask_of(cpu for core in cores for cpu in core)) for number, cores in nodes]
    return make_topology(
        packages=tuple(make_package(number, cpus) for number, cpus in sets if cpus),
        numa_nodes=tuple(
            make_numa_node(number, cpus, memory=64 * GIB, distances=(distances or {}).get(number, {}))
            for number, cpus in sets
        ),
        l3_groups=tuple(cpus for _, cpus in sets if cpus),
        cores=tuple(mask_of(core) for _, cores in nodes for core in cores),
    )


TWO_NODES = machine(
    (0, [(0, 4), (1, 5)]), (1, [(2, 6), (3, 7)]), distances={0: {0: 10, 1: 21}, 1: {0: 31, 1: 10}}
)


def test_a_vm_on_two_nodes_sees_two_cells_with_its_siblings_and_their_distances() -> None:
    cells = cells_of(TWO_NODES, placed(TWO_NODES, (0, 4, 1, 5, 2, 6), {0: 4 * GIB, 1: 2 * GIB}))
    assert cells == (
        GuestCell(0, node=NumaId(0), vcpus=(0, 1, 2, 3), memory=4 * GIB, distances=(10, 21), threads=2),
        GuestCell(1, node=NumaId(1), vcpus=(4, 5), memory=2 * GIB, distances=(31, 10), threads=2),
    )


def test_cells_stand_in_the_order_of_their_first_vcpu() -> None:
    cells = cells_of(TWO_NODES, placed(TWO_NODES, (2, 3, 0), {0: GIB, 1: GIB}))
    assert [(cell.id, cell.node, cell.vcpus) for cell in cells] == [(0, 1, (0, 1)), (1, 0, (2,))]


@pytest.mark.parametrize(
    ("vcpus", "threads"),
    [
        ((0, 4, 1, 5), 2),
        ((4, 0), 2),
        ((0, 1, 2, 3), 1),  # one thread of each core, as with smt isolate
        ((0, 4, 1), 1),  # a thread left over
        ((0, 1, 4, 5), 1),  # siblings, but not side by side
        ((0, 4, 1, 2), 1),  # cores of two widths
    ],
)
def test_guest_siblings_are_host_siblings_or_there_are_none(vcpus: tuple[int, ...], threads: int) -> None:
    cells = cells_of(TWO_NODES, placed(TWO_NODES, vcpus, {0: GIB}))
    assert {cell.threads for cell in cells} == {threads}


def test_a_node_that_gives_memory_alone_is_a_cell_without_vcpus_behind_the_others() -> None:
    cells = cells_of(TWO_NODES, placed(TWO_NODES, (2, 6), {0: 3 * GIB, 1: GIB}))
    assert [(cell.node, cell.vcpus, cell.memory) for cell in cells] == [(1, (0, 1), GIB), (0, (), 3 * GIB)]


def test_vcpus_of_a_node_that_gives_no_memory_join_the_nearest_one_that_does() -> None:
    far = {0: {1: 40, 2: 12}, 1: {0: 40, 2: 40}, 2: {0: 12, 1: 40}}
    topology = machine((0, [(0,)]), (1, [(1,)]), (2, [(2,)]), distances=far)
    cells = cells_of(topology, placed(topology, (0, 1, 2), {1: GIB, 2: GIB}))
    assert [(cell.node, cell.vcpus) for cell in cells] == [(2, (0, 2)), (1, (1,))]


@pytest.mark.parametrize(("said", "seen"), [(10, 11), (0, 20), (255, 254), (160, 160)])
def test_distances_that_no_guest_accepts_become_the_nearest_that_it_does(said: int, seen: int) -> None:
    topology = machine((0, [(0,)]), (1, [(1,)]), distances={0: {1: said}, 1: {0: said}} if said else None)
    cells = cells_of(topology, placed(topology, (0, 1), {0: GIB, 1: GIB}))
    assert [cell.distances for cell in cells] == [(10, seen), (seen, 10)]


def test_a_distance_that_the_host_states_in_one_direction_only_holds_in_both() -> None:
    topology = machine((0, [(0,)]), (1, [(1,)]), distances={0: {1: 32}})
    cells = cells_of(topology, placed(topology, (0, 1), {0: GIB, 1: GIB}))
    assert [cell.distances for cell in cells] == [(10, 32), (32, 10)]


def test_a_placement_without_a_cpu_per_vcpu_has_nothing_to_mirror() -> None:
    assert cells_of(TWO_NODES, placed(TWO_NODES, (), {0: GIB}, Policy.NUMA)) == ()


@st.composite
def placements_on_machines(draw: st.DrawFn) -> tuple[Topology, Placement]:
    topology = draw(topologies())
    cpus = draw(st.permutations(list(cpus_of(topology.cpus))))
    vcpus = cpus[: draw(st.integers(1, len(cpus)))]
    if draw(st.booleans()):
        vcpus = [cpu for core in topology.cores for cpu in cpus_of(core) if cpu in set(vcpus)]
    sizes = st.integers(0, 64).map(lambda count: count * GIB) | st.integers(0, 1 << 40)
    nodes: list[int] = [node.id for node in topology.numa_nodes]
    memory = draw(st.dictionaries(st.sampled_from(nodes), sizes, max_size=len(nodes)))
    return topology, placed(topology, vcpus, memory)


@given(placements_on_machines())
def test_cells_share_out_all_vcpus_and_all_memory_and_are_as_libvirt_wants_them(
    given_: tuple[Topology, Placement],
) -> None:
    topology, placement = given_
    cells = cells_of(topology, placement)
    total = sum(placement.memory.values())
    assert [cell.id for cell in cells] == list(range(len(cells)))
    assert sorted(vcpu for cell in cells for vcpu in cell.vcpus) == list(range(len(placement.vcpus)))
    assert sum(cell.memory for cell in cells) == total
    assert {bool(cell.memory) for cell in cells} == {bool(total)}
    assert sum(cell.memory % CELL_GRANULE for cell in cells) == total % CELL_GRANULE
    assert {cell.node for cell in cells} <= set(placement.numa_nodes)
    for cell in cells:
        assert abs(cell.memory - placement.memory.get(cell.node, 0)) < 2 * CELL_GRANULE
        for other in cells:
            distance = cell.distances[other.id]
            assert distance == 10 if other is cell else 11 <= distance <= 254
        for vcpu in cell.vcpus:
            home = topology.nodes_of(CpuMask(1 << placement.vcpus[vcpu]))[0]
            giving = {entry.node for entry in cells if entry.memory}
            assert cell.node == home or home not in giving


@given(placements_on_machines())
def test_vcpus_of_one_guest_core_are_all_the_vcpus_of_one_host_core(
    given_: tuple[Topology, Placement],
) -> None:
    topology, placement = given_
    cells = cells_of(topology, placement)
    (threads,) = {cell.threads for cell in cells}
    assert len(placement.vcpus) % threads == 0
    if threads > 1:
        for start in range(0, len(placement.vcpus), threads):
            block = placement.vcpus[start : start + threads]
            (core,) = {topology.core_of[cpu] for cpu in block}
            assert core & placement.cpus == mask_of(block)
            assert any({*range(start, start + threads)} <= {*cell.vcpus} for cell in cells)


@given(
    st.lists(st.integers(0, 1 << 42), min_size=1, max_size=9).filter(any),
    st.integers(0, 1 << 44),
    st.sampled_from([1 << 10, 1 << 20, 1 << 21, 1 << 30]),
)
def test_apportioned_amounts_add_up_and_stay_near_their_weights(
    weights: list[int], total: int, granule: int
) -> None:
    amounts = apportion(total, weights, granule)
    assert sum(amounts) == total
    assert sum(amount % granule for amount in amounts) == total % granule
    whole = sum(weights)
    for amount, weight in zip(amounts, weights, strict=True):
        assert abs(amount * whole - total * weight) < 2 * granule * whole
        assert weight or not amount
    even = [weight * granule for weight in weights]
    assert apportion(sum(even), even, granule) == even


@given(placements_on_machines())
def test_cells_written_on_a_pod_and_read_from_it_are_the_same(given_: tuple[Topology, Placement]) -> None:
    topology, placement = given_
    cells = cells_of(topology, placement)
    bound = PodPlacement(
        pod_uid=PodUid("u"),
        node=NodeName("n"),
        topology="t",
        on_failure=OnFailure.WAIT,
        placement=replace(placement, guest_cells=cells),
    )
    assert bound.placement.guest_cells == cells
    assert PodPlacement.from_json(bound.to_json()) == bound


CELLS = [
    {"node": 0, "vcpus": "0-1", "memory": GIB, "distances": [10, 21]},
    {"node": 1, "vcpus": "2-3", "memory": GIB, "distances": [21, 10]},
]


def changed(**change: object) -> list[dict[str, object]]:
    return [CELLS[0], CELLS[1] | change]


@pytest.mark.parametrize(
    ("raw", "threads", "sentence"),
    [
        ("x", 1, "guestCells is 'x'; it must be a list"),
        ([7], 1, "guestCells[0] is 7; it must be an object"),
        (CELLS, 3, "guestThreads is 3, which does not divide 4 vCPUs into cores"),
        (CELLS, "2", "guestThreads is '2'; it must be a whole number from 1 to 4"),
        (CELLS, 0, "guestThreads is 0"),
        (changed(node=-1), 1, "guestCells[1].node is -1; it must be a whole number from 0 to 16383"),
        (changed(node=0), 1, "guestCells has one NUMA node twice"),
        (changed(vcpus="1-3"), 1, "guestCells do not hold each of the 4 vCPUs once"),
        (changed(vcpus="2"), 1, "guestCells do not hold each of the 4 vCPUs once"),
        (changed(vcpus=[2]), 1, "guestCells[1].vcpus is [2]; it must be a CPU list such as '0-3,8'"),
        (changed(vcpus="2-"), 1, "guestCells[1].vcpus '2-'"),
        (changed(memory=-1), 1, "guestCells[1].memory is -1; it must be a whole number from 0 to "),
        (changed(memory=0), 1, "guestCells give memory to some cells only"),
        (changed(distances=[10]), 1, "guestCells[1].distances is [10]; it must be a list of 2 distances"),
        (changed(distances=[10, 10]), 1, "guestCells[1].distances[0] is 10; it must be from 11 to 254"),
        (changed(distances=[21, 11]), 1, "guestCells[1].distances[1] is 11; it must be from 10 to 10"),
    ],
    ids=str,
)
def test_cells_that_cannot_be_meant_are_named(raw: object, threads: object, sentence: str) -> None:
    with pytest.raises(ValueError, match="guest") as refused:
        read_guest_cells(Fields({"guestCells": raw, "guestThreads": threads}), vcpus=4)
    assert str(refused.value).startswith(sentence)
