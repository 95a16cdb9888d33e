"""The VMs that opted in, as a list for people: their pods, and VMs without a pod.

A pod reports where a VM is and whether it is pinned. KubeVirt's own objects state how far KubeVirt is with
it, and name the VMs that are stopped, or cannot start, and so have no pod. A user who may not read them
sees the pods alone. While VMs wait, the ledgers name the VMs that others make room for. Where VMs request
devices, the reports of agents name these; a watch leaves them out, because agents report often.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterable
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

from kvplace.core.scalars import PodUid
from kvplace.kube.api_errors import Denied, NotFound
from kvplace.kube.concurrency import together
from kvplace.kube.object_records import LedgerRecord, PodRecord, TopologyRecord
from kvplace.kube.reported_vms import VM_STATUSES, VMI_STATUSES, VmName, VmStatus
from kvplace.kube.store import Store
from kvplace.kube.watches import LEDGERS, PODS, TOPOLOGIES, Kind, ListClient, Selector, WatchClient
from kvplace.nodes.cluster_reading import wait_for_list
from kvplace.nodes.cluster_view import NodeView, VmView, vm_views
from kvplace.nodes.node_machine import NOT_KNOWN


@dataclass(frozen=True)
class VmListing:
    """VMs in the order of their names."""

    vms: tuple[VmView, ...]
    notes: tuple[str, ...] = ()
    """What is left out, and why."""
    is_first: bool = True
    """Of a watch: whether these are all VMs, or only the changed ones."""


def listed_vms(
    pods: Iterable[PodRecord],
    statuses: Iterable[VmStatus],
    selector: Selector,
    ledgers: Iterable[LedgerRecord] = (),
    topologies: Iterable[TopologyRecord] = (),
) -> tuple[VmView, ...]:
    """Combine pods with KubeVirt's objects, the ledgers' reservations for waiting pods, and reported devices.

    A VM with ended pods only is there without a pod, too. The selector is that of the pods; of a VM
    without a pod it concerns the labels that its pod would have.
    """
    vms: dict[tuple[str, str], VmStatus] = {}
    instances: dict[tuple[str, str], VmStatus] = {}
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
    """Read the VMs of the namespace that the selector names once."""
    everywhere = Selector(namespace=selector.namespace)
    pods, *read = await together(
        cluster.read_all(PODS, selector),
        _read_statuses(cluster, VM_STATUSES, everywhere),
        _read_statuses(cluster, VMI_STATUSES, everywhere),
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
    cluster: ListClient, kind: Kind[VmName, VmStatus], selector: Selector
) -> tuple[tuple[VmStatus, ...], str]:
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
    statuses = [Store(kind, everywhere) for kind in (VM_STATUSES, VMI_STATUSES)]
    ledgers = Store(LEDGERS)
    waking = asyncio.Event()
    stores: tuple[Store[Any, Any], ...] = (pods, *statuses, ledgers)
    watching = {store: asyncio.create_task(store.run(cluster)) for store in stores}
    notes: dict[str, None] = {}
    try:
        await wait_for_list(pods)
        for one, says in ((statuses[0], _left_out), (statuses[1], _left_out), (ledgers, _not_seen)):
            try:
                await wait_for_list(one)
            except (NotFound, Denied) as failure:
                watching[one].cancel()
                if isinstance(failure, Denied):
                    notes[says(failure)] = None
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
