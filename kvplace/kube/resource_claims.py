"""Devices of Dynamic Resource Allocation (`resource.k8s.io/v1`): slices, resource claims and device classes.

A driver publishes the devices of a node in ResourceSlices. kube-scheduler allocates devices of them to the
ResourceClaims of a pod, before it asks the extender to bind the pod. Here these objects become records with
the fields that lead to a NUMA node. A "resource claim" is Kubernetes' object; a "claim" alone is of a ledger.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from kvplace.core.scalars import NodeName, NumaId, PciAddress, ResourceName
from kvplace.kube.records import NO_NODE
from kvplace.kube.watches import Kind

ResourceClaimName: TypeAlias = tuple[str, str]
"""Namespace and name."""
DeviceKey: TypeAlias = tuple[str, str, str]
"""Driver, pool and name of a device, as an allocation names it."""


@dataclass(frozen=True, slots=True)
class SliceDevice:
    """A device that a driver publishes."""

    name: str
    numa_node: NumaId | None = None
    """As the driver states it; None where it does not, or states -1."""
    address: PciAddress | None = None
    pcie_root: str = ""
    node: NodeName = NO_NODE
    """Its node, where the devices of one slice are on several."""
    is_shared: bool = False
    """Whether several resource claims may have it at a time."""


@dataclass(frozen=True, slots=True)
class SliceRecord:
    """A ResourceSlice: some devices of one pool."""

    name: str
    driver: str
    pool: str
    generation: int = 0
    """Only the slices with the highest generation of a pool count."""
    node: NodeName = NO_NODE
    """Empty for devices that are not of one node."""
    devices: tuple[SliceDevice, ...] = ()


@dataclass(frozen=True, slots=True)
class DeviceRequest:
    """One request of a resource claim."""

    device_class: str
    count: int = 1


@dataclass(frozen=True, slots=True)
class ResourceClaimRecord:
    """A ResourceClaim."""

    namespace: str
    name: str
    requests: tuple[DeviceRequest, ...] = ()
    """Requests for a number of devices of one class; others, such as lists of alternatives, are left out."""
    allocated: tuple[DeviceKey, ...] | None = None
    """None until kube-scheduler has allocated devices."""


@dataclass(frozen=True, slots=True)
class DeviceClassRecord:
    """A DeviceClass."""

    name: str
    driver: str = ""
    """The driver of all its devices; empty where its selectors do not name one."""
    extended_resource: ResourceName | None = None
    """Resource of a container that requests such a device without a resource claim."""


SLICES: Kind[str, SliceRecord] = Kind("resourceslices", lambda record: record.name, {})
RESOURCE_CLAIMS: Kind[ResourceClaimName, ResourceClaimRecord] = Kind(
    "resourceclaims", lambda record: (record.namespace, record.name), {}
)
DEVICE_CLASSES: Kind[str, DeviceClassRecord] = Kind("deviceclasses", lambda record: record.name, {})
