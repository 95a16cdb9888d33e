"""The nodes of the cluster and the pods that kvplace places, as the watches report them.

Reads memory only. It must not be read before the first complete lists have arrived: `has_synced`.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Mapping
from typing import Any, Protocol, TypeVar

from kvplace.core.cluster.victims import OccupiedMachine
from kvplace.core.free_resources import BLOCK_LEVELS, FreeBlocks, free_blocks_of
from kvplace.core.ledger import Claim, Ledger
from kvplace.core.node_devices import NodeDevices
from kvplace.core.node_topology import Enforcement
from kvplace.core.request import Level, Request
from kvplace.core.scalars import NodeName, PodUid
from kvplace.kube.concurrency import Turns
from kvplace.kube.ledgers import LedgerClient, Ledgers
from kvplace.kube.object_records import NO_NODE, NodeRecord, PodRecord, TopologyRecord
from kvplace.kube.store import Store
from kvplace.kube.watches import (
    EDITED_VMIS,
    LEDGERS,
    NODES,
    PLACED_PODS,
    PODS,
    TOPOLOGIES,
    VMIS,
    WatchClient,
)
from kvplace.nodes.dra_devices import DraDevices
from kvplace.nodes.node_machine import (
    NodeMachine,
    NodeSnapshot,
    Unusable,
    devices_after,
    devices_held,
    machine_of_node,
    request_of,
    snapshot_of,
    with_ledger,
)

K = TypeVar("K")

PAUSE_AFTER_EDIT_S = 10.0
"""The least time between two relocations of a VM by edits of its options."""
PEACE_S = 600.0
"""The rest of a VM after it got other cores, before it may move for others."""


class RelocationTimes:
    """Follows the ledgers; forgets a pod after the longest of the times above."""

    def __init__(self, ledgers: Ledgers) -> None:
        self._ledgers = ledgers
        self._seen: dict[PodUid, float] = {}
        """When each pod was last seen to be relocating."""
        ledgers.subscribe(self._ledger_seen)

    def rest_s(self, pod: PodUid, peace_s: float) -> float:
        """Return how many seconds remain until `peace_s` has passed since the last relocation of a pod."""
        last = self._seen.get(pod)
        return 0.0 if last is None else max(0.0, last + peace_s - asyncio.get_running_loop().time())

    def _ledger_seen(self, node: NodeName) -> None:
        record = self._ledgers.current(node)
        claims = {} if record is None else record.ledger.claims
        relocating = [uid for uid, claim in claims.items() if claim.relocation is not None]
        if relocating:
            now = asyncio.get_running_loop().time()
            rest = {uid: last for uid, last in self._seen.items() if last > now - PEACE_S}
            self._seen = rest | dict.fromkeys(relocating, now)


class NodeClient(WatchClient, LedgerClient, Protocol):
    """The cluster calls of the cache."""


class NodeCache:
    """The stores of one process, and the state of each node that follows from them."""

    def __init__(self, cluster: NodeClient) -> None:
        self.pods = Store(PODS, PLACED_PODS)
        self.nodes = Store(NODES)
        self.topologies = Store(TOPOLOGIES)
        self.edited_vmis = Store(VMIS, EDITED_VMIS)
        """Complete some time after the others, and never where KubeVirt is not installed."""
        self.ledger_store = Store(LEDGERS)
        """As watched; a recent write is in `ledgers` first."""
        self.ledgers = Ledgers(cluster, self.ledger_store)
        self.dra = DraDevices()
        self.relocation_times = RelocationTimes(self.ledgers)
        self.dra_nodes: set[NodeName] = set()
        """Nodes where dra-driver-cpu sets the cpusets."""
        self._machines: dict[NodeName, NodeMachine | Unusable] = {}
        self._priorities: Counter[int] = Counter()
        """The number of bound pods of each priority."""
        self._by_node: dict[NodeName, set[PodUid]] = {}
        self._by_vmi: dict[str, set[PodUid]] = {}
        self._largest: int | None = None
        self._listeners: list[Callable[[NodeName], None]] = []
        self.pods.subscribe(self._pod_seen)
        self.nodes.subscribe(self._node_seen)
        self.topologies.subscribe(self._topology_seen)
        self.ledgers.subscribe(self._notify)

    @property
    def stores(self) -> tuple[Store[Any, Any], ...]:
        """The stores that must be complete before anything is decided."""
        return (self.pods, self.nodes, self.topologies, self.ledger_store)

    @property
    def watched(self) -> tuple[Store[Any, Any], ...]:
        """All stores, also the one that may never be complete."""
        return (*self.stores, self.edited_vmis)

    @property
    def has_synced(self) -> bool:
        """Whether every store has seen a complete list."""
        return all(store.has_synced for store in self.stores)

    @property
    def largest_node(self) -> int | None:
        """Most allocatable CPUs of any known machine; None when none is known."""
        if self._largest is None:
            machines = (self.machine(node) for node in self.nodes.records)
            self._largest = max(
                (one.topology.allocatable.bit_count() for one in machines if isinstance(one, NodeMachine)),
                default=0,
            )
        return self._largest or None

    def machine(self, node: NodeName) -> NodeMachine | Unusable:
        """Return the machine of a node, or the reason why it cannot be used."""
        machine = self._machines.get(node)
        if machine is None:
            machine = machine_of_node(self.nodes.get(node), self.topologies.get(node))
            if node in self.nodes.records:
                self._machines[node] = machine
        return machine

    def usable_machine(self, node: NodeName) -> NodeMachine | Unusable:
        """Return the machine of a node, or the reason against any placement there, also in its ledger."""
        return with_ledger(self.machine(node), self.ledgers.current(node))

    def enforces(self, node: NodeName) -> bool:
        """Return whether all other containers are kept off the CPUs that are owned on a node."""
        return self.enforcement(node) is not Enforcement.NONE

    def enforcement(self, node: NodeName) -> Enforcement:
        """Return how other containers are kept off the CPUs that are owned on a node."""
        described = self.topologies.get(node)
        return Enforcement.NONE if described is None else described.enforcement

    def has_bound_pod_below(self, priority: int) -> bool:
        """Return whether a bound pod has a lower priority."""
        return any(known < priority for known in self._priorities)

    @property
    def nodes_with_pods(self) -> list[NodeName]:
        """The nodes that have pods."""
        return [node for node in self._by_node if node]

    def pods_on(self, node: NodeName) -> list[PodRecord]:
        """Return the pods that are bound to a node; for `NO_NODE` the waiting ones."""
        return self._known(self._by_node.get(node, ()))

    def pods_of_vmi(self, uid: str) -> list[PodRecord]:
        """Return the pods of a VM: more than one while it live-migrates."""
        return self._known(self._by_vmi.get(uid, ()))

    def migrates(self, pod: PodRecord) -> bool:
        """Return whether the VM of a pod has another one with a QEMU that has not ended.

        The creator of a pod writes the UID of its owner, which is true only within the namespace of the pod.
        """
        return any(
            other.uid != pod.uid and other.namespace == pod.namespace and not other.has_ended
            for other in self.pods_of_vmi(pod.vmi_uid)
        )

    def edited_request(self, pod: PodRecord) -> Mapping[str, str] | None:
        """Return the annotations of a plain pod, or of an edited VM; None for a VM that was not edited."""
        if not pod.vmi:
            return pod.asking
        vmi = self.edited_vmis.get(pod.vmi_uid)
        # The creator of a pod writes its owner; only one in its own namespace can be true.
        return vmi.asking if vmi is not None and vmi.namespace == pod.namespace else None

    def reserved_on(self, uid: PodUid) -> NodeName:
        """Return the node where other VMs make room for a waiting pod; `NO_NODE` where none does."""
        for node in self.ledgers.nodes_claimed_by(uid):
            claim = self.ledger(node).claims.get(uid)
            if claim is not None and claim.reserved is not None:
                return node
        return NO_NODE

    def _known(self, uids: Iterable[PodUid]) -> list[PodRecord]:
        known = self.pods.records
        return [known[uid] for uid in uids if uid in known]

    def is_leaving(self, uid: PodUid) -> bool:
        """Return whether the claim of a pod is released without an eviction."""
        pod = self.pods.get(uid)
        return pod is None or pod.deleting or pod.has_ended

    def ledger(self, node: NodeName) -> Ledger:
        """Return the newest known ledger of a node; an empty one when it has none yet."""
        record = self.ledgers.current(node)
        return record.ledger if record is not None else Ledger()

    def snapshot(self, node: NodeName, holds: Iterable[Claim] = ()) -> NodeSnapshot | Unusable:
        """Return the node's machine and its free resources now, after `holds`."""
        return snapshot_of(self.machine(node), self.ledgers.current(node), holds, request_of=self._request_of)

    def free_devices(
        self, machine: NodeMachine, ledger: Ledger, holds: Collection[Claim] = ()
    ) -> NodeDevices | None:
        """Return the devices that a ledger's claims and `holds` leave free; None where they are unknown."""
        return devices_after(machine.devices, ledger, holds, self._request_of)

    def occupied(self, machine: NodeMachine, ledger: Ledger, holds: Collection[Claim]) -> OccupiedMachine:
        """Return the resources of a node with their holders, for searches that release some of them."""
        return OccupiedMachine(
            machine.topology,
            ledger,
            tuple(holds) if machine.others is None else (*holds, machine.others),
            machine.pools_shrink,
            self.free_devices(machine, ledger, holds),
            devices_held(machine.devices, ledger, holds, self._request_of),
        )

    def _request_of(self, uid: PodUid) -> Request | None:
        """Return the request of a pod that may be about to get devices."""
        return request_of(self.pods.get(uid))

    def subscribe(self, listener: Callable[[NodeName], None]) -> None:
        """Call the listener with a node's name after each change of its machine or its ledger."""
        self._listeners.append(listener)

    def _pod_seen(self, before: PodRecord | None, after: PodRecord | None) -> None:
        if before is not None and before.node:
            self._priorities[before.priority] -= 1
            if not self._priorities[before.priority]:
                del self._priorities[before.priority]
        if after is not None and after.node:
            self._priorities[after.priority] += 1
        if before is not None:
            _discard(self._by_node, before.node, before.uid)
            _discard(self._by_vmi, before.vmi_uid, before.uid)
        if after is not None:
            self._by_node.setdefault(after.node, set()).add(after.uid)
            if after.vmi_uid:
                self._by_vmi.setdefault(after.vmi_uid, set()).add(after.uid)

    def _node_seen(self, before: NodeRecord | None, after: NodeRecord | None) -> None:
        either = after or before
        if either is not None and (before is None or after is None or before.cpu_map != after.cpu_map):
            self._machine_changed(either.name)

    def _topology_seen(self, before: TopologyRecord | None, after: TopologyRecord | None) -> None:
        either = after or before
        unchanged = before is not None and after is not None and after.allows_same_placements(before)
        if either is not None and self.enforcement(either.node) is Enforcement.DRA:
            self.dra_nodes.add(either.node)
        elif either is not None:
            self.dra_nodes.discard(either.node)
        if either is not None and not unchanged:
            self._machine_changed(either.node)

    def _machine_changed(self, node: NodeName) -> None:
        self._machines.pop(node, None)
        self._largest = None
        self._notify(node)

    def _notify(self, node: NodeName) -> None:
        for listener in self._listeners:
            listener(node)


def _discard(index: dict[K, set[PodUid]], key: K, uid: PodUid) -> None:
    here = index.get(key, set())
    here.discard(uid)
    if not here:
        index.pop(key, None)


@contextlib.asynccontextmanager
async def running_node_cache(cluster: NodeClient, *, decides: bool = True) -> AsyncIterator[NodeCache]:
    """Keep a cache up to date while the block runs; enters when it is complete.

    A process that `decides` nothing watches neither VirtualMachineInstances nor resource claims.
    """
    cache = NodeCache(cluster)
    async with asyncio.TaskGroup() as group:
        watched = cache.watched if decides else cache.stores
        watching = [group.create_task(store.run_in_one_past(cluster)) for store in watched]
        if decides:
            watching.append(group.create_task(cache.dra.run(cluster)))
        try:
            for store in cache.stores:
                await store.wait_until_synced()
            yield cache
        finally:
            await cache.ledgers.drain()
            await cache.ledgers.stop()
            for task in watching:
                task.cancel()


class FreeBlockTotals:
    """Sums that nodes can be added to and taken out of."""

    def __init__(self, nodes: Iterable[FreeBlocks] = ()) -> None:
        self._sizes: Mapping[Level, tuple[Counter[int], Counter[int]]] = {
            domain: (Counter(), Counter()) for domain in BLOCK_LEVELS
        }
        """The number of nodes by the size of their largest free block, in CPUs and in whole cores."""
        self._possible = dict.fromkeys(BLOCK_LEVELS, 0)
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

    def largest_cpus(self, domain: Level) -> int:
        """Return the CPUs of the largest free block of any node."""
        return max(self._sizes[domain][0], default=0)

    def largest_cores(self, domain: Level) -> int:
        """Return the whole free cores of the domain that has most of them."""
        return max(self._sizes[domain][1], default=0)

    def nodes_with(self, domain: Level, cpus: int) -> int:
        """Count the nodes with a free block of at least `cpus` CPUs."""
        return sum(count for size, count in self._sizes[domain][0].items() if size >= cpus)

    def fragmentation(self, domain: Level) -> float:
        """Return the share of the largest possible free blocks that is missing, from 0 to 1.

        On each node the largest free block is compared with the largest one of as many free CPUs: 0 on an
        empty machine, on a full one, and where all free CPUs are contiguous.
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
        turns = Turns()
        while self._changed:
            node, _ = self._changed.popitem()
            self._look(node)
            await turns.spend(CHECK_STEPS)

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
        found = free_blocks_of(machine.topology, snapshot.free.cpus)
        self._by_node[node] = found
        self.totals.add(found)
