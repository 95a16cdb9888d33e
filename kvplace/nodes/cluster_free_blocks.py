"""Free CPUs of the whole cluster, for metrics: totals over the free blocks of every node.

A node is checked again when it has changed, in turns, so that thousands of changed nodes never hold the
event loop for long.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from kvplace.core.free_resources import Domain, FreeBlocks, free_blocks_of
from kvplace.core.scalars import NodeName
from kvplace.kube.concurrency import Turns
from kvplace.nodes.node_cache import NodeCache
from kvplace.nodes.node_machine import Unusable


class FreeBlockTotals:
    """Sums that nodes can be added to and taken out of."""

    def __init__(self, nodes: Iterable[FreeBlocks] = ()) -> None:
        self._sizes: Mapping[Domain, tuple[Counter[int], Counter[int]]] = {
            domain: (Counter(), Counter()) for domain in Domain
        }
        """How many nodes have a largest free block of so many CPUs, and of so many whole cores."""
        self._possible = dict.fromkeys(Domain, 0)
        self.nodes = 0
        """Nodes where something can be placed, full ones included."""
        self.allocatable = 0
        self.free = 0
        for free_blocks in nodes:
            self.add(free_blocks)

    def add(self, free_blocks: FreeBlocks) -> None:
        """Count a node."""
        self._count(free_blocks, 1)

    def remove(self, free_blocks: FreeBlocks) -> None:
        """Take out a node that was counted."""
        self._count(free_blocks, -1)

    def largest_cpus(self, domain: Domain) -> int:
        """Return the CPUs of the largest free block of any node."""
        return max(self._sizes[domain][0], default=0)

    def largest_cores(self, domain: Domain) -> int:
        """Return the whole free cores of the domain that has most of them."""
        return max(self._sizes[domain][1], default=0)

    def nodes_with(self, domain: Domain, cpus: int) -> int:
        """Count the nodes with a free block of so many CPUs or more."""
        return sum(count for size, count in self._sizes[domain][0].items() if size >= cpus)

    def fragmentation(self, domain: Domain) -> float:
        """Return how much of the free blocks that the free CPUs could form is missing, from 0 to 1.

        On each node the largest free block is compared with the one that as many free CPUs could form there:
        0 on an empty machine, on a full one, and where everything that is free lies together.
        """
        possible = self._possible[domain]
        found = sum(size * count for size, count in self._sizes[domain][0].items())
        return 1 - found / possible if possible else 0.0

    def _count(self, free_blocks: FreeBlocks, sign: int) -> None:
        self.nodes += sign
        self.allocatable += sign * free_blocks.allocatable
        self.free += sign * free_blocks.free
        for domain, block in free_blocks.largest.items():
            self._possible[domain] += sign * block.possible
            for sizes, size in zip(self._sizes[domain], (block.cpus, block.cores), strict=True):
                sizes[size] += sign
                if not sizes[size]:
                    del sizes[size]


CHECK_STEPS = 100
"""Steps of checking a node."""


class ClusterFreeBlocks:
    """Totals over the nodes, as of the last `refresh`."""

    def __init__(self, cache: NodeCache) -> None:
        self.totals = FreeBlockTotals()
        self._cache = cache
        self._by_node: dict[NodeName, FreeBlocks] = {}
        self._changed: dict[NodeName, None] = dict.fromkeys(cache.nodes.records)
        cache.subscribe(self._node_changed)

    async def refresh(self) -> None:
        """Check again every node that has changed."""
        await Turns().drain(self._changed, self._look, CHECK_STEPS)

    def of(self, node: NodeName) -> FreeBlocks | None:
        """Return the free blocks of one node; None where nothing can be placed, or before the first count."""
        return self._by_node.get(node)

    def _node_changed(self, node: NodeName) -> None:
        if node in self._by_node or node in self._cache.nodes.records:
            self._changed[node] = None
        else:  # it came and went between two checks
            self._changed.pop(node, None)

    def _look(self, node: NodeName) -> None:
        before = self._by_node.pop(node, None)
        if before is not None:
            self.totals.remove(before)
        snapshot = self._cache.snapshot(node)
        if isinstance(snapshot, Unusable):
            return
        machine = snapshot.machine
        found = free_blocks_of(machine.topology, machine.allocatable, snapshot.free.cpus)
        self._by_node[node] = found
        self.totals.add(found)
