"""The content of the pages, as JSON: a node with its core map, a VM with its neighbours, a search.

A node has the fault of its agent in one sentence. An agent writes its measurements and its own state. Its
last report stays when the agent is gone, and then seems as true as before. So its pod is checked, too.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

from kvplace.core.cpuset import format_cpu_list
from kvplace.core.drawing.core_map_json import core_map_document
from kvplace.core.errors import KvplaceError
from kvplace.core.ledger import Claim
from kvplace.core.occupant import neighbours_of
from kvplace.core.scalars import CpuMask, NodeName, PodUid
from kvplace.core.strict_json import Json
from kvplace.core.topology import Topology
from kvplace.core.well_known_names import OPTING_IN
from kvplace.kube.concurrency import Turns
from kvplace.kube.object_records import AgentPod, PodRecord, TopologyRecord
from kvplace.kube.reported_vms import ReportedVm, reported_vmi
from kvplace.kube.store import Store
from kvplace.nodes.cluster_view import NodeView, VmState, VmView, view_of, with_devices
from kvplace.nodes.node_cache import NodeCache
from kvplace.nodes.node_machine import Unusable
from kvplace.nodes.view_output import claim_view_document, devices_document, draw_node

MAX_FOUND = 50
MAX_QUERY = 256
_MOST_PHASES = 16
"""VMs of a page with a phase that is read from the API server."""
GONE = "its agent is gone or not ready: it measures nothing, and its last report may be old"


class Agents:
    """The agents of all nodes, as far as their pods may be seen."""

    def __init__(self, pods: Store[PodUid, AgentPod]) -> None:
        """`pods` are the pods of agents; no agent is called gone before their list is complete."""
        self._pods = pods
        self._ready: dict[NodeName, set[PodUid]] = {}
        self._listeners: list[Callable[[NodeName], None]] = []
        pods.subscribe(self._seen)

    def subscribe(self, listener: Callable[[NodeName], None]) -> None:
        """Call the listener with the node of an agent that has come, gone, or changed how it is."""
        self._listeners.append(listener)

    async def announce(self, nodes: Collection[NodeName]) -> None:
        """Call the listeners with every node as soon as the list of the agents' pods is complete."""
        await self._pods.wait_until_synced()
        for node in tuple(nodes):
            self._tell(node)

    def trouble(self, node: NodeName, described: TopologyRecord | None) -> str:
        """State the fault of the agent of a node; empty where all is well, or no agent belongs there."""
        if described is None:
            return ""
        if described.belongs_to_agent and self._pods.has_synced and not self._ready.get(node):
            return GONE
        unread = "its agent has not read the newest description yet" if described.is_unread else ""
        return described.agent_fault or unread

    def _seen(self, before: AgentPod | None, after: AgentPod | None) -> None:
        for pod in (before, after):
            if pod is not None:
                self._ready.setdefault(pod.node, set()).discard(pod.uid)
        if after is not None and after.is_ready:
            self._ready[after.node].add(after.uid)
        for node in {pod.node for pod in (before, after) if pod is not None}:
            self._tell(node)

    def _tell(self, node: NodeName) -> None:
        for listener in self._listeners:
            listener(node)


class VmiClient(Protocol):
    """The cluster call of the pages about one VM."""

    async def read_vmi(self, namespace: str, name: str) -> Mapping[str, Any] | None:
        """Read a VirtualMachineInstance; None when there is none."""
        ...


async def node_document(cache: NodeCache, agents: Agents, vmis: VmiClient, name: NodeName) -> Json | None:
    """Describe a node: its map and its VMs; None for one that the cluster does not have."""
    if name not in cache.nodes.records:
        return None
    node = view_of(cache, name)
    document: Json = {"name": name, "vms": []}
    if node.problem:
        document["problem"] = node.problem
    elif not isinstance(node.machine, Unusable):
        document["allocatable"] = node.machine.topology.allocatable.bit_count()
        document["free"] = node.free.bit_count()
    if node.described is not None:
        document["enforcement"] = node.described.enforcement.value
    if trouble := agents.trouble(name, node.described):
        document["agent"] = trouble
    vms = await _with_phases(vmis, vms_on(cache, node))
    drawing = draw_node(node, vms)
    if drawing is None:
        return document
    document["map"] = core_map_document(drawing)
    labels = {entry.claim.uid: entry.label for entry in drawing.legend}
    by_uid = {vm.pod.uid: vm for vm in vms}
    document["vms"] = [
        _claim_document(claim)
        | _state_document(node, claim.uid, by_uid.get(claim.uid))
        | {"label": labels[claim.uid]}
        for claim in node.ledger.claims.values()
    ]
    return document


async def vm_document(
    cache: NodeCache, agents: Agents, vmis: VmiClient, namespace: str, name: str
) -> Json | None:
    """Describe a VM, or a plain pod, by each of its pods: two while it migrates, none before its first one.

    None where neither a pod nor a VirtualMachineInstance of this name requests cores.
    """
    pods = []
    turns = Turns()
    for pod in list(cache.pods.records.values()):
        await turns.spend(1)
        if pod.namespace == namespace and name in (pod.vmi, pod.name):
            pods.append(pod)
    if not pods:
        return await _not_created(vmis, namespace, name)
    return {
        "namespace": namespace,
        "name": name,
        "kind": "VM" if pods[0].vmi else "pod",
        "pods": [
            await _pod_document(cache, agents, vmis, pod) for pod in sorted(pods, key=lambda pod: pod.name)
        ],
    }


async def _not_created(vmis: VmiClient, namespace: str, name: str) -> Json | None:
    """Describe a VMI that has no pod yet, with KubeVirt's reason."""
    vmi = await vmis.read_vmi(namespace, name)
    if vmi is None or not {*OPTING_IN} & (vmi["metadata"].get("annotations") or {}).keys():
        return None
    conditions = (vmi.get("status") or {}).get("conditions") or ()
    reasons = [str(one.get("message", "")) for one in conditions if one.get("status") == "False"]
    return {
        "namespace": namespace,
        "name": name,
        "kind": "VM",
        "pods": [],
        "state": VmState.NOT_CREATED.value,
        "sentence": next(filter(None, reasons), ""),
    }


async def _with_phases(vmis: VmiClient, vms: Sequence[VmView]) -> list[VmView]:
    """Add KubeVirt's phase to VMs that may not have started their guest; to a few, each is a call."""

    async def read(vm: VmView) -> ReportedVm | None:
        try:
            vmi = await vmis.read_vmi(vm.namespace, vm.name)
            return None if vmi is None else reported_vmi(vmi)
        except KvplaceError:
            return None

    unmeasured = [vm for vm in vms if vm.is_vmi and vm.state is VmState.RUNNING][:_MOST_PHASES]
    phases = await asyncio.gather(*map(read, unmeasured))
    found = {vm.pod.uid: phase for vm, phase in zip(unmeasured, phases, strict=True)}
    return [replace(vm, kubevirt=found.get(vm.pod.uid)) for vm in vms]


def vms_on(cache: NodeCache, node: NodeView) -> list[VmView]:
    """List the VMs with a claim in a node's ledger and a pod."""
    found = (_vm(cache, claim) for claim in node.ledger.claims.values())
    return [vm for vm in found if vm is not None]


async def search(cache: NodeCache, query: str) -> Json:
    """Find nodes and VMs with all words of a query in the name; at most 50 of each.

    Gives way to others now and then: a large cluster has tens of thousands of names.
    """
    words = query.lower().split()
    nodes: list[str] = []
    vms: dict[tuple[str, str], str] = {}
    if not words:
        return {"nodes": nodes, "vms": [], "more": False}
    turns = Turns()
    for name, vm in _names(cache):
        await turns.spend(1)
        text = f"{vm[0]}/{vm[1]}" if vm is not None else name
        if all(word in text.lower() for word in words):
            if vm is None:
                nodes.append(name)
            else:
                vms[vm] = name
    return {
        "nodes": sorted(nodes)[:MAX_FOUND],
        "vms": [
            {"namespace": namespace, "name": name, "node": vms[namespace, name]}
            for namespace, name in sorted(vms)[:MAX_FOUND]
        ],
        "more": len(nodes) > MAX_FOUND or len(vms) > MAX_FOUND,
    }


def _names(cache: NodeCache) -> Iterator[tuple[str, tuple[str, str] | None]]:
    """Each node, and each VM with the node that it is on."""
    for node in list(cache.nodes.records):
        yield node, None
    for pod in list(cache.pods.records.values()):
        yield pod.node, (pod.namespace, pod.vm)


def _vm(cache: NodeCache, claim: Claim) -> VmView | None:
    pod = cache.pods.get(claim.uid)
    return VmView(pod, claim) if pod is not None else None


def _state_document(node: NodeView | None, uid: PodUid, vm: VmView | None) -> Json:
    """State the condition of a VM in a word, and its fault or the cause of its wait in a sentence."""
    if vm is None:
        return {"state": VmState.ENDED.value, "sentence": "its pod is gone; its cores are being released"}
    report = node.reports.get(uid) if node is not None else None
    sentence = vm.pod.unschedulable if vm.state is VmState.WAITING else ""
    if vm.state in (VmState.NOT_PINNED, VmState.BOUND, VmState.RUNNING):
        sentence = vm.pinned.message if vm.pinned is not None else ""
        if report is not None and report.drift:
            sentence = report.drift
    if vm.claim is not None and vm.claim.reserved is not None:
        sentence = f"other VMs make room for it; its CPUs are reserved until {vm.claim.reserved.until}"
    moving = vm.claim is not None and vm.claim.relocation is not None
    return {"state": vm.state.value, "sentence": sentence, "moving": moving}


def _claim_document(claim: Claim) -> Json:
    return claim_view_document(claim) | {"revision": claim.revision}


async def _pod_document(cache: NodeCache, agents: Agents, vmis: VmiClient, pod: PodRecord) -> Json:
    seat = pod.node or cache.reserved_on(pod.uid)
    node = view_of(cache, seat) if seat else None
    claim = node.ledger.claims.get(pod.uid) if node is not None else None
    seen = VmView(pod, claim)
    (vm,) = await _with_phases(vmis, [seen if node is None else with_devices(seen, node)])
    report = node.reports.get(pod.uid) if node is not None else None
    document: Json = {
        "pod": pod.name,
        "node": pod.node,
        **({"reservedOn": seat} if seat != pod.node else {}),
        "phase": pod.phase,
        "request": pod.request,
        **_state_document(node, pod.uid, vm),
        "conditions": [condition.document(None) for condition in pod.conditions],
    }
    if node is not None and (trouble := agents.trouble(node.name, node.described)):
        document["agent"] = trouble
    if report is not None:
        document["measured"] = {"cpus": format_cpu_list(report.cpus), "revision": report.revision}
    if vm.devices is not None:
        document["devices"] = devices_document(vm.devices)
    if vm.placement is not None:
        document["placement"] = vm.placement.document()
    if claim is None or node is None:
        return document
    document["claim"] = _claim_document(claim)
    drawing = draw_node(node, vms_on(cache, node))
    if drawing is None or isinstance(node.machine, Unusable):
        return document
    topology = node.machine.topology
    cpus = CpuMask(claim.cpus | claim.owned | claim.still_in_use)
    labels = {entry.claim.uid: entry.label for entry in drawing.legend}
    return document | {
        "label": labels[pod.uid],
        "seat": _seat(topology, cpus),
        "map": core_map_document(drawing),
        "neighbours": [
            {
                "label": labels[one.claim.uid],
                "namespace": one.claim.namespace,
                "name": one.claim.vm,
                "nearness": one.nearness.value,
                "policy": one.claim.policy.value,
                "cpus": format_cpu_list(one.claim.cpus),
            }
            for one in neighbours_of(pod.uid, CpuMask(cpus & ~claim.still_in_use), topology, node.ledger)
        ],
    }


def _seat(topology: Topology, cpus: CpuMask) -> Json:
    """Name the sockets, NUMA nodes, L3 groups and the number of cores that some CPUs are on."""
    return {
        "sockets": [package.id for package in topology.packages if package.cpus & cpus],
        "numaNodes": [node.id for node in topology.numa_nodes if node.cpus & cpus],
        "l3Groups": [index for index, group in enumerate(topology.l3_groups) if group & cpus],
        "cores": sum(1 for core in topology.cores if core & cpus),
        "wholeCores": sum(1 for core in topology.cores if core & cpus == core),
        "cpus": cpus.bit_count(),
    }
