"""Nodes of the cluster as they change, for commands with `--watch`; VMs are those of `vm_listing`.

First everything is yielded, then again and again what has changed since. Changes that follow each other
within a moment are yielded together. Misconfigured and Refused, such as for a missing right, are raised, and
an unavailable API server is waited for.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any, Generic, TypeVar

from kvplace.core.errors import Misconfigured, Refused
from kvplace.core.scalars import NodeName
from kvplace.kube.object_records import LedgerRecord, NodeRecord, TopologyRecord
from kvplace.kube.store import Store
from kvplace.kube.watches import EVERYTHING, LEDGERS, NODE_STATUSES, TOPOLOGIES, Selector, WatchClient
from kvplace.nodes.cluster_view import NodeView, node_view

K = TypeVar("K")

_LOOK_S = 0.2
"""How often a list that does not come is asked why."""


class _Changed(Generic[K]):
    """The keys that have changed since they were last taken."""

    def __init__(self) -> None:
        self._keys: dict[K, None] = {}
        self._any = asyncio.Event()

    def add(self, key: K) -> None:
        self._keys[key] = None
        self._any.set()

    async def take(self, gather_s: float = 0.0) -> tuple[K, ...]:
        """Wait for a change, then so long for further ones, and take them all."""
        await self._any.wait()
        if gather_s:
            await asyncio.sleep(gather_s)
        self._any.clear()
        taken = tuple(self._keys)
        self._keys.clear()
        return taken


async def watched_nodes(
    cluster: WatchClient, selector: Selector, *, gather_s: float = 0.0
) -> AsyncGenerator[tuple[bool, tuple[NodeView, ...]], None]:
    """Yield (True, all selected nodes), then (False, those that have changed), by name and with their status.

    Nodes that are gone are not yielded, unless something of them is left and all nodes are selected.
    """
    nodes, topologies, ledgers = Store(NODE_STATUSES, selector), Store(TOPOLOGIES), Store(LEDGERS)
    changed: _Changed[NodeName] = _Changed()

    def node_seen(before: NodeRecord | None, after: NodeRecord | None) -> None:
        either = after or before
        shown = [(node.cpu_map, node.status) for node in (before, after) if node is not None]
        if either is not None and (len(shown) == 1 or shown[0] != shown[1]):
            changed.add(either.name)

    def part_seen(
        before: TopologyRecord | LedgerRecord | None, after: TopologyRecord | LedgerRecord | None
    ) -> None:
        either = after or before
        if either is not None:
            changed.add(either.node)

    def views(names: tuple[NodeName, ...]) -> tuple[NodeView, ...]:
        found = []
        for name in sorted(names):
            node, described, ledger = nodes.get(name), topologies.get(name), ledgers.get(name)
            if node is not None or (selector == EVERYTHING and (described or ledger)):
                found.append(node_view(name, node, described, ledger))
        return tuple(found)

    async with _listed(cluster, nodes, topologies, ledgers):
        nodes.subscribe(node_seen)
        topologies.subscribe(part_seen)
        ledgers.subscribe(part_seen)
        everything = {*nodes.records, *topologies.records, *ledgers.records}
        if everything:
            await changed.take()
        yield True, views(tuple(everything))
        while True:
            yield False, views(await changed.take(gather_s))


@contextlib.asynccontextmanager
async def _listed(cluster: WatchClient, *stores: Store[Any, Any]) -> AsyncIterator[None]:
    """Keep stores up to date; enters when each has been listed."""
    watching = [asyncio.create_task(store.run(cluster)) for store in stores]
    try:
        for store in stores:
            await wait_for_list(store)
        yield
    finally:
        for task in watching:
            task.cancel()
        await asyncio.gather(*watching, return_exceptions=True)


async def wait_for_list(store: Store[Any, Any]) -> None:
    """Wait for the first list; raises what a person must fix before it can come."""
    synced = asyncio.create_task(store.wait_until_synced())
    try:
        while not synced.done():
            if isinstance(store.failure, Misconfigured | Refused):
                raise store.failure
            await asyncio.wait({synced}, timeout=_LOOK_S)
    finally:
        synced.cancel()
