"""A VM fits where a search through every set of CPUs finds a fit, and nowhere else, on small machines."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations

from hypothesis import event, given, settings
from hypothesis import strategies as st

from kvplace.core.allocate import place
from kvplace.core.cpuset import cpus_of, mask_of
from kvplace.core.free import Free, free_of
from kvplace.core.ledger import Ledger
from kvplace.core.placement import Placement
from kvplace.core.request import EmulatorThreads, NumaMemory, Request, Scope, Smt
from kvplace.core.topology import Topology
from tests.core.machines import frees, requests, topologies

small_cases = topologies(most_cpus=10).flatmap(
    lambda machine: st.tuples(st.just(machine), frees(machine), requests(most_vcpus=10))
)


@settings(max_examples=400)
@given(small_cases)
def test_a_vm_is_placed_exactly_when_a_search_of_every_set_of_cpus_finds_room(
    case: tuple[Topology, Free, Request],
) -> None:
    machine, free, request = case
    answer = place(machine, free, request)
    event(f"fits {isinstance(answer, Placement)}")
    assert isinstance(answer, Placement) == any(
        fits_in(machine, free, request, domain) for domain in domains(machine, request.scope)
    )


@settings(max_examples=200)
@given(small_cases)
def test_a_vm_is_hopeless_exactly_when_the_search_finds_no_room_on_the_empty_machine(
    case: tuple[Topology, Free, Request],
) -> None:
    machine, free, request = case
    answer = place(machine, free, request)
    if not isinstance(answer, Placement):
        empty = free_of(machine, Ledger())
        assert answer.never != any(
            fits_in(machine, empty, request, domain) for domain in domains(machine, request.scope)
        )


def domains(machine: Topology, scope: Scope) -> list[frozenset[int]]:
    sets = {
        Scope.ONE_SOCKET: [package.cpus for package in machine.packages],
        Scope.ONE_NUMA: [node.cpus for node in machine.numa_nodes],
        Scope.ONE_L3: list(machine.l3_groups),
        Scope.ANY: [machine.cpus],
    }[scope]
    return [frozenset(cpus_of(cpus)) for cpus in sets]


def fits_in(machine: Topology, free: Free, request: Request, domain: frozenset[int]) -> bool:
    """Whether any set of CPUs of the domain serves the request, with memory on the nodes it could use."""
    usable = {cpu for cpus in servings(machine, free, request, domain, 1) for cpu in cpus}
    nodes = [node.id for node in machine.numa_nodes if usable & set(cpus_of(node.cpus))]
    memory, pages = dict(free.memory), {(node, size): n for node, size, n in free.huge_pages}
    for size, count in request.huge_pages.items():
        if sum(max(0, pages.get((node, size), 0)) for node in nodes) < count:
            return False
    if free.memory and request.numa_memory is not NumaMemory.OFF:
        plain = request.memory - sum(size * count for size, count in request.huge_pages.items())
        if sum(max(0, memory[node]) for node in nodes) < plain:
            return False
    own = request.owns_cpus and request.emulator_threads is EmulatorThreads.ISOLATE
    return any(True for _ in servings(machine, free, request, domain, request.vcpus + own))


def servings(
    machine: Topology, free: Free, request: Request, domain: frozenset[int], count: int
) -> Iterator[tuple[int, ...]]:
    """Every set of so many CPUs of the domain that may carry threads of the VM."""
    available = frozenset(cpus_of(free.cpus if request.owns_cpus else free.pool))
    for cpus in combinations(sorted(domain & available), count):
        cores = [machine.core_of[cpu] for cpu in cpus]
        if request.owns_cpus and request.smt is not Smt.PREFER:
            if any(core & ~mask_of(available) for core in cores):
                continue
            if request.smt is Smt.ISOLATE and len(set(cores)) < count:
                continue
        yield cpus
