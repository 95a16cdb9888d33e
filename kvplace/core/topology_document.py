"""The JSON form of a machine: the spec of a NodeTopology and what `kvplace topology -o json` prints.

CPU sets are Linux cpu lists, memory is a quantity, huge pages are counts by page size:

    {"packages": [{"id": 0, "cpus": "0-3"}],
     "numaNodes": [{"id": 0, "cpus": "0-3", "memory": "16Gi", "hugePages": {"1Gi": 4},
                    "distances": {"0": 10}}],
     "l3Groups": ["0-3"], "cores": ["0,2", "1,3"], "reserved": "0", "isolated": "",
     "fingerprint": "sha256:..."}
"""

from __future__ import annotations

from typing import Any

from kvplace.core.cpuset import MAX_CPU, format_cpu_list
from kvplace.core.errors import BadTopology
from kvplace.core.json_fields import Fields
from kvplace.core.quantity import format_bytes, write_page_counts
from kvplace.core.scalars import NO_CPUS, CpuMask, NumaId, PackageId
from kvplace.core.topology import NumaNode, Package, Topology

_KEYS = ("packages", "numaNodes", "l3Groups", "cores", "reserved", "isolated", "fingerprint")
_DEVICE_KEYS = ("devices", "topologyPolicy")
"""Of descriptions that people write; `node_topology.read_stated_devices` reads them."""
_MAX_ID = (1 << 31) - 1
_MAX_DISTANCE = (1 << 31) - 1


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
