"""What would make a refused VM fit, and that it really does."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvplace.core.allocator.allocate import place
from kvplace.core.cpuset import mask_of, parse_cpu_list
from kvplace.core.free import Free
from kvplace.core.moves.make_room import Occupant
from kvplace.core.moves.suggestions import Suggestion, find_suggestions
from kvplace.core.occupant import RunningVms, within
from kvplace.core.placement import Placement
from kvplace.core.refusal import Refusal
from kvplace.core.request import EmulatorThreads, NumaMemory, PinningOptions, Policy, Request, Scope, Smt
from kvplace.core.topology import NumaNode, Package, Topology
from tests.core.allocator.running import occupied
from tests.core.machines import GIB, requests, topologies

# Two sockets of two NUMA nodes of two cores with two threads each; the L3 groups are the cores.
MACHINE = Topology(
    packages=(Package(0, mask_of(range(8))), Package(1, mask_of(range(8, 16)))),
    numa_nodes=tuple(
        NumaNode(node, mask_of(range(4 * node, 4 * node + 4)), 8 * GIB, {GIB: 2}) for node in range(4)
    ),
    l3_groups=tuple(0b11 << 2 * core for core in range(8)),
    cores=tuple(0b11 << 2 * core for core in range(8)),
)
EMPTY = RunningVms(MACHINE, [], None).free({})


def _suggestions(
    request: Request, free: str = "0-15", occupants: Sequence[Occupant] = ()
) -> dict[str, tuple[object, str]]:
    left = within(RunningVms(MACHINE, occupants, None).free({}), parse_cpu_list(free))
    assert isinstance(place(MACHINE, left, request), Refusal)
    return {
        suggestion.field: (suggestion.value, suggestion.sentence)
        for suggestion in find_suggestions(MACHINE, left, request, occupants)
    }


@pytest.mark.parametrize(
    ("request_", "free", "field", "value", "sentence"),
    [
        (
            Request(8, PinningOptions(scope=Scope.ONE_NUMA)),
            "0-15",
            "vcpus",
            4,
            "with 4 vCPUs it fits on NUMA node 0",
        ),
        (
            Request(3, PinningOptions(scope=Scope.ONE_L3)),
            "0-15",
            "cpuSet",
            "one-numa",
            "with cpu-set one-numa it fits on NUMA node 0",
        ),
        (
            Request(6, PinningOptions(scope=Scope.ONE_NUMA)),
            "0-2,4-6,8-15",
            "cpuSet",
            "one-socket",
            "with cpu-set one-socket it fits on socket 1",
        ),
        (
            Request(10, PinningOptions(scope=Scope.ONE_SOCKET)),
            "0-15",
            "cpuSet",
            "spread-numa",
            "with cpu-set spread-numa it fits on NUMA nodes 0, 1 and 2",
        ),
        (
            Request(3, PinningOptions(scope=Scope.ONE_NUMA, smt=Smt.ISOLATE)),
            "0-15",
            "smt",
            "require",
            "with smt require it fits on NUMA node 0",
        ),
        (
            Request(4, PinningOptions(scope=Scope.ONE_NUMA, emulator_threads=EmulatorThreads.ISOLATE)),
            "0-3",
            "emulatorThreads",
            "shared",
            "with emulator-threads shared it fits on NUMA node 0",
        ),
        (
            Request(2, PinningOptions(scope=Scope.ONE_NUMA), memory=9 * GIB),
            "0-15",
            "memory",
            "6Gi",
            "with 6Gi of memory it fits on NUMA node 0",
        ),
        (
            Request(2, PinningOptions(scope=Scope.ONE_NUMA), memory=9 * GIB),
            "0-15",
            "numaMemory",
            "off",
            "with numa-memory off it fits on NUMA node 0",
        ),
        (
            Request(2, PinningOptions(scope=Scope.ONE_NUMA), memory=4 * GIB, huge_pages={GIB: 4}),
            "0-15",
            "hugepages",
            {"1Gi": 2},
            "with 2 huge pages of 1Gi instead of 4 it fits on NUMA node 0",
        ),
        (
            Request(2, PinningOptions(scope=Scope.ONE_NUMA), memory=4 * GIB, huge_pages={GIB // 2: 4}),
            "0-15",
            "hugepages",
            {},
            "without huge pages of 512Mi it fits on NUMA node 0",
        ),
    ],
)
def test_of_each_kind_of_change_the_smallest_that_helps_is_told(
    request_: Request, free: str, field: str, value: object, sentence: str
) -> None:
    assert _suggestions(request_, free)[field] == (value, sentence)


def _running(uid: str, cpus: str, size: int, policy: Policy = Policy.EXCLUSIVE) -> Occupant:
    request = Request(size, PinningOptions(scope=Scope.ONE_NUMA, policy=policy))
    found = place(MACHINE, within(EMPTY, parse_cpu_list(cpus)), request)
    assert isinstance(found, Placement)
    return Occupant(uid, request, found)


def test_the_vm_that_is_in_the_way_is_named_with_where_it_can_go() -> None:
    occupants = [
        _running("web", "0-1", 2),
        _running("db", "4-5", 2),
        _running("a", "8-10", 3),
        _running("b", "12-14", 3),
    ]
    told = _suggestions(Request(4, PinningOptions(scope=Scope.ONE_NUMA)), occupants=occupants)
    assert told["moves"] == (None, "move web from 0-1 to 6-7, and it fits on NUMA node 0")
    assert next(iter(told)) == "moves"


def test_sharing_is_offered_where_others_already_share() -> None:
    sharing = [_running(str(node), f"{4 * node}-{4 * node + 3}", 4, Policy.SHARE) for node in range(4)]
    told = _suggestions(Request(2), occupants=sharing)
    assert told["policy"] == ("share", "with cpu-policy share it fits on socket 0")


def test_a_mend_is_no_word_that_contradicts_another() -> None:
    sharing = [_running(str(node), f"{4 * node}-{4 * node + 3}", 4, Policy.SHARE) for node in range(4)]
    assert "policy" not in _suggestions(Request(2, PinningOptions(smt=Smt.ISOLATE)), occupants=sharing)


@settings(suppress_health_check=list(HealthCheck))
@given(st.data())
def test_every_mend_makes_it_fit_and_nothing_between_does(data: st.DataObject) -> None:
    topology = data.draw(topologies(most_cpus=12))
    occupants = data.draw(occupied(topology, requests(most_vcpus=3), most=4))
    free = RunningVms(topology, occupants, None).free({})
    request = data.draw(requests(most_vcpus=12))
    if isinstance(place(topology, free, request), Placement):
        return
    for suggestion in find_suggestions(topology, free, request, occupants):
        if suggestion.moves:
            now = {move.id: move.after for move in suggestion.moves}
            free_then = RunningVms(topology, occupants, None).free(dict(now))
            assert place(topology, free_then, request) == suggestion.placement
            continue
        assert suggestion.request != request
        assert place(topology, free, suggestion.request) == suggestion.placement
        if (more := _a_little_less(suggestion, request)) is not None:
            assert isinstance(place(topology, free, more), Refusal)


def _a_little_less(suggestion: Suggestion, request: Request) -> Request | None:
    """The request with a change of the same kind, but smaller."""
    if suggestion.field == "vcpus":
        return replace(request, vcpus=suggestion.request.vcpus + 1)
    if suggestion.field == "memory":
        return replace(request, memory=min(request.memory, suggestion.request.memory + (1 << 20)))
    if suggestion.field == "hugepages":
        size = next(iter(request.huge_pages))
        return replace(request, huge_pages={size: suggestion.request.huge_pages.get(size, 0) + 1})
    return None


def test_a_vm_that_nothing_helps_is_told_nothing() -> None:
    nothing = Free(cpus=0, pool=0)
    assert find_suggestions(MACHINE, nothing, Request(1, PinningOptions(numa_memory=NumaMemory.OFF))) == ()
