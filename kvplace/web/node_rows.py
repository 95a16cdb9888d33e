"""One row for each node of the cluster, and the changes in them since a reader's last request.

A row is computed on a request when the node has changed, in slices, so that thousands of changed nodes
never hold the event loop for long. Every change of a row gets the next revision; a reader that knows a
revision gets just the rows with a later one, however long it was gone.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import msgspec

from kvplace.core.free_resources import BLOCK_LEVELS, BLOCK_SIZES, FreeBlocks
from kvplace.core.scalars import NodeName, PodUid
from kvplace.kube.concurrency import Turns
from kvplace.kube.object_records import NodeRecord, PodRecord, TopologyRecord
from kvplace.nodes.cluster_view import VmState, view_of
from kvplace.nodes.node_cache import CHECK_STEPS, FreeBlockTotals, NodeCache
from kvplace.nodes.node_machine import Unusable
from kvplace.web.documents import Agents, vms_on

_REMEMBERED_ENDS = 4096
_WAITING_NAMED = 20


@dataclass(frozen=True, slots=True)
class _Row:
    revision: int
    document: msgspec.Raw
    vms: int
    states: tuple[int, int]
    """How many of its VMs do not run where they were placed, and how many are getting other cores."""
    free_blocks: FreeBlocks | None


@dataclass(frozen=True, slots=True)
class Changes:
    """Changes since some revision."""

    rows: tuple[msgspec.Raw, ...]
    gone: tuple[NodeName, ...]


class NodeRows:
    """The rows, as of the last `refresh`."""

    def __init__(self, cache: NodeCache, agents: Agents) -> None:
        self._cache = cache
        self._free_blocks = FreeBlockTotals()
        self._agents = agents
        self._rows: dict[NodeName, _Row] = {}
        """The one that changed last at the end."""
        self._gone: OrderedDict[NodeName, int] = OrderedDict()
        self._forgotten = 0
        """A reader of an earlier revision may have missed the end of a node."""
        self._changed: dict[NodeName, None] = {}
        self._waiting: dict[PodUid, PodRecord] = {}
        self._totals_changed = False
        self.revision = 1
        self.stale = asyncio.Event()
        """Set whenever a refresh would find something new."""
        cache.nodes.subscribe(self._node_seen)
        cache.topologies.subscribe(self._topology_seen)
        cache.pods.subscribe(self._pod_seen)
        cache.subscribe(self._mark)
        agents.subscribe(self._mark)

    async def refresh(self) -> None:
        """Check again every node that has changed."""
        self.stale.clear()
        try:
            if self._totals_changed:
                self._totals_changed = False
                self.revision += 1
            turns = Turns()
            while self._changed:
                node, _ = self._changed.popitem()
                self._refresh_row(node)
                await turns.spend(CHECK_STEPS)
        except asyncio.CancelledError:  # its reader has gone; the other pages wait for the rest
            self.stale.set()
            raise

    def since(self, revision: int) -> Changes | None:
        """Return the changes since a revision; None where they are not known any more."""
        if not self._forgotten <= revision <= self.revision:
            return None
        rows = []
        for row in reversed(self._rows.values()):
            if row.revision <= revision:
                break
            rows.append(row.document)
        gone = [node for node, ended in self._gone.items() if ended > revision]
        return Changes(tuple(rows), tuple(gone))

    def all(self) -> tuple[msgspec.Raw, ...]:
        """Return every row."""
        return tuple(row.document for row in self._rows.values())

    def totals(self) -> dict[str, Any]:
        """Sum up the cluster: its free CPUs and their blocks, and the states of its VMs."""
        free_blocks = self._free_blocks
        rows = self._rows.values()
        return {
            "nodes": len(rows),
            "usable": free_blocks.nodes,
            "allocatable": free_blocks.allocatable,
            "free": free_blocks.free,
            "vms": sum(row.vms for row in rows),
            "waiting": len(self._waiting),
            "firstWaiting": sorted({(pod.namespace, pod.vm) for pod in self._waiting.values()})[
                :_WAITING_NAMED
            ],
            "notPinned": sum(row.states[0] for row in rows),
            "moving": sum(row.states[1] for row in rows),
            "sizes": list(BLOCK_SIZES),
            "freeBlocks": {
                domain.value: {
                    "cpus": free_blocks.largest_cpus(domain),
                    "cores": free_blocks.largest_cores(domain),
                    "fragmentation": round(free_blocks.fragmentation(domain), 4),
                    "nodesWith": [free_blocks.nodes_with(domain, size) for size in BLOCK_SIZES],
                }
                for domain in BLOCK_LEVELS
            },
        }

    def _mark(self, node: NodeName) -> None:
        self._changed[node] = None
        self.stale.set()

    def _node_seen(self, before: NodeRecord | None, after: NodeRecord | None) -> None:
        either = after or before
        if either is not None and (before is None or after is None):
            self._mark(either.name)

    def _topology_seen(self, before: TopologyRecord | None, after: TopologyRecord | None) -> None:
        either = after or before
        if either is not None:
            self._mark(either.node)

    def _pod_seen(self, before: PodRecord | None, after: PodRecord | None) -> None:
        for record in (before, after):
            if record is not None and record.node:
                self._mark(record.node)
        either = after or before
        if either is None:
            return
        was_waiting = either.uid in self._waiting
        if after is not None and not after.node and not after.deleting:
            self._waiting[either.uid] = after
        else:
            self._waiting.pop(either.uid, None)
        if was_waiting or either.uid in self._waiting:  # also for a new report of kube-scheduler
            self._totals_changed = True
            self.stale.set()

    def _refresh_row(self, node: NodeName) -> None:
        before = self._rows.pop(node, None)
        if before is not None and before.free_blocks is not None:
            self._free_blocks.remove(before.free_blocks)
        if node not in self._cache.nodes.records:
            if before is not None:
                self.revision += 1
                self._gone[node] = self.revision
                if len(self._gone) > _REMEMBERED_ENDS:
                    _, self._forgotten = self._gone.popitem(last=False)
            return
        self.revision += 1
        self._gone.pop(node, None)
        row = self._rows[node] = self._row(node)
        if row.free_blocks is not None:
            self._free_blocks.add(row.free_blocks)

    def _row(self, name: NodeName) -> _Row:
        node = view_of(self._cache, name)
        vms = vms_on(self._cache, node)
        claims = node.ledger.claims
        states = (
            sum(vm.state is VmState.NOT_PINNED for vm in vms),
            sum(claim.relocation is not None for claim in claims.values()),
        )
        document: dict[str, Any] = {
            "name": name,
            "vms": len(claims),
            "notPinned": states[0],
            "moving": states[1],
        }
        if trouble := self._agents.trouble(name, node.described):
            document["agent"] = trouble
        if node.problem or isinstance(node.machine, Unusable):
            document["problem"] = node.problem
        else:
            free, allocatable = node.free, node.machine.topology.allocatable
            document["allocatable"] = allocatable.bit_count()
            document["free"] = free.bit_count()
            document["numa"] = [
                [(one.cpus & free).bit_count(), (one.cpus & allocatable).bit_count()]
                for one in node.machine.topology.numa_nodes
                if one.cpus
            ]
            if node.free_blocks is not None:
                document["freeBlocks"] = {
                    domain.value: [block.cpus, block.cores, block.possible]
                    for domain, block in node.free_blocks.largest.items()
                }
        written = msgspec.Raw(msgspec.json.encode(document))
        return _Row(self.revision, written, len(claims), states, node.free_blocks)
