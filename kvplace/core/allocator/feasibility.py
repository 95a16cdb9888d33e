"""Whether a VM fits at all, answered by counting and matching, and a NUMA set that serves it.

For one of several amounts (memory, huge pages of a size) that the NUMA nodes must have together, the heaviest
NUMA nodes that can serve are found exactly in most cases: they are the first of a sorted list, or the best
matching of nodes to packages. Of several amounts, prices (multipliers) make one: when the heaviest nodes at
some prices weigh too little, no nodes suffice; when they suffice, the VM fits. A few requests are left over
that neither shows. They are searched for within a bound, and the answer may be that it is not known.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import combinations
from math import comb, prod

from kvplace.core.allocator.effort import Effort
from kvplace.core.allocator.layout import NodePart, ScopeDomain
from kvplace.core.allocator.numa_sets import NumaSet, Rank, best_numa_sets, mask_of_packages, rank_of
from kvplace.core.allocator.spreading import Matching, shares_exist
from kvplace.core.allocator.supply import Supply
from kvplace.core.cpuset import bits_of, mask_of
from kvplace.core.request import Policy, Scope
from kvplace.core.scalars import NumaIndex

_MOST_ROUNDS = 24
"""Prices that are tried for several amounts."""
_MOST_PACKAGE_SETS = 32
"""Sets of packages that are looked at each, where packages and NUMA nodes cross."""
_BUILD_STEPS = 20_000
"""NUMA nodes looked at while a set that serves is made smaller and nearer."""

_Chosen = tuple[tuple[NodePart, ...], int]
"""NUMA nodes and the packages of them that are used."""
_Heaviest = Callable[[Mapping[NumaIndex, int]], tuple[_Chosen, int]]
"""The heaviest nodes that can serve, by their weights, and a weight that no such nodes exceed."""


def fits(supply: Supply, *, search: bool = True) -> bool | None:
    """Whether any placement exists; None when the bound on the search, or no `search`, leaves that open."""
    known = True
    for domain in supply.layout.domains[supply.request.options.scope]:
        found, certain = _Domain(supply, domain).serve(domain.parts, -1)
        if found is not None:
            return True
        known = known and certain
    if known or not search:
        return False if known else None
    if best_numa_sets(supply):
        return True
    return None if supply.effort.is_spent else False


def near_set(supply: Supply) -> NumaSet | None:
    """Build a NUMA set that serves the VM: few packages and nodes, near to each other, if not the best."""
    best: tuple[Rank, NumaSet] | None = None
    for domain in supply.layout.domains[supply.request.options.scope]:
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

    def serve(self, parts: Sequence[NodePart], packages: int) -> tuple[NumaSet | None, bool]:
        """A set out of these NUMA nodes and packages that serves the VM, and whether None is certain."""
        supply, need = self._supply, self._supply.need
        self._effort.spend(len(parts))
        in_order = sorted(parts, key=lambda part: part.node)
        usable = [part for part in in_order if self._units(part, packages)]
        if sum([self._units(part, packages) for part in usable]) < need:
            return None, True
        if not supply.memory_fits([part.node for part in usable]):
            return None, True
        everything = mask_of_packages(usable)
        if len(usable) > need and supply.request.options.policy is not Policy.NUMA:
            # Some of the nodes give memory alone; all their packages count.
            if not everything & ~packages and (not supply.spreads or self._some_share(usable, packages)):
                return NumaSet(tuple(usable), everything, self._domain), True
        elif not supply.spreads:
            pools = supply.request.options.policy is Policy.NUMA
            used = [p for p in bits_of(everything) if self._of_package(usable, p)]
            if pools and mask_of(used) & ~packages:
                return None, False  # Pools are used whole.
            return NumaSet(tuple(usable), mask_of(used) & packages, self._domain), True
        certain = True
        for chosen, is_certain in self._own_nodes(usable, packages):
            certain = certain and is_certain
            if chosen is not None:
                nodes = tuple(sorted(chosen[0], key=lambda part: part.node))
                return NumaSet(nodes, chosen[1], self._domain), True
        return None, certain

    def reduced(self) -> NumaSet | None:
        """A set that serves the VM, from which no package and no NUMA node can be taken away."""
        supply, domain = self._supply, self._domain
        best = self._without_spare(domain.parts, -1)
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
                if self.serve(ordered[:middle], -1)[0] is not None:
                    high = middle
                else:
                    low = middle
            found = self._without_spare(ordered[:high], -1)
            if found is not None and (other := rank_of(supply, found)) < rank:
                best, rank = found, other
        return best

    def _without_spare(self, parts: Sequence[NodePart], packages: int) -> NumaSet | None:
        found, _ = self.serve(parts, packages)
        if found is None:
            return None
        best: NumaSet = found
        if self._domain.crossed and len(best.parts) <= self._supply.need:
            for package in sorted(bits_of(best.packages), key=lambda p: self._of_package(best.parts, p)):
                if best.packages >> package & 1 and not self._effort.is_spent:
                    fewer, _ = self.serve(parts, best.packages & ~(1 << package))
                    best = fewer if fewer is not None and self._is_better(fewer, best) else best
            packages = best.packages
        for part in reversed(best.parts):
            if self._effort.is_spent:
                break
            fewer, _ = self.serve([other for other in best.parts if other is not part], packages)
            best = fewer if fewer is not None and self._is_better(fewer, best) else best
        return best

    def _is_better(self, one: NumaSet, other: NumaSet) -> bool:
        return rank_of(self._supply, one) < rank_of(self._supply, other)

    # Units.

    def _units(self, part: NodePart, packages: int) -> int:
        if not self._domain.crossed:
            return self._supply.units(part) if not part.packages & ~packages else 0
        of_part = self._supply.units_by_package(part)
        return sum([units for package, units in of_part.items() if packages >> package & 1])

    def _of_package(self, parts: Sequence[NodePart], package: int) -> int:
        return sum([self._supply.units_by_package(part).get(package, 0) for part in parts])

    def _some_share(self, parts: Sequence[NodePart], packages: int) -> bool:
        if self._supply.request.options.scope is Scope.SPREAD_NUMA:
            units = [self._units(part, packages) for part in parts]
        else:
            units = [self._of_package(parts, p) for p in bits_of(mask_of_packages(parts) & packages)]
            units = [amount for amount in units if amount]
        need = self._supply.need
        return any(shares_exist(units, count, need) for count in range(1, min(need, len(units)) + 1))

    # NUMA nodes of which each gives a CPU.

    def _own_nodes(self, parts: Sequence[NodePart], packages: int) -> Iterator[tuple[_Chosen | None, bool]]:
        """Yield for each number of shares the nodes that serve, or None and whether that is certain."""
        need = self._supply.need
        match self._supply.request.options.scope:
            case Scope.SPREAD_NUMA:
                units = [self._units(part, packages) for part in parts]
                for count in range(1, min(need, len(parts)) + 1):
                    if shares_exist(units, count, need):
                        yield self._priced(parts, partial(self._of_nodes, parts, units, packages, count))
            case Scope.SPREAD_SOCKETS:
                numbers = bits_of(mask_of_packages(parts) & packages)
                of_package = {package: self._of_package(parts, package) for package in numbers}
                for count in range(1, min(need, len(of_package)) + 1):
                    if shares_exist(list(of_package.values()), count, need):
                        able = {p: amount for p, amount in of_package.items() if amount >= need // count}
                        yield self._priced(parts, partial(self._of_packages, parts, able, count))
            case _:
                yield self._priced(parts, partial(self._first, parts, packages))

    def _priced(self, parts: Sequence[NodePart], heaviest: _Heaviest) -> tuple[_Chosen | None, bool]:
        """Find nodes that have all amounts, by prices for these; with None, whether that is certain."""
        amounts = self._supply.amounts_of([part.node for part in parts])
        amounts = [(of_parts, need) for of_parts, need in amounts if need]
        whole = prod([need for _, need in amounts])
        values = [[min(amount, need) * (whole // need) for amount in of_parts] for of_parts, need in amounts]
        prices = [1] * len(values)
        for _ in range(_MOST_ROUNDS if len(values) > 1 else 1):
            self._effort.spend(len(parts))
            weights: dict[NumaIndex, int] = {
                part.node: sum(
                    [price * of_parts[place] for price, of_parts in zip(prices, values, strict=True)]
                )
                for place, part in enumerate(parts)
            }
            chosen, most = heaviest(weights)
            if most < whole * sum(prices):
                return None, True
            nodes = [part.node for part in chosen[0]]
            if self._supply.memory_fits(nodes):
                return chosen, True
            for index, of_parts in enumerate(values):
                if sum([v for v, part in zip(of_parts, parts, strict=True) if part.node in nodes]) < whole:
                    prices[index] += 1 + prices[index] // 2
        return None, False

    def _first(
        self, parts: Sequence[NodePart], packages: int, weights: Mapping[NumaIndex, int]
    ) -> tuple[_Chosen, int]:
        """The heaviest NUMA nodes, as many as the VM has CPUs."""
        chosen = sorted(parts, key=lambda part: -weights[part.node])[: self._supply.need]
        return self._weighed(chosen, packages, weights)

    def _of_nodes(
        self,
        parts: Sequence[NodePart],
        units: Sequence[int],
        packages: int,
        count: int,
        weights: Mapping[NumaIndex, int],
    ) -> tuple[_Chosen, int]:
        """The heaviest `count` NUMA nodes that give equal shares."""
        low, over = divmod(self._supply.need, count)
        ordered = sorted(zip(parts, units, strict=True), key=lambda pair: -weights[pair[0].node])
        larger = [part for part, amount in ordered if amount > low][:over]
        taken = {part.node for part in larger}
        others = [part for part, amount in ordered if amount >= low and part.node not in taken]
        return self._weighed([*larger, *others[: count - over]], packages, weights)

    def _of_packages(
        self,
        parts: Sequence[NodePart],
        units: Mapping[int, int],
        count: int,
        weights: Mapping[NumaIndex, int],
    ) -> tuple[_Chosen, int]:
        """The heaviest NUMA nodes of which each gives a CPU to one of `count` packages with equal shares.

        Of too many sets of packages one is taken, with the weight that none has more than.
        """
        low, over = divmod(self._supply.need, count)
        parts = sorted(parts, key=lambda part: -weights[part.node])
        numbers = list(units)
        if comb(len(numbers), count) <= _MOST_PACKAGE_SETS:
            able = (
                chosen
                for chosen in combinations(numbers, count)
                if sum([units[package] > low for package in chosen]) >= over
            )
            found = [self._matched(parts, chosen, units, weights) for chosen in able]
            return max(found, key=lambda pair: pair[1])
        matching = Matching([units[package] for package in numbers], low, over)
        most = 0
        for number, part in enumerate(parts):
            if matching.size < self._supply.need and matching.add(number, self._homes(part, numbers)):
                most += weights[part.node]
        heavy = {
            package: (sum([weights[parts[number].node] for number in members]), units[package])
            for package, members in zip(numbers, matching.of_group, strict=True)
        }
        ordered = sorted(numbers, key=lambda package: heavy[package], reverse=True)
        larger = [package for package in ordered if units[package] > low][:over]
        others = [package for package in ordered if package not in larger]
        return self._matched(parts, [*larger, *others[: count - over]], units, weights)[0], most

    def _matched(
        self,
        parts: Sequence[NodePart],
        packages: Sequence[int],
        units: Mapping[int, int],
        weights: Mapping[NumaIndex, int],
    ) -> tuple[_Chosen, int]:
        """The heaviest NUMA nodes of which each gives a CPU to one of these packages; they come sorted."""
        low, over = divmod(self._supply.need, len(packages))
        matching = Matching([units[package] for package in packages], low, over)
        chosen = [
            part for number, part in enumerate(parts) if matching.add(number, self._homes(part, packages))
        ]
        return self._weighed(chosen, mask_of(packages), weights)

    def _homes(self, part: NodePart, packages: Sequence[int]) -> list[int]:
        """Which of the packages, by index, a NUMA node has units in."""
        of_part = self._supply.units_by_package(part)
        return [index for index, package in enumerate(packages) if of_part.get(package)]

    def _weighed(
        self, chosen: Sequence[NodePart], packages: int, weights: Mapping[NumaIndex, int]
    ) -> tuple[_Chosen, int]:
        used = mask_of_packages(chosen) & packages
        return (tuple(chosen), used), sum([weights[part.node] for part in chosen])
