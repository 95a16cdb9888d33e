"""The devices of the host that a domain gets: `<hostdev>` of PCI and mediated devices.

Others (USB, SCSI) have no NUMA node. A document is not trusted: a source address that libvirt would refuse is
reported as unknown, because refusing it is libvirt's part.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from lxml import etree

from kvplace.core.scalars import PciAddress

_UUID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", re.ASCII)
_NUMBER = re.compile(r"0x[0-9a-f]{1,8}|0+|[1-9][0-9]{0,9}", re.ASCII)
_MOST = {"domain": 0xFFFFFFFF, "bus": 0xFF, "slot": 0x1F, "function": 7}
_ABSENT = {"domain": "0", "bus": "", "slot": "", "function": "0"}
"""What an attribute is that is not there."""


@dataclass(frozen=True, slots=True)
class AssignedDevice:
    """A device of the host that the guest gets."""

    alias: str
    """What KubeVirt calls it, such as `ua-sriov-fast`; empty where it has no alias."""
    pci: PciAddress | None = None
    mediated: str = ""
    """UUID of a mediated device."""

    @property
    def source(self) -> str:
        """Its address on the host; empty where the document has none that can be read."""
        return self.pci or self.mediated

    def __str__(self) -> str:
        source = self.source or "without a readable source address"
        return f"{self.alias} ({source})" if self.alias else source


def assigned_devices(root: etree._Element) -> list[tuple[etree._Element, AssignedDevice]]:
    """List the PCI and mediated devices of a domain with their elements, in the order of the document."""
    found = []
    for element in root.iterfind("devices/hostdev"):
        kind = element.get("type")
        alias = element.find("alias")
        name = "" if alias is None else _printable(alias.get("name", ""))
        address = element.find("source/address")
        if kind == "pci":
            device = AssignedDevice(name, pci=None if address is None else pci_address_of(address))
        elif kind == "mdev":
            uuid = "" if address is None else address.get("uuid", "").lower()
            device = AssignedDevice(name, mediated=uuid if _UUID.fullmatch(uuid) else "")
        else:
            continue
        found.append((element, device))
    return found


def pci_address_of(element: etree._Element) -> PciAddress | None:
    """Read the attributes of an `<address>`; None where they are not a PCI address."""
    read = (pci_number(element.get(name, _ABSENT[name]), most) for name, most in _MOST.items())
    parts = [part for part in read if part is not None]
    return PciAddress("{:04x}:{:02x}:{:02x}.{:x}".format(*parts)) if len(parts) == len(_MOST) else None


def pci_number(text: str, most: int) -> int | None:
    """Read a number as libvirt does, hexadecimal with 0x, decimal without; None for anything else."""
    text = text.strip().lower()
    if not _NUMBER.fullmatch(text):
        return None
    number = int(text, 16 if text.startswith("0x") else 10)
    return number if number <= most else None


def _printable(alias: str) -> str:
    return "".join(each for each in alias[:80] if each.isprintable())
