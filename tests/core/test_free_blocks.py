"""Free blocks: the most that is free inside one domain, and how much of what is free lies together."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvplace.core.cpuset import cpus_of, mask_of, parse_cpu_list
from kvplace.core.free_blocks import Domain, FreeBlock, free_blocks_of
from kvplace.core.scalars import CpuMask
from kvplace.core.topology import Topology
from tests.core.machines import topologies
from tests.nodes.machines import TWO


def test_an_empty_machine_has_the_free_blocks_that_its_free_cpus_can_form() -> None:
    found = free_blocks_of(TWO, TWO.allocatable, TWO.allocatable)
    assert (found.allocatable, found.free) == (16, 16)
    assert found.largest == dict.fromkeys(Domain, FreeBlock(cpus=8, cores=4, possible=8))


def test_scattered_cpus_make_small_free_blocks_without_whole_cores() -> None:
    free = CpuMask(parse_cpu_list("0,1,4"))
    found = free_blocks_of(TWO, TWO.allocatable, free)
    assert found.largest[Domain.NUMA] == FreeBlock(cpus=2, cores=0, possible=3)


@given(machine=topologies(tangled=None), taken=st.integers(min_value=0))
def test_every_free_block_is_the_largest_of_its_kind_by_counting(machine: Topology, taken: int) -> None:
    free = machine.allocatable & ~taken
    found = free_blocks_of(machine, machine.allocatable, free)
    domains = {
        Domain.SOCKET: [package.cpus for package in machine.packages],
        Domain.NUMA: [node.cpus for node in machine.numa_nodes],
        Domain.L3: list(machine.l3_groups),
    }
    for domain, sets in domains.items():
        block = found.largest[domain]
        inside = [set(cpus_of(one & free)) for one in sets]
        assert block.cpus == max(map(len, inside))
        assert block.cpus <= block.possible <= found.free
        # A core that lies across domains counts where its lowest CPU is.
        whole = [min(cpus_of(core)) for core in machine.cores if core & free == core]
        assert block.cores == max(len(set(cpus_of(one)) & set(whole)) for one in sets)
    assert mask_of(cpus_of(free)) == free
