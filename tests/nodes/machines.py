"""Small machines for tests, and nodes as kube-scheduler sees them."""

from __future__ import annotations

from typing import Any

import msgspec

from kvplace.core.cpuset import mask_of, parse_cpu_list
from kvplace.core.scalars import NodeName
from kvplace.kube.node_filters import SchedulableNode
from tests.core.machines import make_numa_node, make_package, make_topology

EIGHT = make_topology(
    packages=(make_package(0, mask_of(range(8))),),
    numa_nodes=(make_numa_node(0, mask_of(range(8)), 0),),
    l3_groups=(mask_of(range(8)),),
    cores=tuple(1 << cpu for cpu in range(8)),
)
"""One socket of eight cores without siblings."""

TWO = make_topology(
    packages=(make_package(0, parse_cpu_list("0-3,8-11")), make_package(1, parse_cpu_list("4-7,12-15"))),
    numa_nodes=(
        make_numa_node(0, parse_cpu_list("0-3,8-11"), 16 * (1 << 30)),
        make_numa_node(1, parse_cpu_list("4-7,12-15"), 16 * (1 << 30)),
    ),
    l3_groups=(parse_cpu_list("0-3,8-11"), parse_cpu_list("4-7,12-15")),
    cores=tuple(1 << core | 1 << core + 8 for core in range(8)),
)
"""Two sockets of four cores with two threads each and 16 GiB of memory each."""

TWO_QUADS = make_topology(
    packages=(make_package(0, mask_of(range(8))),),
    numa_nodes=tuple(make_numa_node(node, mask_of(range(node * 4, node * 4 + 4)), 0) for node in range(2)),
    l3_groups=tuple(mask_of(range(node * 4, node * 4 + 4)) for node in range(2)),
    cores=tuple(1 << cpu for cpu in range(8)),
)
"""One socket with two NUMA nodes of four cores each."""


def scheduled(name: NodeName, **spec: Any) -> SchedulableNode:
    """Make a Ready node with the label `host`, as kube-scheduler sees it."""
    status = {"conditions": [{"type": "Ready", "status": "True"}]}
    document = {"metadata": {"name": name, "labels": {"host": name}}, "spec": spec, "status": status}
    return msgspec.convert(document, SchedulableNode)
