"""A view of the cluster for commands: read once, or followed as nodes or VMs change (`--watch`).

The lists are read page by page and at the same time. Of a watched cluster, everything is yielded first, then
again and again the changes since then. Changes that follow each other within a moment are yielded together.
Misconfigured and Refused, such as for a missing right, are raised, and an unavailable API server is waited
for.

The list of VMs has their pods, and VMs without a pod. A pod shows the node of a VM and whether it is pinned.
KubeVirt's own objects state its progress with the VM, and name the VMs that are stopped, or cannot start, and
so have no pod. A user who may not read them sees the pods alone. While VMs wait, the ledgers name the VMs
that others make room for. Where VMs request devices, the reports of agents name these; a watch leaves them
out, because agents report often.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Iterable
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

from kvplace.core.errors import Misconfigured, Refused
from kvplace.core.scalars import NodeName, PodUid
from kvplace.kube.api_errors import Denied, NotFound
from kvplace.kube.concurrency import together
from kvplace.kube.object_records import LedgerRecord, NodeRecord, PodRecord, TopologyRecord
from kvplace.kube.reported_vms import VMI_PHASES, VMS, ReportedVm, VmName
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
from kvplace.nodes.cluster_view import ClusterView, NodeView, VmView, cluster_view, node_view, vm_views
from kvplace.nodes.node_machine import NOT_KNOWN


async def read_cluster(
    cluster: ListClient,
    *,
    nodes: Selector = EVERYTHING,
    pods: Selector | None = PLACED_PODS,
    kind: Kind[NodeName, NodeRecord] = NODES,
) -> ClusterView:
    """Read the selected nodes, and the selected VMs of all nodes; None for no VMs.

    With `kind` NODE_STATUSES nodes have their status.

    Needs rights on the whole cluster. VMs are the largest part of the reading, and ledgers name them, too.
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


_LOOK_S = 0.2
"""Pause between two checks whether a list has failed."""


async def watched_nodes(
    cluster: WatchClient, selector: Selector, *, gather_s: float = 0.0
) -> AsyncGenerator[tuple[bool, tuple[NodeView, ...]], None]:
    """Yield (True, all selected nodes), then (False, changed nodes), by name and with their status.

    Nodes that are gone are not yielded, unless something of them is left and all nodes are selected.
    """
    nodes, topologies, ledgers = Store(NODE_STATUSES, selector), Store(TOPOLOGIES), Store(LEDGERS)
    changed, is_changed = set[NodeName](), asyncio.Event()

    def changed_now(node: NodeName) -> None:
        changed.add(node)
        is_changed.set()

    def node_seen(before: NodeRecord | None, after: NodeRecord | None) -> None:
        either = after or before
        shown = [(node.cpu_map, node.status) for node in (before, after) if node is not None]
        if either is not None and (len(shown) == 1 or shown[0] != shown[1]):
            changed_now(either.name)

    def part_seen(
        before: TopologyRecord | LedgerRecord | None, after: TopologyRecord | LedgerRecord | None
    ) -> None:
        either = after or before
        if either is not None:
            changed_now(either.node)

    def views(names: Iterable[NodeName]) -> tuple[NodeView, ...]:
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
        changed.clear()
        is_changed.clear()
        yield True, views({*nodes.records, *topologies.records, *ledgers.records})
        while True:
            await is_changed.wait()
            await asyncio.sleep(gather_s)
            taken = tuple(changed)
            changed.clear()
            is_changed.clear()
            yield False, views(taken)


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


@dataclass(frozen=True)
class VmListing:
    """VMs in the order of their names."""

    vms: tuple[VmView, ...]
    notes: tuple[str, ...] = ()
    """The parts that are left out, each with the reason."""
    is_first: bool = True
    """Whether these are all VMs; False for the changed VMs of a watch."""


def listed_vms(
    pods: Iterable[PodRecord],
    statuses: Iterable[ReportedVm],
    selector: Selector,
    ledgers: Iterable[LedgerRecord] = (),
    topologies: Iterable[TopologyRecord] = (),
) -> tuple[VmView, ...]:
    """Combine pods with KubeVirt's objects, the ledgers' reservations for waiting pods, and reported devices.

    A VM with only ended pods is also listed without a pod. The selector selects pods; for a VM without a pod
    it applies to the labels that its pod would have.
    """
    vms: dict[tuple[str, str], ReportedVm] = {}
    instances: dict[tuple[str, str], ReportedVm] = {}
    for status in statuses:
        (instances if status.is_instance else vms)[status.key] = status
    written = {ledger.node: ledger for ledger in ledgers}
    described = {topology.node: topology for topology in topologies}
    nodes = {
        name: NodeView(name, NOT_KNOWN, described.get(name), written.get(name))
        for name in {*written, *described}
    }
    found = [
        replace(view, kubevirt=instances.get((view.namespace, view.pod.vmi))) if view.is_vmi else view
        for view in vm_views(pods, nodes).values()
    ]
    seated = {(view.namespace, view.name) for view in found if not view.is_over}
    for key, status in {**instances, **vms}.items():
        selected = all(term.holds(status.labels) for term in selector.label_terms)
        if status.options is not None and key not in seated and selected:
            pod = PodRecord(status.namespace, "", PodUid(""), vmi=status.name, created=status.created)
            found.append(VmView(pod, kubevirt=status))
    return tuple(sorted(found, key=lambda vm: (vm.namespace, vm.name, vm.pod.name, vm.pod.uid)))


async def read_listed_vms(cluster: ListClient, selector: Selector) -> VmListing:
    """Read once the VMs of the selector's namespace."""
    everywhere = Selector(namespace=selector.namespace)
    pods, *read = await together(
        cluster.read_all(PODS, selector),
        _read_statuses(cluster, VMS, everywhere),
        _read_statuses(cluster, VMI_PHASES, everywhere),
    )
    statuses = chain.from_iterable(found for found, _ in read)
    notes = [note for _, note in read if note][:1]
    ledgers: tuple[LedgerRecord, ...] = ()
    topologies: tuple[TopologyRecord, ...] = ()
    if any(not pod.node and not pod.deleting for pod in pods):
        try:
            ledgers = await cluster.read_all(LEDGERS)
        except NotFound:
            pass
        except Denied as denied:
            notes.append(_not_seen(denied))
    if any(pod.node and _wants_devices(pod) for pod in pods):
        try:
            topologies = await cluster.read_all(TOPOLOGIES)
        except NotFound:
            pass
        except Denied as denied:
            notes.append(_not_seen(denied, "devices of VMs are"))
    return VmListing(listed_vms(pods, statuses, selector, ledgers, topologies), tuple(notes))


def _wants_devices(pod: PodRecord) -> bool:
    request = VmView(pod).request
    return request is not None and bool(request.request.devices)


async def _read_statuses(
    cluster: ListClient, kind: Kind[VmName, ReportedVm], selector: Selector
) -> tuple[tuple[ReportedVm, ...], str]:
    """Read KubeVirt's reports, none without KubeVirt; and the right that is missing for them."""
    try:
        return await cluster.read_all(kind, selector), ""
    except NotFound:
        return (), ""
    except Denied as denied:
        return (), _left_out(denied)


def _left_out(denied: Denied) -> str:
    return (
        f"you may not {denied.verb} {denied.resource}: VMs without a pod and KubeVirt's phases are left out; "
        "KubeVirt's ClusterRole kubevirt.io:view gives this right"
    )


def _not_seen(denied: Denied, what: str = "reservations for waiting VMs are") -> str:
    return (
        f"you may not {denied.verb} {denied.resource}: {what} left out; "
        "the ClusterRole kvplace-viewer gives this right"
    )


async def watch_listed_vms(
    cluster: WatchClient, selector: Selector, *, gather_s: float = 0.0
) -> AsyncGenerator[VmListing, None]:
    """Yield all VMs, then changed VMs, without end; a VM that is gone as it was last."""
    everywhere = Selector(namespace=selector.namespace)
    pods = Store(PODS, selector)
    statuses = [Store(kind, everywhere) for kind in (VMS, VMI_PHASES)]
    ledgers = Store(LEDGERS)
    waking = asyncio.Event()
    stores: tuple[Store[Any, Any], ...] = (pods, *statuses, ledgers)
    watching = {store: asyncio.create_task(store.run(cluster)) for store in stores}
    notes: dict[str, None] = {}
    try:
        await wait_for_list(pods)
        for one, note_of in ((statuses[0], _left_out), (statuses[1], _left_out), (ledgers, _not_seen)):
            try:
                await wait_for_list(one)
            except (NotFound, Denied) as failure:
                watching[one].cancel()
                if isinstance(failure, Denied):
                    notes[note_of(failure)] = None
        for store in stores:
            store.subscribe(lambda before, after: waking.set())

        def now() -> dict[tuple[str, str, str], VmView]:
            known = chain.from_iterable(store.records.values() for store in statuses)
            vms = listed_vms(pods.records.values(), known, selector, ledgers.records.values())
            return {(vm.namespace, vm.name, vm.pod.uid): vm for vm in vms}

        before = now()
        yield VmListing(tuple(before.values()), tuple(notes))
        while True:
            waking.clear()
            await waking.wait()
            await asyncio.sleep(gather_s)
            after = now()
            changed = [vm for key, vm in after.items() if before.get(key) != vm]
            gone = [vm for key, vm in before.items() if key not in after and vm.has_pod]
            before = after
            if changed or gone:
                yield VmListing((*gone, *changed), is_first=False)
    finally:
        for task in watching.values():
            task.cancel()
        await asyncio.gather(*watching.values(), return_exceptions=True)
