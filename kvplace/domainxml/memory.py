"""`<numatune>`: the host NUMA nodes of the VM's memory.

`<memory mode nodeset>` is always written in full, because KubeVirt reads a missing one as an empty one. A
`<memnode>` is written for each guest NUMA cell when the vCPUs of every cell run on one host node each, so
that the memory of a cell is local to its vCPUs. With `guest-numa: mirror` each cell is on one node by
construction.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from lxml import etree

from kvplace.core.cpuset import cpus_of, format_cpu_list, mask_of, parse_cpu_list, union
from kvplace.core.errors import BadDomainXml
from kvplace.core.guest_cells import CELL_GRANULE
from kvplace.core.placement import Placement
from kvplace.core.request import NumaMemory
from kvplace.core.scalars import NO_CPUS, CpuId, CpuMask, NumaId
from kvplace.domainxml.sizes import bytes_of
from kvplace.domainxml.threads import only_child
from kvplace.domainxml.whitespace import add_to_root, align, remove, remove_child_of_root

_BINDINGS = ("memory", "memnode")
_ROUNDING = 2 * CELL_GRANULE
"""Cells of a mirroring guest are cut to whole granules, and one of them has what is finer."""


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
    memory = etree.Element("memory")
    memory.set("mode", mode)
    memory.set("nodeset", format_cpu_list(mask_of(placement.memory_nodes)))
    bindings = [memory]
    for cell, node in node_of_cells.items():
        memnode = etree.Element("memnode")
        memnode.set("cellid", str(cell))
        memnode.set("mode", mode)
        memnode.set("nodeset", str(node))
        bindings.append(memnode)
    numatune[0:0] = bindings
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
    nodes = _node_under_cells(cells, placement, node_of_cpu)
    if not nodes and node_of_cpu:
        together = format_cpu_list(mask_of(placement.memory_nodes))
        warn(
            f"the memory of the guest's {len(cells)} NUMA cells is bound to NUMA nodes {together} together, "
            "because their vCPUs or their memory are not on one NUMA node for each cell"
        )
    return nodes


def _node_under_cells(
    cells: Sequence[etree._Element], placement: Placement, node_of_cpu: Mapping[CpuId, NumaId]
) -> dict[int, NumaId]:
    """The host node of each cell; empty unless each has its vCPUs on one node that gives its memory."""
    nodes: dict[int, NumaId] = {}
    needed: dict[NumaId, int] = {}
    for position, cell in enumerate(cells):
        found = {node_of_cpu.get(CpuId(cpu)) for cpu in cpus_of(_host_cpus(cell, placement))}
        node = found.pop() if len(found) == 1 else None
        if node is None or node not in placement.numa_nodes:
            return {}
        number = cell.get("id", str(position))
        if not (number.isascii() and number.isdigit() and len(number) <= 5) or int(number) in nodes:
            raise BadDomainXml(f"<cell id> is {number[:40]!r}; guest cells are numbered 0, 1, 2 and so on")
        nodes[int(number)] = node
        needed[node] = needed.get(node, 0) + bytes_of(
            cell.get("memory", ""), cell.get("unit"), "<cell memory>"
        )
    if placement.memory and any(
        count > placement.memory.get(node, 0) + _ROUNDING for node, count in needed.items()
    ):
        return {}
    return nodes


def _host_cpus(cell: etree._Element, placement: Placement) -> CpuMask:
    try:
        guest = parse_cpu_list(cell.get("cpus", ""), what="<cell cpus>")
    except ValueError:
        return NO_CPUS  # libvirt also allows ^4, which is not read here
    if placement.vcpus:
        # vCPUs that can be plugged in later have no CPU of their own and so say nothing about their cell.
        guest &= (1 << len(placement.vcpus)) - 1
    return union(placement.cpus_of_vcpu(vcpu) for vcpu in cpus_of(guest))
