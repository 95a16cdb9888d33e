"""Which node a VM goes to, among those that can hold it.

Every replica and every offline command ranks nodes by the same key, so that equal states give equal nodes.
The parts of the key, in this order, the smaller the better:

1. locality: sockets, NUMA nodes, the distance between them
2. contention: how much other VMs use the CPUs that it would share
3. balance: how much farther the free shares of CPUs and memory move apart, since CPUs without memory are
   stranded, and memory without CPUs as well
4. huge pages that are free on the node although the VM wants none
5. L3 groups, then as the strategy says how full the node is, and fragmentation
6. the name

docs/benchmarks.md measures what each part gains.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from functools import cached_property, lru_cache
from operator import attrgetter

from kvplace.core.allocator.fragmentation import slots_lost
from kvplace.core.cpuset import cpus_of
from kvplace.core.free import Free, crowd
from kvplace.core.huge_pages import bytes_in_pages
from kvplace.core.occupant import locality_of
from kvplace.core.placement import Placement
from kvplace.core.scalars import NodeName
from kvplace.core.topology import Topology

MAX_SCORE = 10
"""Highest score an extender may give (MaxExtenderPriority in k8s.io/kube-scheduler)."""

Rank = tuple[int, int, int, int, int, int, int, int, int, NodeName]

_STEPS = 32
"""A difference between shares is rounded to so many steps."""

_TWO_TO_A_CPU = 1000
"""Contention up to which `pack` stays: each CPU that is newly shared is lost to exclusive VMs."""


class Strategy(Enum):
    """How VMs are distributed over nodes (`serve --strategy`)."""

    PACK = "pack"
    """Fill one node after the other."""
    SPREAD = "spread"
    """Go to the node with the most free CPUs."""
    BALANCE = "balance"
    """Keep the free shares of CPUs and memory of each node even, rather than fill nodes."""


_LOCALITY = ("on fewer sockets", "on fewer NUMA nodes", "on NUMA nodes closer to each other")
_CONTENTION = "its shared CPUs are used less"
_PAGES = "its huge pages are left for VMs that need them"
_EVEN = "CPUs and memory are used more evenly"
_L3 = "on fewer L3 groups"
_FRAGMENTATION = "less fragmentation"
_FULLER = "the node is fuller"
_EMPTIER = "the node is emptier"
_NAME = "first by name"
_REASONS = {
    Strategy.PACK: (*_LOCALITY, _CONTENTION, _EVEN, _PAGES, _L3, _FULLER, _FRAGMENTATION, _NAME),
    Strategy.SPREAD: (*_LOCALITY, _CONTENTION, _EVEN, _PAGES, _L3, _EMPTIER, _FRAGMENTATION, _NAME),
    Strategy.BALANCE: (*_LOCALITY, _CONTENTION, _EVEN, _EVEN, _PAGES, _L3, _FRAGMENTATION, _NAME),
}
"""What each part of a rank says about the better node."""


@dataclass(frozen=True)
class Candidate:
    """A node that can hold the VM: the placement there, and what is free before."""

    node: NodeName
    topology: Topology
    placement: Placement
    free: Free
    vcpus: int
    """Those of the VM: a placement in a shared pool does not name them."""

    def rank(self, strategy: Strategy) -> Rank:
        """The key by which nodes are compared; the smallest is the best."""
        rank: Rank = getattr(self, strategy.value)
        return rank

    # A candidate lives until its node changes, and is compared for every VM that comes meanwhile.

    @cached_property
    def pack(self) -> Rank:
        """The rank for `Strategy.PACK`."""
        contention = self._contention
        if self.placement.vcpus:
            contention = max(0, contention - _TWO_TO_A_CPU)
        resources = (contention, *self._balance, self._quality[3])
        return (*self._locality, *resources, self._left, self._fragmentation, self.node)

    @cached_property
    def spread(self) -> Rank:
        """The rank for `Strategy.SPREAD`."""
        resources = (self._contention, *self._balance, self._quality[3])
        return (*self._locality, *resources, -self._left, self._fragmentation, self.node)

    @cached_property
    def balance(self) -> Rank:
        """The rank for `Strategy.BALANCE`."""
        uneven = round(_STEPS // 2 * self._unevenness[1])
        resources = (self._contention, uneven, *self._balance, self._quality[3])
        return (*self._locality, *resources, self._fragmentation, self.node)

    @cached_property
    def _quality(self) -> tuple[int, int, int, int]:
        return quality(self.topology, self.placement)

    @property
    def _locality(self) -> tuple[int, int, int]:
        return self._quality[:3]

    @cached_property
    def _contention(self) -> int:
        """How much others use the CPUs that the VM would share with them; 0 for a VM that owns its CPUs."""
        if self.placement.owned:
            return 0
        uses = dict(self.free.uses)
        found = [uses.get(cpu, 0) for cpu in cpus_of(self.placement.cpus)]
        return sum(found) * 1000 // len(found) if self.placement.vcpus else crowd(found, self.vcpus)

    @cached_property
    def _balance(self) -> tuple[int, int]:
        """How much farther the free shares move apart, and whether huge pages stay free unneeded.

        The change counts, as in kube-scheduler's NodeResourcesBalancedAllocation, in coarse steps, so that
        the strategy decides among nodes where the VM makes no difference.
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
        pages = sum(map(bytes_in_pages, placement.huge_pages.values()))
        return sum(placement.memory.values()) - pages

    @cached_property
    def _unevenness(self) -> tuple[float, float]:
        """The difference between the free shares of CPUs and memory, before and with the VM."""
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
    def _fragmentation(self) -> int:
        before = [node.cpus & self.free.cpus for node in self.topology.numa_nodes if node.cpus & self._taken]
        return sum(slots_lost(cpus.bit_count(), (cpus & ~self._taken).bit_count()) for cpus in before)


@lru_cache(maxsize=4096)
def _plain_memory_of(topology: Topology) -> int:
    """The bytes outside huge pages that a machine has."""
    return sum(node.memory - bytes_in_pages(node.huge_pages) for node in topology.numa_nodes)


def quality(topology: Topology, placement: Placement) -> tuple[int, int, int, int]:
    """Rate a placement: sockets, NUMA nodes, largest distance between them, L3 groups; smaller is better."""
    packages, nodes, distance, _ = locality_of(topology, placement)
    return packages, nodes, distance, len(placement.l3_groups)


def best_candidate(candidates: Iterable[Candidate], strategy: Strategy) -> Candidate | None:
    """Choose the best node; None without candidates."""
    # attrgetter, since this is asked of every node for every pod.
    return min(candidates, key=attrgetter(strategy.value), default=None)


def why(best: Candidate, other: Candidate, strategy: Strategy) -> str:
    """Give the reason why the chosen node was preferred to another one."""
    places = zip(_REASONS[strategy], best.rank(strategy), other.rank(strategy), strict=True)
    return next((reason for reason, ours, theirs in places if ours != theirs), _NAME)


def scores(candidates: Iterable[Candidate], strategy: Strategy) -> dict[NodeName, int]:
    """Score nodes from 0 to 10 by their rank: the best gets 10, equal ranks get equal scores."""
    ranked = sorted((candidate.rank(strategy)[:-1], candidate.node) for candidate in candidates)
    places = {rank: place for place, rank in enumerate(dict.fromkeys(rank for rank, _ in ranked))}
    steps = max(1, len(places) - 1)
    return {node: MAX_SCORE - (places[rank] * MAX_SCORE) // steps for rank, node in ranked}
