"""Small machines of every build: for all free sets and all sizes the answer equals the exhaustive search.

Every shape has at most 12 CPUs, so all 4,096 free sets can be asked for. The usual run asks them all for some
kinds of request, and on the shapes of 12 CPUs for one; with `KVPLACE_EXHAUSTIVE=1` it asks for every kind
there is, which takes about half an hour.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from itertools import product

import pytest

from kvplace.core.allocator.allocate import place
from kvplace.core.cpuset import format_cpu_list
from kvplace.core.free_resources import Free, free_of
from kvplace.core.ledger import Ledger
from kvplace.core.placement import Placement
from kvplace.core.request import EmulatorThreads, PinningOptions, Policy, Request, Scope, Smt
from kvplace.core.scalars import NO_BYTES
from kvplace.core.topology import Topology
from tests.core.allocator.exhaustive import BestKeys, Key, best_key, with_cpus
from tests.core.allocator.shapes import SHAPES, TANGLED
from tests.core.allocator.validity import key_of_valid
from tests.core.machines import GIB
from tests.profiles import IN_FULL

EVERYTHING = bool(os.environ.get("KVPLACE_EXHAUSTIVE"))
LARGE = {name for name, machine in SHAPES.items() if machine.cpus.bit_count() > 9}
WITH_MEMORY = {name for name, machine in SHAPES.items() if any(node.memory for node in machine.numa_nodes)}


def usual_kinds(name: str) -> Iterator[Request]:
    """One request, of 1 vCPU, for every way of asking that is swept in the usual run."""
    if name in LARGE and not IN_FULL:
        return
    yield Request(1, PinningOptions(scope=Scope.ANY))
    if name in LARGE:
        return
    yield Request(1, PinningOptions(scope=Scope.ANY, smt=Smt.REQUIRE))
    yield Request(1, PinningOptions(scope=Scope.ANY, smt=Smt.ISOLATE))
    yield Request(1, PinningOptions(scope=Scope.ONE_SOCKET, emulator_threads=EmulatorThreads.ISOLATE))
    yield Request(
        1, PinningOptions(scope=Scope.ONE_L3, smt=Smt.REQUIRE, emulator_threads=EmulatorThreads.ISOLATE)
    )
    yield Request(1, PinningOptions(scope=Scope.SPREAD_NUMA))
    yield Request(1, PinningOptions(scope=Scope.SPREAD_SOCKETS, smt=Smt.REQUIRE))
    yield Request(1, PinningOptions(scope=Scope.ANY, policy=Policy.SHARE))
    if name in WITH_MEMORY:
        for scope in (Scope.ANY, Scope.ONE_SOCKET, Scope.SPREAD_SOCKETS, Scope.SPREAD_NUMA):
            yield Request(1, PinningOptions(scope=scope), memory=6 * GIB, huge_pages={GIB: 3})
            yield Request(1, PinningOptions(scope=scope, smt=Smt.REQUIRE), memory=4 * GIB)


def every_kind(name: str) -> Iterator[Request]:
    """All ways of asking for CPUs by name."""
    memories = [(0, 0), (4, 0), (6, 3), (8, 0), (2, 2)] if name in WITH_MEMORY else [(0, 0)]
    for scope, policy, smt, emulator, (memory, pages) in product(
        Scope,
        (Policy.EXCLUSIVE, Policy.SHARE),
        Smt,
        (EmulatorThreads.SHARED, EmulatorThreads.ISOLATE),
        memories,
    ):
        if policy is Policy.EXCLUSIVE or smt is not Smt.ISOLATE:
            yield Request(
                1,
                PinningOptions(scope=scope, policy=policy, smt=smt, emulator_threads=emulator),
                memory=memory * GIB,
                huge_pages={GIB: pages} if pages else {},
            )


def words(request: Request) -> str:
    parts = [request.options.scope.value, request.options.policy.value, request.options.smt.value]
    if request.options.emulator_threads is EmulatorThreads.ISOLATE:
        parts.append("own emulator")
    if request.memory:
        parts.append(f"{request.memory // GIB}Gi")
    return " ".join(parts)


SWEEPS = [
    pytest.param(machine, kind, id=f"{name} {words(kind)}")
    for name, machine in SHAPES.items()
    for kind in (every_kind(name) if EVERYTHING else usual_kinds(name))
][:: 1 if IN_FULL else 4]


@pytest.mark.parametrize(("machine", "kind"), SWEEPS)
def test_every_size_on_every_free_set_is_placed_as_well_as_it_can_be(
    machine: Topology, kind: Request
) -> None:
    free = free_of(machine, Ledger())
    keys = BestKeys(machine, free, kind)
    sizes = [replace(kind, vcpus=vcpus) for vcpus in range(1, machine.cpus.bit_count() + 1)]
    worse = [
        (cpus.bit_count(), request.vcpus, f"on {format_cpu_list(cpus)}: {found}, best {best}")
        for cpus in range(machine.cpus + 1)
        for here in [with_cpus(free, kind, cpus)]
        for request in sizes
        if (found := key_of_answer(machine, here, request)) != (best := keys.key(request.vcpus, cpus))
    ]
    assert not worse, f"{len(worse)} answers, the smallest: {min(worse)[1]} vCPUs {min(worse)[2]}"


@pytest.mark.parametrize("kind", list(usual_kinds("tangled")), ids=words)
def test_where_levels_cross_every_size_on_every_free_set_is_placed_by_the_rules_if_it_fits(
    kind: Request,
) -> None:
    free = free_of(TANGLED, Ledger())
    keys = BestKeys(TANGLED, free, kind)
    for cpus in range(TANGLED.cpus + 1):
        here = with_cpus(free, kind, cpus)
        for vcpus in range(1, TANGLED.cpus.bit_count() + 1):
            found = key_of_answer(TANGLED, here, replace(kind, vcpus=vcpus))
            best = keys.key(vcpus, cpus)
            assert (found is None) == (best is None), f"{vcpus} vCPUs on {format_cpu_list(cpus)}"


@pytest.mark.parametrize("name", sorted(set(SHAPES) - LARGE))
@pytest.mark.parametrize("scope", [Scope.ANY, Scope.ONE_SOCKET] if EVERYTHING else [Scope.ANY])
def test_the_pool_of_the_best_numa_nodes_is_found_on_every_free_set(name: str, scope: Scope) -> None:
    machine = SHAPES[name]
    memory = 6 * GIB if name in WITH_MEMORY else NO_BYTES
    empty = free_of(machine, Ledger())
    for cpus in range(machine.cpus + 1):
        for vcpus in range(1, machine.cpus.bit_count() + 1, 3):
            request = Request(vcpus, PinningOptions(scope=scope, policy=Policy.NUMA), memory=memory)
            free = with_cpus(empty, request, cpus)
            best = best_key(machine, free, request)
            found = key_of_answer(machine, free, request)
            # Which caches and cores come with the nodes is not the VM's choice.
            assert (found and found[:4]) == (best and best[:4]), f"{vcpus} vCPUs on {format_cpu_list(cpus)}"


def key_of_answer(machine: Topology, free: Free, request: Request) -> Key | None:
    """The key of what the allocator gives; None for a refusal."""
    answer = place(machine, free, request)
    return key_of_valid(machine, free, request, answer) if isinstance(answer, Placement) else None
