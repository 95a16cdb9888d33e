"""Whether a VM fits at all, answered by counting, and a NUMA set that serves it.

A VM fits in a domain that has the CPUs, in equal shares of some of its sockets or NUMA nodes where the scope
spreads, and the memory and huge pages: any NUMA node of the domain may give these.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from kvplace.core.allocator.effort import Effort
from kvplace.core.allocator.layout import NodePart, ScopeDomain
from kvplace.core.allocator.numa_sets import NumaSet, rank_of, serves
from kvplace.core.allocator.objectives import NodeRank
from kvplace.core.allocator.supply import Supply

_BUILD_STEPS = 20_000
"""NUMA nodes checked while a set that serves is made smaller and nearer."""


def fits(supply: Supply) -> bool:
    """Whether any placement exists."""
    return any(
        _Domain(supply, domain).serve(domain.parts) is not None
        for domain in supply.layout.domains[supply.request.options.scope.within]
    )


def near_set(supply: Supply) -> NumaSet | None:
    """Build a NUMA set that serves the VM: few sockets and nodes, near to each other, if not the best."""
    best: tuple[NodeRank, NumaSet] | None = None
    for domain in supply.layout.domains[supply.request.options.scope.within]:
        found = _Domain(supply, domain).reduced()
        if found is not None and (best is None or rank_of(supply, found) < best[0]):
            best = (rank_of(supply, found), found)
    return best[1] if best is not None else None


class _Domain:
    """One scope domain, asked for NUMA sets among some of its parts."""

    def __init__(self, supply: Supply, domain: ScopeDomain) -> None:
        self._supply = supply
        self._domain = domain
        self._effort = Effort(_BUILD_STEPS)
        self._beside = supply.device_choices[-1].beside

    def serve(self, parts: Sequence[NodePart]) -> NumaSet | None:
        """Make a NUMA set of these parts, if it serves the VM."""
        supply = self._supply
        self._effort.spend(len(parts))
        if sum([supply.units(part) for part in parts]) < supply.need:
            return None
        if not supply.memory_fits({part.node for part in parts}):
            return None
        ordered = tuple(sorted(parts, key=lambda part: (part.node, part.socket)))
        numa_set = NumaSet(ordered, self._domain, beside=self._beside)
        return numa_set if serves(supply, numa_set) else None

    def reduced(self) -> NumaSet | None:
        """A set that serves the VM only with all of its sockets and NUMA nodes."""
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
                if self.serve(ordered[:middle]) is not None:
                    high = middle
                else:
                    low = middle
            found = self._without_spare(ordered[:high])
            if found is not None and (other := rank_of(supply, found)) < rank:
                best, rank = found, other
        return best

    def _without_spare(self, parts: Sequence[NodePart]) -> NumaSet | None:
        best = self.serve(parts)
        if best is None:
            return None
        units: Counter[int] = Counter()
        for part in best.parts:
            units[part.socket] += self._supply.units(part)
        fullest_last = sorted(units, key=lambda socket: units[socket])
        for spare in (
            *[[part for part in best.parts if part.socket == socket] for socket in fullest_last],
            *[[part] for part in reversed(best.parts)],
        ):
            if self._effort.is_spent:
                break
            best = self.serve([part for part in best.parts if part not in spare]) or best
        return best
