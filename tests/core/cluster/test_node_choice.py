"""The node with the best locality is chosen, then the one that the strategy prefers."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvplace.core.allocator.allocate import place
from kvplace.core.cluster.node_choice import (
    MAX_SCORE,
    Balance,
    Candidate,
    Fit,
    Strategy,
    best_candidate,
    near_enough,
    quality,
    scores,
    standing,
    why,
)
from kvplace.core.cpuset import mask_of, parse_cpu_list
from kvplace.core.free_resources import Free, free_of
from kvplace.core.ledger import Ledger
from kvplace.core.node_devices import DeviceCount, NodeDevices, TopologyPolicy
from kvplace.core.placement import Placement
from kvplace.core.request import NumaMemory, PinningOptions, Policy, Request, Scope
from kvplace.core.scalars import NO_CPUS, Bytes, CpuMask, NodeName, NumaId, ResourceName
from kvplace.core.topology import Topology
from tests.core.allocator.shapes import TWO_SOCKETS
from tests.core.machines import make_numa_node, make_package, make_topology

GIB = Bytes(1 << 30)
MACHINE = make_topology(
    packages=(make_package(0, 0b0011), make_package(1, 0b1100)),
    numa_nodes=tuple(
        make_numa_node(node, 1 << node, 0, {}, {other: 10 + 11 * abs(other - node) for other in range(4)})
        for node in range(4)
    ),
    l3_groups=(1, 2, 4, 8),
    cores=(1, 2, 4, 8),
)


def candidate(node: str, cpus: int, free_cpus: int = 4) -> Candidate:
    placement = Placement(
        policy=Policy.EXCLUSIVE,
        vcpus=(),
        cpus=CpuMask(cpus),
        owned=CpuMask(cpus),
        emulator_cpus=NO_CPUS,
        io_thread_cpus=(),
        numa_nodes=MACHINE.nodes_of(CpuMask(cpus)),
        memory={},
        huge_pages={},
        packages=MACHINE.packages_of(CpuMask(cpus)),
        l3_groups=tuple(index for index, l3 in enumerate(MACHINE.l3_groups) if l3 & cpus),
        numa_memory=NumaMemory.PREFERRED,
    )
    free = mask_of(range(free_cpus))
    return Candidate(NodeName(node), Fit(MACHINE, placement, Free(free, free), 1))


candidates = st.lists(
    st.builds(candidate, st.sampled_from("abcdefgh"), st.integers(1, 15), st.integers(1, 4)),
    unique_by=lambda one: one.node,
    min_size=1,
)
strategies = st.sampled_from(Strategy)


def test_quality_counts_sockets_nodes_distance_and_l3_groups() -> None:
    assert quality(MACHINE, candidate("a", 0b0001).placement) == (1, 1, 0, 1)
    assert quality(MACHINE, candidate("a", 0b0011).placement) == (1, 2, 21, 2)
    assert quality(MACHINE, candidate("a", 0b1001).placement) == (2, 2, 43, 2)


def test_one_socket_goes_before_one_node_more_and_nearness_before_fullness() -> None:
    crossing, apart, near = candidate("a", 0b0110, 4), candidate("b", 0b1011, 4), candidate("c", 0b0011, 1)
    for strategy in Strategy:
        assert best_candidate([crossing, apart, near], strategy) is near
        assert best_candidate([apart, crossing], strategy) is crossing


def test_at_equal_locality_pack_takes_the_fullest_node_and_spread_the_emptiest() -> None:
    full, empty = candidate("b", 1, free_cpus=2), candidate("a", 1, free_cpus=9)
    assert best_candidate([empty, full], Strategy.PACK) is full
    assert best_candidate([full, empty], Strategy.SPREAD) is empty


def machine(memory_gib: int, pages: int = 0, cpus: int = 16) -> Topology:
    everything = (1 << cpus) - 1
    node = make_numa_node(0, everything, (memory_gib + pages) * GIB, {GIB: pages} if pages else {})
    return make_topology(
        packages=(make_package(0, everything),),
        numa_nodes=(node,),
        l3_groups=(everything,),
        cores=tuple(1 << cpu for cpu in range(cpus)),
    )


def on_node(
    name: str, topology: Topology, request: Request, taken: int = 0, memory_gib: int = 0
) -> Candidate:
    free = free_of(topology, Ledger())
    free = replace(
        free,
        cpus=CpuMask(free.cpus >> taken << taken),
        pool=CpuMask(free.pool >> taken << taken),
        memory=tuple((node, count - memory_gib * GIB) for node, count in free.memory),
    )
    found = place(topology, free, request)
    assert isinstance(found, Placement)
    return Candidate(NodeName(name), Fit(topology, found, free, request.vcpus))


@pytest.mark.parametrize("strategy", Strategy)
def test_much_memory_per_cpu_goes_where_the_machine_has_it_and_little_where_it_has_little(
    strategy: Strategy,
) -> None:
    poor, rich = machine(32), machine(128)
    for memory, expected in ((1, "poor"), (4, "poor"), (32, "rich")):
        request = Request(2, memory=memory * GIB)
        found = [on_node("poor", poor, request), on_node("rich", rich, request)]
        best = best_candidate(found, strategy)
        assert best is not None
        assert best.node == expected
        (other,) = [one for one in found if one is not best]
        assert why(best, other, strategy) == "CPUs and memory are used more evenly"


@pytest.mark.parametrize("strategy", Strategy)
def test_huge_pages_are_left_for_vms_that_need_them(strategy: Strategy) -> None:
    paged, plain = machine(64, pages=16), machine(64)
    request = Request(2, memory=8 * GIB)
    found = [on_node("a", paged, request), on_node("b", plain, request)]
    best = best_candidate(found, strategy)
    assert best is found[1]
    assert why(best, found[0], strategy) == "its huge pages are left for VMs that need them"
    assert best_candidate([on_node("a", paged, request)], strategy) is not None
    wanting = Request(2, memory=4 * GIB, huge_pages={GIB: 4})
    assert best_candidate([on_node("a", paged, wanting)], strategy) is not None


def test_memory_that_is_not_known_or_not_asked_for_does_not_decide() -> None:
    request, unknown = Request(2), machine(0)
    full, empty = on_node("b", unknown, request, taken=4), on_node("a", machine(64), request)
    assert best_candidate([empty, full], Strategy.PACK) is full


TWO_NUMA_NODES = make_topology(
    packages=(make_package(0, 0xFFFF),),
    numa_nodes=(make_numa_node(0, 0x00FF), make_numa_node(1, 0xFF00)),
    l3_groups=(0x00FF, 0xFF00),
    cores=tuple(1 << cpu for cpu in range(16)),
)


def in_one_numa_node(free: dict[str, CpuMask], vcpus: int) -> list[Candidate]:
    request = Request(vcpus, PinningOptions(scope=Scope.ONE_NUMA))
    placed = {name: place(TWO_NUMA_NODES, Free(cpus, cpus), request) for name, cpus in free.items()}
    return [
        Candidate(NodeName(name), Fit(TWO_NUMA_NODES, found, Free(free[name], free[name]), vcpus))
        for name, found in placed.items()
        if isinstance(found, Placement)
    ]


def test_pack_fills_numa_nodes_that_are_nearly_full_before_it_breaks_larger_free_blocks() -> None:
    free = {"a": CpuMask(0x003F), "b": CpuMask(0xFF03)}  # 6 CPUs; 2 and 8 CPUs
    for vcpus in (2, 6, 8):  # all fit only if each takes a free block of its own size
        best = best_candidate(in_one_numa_node(free, vcpus), Strategy.PACK)
        assert best is not None, f"the VM of {vcpus} CPUs is refused"
        free[best.node] = CpuMask(free[best.node] & ~best.placement.owned)
    assert not any(free.values())


def test_of_equally_full_numa_nodes_pack_takes_the_one_of_the_fuller_node() -> None:
    fuller_block, fuller_node, emptiest = in_one_numa_node(
        {"a": CpuMask(0xFF03), "b": CpuMask(0x000F), "c": CpuMask(0x0F0F)}, 2
    )
    assert best_candidate([fuller_block, fuller_node, emptiest], Strategy.PACK) is fuller_block
    assert why(fuller_block, fuller_node, Strategy.PACK) == "its NUMA nodes are fuller"
    assert best_candidate([fuller_node, emptiest], Strategy.PACK) is fuller_node
    assert why(fuller_node, emptiest, Strategy.PACK) == "the node is fuller"


@pytest.mark.parametrize(("more", "is_near"), [(0, True), (4, True), (5, False)])
def test_a_node_is_near_enough_if_it_keeps_at_most_four_more_cpus_free_beside_the_vm(
    more: int, is_near: bool
) -> None:
    best = standing(Strategy.PACK, (1, 1, 0), 0, Balance(0.0, 0.0), False, free_beside=2, free=8)
    other = best._replace(free_beside=best.free_beside + more, free=99)
    assert (other < near_enough(best, Strategy.PACK)) is is_near


def test_no_node_is_near_enough_to_one_that_keeps_no_cpu_free_beside_the_vm() -> None:
    best = standing(Strategy.PACK, (1, 1, 0), 0, Balance(0.0, 0.0), False, free_beside=0, free=8)
    assert not best._replace(free=99) < near_enough(best, Strategy.PACK)


def test_pack_prefers_an_exact_free_block_to_the_fullest_node() -> None:
    request = Request(4)
    hole, fullest = on_node("b", machine(64), request, taken=12), on_node("a", machine(64), request, taken=11)
    assert best_candidate([fullest, hole], Strategy.PACK) is hole
    larger = on_node("c", machine(64), request, taken=8)
    assert best_candidate([fullest, larger], Strategy.PACK) is fullest
    assert why(fullest, larger, Strategy.PACK) == "its NUMA nodes are fuller"
    assert best_candidate([hole, fullest, larger], Strategy.SPREAD) is larger
    assert why(larger, hole, Strategy.SPREAD) == "the node is emptier"


@pytest.mark.parametrize("strategy", [Strategy.PACK, Strategy.SPREAD])
@pytest.mark.parametrize(("memory", "expected"), [(1, "memory is short"), (32, "cpus are short")])
def test_a_vm_goes_where_it_uses_resources_that_would_be_stranded(
    strategy: Strategy, memory: int, expected: str
) -> None:
    request = Request(2, memory=memory * GIB)
    found = [
        on_node("cpus are short", machine(64), request, taken=12, memory_gib=8),
        on_node("level", machine(64), request, taken=8, memory_gib=32),
        on_node("memory is short", machine(64), request, taken=2, memory_gib=28),
    ]
    best = best_candidate(found, strategy)
    assert best is not None
    assert best.node == expected
    assert why(best, found[1], strategy) == "CPUs and memory are used more evenly"


def test_a_vm_with_equal_shares_of_both_prefers_even_nodes_under_balance_only() -> None:
    request = Request(2, memory=8 * GIB)
    level = on_node("b", machine(64), request, taken=4, memory_gib=16)
    uneven = on_node("a", machine(64), request, taken=4, memory_gib=32)
    assert best_candidate([level, uneven], Strategy.PACK) is uneven
    assert best_candidate([level, uneven], Strategy.SPREAD) is uneven
    assert best_candidate([level, uneven], Strategy.BALANCE) is level
    assert why(uneven, level, Strategy.PACK) == "first by name"


def test_equal_nodes_are_ordered_by_name() -> None:
    first, second = candidate("a", 1), candidate("b", 1)
    assert all(why(first, second, strategy) == "first by name" for strategy in Strategy)


def test_the_first_by_name_of_equal_nodes_is_taken_and_none_without_nodes() -> None:
    assert best_candidate([candidate("b", 1), candidate("a", 1)], Strategy.PACK) == candidate("a", 1)
    assert best_candidate([], Strategy.PACK) is None


@given(candidates, strategies, st.randoms(use_true_random=False))
def test_the_choice_does_not_depend_on_the_order_of_the_nodes(
    found: list[Candidate], strategy: Strategy, chance: object
) -> None:
    shuffled = list(found)
    chance.shuffle(shuffled)  # type: ignore[attr-defined]
    assert best_candidate(shuffled, strategy) is best_candidate(found, strategy)
    assert scores(shuffled, strategy) == scores(found, strategy)


@given(candidates, strategies)
def test_scores_go_from_ten_for_the_best_down_to_zero_in_the_order_of_the_choice(
    found: list[Candidate], strategy: Strategy
) -> None:
    given_scores = scores(found, strategy)
    best = best_candidate(found, strategy)
    assert best is not None
    assert given_scores.keys() == {one.node for one in found}
    assert given_scores[best.node] == MAX_SCORE
    assert all(0 <= score <= MAX_SCORE for score in given_scores.values())
    ranked = sorted(found, key=lambda one: one.rank(strategy))
    in_order = [given_scores[one.node] for one in ranked]
    assert in_order == sorted(in_order, reverse=True)
    for one in found:
        for other in found:
            if one.rank(strategy)[:-1] == other.rank(strategy)[:-1]:
                assert given_scores[one.node] == given_scores[other.node]


def test_without_candidates_there_are_no_scores() -> None:
    assert scores([], Strategy.PACK) == {}


def test_a_node_with_a_local_device_is_preferred_to_a_fuller_one_without() -> None:
    devices = ResourceName("intel.com/vf")
    request = Request(2, PinningOptions(scope=Scope.ONE_NUMA), devices={devices: 1})

    def offer(name: str, node: int | None, only: str) -> Candidate:
        counts = () if node is None else (DeviceCount(devices, NumaId(node), 1, 1),)
        known = None if node is None else NodeDevices.of(counts, TopologyPolicy())
        free = free_of(TWO_SOCKETS, Ledger(), devices=known).within(parse_cpu_list(only))
        found = place(TWO_SOCKETS, free, request)
        assert isinstance(found, Placement)
        return Candidate(NodeName(name), Fit.of(TWO_SOCKETS, free, request, found))

    local = offer("local", 1, "0-11")
    for other in (offer("far", 1, "0-2,6-8"), offer("unknown", None, "0-5")):
        for strategy in Strategy:
            assert best_candidate([other, local], strategy) is local
            assert why(local, other, strategy) == "beside more of its devices"
