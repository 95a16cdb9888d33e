"""The sets of CPUs that a moving VM may take: one of each kind, generated one at a time."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice

import pytest

from kvplace.core.cpuset import format_cpu_list, mask_of
from kvplace.core.free_resources import free_of
from kvplace.core.ledger import Ledger
from kvplace.core.moves.step_trials import cpu_choices
from kvplace.core.moves.targets import VmToPlace
from kvplace.core.request import PinningOptions, Request, Smt
from kvplace.core.scalars import Bytes, CpuMask
from kvplace.core.topology import Topology
from tests.core.machines import make_numa_node, make_package, make_topology


def machine(nodes: int, cores: int, threads: int) -> Topology:
    width = cores * threads
    sets = [mask_of(range(node * width, (node + 1) * width)) for node in range(nodes)]
    return make_topology(
        packages=(make_package(0, mask_of(range(nodes * width))),),
        numa_nodes=tuple(make_numa_node(number, cpus, 0) for number, cpus in enumerate(sets)),
        l3_groups=tuple(sets),
        cores=tuple(mask_of(range(first, first + threads)) for first in range(0, nodes * width, threads)),
    )


def vm(vcpus: int, smt: Smt = Smt.PREFER) -> VmToPlace:
    return VmToPlace("vm", Request(vcpus, PinningOptions(smt=smt)), (), Bytes(0))


@pytest.mark.parametrize(
    ("topology", "wanted", "choices"),
    [
        (machine(1, 3, 2), vm(3), ["0-2", "0,2,4"]),
        (machine(1, 3, 2), vm(3, Smt.REQUIRE), ["0-3"]),
        (machine(1, 3, 2), vm(2, Smt.ISOLATE), ["0-3"]),
        (machine(2, 2, 1), vm(2), ["0-1", "0,2", "2-3"]),
        (machine(2, 1, 2), vm(2), ["0-1", "0,2", "2-3"]),
        (machine(1, 2, 1), vm(3), []),
    ],
)
def test_each_kind_of_choice_is_generated_once(
    topology: Topology, wanted: VmToPlace, choices: list[str]
) -> None:
    free = free_of(topology, Ledger())
    found = [
        format_cpu_list(cpus)
        for cpus in cpu_choices(topology, wanted, free, mask_of(range(topology.cpus.bit_length())), ())
    ]
    assert sorted(found) == sorted(choices)


def test_the_threads_of_a_core_on_two_numa_nodes_are_not_alike() -> None:
    topology = replace(machine(2, 2, 1), cores=(CpuMask(0b101), CpuMask(0b1010)))
    found = cpu_choices(topology, vm(1), free_of(topology, Ledger()), CpuMask(0b1111), ())
    assert sorted(found) == [0b1, 0b10, 0b100, 0b1000]


def test_choices_are_generated_one_at_a_time() -> None:
    """There are millions of them on cores with eight threads; a search stops when its budget is used up."""
    topology = machine(1, 24, 8)
    first = list(
        islice(
            cpu_choices(
                topology, vm(90), free_of(topology, Ledger()), mask_of(range(topology.cpus.bit_length())), ()
            ),
            1000,
        )
    )
    assert len(set(first)) == 1000
    assert {cpus.bit_count() for cpus in first} == {90}
