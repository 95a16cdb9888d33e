"""The devices that a container was given, as its environment and the names of its CDI devices state them.

Device plugins state them to the program: those of KubeVirt and NVIDIA in PCI_RESOURCE_* and
MDEV_PCI_RESOURCE_*, that for SR-IOV in PCIDEVICE_*. KubeVirt's plugin lists IOMMU groups to the kubelet, so
the address of a device is found here alone. NVIDIA's lists NUMA node 0 for a device with a node that it
cannot read.

The author of a pod can set such variables, too. So they count only where the kubelet lists as many
devices of that resource for the pod, and sysfs knows them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from itertools import groupby, islice
from pathlib import Path

from kvplace.core.node_devices import NO_NUMA, PodDevice
from kvplace.core.scalars import NumaId, PciAddress
from kvplace.linux.kernel_files import Gone, KernelError, NotPermitted
from kvplace.linux.pci_devices import numa_node_of_mediated, numa_node_of_pci

MOST_GIVEN = 256
"""Devices of one container that are read; more can only be the work of a tenant."""
_PREFIXES = ("MDEV_PCI_RESOURCE_", "PCI_RESOURCE_", "PCIDEVICE_")
_DETAILS = re.compile(r"PCIDEVICE_.*_INFO", re.DOTALL)
"""The description of its devices, as JSON, by the plugin for SR-IOV."""
_LONGEST = 64 * MOST_GIVEN
"""Characters of a variable; a device has at most 36 and a comma."""
_PCI = re.compile(r"[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]", re.ASCII)
_UUID = re.compile(r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}", re.ASCII)


@dataclass(frozen=True, slots=True, order=True)
class GivenDevice:
    """A device as its container sees it."""

    variable: str
    """The resource as names of variables have it: INTEL_COM_VF for intel.com/vf."""
    address: str
    """PCI address or UUID of a mediated device."""


def given_devices(environment: Iterable[str], cdi_names: Iterable[str]) -> tuple[GivenDevice, ...]:
    """Read the devices out of `NAME=value` and out of CDI names (`vendor.com/class=name`), each once."""
    stated = {*_in_variables(environment), *_in_names(cdi_names)}
    return tuple(islice(sorted(stated), MOST_GIVEN))


def with_addresses(
    listed: Iterable[PodDevice], given: Iterable[GivenDevice], nodes: Mapping[str, NumaId]
) -> tuple[PodDevice, ...]:
    """Put addresses and the NUMA nodes that sysfs states for them into what the kubelet lists for a pod.

    What the kubelet lists stays where the containers state another number of devices.
    """
    by_variable: dict[str, set[str]] = {}
    for device in given:
        if device.address in nodes:
            by_variable.setdefault(device.variable, set()).add(device.address)
    found: list[PodDevice] = []
    for resource, devices in groupby(sorted(listed, key=_resource), key=_resource):
        of_resource = list(devices)
        addresses = by_variable.get(_variable(resource), set())
        if len(addresses) == len(of_resource):
            of_resource = [
                PodDevice(of_resource[0].resource, nodes[address], address) for address in sorted(addresses)
            ]
        found += of_resource
    return tuple(found)


def numa_nodes_of(given: Iterable[GivenDevice], sys: Path) -> dict[str, NumaId]:
    """Read the NUMA node of each address from sysfs, NO_NUMA for -1; an address that it lacks is absent."""
    nodes: dict[str, NumaId] = {}
    for address in {device.address for device in given}:
        with suppress(Gone, NotPermitted, KernelError):
            if _PCI.fullmatch(address):
                node = numa_node_of_pci(PciAddress(address), sys)
            else:
                node = numa_node_of_mediated(address, sys)
            nodes[address] = NO_NUMA if node is None else node
    return nodes


def _in_variables(environment: Iterable[str]) -> Iterator[GivenDevice]:
    for entry in environment:
        name, _, value = entry.partition("=")
        prefix = next((prefix for prefix in _PREFIXES if name.startswith(prefix)), None)
        if prefix is None or _DETAILS.fullmatch(name) or len(value) > _LONGEST:
            continue
        for word in value.lower().split(","):
            if address := _address(word.strip()):
                yield GivenDevice(name.removeprefix(prefix), address)


def _in_names(cdi_names: Iterable[str]) -> Iterator[GivenDevice]:
    for name in cdi_names:
        kind, _, device = name.partition("=")
        if address := _address(device.lower()):
            yield GivenDevice(_variable(kind), address)


def _address(word: str) -> str:
    return word if _PCI.fullmatch(word) or _UUID.fullmatch(word) else ""


def _resource(device: PodDevice) -> str:
    return device.resource


def _variable(resource: str) -> str:
    return resource.upper().replace("/", "_").replace(".", "_")
