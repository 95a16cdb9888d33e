"""Equal shares: whether groups can give them, and which NUMA node gives its CPU in which group.

Where NUMA nodes and packages cross, a node that the VM needs for its memory may give its CPU in any of
several groups. That is a bipartite matching of nodes to groups, whose capacity is the group's share; the
larger shares are one more place, shared by all groups. The nodes that can be matched together are the
independent sets of a matroid: adding them one by one, the heaviest first, gives the heaviest set.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from itertools import islice, product

from kvplace.core.allocator.layout import Segment

_MOST_PLANS = 64
"""Ways to match NUMA nodes to groups of which the best for L3 groups and cores is taken."""


def shares_exist(units: Sequence[int], count: int, need: int) -> bool:
    """Whether `count` of the groups, which have so many units, can give equal shares but for one unit."""
    low, over = divmod(need, count)
    ordered = sorted(units, reverse=True)
    return ordered[count - 1] >= low and (not over or ordered[over - 1] > low)


class Matching:
    """Matches NUMA nodes to the groups that they have units in."""

    def __init__(self, units: Sequence[int], low: int, over: int) -> None:
        """Groups have so many units; `over` of their shares are one larger than `low`."""
        self.low, self.over = low, over
        self._may_be_larger = [amount > self.low for amount in units]
        self.of_group: list[list[int]] = [[] for _ in units]
        self._homes: dict[int, Sequence[int]] = {}

    @property
    def size(self) -> int:
        """How many NUMA nodes are matched."""
        return sum(map(len, self.of_group))

    def add(self, node: int, homes: Sequence[int]) -> bool:
        """Match one more node to one of its groups, if need be after others move (an augmenting path)."""
        self._homes[node] = homes
        arrived: dict[int, tuple[int, int] | None] = dict.fromkeys(homes)
        """Groups that can be reached: by which node's move and from where; -1 gives up a larger share."""
        queue = deque(homes)
        larger = sum([len(members) > self.low for members in self.of_group])
        while queue:
            group = queue.popleft()
            load = len(self.of_group[group])
            may_grow = load == self.low and self._may_be_larger[group]
            if load < self.low or (may_grow and larger < self.over):
                self._move(node, group, arrived)
                return True
            others = [(member, other) for member in self.of_group[group] for other in self._homes[member]]
            if may_grow:
                others += [(-1, place) for place, of in enumerate(self.of_group) if len(of) > self.low]
            for member, other in others:
                if other not in arrived:
                    arrived[other] = (member, group)
                    queue.append(other)
        return False

    def _move(self, node: int, group: int, arrived: dict[int, tuple[int, int] | None]) -> None:
        while (step := arrived[group]) is not None:
            member, source = step
            if member >= 0:
                self.of_group[source].remove(member)
                self.of_group[group].append(member)
            group = source
        self.of_group[group].append(node)


def all_give(units: Sequence[int], homes: Sequence[Sequence[int]], need: int) -> Matching | None:
    """Match every node to a group where groups of so many units give equal shares; None if that cannot be."""
    if not shares_exist(units, len(units), need):
        return None
    matching = Matching(units, *divmod(need, len(units)))
    return matching if all(matching.add(node, of_node) for node, of_node in enumerate(homes)) else None


def required_plans(
    units: Sequence[int], nodes: Sequence[int], groups: Sequence[Sequence[Segment]], need: int
) -> Iterator[list[list[int]]]:
    """Yield ways in which every NUMA node, given by its CPUs, gives one of them to a group of segments.

    A way says for each group the CPUs of which nodes must give one there. There is one way where levels do
    not cross. The first one leads to equal shares if any does.
    """
    homes = [
        [index for index, segments in enumerate(groups) if any(segment.cpus & cpus for segment in segments)]
        for cpus in nodes
    ]
    matching = all_give(units, homes, need)
    if matching is None:
        return
    yield [[nodes[node] for node in sorted(members)] for members in matching.of_group]
    for chosen in islice(product(*homes), _MOST_PLANS):
        plan: list[list[int]] = [[] for _ in groups]
        for cpus, home in zip(nodes, chosen, strict=True):
            plan[home].append(cpus)
        yield plan
