"""Devices of the host as KubeVirt writes them into a domain."""

from __future__ import annotations


def pci(address: str, alias: str = "ua-sriov-fast", inside: str = "") -> str:
    """Write a PCI device with the address that sysfs gives it; `inside` goes among its elements."""
    domain, bus, rest = address.split(":")
    slot, function = rest.split(".")
    return (
        f"<hostdev mode='subsystem' type='pci' managed='no'><source><address domain='0x{domain}' "
        f"bus='0x{bus}' slot='0x{slot}' function='0x{function}'/></source><alias name='{alias}'/>"
        f"{inside}</hostdev>"
    )


def mediated(uuid: str) -> str:
    """Write a mediated device."""
    return (
        "<hostdev mode='subsystem' type='mdev' model='vfio-pci'><source>"
        f"<address uuid='{uuid}'/></source><alias name='ua-gpu-g1'/></hostdev>"
    )


def source(number: int) -> str:
    """Give the address of one of many devices on bus 41."""
    return f"0000:41:{number // 8:02x}.{number % 8}"


def hostdev(number: int, inside: str = "") -> str:
    """Write one of many devices."""
    return pci(source(number), f"ua-d{number}", inside)
