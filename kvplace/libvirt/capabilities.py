"""Reads the topology of a machine from libvirt's capabilities (`virsh capabilities`).

Second best to sysfs: libvirt names sockets by their ids alone, lists off-line CPUs like others (with the
ids of a core that is not theirs), and may put a CPU below two caches of one level. Missing levels
are replaced as in core.topology_levels. The form is described at libvirt.org/formatcaps.html.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import cast

from lxml import etree

from kvplace.core.cpuset import MAX_CPU, format_cpu_list, mask_of, parse_cpu_list, union
from kvplace.core.errors import BadTopology
from kvplace.core.scalars import NO_CPUS, Bytes, CpuId, CpuMask, NumaId
from kvplace.core.topology import NumaNode, Topology
from kvplace.core.topology_levels import Discovery, Levels

MAX_BYTES = 16 * 1024 * 1024
"""Longest document we read; a machine with 512 CPUs stays below a hundredth of it."""

_UNITS = {
    "b": 1, "bytes": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12,
    "k": 1 << 10, "KiB": 1 << 10, "M": 1 << 20, "MiB": 1 << 20, "G": 1 << 30, "GiB": 1 << 30, "TiB": 1 << 40,
}  # fmt: skip


def read_capabilities(xml: bytes, *, what: str = "the capabilities") -> Discovery:
    """Read a machine; raises BadTopology with one sentence that begins with `what`."""
    try:
        return _CapabilitiesReader(_parse(xml)).discover()
    except BadTopology as error:
        raise BadTopology(f"{what}: {error}") from None


class _CapabilitiesReader:
    def __init__(self, root: etree._Element) -> None:
        self._root = root
        self._siblings: dict[CpuId, CpuMask] = {}
        self._sockets: dict[CpuId, int] = {}
        self._ids: dict[tuple[str, ...], CpuMask] = {}

    def discover(self) -> Discovery:
        cells = self._root.findall("host/topology/cells/cell")
        if not cells:
            raise BadTopology("there is no <cell> in <host><topology>: libvirt could not read the topology")
        nodes = [self._node(cell) for cell in cells]
        levels = Levels("libvirt", union(node.cpus for node in nodes))
        banks = list(self._l3_banks())
        sockets = self._sets_by_socket()
        topology = levels.topology(
            core_of=self._siblings.get,
            socket_of=lambda cpu: sockets.get(self._sockets.get(cpu, -1)),
            socket_id_of=self._sockets.get,
            l3_of=lambda cpu: next((bank for bank in banks if bank >> cpu & 1), None),
            nodes=nodes,
            whole=nodes[0],
        )
        return Discovery(topology, (*levels.notes, *self._perhaps_offline(topology)))

    def _node(self, cell: etree._Element) -> NumaNode:
        number = NumaId(self._integer(cell, "id"))
        pages = self._pages(cell)
        return NumaNode(
            id=number,
            cpus=union(self._cpu(cpu) for cpu in cell.findall("cpus/cpu")),
            memory=Bytes(sum(self._scaled(memory) for memory in cell.findall("memory")[:1])),
            huge_pages=pages,
            distances={
                NumaId(self._integer(sibling, "id")): value
                for sibling in cell.findall("distances/sibling")
                if (value := self._integer(sibling, "value"))
            },
        )

    def _cpu(self, cpu: etree._Element) -> CpuMask:
        number = CpuId(self._integer(cpu, "id"))
        if number > MAX_CPU:
            raise BadTopology(f"CPU {number} is above the highest id {MAX_CPU}")
        siblings = cpu.get("siblings")
        if siblings is not None:
            self._siblings[number] = self._cpu_list(siblings, f"siblings of CPU {number}")
        socket = cpu.get("socket_id", "")
        if socket.isascii() and socket.isdigit() and len(socket) <= 6:
            self._sockets[number] = int(socket)
        ids = tuple(cpu.get(name, "") for name in ("socket_id", "die_id", "cluster_id", "core_id"))
        alone = mask_of([number])
        self._ids[ids] = self._ids.get(ids, NO_CPUS) | alone
        return alone

    def _pages(self, cell: etree._Element) -> dict[Bytes, int]:
        """Pages by size; the smallest size is the machine's own, for all programs."""
        pages = {
            Bytes(self._integer(entry, "size") * self._unit(entry)): int(self._digits(entry.text, "<pages>"))
            for entry in cell.findall("pages")
        }
        return {size: pages[size] for size in sorted(pages)[1:] if pages[size]}

    def _l3_banks(self) -> Iterator[CpuMask]:
        for bank in self._root.findall("host/cache/bank"):
            if bank.get("level") == "3" and bank.get("type") != "code":
                yield self._cpu_list(bank.get("cpus", ""), "cpus of an L3 <bank>")

    def _sets_by_socket(self) -> dict[int, CpuMask]:
        sets: dict[int, CpuMask] = {}
        for cpu, socket in self._sockets.items():
            sets[socket] = sets.get(socket, NO_CPUS) | 1 << cpu
        return sets

    def _perhaps_offline(self, topology: Topology) -> Iterator[str]:
        odd = NO_CPUS
        for cpus in self._ids.values():
            cores = [core for core in topology.cores if core & cpus]
            if len(cores) > 1:
                odd |= union(core for core in cores if core.bit_count() == 1)
        if odd and odd != topology.cpus:
            yield (
                f"libvirt gives CPU {format_cpu_list(odd)} the ids of another core, as it does with CPUs"
                " that are off-line: reserve it if it is"
            )

    def _scaled(self, element: etree._Element) -> int:
        return int(self._digits(element.text, f"<{element.tag!s}>")) * self._unit(element)

    def _unit(self, element: etree._Element) -> int:
        unit = element.get("unit", "KiB")
        if unit not in _UNITS:
            raise BadTopology(f"the unit {unit[:20]!r} is not one of {', '.join(_UNITS)}")
        return _UNITS[unit]

    def _integer(self, element: etree._Element, name: str) -> int:
        return int(self._digits(element.get(name), f"{name} of <{element.tag!s}>"))

    def _digits(self, text: str | None, where: str) -> str:
        digits = (text or "").strip()
        if not (digits.isascii() and digits.isdigit() and len(digits) <= 15):
            raise BadTopology(f"{digits[:40]!r} for the {where} is not a whole number")
        return digits

    def _cpu_list(self, text: str, where: str) -> CpuMask:
        try:
            return parse_cpu_list(text, what=where)
        except ValueError as error:
            raise BadTopology(str(error)) from None


def _parse(xml: bytes) -> etree._Element:
    """Parse without any document type, so that no entity is ever defined."""
    if len(xml) > MAX_BYTES:
        raise BadTopology(f"it is longer than {MAX_BYTES} bytes")
    if b"\0" in xml or b"<!DOCTYPE" in xml:
        raise BadTopology("it has a DOCTYPE or is not UTF-8 text; save the output of `virsh capabilities`")
    # The declared encoding is overruled: another one could hide a DOCTYPE from us.
    parser = etree.XMLParser(encoding="utf-8", resolve_entities=False, no_network=True, huge_tree=False)
    try:
        root = etree.fromstring(xml.strip(), parser)
    except (etree.XMLSyntaxError, ValueError) as error:
        why = " ".join((getattr(error, "msg", None) or str(error)).split())
        raise BadTopology(f"it is not well-formed XML: {why}") from None
    if root.tag != "capabilities":
        tag = str(cast(object, root.tag))[:60]
        raise BadTopology(f"it is a <{tag}>, not the <capabilities> that `virsh capabilities` prints")
    return root
