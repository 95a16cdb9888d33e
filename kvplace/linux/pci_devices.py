"""The NUMA node of a PCI device, and of a mediated device by its parent, as sysfs states it.

Firmware states the node of a PCI root; Linux gives it to every device below. -1 means that the firmware has
stated none, which is usual on machines with one NUMA node.
"""

from __future__ import annotations

from pathlib import Path

from kvplace.core.scalars import NumaId, PciAddress
from kvplace.linux.kernel_files import KernelError, read_text

_LONGEST = 64
"""Bytes of a number in sysfs, and more."""


def numa_node_of_pci(address: PciAddress, sys: Path) -> NumaId | None:
    """Read the NUMA node of a PCI device, None for -1; raises Gone or KernelError that names the file."""
    return _numa_node(sys / "bus/pci/devices" / address)


def numa_node_of_mediated(uuid: str, sys: Path) -> NumaId | None:
    """Read the NUMA node of the parent of a mediated device (vGPU); as `numa_node_of_pci`.

    `uuid` must be one: it becomes part of a path.
    """
    return _numa_node(sys / "bus/mdev/devices" / uuid / "..")


def _numa_node(folder: Path) -> NumaId | None:
    path = folder / "numa_node"
    text = read_text(path, _LONGEST).strip()
    try:
        node = int(text)
    except ValueError:
        raise KernelError(f"{path} has {text!r}, not a number") from None
    return NumaId(node) if node >= 0 else None
