"""No placement on a node stands better than the bounds of the node report."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvplace.core.allocator.allocate import place
from kvplace.core.cluster.node_bound import NodeCounts, StandingBound
from kvplace.core.cluster.node_choice import Fit, Strategy
from kvplace.core.free_resources import Free
from kvplace.core.placement import Placement
from kvplace.core.request import PinningOptions, Request, Scope
from kvplace.core.scalars import CpuMask
from kvplace.core.topology import Topology
from tests.core.allocator.random_cases import crossed_case, random_case, scarce_memory_case
from tests.core.machines import (
    frees,
    make_numa_node,
    make_package,
    make_topology,
    requests,
    topologies,
)
from tests.profiles import examples, rounds


def check(topology: Topology, free: Free, request: Request) -> None:
    """Compare the bound with the placement, for each strategy."""
    placed = place(topology, free, request)
    counts = NodeCounts(topology, free)
    for strategy in Strategy:
        bound = StandingBound(request, strategy).of(counts)
        if isinstance(placed, Placement):
            actual = Fit(topology, placed, free, request.vcpus).standing(strategy)
            assert bound is not None, (strategy, actual)
            assert bound <= actual, (strategy, bound, actual)


@pytest.mark.parametrize("case", [random_case, scarce_memory_case, crossed_case])
def test_no_placement_on_a_random_machine_is_better_than_its_bounds(
    case: Callable[[int, int], tuple[Topology, Free, Request]],
) -> None:
    for seed in range(rounds(800, quick=100)):
        check(*case(seed, 16))


@settings(max_examples=examples(300))
@given(st.data())
def test_no_placement_is_better_than_its_bounds(data: st.DataObject) -> None:
    topology = data.draw(topologies())
    check(topology, data.draw(frees(topology)), data.draw(requests()))


FOUR_NUMA_NODES = make_topology(
    packages=(make_package(0, 0x00FF), make_package(1, 0xFF00)),
    numa_nodes=tuple(make_numa_node(number, 0xF << 4 * number) for number in range(4)),
    l3_groups=tuple(0xF << 4 * number for number in range(4)),
    cores=tuple(1 << cpu for cpu in range(16)),
)


@settings(max_examples=examples(200))
@given(st.integers(1, 0xFFFF).map(CpuMask), st.integers(1, 4))
def test_where_only_free_cpus_differ_pack_places_on_no_node_that_is_not_the_best(
    cpus: CpuMask, vcpus: int
) -> None:
    free, request = Free(cpus, cpus), Request(vcpus, PinningOptions(scope=Scope.ONE_NUMA))
    placed = place(FOUR_NUMA_NODES, free, request)
    bound = StandingBound(request, Strategy.PACK).of(NodeCounts(FOUR_NUMA_NODES, free))
    actual = None
    if isinstance(placed, Placement):
        actual = Fit(FOUR_NUMA_NODES, placed, free, vcpus).standing(Strategy.PACK)
    assert bound == actual
