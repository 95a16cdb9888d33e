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
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, TypeVar

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

K = TypeVar("K")
V = TypeVar("V")


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
    by_name = Selector(fields=nodes.fields)
    found, topologies, ledgers, vms = await together(
        cluster.read_all(kind, nodes),
        cluster.read_all(TOPOLOGIES, by_name),
        cluster.read_all(LEDGERS, by_name),
        _nothing() if pods is None else cluster.read_all(PODS, pods),
    )
    if nodes.label_terms:
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
    there = replace(PLACED_PODS, fields={NODE_FIELD: name})
    one = Selector(fields={NAME_FIELD: name})
    return await read_cluster(cluster, nodes=one, pods=there if pods else None, kind=kind)


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

    def records() -> dict[NodeName, tuple[object, ...]]:
        """The objects of each node, with the fields of the node itself that are shown."""
        found: dict[NodeName, tuple[object, ...]] = {}
        for name in sorted({*nodes.records, *topologies.records, *ledgers.records}):
            node, described, ledger = nodes.get(name), topologies.get(name), ledgers.get(name)
            if node is not None or selector == EVERYTHING:
                found[name] = (node and (node.cpu_map, node.status), described, ledger)
        return found

    async with _watched(cluster, nodes, topologies, ledgers) as (waking, _):
        for store in (nodes, topologies, ledgers):
            await wait_for_list(store)
        is_first = True
        async for before, after in _states(waking, gather_s, records):
            changed = [name for name, known in after.items() if before.get(name) != known]
            if is_first or changed:
                yield (
                    is_first,
                    tuple(
                        node_view(name, nodes.get(name), topologies.get(name), ledgers.get(name))
                        for name in changed
                    ),
                )
            is_first = False


@contextlib.asynccontextmanager
async def _watched(
    cluster: WatchClient, *stores: Store[Any, Any]
) -> AsyncIterator[tuple[asyncio.Event, Mapping[Store[Any, Any], asyncio.Task[None]]]]:
    """Keep stores up to date; gives an event that each change sets, and the task of each store."""
    waking = asyncio.Event()
    for store in stores:
        store.subscribe(lambda _before, _after: waking.set())
    watching = {store: asyncio.create_task(store.run(cluster)) for store in stores}
    try:
        yield waking, watching
    finally:
        for task in watching.values():
            task.cancel()
        await asyncio.gather(*watching.values(), return_exceptions=True)


async def _states(
    waking: asyncio.Event, gather_s: float, now: Callable[[], dict[K, V]]
) -> AsyncGenerator[tuple[dict[K, V], dict[K, V]], None]:
    """Yield the state before and after changes that follow each other within a moment; nothing comes first.

    The first pair is there at once.
    """
    before: dict[K, V] = {}
    while True:
        waking.clear()
        after = now()
        yield before, after
        before = after
        await waking.wait()
        await asyncio.sleep(gather_s)


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
    pods, ledgers = Store(PODS, selector), Store(LEDGERS)
    statuses = [Store(kind, everywhere) for kind in (VMS, VMI_PHASES)]
    notes: dict[str, None] = {}

    def now() -> dict[tuple[str, str, str], VmView]:
        known = chain.from_iterable(store.records.values() for store in statuses)
        vms = listed_vms(pods.records.values(), known, selector, ledgers.records.values())
        return {(vm.namespace, vm.name, vm.pod.uid): vm for vm in vms}

    async with _watched(cluster, pods, *statuses, ledgers) as (waking, watching):
        await wait_for_list(pods)
        for one, note_of in ((statuses[0], _left_out), (statuses[1], _left_out), (ledgers, _not_seen)):
            try:
                await wait_for_list(one)
            except (NotFound, Denied) as failure:
                watching[one].cancel()  # each further try would be reported as an outage
                if isinstance(failure, Denied):
                    notes[note_of(failure)] = None
        is_first = True
        async for before, after in _states(waking, gather_s, now):
            changed = [vm for key, vm in after.items() if before.get(key) != vm]
            gone = [vm for key, vm in before.items() if key not in after and vm.has_pod]
            if is_first or changed or gone:
                yield VmListing((*gone, *changed), tuple(notes) if is_first else (), is_first=is_first)
            is_first = False
