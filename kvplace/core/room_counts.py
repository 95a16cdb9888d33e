"""What is short where, by counts alone, when VMs are meant to share regions of a machine.

A shortage found here is certain. Where none is found the VMs may still not fit, for how their cores lie.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from kvplace.core.occupant import Occupant, Standing, claim_of
from kvplace.core.request import Policy
from kvplace.core.room_regions import Region, Wish
from kvplace.core.room_steps import Step


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

    def __init__(self, standing: Standing, movable: Mapping[str, Occupant]) -> None:
        self._topology = standing.topology
        self._movable = movable
        free = standing.free({})
        self._pool = free.pool
        self._names = {
            uid: one.placement.cpus & ~one.placement.owned
            for uid, one in standing.occupants.items()
            if one.request.policy in (Policy.SHARE, Policy.IMMOVABLE)
        }
        self._owned = {uid: one.placement.owned & standing.usable for uid, one in movable.items()}
        self._memory = dict(free.memory)
        self._pages = {(node, size): count for node, size, count in free.huge_pages}
        claims = {uid: claim_of(uid, one.placement) for uid, one in movable.items()}
        self._small = {uid: claim.plain_memory for uid, claim in claims.items()}
        self._paged = {
            uid: {(node, size): n for node, sizes in claim.huge_pages.items() for size, n in sizes.items()}
            for uid, claim in claims.items()
        }
        self._gains: dict[tuple[int, int], tuple[tuple[int, str], ...]] = {}

    def shortages(self, items: Sequence[tuple[Wish, Region]], gone: frozenset[str]) -> Iterator[Shortage]:
        """Yield what is short when these VMs go to these regions and `gone` have left their places."""
        free, pool = self._left(gone)
        regions = {region.cpus: region.nodes for _, region in items}
        if len(regions) > 1:
            everything, nodes = 0, frozenset[int]()
            for _, region in items:
                everything |= region.cpus
                nodes |= region.nodes
            regions.setdefault(everything, nodes)
        whole = any(wish.whole and wish.owns for wish, _ in items)
        cores = self._whole(free) if whole else 0
        for cpus, nodes in regions.items():
            inside = [wish for wish, region in items if not region.cpus & ~cpus]
            owned = sum(wish.owned_at_least for wish in inside)
            missing = owned - (free & cpus).bit_count()
            shared = max((wish.units for wish in inside if not wish.owns), default=0)
            if shared:
                missing = max(missing, owned + shared - (pool & cpus).bit_count())
            if missing > 0:
                yield Shortage(missing, self._gains_in(cpus))
            if whole:
                needed = sum(wish.owned_at_least for wish in inside if wish.whole and wish.owns)
                if needed > (cores & cpus).bit_count():
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

    def _left(self, gone: frozenset[str]) -> tuple[int, int]:
        pool = self._pool
        for uid in gone:
            pool |= self._owned[uid]
        free = pool
        for uid, cpus in self._names.items():
            if uid not in gone:
                free &= ~cpus
        return free, pool

    def _whole(self, free: int) -> int:
        mask = 0
        for core in self._topology.undivided_cores:
            if not core & ~free:
                mask |= core
        return mask

    def _gains_in(self, cpus: int) -> tuple[tuple[int, str], ...]:
        key = (cpus, 0)
        if key not in self._gains:
            self._gains[key] = _descending(
                (((one.placement.cpus | one.placement.owned) & cpus).bit_count(), uid)
                for uid, one in self._movable.items()
            )
        return self._gains[key]

    def _of_memory(
        self, inside: Sequence[Wish], nodes: frozenset[int], gone: frozenset[str]
    ) -> Iterator[Shortage]:
        small = sum(wish.small_memory for wish in inside)
        if small and self._memory:
            there = sum(
                max(0, self._memory[node] + sum(self._small[uid].get(node, 0) for uid in gone))
                for node in nodes
            )
            if small > there:
                yield Shortage(
                    small - there,
                    _descending(
                        (sum(n for node, n in of.items() if node in nodes), uid)
                        for uid, of in self._small.items()
                    ),
                )
        for size in sorted({size for wish in inside for size in wish.request.huge_pages}):
            pages = [(node, size) for node in nodes]
            needed = sum(wish.request.huge_pages.get(size, 0) for wish in inside)
            there = sum(
                max(0, self._pages.get(page, 0) + sum(self._paged[uid].get(page, 0) for uid in gone))
                for page in pages
            )
            if needed > there:
                gains = _descending(
                    (sum(of.get(page, 0) for page in pages), uid) for uid, of in self._paged.items()
                )
                yield Shortage(needed - there, gains)


def _descending(gains: Iterable[tuple[int, str]]) -> tuple[tuple[int, str], ...]:
    """Keep what gives something, the largest first, equal ones by id."""
    return tuple(sorted((gain for gain in gains if gain[0] > 0), key=lambda gain: (-gain[0], gain[1])))
