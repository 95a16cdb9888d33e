"""Nodes and VMs of a view for commands and the web map: as JSON, a stable interface, and as core maps."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

from kvplace.core.cpuset import format_cpu_list
from kvplace.core.device_locality import LocatedDevice
from kvplace.core.drawing.core_map import CoreMap, draw
from kvplace.core.free_resources import Free, FreeBlocks
from kvplace.core.ledger import Claim, Reserved
from kvplace.core.node_devices import DeviceReport
from kvplace.core.node_topology import API_VERSION
from kvplace.core.placement import Placement
from kvplace.core.quantity import format_bytes, write_page_counts
from kvplace.core.request_json import request_document
from kvplace.core.scalars import NO_CPUS, CpuMask, PodUid
from kvplace.core.strict_json import Json
from kvplace.core.topology import Topology
from kvplace.kube.object_records import Condition, PodReport
from kvplace.nodes.cluster_view import NodeView, VmView, with_devices
from kvplace.nodes.node_machine import NodeMachine, NodeSnapshot, Unusable

NODE_KIND, VM_KIND = "NodeView", "VmView"


def node_view_document(node: NodeView) -> Json:
    """Write a node: its CPUs by use, its largest free blocks, its memory and the VMs on it."""
    document: Json = {
        "apiVersion": API_VERSION,
        "kind": NODE_KIND,
        "name": node.name,
        **({"status": node.status} if node.status else {}),
        "problem": node.problem,
        "cpus": {
            use: format_cpu_list(cpus)
            for use, cpus in (
                ("all", node.cpus),
                ("reserved", node.reserved),
                ("owned", node.owned),
                ("shared", node.shared),
                ("free", node.free),
            )
        },
        "vms": [claim_view_document(claim) for claim in node.ledger.claims.values()],
    }
    if isinstance(node.machine, NodeMachine):
        document["topology"] = node.machine.topology.fingerprint
    if node.described is not None:
        document["enforcement"] = node.described.enforcement.value
    if node.free_blocks is not None:
        document["largestFree"] = free_blocks_document(node.free_blocks)
    if node.devices is not None:
        devices = DeviceReport(node.devices).document()
        document["devices"] = {key: devices[key] for key in ("topologyPolicy", "topologyScope", "resources")}
    if isinstance(node.snapshot, NodeSnapshot):
        document["memory"] = list(_memory(node.snapshot.machine.topology, node.snapshot.free))
    return document


def free_blocks_document(free_blocks: FreeBlocks) -> Json:
    """Write the largest free blocks by kind of domain."""
    return {
        domain.value: {
            "cpus": block.cpus,
            "cores": block.cores,
            "fragmentation": round(block.fragmentation, 4),
        }
        for domain, block in free_blocks.largest.items()
    }


def vm_view_document(vm: VmView) -> Json:
    """Write a VM: its request, its placement, and the report of its agent."""
    return {
        "apiVersion": API_VERSION,
        "kind": VM_KIND,
        "namespace": vm.namespace,
        "name": vm.name,
        "isVmi": vm.is_vmi,
        "pod": vm.pod.name or None,
        "uid": vm.pod.uid or None,
        "created": vm.pod.created,
        "state": vm.state.value,
        "phase": vm.phase or None,
        "node": vm.node or None,
        "request": None if vm.request is None else request_document(vm.request.request),
        "placement": None if vm.placement is None else vm.placement.document(),
        **({} if vm.devices is None else {"devices": devices_document(vm.devices)}),
        **_reservation(vm),
        "pinned": None if vm.pinned is None else _condition_document(vm.pinned),
    }


def devices_document(devices: Iterable[LocatedDevice]) -> list[Json]:
    """Write the devices of a VM; `local` is null where that is not known."""
    return [
        {
            "resource": one.device.resource,
            "numaNode": one.device.node,
            "address": one.device.address,
            **({"claim": one.device.claim} if one.device.claim else {}),
            "local": one.is_local,
        }
        for one in devices
    ]


def _reservation(vm: VmView) -> Json:
    """Write the CPUs that running VMs release for a waiting one; nothing where none does."""
    if not vm.reserved_on or vm.claim is None or vm.claim.reserved is None:
        return {}
    return {"reserved": {"node": vm.reserved_on, **reserved_document(vm.claim, vm.claim.reserved)}}


def list_document(kind: str, items: Iterable[Json]) -> Json:
    """Write several documents of a kind as one."""
    return {"apiVersion": API_VERSION, "kind": f"{kind}List", "items": list(items)}


def claim_view_document(claim: Claim) -> Json:
    """Write a claim: the VM, and its resources."""
    return {
        "namespace": claim.namespace,
        "name": claim.vm,
        "pod": claim.pod,
        "uid": claim.uid,
        "policy": claim.policy.value,
        "cpus": format_cpu_list(claim.cpus),
        "owned": format_cpu_list(claim.owned),
        "memory": {str(node): count for node, count in claim.memory.items()},
        "hugePages": {str(node): write_page_counts(pages) for node, pages in claim.huge_pages.items()},
        "since": claim.since,
        "moving": claim.relocation is not None,
        **({} if claim.reserved is None else {"reserved": reserved_document(claim, claim.reserved)}),
    }


def reserved_document(claim: Claim, reserved: Reserved) -> Json:
    """Write the reservation of a waiting VM, the part that others still own, and its end."""
    return {
        "owned": format_cpu_list(reserved.owned),
        "stillInUse": format_cpu_list(claim.still_in_use),
        "until": reserved.until,
    }


def _memory(topology: Topology, free: Free) -> Iterable[dict[str, Any]]:
    """Memory by NUMA node in bytes, without huge pages; nothing where none is reported."""
    left, pages = dict(free.memory), free.pages_by_node
    for node in topology.numa_nodes:
        if not node.memory:
            continue
        yield {
            "numaNode": node.id,
            "total": topology.plain_memory[node.id],
            "free": left.get(node.id, 0),
            "hugePages": {
                format_bytes(size): {"total": count, "free": pages.get((node.id, size), 0)}
                for size, count in sorted(node.huge_pages.items())
            },
        }


def _condition_document(condition: Condition) -> Json:
    return {"status": condition.status, "reason": condition.reason, "message": condition.message}


def draw_node(node: NodeView, vms: Iterable[VmView]) -> CoreMap | None:
    """Draw a node with these of its VMs; None where no machine is known."""
    if isinstance(node.machine, Unusable):
        return None
    found: dict[PodUid, CpuMask] = {}
    placements: dict[PodUid, Placement] = {}
    vms = tuple(vms)
    for vm in vms:
        if vm.placement is not None:
            placements[vm.pod.uid] = vm.placement.placement
        strays = _found(vm, node.reports.get(vm.pod.uid))
        if strays is not None:
            found[vm.pod.uid] = strays
    foreign = NO_CPUS if node.described is None else node.described.kubelet_cpus
    return draw(
        node.name,
        node.machine.topology,
        node.ledger,
        foreign=foreign,
        found=found,
        placements=placements,
        counts=() if node.devices is None else node.devices.counts,
        devices={vm.pod.uid: vm.devices for vm in map(partial(with_devices, node=node), vms) if vm.devices},
    )


def _found(vm: VmView, report: PodReport | None) -> CpuMask | None:
    """Return the CPUs of a VM's threads, if threads have left their place; None otherwise.

    Its agent reports the CPUs of all threads together. QEMU's own threads may run in the shared pool. While a
    VM gets other cores it has old and new ones.
    """
    if report is None or report.pinned or not report.running or not report.cpus:
        return None
    if vm.claim is None or vm.claim.relocation is not None:
        return None
    elsewhere = NO_CPUS
    if vm.placement is not None:
        elsewhere = vm.placement.placement.emulator_cpus
        for cpus in vm.placement.placement.io_thread_cpus:
            elsewhere |= cpus
    return CpuMask(report.cpus & ~(elsewhere & ~vm.claim.cpus))
