"""How objects of Dynamic Resource Allocation (`resource.k8s.io/v1`) become records.

A driver publishes the devices of a node in ResourceSlices. kube-scheduler allocates devices of them to the
ResourceClaims of a pod, before it asks the extender to bind the pod. A "resource claim" is Kubernetes'
object; a "claim" alone is of a ledger.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, TypeAlias

import msgspec

from kvplace.core.scalars import NodeName, NumaId, PciAddress, ResourceName
from kvplace.kube.api_records import RecordReader
from kvplace.kube.claimed_cpus import stated_cpus
from kvplace.kube.object_parts import ApiObject, Metadata, StoredObject
from kvplace.kube.object_records import (
    CPU_DRIVER,
    DeviceClassRecord,
    DeviceRequest,
    ResourceClaimRecord,
    SliceDevice,
    SliceRecord,
)
from kvplace.kube.watches import DEVICE_CLASSES, RESOURCE_CLAIMS, SLICES, Kind

_STANDARD = "resource.kubernetes.io/"
_NUMA_NAMES = (f"{_STANDARD}numaNode", "numaNode", "numa", "numaNodeID", "dra.net/numaNode")
"""Attributes with a NUMA node, the surest first; one without a domain is the driver's own."""
_DRIVER = re.compile(r"""device\.driver\s*==\s*(?:"([^"]+)"|'([^']+)')""")
_ONE_OF_SEVERAL = re.compile(r"\|\||!|\?")


class _DeviceAttribute(ApiObject, frozen=True):
    string: str | None = None
    integer: int | None = msgspec.field(name="int", default=None)
    integers: tuple[int, ...] | None = msgspec.field(name="ints", default=None)

    @property
    def number(self) -> int | None:
        """A whole number; of a list the first, which is the device's own node."""
        return self.integers[0] if self.integers else self.integer


class _PublishedDevice(ApiObject, frozen=True):
    name: str = ""
    attributes: dict[str, _DeviceAttribute] | None = None
    node_name: str | None = None
    allow_multiple_allocations: bool | None = None


class _DevicePool(ApiObject, frozen=True):
    name: str = ""
    generation: int = 0


class _SliceSpec(ApiObject, frozen=True):
    driver: str = ""
    pool: _DevicePool = _DevicePool()
    node_name: str | None = None
    devices: tuple[_PublishedDevice, ...] | None = None


class _ExactRequest(ApiObject, frozen=True):
    device_class_name: str = ""
    allocation_mode: str = "ExactCount"
    count: int = 1
    admin_access: bool | None = None
    capacity: dict[str, dict[str, str] | None] | None = None
    """The amounts of each device, under `requests`."""


class _AnyRequest(ApiObject, frozen=True):
    exactly: _ExactRequest | None = None


class _AllocationResult(ApiObject, frozen=True):
    driver: str = ""
    pool: str = ""
    device: str = ""


class _DeviceList(ApiObject, frozen=True):
    requests: tuple[_AnyRequest, ...] | None = None
    """In a spec."""
    results: tuple[_AllocationResult, ...] | None = None
    """In an allocation."""


class _WithDevices(ApiObject, frozen=True):
    """The spec of a ResourceClaim, or its allocation."""

    devices: _DeviceList = _DeviceList()


class _ResourceClaimStatus(ApiObject, frozen=True):
    allocation: _WithDevices | None = None


class ResourceClaimObject(ApiObject, frozen=True):
    """A ResourceClaim."""

    metadata: Metadata
    spec: _WithDevices = _WithDevices()
    status: msgspec.Raw = msgspec.Raw(b"null")


class _DeviceClassSpec(ApiObject, frozen=True):
    selectors: tuple[dict[str, dict[str, str] | None], ...] | None = None
    """Each an `expression` under `cel`."""
    extended_resource_name: str | None = None


_SliceObject: TypeAlias = StoredObject[_SliceSpec, None]
_DeviceClassObject: TypeAlias = StoredObject[_DeviceClassSpec, None]
_STATUS = msgspec.json.Decoder(_ResourceClaimStatus | None)


def _slice(document: _SliceObject) -> SliceRecord:
    spec = document.spec
    devices = tuple(_slice_device(device, spec.driver) for device in spec.devices or ())
    return SliceRecord(
        document.metadata.name,
        spec.driver,
        spec.pool.name,
        spec.pool.generation,
        NodeName(spec.node_name or ""),
        devices,
    )


def _slice_device(device: _PublishedDevice, driver: str) -> SliceDevice:
    # A driver may write the domain of its own attributes, or leave it out.
    attributes = {name.removeprefix(f"{driver}/"): one for name, one in (device.attributes or {}).items()}
    stated = (attributes[name].number for name in _NUMA_NAMES if name in attributes)
    numa_node = next((number for number in stated if number is not None and number >= 0), None)
    address = attributes.get(f"{_STANDARD}pciBusID", _DeviceAttribute()).string
    root = attributes.get(f"{_STANDARD}pcieRoot", _DeviceAttribute()).string
    return SliceDevice(
        device.name,
        None if numa_node is None else NumaId(numa_node),
        PciAddress(address.lower()) if address else None,
        root or "",
        NodeName(device.node_name or ""),
        bool(device.allow_multiple_allocations),
    )


def resource_claim_record(document: ResourceClaimObject) -> ResourceClaimRecord:
    """Cut a ResourceClaim down to its record."""
    exactly = [one.exactly for one in document.spec.devices.requests or () if one.exactly is not None]
    requests = tuple(
        DeviceRequest(
            one.device_class_name,
            one.count,
            stated_cpus((one.capacity or {}).get("requests")),
        )
        for one in exactly
        if one.allocation_mode == "ExactCount" and not one.admin_access
    )
    status = _STATUS.decode(document.status)
    allocation = status.allocation if status is not None else None
    allocated = None
    if allocation is not None:
        allocated = tuple((one.driver, one.pool, one.device) for one in allocation.devices.results or ())
    metadata, is_of_cpus = document.metadata, any(key[0] == CPU_DRIVER for key in allocated or ())
    return ResourceClaimRecord(
        metadata.namespace,
        metadata.name,
        requests,
        allocated,
        metadata.resource_version,
        msgspec.json.decode(document.status) if is_of_cpus else {},
    )


def _device_class(document: _DeviceClassObject) -> DeviceClassRecord:
    selectors = (one.get("cel") or {} for one in document.spec.selectors or ())
    expressions = [cel["expression"] for cel in selectors if "expression" in cel]
    drivers = {driver for expression in expressions if (driver := driver_of(expression))}
    resource = document.spec.extended_resource_name
    return DeviceClassRecord(
        document.metadata.name,
        drivers.pop() if len(drivers) == 1 else "",
        ResourceName(resource) if resource else None,
    )


def driver_of(expression: str) -> str:
    """Return the driver that a CEL selector demands; empty unless it is certain that it demands one.

    Only comparisons with a literal, joined by `&&`, are certain.
    """
    found = _DRIVER.findall(expression)
    if len(found) != 1 or _ONE_OF_SEVERAL.search(_DRIVER.sub("", expression)):
        return ""
    quoted, apostrophised = found[0]
    return str(quoted or apostrophised)


RESOURCE_CLAIM = msgspec.json.Decoder(ResourceClaimObject)
DRA_READERS: Mapping[Kind[Any, Any], RecordReader[Any]] = {
    SLICES: RecordReader.of(msgspec.json.Decoder(_SliceObject), _slice),
    RESOURCE_CLAIMS: RecordReader.of(RESOURCE_CLAIM, resource_claim_record),
    DEVICE_CLASSES: RecordReader.of(msgspec.json.Decoder(_DeviceClassObject), _device_class),
}
