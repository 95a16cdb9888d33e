"""A standing that no placement on a node can beat, found by counting.

A placement takes a hundred times as long as a count. So nodes are placed in the order of these bounds, until
the next bound cannot win: the choice is the same as if every node had been placed.

None in place of a bound means that the VM certainly does not fit.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import combinations

from kvplace.core.allocator.available_units import units_needed
from kvplace.core.cluster.node_choice import (
    Balance,
    Standing,
    Strategy,
    effective,
    has_pages,
    plain_memory_of,
    standing,
)
from kvplace.core.free_resources import Free
from kvplace.core.quantity import plain_bytes
from kvplace.core.request import Level, NumaMemory, Policy, Request, Smt
from kvplace.core.scalars import Bytes
from kvplace.core.topology import Topology

Locality = tuple[int, int, int]
"""Packages, NUMA nodes, largest distance between these."""

_ALONE = (1, 1, 0)
"""The least locality: on one NUMA node. Every placement elsewhere is worse."""


class NodeCounts:
    """Free units of a node in some state, in numbers that no request changes."""

    __slots__ = (
        "alone",
        "before",
        "every",
        "free",
        "has_pages",
        "largest",
        "left",
        "memory",
        "nearest",
        "pages",
        "pool",
        "thread_counts",
        "together",
        "whole",
    )

    def __init__(self, topology: Topology, free: Free) -> None:
        self.free = free
        self.left = free.cpus.bit_count()
        """CPUs that an exclusive VM may take."""
        self.pool = free.pool.bit_count()
        in_nodes = [(free.cpus & node.cpus).bit_count() for node in topology.numa_nodes]
        self.largest = max(in_nodes)
        """The most CPUs for exclusive VMs in one NUMA node."""
        self.alone, self.together = 0, 1
        """The counts of such CPUs, as bits: of each NUMA node, and of each set of NUMA nodes."""
        for count in in_nodes:
            self.alone |= 1 << count
            self.together |= self.together << count
        self.memory = sum([count for _, count in free.memory if count > 0]) if free.memory else None
        """Bytes outside huge pages; None where memory is not counted."""
        self.has_pages = has_pages(free)
        self.pages: dict[Bytes, int] = {}
        """Free huge pages by size."""
        for _, size, count in free.huge_pages:
            self.pages[size] = self.pages.get(size, 0) + max(0, count)
        self.every, self.whole, self.nearest, self.thread_counts = _machine(topology)
        self.before = 0.0
        if self.memory is not None and self.whole:
            self.before = abs(self.left / self.every - self.memory / self.whole)


@lru_cache(maxsize=4096)
def _machine(topology: Topology) -> tuple[int, int, int, tuple[int, int]]:
    """Allocatable CPUs, bytes, smallest distance of two NUMA nodes, fewest and most CPUs of a core."""
    ids = [node.id for node in topology.numa_nodes]
    nearest = min((topology.distance(a, b) for a, b in combinations(ids, 2)), default=0)
    threads = [core.bit_count() for core in topology.cores]
    return (
        max(1, topology.allocatable.bit_count()),
        plain_memory_of(topology),
        nearest,
        (min(threads), max(threads)),
    )


class StandingBound:
    """The bounds of nodes for one request."""

    def __init__(self, request: Request, strategy: Strategy) -> None:
        options = request.options
        self._request = request
        self._strategy = strategy
        self._pools = options.policy is Policy.NUMA
        self._by_cpu = options.smt is Smt.PREFER or self._pools
        self._need = units_needed(request)
        self._owns = request.owns_cpus
        self._one_numa = options.scope.within is Level.NUMA
        self._counts_memory = bool(request.memory) and options.numa_memory is not NumaMemory.OFF
        self._memory = plain_bytes(request.memory, request.huge_pages) if self._counts_memory else 0
        self._pages = [(size, count) for size, count in request.huge_pages.items() if count]

    def of(self, counts: NodeCounts) -> Standing | None:
        """The bound from sums over a machine."""
        if (counts.left if self._owns else counts.pool) < self._need:
            return None
        if counts.memory is not None and counts.memory < self._memory:
            return None
        if self._pages and any(counts.pages.get(size, 0) < count for size, count in self._pages):
            return None
        locality = _ALONE
        if self._owns and counts.largest < self._need:
            if self._one_numa:
                return None
            locality = (1, 2, counts.nearest)
        fewest_cpus, most_cpus = self._taken(counts, locality)
        need = self._need if self._owns else 0
        enough = (counts.alone if locality == _ALONE else counts.together) >> need
        free_beside = max(0, need + (enough & -enough).bit_length() - 1 - most_cpus)
        balance = Balance(0.0, 0.0)
        if self._counts_memory and counts.memory is not None and counts.whole:
            share = (counts.memory - self._memory) / counts.whole
            low = (counts.left - most_cpus) / counts.every
            high = (counts.left - fewest_cpus) / counts.every
            balance = Balance(counts.before, max(0.0, low - share, share - high))
        return standing(
            self._strategy,
            locality,
            effective(self._strategy, self._contention(counts.free), names_cpus=not self._pools),
            balance,
            not self._pages and counts.has_pages,
            free_beside,
            counts.left,
        )

    def _taken(self, counts: NodeCounts, locality: Locality) -> tuple[int, int]:
        """How many of the free CPUs the VM takes at least and at most, if that is its locality."""
        if self._pools:
            return 0, counts.left
        narrow, wide = counts.thread_counts
        if not self._owns:
            named_by_others = counts.pool - counts.left
            return max(0, self._need - named_by_others), self._need * (1 if self._by_cpu else wide)
        if self._by_cpu:
            return self._need, self._need
        if self._request.options.smt is Smt.ISOLATE:
            return self._need * narrow, self._need * wide
        if narrow < wide:
            return self._need, self._need * wide
        least = -(-self._need // wide) * wide
        return least, least if locality == _ALONE else self._need * wide

    def _contention(self, free: Free) -> int:
        """The least use by others of as many CPUs as the VM names; 0 for a VM that owns its CPUs."""
        if self._owns or self._pools:
            return 0
        unused = free.pool.bit_count() - len(free.uses)
        if unused >= self._need:
            return 0
        least = sorted([uses for _, uses in free.uses])[: self._need - unused]
        return sum(least) * 1000 // self._need
