"""The CPUs that a kubelet reserves for its host, as it reports itself through the API server.

A pod could see them only in the kubelet's configuration file: that takes a volume of the host and often root.
Who may describe nodes can often ask the kubelet (`get nodes/proxy`); for others the command names what was
not read.
"""

from __future__ import annotations

from typing import Protocol

from kvplace.core.cpuset import format_cpu_list, parse_cpu_list
from kvplace.core.errors import KvplaceError
from kvplace.core.scalars import CpuMask, NodeName
from kvplace.core.topology import Topology
from kvplace.kube.api_errors import Denied
from kvplace.kube.object_client import Document


class KubeletReader(Protocol):
    """The cluster calls of this module."""

    async def read_kubelet_configuration(self, node: str) -> Document:
        """Read the configuration that a kubelet runs with."""
        ...


async def reserved_by_kubelet(
    reader: KubeletReader, node: NodeName, topology: Topology
) -> tuple[CpuMask, str]:
    """Return the CPUs to reserve where no user names any, and a sentence about where they come from."""
    lowest = topology.cores[0]
    others = f"CPU {format_cpu_list(lowest)} is reserved, the core of the lowest CPU; --reserved names others"
    try:
        said = (await reader.read_kubelet_configuration(node)).get("reservedSystemCPUs") or ""
        reserved = parse_cpu_list(str(said), what="reservedSystemCPUs") & topology.cpus
    except Denied:
        return (
            lowest,
            f"the kubelet's reservedSystemCPUs were not read (you may not get nodes/proxy): {others}",
        )
    except (KvplaceError, ValueError) as error:
        return lowest, f"the kubelet's reservedSystemCPUs could not be read ({error}): {others}"
    if not reserved:
        return lowest, f"the kubelet of {node} reserves no CPU (reservedSystemCPUs): {others}"
    return reserved, f"CPU {format_cpu_list(reserved)} is reserved, as the kubelet's reservedSystemCPUs state"
