"""The machines that come with kvplace equal the real servers.

The expectations are copied from `lscpu` and `numactl -H` of such servers, not computed.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from kvplace.core.cpuset import format_cpu_list
from kvplace.core.errors import BadTopology
from kvplace.core.scalars import CpuId, NumaId
from kvplace.core.topology import Topology
from kvplace.machines.server_types import machine_names, read_machine


@dataclass(frozen=True)
class Facts:
    packages: int
    nodes: int
    l3_groups: int
    cores: int
    cpus: int
    siblings: str
    """Of the core that holds CPU 5."""
    last_node: str
    """CPUs of the last NUMA node."""
    l3: str
    """CPUs that share the L3 of CPU 9."""
    distances: list[int]
    """Row of node 0."""


FACTS = {
    "epyc-7502p": Facts(1, 1, 8, 32, 64, "5,37", "0-63", "8-11,40-43", [10]),
    "epyc-9654p": Facts(1, 1, 12, 96, 192, "5,101", "0-191", "8-15,104-111", [10]),
    "altra-max-m128-30": Facts(1, 1, 1, 128, 128, "5", "0-127", "0-127", [10]),
    "2x-epyc-7763-nps4": Facts(
        2, 8, 16, 128, 256, "5,133", "112-127,240-255", "8-15,136-143", [10, 12, 12, 12, 32, 32, 32, 32]
    ),
    "2x-epyc-9354": Facts(2, 2, 16, 64, 128, "5,69", "32-63,96-127", "8-11,72-75", [10, 32]),
    "2x-epyc-9354-nps2": Facts(2, 4, 16, 64, 128, "5,69", "48-63,112-127", "8-11,72-75", [10, 12, 32, 32]),
    "2x-xeon-6338": Facts(
        2,
        2,
        2,
        64,
        128,
        "5,69",
        ",".join(map(str, range(1, 128, 2))),
        ",".join(map(str, range(1, 128, 2))),
        [10, 20],
    ),
    "2x-xeon-8480plus": Facts(2, 2, 2, 112, 224, "5,117", "56-111,168-223", "0-55,112-167", [10, 21]),
    "2x-xeon-8480plus-snc4": Facts(
        2, 8, 2, 112, 224, "5,117", "98-111,210-223", "0-55,112-167", [10, 12, 12, 12, 21, 21, 21, 21]
    ),
    "4x-xeon-8280": Facts(4, 4, 4, 112, 224, "5,117", "84-111,196-223", "0-27,112-139", [10, 21, 21, 21]),
}


@pytest.mark.parametrize("name", sorted(FACTS))
def test_a_machine_has_the_counts_numbers_and_distances_of_the_real_server(name: str) -> None:
    machine, facts = read_machine(name), FACTS[name]
    assert (
        len(machine.packages),
        len(machine.numa_nodes),
        len(machine.l3_groups),
        len(machine.cores),
        machine.cpus.bit_count(),
    ) == (facts.packages, facts.nodes, facts.l3_groups, facts.cores, facts.cpus)
    assert format_cpu_list(machine.core_of[CpuId(5)]) == facts.siblings
    assert format_cpu_list(machine.numa_nodes[-1].cpus) == facts.last_node
    assert format_cpu_list(next(l3 for l3 in machine.l3_groups if l3 >> 9 & 1)) == facts.l3
    assert [machine.distance(NumaId(0), node.id) for node in machine.numa_nodes] == facts.distances


def test_every_machine_that_comes_with_kvplace_has_its_facts_checked() -> None:
    assert set(machine_names()) == set(FACTS)


def _reserved_in(machine: Topology, cpus: int) -> int:
    return sum(1 for core in machine.cores if core & machine.reserved & cpus)


@pytest.mark.parametrize("name", sorted(FACTS))
def test_every_machine_reserves_whole_cores_in_every_socket_and_numa_node(name: str) -> None:
    machine = read_machine(name)
    assert all(core & machine.reserved in (0, core) for core in machine.cores)
    assert all(_reserved_in(machine, package.cpus) >= 2 for package in machine.packages)
    assert all(_reserved_in(machine, node.cpus) >= 1 for node in machine.numa_nodes)


@pytest.mark.parametrize("name", sorted(FACTS))
def test_every_machine_has_memory_beyond_its_huge_pages(name: str) -> None:
    for node in read_machine(name).numa_nodes:
        assert node.memory > sum(size * count for size, count in node.huge_pages.items()) + (8 << 30)


def test_an_unknown_machine_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(
        BadTopology, match=r"no server type is called 'epyc-9564p'.*did you mean 'epyc-9654p'"
    ):
        read_machine("epyc-9564p")
    with pytest.raises(BadTopology, match="there are: 2x-epyc-7763-nps4"):
        read_machine("vax")
