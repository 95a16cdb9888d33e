"""A view of the cluster that follows its watches, and tells its readers what has changed.

The stores belong to whoever runs them: `serve` has them already, a command runs its own
(`running_watched_view`). Only the views of what has changed are made anew, and only when somebody reads.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from kvplace.core.errors import Misconfigured, Refused
from kvplace.core.scalars import NodeName, PodUid
from kvplace.kube.records import LedgerRecord, NodeRecord, PodRecord, TopologyRecord
from kvplace.kube.store import Store
from kvplace.kube.watches import (
    EVERYTHING,
    LEDGERS,
    NODES,
    PLACED_PODS,
    PODS,
    TOPOLOGIES,
    Kind,
    Selector,
    WatchClient,
)
from kvplace.nodes.cluster_view import ClusterView, NodeView, VmView, node_view, vm_views

_LOOK_S = 0.2
"""How often a list that does not come is asked why."""


@dataclass(frozen=True)
class Stores:
    """The watched kinds that a view is made of."""

    nodes: Store[NodeName, NodeRecord]
    topologies: Store[NodeName, TopologyRecord]
    ledgers: Store[NodeName, LedgerRecord]
    pods: Store[PodUid, PodRecord] | None = None
    """None for a view without VMs."""
    selected: bool = False
    """Whether `nodes` are only some: others are then left out, though they have a machine or a ledger."""

    @property
    def all(self) -> tuple[Store[Any, Any], ...]:
        nodes = (self.nodes, self.topologies, self.ledgers)
        return nodes if self.pods is None else (*nodes, self.pods)


@dataclass(frozen=True, slots=True)
class Changed:
    """The nodes and VMs that are not as they were, gone ones included.

    A changed claim is a change of the node, whose ledger it is in.
    """

    nodes: frozenset[NodeName]
    vms: frozenset[PodUid]


class Changes:
    """What has changed since a reader asked last."""

    def __init__(self) -> None:
        self._nodes: set[NodeName] = set()
        self._vms: set[PodUid] = set()
        self._any = asyncio.Event()

    async def next(self, gather_s: float = 0.0) -> Changed:
        """Wait for a change, then so long for those that follow it, and return them all."""
        await self._any.wait()
        if gather_s:
            await asyncio.sleep(gather_s)
        self._any.clear()
        changed = Changed(frozenset(self._nodes), frozenset(self._vms))
        self._nodes.clear()
        self._vms.clear()
        return changed

    def add(self, *, node: NodeName | None = None, vm: PodUid | None = None) -> None:
        """Take note of a change."""
        if node:
            self._nodes.add(node)
        if vm is not None:
            self._vms.add(vm)
        self._any.set()


class WatchedView:
    """The view of what the stores hold at the moment."""

    def __init__(self, stores: Stores) -> None:
        self._stores = stores
        self._nodes: dict[NodeName, NodeView] = {}
        self._view: ClusterView | None = ClusterView({}, {})
        self._vms: Mapping[PodUid, VmView] = {}
        self._readers: set[Changes] = set()
        stores.nodes.subscribe(self._node_seen)
        stores.topologies.subscribe(self._topology_seen)
        stores.ledgers.subscribe(self._ledger_seen)
        if stores.pods is not None:
            stores.pods.subscribe(self._pod_seen)

    @property
    def has_synced(self) -> bool:
        """Whether every store has seen a complete list; before that the view is of a part."""
        return all(store.has_synced for store in self._stores.all)

    @property
    def view(self) -> ClusterView:
        """Everything; the same value until something changes, and the same parts where nothing did."""
        if self._view is None:
            pods = () if self._stores.pods is None else self._stores.pods.records.values()
            self._vms = vm_views(pods, self._nodes, known=self._vms)
            self._view = ClusterView({name: self._nodes[name] for name in sorted(self._nodes)}, self._vms)
        return self._view

    @contextlib.contextmanager
    def changes(self) -> Iterator[Changes]:
        """Collect for one reader what changes from now on."""
        reader = Changes()
        self._readers.add(reader)
        try:
            yield reader
        finally:
            self._readers.discard(reader)

    def _node_seen(self, before: NodeRecord | None, after: NodeRecord | None) -> None:
        either = after or before
        if either is None or (
            before and after and (before.cpu_map, before.status) == (after.cpu_map, after.status)
        ):
            return
        self._describe(either.name)

    def _topology_seen(self, before: TopologyRecord | None, after: TopologyRecord | None) -> None:
        either = after or before
        if either is not None:
            self._describe(either.node)

    def _ledger_seen(self, before: LedgerRecord | None, after: LedgerRecord | None) -> None:
        either = after or before
        if either is None:
            return
        known = self._nodes.get(either.node)
        if known is None or after is None:
            self._describe(either.node)
        else:
            self._nodes[either.node] = replace(known, ledger_record=after)
            self._tell(node=either.node)

    def _pod_seen(self, before: PodRecord | None, after: PodRecord | None) -> None:
        either = after or before
        if either is not None:
            self._tell(vm=either.uid)

    def _describe(self, name: NodeName) -> None:
        stores = self._stores
        parts = (stores.nodes.get(name), stores.topologies.get(name), stores.ledgers.get(name))
        if parts[0] is not None or (any(parts) and not stores.selected):
            self._nodes[name] = node_view(name, *parts)
        else:
            self._nodes.pop(name, None)
        self._tell(node=name)

    def _tell(self, *, node: NodeName | None = None, vm: PodUid | None = None) -> None:
        self._view = None
        for reader in self._readers:
            reader.add(node=node, vm=vm)


@contextlib.asynccontextmanager
async def running_watched_view(
    cluster: WatchClient,
    *,
    nodes: Selector = EVERYTHING,
    pods: Selector | None = PLACED_PODS,
    kind: Kind[NodeName, NodeRecord] = NODES,
) -> AsyncIterator[WatchedView]:
    """Watch nodes and the selected VMs, None for no VMs; enters when everything has been listed.

    With `kind` NODE_STATUSES nodes have their status.

    Raises Misconfigured and Refused, such as for a missing right; waits for an API server that is away.
    """
    stores = Stores(
        Store(kind, nodes),
        Store(TOPOLOGIES),
        Store(LEDGERS),
        None if pods is None else Store(PODS, pods),
        selected=nodes != EVERYTHING,
    )
    view = WatchedView(stores)
    watching = [asyncio.create_task(store.run(cluster)) for store in stores.all]
    try:
        for store in stores.all:
            await _listed(store)
        yield view
    finally:
        for task in watching:
            task.cancel()
        await asyncio.gather(*watching, return_exceptions=True)


async def _listed(store: Store[Any, Any]) -> None:
    """Wait for the first list; raises what a person must mend before it can come."""
    synced = asyncio.create_task(store.wait_until_synced())
    try:
        while not synced.done():
            if isinstance(store.failure, Misconfigured | Refused):
                raise store.failure
            await asyncio.wait({synced}, timeout=_LOOK_S)
    finally:
        synced.cancel()


async def watched_vms(
    cluster: WatchClient, selector: Selector, *, gather_s: float = 0.0
) -> AsyncIterator[tuple[bool, tuple[VmView, ...]]]:
    """Yield (True, all selected VMs), then (False, those that have changed) without end.

    The right to watch pods suffices, so the VMs have no claims. One that is gone is yielded as it was last.
    """
    store = Store(PODS, selector)
    changed: dict[PodUid, PodRecord] = {}
    waking = asyncio.Event()

    def seen(before: PodRecord | None, after: PodRecord | None) -> None:
        either = after or before
        if either is not None:
            changed[either.uid] = either
            waking.set()

    watching = asyncio.create_task(store.run(cluster))
    try:
        await _listed(store)
        store.subscribe(seen)
        changed.clear()
        waking.clear()
        yield True, tuple(vm_views(store.records.values(), {}).values())
        while True:
            await waking.wait()
            await asyncio.sleep(gather_s)
            waking.clear()
            now = tuple(vm_views(changed.values(), {}).values())
            changed.clear()
            yield False, now
    finally:
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
