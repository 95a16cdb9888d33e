"""A standing that no placement on a node can beat, found by counting.

A placement takes a hundred times as long as a count. So nodes are placed in the order of these bounds, until
the next bound cannot win: the choice is the same as if every node had been placed. There are two bounds. The
coarse one costs a few operations, and it is made for every node; the fine one checks NUMA nodes and L3
groups, and is made for nodes that come to the front.

None in place of a bound means that the VM certainly does not fit.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import accumulate, combinations

from kvplace.core.allocator.available_units import AvailableUnits, units_needed
from kvplace.core.allocator.layout import NodePart, ScopeDomain
from kvplace.core.allocator.objectives import slots_lost
from kvplace.core.allocator.set_cover import fewest
from kvplace.core.cluster.node_choice import (
    Balance,
    Standing,
    Strategy,
    effective,
    has_pages,
    plain_memory_of,
    standing,
)
from kvplace.core.cpuset import cpus_of
from kvplace.core.free_resources import Free, crowd
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
        "topology",
        "whole",
    )

    def __init__(self, topology: Topology, free: Free) -> None:
        self.topology = topology
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

    def coarse(self, counts: NodeCounts) -> Standing | None:
        """The bound from sums over the machine."""
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
        return self._standing(counts, locality, 0, 1)

    def fine(self, counts: NodeCounts) -> Standing | None:
        """The bound from the NUMA nodes and L3 groups."""
        available = AvailableUnits(counts.topology, counts.free, self._request)
        able = [
            domain
            for domain in available.layout.domains[self._request.options.scope.within]
            if available.units_in(domain) >= self._need
        ]
        if not able:
            return None
        if any(domain.divides_nodes for domain in able):
            return self._standing(counts, _ALONE, self._contention(available), 1)
        alone = [
            part
            for domain in able
            for part in domain.parts
            if available.units(part) >= self._need and available.memory_fits((part.node,))
        ]
        if alone:
            return self._of_single_nodes(counts, available, alone)
        bounds = [self._of_several_nodes(available, domain) for domain in able if len(domain.parts) > 1]
        best = min((bound for bound in bounds if bound is not None), default=None)
        if best is None:
            return None
        return self._standing(counts, best[:3], self._contention(available), best[3])

    def _of_single_nodes(
        self, counts: NodeCounts, available: AvailableUnits, parts: Sequence[NodePart]
    ) -> Standing:
        """The bound where single NUMA nodes serve the VM: the best placement lies in one of them."""
        fewest_cpus, most_cpus = self._taken(counts, _ALONE)
        bounds = []
        for part in parts:
            here = (counts.free.cpus & counts.topology.numa_nodes[part.node].cpus).bit_count()
            l3_groups = _fewest_l3_parts(available, part)
            lost = slots_lost(here, max(0, here - fewest_cpus))
            bounds.append((l3_groups, max(0, here - most_cpus), lost))
        if self._pools:
            contention = min(_crowd(available, part, self._request.vcpus) for part in parts)
        else:
            contention = self._contention(available)
        return min(self._standing(counts, _ALONE, contention, *bound) for bound in set(bounds))

    def _of_several_nodes(
        self, available: AvailableUnits, domain: ScopeDomain
    ) -> tuple[int, int, int, int] | None:
        """Packages, NUMA nodes, distance and L3 groups that the VM takes at least in a domain."""
        parts = [part for part in domain.parts if available.needs_memory or available.units(part)]
        amounts = [([available.units(part) for part in parts], self._need)]
        amounts += available.amounts_of([part.node for part in parts])
        if any(sum(have) < need for have, need in amounts):
            return None
        # A placement does not count a package that gives memory alone.
        units_of: dict[int, int] = {}
        for part, units in zip(parts, amounts[0][0], strict=True):
            units_of[part.socket] = units_of.get(part.socket, 0) + units
        packages = fewest(list(units_of.values()), self._need)
        count = max(2, *[fewest(have, need) for have, need in amounts])
        pairs = ((a, b) for a, b in combinations(parts, 2) if packages == 1 or a.socket != b.socket)
        distance = min((available.layout.distances[a.node][b.node] for a, b in pairs), default=0)
        in_l3: dict[int, int] = {}
        for part in parts:
            for segment in part.segments:
                l3 = available.layout.l3_of[next(cpus_of(segment.cpus))]
                in_l3[l3] = in_l3.get(l3, 0) + available.segment_units((segment,))
        return packages, count, distance, fewest(list(in_l3.values()), self._need)

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

    def _contention(self, available: AvailableUnits) -> int:
        """The least use by others of as many CPUs as the VM names; 0 for a VM that owns its CPUs."""
        if self._owns or self._pools:
            return 0
        unused = available.free.pool.bit_count() - len(available.uses)
        if unused >= self._need:
            return 0
        least = sorted(available.uses.values())[: self._need - unused]
        return sum(least) * 1000 // self._need

    def _standing(
        self,
        counts: NodeCounts,
        locality: Locality,
        contention: int,
        l3_groups: int,
        free_beside: int | None = None,
        fragmentation: int = 0,
    ) -> Standing:
        """Combine parts that no placement with this locality can beat.

        `free_beside` are by default the CPUs left on the fullest NUMA nodes that suffice.
        """
        fewest_cpus, most_cpus = self._taken(counts, locality)
        if free_beside is None:
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
            0,
            effective(self._strategy, contention, names_cpus=not self._pools),
            balance,
            not self._pages and counts.has_pages,
            l3_groups,
            free_beside,
            counts.left,
            fragmentation,
        )


def _fewest_l3_parts(available: AvailableUnits, part: NodePart) -> int:
    units = sorted([available.segment_units((segment,)) for segment in part.segments], reverse=True)
    return 1 + sum(reached < available.need for reached in accumulate(units[:-1]))


def _crowd(available: AvailableUnits, part: NodePart, vcpus: int) -> int:
    uses: Iterable[int] = (available.uses.get(cpu, 0) for cpu in cpus_of(available.free.pool & part.cpus))
    return crowd(list(uses), vcpus)
