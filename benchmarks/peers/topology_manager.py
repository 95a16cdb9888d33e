"""The kubelet's Topology Manager: hints of the CPU and device managers, their merge, and the devices taken.

Every provider offers sets of NUMA nodes that have enough of its resource, and prefers the ones with as few
nodes as an empty machine would need. Of all combinations of one set of each provider, the intersections are
compared: preferred ones first, then the narrowest, then the lowest ids. Policy `single-numa-node` admits one
node alone, `restricted` what is preferred, `best-effort` everything. `none` asks no provider.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import combinations, product
from random import Random

from kvplace.core.scalars import NumaId
from kvplace.core.topology import Topology

NodeCounts = Mapping[NumaId, int]
"""How much of a resource there is, by NUMA node."""


@dataclass(frozen=True, slots=True)
class Hint:
    """NUMA nodes as a bit mask, None for any; whether they are as few as they can be."""

    nodes: int | None
    preferred: bool


Amounts = tuple[tuple[int, int, int], ...]
"""(NUMA node, all, free), ascending."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """A resource in the eyes of its provider, and how much of it a container requests."""

    amounts: Amounts
    count: int


def amounts_of(total: NodeCounts, free: NodeCounts) -> Amounts:
    """Put the counts of a resource together."""
    return tuple((node, total[node], free.get(node, 0)) for node in sorted(total))


def cpus_wanted(topology: Topology, free: int, count: int) -> Wanted:
    """The static CPU manager's view: CPUs that are reserved count as its own, and are never free."""
    nodes = [node for node in topology.numa_nodes if node.cpus]
    return Wanted(
        tuple((node.id, node.cpus.bit_count(), (node.cpus & free).bit_count()) for node in nodes), count
    )


@lru_cache(maxsize=1 << 16)
def hints(wanted: Wanted) -> tuple[Hint, ...]:
    """Offer every set of NUMA nodes with enough that is free."""
    fewest = len(wanted.amounts)
    enough: list[tuple[int, int]] = []
    for width in range(1, len(wanted.amounts) + 1):
        for group in combinations(wanted.amounts, width):
            if sum(total for _, total, _ in group) >= wanted.count:
                fewest = min(fewest, width)
            if sum(free for _, _, free in group) >= wanted.count:
                enough.append((sum(1 << node for node, _, _ in group), width))
    return tuple(Hint(nodes, width == fewest) for nodes, width in enough)


@lru_cache(maxsize=1 << 16)
def admitted(policy: str, every: int, wanted: tuple[Wanted, ...]) -> Hint | None:
    """Merge the hints for one container; None if the pod fails with `TopologyAffinityError`.

    `every` has all NUMA nodes of the machine.
    """
    if policy == "none":
        return Hint(None, preferred=True)
    offered: list[Sequence[Hint]] = [hints(one) or (Hint(None, preferred=False),) for one in wanted]
    if policy == "single-numa-node":
        offered = [
            [one for one in some if one.preferred and (one.nodes is None or one.nodes.bit_count() == 1)]
            for some in offered
        ]
    best = _merged(every, offered)
    return None if policy in ("restricted", "single-numa-node") and not best.preferred else best


def _merged(every: int, offered: Sequence[Sequence[Hint]]) -> Hint:
    narrowest = (min((_width(one) for one in some if one.nodes is not None), default=0) for some in offered)
    widest = max(narrowest, default=0)
    best: Hint | None = None
    for some in product(*offered):
        nodes = every
        for one in some:
            nodes &= every if one.nodes is None else one.nodes
        named = {one.nodes for one in some if one.nodes is not None}
        merged = Hint(nodes, len(named) <= 1 and all(one.preferred for one in some))
        if nodes and (best is None or _key(merged, widest) < _key(best, widest)):
            best = merged
    return best or Hint(every, preferred=False)


def _key(hint: Hint, widest: int) -> tuple[bool, int, int, int]:
    """The smaller the better; sets that are not preferred should be as wide as the widest provider needs."""
    width, nodes = _width(hint), hint.nodes or 0
    if hint.preferred:
        return (False, 0, width, nodes)
    # At most as wide as `widest`, then as near to it as can be; wider ones come last.
    return (True, int(width > widest), width if width > widest else -width, nodes)


def _width(hint: Hint) -> int:
    return (hint.nodes or 0).bit_count()


def take_devices(
    free: NodeCounts, count: int, nodes: Iterable[int] | None, random: Random
) -> dict[NumaId, int] | None:
    """Take devices of one resource: of the hint's NUMA nodes first, else any; None if too few are free.

    Inside each group the plugin has no preference, and the kubelet takes them in no order.
    """
    if sum(free.values()) < count:
        return None
    inside = set(free) if nodes is None else {NumaId(node) for node in nodes}
    taken: dict[NumaId, int] = {}
    for group in (inside, set(free) - inside):
        every = [node for node in sorted(group & set(free)) for _ in range(free[node])]
        for node in random.sample(every, min(len(every), count - sum(taken.values()))):
            taken[node] = taken.get(node, 0) + 1
    return taken
