"""The objects that describe the machine of a node: NodeTopology and NodeResourceTopology.

`kvplace topology -o json` prints the same NodeTopology as `kubectl get nodetopology -o json`; every command
that takes a machine takes either. The spec has CPU sets as Linux cpu lists, memory as a quantity, huge pages
as counts by page size:

    {"packages": [{"id": 0, "cpus": "0-3"}],
     "numaNodes": [{"id": 0, "cpus": "0-3", "memory": "16Gi", "hugePages": {"1Gi": 4},
                    "distances": {"0": 10}}],
     "l3Groups": ["0-3"], "cores": ["0,2", "1,3"], "reserved": "0", "isolated": "",
     "fingerprint": "sha256:..."}

Other schedulers and tools read the NodeResourceTopology (topology.node.k8s.io/v1alpha2). A zone is a NUMA
node. The available resources follow from the ledger, so they count every VM that owns CPUs, in every QoS
class.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from enum import Enum
from typing import Any

from kvplace.core.cpuset import MAX_CPU, format_cpu_list, mask_of
from kvplace.core.errors import BadTopology
from kvplace.core.free_resources import NOTHING_IN_USE, Free, MemoryInUse
from kvplace.core.json_fields import Fields
from kvplace.core.node_devices import (
    MOST_DEVICES,
    NO_NUMA,
    DeviceCount,
    NodeDevices,
    TopologyPolicy,
    is_device,
    read_device_report,
)
from kvplace.core.quantity import format_bytes, write_page_counts
from kvplace.core.scalars import NO_CPUS, CpuMask, NumaId, PackageId, ResourceName
from kvplace.core.strict_json import shown, unknown_key
from kvplace.core.topology import NumaNode, Package, Topology

GROUP = "kvplace.io"
VERSION = "v1alpha1"
API_VERSION = f"{GROUP}/{VERSION}"
"""Of all kinds of kvplace, and of the documents that its commands print."""
KIND = "NodeTopology"
_KEYS = ("packages", "numaNodes", "l3Groups", "cores", "reserved", "isolated", "fingerprint")
_DEVICE_KEYS = ("devices", "topologyPolicy")
"""Of descriptions that people write; `read_stated_devices` reads them."""
_MAX_ID = (1 << 31) - 1
_MAX_DISTANCE = (1 << 31) - 1
_LABEL = r"[a-z0-9]([-a-z0-9]*[a-z0-9])?"
_NODE_NAME = re.compile(rf"{_LABEL}(\.{_LABEL})*", re.ASCII)
_LONGEST_NAME = 253


class Enforcement(Enum):
    """The mechanism that sets cpusets on a node: `status.enforcement` of its NodeTopology."""

    NONE = "none"
    """Nothing: there is no agent, or it only observes."""
    NRI = "nri"
    """The agent's NRI plugin, from the first instruction of every container."""
    CGROUP = "cgroup"
    """The agent writes cgroups after a container was created."""
    DRA = "dra"
    """dra-driver-cpu: each container gets the CPUs of its ResourceClaim; the agent only observes."""

    @property
    def by_agent(self) -> bool:
        """Whether the agent itself sets cpusets, so that a running VM can get other cores."""
        return self in (Enforcement.NRI, Enforcement.CGROUP)


def node_topology(
    name: str,
    topology: Topology,
    kubelet_cpus: CpuMask = NO_CPUS,
    in_use: MemoryInUse = NOTHING_IN_USE,
) -> dict[str, Any]:
    """Write a machine as a NodeTopology, under the name or the closest valid name of a node.

    `kubelet_cpus` are the CPUs of the kubelet's static policy; they and the memory `in_use` outside of claims
    are in the object's status.
    """
    document: dict[str, Any] = {
        "apiVersion": API_VERSION,
        "kind": KIND,
        "metadata": {"name": node_name(name)},
        "spec": topology_document(topology),
    }
    if kubelet_cpus:
        document["status"] = {"kubeletCpus": format_cpu_list(kubelet_cpus)}
    if in_use != NOTHING_IN_USE:
        document.setdefault("status", {})["inUse"] = in_use.document()
    return document


def read_node_topology(document: Mapping[str, Any]) -> tuple[str, Topology]:
    """Read a NodeTopology, or its spec alone, that a person may have written: its node's name, its machine.

    Raises BadTopology, also for a key that is not known, another API version, and a name that no node has.
    The name is empty where the document has none.
    """
    name = ""
    if "spec" in document:
        if sentence := unknown_key(document, ("apiVersion", "kind", "metadata", "spec", "status")):
            raise BadTopology(sentence)
        for key, expected in (("apiVersion", API_VERSION), ("kind", KIND)):
            if document.get(key, expected) != expected:
                raise BadTopology(f"{key} is {shown(document[key])}; it must be {expected}")
        metadata = document.get("metadata")
        name = _checked_name(metadata.get("name", "")) if isinstance(metadata, Mapping) else ""
    return name, read_topology(document, known_only=True)


def read_stated_devices(document: Mapping[str, Any], topology: Topology) -> NodeDevices | None:
    """Read the devices of a described machine: devices of its spec, else of its agent's report.

    In the spec all devices are free; without `topologyPolicy` the kubelet aligns nothing, as by default. None
    where the description names no devices; raises ValueError that names the field.
    """
    root = Fields(document)
    spec = Fields(root.raw["spec"], "spec") if "spec" in root.raw else root
    status = root.raw.get("status")
    if "devices" not in spec.raw:
        report = status.get("devices") if isinstance(status, Mapping) else None
        found = read_device_report(report, "status.devices")
        return None if found is None else found.devices
    policy = TopologyPolicy(spec.text("topologyPolicy", TopologyPolicy().policy))
    stated: list[tuple[ResourceName, NumaId, int]] = []
    for entry in spec.each("devices"):
        entry.only(("resource", "numaNode", "count"))
        resource = entry.text("resource")
        if not is_device(resource):
            raise entry.bad("resource", "the resource of a device, such as intel.com/vf")
        node = NumaId(NO_NUMA if entry.raw.get("numaNode") == NO_NUMA else entry.whole("numaNode", MAX_CPU))
        if not may_have_devices(topology, node):
            raise entry.bad("numaNode", f"{NO_NUMA} or a NUMA node of the machine: {numa_list(topology)}")
        stated.append((ResourceName(resource), node, entry.whole("count", MOST_DEVICES, default=1)))
    return NodeDevices.all_free(stated, policy)


def may_have_devices(topology: Topology, node: NumaId) -> bool:
    """Whether a machine may have devices with this NUMA node; -1 stands for an unknown one."""
    return node == NO_NUMA or node in topology.node_by_id


def numa_list(topology: Topology) -> str:
    """Write the NUMA nodes of a machine as Linux does: 0-3."""
    return format_cpu_list(mask_of(node.id for node in topology.numa_nodes))


def node_name(text: str) -> str:
    """Turn any name, such as a file name, into a valid name of a node."""
    name = re.sub(r"[^a-z0-9]*\.[^a-z0-9]*", ".", re.sub(r"[^a-z0-9.]", "-", text.lower()))
    return name[:_LONGEST_NAME].strip("-.") or "machine"


def _checked_name(name: object) -> str:
    """Check the name of a node: a DNS-1123 subdomain, as Kubernetes demands."""
    if name == "" or (isinstance(name, str) and len(name) <= _LONGEST_NAME and _NODE_NAME.fullmatch(name)):
        return name
    raise BadTopology(
        f"metadata.name is {shown(name)}; the name of a node consists of small letters, digits, '-' and '.' "
        "and begins and ends with a letter or digit"
    )


def topology_document(topology: Topology) -> dict[str, Any]:
    """Write a machine as JSON; `read_topology` gives it back unchanged."""
    return {
        "packages": [{"id": p.id, "cpus": format_cpu_list(p.cpus)} for p in topology.packages],
        "numaNodes": [
            {
                "id": node.id,
                "cpus": format_cpu_list(node.cpus),
                "memory": format_bytes(node.memory),
                "hugePages": write_page_counts(node.huge_pages),
                "distances": {str(other): value for other, value in sorted(node.distances.items())},
            }
            for node in topology.numa_nodes
        ],
        "l3Groups": [format_cpu_list(mask) for mask in topology.l3_groups],
        "cores": [format_cpu_list(mask) for mask in topology.cores],
        "reserved": format_cpu_list(topology.reserved),
        "isolated": format_cpu_list(topology.isolated),
        "fingerprint": topology.fingerprint,
    }


def read_topology(document: object, *, known_only: bool = False) -> Topology:
    """Read a machine from its JSON form, as a bare spec or a whole NodeTopology object.

    Raises BadTopology that names the field; with `known_only` also for a key that is not known, for
    documents that people write. A newer release may add keys to the objects of a cluster. A fingerprint in
    the document is ignored and computed again.
    """
    try:
        root = Fields(document)
        spec = Fields(root.raw["spec"], "spec") if "spec" in root.raw else root
        return _read(spec, known_only)
    except ValueError as error:
        raise BadTopology(str(error)) from None


def _read(spec: Fields, known_only: bool) -> Topology:
    packages, nodes = list(spec.each("packages")), list(spec.each("numaNodes"))
    if known_only:
        spec.only((*_KEYS, *_DEVICE_KEYS))
        for package in packages:
            package.only(("id", "cpus"))
        for node in nodes:
            node.only(("id", "cpus", "memory", "hugePages", "distances"))
    return Topology(
        packages=tuple(
            Package(PackageId(fields.whole("id", _MAX_ID)), fields.cpus("cpus")) for fields in packages
        ),
        numa_nodes=tuple(_numa_node(fields) for fields in nodes),
        l3_groups=_levels(spec, "l3Groups"),
        cores=_levels(spec, "cores"),
        reserved=spec.cpus("reserved", ""),
        isolated=spec.cpus("isolated", ""),
    )


def _numa_node(fields: Fields) -> NumaNode:
    return NumaNode(
        id=NumaId(fields.whole("id", MAX_CPU)),
        cpus=fields.cpus("cpus"),
        memory=fields.bytes("memory", 0),
        huge_pages=fields.page_counts("hugePages"),
        distances={
            other: distances.whole(key, _MAX_DISTANCE)
            for other, distances, key in fields.by_node("distances")
        },
    )


def _levels(spec: Fields, key: str) -> tuple[CpuMask, ...]:
    masks = spec.cpu_lists(key)
    if 0 in masks:
        raise ValueError(f"{spec.at(key)}[{masks.index(NO_CPUS)}] has no CPU")
    return masks


RESOURCE_TOPOLOGY_VERSION = "topology.node.k8s.io/v1alpha2"
RESOURCE_TOPOLOGY_KIND = "NodeResourceTopology"
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
    """Write a NodeResourceTopology without its name, with the fingerprint of the running pods."""
    return {
        "apiVersion": RESOURCE_TOPOLOGY_VERSION,
        "kind": RESOURCE_TOPOLOGY_KIND,
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
        "name": _zone_name(node.id),
        "type": "Node",
        "costs": [
            {"name": _zone_name(other.id), "value": node.distances.get(other.id, _UNKNOWN_COST)}
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


def _zone_name(node: NumaId) -> str:
    return f"node-{node}"
