"""Free CPUs of the whole cluster, for metrics: totals over the free blocks of every node.

A node is checked again when it has changed, in turns, so that thousands of changed nodes never hold the
event loop for long.
"""

from __future__ import annotations

from kvplace.core.free_blocks import FreeBlocks, free_blocks_of
from kvplace.core.scalars import NodeName
from kvplace.kube.concurrency import Turns
from kvplace.nodes.free_block_totals import FreeBlockTotals
from kvplace.nodes.node_cache import NodeCache
from kvplace.nodes.node_machine import Unusable

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
