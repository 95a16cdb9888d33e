"""Placements for tests, by hand and by hypothesis."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import strategies as st

from kvplace.core.cpuset import mask_of
from kvplace.core.guest_cells import GuestCell
from kvplace.core.placement import Placement
from kvplace.core.request import NumaMemory, Policy
from kvplace.core.scalars import Bytes, CpuId, CpuMask, NumaId

FOUR_VCPUS = Placement(
    policy=Policy.EXCLUSIVE,
    vcpus=(CpuId(2), CpuId(34), CpuId(3), CpuId(35)),
    cpus=mask_of((2, 34, 3, 35)),
    emulator_cpus=mask_of((0, 1, 32, 33)),
    io_thread_cpus=(),
    numa_nodes=(NumaId(0),),
    numa_memory=NumaMemory.PREFERRED,
    memory={NumaId(0): Bytes(8 << 30)},
)
WHOLE_NODE = replace(FOUR_VCPUS, policy=Policy.NUMA, vcpus=(), cpus=mask_of(range(16)))
MANY_VCPUS = replace(
    FOUR_VCPUS,
    vcpus=tuple(map(CpuId, range(64))),
    cpus=mask_of(range(64)),
    io_thread_cpus=(CpuMask(1), CpuMask(2)),
    numa_memory=NumaMemory.OFF,
)


def mirroring(*, cells: int, vcpus: int, threads: int) -> Placement:
    """A placement on so many NUMA nodes, in equal shares, whose guest sees them."""
    share = vcpus // cells
    return replace(
        MANY_VCPUS,
        vcpus=tuple(map(CpuId, range(vcpus))),
        cpus=mask_of(range(vcpus)),
        numa_nodes=tuple(map(NumaId, range(cells))),
        numa_memory=NumaMemory.PREFERRED,
        memory=dict.fromkeys(map(NumaId, range(cells)), Bytes(1 << 30)),
        guest_cells=tuple(
            GuestCell(
                id=number,
                node=NumaId(number),
                vcpus=tuple(range(number * share, (number + 1) * share)),
                memory=Bytes(1 << 30),
                distances=tuple(10 if other == number else 21 for other in range(cells)),
                threads=threads,
            )
            for number in range(cells)
        ),
    )


cpu_sets = st.sets(st.integers(0, 300), min_size=1, max_size=12).map(mask_of)
numa_ids = st.integers(0, 3).map(NumaId)


@st.composite
def placements(draw: st.DrawFn, least_vcpus: int = 1) -> Placement:
    """Any valid placement with CPUs for at least so many vCPUs."""
    shared = draw(st.booleans())
    vcpus = draw(st.lists(st.integers(0, 500), min_size=least_vcpus, max_size=least_vcpus + 6, unique=True))
    return Placement(
        policy=Policy.NUMA if shared else draw(st.sampled_from([Policy.EXCLUSIVE, Policy.SHARE])),
        vcpus=() if shared else tuple(map(CpuId, vcpus)),
        cpus=mask_of(vcpus) | draw(cpu_sets),
        emulator_cpus=CpuMask(draw(cpu_sets | st.just(0))),
        io_thread_cpus=tuple(draw(st.lists(cpu_sets, max_size=3))),
        numa_nodes=tuple(draw(st.sets(numa_ids, min_size=1).map(sorted))),
        numa_memory=draw(st.sampled_from(list(NumaMemory))),
        memory=draw(st.dictionaries(numa_ids, st.integers(0, 64 << 30).map(Bytes), max_size=4)),
    )
