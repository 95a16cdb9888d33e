"""kvplace reads a machine as lscpu and hwloc read it there, for every shape and with offline CPUs."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable

from harness.emulated_machine.fixtures import on_machines
from harness.emulated_machine.kernels import Kernel
from harness.emulated_machine.machine import EmulatedMachine
from harness.emulated_machine.shape import FOUR_NODES, MEMORY_ONLY_NODE, TWO_SOCKETS
from kvplace.core.cpuset import parse_cpu_list
from kvplace.core.scalars import Bytes, CpuMask
from tests.emulated_machine.observation import (
    Observation,
    levels_of_lscpu,
    nodes_of_hwloc,
    observe,
    set_huge_pages,
    set_online,
)
from tests.linux.hwloc_layouts import layout_of_xml

SHAPES = (TWO_SOCKETS, (FOUR_NODES, Kernel.V6_12), MEMORY_ONLY_NODE)
MEGABYTE = 1 << 20


def with_cpus(sets: Iterable[CpuMask]) -> set[CpuMask]:
    return {cpus for cpus in sets if cpus}


def assert_as_others_see_it(seen: Observation) -> None:
    """Cores, L3 groups, NUMA nodes, packages and memory agree with lscpu and hwloc."""
    found = seen.topology
    lscpu, hwloc = levels_of_lscpu(seen.lscpu), layout_of_xml(seen.hwloc)
    nodes = with_cpus(node.cpus for node in found.numa_nodes)
    packages = {package.cpus for package in found.packages}
    assert set(found.cores) == lscpu["Core"] == hwloc["Core"]
    assert set(found.l3_groups) == lscpu["L3"] == hwloc["L3Cache"]
    assert nodes == lscpu["Node"]
    assert nodes <= hwloc["NUMANode"]
    assert packages == lscpu["Socket"] == hwloc["Package"]
    assert {node.id: (node.memory, dict(node.huge_pages)) for node in found.numa_nodes} == {
        number: (node.memory, node.pages) for number, node in nodes_of_hwloc(seen.hwloc).items()
    }
    assert seen.notes == ()


@on_machines(*SHAPES)
def test_a_machine_equals_the_view_of_lscpu_and_hwloc_there(machine: EmulatedMachine) -> None:
    seen = machine.call(observe)
    assert_as_others_see_it(seen)
    shape, found = machine.shape, seen.topology
    assert len(found.packages) == shape.sockets
    assert len(found.l3_groups) == shape.sockets * shape.dies
    assert len(found.cores) * shape.threads == shape.cpus
    assert [node.cpus for node in found.numa_nodes] == [parse_cpu_list(node.cpus) for node in shape.nodes]
    rows = [[found.distance(a.id, b.id) for b in found.numa_nodes] for a in found.numa_nodes]
    assert rows == [list(row) for row in shape.distances]


@on_machines(*SHAPES)
def test_an_offline_cpu_is_left_out_and_comes_back(machine: EmulatedMachine) -> None:
    whole = machine.call(observe)
    machine.call(set_online, 5, online=False)
    try:
        without = machine.call(observe)
    finally:
        machine.call(set_online, 5, online=True)
    assert without.topology.cpus == whole.topology.cpus & ~(1 << 5)
    assert 1 << 4 in without.topology.cores
    assert_as_others_see_it(without)
    assert machine.call(observe).document == whole.document


@on_machines(*SHAPES)
def test_huge_pages_are_counted_by_node(machine: EmulatedMachine) -> None:
    last = len(machine.shape.nodes) - 1
    before = machine.call(observe)
    assert machine.call(set_huge_pages, last, 2048, 8) == 8
    try:
        seen = machine.call(observe)
    finally:
        machine.call(set_huge_pages, last, 2048, 0)
    assert_as_others_see_it(seen)
    pages = [dict(node.huge_pages).get(Bytes(2 * MEGABYTE), 0) for node in seen.topology.numa_nodes]
    assert pages == [0] * last + [8]
    assert seen.topology.fingerprint != before.topology.fingerprint


@on_machines(TWO_SOCKETS)
def test_the_command_prints_the_same(machine: EmulatedMachine) -> None:
    printed = machine.output_of(sys.executable, "-m", "kvplace", "topology", "--output", "json")
    document = json.loads(printed)
    assert document["metadata"]["name"] == "emulated"
    assert document["spec"] == machine.call(observe).document
