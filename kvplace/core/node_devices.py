"""Devices of a node by resource and NUMA node, and how its kubelet chooses among them.

They are not part of the machine's fingerprint: a device that comes or goes must not make running VMs
immovable.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from kvplace.core.scalars import NumaId, ResourceName

NO_NUMA = NumaId(-1)
"""Of a device that is on no known NUMA node, as Linux writes it."""
_ALIGNING = {"best-effort": "BestEffort", "restricted": "Restricted", "single-numa-node": "SingleNUMANode"}


@dataclass(frozen=True, slots=True)
class TopologyPolicy:
    """How the kubelet's Topology Manager is set."""

    policy: str = "none"
    scope: str = "container"

    @property
    def joined(self) -> str:
        """Both in one word, as `topologyPolicies` of a NodeResourceTopology has them."""
        name = _ALIGNING.get(self.policy)
        return "None" if name is None else f"{name}{self.scope.capitalize()}Level"

    @property
    def aligns(self) -> bool:
        """Whether the kubelet chooses devices by NUMA node at all."""
        return self.policy in _ALIGNING

    @property
    def rejects(self) -> bool:
        """Whether it fails a pod rather than start it with devices that it cannot align."""
        return self.policy in ("restricted", "single-numa-node")


@dataclass(frozen=True, slots=True)
class DeviceCount:
    """Devices of one resource on one NUMA node; a device on several counts on the lowest of them."""

    resource: ResourceName
    node: NumaId
    """NO_NUMA for devices without a known NUMA node."""
    total: int
    free: int


@dataclass(frozen=True, slots=True)
class PodDevice:
    """One device that the kubelet has given to a pod."""

    resource: ResourceName
    node: NumaId
    """NO_NUMA where it is not known."""
    address: str = ""
    """PCI address or UUID of a mediated device; empty where only the kubelet's id is known."""


@dataclass(frozen=True, slots=True)
class NodeDevices:
    """All devices of a node at one moment; hashable, so that nodes in equal states are found."""

    counts: tuple[DeviceCount, ...] = ()
    """Ascending by resource and NUMA node; every resource that the kubelet has devices of."""
    policy: TopologyPolicy = TopologyPolicy()

    @classmethod
    def of(cls, counts: Iterable[DeviceCount], policy: TopologyPolicy) -> NodeDevices:
        """Put counts into their order."""
        return cls(tuple(sorted(counts, key=lambda one: (one.resource, one.node))), policy)

    def by_node(self, resource: ResourceName) -> dict[NumaId, DeviceCount]:
        """Return the counts of one resource by NUMA node; empty for a resource that is not reported."""
        return {one.node: one for one in self.counts if one.resource == resource}
