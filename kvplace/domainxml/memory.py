"""`<numatune>`: the host NUMA nodes of the VM's memory.

`<memory mode nodeset>` is always written in full, because KubeVirt reads a missing one as an empty one. A
`<memnode>` is written for each guest NUMA cell when the vCPUs of every cell run on one host node each, so
that the memory of a cell is local to its vCPUs. With `guest-numa: mirror` each cell is on one node by
construction.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from lxml import etree

from kvplace.core.cpuset import cpus_of, format_cpu_list, mask_of, parse_cpu_list, union
from kvplace.core.errors import BadDomainXml
from kvplace.core.guest_cells import CELL_GRANULE
from kvplace.core.placement import Placement
from kvplace.core.request import NumaMemory
from kvplace.core.scalars import NO_CPUS, CpuId, CpuMask, NumaId
from kvplace.domainxml.document import add_to_root, align, bytes_of, only_child, remove, remove_child_of_root

_BINDINGS = ("memory", "memnode")
_ROUNDING = 2 * CELL_GRANULE
"""Cells of a mirroring guest are cut to whole granules, and one of them has the finer rest."""


def bind_memory(
    root: etree._Element,
    placement: Placement,
    node_of_cpu: Mapping[CpuId, NumaId],
    warn: Callable[[str], None],
) -> None:
    """Replace the memory binding; mode `off` removes it.

    `warn` gets a sentence when the guest has cells that cannot be bound to a node each.
    """
    numatune = only_child(root, "numatune")
    if numatune is not None:
        for stale in [child for child in numatune if child.tag in _BINDINGS]:
            remove(stale)
    if placement.numa_memory is NumaMemory.OFF:
        if numatune is not None and not len(numatune):
            remove_child_of_root(numatune)
        return
    if not placement.numa_nodes:
        raise BadDomainXml(
            f"the placement asks for numa-memory {placement.numa_memory.value} but has no NUMA node; "
            "set numa-memory to off"
        )
    if numatune is None:
        numatune = etree.Element("numatune")
        add_to_root(root, numatune, after=root.find("cputune"))
    node_of_cells = _node_of_cells(root, placement, node_of_cpu, warn)
    mode = (placement.numa_memory if node_of_cells else placement.memory_mode).value
    numatune[0:0] = [
        etree.Element("memory", mode=mode, nodeset=format_cpu_list(mask_of(placement.memory_nodes))),
        *(
            etree.Element("memnode", cellid=str(cell), mode=mode, nodeset=str(node))
            for cell, node in node_of_cells.items()
        ),
    ]
    align(root, numatune)


def _node_of_cells(
    root: etree._Element,
    placement: Placement,
    node_of_cpu: Mapping[CpuId, NumaId],
    warn: Callable[[str], None],
) -> dict[int, NumaId]:
    """The host node of each guest cell; empty where they are not to be bound one by one, or cannot be."""
    if placement.numa_memory is NumaMemory.INTERLEAVE:
        return {}
    if placement.guest_cells:
        return {cell.id: NumaId(cell.node) for cell in placement.guest_cells}
    cells = root.findall("cpu/numa/cell")
    if len(cells) < 2 or len(placement.numa_nodes) < 2:
        return {}
    read = [_read_cell(position, cell, placement) for position, cell in enumerate(cells)]
    if len({cell.number for cell in read}) != len(read):
        raise BadDomainXml("two <cell> elements have the same id; guest cells are numbered 0, 1, 2 and so on")
    nodes = _node_under_cells(read, placement, node_of_cpu)
    if not nodes and node_of_cpu:
        together = format_cpu_list(mask_of(placement.memory_nodes))
        warn(
            f"the memory of the guest's {len(cells)} NUMA cells is bound to NUMA nodes {together} together, "
            "because their vCPUs or their memory are not on one NUMA node for each cell"
        )
    return nodes


@dataclass(frozen=True, slots=True)
class _Cell:
    """A cell as its document has it."""

    number: int
    vcpus: CpuMask
    """vCPUs with CPUs on the host; vCPUs that can be plugged in later state nothing about their cell."""
    memory: int


def _read_cell(position: int, cell: etree._Element, placement: Placement) -> _Cell:
    number = cell.get("id", str(position))
    if not (number.isascii() and number.isdigit() and len(number) <= 5):
        raise BadDomainXml(f"<cell id> is {number[:40]!r}; guest cells are numbered 0, 1, 2 and so on")
    try:
        vcpus = parse_cpu_list(cell.get("cpus", ""), what="<cell cpus>")
    except ValueError:
        vcpus = NO_CPUS  # libvirt also allows ^4, which is not read here
    if placement.vcpus:
        vcpus &= (1 << len(placement.vcpus)) - 1
    return _Cell(int(number), vcpus, bytes_of(cell.get("memory", ""), cell.get("unit"), "<cell memory>"))


def _node_under_cells(
    cells: Sequence[_Cell], placement: Placement, node_of_cpu: Mapping[CpuId, NumaId]
) -> dict[int, NumaId]:
    """The host node of each cell; empty unless each has its vCPUs on one node that gives its memory.

    Cells without vCPUs are on the nodes that give memory alone.
    """
    nodes: dict[int, NumaId] = {}
    left = {node: placement.memory.get(node, 0) + _ROUNDING for node in placement.numa_nodes}
    for cell in cells:
        if not cell.vcpus:
            continue
        host = union(placement.cpus_of_vcpu(vcpu) for vcpu in cpus_of(cell.vcpus))
        found = {node_of_cpu.get(cpu) for cpu in cpus_of(host)}
        node = found.pop() if len(found) == 1 else None
        if node is None or node not in left:
            return {}
        nodes[cell.number] = node
        left[node] -= cell.memory
    alone = sorted((cell for cell in cells if not cell.vcpus), key=lambda cell: -cell.memory)
    if alone and union(cell.vcpus for cell in cells) != (1 << len(placement.vcpus)) - 1:
        return {}  # libvirt assigns the others to a cell by itself
    for cell in alone:
        fits = [node for node, size in left.items() if node not in nodes.values() and size >= cell.memory]
        if not fits or not placement.memory:
            return {}
        nodes[cell.number] = min(fits, key=left.__getitem__)
        left[nodes[cell.number]] -= cell.memory
    if placement.memory and any(size < 0 for size in left.values()):
        return {}
    return dict(sorted(nodes.items()))
