"""The devices of the host that a domain gets, and PCIe expander buses that show the guest their NUMA nodes.

`<hostdev>` of PCI and mediated devices are read; others (USB, SCSI) have no NUMA node. A document is not
trusted: a source address that libvirt would refuse is reported as unknown, because refusing it is libvirt's
part.

With mirrored cells the guest sees each device in the cell of its NUMA node:

    pcie-expander-bus of a guest cell ── pcie-root-port ── device
                                      └─ pcie-root-port ── device

KubeVirt passes a document up to three times, from the second time on with the addresses that libvirt has
given. So our buses have an alias, and once they exist only their numbers and cells are written again. Where
the domain has expander buses of another author, nothing is added.

The numbers of buses descend from 256, and each bus leaves room for its ports: a guest does not find a device
behind a bus that has none, and neither libvirt nor QEMU reports this.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from lxml import etree

from kvplace.core.guest_cells import GuestCell
from kvplace.core.quantity import counted
from kvplace.core.scalars import NumaId, PciAddress

_UUID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", re.ASCII)
_NUMBER = re.compile(r"0x[0-9a-f]{1,8}|0+|[1-9][0-9]{0,9}", re.ASCII)
_MOST = {"domain": 0xFFFFFFFF, "bus": 0xFF, "slot": 0x1F, "function": 7}
_ABSENT = {"domain": "0", "bus": "", "slot": "", "function": "0"}
"""The value of an attribute that is missing."""


@dataclass(frozen=True, slots=True)
class AssignedDevice:
    """A device of the host that the guest gets."""

    alias: str
    """KubeVirt's name for it, such as `ua-sriov-fast`; empty where it has no alias."""
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


_EXPANDER, _PORT = "pcie-expander-bus", "pcie-root-port"
_ALIAS = "ua-kvplace-cell-"
_BUSES = 256
_SLOTS = 32
_PORTS_OF_ROOT = 32
"""Buses that the guest needs below ours: KubeVirt adds no root port with an index above 31."""
_MOST_BUS = 0xFF


@dataclass(frozen=True, slots=True)
class _Wanted:
    """A device that belongs into a guest cell."""

    element: etree._Element
    device: AssignedDevice
    cell: int

    @property
    def bus(self) -> int | None:
        """The controller that it has an address on; None without a guest address."""
        return _bus_of(self.element)


def place_devices(
    root: etree._Element,
    cells: Sequence[GuestCell],
    node_of_device: Mapping[str, NumaId],
    warn: Callable[[str], None],
) -> None:
    """Put each device with a known NUMA node behind an expander bus of the guest cell of this node.

    `node_of_device` has the host's NUMA node by the address on the host. `warn` gets a sentence for devices
    that stay where they are.
    """
    wanted = list(_wanted(root, cells, node_of_device, warn))
    devices = root.find("devices")
    if not wanted or devices is None:
        return
    if not _is_q35(root):
        warn("the guest does not see the NUMA nodes of its devices: only machine type q35 has expander buses")
        return
    controllers = {
        index: each
        for each in devices.iterfind("controller[@type='pci']")
        if (index := pci_number(each.get("index", ""), _MOST_BUS)) is not None
    }
    expanders = {index: each for index, each in controllers.items() if each.get("model") == _EXPANDER}
    ours = {index for index, each in expanders.items() if _is_ours(each)}
    if len(ours) < len(expanders):
        warn("the guest does not see the NUMA nodes of its devices: its domain has other PCIe expander buses")
        return
    if ours:
        _renew(wanted, controllers, ours, warn)
        return
    for each in wanted:
        if each.bus is not None:
            warn(f"device {each.device} keeps its guest PCI address, so the guest does not see its NUMA node")
    _build(devices, [each for each in wanted if each.bus is None], controllers, warn)


def _wanted(
    root: etree._Element,
    cells: Sequence[GuestCell],
    node_of_device: Mapping[str, NumaId],
    warn: Callable[[str], None],
) -> Iterator[_Wanted]:
    cell_of = {cell.node: cell.id for cell in reversed(cells)}
    for element, device in assigned_devices(root):
        node = node_of_device.get(device.source)
        if node is None:
            continue
        if node in cell_of:
            yield _Wanted(element, device, cell_of[node])
        else:
            warn(f"device {device} is on NUMA node {node}, which the guest does not have")


def _build(
    devices: etree._Element,
    wanted: Sequence[_Wanted],
    controllers: Mapping[int, etree._Element],
    warn: Callable[[str], None],
) -> None:
    """Add a bus for each cell, and behind it a port for each device."""
    if not wanted:
        return
    # libvirt makes root ports for every index up to the highest address, so ours must lie above.
    index = max([0, *controllers, *_buses_in_use(devices)]) + 1
    number = _BUSES
    added: list[etree._Element] = []
    for cell in sorted({each.cell for each in wanted}):
        of_cell = [each for each in wanted if each.cell == cell]
        if len(of_cell) > _SLOTS:
            warn(
                f"the guest sees the NUMA node of {_SLOTS} of the {len(of_cell)} devices in its cell {cell}: "
                "a PCIe bus has no more slots"
            )
            of_cell = of_cell[:_SLOTS]
        if number - 1 - len(of_cell) <= _PORTS_OF_ROOT or index + len(of_cell) > _MOST_BUS:
            warn(f"{counted(len(of_cell), 'device')} in guest cell {cell} get no expander bus: none is left")
            continue
        number -= 1 + len(of_cell)
        bus = index
        added.append(_controller(index, _EXPANDER))
        etree.SubElement(added[-1], "alias", name=f"{_ALIAS}{cell}")
        _write_target(added[-1], cell, number)
        for slot, each in enumerate(of_cell):
            index += 1
            added.append(_controller(index, _PORT))
            added[-1].append(_address(bus, slot))
            each.element.append(_address(index, 0))
        index += 1
    _add_controllers(devices, added)


def _renew(
    wanted: Sequence[_Wanted],
    controllers: Mapping[int, etree._Element],
    ours: set[int],
    warn: Callable[[str], None],
) -> None:
    """Write the cell and the number of each of our buses again; every device stays on its bus."""
    cells: dict[int, set[int]] = {bus: set() for bus in sorted(ours)}
    for each in wanted:
        port = controllers.get(-1 if each.bus is None else each.bus)
        bus = None if port is None else _bus_of(port)
        if bus in cells and bus is not None:
            cells[bus].add(each.cell)
        else:
            warn(f"device {each.device} is on no expander bus, so the guest does not see its NUMA node")
    number = _BUSES
    for bus, found in cells.items():
        number -= 1 + sum(_bus_of(port) == bus for port in controllers.values())
        if len(found) > 1:
            warn(f"devices behind expander bus {bus} are on several NUMA nodes; restart the VM")
        elif found:
            _write_target(controllers[bus], found.pop(), number)


def _is_q35(root: etree._Element) -> bool:
    kind = root.find("os/type")
    return kind is not None and "q35" in kind.get("machine", "")


def _buses_in_use(devices: etree._Element) -> Iterator[int]:
    for address in devices.iterfind("*/address[@type='pci']"):
        bus = pci_number(address.get("bus", ""), _MOST_BUS)
        if bus is not None:
            yield bus


def _bus_of(element: etree._Element) -> int | None:
    address = element.find("address")
    return None if address is None else pci_number(address.get("bus", ""), _MOST_BUS)


def _is_ours(expander: etree._Element) -> bool:
    alias = expander.find("alias")
    return alias is not None and alias.get("name", "").startswith(_ALIAS)


def _controller(index: int, model: str) -> etree._Element:
    return etree.Element("controller", type="pci", index=str(index), model=model)


def _write_target(expander: etree._Element, cell: int, number: int) -> None:
    for stale in expander.findall("target"):
        expander.remove(stale)
    target = etree.SubElement(expander, "target", busNr=str(number))
    etree.SubElement(target, "node").text = str(cell)


def _address(bus: int, slot: int) -> etree._Element:
    place = {"domain": "0x0000", "bus": f"0x{bus:02x}", "slot": f"0x{slot:02x}", "function": "0x0"}
    element = etree.Element("address", type="pci")
    element.attrib.update(place)
    return element


def _add_controllers(devices: etree._Element, added: Sequence[etree._Element]) -> None:
    """Insert controllers after the last one, each on a line of its own where the document has lines."""
    present = devices.findall("controller")
    if not present:
        devices[0:0] = added
        return
    anchor = present[-1]
    between = anchor.getprevious()
    line = devices.text if between is None else between.tail
    for element in added:
        tail = anchor.tail
        anchor.addnext(element)
        element.tail, anchor.tail = tail, line
        anchor = element
