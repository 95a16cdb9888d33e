"""Shortages by place, by counts alone, when VMs are to be placed in targets of a machine.

A shortage found here is certain. Where none is found the VMs may still not fit, because of how their cores
lie.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from kvplace.core.ledger import claim_of
from kvplace.core.moves.targets import Step, Target, VmToPlace
from kvplace.core.occupant import Occupant, RunningVms
from kvplace.core.request import Policy
from kvplace.core.scalars import NO_CPUS, Bytes, CpuMask, NumaId, PodUid

_Key = TypeVar("_Key", NumaId, tuple[NumaId, Bytes])
"""A NUMA node, or a NUMA node and a page size."""


@dataclass(frozen=True, slots=True)
class Shortage:
    """A resource that a target has too little of."""

    missing: int
    gains: tuple[tuple[int, str], ...]
    """The resources that each movable VM would give back, the largest first."""

    def must_move(self, gone: frozenset[str], left: int) -> list[str]:
        """Name the VMs if one of them must move and so many more may; none when that many cannot suffice."""
        open_ = [(gain, uid) for gain, uid in self.gains if uid not in gone]
        if sum(gain for gain, _ in open_[:left]) < self.missing:
            return []
        return [uid for gain, uid in open_ if gain * left >= self.missing]  # the largest of them, at least


class ResourceCounts:
    """The free CPUs and memory of a machine, and the amounts that each running VM would give back."""

    def __init__(self, running: RunningVms, movable: Mapping[str, Occupant]) -> None:
        self._topology = running.topology
        self._movable = movable
        free = running.free({})
        self._pool = free.pool
        self._shared = {
            uid: one.placement.cpus & ~one.placement.owned
            for uid, one in running.occupants.items()
            if one.request.options.policy in (Policy.SHARE, Policy.IMMOVABLE)
        }
        self._owned = {uid: one.placement.owned & running.usable for uid, one in movable.items()}
        self._memory = dict(free.memory)
        self._pages = {(node, size): count for node, size, count in free.huge_pages}
        claims = {uid: claim_of(PodUid(uid), one.placement) for uid, one in movable.items()}
        self._plain_memory_of = {uid: claim.plain_memory for uid, claim in claims.items()}
        self._pages_of = {
            uid: {(node, size): n for node, sizes in claim.huge_pages.items() for size, n in sizes.items()}
            for uid, claim in claims.items()
        }
        self._gains: dict[object, tuple[tuple[int, str], ...]] = {}
        self._frees: dict[frozenset[str], tuple[CpuMask, CpuMask]] = {}
        self._wholes: dict[frozenset[str], CpuMask] = {}

    def suffice_in_total(self, vm: VmToPlace) -> bool:
        """Whether the machine as a whole has enough: moves change where VMs are, not how much they take.

        Only VMs of whole cores may own fewer CPUs elsewhere, where cores have unequal numbers of threads.
        """
        free, pool = self._free_without(frozenset())
        needed = vm.min_owned - self._saved_at_most()
        if all(uid not in self._shared for uid in self._movable) and needed > free.bit_count():
            return False
        if needed > pool.bit_count():
            return False
        memory = sum(max(0, count) for count in self._memory.values())
        return not self._memory or vm.plain_memory <= memory

    def has_cpus(self, target: Target, vm: VmToPlace, gone: frozenset[str]) -> bool:
        """Whether a VM's CPUs are free in a target when these VMs are gone: the quickest check."""
        return vm.min_owned <= (self._free_without(gone)[0] & target.cpus).bit_count()

    def shortages(
        self, items: Sequence[tuple[VmToPlace, Target]], gone: frozenset[str]
    ) -> Iterator[Shortage]:
        """Yield the shortages after these VMs have moved to these targets, without the VMs in `gone`."""
        free, pool = self._free_without(gone)
        sets = {target.cpus: target.nodes for _, target in reversed(items)}  # the newest fails soonest
        if len(sets) > 1:
            everything, nodes = NO_CPUS, frozenset[NumaId]()
            for _, target in items:
                everything |= target.cpus
                nodes |= target.nodes
            sets.setdefault(everything, nodes)
        whole = any(vm.min_owned_whole for vm, _ in items)
        for cpus, nodes in sets.items():
            inside = [vm for vm, target in items if not target.cpus & ~cpus]
            owned = shared = needed = 0
            for vm in inside:
                owned += vm.min_owned
                needed += vm.min_owned_whole
                if not vm.min_owned and vm.units > shared:
                    shared = vm.units
            missing = owned - (free & cpus).bit_count()
            if shared:
                missing = max(missing, owned + shared - (pool & cpus).bit_count())
            if missing > 0:
                yield Shortage(missing, self._cpu_gains(cpus))
            elif whole and needed > (self._whole_cores(gone, free) & cpus).bit_count():
                yield Shortage(1, self._cpu_gains(cpus))
            yield from self._memory_shortages(inside, nodes, gone)

    def allow_in_order(self, steps: Sequence[Step]) -> bool:
        """Whether each step finds enough free CPUs in its target, by count, in this order of steps."""
        gone: frozenset[str] = frozenset()
        placed: dict[str, Step] = {}
        for step in steps:
            gone |= {step.vm.id}
            placed[step.vm.id] = step
            free, pool = self._free_without(gone)
            cpus = step.target.cpus
            owned = sum(one.vm.min_owned for one in placed.values() if not one.target.cpus & ~cpus)
            if owned > (free & cpus).bit_count():
                return False
            if not step.vm.owns and owned + step.vm.units > (pool & cpus).bit_count():
                return False
        return True

    def _saved_at_most(self) -> int:
        """How many CPUs fewer all VMs may own when they have moved."""
        if len({core.bit_count() for core in self._topology.cores}) == 1:
            return 0
        return sum(
            max(0, owned.bit_count() - self._movable[uid].request.vcpus)  # a VM with fewer here may stay
            for uid, owned in self._owned.items()
        )

    def _free_without(self, gone: frozenset[str]) -> tuple[CpuMask, CpuMask]:
        """The CPUs that an exclusive VM may take, and that a sharing VM may take, when these are gone."""
        known = self._frees.get(gone)
        if known is None:
            pool = self._pool
            for uid in gone:
                pool |= self._owned[uid]
            free = pool
            for uid, cpus in self._shared.items():
                if uid not in gone:
                    free &= ~cpus
            known = self._frees[gone] = (free, pool)
        return known

    def _whole_cores(self, gone: frozenset[str], free: CpuMask) -> CpuMask:
        mask = self._wholes.get(gone)
        if mask is None:
            mask = NO_CPUS
            for core in self._topology.undivided_cores:
                if not core & ~free:
                    mask |= core
            self._wholes[gone] = mask
        return mask

    def _cpu_gains(self, cpus: CpuMask) -> tuple[tuple[int, str], ...]:
        if cpus not in self._gains:
            self._gains[cpus] = _descending(
                (((one.placement.cpus | one.placement.owned) & cpus).bit_count(), uid)
                for uid, one in self._movable.items()
            )
        return self._gains[cpus]

    def _memory_shortages(
        self, inside: Sequence[VmToPlace], nodes: frozenset[NumaId], gone: frozenset[str]
    ) -> Iterator[Shortage]:
        needed: int = sum(vm.plain_memory for vm in inside)
        if needed and self._memory:
            free = sum(_free_at(self._memory, self._plain_memory_of, node, gone) for node in nodes)
            if needed > free:
                yield Shortage(needed - free, self._memory_gains(self._plain_memory_of, nodes))
        for size in sorted({size for vm in inside for size in vm.request.huge_pages}):
            pages = frozenset((node, size) for node in nodes)
            needed = sum(vm.request.huge_pages.get(size, 0) for vm in inside)
            free = sum(_free_at(self._pages, self._pages_of, page, gone) for page in pages)
            if needed > free:
                yield Shortage(needed - free, self._memory_gains(self._pages_of, pages))

    def _memory_gains(
        self, held: Mapping[str, Mapping[_Key, int]], keys: frozenset[_Key]
    ) -> tuple[tuple[int, str], ...]:
        if keys not in self._gains:
            self._gains[keys] = _descending(
                (sum(of.get(key, 0) for key in keys), uid) for uid, of in held.items()
            )
        return self._gains[keys]


def _free_at(
    free: Mapping[_Key, int], held: Mapping[str, Mapping[_Key, int]], key: _Key, gone: frozenset[str]
) -> int:
    count = free.get(key, 0)
    for uid in gone:
        count += held[uid].get(key, 0)
    return max(0, count)


def _descending(gains: Iterable[tuple[int, str]]) -> tuple[tuple[int, str], ...]:
    """Keep the gains above zero, the largest first, equal ones by id."""
    return tuple(sorted((gain for gain in gains if gain[0] > 0), key=lambda gain: (-gain[0], gain[1])))
