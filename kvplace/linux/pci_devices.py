"""The NUMA node of a PCI device, and of a mediated device by its parent, as sysfs states it.

Firmware states the node of a PCI root; Linux gives it to every device below. -1 means that the firmware has
stated none, which is usual on machines with one NUMA node.
"""

from __future__ import annotations

import re
from pathlib import Path

from kvplace.core.errors import KvplaceError
from kvplace.core.scalars import NumaId, PciAddress
from kvplace.linux.kernel_files import KernelError, read_text

_LONGEST = 64
"""Bytes of a number in sysfs, and more."""
_ROOT = re.compile(r"pci[0-9a-f]{4,8}:[0-9a-f]{2}", re.ASCII)


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


def numa_nodes_of_buses(sys: Path) -> dict[str, NumaId]:
    """Map PCI roots (`pci0000:c0`) and buses (`0000:c1`) to the NUMA node that all their devices are on.

    Roots and buses without a known NUMA node, or with devices on several, are absent.
    """
    found: dict[str, set[NumaId | None]] = {}
    try:
        devices = sorted((sys / "bus/pci/devices").iterdir())
    except OSError:
        return {}  # a machine without PCI
    for device in devices:
        try:
            node = _numa_node(device)
            path = device.readlink()
        except (KvplaceError, OSError):
            continue  # it was removed meanwhile
        for name in (device.name.rpartition(":")[0], *filter(_ROOT.fullmatch, path.parts)):
            found.setdefault(name, set()).add(node)
    alike = {name: nodes.pop() for name, nodes in found.items() if len(nodes) == 1}
    return {name: node for name, node in alike.items() if node is not None}
