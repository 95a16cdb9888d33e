"""Every node as the scheduler sees it now: machine, ledger and holds, brought together from the watches.

Reads only memory. What is not synced yet is not answered from: `ready` tells.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable

from kvplace.core.cpu_map import read_node_cpu_map
from kvplace.core.errors import BadAnnotation, BadTopology
from kvplace.core.free import Free, free_of
from kvplace.core.ledger import Ledger
from kvplace.core.topology import Topology, topology_of_cpu_map
from kvplace.kube.cluster import LEDGERS, NODES, PODS, TOPOLOGIES, Cluster
from kvplace.kube.ledgers import Ledgers
from kvplace.kube.records import LedgerRecord, NodeRecord, PodRecord, TopologyRecord
from kvplace.kube.store import Store
from kvplace.scheduler.fit import FitTable, NodeState
from kvplace.scheduler.holds import Holds

HOLD_SECONDS = 30.0


class NodeBook:
    """The stores of one process and what follows from them for each node."""

    def __init__(
        self,
        cluster: Cluster,
        *,
        hold_seconds: float = HOLD_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.nodes: Store[str, NodeRecord] = Store(NODES)
        self.pods: Store[str, PodRecord] = Store(PODS)
        self.topologies: Store[str, TopologyRecord] = Store(TOPOLOGIES)
        self.ledger_store: Store[str, LedgerRecord] = Store(LEDGERS)
        self.ledgers = Ledgers(cluster, self.ledger_store)
        self.holds = Holds(seconds=hold_seconds, clock=clock, changed=self._changed)
        self.fits = FitTable(self.state_of)
        self._machines: dict[str, tuple[Topology | None, int | None, str]] = {}
        self._largest: int | None = None
        self.nodes.subscribe(self._node_seen)
        self.topologies.subscribe(self._topology_seen)
        self.ledgers.subscribe(self._changed)
        self.pods.subscribe(self._pod_seen)

    @property
    def stores(
        self,
    ) -> tuple[
        Store[str, NodeRecord], Store[str, PodRecord], Store[str, TopologyRecord], Store[str, LedgerRecord]
    ]:
        """The caches that must run and be synced before the book is right."""
        return (self.nodes, self.pods, self.topologies, self.ledger_store)

    @property
    def ready(self) -> bool:
        """Whether every cache has seen a complete list."""
        return all(store.has_synced for store in self.stores)

    @property
    def largest_node(self) -> int | None:
        """Most allocatable CPUs of any known machine; None when none is known."""
        if self._largest is None:
            self._largest = max((self._allocatable(node) for node in self.nodes.records), default=0)
        return self._largest or None

    def topology_of(self, node: str) -> Topology | None:
        """The machine of a node; None when nothing (readable) describes it."""
        return self._machine(node)[0]

    def ledger_of(self, node: str) -> Ledger:
        """The newest known ledger of a node; an empty one when it has none yet."""
        record = self.ledgers.current(node)
        return record.ledger if record is not None else Ledger()

    def free_on(self, node: str, ledger: Ledger, *, but: str = "", with_holds: bool = True) -> Free | None:
        """What is left on a node given a ledger, after the holds of all pods `but` one."""
        topology, only, _ = self._machine(node)
        if topology is None:
            return None
        holds = self.holds.on_node(node, but=but) if with_holds else ()
        return free_of(topology, ledger, holds, only=only)

    def state_of(self, node: str) -> NodeState:
        """The node's machine and what is left of it now."""
        if node not in self.nodes.records:
            return NodeState(None, None, "the node is not known to the API server")
        topology, only, problem = self._machine(node)
        record = self.ledgers.current(node)
        if record is not None and record.problem:
            return NodeState(None, None, f"its ledger cannot be read: {record.problem}")
        empty = None
        if topology is not None and only is not None and topology.allocatable & ~only:
            empty = free_of(topology, Ledger(), only=only)
        return NodeState(topology, self.free_on(node, self.ledger_of(node)), problem, empty)

    def _allocatable(self, node: str) -> int:
        topology, only, _ = self._machine(node)
        if topology is None:
            return 0
        return (topology.allocatable if only is None else topology.allocatable & only).bit_count()

    def _machine(self, node: str) -> tuple[Topology | None, int | None, str]:
        if node not in self._machines:
            self._machines[node] = self._describe(node)
        return self._machines[node]

    def _describe(self, node: str) -> tuple[Topology | None, int | None, str]:
        """Bring together what describes a node.

        Its cpu-map and the CPUs that the kubelet's static policy holds narrow what may be given out.
        """
        record = self.nodes.get(node)
        described = self.topologies.get(node)
        sockets: dict[int, int] | None = None
        if record is not None and record.cpu_map:
            try:
                sockets = read_node_cpu_map(record.cpu_map)
            except BadAnnotation as error:
                return None, None, f"node {error}"
        if described is not None:
            if described.topology is None:
                return None, None, f"its NodeTopology cannot be read: {described.problem}"
            only = None
            if sockets is not None:
                only = 0
                for cpus in sockets.values():
                    only |= cpus
            if described.kubelet_cpus:
                only = (described.topology.cpus if only is None else only) & ~described.kubelet_cpus
            return described.topology, only, ""
        if sockets is not None:
            try:
                return topology_of_cpu_map(sockets), None, ""
            except BadTopology as error:
                return None, None, f"its cpu-map makes no machine: {error}"
        return None, None, ""

    def _node_seen(self, before: NodeRecord | None, after: NodeRecord | None) -> None:
        either = after or before
        if either is not None and (before is None or after is None or before.cpu_map != after.cpu_map):
            self._machines.pop(either.name, None)
            self._largest = None
            self._changed(either.name)

    def _topology_seen(self, before: TopologyRecord | None, after: TopologyRecord | None) -> None:
        either = after or before
        if before is not None and after is not None and after.allows_what(before):
            return
        if either is not None:
            self._machines.pop(either.node, None)
            self._largest = None
            self._changed(either.node)

    def _pod_seen(self, before: PodRecord | None, after: PodRecord | None) -> None:
        pod = after or before
        if pod is not None and (after is None or after.node):
            self.holds.drop(pod.uid)

    def _changed(self, node: str) -> None:
        self.fits.node_changed(node)


@contextlib.asynccontextmanager
async def running_book(cluster: Cluster, *, hold_seconds: float = HOLD_SECONDS) -> AsyncIterator[NodeBook]:
    """Keep a book up to date while the block runs; enters when it is complete."""
    book = NodeBook(cluster, hold_seconds=hold_seconds)
    async with asyncio.TaskGroup() as group:
        watching = [group.create_task(store.run(cluster)) for store in book.stores]
        try:
            for store in book.stores:
                await store.wait_until_synced()
            yield book
        finally:
            await book.ledgers.drain()
            await book.ledgers.stop()
            for task in watching:
                task.cancel()
