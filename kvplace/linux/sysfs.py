"""Reads the topology of a machine from its sysfs tree.

Everything is built from the sets that the kernel reports: sibling lists, caches' shared lists, NUMA
nodes' CPU lists, each in its list form or, on old kernels, as a hexadecimal mask. Ids only name the
sets. Offline CPUs are left out. A level that is missing or contradicts itself is replaced by the next coarser
one, with a note (core.topology_levels); a file with invalid content is refused by its name. The cpuset of the
process that recorded the machine does not matter: a machine has all of its online CPUs. The files are
described in the kernel's Documentation/ABI/stable/sysfs-devices-system-cpu and
sysfs-devices-node.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import replace

from kvplace.core.cpuset import MAX_CPU, format_cpu_list, mask_of, parse_cpu_list
from kvplace.core.errors import BadTopology
from kvplace.core.quantity import about_bytes, counted
from kvplace.core.scalars import NO_CPUS, Bytes, CpuId, CpuMask, NumaId
from kvplace.core.topology import NumaNode
from kvplace.core.topology_levels import Discovery, Levels
from kvplace.linux.tree import CPU_FOLDER, Tree

_NODE_FOLDER = "sys/devices/system/node"
_PAGES_FOLDER = "sys/kernel/mm/hugepages"
# The newer name first; of each name the list, then the mask.
_CORE_SETS = ("core_cpus_list", "core_cpus", "thread_siblings_list", "thread_siblings")
_PACKAGE_SETS = ("package_cpus_list", "package_cpus", "core_siblings_list", "core_siblings")
_CACHE_SETS = ("shared_cpu_list", "shared_cpu_map")
_NODE_SETS = ("cpulist", "cpumap")

_MAX_NODE = 16383
_MEMORY_TOLERANCE = 64
"""Machine and NUMA nodes together may differ by one part in so many: memory of the kernel."""
_MASK = re.compile(r"[0-9a-fA-F]{1,8}(?:,[0-9a-fA-F]{1,8})*", re.ASCII)
_MEM_TOTAL = re.compile(r"MemTotal:\s+(\d{1,15}) kB", re.ASCII)
_PAGE_SIZE = re.compile(r"hugepages-(\d{1,12})kB", re.ASCII)


def discover(tree: Tree) -> Discovery:
    """Read a machine; raises BadTopology, naming the file, when its CPUs cannot be determined.

    No CPUs are reserved in it: sysfs does not contain the operator's reservation for the host.
    """
    return _SysfsReader(tree).discover()


def total_memory(meminfo: str) -> Bytes:
    """Read the size of the memory that the content of a `meminfo` is about; 0 where it does not state."""
    match = _MEM_TOTAL.search(meminfo)
    return Bytes(int(match[1]) * 1024 if match else 0)


class _SysfsReader:
    def __init__(self, tree: Tree) -> None:
        self._tree = tree
        self._notes: list[str] = []
        self._not_their_own = NO_CPUS
        """CPUs that one of their own lists lacks, and another file has."""

    def discover(self) -> Discovery:
        self._online = self._online_cpus()
        levels = Levels("the kernel", self._online)
        whole = self._node(NumaId(0), "proc", self._online, _PAGES_FOLDER)
        topology = levels.topology(
            core_of=lambda cpu: self._set_with(cpu, _topology_folder(cpu), _CORE_SETS),
            socket_of=lambda cpu: self._set_with(cpu, _topology_folder(cpu), _PACKAGE_SETS),
            socket_id_of=lambda cpu: self._integer(f"{_topology_folder(cpu)}/physical_package_id"),
            l3_of=self._l3_of,
            nodes=self._numa_nodes(),
            whole=whole,
            isolated=(self._cpu_list(f"{CPU_FOLDER}/isolated") or NO_CPUS) & self._online,
        )
        self._compare_memory(whole.memory, Bytes(sum(node.memory for node in topology.numa_nodes)))
        if self._not_their_own:
            self._notes.append(
                f"the kernel leaves CPU {format_cpu_list(self._not_their_own)} out of a list of its own"
                " siblings: the file that names it counts"
            )
        return Discovery(topology, (*self._notes, *levels.notes))

    # CPUs and caches

    def _online_cpus(self) -> CpuMask:
        listed = self._cpu_list(f"{CPU_FOLDER}/online")
        online, without_topology = NO_CPUS, NO_CPUS
        for cpu in _numbers(self._tree.entries(CPU_FOLDER), "cpu"):
            if cpu > MAX_CPU:
                raise BadTopology(f"{self._tree.name}: CPU {cpu} is above the highest id {MAX_CPU}")
            if listed is not None and not listed >> cpu & 1:
                continue
            # Old kernels have no list of on-line CPUs; a CPU that cannot be switched off has no switch.
            if (self._tree.read(f"{CPU_FOLDER}/cpu{cpu}/online") or "1").strip("\0\n ") == "0":
                continue
            if self._tree.entries(_topology_folder(cpu)):
                online |= 1 << cpu
            elif listed is not None:
                without_topology |= 1 << cpu
        if not online:
            raise BadTopology(
                f"{self._tree.name}: no CPU below {CPU_FOLDER} is on-line and has a topology folder; a "
                "sandbox such as gVisor shows none, and a copy may lack it: read the sysfs of the host itself"
            )
        if without_topology:
            self._notes.append(
                f"the kernel shows no topology of CPU {format_cpu_list(without_topology)}: left out"
            )
        return online

    def _l3_of(self, cpu: CpuId) -> CpuMask | None:
        folder = f"{CPU_FOLDER}/cpu{cpu}/cache"
        for index in _numbers(self._tree.entries(folder), "index"):
            if (self._tree.read(f"{folder}/index{index}/level") or "").strip("\0\n ") == "3":
                return self._set_with(cpu, f"{folder}/index{index}", _CACHE_SETS)
        return None

    # NUMA nodes

    def _numa_nodes(self) -> list[NumaNode]:
        ids = self._node_ids()
        nodes = [
            self._node(number, folder, self._node_cpus(folder), f"{folder}/hugepages", ids)
            for number, folder in ((number, f"{_NODE_FOLDER}/node{number}") for number in ids)
        ]
        if len(nodes) == 1:
            # The only node has all of the machine, also where the kernel reports it of the machine alone.
            whole = self._node(nodes[0].id, "proc", nodes[0].cpus, _PAGES_FOLDER)
            memory, pages = nodes[0].memory or whole.memory, nodes[0].huge_pages or whole.huge_pages
            return [replace(nodes[0], memory=memory, huge_pages=pages)]
        return nodes

    def _compare_memory(self, whole: Bytes, nodes: Bytes) -> None:
        if nodes and whole and abs(whole - nodes) > nodes // _MEMORY_TOLERANCE:
            effect = "VMs get no other" if whole > nodes else "VMs may get more than the machine has"
            self._notes.append(
                f"the kernel gives the machine {about_bytes(whole)} of memory and its NUMA nodes"
                f" {about_bytes(nodes)} together: that of the NUMA nodes counts, {effect}"
            )

    def _node_ids(self) -> list[NumaId]:
        ids = _numbers(self._tree.entries(_NODE_FOLDER), "node")
        online = self._cpu_list(f"{_NODE_FOLDER}/online")
        return [
            NumaId(number)
            for number in ids
            if number <= _MAX_NODE and (online is None or online >> number & 1)
        ]

    def _node_cpus(self, folder: str) -> CpuMask:
        listed, mapped = (self._set(folder, name) for name in _NODE_SETS)
        if listed is not None and mapped is not None and (listed ^ mapped) & self._online:
            self._notes.append(
                f"{folder}: cpulist and cpumap differ over CPU"
                f" {format_cpu_list((listed ^ mapped) & self._online)}: cpulist counts"
            )
        return ((mapped if listed is None else listed) or NO_CPUS) & self._online

    def _node(
        self, number: NumaId, folder: str, cpus: CpuMask, pages_folder: str, ids: Sequence[NumaId] = ()
    ) -> NumaNode:
        return NumaNode(
            id=number,
            cpus=cpus,
            memory=total_memory(self._tree.read(f"{folder}/meminfo") or ""),
            huge_pages=self._pages(pages_folder),
            distances=self._distances(number, ids) if ids else {number: 10},
        )

    def _pages(self, folder: str) -> dict[Bytes, int]:
        pages: dict[Bytes, int] = {}
        for name in self._tree.entries(folder):
            match = _PAGE_SIZE.fullmatch(name)
            count = self._integer(f"{folder}/{name}/nr_hugepages") if match else None
            if match and count is not None and count > 0:
                pages[Bytes(int(match[1]) * 1024)] = count
        return dict(sorted(pages.items()))

    def _distances(self, number: NumaId, ids: Sequence[NumaId]) -> dict[NumaId, int]:
        """Read one number for every node there is, ascending; a row may stop early or hold zeros."""
        path = f"{_NODE_FOLDER}/node{number}/distance"
        row = (self._tree.read(path) or "").replace("\0", "").split()
        if not all(word.isascii() and word.isdigit() and len(word) <= 6 for word in row):
            raise BadTopology(f"{self._tree.name}: {path} holds {' '.join(row)[:60]!r}, not distances")
        if len(row) > len(ids):
            self._notes.append(
                f"NUMA node {number} has {counted(len(row), 'distance')} for {counted(len(ids), 'node')}: "
                "they are not used"
            )
            return {}
        return {other: int(word) for other, word in zip(ids, row, strict=False) if int(word)}

    # Files

    def _set_with(self, cpu: CpuId, folder: str, names: Iterable[str]) -> CpuMask | None:
        """Read the first of equivalent files that has this CPU, or else the first that exists."""
        first = None
        for name in names:
            found = self._set(folder, name)
            if found is not None and found >> cpu & 1:
                self._not_their_own |= NO_CPUS if first is None else mask_of([cpu])
                return found
            first = found if first is None else first
        return first

    def _set(self, folder: str, name: str) -> CpuMask | None:
        """Read a CPU list or mask; None when there is no such file."""
        path = f"{folder}/{name}"
        return self._cpu_list(path) if name.endswith("list") else self._cpu_mask(path)

    def _cpu_list(self, path: str) -> CpuMask | None:
        text = self._tree.read(path)
        if text is None:
            return None
        try:
            return parse_cpu_list(text, what=path)
        except ValueError as error:
            raise BadTopology(f"{self._tree.name}: {error}") from None

    def _cpu_mask(self, path: str) -> CpuMask | None:
        """Read words of 32 bits in hexadecimal, the highest first."""
        text = self._tree.read(path)
        if text is None:
            return None
        written = text.strip("\0\n\t ")
        if not _MASK.fullmatch(written):
            raise BadTopology(f"{self._tree.name}: {path} holds {written[:60]!r}, not a hexadecimal CPU mask")
        mask = 0
        for word in written.split(","):
            mask = mask << 32 | int(word, 16)
        return CpuMask(mask)

    def _integer(self, path: str) -> int | None:
        written = (self._tree.read(path) or "").strip("\0\n\t ")
        digits = written.removeprefix("-")
        if not (digits.isascii() and digits.isdigit() and len(digits) <= 18):
            return None
        return int(written)


def _topology_folder(cpu: int) -> str:
    return f"{CPU_FOLDER}/cpu{cpu}/topology"


def _numbers(names: Iterable[str], prefix: str) -> list[int]:
    """The numbers of `cpu0`, `cpu1` and so on, ascending."""
    ends = (name[len(prefix) :] for name in names if name.startswith(prefix))
    return sorted(int(end) for end in ends if end.isascii() and end.isdigit() and len(end) <= 9)
