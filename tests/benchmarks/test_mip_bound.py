"""The MIP bound is never below the true optimum, and equal to it where only CPUs are short."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from benchmarks._mip_bound import mip_bound
from benchmarks._plots import NotInstalled
from kvplace.core.allocator.allocate import place
from kvplace.core.cluster.planning import Tally, VmRequest, plan
from kvplace.core.free_resources import Free, free_of
from kvplace.core.ledger import Claim, Ledger, claim_of
from kvplace.core.occupant import ClusterNode, Occupant
from kvplace.core.placement import Placement
from kvplace.core.request import NumaMemory, PinningOptions, Policy, Request, Scope, Smt
from kvplace.core.scalars import Bytes, NodeName, NumaId, PodUid
from kvplace.core.topology import Topology
from tests.core.cluster.clusters import machine, nodes_of, vms_of
from tests.core.machines import GIB, requests, topologies
from tests.profiles import examples

_placed = lru_cache(maxsize=200_000)(place)


def most(cluster: Sequence[ClusterNode], wanted: Sequence[VmRequest]) -> Tally:
    """The most that fits, by trying every set of CPUs on every node for every VM."""
    empty = tuple(free_of(node.topology, Ledger()) for node in cluster)
    reached: dict[tuple[Free, ...], Tally] = {empty: Tally(0, 0)}
    for vm in wanted:
        for state, counted in list(reached.items()):
            more = Tally(counted.vms + 1, counted.vcpus + vm.request.vcpus)
            for number, node in enumerate(cluster):
                for after in _afters(node.topology, state[number], vm.request):
                    new = (*state[:number], after, *state[number + 1 :])
                    reached[new] = max(reached.get(new, more), more)
    return max(reached.values())


@lru_cache(maxsize=100_000)
def _afters(topology: Topology, free: Free, request: Request) -> frozenset[Free]:
    """The resources that can be left once a VM has come, for every choice of its CPUs."""
    found = set()
    available = free.cpus
    chosen = available
    while chosen:
        answer = _placed(topology, free.within(chosen), request)
        # Among more CPUs than it takes: those of NUMA nodes that give memory alone must be free, too.
        if isinstance(answer, Placement):
            found.add(
                free_of(topology, Ledger(), [_what_is_gone(topology, free), claim_of(PodUid("vm"), answer)])
            )
        chosen = (chosen - 1) & available
    return frozenset(found)


def _what_is_gone(topology: Topology, free: Free) -> Claim:
    """One claim for everything that is taken already."""
    empty = free_of(topology, Ledger())
    pages: dict[NumaId, dict[Bytes, int]] = {}
    for (node, size, before), (_, _, now) in zip(empty.huge_pages, free.huge_pages, strict=True):
        pages.setdefault(node, {})[size] = before - now
    memory = {
        node: before - now + sum(size * count for size, count in pages.get(node, {}).items())
        for (node, before), (_, now) in zip(empty.memory, free.memory, strict=True)
    }
    gone = empty.cpus & ~free.cpus
    return Claim(PodUid("gone"), "", "", "", Policy.EXCLUSIVE, gone, gone, memory, pages, "")


exclusive = requests(most_vcpus=4, scopes=tuple(Scope), policies=(Policy.EXCLUSIVE,), smts=(Smt.PREFER, *Smt))


thorough = settings(max_examples=examples(150), suppress_health_check=[HealthCheck.too_slow])
some_vms = st.lists(exclusive, min_size=1, max_size=4)


@given(st.lists(topologies(most_cpus=5), min_size=1, max_size=2), some_vms)
@thorough
def test_no_plan_places_more_than_the_bound(machines: list[Topology], asked: list[Request]) -> None:
    cluster = nodes_of(*machines)
    wanted = [VmRequest(f"vm-{number}", request) for number, request in enumerate(asked)]
    found = mip_bound(cluster, wanted)
    assert found.finished
    best = most(cluster, wanted)
    assert best <= found.bound
    assert plan(cluster, wanted).placed <= best


@given(topologies(most_cpus=6, memory=True), some_vms)
@thorough
def test_no_plan_places_more_than_the_bound_on_memory(topology: Topology, asked: list[Request]) -> None:
    cluster = nodes_of(topology)
    greedy = [
        replace(one, options=replace(one.options, numa_memory=NumaMemory.STRICT), memory=one.memory + 5 * GIB)
        for one in asked
    ]
    wanted = [VmRequest(f"vm-{number}", request) for number, request in enumerate(greedy)]
    assert most(cluster, wanted) <= mip_bound(cluster, wanted).bound


@given(
    st.lists(st.lists(st.integers(1, 4), min_size=1, max_size=2), min_size=1, max_size=2),
    st.lists(st.integers(1, 4), min_size=1, max_size=5),
    st.sampled_from([Scope.ONE_NUMA, Scope.ONE_L3, Scope.ONE_SOCKET, Scope.ANY]),
)
@settings(max_examples=examples(40))
def test_where_only_cpus_are_short_the_bound_is_the_optimum(
    sizes: list[list[int]], asked: list[int], scope: Scope
) -> None:
    cluster = nodes_of(*(machine(*one) for one in sizes))
    wanted = vms_of(*asked, scope=scope)
    assert mip_bound(cluster, wanted).bound == most(cluster, wanted)


def test_memory_and_huge_pages_are_part_of_the_bound() -> None:
    cluster = nodes_of(machine(8, memory=8 * GIB))
    wanted = [
        VmRequest(f"vm-{n}", Request(2, PinningOptions(scope=Scope.ONE_NUMA), memory=3 * GIB))
        for n in range(4)
    ]
    assert mip_bound(cluster, wanted).bound == Tally(2, 4)


def test_whole_cores_are_part_of_the_bound() -> None:
    (cluster,) = nodes_of(machine(4))
    asked = [
        VmRequest("a", Request(3, PinningOptions(smt=Smt.ISOLATE))),
        VmRequest("b", Request(2, PinningOptions(smt=Smt.REQUIRE))),
    ]
    assert mip_bound([cluster], asked).bound == Tally(1, 3)


def test_a_vm_that_fits_nowhere_is_not_counted() -> None:
    found = mip_bound(nodes_of(machine(4)), vms_of(5, 6))
    assert (found.bound, found.finished) == (Tally(0, 0), True)


def test_running_vms_lower_the_bound() -> None:
    topology = machine(4)
    request = Request(3)
    placement = place(topology, free_of(topology, Ledger()), request)
    assert isinstance(placement, Placement)
    node = ClusterNode(NodeName("node"), topology, (Occupant("running", request, placement),))
    assert mip_bound([node], vms_of(1, 1)).bound == Tally(1, 1)


def test_a_bound_at_the_time_limit_still_holds() -> None:
    cluster = nodes_of(*[machine(15, 15)] * 8)
    wanted = vms_of(*[6, 10, 14, 9, 7] * 6)
    found = mip_bound(cluster, wanted, seconds=1e-6)
    assert found.bound >= plan(cluster, wanted).placed
    assert found.bound <= Tally(30, 276)


def test_without_the_solver_the_error_states_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "highspy", None)
    with pytest.raises(NotInstalled, match="highspy"):
        mip_bound(nodes_of(machine(4)), vms_of(1))
