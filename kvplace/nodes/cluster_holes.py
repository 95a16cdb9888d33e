"""What is free in the whole cluster, for metrics: totals over the holes of every node.

A node is looked at again when it has changed, in slices, so that thousands of changed nodes never hold the
event loop for long.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Mapping

from kvplace.core.holes import Domain, Holes, holes_of
from kvplace.core.scalars import NodeName
from kvplace.nodes.node_cache import NodeCache
from kvplace.nodes.node_machine import Unusable

SLICE_S = 0.004
"""Longest stretch of the event loop that one refresh takes before others have their turn."""


class ClusterHoles:
    """Totals over the nodes, as of the last `refresh`."""

    def __init__(self, cache: NodeCache) -> None:
        self._cache = cache
        self._by_node: dict[NodeName, Holes] = {}
        self._changed: dict[NodeName, None] = dict.fromkeys(cache.nodes.records)
        self._sizes: Mapping[Domain, tuple[Counter[int], Counter[int]]] = {
            domain: (Counter(), Counter()) for domain in Domain
        }
        """How many nodes have a largest hole of so many CPUs, and of so many whole cores."""
        self._possible = dict.fromkeys(Domain, 0)
        self.allocatable = 0
        self.free = 0
        cache.subscribe(self._node_changed)

    async def refresh(self) -> None:
        """Look again at every node that has changed."""
        ends = time.perf_counter() + SLICE_S
        while self._changed:
            node, _ = self._changed.popitem()
            self._look(node)
            if time.perf_counter() >= ends:
                await asyncio.sleep(0)
                ends = time.perf_counter() + SLICE_S

    @property
    def usable_nodes(self) -> int:
        """Nodes on which something can be placed, full ones included."""
        return len(self._by_node)

    def largest_cpus(self, domain: Domain) -> int:
        """Return the CPUs of the largest hole of any node."""
        return max(self._sizes[domain][0], default=0)

    def largest_cores(self, domain: Domain) -> int:
        """Return the whole free cores of the domain that has most of them."""
        return max(self._sizes[domain][1], default=0)

    def nodes_with(self, domain: Domain, cpus: int) -> int:
        """Count the nodes whose largest hole has so many CPUs or more."""
        return sum(count for size, count in self._sizes[domain][0].items() if size >= cpus)

    def fragmentation(self, domain: Domain) -> float:
        """Return how much of the holes that the free CPUs could form is missing, from 0 to 1.

        On each node the largest hole is compared with the one that as many free CPUs could form there: 0 on
        an empty machine, on a full one, and where everything that is free lies together.
        """
        possible = self._possible[domain]
        found = sum(size * count for size, count in self._sizes[domain][0].items())
        return 1 - found / possible if possible else 0.0

    def _node_changed(self, node: NodeName) -> None:
        if node in self._by_node or node in self._cache.nodes.records:
            self._changed[node] = None
        else:  # it came and went between two looks
            self._changed.pop(node, None)

    def _look(self, node: NodeName) -> None:
        before = self._by_node.pop(node, None)
        if before is not None:
            self._count(before, -1)
        snapshot = self._cache.snapshot(node)
        if isinstance(snapshot, Unusable):
            return
        machine = snapshot.machine
        found = holes_of(machine.topology, machine.allocatable, snapshot.free.cpus)
        self._by_node[node] = found
        self._count(found, 1)

    def _count(self, holes: Holes, sign: int) -> None:
        self.allocatable += sign * holes.allocatable
        self.free += sign * holes.free
        for domain, hole in holes.largest.items():
            self._possible[domain] += sign * hole.possible
            for sizes, size in zip(self._sizes[domain], (hole.cpus, hole.cores), strict=True):
                sizes[size] += sign
                if not sizes[size]:
                    del sizes[size]
