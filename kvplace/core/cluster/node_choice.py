"""Which node a VM goes to, given what each node could give it.

Every replica and every offline command ranks with the same key, so equal states give equal nodes. The key
says, in this order and each smaller-is-better: how the VM would sit; how much others use the CPUs that it
would share; whether it brings the free shares of CPUs and memory together or drives them apart, since what is
left of one without the other is stranded; whether huge pages are free there that it has no use for; then, as
the strategy wants, how full the node is and the slots for later VMs that it breaks; then the name. Benchmarks
show what each of these is worth.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from functools import cached_property, lru_cache
from itertools import combinations
from operator import attrgetter

from kvplace.core.allocator.fragmentation import slots_lost
from kvplace.core.cpuset import cpus_of
from kvplace.core.free import Free, crowd
from kvplace.core.placement import Placement
from kvplace.core.topology import Topology

MAX_SCORE = 10
"""Highest score an extender may give (MaxExtenderPriority in k8s.io/kube-scheduler)."""

Rank = tuple[int, int, int, int, int, int, int, int, int, str]

_STEPS = 32
"""Into how many steps a difference between shares is rounded."""

_TWO_TO_A_CPU = 1000
"""How crowded shared CPUs may be before `pack` leaves the node: each new one is lost to exclusive VMs."""


class Strategy(Enum):
    """What the operator wants of many nodes (`serve --strategy`)."""

    PACK = "pack"
    """Fill nodes up, one after the other."""
    SPREAD = "spread"
    """Go where most CPUs are free."""
    BALANCE = "balance"
    """Keep what is left of CPUs and memory even on each node, rather than fill nodes up."""


_SITS = ("on fewer sockets", "on fewer NUMA nodes", "on NUMA nodes nearer to each other")
_CROWD = "others use its CPUs less"
_PAGES = "its huge pages are left for VMs that want them"
_EVEN = "CPUs and memory are used more evenly"
_L3 = "behind fewer L3 caches"
_SLOTS = "more slots for later VMs are left"
_FULLER = "the node is fuller"
_NAME = "first by name"
_TOLD = {
    Strategy.PACK: (*_SITS, _CROWD, _EVEN, _PAGES, _L3, _FULLER, _SLOTS, _NAME),
    Strategy.SPREAD: (*_SITS, _CROWD, _EVEN, _PAGES, _L3, "the node is emptier", _SLOTS, _NAME),
    Strategy.BALANCE: (*_SITS, _CROWD, _EVEN, _EVEN, _PAGES, _L3, _SLOTS, _NAME),
}
"""What decides at each place of the ranks."""


@dataclass(frozen=True)
class Candidate:
    """A node that can hold the VM: where it would sit, and what is left there before it comes."""

    node: str
    topology: Topology
    placement: Placement
    free: Free
    vcpus: int
    """The VM's, where its placement names no CPU for each of them."""

    def rank(self, strategy: Strategy) -> Rank:
        """Give the key by which nodes are compared; the smallest is the best."""
        rank: Rank = getattr(self, strategy.value)
        return rank

    # A candidate lives until its node changes, and is compared for every VM that comes meanwhile.

    @cached_property
    def pack(self) -> Rank:
        """The rank where VMs fill nodes up."""
        *_, l3_groups = self._quality
        crowd = max(0, self._crowd - _TWO_TO_A_CPU) if self.placement.vcpus else self._crowd
        return (*self._sits, crowd, *self._suits, l3_groups, self._left, self._damage, self.node)

    @cached_property
    def spread(self) -> Rank:
        """The rank where VMs spread over nodes."""
        *_, l3_groups = self._quality
        return (*self._sits, self._crowd, *self._suits, l3_groups, -self._left, self._damage, self.node)

    @cached_property
    def balance(self) -> Rank:
        """The rank where CPUs and memory are used evenly."""
        *_, l3_groups = self._quality
        uneven = round(_STEPS // 2 * self._unevenness[1])
        return (*self._sits, self._crowd, uneven, *self._suits, l3_groups, self._damage, self.node)

    @cached_property
    def _quality(self) -> tuple[int, int, int, int]:
        return quality(self.topology, self.placement)

    @property
    def _sits(self) -> tuple[int, int, int]:
        return self._quality[:3]

    @cached_property
    def _crowd(self) -> int:
        """How much others use the CPUs that the VM would share with them; 0 for a VM that owns its own."""
        if self.placement.owned:
            return 0
        uses = dict(self.free.uses)
        found = [uses.get(cpu, 0) for cpu in cpus_of(self.placement.cpus)]
        return sum(found) * 1000 // len(found) if self.placement.vcpus else crowd(found, self.vcpus)

    @cached_property
    def _suits(self) -> tuple[int, int]:
        """How much farther the VM drives the free shares apart, and whether it would be beside free pages.

        It is the change that counts, as in kube-scheduler's NodeResourcesBalancedAllocation, and in coarse
        steps, so that nodes among which the VM makes no difference are filled as the strategy wants.
        """
        before, after = self._unevenness
        wants_pages = any(self.placement.huge_pages.values())
        idle_pages = not wants_pages and any(count > 0 for _, _, count in self.free.huge_pages)
        return (round(_STEPS * (after - before)), int(idle_pages))

    @property
    def _left(self) -> int:
        return self.free.cpus.bit_count()

    @property
    def _taken(self) -> int:
        return self.placement.cpus | self.placement.owned

    @cached_property
    def _plain_memory(self) -> int:
        placement = self.placement
        pages = sum(size * count for sizes in placement.huge_pages.values() for size, count in sizes.items())
        return sum(placement.memory.values()) - pages

    @cached_property
    def _unevenness(self) -> tuple[float, float]:
        """How far the free shares of CPUs and memory are apart, before the VM comes and with it."""
        whole = _plain_memory_of(self.topology)
        if not self.free.memory or not whole or not self.placement.memory:
            return (0.0, 0.0)
        every = max(1, self.topology.allocatable.bit_count())
        left = (self.free.cpus & ~self._taken).bit_count()
        memory = sum(max(0, count) for _, count in self.free.memory)
        return (
            abs(self._left / every - memory / whole),
            abs(left / every - (memory - self._plain_memory) / whole),
        )

    @cached_property
    def _damage(self) -> int:
        before = [node.cpus & self.free.cpus for node in self.topology.numa_nodes if node.cpus & self._taken]
        return sum(slots_lost(cpus.bit_count(), (cpus & ~self._taken).bit_count()) for cpus in before)


@lru_cache(maxsize=4096)
def _plain_memory_of(topology: Topology) -> int:
    """Count the bytes outside huge pages that a machine has."""
    return sum(
        node.memory - sum(size * count for size, count in node.huge_pages.items())
        for node in topology.numa_nodes
    )


def quality(topology: Topology, placement: Placement) -> tuple[int, int, int, int]:
    """How a VM sits: sockets, NUMA nodes, largest distance between them, L3 groups; smaller is better."""
    distances = [topology.distance(a, b) for a, b in combinations(placement.numa_nodes, 2)]
    return (
        len(placement.packages),
        len(placement.numa_nodes),
        max(distances, default=0),
        len(placement.l3_groups),
    )


def best_candidate(candidates: Iterable[Candidate], strategy: Strategy) -> Candidate | None:
    """Choose the node for a VM; None when there is no candidate."""
    # attrgetter, since this is asked of every node for every pod.
    return min(candidates, key=attrgetter(strategy.value), default=None)


def why(best: Candidate, other: Candidate, strategy: Strategy) -> str:
    """Say what decided between the chosen node and another one that would have held the VM."""
    places = zip(_TOLD[strategy], best.rank(strategy), other.rank(strategy), strict=True)
    return next((told for told, ours, theirs in places if ours != theirs), _NAME)


def scores(candidates: Iterable[Candidate], strategy: Strategy) -> dict[str, int]:
    """Score nodes from 0 to 10 by their order: the best gets 10, equal ranks get equal scores."""
    ranked = sorted((candidate.rank(strategy)[:-1], candidate.node) for candidate in candidates)
    places = {rank: place for place, rank in enumerate(dict.fromkeys(rank for rank, _ in ranked))}
    steps = max(1, len(places) - 1)
    return {node: MAX_SCORE - (places[rank] * MAX_SCORE) // steps for rank, node in ranked}
