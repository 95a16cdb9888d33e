"""The sets of CPUs that a moving VM may take in a target, one of each kind.

Cores are of one kind when they have equally many threads, lie in the same NUMA node, package and L3 group,
and have equally many threads free and equally many in the hands of each VM that moves later. Of cores of one
kind it makes no difference which ones a VM takes. Sets are generated one at a time, since there may be very
many: the caller stops when its budget is used up.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import compress, product

from kvplace.core.cpuset import cpus_of, lowest, mask_of
from kvplace.core.free_resources import Free
from kvplace.core.moves.targets import VmToPlace
from kvplace.core.placement import Placement
from kvplace.core.request import Policy, Smt
from kvplace.core.scalars import NO_CPUS, CpuId, CpuMask
from kvplace.core.topology import Topology


def cpu_choices(
    topology: Topology, vm: VmToPlace, free: Free, target: CpuMask, later: Sequence[Placement | None]
) -> Iterator[CpuMask]:
    """Yield the sets of CPUs for a VM in a target; `later` are the placements of VMs that move after it."""
    options = vm.request.options
    available = (free.cpus if vm.owns else free.pool) & target
    if options.policy is Policy.NUMA:
        yield available
        return
    uses = dict(free.uses) if not vm.owns else {}
    kinds: dict[tuple[object, ...], list[CpuMask]] = {}
    for core in topology.cores:
        part = core & available
        if not part or (vm.whole and part != core):
            continue
        positions = {
            (
                topology.nodes_of(mask_of([cpu])),
                topology.packages_of(mask_of([cpu])),
                _l3_of(topology, cpu),
                uses.get(cpu, 0),
            )
            for cpu in cpus_of(part)
        }
        held = tuple((core & one.cpus).bit_count() if one is not None else 0 for one in later)
        alike = len(positions) == 1
        kind = (alike or core, frozenset(positions), core.bit_count(), part.bit_count(), held)
        kinds.setdefault(kind, []).append(part)
    yield from _combined([(kind[0] is True, cores) for kind, cores in kinds.items()], vm)


def _l3_of(topology: Topology, cpu: CpuId) -> int:
    return next(index for index, l3 in enumerate(topology.l3_groups) if l3 >> cpu & 1)


def _combined(kinds: Sequence[tuple[bool, Sequence[CpuMask]]], vm: VmToPlace) -> Iterator[CpuMask]:
    """Combine what each kind can give to as many units as the VM needs."""
    most = [sum(core.bit_count() for core in cores) for _, cores in kinds]
    if vm.whole and vm.request.options.smt is not Smt.REQUIRE:
        most = [len(cores) for _, cores in kinds]

    def rest(index: int, need: int) -> Iterator[CpuMask]:
        if need <= 0:
            yield NO_CPUS
        elif sum(most[index:]) >= need:
            alike, cores = kinds[index]
            for units, cpus in _offers(alike, cores, vm, need):
                for others in rest(index + 1, need - units):
                    yield cpus | others

    return rest(0, vm.units)


def _offers(alike: bool, cores: Sequence[CpuMask], vm: VmToPlace, need: int) -> Iterator[tuple[int, CpuMask]]:
    """Yield (units, CPUs) that cores of one kind give, no more units than needed where that is possible."""
    if vm.whole:
        width = cores[0].bit_count() if vm.request.options.smt is Smt.REQUIRE else 1
        for count in range(min(len(cores), -(-need // width)) + 1):
            yield count * width, CpuMask(sum(cores[:count]))
    elif alike:
        for counts in _partitions(len(cores), cores[0].bit_count(), need):
            taken = [lowest(core, count) for core, count in zip(cores, counts, strict=False)]
            yield sum(counts), CpuMask(sum(taken))
    else:
        cpus = list(cpus_of(cores[0]))
        for chosen in product((0, 1), repeat=len(cpus)):
            if sum(chosen) <= need:
                yield sum(chosen), mask_of(compress(cpus, chosen))


def _partitions(cores: int, width: int, most: int) -> Iterator[tuple[int, ...]]:
    """Yield how many threads of each of so many equal cores are taken: never more of a later core."""
    if cores:
        for first in range(min(width, most), 0, -1):
            for others in _partitions(cores - 1, first, most - first):
                yield (first, *others)
    yield ()
