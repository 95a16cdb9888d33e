"""Reads what a machine is made of from its sysfs tree.

Everything is built from sets that the kernel writes down: sibling lists, caches' shared lists, NUMA
nodes' CPU lists, each in its list form or, on old kernels, as a hexadecimal mask. Ids only name what the
sets have found. What is off-line appears nowhere. A level that is missing or contradicts itself collapses
to the next coarser one, and a note says so; nothing is guessed. The files are described in the kernel's
Documentation/ABI/stable/sysfs-devices-system-cpu and sysfs-devices-node.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from kvplace.core.cpuset import MAX_CPU, cpus_of, format_cpu_list, parse_cpu_list
from kvplace.core.errors import BadTopology
from kvplace.core.topology import NumaNode, Package, Topology
from kvplace.linux.tree import CPU_FOLDER, Tree

_NODE_FOLDER = "sys/devices/system/node"
_PAGES_FOLDER = "sys/kernel/mm/hugepages"
# The newer name first; of each name the list, then the mask.
_CORE_SETS = ("core_cpus_list", "core_cpus", "thread_siblings_list", "thread_siblings")
_PACKAGE_SETS = ("package_cpus_list", "package_cpus", "core_siblings_list", "core_siblings")
_CACHE_SETS = ("shared_cpu_list", "shared_cpu_map")
_NODE_SETS = ("cpulist", "cpumap")

_MAX_PACKAGE_ID = 999_999
"""An id above it is firmware's garbage and no name for a person (`socket4294967295`)."""
_MAX_NODE = 16383
_MASK = re.compile(r"[0-9a-fA-F]{1,8}(?:,[0-9a-fA-F]{1,8})*", re.ASCII)
_MEM_TOTAL = re.compile(r"MemTotal:\s+(\d{1,15}) kB", re.ASCII)
_PAGE_SIZE = re.compile(r"hugepages-(\d{1,12})kB", re.ASCII)


@dataclass(frozen=True, slots=True)
class Discovery:
    """A machine, and what its kernel did not say or said in two ways."""

    topology: Topology
    notes: tuple[str, ...]
    """One sentence for each level that had to collapse."""


def discover(tree: Tree, *, reserved: int = 0) -> Discovery:
    """Read a machine; raises BadTopology, naming the file, when it cannot be told what its CPUs are.

    `reserved` are the CPUs kept for the host; naming one that is off-line is an error.
    """
    return _Reader(tree).discover(reserved)


class _Reader:
    def __init__(self, tree: Tree) -> None:
        self._tree = tree
        self._notes: list[str] = []
        self._online = 0

    def discover(self, reserved: int) -> Discovery:
        self._online = self._online_cpus()
        if absent := reserved & ~self._online:
            raise BadTopology(
                f"{self._tree.name}: reserved CPU {format_cpu_list(absent)} is not on-line;"
                f" on-line are {format_cpu_list(self._online)}"
            )
        nodes = self._numa_nodes()
        topology = Topology(
            packages=self._packages(),
            numa_nodes=nodes,
            l3_groups=self._partition(
                "L3 caches", self._l3_of, [node.cpus for node in nodes], "the NUMA node stands in for them"
            ),
            cores=self._partition(
                "sibling threads",
                lambda cpu: self._set(f"{CPU_FOLDER}/cpu{cpu}/topology", _CORE_SETS),
                [1 << cpu for cpu in cpus_of(self._online)],
                "every CPU counts as a core",
            ),
            reserved=reserved,
            isolated=(self._cpu_list(f"{CPU_FOLDER}/isolated") or 0) & self._online,
        )
        return Discovery(topology, tuple(self._notes))

    # CPUs, cores, packages, caches

    def _online_cpus(self) -> int:
        listed = self._cpu_list(f"{CPU_FOLDER}/online")
        online = 0
        for cpu in _numbers(self._tree.entries(CPU_FOLDER), "cpu"):
            if cpu > MAX_CPU:
                raise BadTopology(f"{self._tree.name}: CPU {cpu} is above the highest id {MAX_CPU}")
            folder = f"{CPU_FOLDER}/cpu{cpu}"
            if listed is not None and not listed >> cpu & 1:
                continue
            # Old kernels have no list of on-line CPUs; a CPU that cannot be switched off has no switch.
            if (self._tree.read(f"{folder}/online") or "1").strip("\0\n ") == "0":
                continue
            if self._tree.entries(f"{folder}/topology"):
                online |= 1 << cpu
        if not online:
            raise BadTopology(
                f"{self._tree.name}: no CPU below {CPU_FOLDER} is on-line and has a topology folder"
            )
        return online

    def _packages(self) -> tuple[Package, ...]:
        sets = self._partition(
            "sockets",
            lambda cpu: self._set(f"{CPU_FOLDER}/cpu{cpu}/topology", _PACKAGE_SETS),
            [self._online],
            "the machine counts as one socket",
        )
        ids = [self._package_id(cpus) for cpus in sets]
        if None in ids or len(set(ids)) != len(ids):
            if len(sets) > 1:
                self._notes.append(
                    "the kernel gives the sockets no ids of their own: they are numbered from 0"
                )
            ids = list(range(len(sets)))
        return tuple(
            Package(number, cpus) for number, cpus in zip(ids, sets, strict=True) if number is not None
        )

    def _package_id(self, cpus: int) -> int | None:
        found = {
            self._integer(f"{CPU_FOLDER}/cpu{cpu}/topology/physical_package_id") for cpu in cpus_of(cpus)
        }
        number = found.pop() if len(found) == 1 else None
        return number if number is not None and 0 <= number <= _MAX_PACKAGE_ID else None

    def _l3_of(self, cpu: int) -> int | None:
        folder = f"{CPU_FOLDER}/cpu{cpu}/cache"
        for index in _numbers(self._tree.entries(folder), "index"):
            if (self._tree.read(f"{folder}/index{index}/level") or "").strip("\0\n ") == "3":
                return self._set(f"{folder}/index{index}", _CACHE_SETS)
        return None

    def _partition(
        self, level: str, set_of: Callable[[int], int | None], coarser: Sequence[int], instead: str
    ) -> tuple[int, ...]:
        """Cut the on-line CPUs into the sets that the kernel names; the rest is cut as `coarser` is."""
        groups: list[int] = []
        named, disputed = 0, 0
        for cpu in cpus_of(self._online):
            members = (set_of(cpu) or 0) & self._online
            if not members >> cpu & 1 or members in groups:
                continue
            if overlap := members & named:
                disputed |= overlap
                members |= _union(group for group in groups if group & members)
                groups = [group for group in groups if not group & members]
            groups.append(members)
            named |= members
        if disputed:
            self._notes.append(
                f"the kernel puts CPU {format_cpu_list(disputed)} into several {level}: those count as one"
            )
        if unnamed := self._online & ~named:
            which = "" if unnamed == self._online else f" of CPU {format_cpu_list(unnamed)}"
            self._notes.append(f"the kernel says nothing about the {level}{which}: {instead}")
            groups += [part for cpus in coarser if (part := cpus & unnamed)]
        return tuple(sorted(groups, key=lambda group: group & -group))

    # NUMA nodes

    def _numa_nodes(self) -> tuple[NumaNode, ...]:
        ids = self._node_ids()
        sets = {number: self._node_cpus(number) for number in ids}
        if not ids:
            self._notes.append("the kernel says nothing about NUMA nodes: the machine counts as one")
            return (self._only_node(0, self._memory("proc/meminfo"), self._pages(_PAGES_FOLDER)),)
        twice = _twice(sets.values())
        if twice:
            self._notes.append(
                f"the kernel puts CPU {format_cpu_list(twice)} into several NUMA nodes:"
                " the machine counts as one"
            )
            return (self._merged(ids),)
        homeless = self._online & ~_union(sets.values())
        if homeless:
            self._notes.append(
                f"the kernel puts CPU {format_cpu_list(homeless)} into no NUMA node:"
                " the machine counts as one"
            )
            return (self._merged(ids),)
        if len(ids) == 1:
            folder = f"{_NODE_FOLDER}/node{ids[0]}"
            memory = self._memory(f"{folder}/meminfo") or self._memory("proc/meminfo")
            pages = self._pages(f"{folder}/hugepages") or self._pages(_PAGES_FOLDER)
            return (self._only_node(ids[0], memory, pages),)
        return tuple(
            NumaNode(
                id=number,
                cpus=sets[number],
                memory=self._memory(f"{_NODE_FOLDER}/node{number}/meminfo"),
                huge_pages=self._pages(f"{_NODE_FOLDER}/node{number}/hugepages"),
                distances=self._distances(number, ids),
            )
            for number in ids
        )

    def _node_ids(self) -> list[int]:
        ids = _numbers(self._tree.entries(_NODE_FOLDER), "node")
        online = self._cpu_list(f"{_NODE_FOLDER}/online")
        return [number for number in ids if number <= _MAX_NODE and (online is None or online >> number & 1)]

    def _node_cpus(self, number: int) -> int:
        return (self._set(f"{_NODE_FOLDER}/node{number}", _NODE_SETS) or 0) & self._online

    def _only_node(self, number: int, memory: int, pages: dict[int, int]) -> NumaNode:
        return NumaNode(number, self._online, memory, pages, {number: 10})

    def _merged(self, ids: Sequence[int]) -> NumaNode:
        memory = sum(self._memory(f"{_NODE_FOLDER}/node{number}/meminfo") for number in ids)
        pages: dict[int, int] = {}
        for number in ids:
            for size, count in self._pages(f"{_NODE_FOLDER}/node{number}/hugepages").items():
                pages[size] = pages.get(size, 0) + count
        return self._only_node(ids[0], memory, pages)

    def _memory(self, path: str) -> int:
        match = _MEM_TOTAL.search(self._tree.read(path) or "")
        return int(match[1]) * 1024 if match else 0

    def _pages(self, folder: str) -> dict[int, int]:
        pages: dict[int, int] = {}
        for name in self._tree.entries(folder):
            match = _PAGE_SIZE.fullmatch(name)
            count = self._integer(f"{folder}/{name}/nr_hugepages") if match else None
            if match and count is not None and count > 0:
                pages[int(match[1]) * 1024] = count
        return dict(sorted(pages.items()))

    def _distances(self, number: int, ids: Sequence[int]) -> dict[int, int]:
        """Read one number for every node there is, ascending; a row may stop early or hold zeros."""
        path = f"{_NODE_FOLDER}/node{number}/distance"
        row = (self._tree.read(path) or "").replace("\0", "").split()
        if not all(word.isascii() and word.isdigit() and len(word) <= 6 for word in row):
            raise BadTopology(f"{self._tree.name}: {path} holds {' '.join(row)[:60]!r}, not distances")
        if len(row) > len(ids):
            self._notes.append(
                f"NUMA node {number} has {len(row)} distances for {len(ids)} nodes: they are not used"
            )
            return {}
        return {other: int(word) for other, word in zip(ids, row, strict=False) if int(word)}

    # Files

    def _set(self, folder: str, names: Iterable[str]) -> int | None:
        """Read the first of several files that say the same; None when there is none of them."""
        for name in names:
            path = f"{folder}/{name}"
            found = self._cpu_list(path) if name.endswith("list") else self._cpu_mask(path)
            if found is not None:
                return found
        return None

    def _cpu_list(self, path: str) -> int | None:
        text = self._tree.read(path)
        if text is None:
            return None
        try:
            return parse_cpu_list(text, what=path)
        except ValueError as error:
            raise BadTopology(f"{self._tree.name}: {error}") from None

    def _cpu_mask(self, path: str) -> int | None:
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
        return mask

    def _integer(self, path: str) -> int | None:
        written = (self._tree.read(path) or "").strip("\0\n\t ")
        digits = written.removeprefix("-")
        if not (digits.isascii() and digits.isdigit() and len(digits) <= 18):
            return None
        return int(written)


def _numbers(names: Iterable[str], prefix: str) -> list[int]:
    """The numbers of `cpu0`, `cpu1` and so on, ascending."""
    ends = (name[len(prefix) :] for name in names if name.startswith(prefix))
    return sorted(int(end) for end in ends if end.isascii() and end.isdigit() and len(end) <= 9)


def _union(sets: Iterable[int]) -> int:
    union = 0
    for cpus in sets:
        union |= cpus
    return union


def _twice(sets: Iterable[int]) -> int:
    seen, twice = 0, 0
    for cpus in sets:
        twice |= seen & cpus
        seen |= cpus
    return twice
