"""What is short where, by counts alone, when VMs are meant to share regions of a machine.

A shortage found here is certain. Where none is found the VMs may still not fit, for how their cores lie.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from kvplace.core.ledger import claim_of
from kvplace.core.moves.step_trials import Step
from kvplace.core.moves.targets import Region, Wish
from kvplace.core.occupant import Occupant, RunningVms
from kvplace.core.request import Policy

_Key = TypeVar("_Key", int, tuple[int, int])
"""A NUMA node, or a NUMA node and a page size."""


@dataclass(frozen=True, slots=True)
class Shortage:
    """Something that a region has too little of."""

    missing: int
    gains: tuple[tuple[int, str], ...]
    """What each VM that may go would give back, the largest first."""

    def leavers(self, gone: frozenset[str], left: int) -> list[str]:
        """The VMs of which one has to go when so many may; none when that many cannot suffice."""
        open_ = [(gain, uid) for gain, uid in self.gains if uid not in gone]
        if sum(gain for gain, _ in open_[:left]) < self.missing:
            return []
        return [uid for gain, uid in open_ if gain * left >= self.missing]  # the largest of them, at least


class Counts:
    """The free CPUs and memory of a machine, and what each running VM would give back."""

    def __init__(self, running_vms: RunningVms, movable: Mapping[str, Occupant]) -> None:
        self._topology = running_vms.topology
        self._movable = movable
        free = running_vms.free({})
        self._pool = free.pool
        self._names = {
            uid: one.placement.cpus & ~one.placement.owned
            for uid, one in running_vms.occupants.items()
            if one.request.options.policy in (Policy.SHARE, Policy.IMMOVABLE)
        }
        self._owned = {uid: one.placement.owned & running_vms.usable for uid, one in movable.items()}
        self._memory = dict(free.memory)
        self._pages = {(node, size): count for node, size, count in free.huge_pages}
        claims = {uid: claim_of(uid, one.placement) for uid, one in movable.items()}
        self._small = {uid: claim.plain_memory for uid, claim in claims.items()}
        self._paged = {
            uid: {(node, size): n for node, sizes in claim.huge_pages.items() for size, n in sizes.items()}
            for uid, claim in claims.items()
        }
        self._gains: dict[object, tuple[tuple[int, str], ...]] = {}
        self._frees: dict[frozenset[str], tuple[int, int]] = {}
        self._wholes: dict[frozenset[str], int] = {}

    def ever(self, wish: Wish) -> bool:
        """Whether the machine as a whole has enough: moves change where things are, not how many.

        Only VMs with whole cores may own fewer CPUs elsewhere, where cores are of unlike width.
        """
        free, pool = self._left(frozenset())
        needed = wish.owned_at_least - self._saved_at_most()
        if all(uid not in self._names for uid in self._movable) and needed > free.bit_count():
            return False
        if needed > pool.bit_count():
            return False
        small = sum(max(0, count) for count in self._memory.values())
        return not self._memory or wish.small_memory <= small

    def has_room(self, region: Region, wish: Wish, gone: frozenset[str]) -> bool:
        """Whether a VM's CPUs are free in a region when these VMs have gone: the quickest check."""
        return wish.owned_at_least <= (self._left(gone)[0] & region.cpus).bit_count()

    def shortages(self, items: Sequence[tuple[Wish, Region]], gone: frozenset[str]) -> Iterator[Shortage]:
        """Yield what is short when these VMs go to these regions and `gone` have left their places."""
        free, pool = self._left(gone)
        regions = {region.cpus: region.nodes for _, region in reversed(items)}  # the newest fails soonest
        if len(regions) > 1:
            everything, nodes = 0, frozenset[int]()
            for _, region in items:
                everything |= region.cpus
                nodes |= region.nodes
            regions.setdefault(everything, nodes)
        whole = any(wish.owned_whole for wish, _ in items)
        for cpus, nodes in regions.items():
            inside = [wish for wish, region in items if not region.cpus & ~cpus]
            owned = shared = needed = 0
            for wish in inside:
                owned += wish.owned_at_least
                needed += wish.owned_whole
                if not wish.owned_at_least and wish.units > shared:
                    shared = wish.units
            missing = owned - (free & cpus).bit_count()
            if shared:
                missing = max(missing, owned + shared - (pool & cpus).bit_count())
            if missing > 0:
                yield Shortage(missing, self._gains_in(cpus))
            elif whole and needed > (self._whole(gone, free) & cpus).bit_count():
                yield Shortage(1, self._gains_in(cpus))
            yield from self._of_memory(inside, nodes, gone)

    def in_turn(self, steps: Sequence[Step]) -> bool:
        """Whether each step in this order finds enough free CPUs in its region, by count."""
        gone: frozenset[str] = frozenset()
        placed: dict[str, tuple[Wish, Region]] = {}
        for step in steps:
            gone |= {step.wish.id}
            placed[step.wish.id] = (step.wish, step.region)
            free, pool = self._left(gone)
            cpus = step.region.cpus
            owned = sum(w.owned_at_least for w, region in placed.values() if not region.cpus & ~cpus)
            if owned > (free & cpus).bit_count():
                return False
            if not step.wish.owns and owned + step.wish.units > (pool & cpus).bit_count():
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

    def _left(self, gone: frozenset[str]) -> tuple[int, int]:
        known = self._frees.get(gone)
        if known is None:
            pool = self._pool
            for uid in gone:
                pool |= self._owned[uid]
            free = pool
            for uid, cpus in self._names.items():
                if uid not in gone:
                    free &= ~cpus
            known = self._frees[gone] = (free, pool)
        return known

    def _whole(self, gone: frozenset[str], free: int) -> int:
        mask = self._wholes.get(gone)
        if mask is None:
            mask = 0
            for core in self._topology.undivided_cores:
                if not core & ~free:
                    mask |= core
            self._wholes[gone] = mask
        return mask

    def _gains_in(self, cpus: int) -> tuple[tuple[int, str], ...]:
        if cpus not in self._gains:
            self._gains[cpus] = _descending(
                (((one.placement.cpus | one.placement.owned) & cpus).bit_count(), uid)
                for uid, one in self._movable.items()
            )
        return self._gains[cpus]

    def _of_memory(
        self, inside: Sequence[Wish], nodes: frozenset[int], gone: frozenset[str]
    ) -> Iterator[Shortage]:
        needed = sum(wish.small_memory for wish in inside)
        if needed and self._memory:
            there = sum(self._there(self._memory, self._small, node, gone) for node in nodes)
            if needed > there:
                yield Shortage(needed - there, self._gains_of(self._small, nodes))
        for size in sorted({size for wish in inside for size in wish.request.huge_pages}):
            pages = frozenset((node, size) for node in nodes)
            needed = sum(wish.request.huge_pages.get(size, 0) for wish in inside)
            there = sum(self._there(self._pages, self._paged, page, gone) for page in pages)
            if needed > there:
                yield Shortage(needed - there, self._gains_of(self._paged, pages))

    @staticmethod
    def _there(
        free: Mapping[_Key, int],
        held: Mapping[str, Mapping[_Key, int]],
        key: _Key,
        gone: frozenset[str],
    ) -> int:
        count = free.get(key, 0)
        for uid in gone:
            count += held[uid].get(key, 0)
        return max(0, count)

    def _gains_of(
        self, held: Mapping[str, Mapping[_Key, int]], keys: frozenset[_Key]
    ) -> tuple[tuple[int, str], ...]:
        if keys not in self._gains:
            self._gains[keys] = _descending(
                (sum(of.get(key, 0) for key in keys), uid) for uid, of in held.items()
            )
        return self._gains[keys]


def _descending(gains: Iterable[tuple[int, str]]) -> tuple[tuple[int, str], ...]:
    """Keep what gives something, the largest first, equal ones by id."""
    return tuple(sorted((gain for gain in gains if gain[0] > 0), key=lambda gain: (-gain[0], gain[1])))
