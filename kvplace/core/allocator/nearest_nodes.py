"""The nearest sets of NUMA nodes with enough resources for a VM, by branch and bound.

The nearest of many nodes are a densest subgraph, which is NP-hard. Sets grow node by node, depth first. A
branch is cut off when it can no longer have enough resources, or be as near as the best set so far. So the
best set is found as long as the budget lasts.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Generic, TypeVar

from kvplace.core.allocator.available_units import AvailableUnits
from kvplace.core.allocator.layout import NodePart
from kvplace.core.allocator.set_cover import fewest
from kvplace.core.scalars import NumaIndex
from kvplace.core.search_budget import SearchBudget

_MOST_EQUALS = 1_024
"""Equally near sets that are kept: reached where more than 12 NUMA nodes have unequal free resources only."""

Distances = tuple[int, int]
"""The largest and the summed distance between the NUMA nodes of a set."""

SizedPart = tuple[int, NodePart]
"""A part of a NUMA node, after its units."""

Found = TypeVar("Found")
_Amount = tuple[Sequence[int], int]
"""The amount of one resource in each part, and the amount that a set must have."""


class NodeSets:
    """The candidates, parts of NUMA nodes, the largest first, with their resources."""

    def __init__(
        self,
        available: AvailableUnits,
        parts: Iterable[SizedPart],
        place_of: Callable[[NodePart], tuple[int, ...]],
    ) -> None:
        """Parts with equal places, as `place_of` gives them, are alike if they have as much."""
        ordered = sorted(parts, key=_largest_first)
        kinds: Sequence[Hashable] = range(len(ordered))
        if not available.uses:
            of_kind: dict[Hashable, list[SizedPart]] = {}
            for sized in ordered:
                kind = (place_of(sized[1]), *_kind(available, sized[1]))
                of_kind.setdefault(kind, []).append(sized)
            ordered = [sized for same in of_kind.values() for sized in same]
            kinds = [kind for kind, same in of_kind.items() for _ in same]
        self.units = [units for units, _ in ordered]
        self._parts = [part for _, part in ordered]
        nodes = [part.node for part in self._parts]
        self._need = available.need
        self._budget = available.budget
        self._budget.spend(len(nodes) ** 2 // 4)
        self._amounts = available.amounts_of(nodes)
        self.like_last = [index > 0 and kinds[index - 1] == kind for index, kind in enumerate(kinds)]
        """Whether a part is like the one before: of like ones only the first are tried."""
        distances = available.layout.distances
        self.rows = [[distances[node][other] if other != node else 0 for other in nodes] for node in nodes]
        self.node_bits = [1 << node for node in nodes]
        self.steps = sorted({far for place, row in enumerate(self.rows) for far in row[place + 1 :]})
        """The distances that there are."""
        self.varied = len(self.steps) > 1

    @property
    def counts(self) -> range:
        """How many parts a set may have, from a lower bound on; empty when all do not suffice."""
        needs = [(self.units, self._need), *self._amounts]
        return range(max(fewest(amounts, need) for amounts, need in needs), len(self._parts) + 1)

    def members(self, chosen: Iterable[int]) -> tuple[NodePart, ...]:
        """The chosen parts in the machine's order."""
        return tuple(sorted([self._parts[index] for index in chosen], key=lambda part: part.node))

    def nearest(
        self,
        count: int,
        accepts: Callable[[tuple[NodePart, ...]], Iterable[Found]],
        *,
        nodes: int,
        beside: Sequence[frozenset[NumaIndex]] = (),
        within: tuple[int, ...] | None = None,
        share: int = 0,
        larger: int = 0,
        socket_share: int = 0,
    ) -> tuple[Distances, list[Found]] | None:
        """Find the nearest sets of so many parts in so many nodes that are accepted; None without any.

        `accepts` turns a set that has the units and the memory into results. Sets farther apart than `within`
        do not count. Of each set of NUMA nodes in `beside` one has units. Every part of a set has `share`
        units at least, and `larger` of them one more; the parts in each of the sockets have `socket_share`
        together.
        """
        candidates = [index for index, units in enumerate(self.units) if units >= share]
        if len(candidates) < count:
            return None
        amounts: list[_Amount] = [*self._amounts]
        if larger:
            amounts.append(([int(units > share) for units in self.units], larger))
        for near in beside:
            there = [
                int(units > 0 and part.node in near)
                for units, part in zip(self.units, self._parts, strict=True)
            ]
            amounts.append((there, 1))
        for socket in {part.socket for part in self._parts} if socket_share else ():
            inside = [
                units * (part.socket == socket) for units, part in zip(self.units, self._parts, strict=True)
            ]
            amounts.append((inside, socket_share))
        for of_parts, need in [(self.units, self._need), *amounts]:
            if sum(sorted([of_parts[index] for index in candidates], reverse=True)[:count]) < need:
                return None
        nowhere = [0] * len(self.units)
        self._budget.spend(len(candidates) ** 2 // 4)
        least = self._least_step(candidates, count)
        for far in self.steps if count > 1 else (0,):
            if far < least:
                continue
            most = far * count * count
            if within is not None:
                if far > within[0]:
                    break
                if far == within[0]:
                    most = within[1]
            alike = 0 if self.varied else far * count * (count - 1) // 2
            search = _Growth(self, amounts, accepts, far, most, nodes if nodes < count else 0, self._budget)
            search.grow(candidates, (), count, self._need, alike, nowhere)
            if search.found:
                return (far, search.total), search.found
        return None

    def _least_step(self, candidates: Sequence[int], count: int) -> int:
        """A lower bound on the largest distance in any set of so many."""
        if count == 1 or not self.varied:
            return 0
        reaches = []
        for one in candidates:
            row = self.rows[one]
            reaches.append(sorted([row[other] for other in candidates if other != one])[count - 2])
        return sorted(reaches)[count - 1]


class _Growth(Generic[Found]):
    """A depth-first search for sets without two nodes farther apart than `far`."""

    def __init__(
        self,
        parts: NodeSets,
        amounts: Sequence[_Amount],
        accepts: Callable[[tuple[NodePart, ...]], Iterable[Found]],
        far: int,
        most: int,
        nodes: int,
        budget: SearchBudget,
    ) -> None:
        self._budget = budget
        self._nodes = nodes
        """NUMA nodes of a set; 0 where each part is another one."""
        self._parts = parts
        self._amounts = amounts
        self._accepts = accepts
        self._far = far
        self._most = most
        """Sets with a larger sum of distances are cut off."""
        self.found: list[Found] = []
        self.total = most
        """The summed distance of each set with a result."""

    def grow(
        self,
        candidates: Sequence[int],
        chosen: tuple[int, ...],
        left: int,
        missing: int,
        total: int,
        sums: Sequence[int],
    ) -> None:
        """Add `left` of the candidates to the chosen parts, in every way that is not cut off.

        `missing` units must come with them. `total` is the summed distance between the chosen parts, `sums`
        the distance from each part to all of them.
        """
        parts = self._parts
        units, like_last = parts.units, parts.like_last
        for place in range(len(candidates) - left + 1):
            self._budget.spend(1 + (len(candidates) - place) // 4)
            if self._budget.is_spent:
                return
            if sum([units[index] for index in candidates[place : place + left]]) < missing:
                return
            index = candidates[place]
            if like_last[index] and (not chosen or chosen[-1] != index - 1):
                continue
            now = total + sums[index]
            taken = (*chosen, index)
            if self._nodes and not self._can_have_nodes(taken, left - 1):
                continue
            if left == 1:
                if now <= self._most and self._suffice(taken, (), 0):
                    self._accept(taken, now)
                continue
            row = parts.rows[index]
            rest, more = candidates[place + 1 :], sums
            if parts.varied:
                rest = [other for other in rest if row[other] <= self._far]
                more = [one + other for one, other in zip(sums, row, strict=True)]
                nearest = sorted([more[other] for other in rest])[: left - 1]
                between = parts.steps[0] * (left - 1) * (left - 2) // 2
                if len(nearest) < left - 1 or now + sum(nearest) + between > self._most:
                    continue
            if self._suffice(taken, rest, left - 1):
                self.grow(rest, taken, left - 1, missing - units[index], now, more)

    def _can_have_nodes(self, chosen: Sequence[int], left: int) -> bool:
        """Whether a set with the chosen parts and so many more can have the right number of NUMA nodes."""
        nodes = 0
        for index in chosen:
            nodes |= self._parts.node_bits[index]
        return nodes.bit_count() <= self._nodes <= nodes.bit_count() + left

    def _suffice(self, chosen: Sequence[int], rest: Sequence[int], left: int) -> bool:
        """Whether the chosen parts and the `left` largest of the rest have enough of all but units."""
        for amounts, need in self._amounts:
            have = sum([amounts[index] for index in chosen])
            if have < need:
                largest = sorted([amounts[index] for index in rest], reverse=True)
                if have + sum(largest[:left]) < need:
                    return False
        return True

    def _accept(self, chosen: Sequence[int], total: int) -> None:
        for found in self._accepts(self._parts.members(chosen)):
            if total < self.total:
                self.total = self._most = total
                self.found.clear()
            self.found.append(found)
            if len(self.found) >= _MOST_EQUALS:
                self._most = total - 1
                return


def _largest_first(sized: SizedPart) -> int:
    return -sized[0]


def _kind(available: AvailableUnits, part: NodePart) -> tuple[Hashable, ...]:
    """Describe the resources of a part: parts of one kind and place differ in ids alone."""
    free = (available.free.cpus & part.cpus).bit_count()
    return (
        available.count(part).kind,
        free,
        available.devices_at(part.node),
        *available.amounts_at(part.node),
    )
