"""Whether a VM fits at all, answered by counting, and a NUMA set that serves it.

A VM fits in a domain that has the CPUs, in equal shares of some of its packages or NUMA nodes where the scope
spreads, and the memory and huge pages: any NUMA node of the domain may give these.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvplace.core.allocator.effort import Effort
from kvplace.core.allocator.layout import NodePart, ScopeDomain
from kvplace.core.allocator.numa_sets import (
    NumaSet,
    Rank,
    group_units,
    mask_of_packages,
    most_shares,
    rank_of,
)
from kvplace.core.allocator.supply import Supply
from kvplace.core.cpuset import bits_of, mask_of
from kvplace.core.request import Policy

_BUILD_STEPS = 20_000
"""NUMA nodes checked while a set that serves is made smaller and nearer."""


def fits(supply: Supply) -> bool:
    """Whether any placement exists."""
    return any(
        _Domain(supply, domain).serve(domain.parts, -1) is not None
        for domain in supply.layout.domains[supply.request.options.scope.within]
    )


def near_set(supply: Supply) -> NumaSet | None:
    """Build a NUMA set that serves the VM: few packages and nodes, near to each other, if not the best."""
    best: tuple[Rank, NumaSet] | None = None
    for domain in supply.layout.domains[supply.request.options.scope.within]:
        found = _Domain(supply, domain).reduced()
        if found is not None and (best is None or rank_of(supply, found) < best[0]):
            best = (rank_of(supply, found), found)
    return best[1] if best is not None else None


class _Domain:
    """One scope domain, asked for NUMA sets among some of its NUMA nodes and packages."""

    def __init__(self, supply: Supply, domain: ScopeDomain) -> None:
        self._supply = supply
        self._domain = domain
        self._effort = Effort(_BUILD_STEPS)

    def serve(self, parts: Sequence[NodePart], packages: int) -> NumaSet | None:
        """Make the set of those of these NUMA nodes that lie in these packages, if it serves the VM."""
        supply = self._supply
        self._effort.spend(len(parts))
        inside = sorted([part for part in parts if part.packages & packages], key=lambda part: part.node)
        numa_set = NumaSet(tuple(inside), mask_of_packages(inside) & packages, self._domain)
        if supply.request.options.policy is Policy.NUMA and self._domain.crossed:
            used = mask_of(package for part in inside for package in supply.units_by_package(part))
            if used & ~packages:
                return None  # Pools are used whole.
        units = group_units(supply, numa_set)
        if sum(units) < supply.need or not supply.memory_fits([part.node for part in inside]):
            return None
        return numa_set if not supply.spreads or most_shares(units, supply.need) else None

    def reduced(self) -> NumaSet | None:
        """A set that serves the VM only with all of its packages and NUMA nodes."""
        supply, domain = self._supply, self._domain
        best = self._without_spare(domain.parts)
        if best is None or len(best.parts) == 1:
            return best
        rank = rank_of(supply, best)
        distances = supply.layout.distances
        for seed in sorted(domain.parts, key=lambda part: -supply.units(part)):
            if self._effort.is_spent:
                break
            row = distances[seed.node]
            ordered = sorted(domain.parts, key=lambda part: (part is not seed, row[part.node]))
            low, high = 0, len(ordered)
            while high - low > 1:
                middle = (low + high) // 2
                if self.serve(ordered[:middle], -1) is not None:
                    high = middle
                else:
                    low = middle
            found = self._without_spare(ordered[:high])
            if found is not None and (other := rank_of(supply, found)) < rank:
                best, rank = found, other
        return best

    def _without_spare(self, parts: Sequence[NodePart]) -> NumaSet | None:
        found = self.serve(parts, -1)
        if found is None:
            return None
        best: NumaSet = found
        fullest_last = sorted(bits_of(best.packages), key=lambda one: self._units_of(found, one))
        for package in fullest_last:
            if not self._effort.is_spent:
                best = self.serve(best.parts, best.packages & ~(1 << package)) or best
        for part in reversed(best.parts):
            if self._effort.is_spent:
                break
            fewer = self.serve([other for other in best.parts if other is not part], best.packages)
            best = fewer or best
        return best

    def _units_of(self, numa_set: NumaSet, package: int) -> int:
        return sum([self._supply.units_by_package(part).get(package, 0) for part in numa_set.parts])
