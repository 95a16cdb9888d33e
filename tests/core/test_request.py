"""The key of a request holds what decides a placement: a cached answer is the answer to an equal request."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvplace.core.allocator.allocate import place
from kvplace.core.cpuset import mask_of
from kvplace.core.free_resources import free_of
from kvplace.core.ledger import Ledger
from kvplace.core.request import (
    NARROW_FIRST,
    DeviceNuma,
    EmulatorThreads,
    GuestNuma,
    Level,
    NumaMemory,
    OnFailure,
    PinningOptions,
    Policy,
    Request,
    Scope,
    Smt,
)
from kvplace.core.scalars import NumaId
from kvplace.core.topology import Topology
from tests.core.machines import GIB, make_numa_node, make_package, make_topology, requests, topologies
from tests.core.requests import request_with

# Two sockets, each one NUMA node of four cores with two threads.
MACHINE = make_topology(
    packages=tuple(make_package(number, mask_of(range(8 * number, 8 * number + 8))) for number in range(2)),
    numa_nodes=tuple(
        make_numa_node(number, mask_of(range(8 * number, 8 * number + 8)), 16 * GIB, {GIB: 4}, {0: 20, 1: 20})
        for number in range(2)
    ),
    l3_groups=tuple(mask_of(range(8 * number, 8 * number + 8)) for number in range(2)),
    cores=tuple(mask_of((cpu, cpu + 1)) for cpu in range(0, 16, 2)),
)
ASKED = request_with(4, memory=8 * GIB)
OTHERS: dict[str, Any] = {
    "vcpus": 5,
    "scope": Scope.SPREAD_SOCKETS,
    "policy": Policy.SHARE,
    "smt": Smt.ISOLATE,
    "emulator_threads": EmulatorThreads.ISOLATE,
    "numa_memory": NumaMemory.STRICT,
    "guest_numa": GuestNuma.MIRROR,
    "device_numa": DeviceNuma.REQUIRED,
    "memory": 9 * GIB,
    "huge_pages": {GIB: 2},
    "io_threads": 1,
    "devices": {"intel.com/vf": 1},
    "device_nodes": frozenset([NumaId(1)]),
}
"""Another value of each field that decides."""
NEED_DEVICES = {"device_numa", "devices"}
"""Fields that decide only on a machine with devices."""
OPTIONS = {field.name for field in fields(PinningOptions)}


def changed(request: Request, name: str) -> Request:
    if name in OPTIONS:
        return replace(request, options=replace(request.options, **{name: OTHERS[name]}))
    return replace(request, **{name: OTHERS[name]})


def test_every_field_but_on_failure_decides() -> None:
    sizes = {field.name for field in fields(Request)} - {"options"}
    assert OTHERS.keys() == (sizes | OPTIONS) - {"on_failure"}


@pytest.mark.parametrize("name", OTHERS)
def test_another_value_of_a_field_that_decides_is_another_key(name: str) -> None:
    other = changed(ASKED, name)
    assert other.key != ASKED.key
    assert hash(other) != hash(ASKED)


@pytest.mark.parametrize("name", [name for name in OTHERS if name not in {"scope", *NEED_DEVICES}])
def test_each_of_these_fields_changes_a_placement(name: str) -> None:
    free = free_of(MACHINE, Ledger())
    assert place(MACHINE, free, changed(ASKED, name)) != place(MACHINE, free, ASKED)


def test_the_scope_changes_a_placement() -> None:
    free = free_of(MACHINE, Ledger())
    wide = replace(ASKED, vcpus=12)
    assert place(MACHINE, free, changed(wide, "scope")) != place(MACHINE, free, wide)


@given(topologies(memory=True), requests(), st.sampled_from(OnFailure))
def test_requests_with_equal_keys_get_equal_placements(
    machine: Topology, request: Request, on_failure: OnFailure
) -> None:
    other = replace(request, options=replace(request.options, on_failure=on_failure))
    assert other.key == request.key
    free = free_of(machine, Ledger())
    assert place(machine, free, other) == place(machine, free, request)


def test_a_scope_that_the_allocator_cannot_spread_is_refused_where_it_is_defined() -> None:
    define = Scope.__dict__["_new_member_"]
    assert define(Scope, "spread-numa", Level.NUMA, True).evenly
    with pytest.raises(ValueError, match="spread-l3: the allocator spreads VMs over"):
        define(Scope, "spread-l3", Level.L3, True)


def test_every_scope_has_its_place_among_those_that_leave_less_choice_and_more() -> None:
    assert set(NARROW_FIRST) == set(Scope)
    assert [scope.value for scope in NARROW_FIRST] == [
        "one-l3", "one-numa", "one-socket", "spread-numa", "spread-sockets", "any"
    ]  # fmt: skip
