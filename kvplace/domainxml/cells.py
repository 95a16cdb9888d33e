"""`<cpu>`: NUMA cells and CPU topology of a guest with `guest-numa: mirror`.

KubeVirt writes a topology of its own and at most one cell; both are replaced as a whole. The result stays
within KubeVirt's partial schema: sockets, cores and threads, no dies.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from math import gcd

from lxml import etree

from kvplace.core.cpuset import format_cpu_list, mask_of
from kvplace.core.errors import BadDomainXml
from kvplace.core.guest_cells import CELL_GRANULE, GuestCell, apportion
from kvplace.core.placement import Placement
from kvplace.core.quantity import counted
from kvplace.core.scalars import Bytes
from kvplace.domainxml.document import add_to_root, align, only_child, text_bytes_of
from kvplace.domainxml.pins import Vcpus

_ARCHITECTURES_WITHOUT_CELLS = ("s390x", "s390")
_OURS = ("id", "cpus", "memory", "unit")


def mirror_host(
    root: etree._Element, placement: Placement, vcpus: Vcpus, warn: Callable[[str], None]
) -> None:
    """Replace the guest's topology and cells; raises BadDomainXml where the guest cannot have them.

    `warn` gets a sentence when the guest sees less than was asked for.
    """
    _check_possible(root)
    cells = placement.guest_cells
    count = len(vcpus.enabled) + len(vcpus.pluggable)
    home = {vcpu: cell.id for cell in cells for vcpu in cell.vcpus}
    homes = [home[vcpu] for vcpu in range(min(count, len(home)))]
    threads = _threads(cells[0].threads, homes, count)
    if threads < cells[0].threads:
        warn(
            f"the guest sees cores of one thread, not {cells[0].threads}: its {count} vCPUs, "
            "hot-pluggable ones included, do not fill whole cores"
        )
    socket = _socket(homes, count)
    if spare := count - len(homes):
        warn(
            f"{counted(spare, 'vCPU')} that can be plugged in later {'is' if spare == 1 else 'are'} assigned "
            "to the guest's NUMA cells in turn, sharing the CPUs of the other vCPUs on the host"
        )
        homes += _cells_in_turn(cells, spare, by=socket if spare % socket == 0 else threads)
    memory = _memory_of_cells(root, placement)
    cpu = only_child(root, "cpu")
    if cpu is None:
        cpu = etree.Element("cpu")
        add_to_root(root, cpu, after=root.find("features"))
    _write_topology(cpu, sockets=count // socket, cores=socket // threads, threads=threads)
    _write_cells(cpu, cells, homes, memory)
    align(root, cpu)


def _check_possible(root: etree._Element) -> None:
    architecture = root.find("os/type")
    if architecture is not None and architecture.get("arch") in _ARCHITECTURES_WITHOUT_CELLS:
        raise BadDomainXml(
            f"guests of architecture {architecture.get('arch')} have no NUMA cells; remove guest-numa: mirror"
        )
    if root.find("memoryBacking/hugepages/page[@nodeset]") is not None:
        raise BadDomainXml(
            "<hugepages><page nodeset> names guest NUMA cells that guest-numa: mirror replaces; "
            "remove one of the two"
        )


def _threads(wanted: int, homes: Sequence[int], count: int) -> int:
    if count % wanted or len(homes) % wanted:
        return 1
    lined_up = all(len(set(homes[at : at + wanted])) == 1 for at in range(0, len(homes), wanted))
    return wanted if lined_up else 1


def _socket(homes: Sequence[int], count: int) -> int:
    """How many vCPUs a guest socket has: one per cell if all cells have equal sizes, otherwise one in all.

    A guest assumes that the CPUs of one socket share a cache, so a socket should not be in two cells; where
    it must, guests split it by cells.
    """
    runs = [len(list(run)) for _, run in groupby(homes)]
    alike = len(set(runs)) == 1
    return gcd(runs[0], count - len(homes)) if alike else count


def _cells_in_turn(cells: Sequence[GuestCell], count: int, *, by: int) -> list[int]:
    """Choose a cell for each of `count` more vCPUs: `by` vCPUs for each cell that has vCPUs, in turn."""
    candidates = [cell.id for cell in cells if cell.vcpus]
    return [candidates[number // by % len(candidates)] for number in range(count)]


def _memory_of_cells(root: etree._Element, placement: Placement) -> list[Bytes]:
    """Bytes of each cell; together they are the guest's memory without its memory devices.

    Normally that is the memory that was placed. Where the domain has more or less, the cells change in
    proportion.
    """
    memory = only_child(root, "memory")
    if memory is None:
        raise BadDomainXml("the domain has no <memory> to divide among its NUMA cells; add it")
    devices = root.iterfind("devices/memory/target/size")
    total = text_bytes_of(memory, "<memory>") - sum(
        text_bytes_of(size, "<memory><target><size>") for size in devices
    )
    amounts = [cell.memory for cell in placement.guest_cells]
    if total > 0 and total != sum(amounts):
        page_sizes = [size for pages in placement.huge_pages.values() for size in pages]
        weights = amounts if any(amounts) else [1] * len(amounts)
        amounts = list(map(Bytes, apportion(total, weights, max(CELL_GRANULE, *page_sizes, 0))))
    if total <= 0 or not all(amounts):
        raise BadDomainXml(
            f"{max(0, total)} bytes of memory are not enough for {len(amounts)} guest NUMA cells; "
            "remove guest-numa: mirror"
        )
    return amounts


def _write_topology(cpu: etree._Element, **counts: int) -> None:
    topology = cpu.find("topology")
    if topology is None:
        topology = etree.Element("topology")
        cpu.insert(0, topology)
    for name in ("dies", "clusters"):
        topology.attrib.pop(name, None)
    topology.attrib.update({name: str(count) for name, count in counts.items()})


def _write_cells(
    cpu: etree._Element, cells: Sequence[GuestCell], homes: Sequence[int], memory: Sequence[int]
) -> None:
    numa = cpu.find("numa")
    if numa is None:
        numa = etree.SubElement(cpu, "numa")
    old = numa.findall("cell")
    attributes = old[0].items() if old else []
    kept = {str(key): str(value) for key, value in attributes if key not in _OURS}
    for stale in old:
        numa.remove(stale)
    numa[0:0] = [
        _cell(cell, [vcpu for vcpu, home in enumerate(homes) if home == cell.id], amount, kept)
        for cell, amount in zip(cells, memory, strict=True)
    ]


def _cell(cell: GuestCell, vcpus: Sequence[int], memory: int, kept: Mapping[str, str]) -> etree._Element:
    element = etree.Element("cell", id=str(cell.id))
    if vcpus:  # libvirt refuses an empty list; a cell of memory alone has no list
        element.set("cpus", format_cpu_list(mask_of(vcpus)))
    element.set("memory", str(memory))
    element.set("unit", "b")
    element.attrib.update(kept.items())
    distances = etree.SubElement(element, "distances")
    for other, distance in enumerate(cell.distances):
        etree.SubElement(distances, "sibling", id=str(other), value=str(distance))
    return element
