"""A view of the cluster: read once, or followed as nodes change, for commands with `--watch`.

The lists of the four kinds are read page by page and at the same time. Of a watched cluster, everything is
yielded first, then again and again what has changed since. Changes that follow each other within a moment are
yielded together. Misconfigured and Refused, such as for a missing right, are raised, and an unavailable API
server is waited for. `vm_listing` watches VMs.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import replace
from typing import Any, Generic, TypeVar

from kvplace.core.errors import Misconfigured, Refused
from kvplace.core.scalars import NodeName
from kvplace.kube.concurrency import together
from kvplace.kube.object_records import LedgerRecord, NodeRecord, TopologyRecord
from kvplace.kube.store import Store
from kvplace.kube.watches import (
    EVERYTHING,
    LEDGERS,
    NAME_FIELD,
    NODE_FIELD,
    NODE_STATUSES,
    NODES,
    PLACED_PODS,
    PODS,
    TOPOLOGIES,
    Kind,
    ListClient,
    Selector,
    WatchClient,
)
from kvplace.nodes.cluster_view import ClusterView, NodeView, cluster_view, node_view


async def read_cluster(
    cluster: ListClient,
    *,
    nodes: Selector = EVERYTHING,
    pods: Selector | None = PLACED_PODS,
    kind: Kind[NodeName, NodeRecord] = NODES,
) -> ClusterView:
    """Read the selected nodes, and the selected VMs of all nodes; None for no VMs.

    With `kind` NODE_STATUSES nodes have their status.

    Needs rights on the whole cluster. VMs are most of what is read, and ledgers name them, too.
    """
    found, topologies, ledgers, vms = await together(
        cluster.read_all(kind, nodes),
        cluster.read_all(TOPOLOGIES),
        cluster.read_all(LEDGERS),
        _nothing() if pods is None else cluster.read_all(PODS, pods),
    )
    if nodes != EVERYTHING:
        names = {node.name for node in found}
        topologies = tuple(each for each in topologies if each.node in names)
        ledgers = tuple(each for each in ledgers if each.node in names)
    return cluster_view(found, topologies, ledgers, vms)


async def read_node(
    cluster: ListClient,
    name: NodeName,
    *,
    pods: bool = True,
    kind: Kind[NodeName, NodeRecord] = NODES,
) -> ClusterView:
    """Read one node and the VMs on it; the view is empty where nothing of it is left."""
    selector = Selector(fields={NAME_FIELD: name})
    nodes, topologies, ledgers, vms = await together(
        cluster.read_all(kind, selector),
        cluster.read_all(TOPOLOGIES, selector),
        cluster.read_all(LEDGERS, selector),
        cluster.read_all(PODS, replace(PLACED_PODS, fields={NODE_FIELD: name})) if pods else _nothing(),
    )
    return cluster_view(nodes, topologies, ledgers, vms)


async def _nothing() -> tuple[()]:
    return ()


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
    """Yield (True, all selected nodes), then (False, changed nodes), by name and with their status.

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
    """Wait for the first list; raises the error that a person must fix before it can come."""
    synced = asyncio.create_task(store.wait_until_synced())
    try:
        while not synced.done():
            if isinstance(store.failure, Misconfigured | Refused):
                raise store.failure
            await asyncio.wait({synced}, timeout=_LOOK_S)
    finally:
        synced.cancel()
