"""The NodeResourceTopology of a node (topology.node.k8s.io/v1alpha2), which other schedulers and tools read.

A zone is a NUMA node. What is available there follows from the ledger, so it counts every VM with CPUs of its
own, in every QoS class.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from kvplace.core.free_resources import Free
from kvplace.core.node_devices import DeviceCount, TopologyPolicy
from kvplace.core.quantity import format_bytes
from kvplace.core.scalars import NumaId
from kvplace.core.topology import NumaNode, Topology

API_VERSION = "topology.node.k8s.io/v1alpha2"
KIND = "NodeResourceTopology"
FINGERPRINT = "topology.node.k8s.io/fingerprint"

_UNKNOWN_COST = 255
"""SLIT's word for a node that cannot be reached; used where the machine reports no distance."""


def resource_topology(
    topology: Topology,
    free: Free,
    fingerprint: str,
    policy: TopologyPolicy,
    devices: Iterable[DeviceCount] = (),
) -> dict[str, Any]:
    """Write the object without its name; `fingerprint` is that of the running pods."""
    return {
        "apiVersion": API_VERSION,
        "kind": KIND,
        "metadata": {"annotations": {FINGERPRINT: fingerprint}},
        "topologyPolicies": [policy.joined],
        "attributes": [
            {"name": "topologyManagerPolicy", "value": policy.policy},
            {"name": "topologyManagerScope", "value": policy.scope},
            {"name": "nodeTopologyPodsFingerprint", "value": fingerprint},
            {"name": "nodeTopologyPodsFingerprintMethod", "value": "all"},
        ],
        "zones": [
            _zone(topology, node, free, [one for one in devices if one.node == node.id])
            for node in topology.numa_nodes
        ],
    }


def _zone(topology: Topology, node: NumaNode, free: Free, devices: Iterable[DeviceCount]) -> dict[str, Any]:
    return {
        "name": _name(node.id),
        "type": "Node",
        "costs": [
            {"name": _name(other.id), "value": node.distances.get(other.id, _UNKNOWN_COST)}
            for other in topology.numa_nodes
        ],
        "resources": [
            *_resources(topology, node, free),
            *(_resource(one.resource, str(one.total), str(one.total), str(one.free)) for one in devices),
        ],
    }


def _resources(topology: Topology, node: NumaNode, free: Free) -> Iterator[Mapping[str, str]]:
    if node.cpus:
        sets = (node.cpus, node.cpus & topology.allocatable, node.cpus & free.pool)
        yield _resource("cpu", *(str(cpus.bit_count()) for cpus in sets))
    if node.memory:
        outside = topology.plain_memory[node.id]
        left = max(0, dict(free.memory).get(node.id, 0))
        yield _resource("memory", *map(format_bytes, (node.memory, outside, min(outside, left))))
    pages = free.pages_by_node
    for size, count in sorted(node.huge_pages.items()):
        left = max(0, pages.get((node.id, size), 0))
        amounts = (format_bytes(size * number) for number in (count, count, left))
        yield _resource(f"hugepages-{format_bytes(size)}", *amounts)


def _resource(name: str, capacity: str, allocatable: str, available: str) -> dict[str, str]:
    return {"name": name, "capacity": capacity, "allocatable": allocatable, "available": available}


def _name(node: NumaId) -> str:
    return f"node-{node}"
