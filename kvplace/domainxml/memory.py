"""`<numatune>`: the host NUMA nodes of the VM's memory.

`<memory mode nodeset>` is always written in full, because KubeVirt's own reading of the document turns a
missing one into an empty one. A `<memnode>` is written for each guest NUMA cell when the vCPUs of every
cell sit on one host node each, so that a guest that sees several nodes gets memory where it computes; the
cells of a guest that mirrors the host lie on one node each by themselves.
"""

from __future__ import annotations

from collections.abc import Mapping

from lxml import etree

from kvplace.core.cpuset import cpus_of, format_cpu_list, mask_of, parse_cpu_list
from kvplace.core.errors import BadDomainXml
from kvplace.core.placement import Placement
from kvplace.core.request import NumaMemory
from kvplace.domainxml.pins import cpus_of_vcpu
from kvplace.domainxml.sizes import bytes_of
from kvplace.domainxml.threads import only_child
from kvplace.domainxml.whitespace import add_to_root, align, remove, remove_child_of_root

_BINDINGS = ("memory", "memnode")


def bind_memory(root: etree._Element, placement: Placement, node_of_cpu: Mapping[int, int]) -> None:
    """Replace the memory binding; mode `off` leaves none behind."""
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
            f"the placement asks for numa-memory {placement.numa_memory.value} but names no NUMA node; "
            "ask for numa-memory off"
        )
    if numatune is None:
        numatune = etree.Element("numatune")
        add_to_root(root, numatune, after=root.find("cputune"))
    mode = placement.numa_memory.value
    memory = etree.Element("memory")
    memory.set("mode", mode)
    memory.set("nodeset", format_cpu_list(mask_of(placement.memory_nodes)))
    bindings = [memory]
    for cell, node in _node_of_cells(root, placement, node_of_cpu).items():
        memnode = etree.Element("memnode")
        memnode.set("cellid", str(cell))
        memnode.set("mode", mode)
        memnode.set("nodeset", str(node))
        bindings.append(memnode)
    numatune[0:0] = bindings
    align(root, numatune)


def _node_of_cells(
    root: etree._Element, placement: Placement, node_of_cpu: Mapping[int, int]
) -> dict[int, int]:
    """The host node of each guest cell, or nothing when it is not one each or not what was accounted for."""
    if placement.numa_memory is NumaMemory.INTERLEAVE:
        return {}
    if placement.guest_cells:
        return {cell.id: cell.node for cell in placement.guest_cells}
    cells = root.findall("cpu/numa/cell")
    if len(cells) < 2 or len(placement.numa_nodes) < 2:
        return {}
    nodes: dict[int, int] = {}
    wanted: dict[int, int] = {}
    for position, cell in enumerate(cells):
        found = {node_of_cpu.get(cpu) for cpu in cpus_of(_host_cpus(cell, placement))}
        node = found.pop() if len(found) == 1 else None
        if node is None or node not in placement.numa_nodes:
            return {}
        number = cell.get("id", str(position))
        if not (number.isascii() and number.isdigit() and len(number) <= 5) or int(number) in nodes:
            raise BadDomainXml(f"<cell id> is {number[:40]!r}; guest cells are numbered 0, 1, 2 and so on")
        nodes[int(number)] = node
        wanted[node] = wanted.get(node, 0) + bytes_of(
            cell.get("memory", ""), cell.get("unit", "KiB"), "<cell memory>"
        )
    if placement.memory and any(count > placement.memory.get(node, 0) for node, count in wanted.items()):
        return {}
    return nodes


def _host_cpus(cell: etree._Element, placement: Placement) -> int:
    try:
        guest = parse_cpu_list(cell.get("cpus", ""), what="<cell cpus>")
    except ValueError:
        return 0  # libvirt also knows ^4: then we cannot say where the cell sits
    host = 0
    for vcpu in cpus_of(guest):
        host |= cpus_of_vcpu(placement, vcpu)
    return host
