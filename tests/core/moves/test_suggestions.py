"""The changes that would make a refused VM fit really do."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from random import Random

import pytest

from kvplace.core.allocator.allocate import place
from kvplace.core.cpuset import mask_of, parse_cpu_list
from kvplace.core.free_resources import Free
from kvplace.core.moves.make_room import NoMoves
from kvplace.core.moves.suggestions import Suggestion, Suggestions, find_suggestions
from kvplace.core.occupant import Occupant, RunningVms
from kvplace.core.placement import Placement, Refusal
from kvplace.core.request import EmulatorThreads, NumaMemory, PinningOptions, Policy, Request, Scope, Smt
from kvplace.core.scalars import NO_CPUS, Bytes, CpuMask
from tests.core.machines import GIB, make_node, make_numa_node, make_package, make_topology
from tests.core.moves.fragmented import MIXED, Case, fragmented
from tests.profiles import rounds

# Two sockets of two NUMA nodes of two cores with two threads each; the L3 groups are the cores.
MACHINE = make_topology(
    packages=(make_package(0, mask_of(range(8))), make_package(1, mask_of(range(8, 16)))),
    numa_nodes=tuple(
        make_numa_node(node, mask_of(range(4 * node, 4 * node + 4)), 8 * GIB, {GIB: 2}) for node in range(4)
    ),
    l3_groups=tuple(0b11 << 2 * core for core in range(8)),
    cores=tuple(0b11 << 2 * core for core in range(8)),
)
EMPTY = make_node(MACHINE, []).free


def _suggestions(
    request: Request, free: str = "0-15", occupants: Sequence[Occupant] = ()
) -> dict[str, tuple[object, str]]:
    left = make_node(MACHINE, occupants).free.within(parse_cpu_list(free))
    assert isinstance(place(MACHINE, left, request), Refusal)
    return {
        suggestion.field: (suggestion.value, suggestion.sentence)
        for suggestion in find_suggestions(make_node(MACHINE, occupants), left, request).found
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
            Request(2, PinningOptions(scope=Scope.ONE_NUMA), memory=4 * GIB, huge_pages={Bytes(GIB // 2): 4}),
            "0-15",
            "hugepages",
            {},
            "without huge pages of 512Mi it fits on NUMA node 0",
        ),
    ],
)
def test_the_smallest_change_of_each_kind_is_suggested(
    request_: Request, free: str, field: str, value: object, sentence: str
) -> None:
    assert _suggestions(request_, free)[field] == (value, sentence)


def _running(uid: str, cpus: str, size: int, policy: Policy = Policy.EXCLUSIVE) -> Occupant:
    request = Request(size, PinningOptions(scope=Scope.ONE_NUMA, policy=policy))
    found = place(MACHINE, EMPTY.within(parse_cpu_list(cpus)), request)
    assert isinstance(found, Placement)
    return Occupant(uid, request, found)


def test_a_move_is_suggested_with_its_old_and_new_cpus() -> None:
    occupants = [
        _running("web", "0-1", 2),
        _running("db", "4-5", 2),
        _running("a", "8-10", 3),
        _running("b", "12-14", 3),
    ]
    found = _suggestions(Request(4, PinningOptions(scope=Scope.ONE_NUMA)), occupants=occupants)
    assert found["moves"] == (None, "move web from 0-1 to 6-7, and it fits on NUMA node 0")
    assert next(iter(found)) == "moves"


def test_sharing_is_suggested_where_others_share_already() -> None:
    sharing = [_running(str(node), f"{4 * node}-{4 * node + 3}", 4, Policy.SHARE) for node in range(4)]
    found = _suggestions(Request(2), occupants=sharing)
    assert found["policy"] == ("share", "with cpu-policy share it fits on socket 0")


def test_no_suggestion_contradicts_another_option() -> None:
    sharing = [_running(str(node), f"{4 * node}-{4 * node + 3}", 4, Policy.SHARE) for node in range(4)]
    assert "policy" not in _suggestions(Request(2, PinningOptions(smt=Smt.ISOLATE)), occupants=sharing)


def test_every_suggestion_makes_it_fit_and_nothing_smaller_does() -> None:
    """On fragmented machines, where moves help, and on random ones, where the other kinds do."""
    exercised: Counter[str] = Counter()
    cases = [fragmented(Random(seed), most_cpus=12, policies=MIXED) for seed in range(rounds(120, quick=30))]
    cases += [_refused(Random(seed)) for seed in range(rounds(300, quick=60))]
    for number, case in enumerate(cases):
        free, request = case.free, case.request
        if isinstance(place(case.topology, free, request), Placement):
            continue  # it fits, but not well
        for suggestion in find_suggestions(case.node, free, request).found:
            exercised[suggestion.field] += 1
            if suggestion.moves:
                now = {move.id: move.after for move in suggestion.moves}
                free_then = RunningVms(case.node).free(dict(now))
                assert place(case.topology, free_then, request) == suggestion.placement, number
                continue
            assert suggestion.request != request
            assert place(case.topology, free, suggestion.request) == suggestion.placement, number
            if (more := _a_little_less(suggestion, request)) is not None:
                assert isinstance(place(case.topology, free, more), Refusal), (number, suggestion.field)
    for field, least in {
        "moves": 40, "cpuSet": 60, "smt": 10, "emulatorThreads": 10, "numaMemory": 30,
        "vcpus": 100, "hugepages": 20, "memory": 10, "policy": 20,
    }.items():  # fmt: skip
        assert exercised[field] >= rounds(least, quick=1), exercised


def _refused(chance: Random) -> Case:
    """A VM that wants more CPUs, memory or huge pages than a NUMA node of a fragmented machine has left."""
    case = fragmented(chance, most_cpus=12)
    node = max(case.topology.numa_nodes, key=lambda node: node.memory)
    scarce = chance.choice(["CPUs", "memory", "pages"]) if node.memory else "CPUs"
    pages = node.huge_pages.get(GIB, 0) + 1 if scarce == "pages" else 0
    memory = node.memory + GIB if scarce == "memory" else 0
    request = Request(
        chance.randint(1, 6) if scarce == "CPUs" else 1,
        PinningOptions(
            scope=chance.choice(list(Scope)) if scarce == "CPUs" else Scope.ONE_NUMA,
            smt=chance.choice(list(Smt)),
            emulator_threads=chance.choice(list(EmulatorThreads)),
        ),
        memory=memory + pages * GIB,
        huge_pages={GIB: pages} if pages else {},
    )
    return replace(case, request=request)


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


def test_where_nothing_helps_there_are_no_suggestions() -> None:
    nothing = Free(cpus=NO_CPUS, pool=NO_CPUS)
    request = Request(1, PinningOptions(numa_memory=NumaMemory.OFF))
    assert find_suggestions(make_node(MACHINE, ()), nothing, request) == Suggestions()


def test_no_moves_are_suggested_where_none_are_needed() -> None:
    """The caller allows fewer CPUs than the running VMs leave."""
    occupants = [_running("web", "0-1", 2)]
    request = Request(4, PinningOptions(scope=Scope.ONE_NUMA))
    found = find_suggestions(make_node(MACHINE, occupants), EMPTY.within(CpuMask(0b1100)), request).found
    assert [suggestion.field for suggestion in found] == ["vcpus"]


def test_a_search_for_moves_that_found_none_states_whether_there_are_any() -> None:
    occupants = [_running("web", "0-3", 4)]
    left = make_node(MACHINE, occupants).free
    request = Request(13, PinningOptions(scope=Scope.ANY))
    no_moves = find_suggestions(make_node(MACHINE, occupants), left, request).no_moves
    assert no_moves == NoMoves("no sequence of up to 1 move makes room", exact=True)
