"""A core map as JSON, for programs and the web pages: the values that the drawings show."""

from __future__ import annotations

from typing import Any

from kvplace.core.cpuset import format_cpu_list
from kvplace.core.device_locality import device_phrases
from kvplace.core.drawing.core_map import CoreMap, L3Box, NodeBox, Thread
from kvplace.core.node_topology import API_VERSION
from kvplace.core.placement import Placement

KIND = "CoreMap"


def core_map_document(drawing: CoreMap) -> dict[str, Any]:
    """Write a core map as JSON."""
    return {
        "apiVersion": API_VERSION,
        "kind": KIND,
        "name": drawing.name,
        "sockets": [
            {"id": package.id, "numaNodes": [_node_document(node) for node in package.nodes]}
            for package in drawing.packages
        ],
        "memoryOnlyNodes": [_node_document(node) for node in drawing.memory_only],
        "legend": [
            {
                "label": entry.label,
                "namespace": entry.claim.namespace,
                "pod": entry.claim.pod,
                "vmi": entry.claim.vmi,
                "policy": entry.claim.policy.value,
                "cpus": format_cpu_list(entry.claim.cpus),
                "owned": format_cpu_list(entry.claim.owned),
                **_qemu_document(entry.placement),
                **({"devices": list(device_phrases(entry.devices))} if entry.devices else {}),
            }
            for entry in drawing.legend
        ],
        "faults": [
            {"kind": fault.kind.value, "cpus": format_cpu_list(fault.cpus), "message": fault.sentence}
            for fault in drawing.faults
        ],
    }


def _node_document(node: NodeBox) -> dict[str, Any]:
    return {
        "id": node.id,
        **_part(node),
        "memory": node.memory,
        "freeMemory": node.free_memory,
        "hugePages": {
            str(size): {"free": free, "count": count} for size, (free, count) in node.huge_pages.items()
        },
        **(
            {"devices": {one: {"free": free, "count": count} for one, (free, count) in node.devices.items()}}
            if node.devices
            else {}
        ),
        "distances": {str(other): value for other, value in sorted(node.distances.items())},
        "l3Groups": [
            {
                "index": l3.index,
                **_part(l3),
                "cores": [[_thread_document(thread) for thread in core.threads] for core in l3.cores],
            }
            for l3 in node.l3_groups
        ],
    }


def _qemu_document(placement: Placement | None) -> dict[str, Any]:
    if placement is None:
        return {}
    return {
        "emulatorCpus": format_cpu_list(placement.emulator_cpus),
        "ioThreadCpus": [format_cpu_list(cpus) for cpus in placement.io_thread_cpus],
    }


def _part(box: NodeBox | L3Box) -> dict[str, bool]:
    return {"part": True} if box.part else {}


def _thread_document(thread: Thread) -> dict[str, Any]:
    document: dict[str, Any] = {"cpu": thread.cpu, "state": thread.state.value}
    if thread.vms:
        document["vms"] = list(thread.vms)
    if thread.strays:
        document["strays"] = list(thread.strays)
    if thread.qemu:
        document["qemu"] = list(thread.qemu)
    if thread.fault is not None:
        document["fault"] = thread.fault.value
    return document
