"""Devices of an emulated machine that VMs get; called inside."""

from __future__ import annotations

import os
import resource
import subprocess
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from xml.etree import ElementTree as ET

from harness.libvirt_session.daemon import UID
from kvplace.core.errors import KvplaceError
from kvplace.core.placement import PodPlacement
from kvplace.core.scalars import NumaId, PciAddress
from kvplace.hook.define_domain import define_domain
from kvplace.hook.process import PodEnvironment
from kvplace.linux.pci_devices import numa_node_of_pci
from tests.emulated_machine import vm_keeper

SYS = Path("/sys")
_PCI = SYS / "bus/pci"
_UNSAFE = SYS / "module/vfio_iommu_type1/parameters/allow_unsafe_interrupts"


@dataclass(frozen=True)
class DeviceNodes:
    """The NUMA node of each PCI device, as we and as hwloc read it."""

    ours: dict[PciAddress, NumaId | None]
    hwloc: dict[PciAddress, int | None]
    """Only of the devices that hwloc lists."""


def virtual_functions(address: str, count: int) -> tuple[str, ...]:
    """Make virtual functions of a device and bind them to vfio-pci, as an operator of SR-IOV does."""
    device = _PCI / "devices" / address
    # Emulated hardware does not remap interrupts, which VFIO wants of real one.
    _UNSAFE.write_text("1")
    (device / "sriov_drivers_autoprobe").write_text("0")
    (device / "sriov_numvfs").write_text("0")
    (device / "sriov_numvfs").write_text(str(count))
    made = sorted(link.resolve().name for link in device.glob("virtfn*"))
    for each in made:
        (_PCI / "devices" / each / "driver_override").write_text("vfio-pci")
        (_PCI / "drivers_probe").write_text(each)
        group = (_PCI / "devices" / each / "iommu_group").resolve().name
        os.chown(f"/dev/vfio/{group}", UID, UID)
    return tuple(made)


def device_nodes() -> DeviceNodes:
    """Read the NUMA nodes of all PCI devices."""
    addresses = [PciAddress(each.name) for each in (_PCI / "devices").iterdir()]
    command = ["lstopo-no-graphics", "--of", "xml", "--whole-io"]
    xml = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    found: dict[PciAddress, int | None] = {}
    _walk(ET.fromstring(xml), None, found)
    return DeviceNodes({each: numa_node_of_pci(each, SYS) for each in addresses}, found)


def _walk(element: ET.Element, nodes: str | None, found: dict[PciAddress, int | None]) -> None:
    """Collect the PCI devices below an object with the NUMA nodes of the nearest object that has them."""
    nodes = element.get("nodeset", nodes)
    if element.get("type") == "PCIDev":
        mask = int(nodes or "0", 16)
        alone = mask.bit_count() == 1
        found[PciAddress(element.get("pci_busid", ""))] = mask.bit_length() - 1 if alone else None
    for child in element.findall("object"):
        _walk(child, nodes, found)


def answer_of_hook(document: bytes, placement: str) -> tuple[str, str]:
    """Let the hook answer as in a pod on this machine; returns the domain, or why there is none."""
    bound = PodPlacement.from_json(placement)
    with TemporaryDirectory() as folder:
        for name, text in (("uid", bound.pod_uid), ("placement", placement)):
            Path(folder, name).write_text(text)
        env = PodEnvironment(folder, folder, "hook-sidecar-0", bound.node)
        try:
            return define_domain(document, b"{}", env).decode(), ""
        except KvplaceError as error:
            return "", str(error)


def start_vm(vm: vm_keeper.Vm, document: bytes) -> vm_keeper.RunningVm:
    """Start a VM with devices; virt-handler raises its limit of locked memory, which VFIO needs, as here."""
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    Path(vm.document).write_bytes(document)
    return vm_keeper.start(vm)


def open_devices(pid: int) -> tuple[list[str], int]:
    """List the VFIO groups that a process has open, and the KiB of memory that it has locked or pinned."""
    links = [str(each.readlink()) for each in Path(f"/proc/{pid}/fd").iterdir()]
    status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    locked = sum(int(status[key].split()[0]) for key in ("VmLck", "VmPin"))
    return sorted(link for link in links if link.startswith("/dev/vfio/")), locked


def group_of(address: str) -> str:
    """Name the file of a device's VFIO group."""
    return f"/dev/vfio/{(_PCI / 'devices' / address / 'iommu_group').resolve().name}"
