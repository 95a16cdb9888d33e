"""Which node a VM goes to, given what each node could give it.

Every replica and every offline command ranks with the same key, so equal states give equal nodes. The key
says, in this order and each smaller-is-better: how the VM would sit; how ill it suits the machine, whose
memory for each CPU should be used up together with its CPUs, and whose huge pages are not for a VM without;
then, as the strategy wants, the slots for later VMs that it breaks and how full the node is; then the name.
Benchmarks show what each of these is worth.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from functools import cached_property, lru_cache
from itertools import combinations
from math import log2
from operator import attrgetter

from kvplace.core.free import Free
from kvplace.core.look_ahead import slots_lost
from kvplace.core.placement import Placement
from kvplace.core.topology import Topology

MAX_SCORE = 10
"""Highest score an extender may give (MaxExtenderPriority in k8s.io/kube-scheduler)."""

Rank = tuple[int, int, int, int, int, int, int, int, str]

_LITTLE = 64 << 20
"""Bytes per CPU that count as none."""


class Strategy(Enum):
    """What the operator wants of many nodes (`serve --strategy`)."""

    PACK = "pack"
    """Fill nodes up, in a way that keeps slots for large VMs."""
    SPREAD = "spread"
    """Go where most CPUs are free."""
    BALANCE = "balance"
    """Use CPUs and memory of each node evenly."""


_FIRST = (
    "on fewer sockets",
    "on fewer NUMA nodes",
    "on NUMA nodes nearer to each other",
    "memory per CPU and huge pages suit the machine better",
    "behind fewer L3 caches",
)
_SLOTS = "more slots for later VMs are left"
_FULLER = "the node is fuller"
_NAME = "first by name"
_TOLD = {
    Strategy.PACK: (*_FIRST, _SLOTS, _FULLER, _NAME, _NAME),
    Strategy.SPREAD: (*_FIRST, "the node is emptier", _SLOTS, _NAME, _NAME),
    Strategy.BALANCE: (*_FIRST, "CPUs and memory are used more evenly", _SLOTS, _FULLER, _NAME),
}
"""What decides at each place of the ranks."""


@dataclass(frozen=True)
class Candidate:
    """A node that can hold the VM: where it would sit, and what is left there before it comes."""

    node: str
    topology: Topology
    placement: Placement
    free: Free

    def rank(self, strategy: Strategy) -> Rank:
        """Give the key by which nodes are compared; the smallest is the best."""
        rank: Rank = getattr(self, strategy.value)
        return rank

    # A candidate lives until its node changes, and is compared for every VM that comes meanwhile.

    @cached_property
    def pack(self) -> Rank:
        """The rank where VMs fill nodes up."""
        return (*self._first, self._damage, self._left, 0, self.node)

    @cached_property
    def spread(self) -> Rank:
        """The rank where VMs spread over nodes."""
        return (*self._first, -self._left, self._damage, 0, self.node)

    @cached_property
    def balance(self) -> Rank:
        """The rank where CPUs and memory are used evenly."""
        return (*self._first, self._unevenness, self._damage, self._left, self.node)

    @cached_property
    def _first(self) -> tuple[int, int, int, int, int]:
        sockets, nodes, distance, l3_groups = quality(self.topology, self.placement)
        return (sockets, nodes, distance, self._misfit, l3_groups)

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

    @property
    def _misfit(self) -> int:
        """Half doublings between the VM's memory per CPU and the machine's; a doubling for spent huge pages.

        It is the machine's own memory, not what is left: among equal machines it must not decide.
        """
        if not self.placement.memory or not self.free.memory:
            return 0
        wants_pages = any(self.placement.huge_pages.values())
        spent = not wants_pages and any(count > 0 for _, _, count in self.free.huge_pages)
        wanted = self._plain_memory / max(1, self._taken.bit_count())
        offered = _plain_memory_of(self.topology) / max(1, self.topology.allocatable.bit_count())
        return round(2 * (abs(log2((offered + _LITTLE) / (wanted + _LITTLE))) + spent))

    @property
    def _unevenness(self) -> int:
        """Between the shares of CPUs and memory that stay free, in eighths."""
        whole = _plain_memory_of(self.topology)
        if not self.free.memory or not whole:
            return 0
        cpus = (self.free.cpus & ~self._taken).bit_count() / max(1, self.topology.allocatable.bit_count())
        memory = (sum(max(0, count) for _, count in self.free.memory) - self._plain_memory) / whole
        return round(8 * abs(cpus - memory))

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
