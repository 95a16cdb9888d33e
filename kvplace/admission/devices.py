"""The devices that an object requests, by the resource of their device plugin.

A pod states all of them: virt-controller adds the VM's devices to its compute container, also devices of
the NetworkAttachmentDefinition of an SR-IOV network. A VMI states GPUs and host devices only.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from kvplace.admission.objects import AdmittedContainer, VmiDomain, read_quantity
from kvplace.core.errors import Misconfigured
from kvplace.core.node_devices import is_device, read_device_counts
from kvplace.core.scalars import ResourceName


def devices_of_containers(containers: Iterable[AdmittedContainer], what: str) -> dict[ResourceName, int]:
    """Count the devices of containers; raises Misconfigured that begins with `what` for a strange number."""
    counts: Counter[str] = Counter()
    for container in containers:
        # Limits, as the API server sets the requests of extended resources to them.
        for resource, value in {**container.requested, **container.limited}.items():
            if is_device(resource):
                place = f"{what}: container {container.name}: {resource}"
                count = read_quantity(value, place)
                if count.denominator != 1 or count < 0:
                    raise Misconfigured(f"{place} is {value!r}; write a whole number of devices")
                counts[resource] += int(count)
    return _checked(counts, what)


def devices_of_domain(domain: VmiDomain, what: str) -> dict[ResourceName, int]:
    """Count the devices that a VMI names; those of SR-IOV networks and ResourceClaims are not among them."""
    if domain.devices is None:
        return {}
    named = [*(domain.devices.gpus or ()), *(domain.devices.host_devices or ())]
    return _checked(Counter(device.device_name for device in named if device.device_name), what)


def has_devices(domain: VmiDomain) -> bool:
    """Whether a VMI gets any device of the host, however it is named."""
    devices = domain.devices
    return devices is not None and bool(devices.gpus or devices.host_devices or sriov_interfaces(domain))


def sriov_interfaces(domain: VmiDomain) -> int:
    """Count the interfaces with a device that only the NetworkAttachmentDefinition of their network names."""
    interfaces = (domain.devices.interfaces if domain.devices else None) or ()
    return sum(interface.sriov is not None for interface in interfaces)


def claimed_devices(domain: VmiDomain) -> int:
    """Count the GPUs and host devices that come from a ResourceClaim."""
    devices = domain.devices
    if devices is None:
        return 0
    return sum(not one.device_name for one in [*(devices.gpus or ()), *(devices.host_devices or ())])


def _checked(counts: Mapping[str, int], what: str) -> dict[ResourceName, int]:
    try:
        return read_device_counts(counts, f"{what}: devices")
    except ValueError as error:
        raise Misconfigured(str(error)) from None
