"""Complete levels of a machine, from the reports of its kernel or libvirt about each CPU.

A description may leave a level out or contradict itself. Such a level is replaced by the next coarser one,
and a note states where and why; nothing is guessed from ids. Distances are kept as reported, also where they
are partial or asymmetric, and a note reports it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from kvplace.core.cpuset import cpus_of, format_cpu_list, mask_of, union
from kvplace.core.quantity import bytes_in_pages
from kvplace.core.scalars import NO_CPUS, CpuId, CpuMask, NumaId, PackageId
from kvplace.core.topology import NumaNode, Package, Topology

MAX_PACKAGE_ID = 999_999
"""Ids above it are invalid values of the firmware (`socket4294967295`)."""

_LOCAL_DISTANCE = 10
_SOME = 8
"""A note names at most this many things and counts the rest."""


@dataclass(frozen=True, slots=True)
class Discovery:
    """A machine, and notes about missing or contradictory parts of its description."""

    topology: Topology
    notes: tuple[str, ...]
    """One sentence for each level that was replaced, and for other oddities."""


CpusOf = Callable[[CpuId], CpuMask | None]
"""The CPUs in one group with a CPU; None where they are not described."""


class Levels:
    """Builds the levels of one machine from its online CPUs, and collects the notes."""

    def __init__(self, source: str, online: CpuMask) -> None:
        """`source` is the subject of the notes: `the kernel`."""
        self._source = source
        self._online = online
        self.notes: list[str] = []

    def topology(
        self,
        *,
        core_of: CpusOf,
        socket_of: CpusOf,
        socket_id_of: Callable[[CpuId], int | None],
        l3_of: CpusOf,
        nodes: Sequence[NumaNode],
        whole: NumaNode,
        name_of_cores: str = "sibling threads",
        isolated: CpuMask = NO_CPUS,
    ) -> Topology:
        """Put the machine together; `whole` stands in where no NUMA nodes are described."""
        alone = [mask_of([cpu]) for cpu in cpus_of(self._online)]
        cores = self.partition(name_of_cores, core_of, alone, "every CPU counts as a core")
        numa_nodes = self.numa_nodes(nodes, whole, cores)
        packages = self.packages(socket_of, socket_id_of)
        node_cpus = [node.cpus for node in numa_nodes]
        l3_groups = self.partition("L3 caches", l3_of, node_cpus, "the NUMA node stands in for them")
        return Topology(packages, numa_nodes, l3_groups, cores, isolated=isolated)

    def partition(
        self, level: str, set_of: CpusOf, coarser: Iterable[CpuMask], instead: str
    ) -> tuple[CpuMask, ...]:
        """Partition the online CPUs by `set_of`, and CPUs without a set by `coarser`.

        A set counts if none of its CPUs reports another one. Of the other CPUs, overlapping sets count as
        one. Sets are ordered by their lowest CPU.
        """
        said = {cpu: (set_of(cpu) or NO_CPUS) & self._online for cpu in cpus_of(self._online)}
        groups = [
            members
            for members in dict.fromkeys(said.values())
            if members and all(said[cpu] in (members, 0) for cpu in cpus_of(members))
        ]
        claimed_twice = _twice(groups)  # by sets that meet in a CPU without a set of its own
        groups = [group for group in groups if not group & claimed_twice]
        left = self._online & ~union(groups)
        if disputed := mask_of(cpu for cpu in cpus_of(left) if said[cpu]):
            self.notes.append(
                f"{self._source} contradicts itself about the {level} of CPU {format_cpu_list(disputed)}:"
                " overlapping groups are merged"
            )
        for cpu in cpus_of(disputed):
            members = said[cpu] & left
            if members >> cpu & 1:
                members |= union(group for group in groups if group & members)
                groups = [group for group in groups if not group & members] + [members]
        named = union(groups)
        if unnamed := self._online & ~named:
            which = "" if unnamed == self._online else f" of CPU {format_cpu_list(unnamed)}"
            self.notes.append(f"{self._source} does not describe the {level}{which}: {instead}")
            groups += [part for cpus in coarser if (part := cpus & unnamed)]
        return tuple(sorted(groups, key=lambda group: group & -group))

    def packages(self, set_of: CpusOf, id_of: Callable[[CpuId], int | None]) -> tuple[Package, ...]:
        """Partition the online CPUs into sockets; they keep their ids where these are unique."""
        sets = self.partition("sockets", set_of, [self._online], "the machine counts as one socket")
        ids = [_common_id(id_of, cpus) for cpus in sets]
        if None in ids or len(set(ids)) != len(ids):
            if len(sets) > 1:
                self.notes.append(
                    f"{self._source} gives the sockets no ids of their own: they are numbered from 0"
                )
            ids = list(map(PackageId, range(len(sets))))
        return tuple(
            Package(number, cpus) for number, cpus in zip(ids, sets, strict=True) if number is not None
        )

    def numa_nodes(
        self, nodes: Sequence[NumaNode], whole: NumaNode, cores: Sequence[CpuMask]
    ) -> tuple[NumaNode, ...]:
        """Assign every online CPU to one of the described nodes; `whole` stands in when there are none.

        A node keeps its id, memory and distances with any CPUs left, so that memory is only ever
        bound where it is. The kernel puts each CPU into several nodes when it emulates nodes (`numa=fake`).
        """
        checked = self._disjoint_nodes(nodes, whole, cores)
        for node in checked:
            if node.memory and bytes_in_pages(node.huge_pages) > node.memory:
                self.notes.append(
                    f"{self._source} gives NUMA node {node.id} more huge pages than memory: no memory is left"
                    " for VMs without huge pages"
                )
        return checked

    def _disjoint_nodes(
        self, nodes: Sequence[NumaNode], whole: NumaNode, cores: Sequence[CpuMask]
    ) -> tuple[NumaNode, ...]:
        if not nodes:
            self.notes.append(f"{self._source} does not describe NUMA nodes: the machine counts as one")
            return (whole,)
        if twice := _twice(node.cpus for node in nodes):
            self.notes.append(
                f"{self._source} puts CPU {format_cpu_list(twice)} into several NUMA nodes: they are"
                " shared out evenly"
            )
            nodes = _dealt(nodes, twice, cores)
        if missing := self._online & ~union(node.cpus for node in nodes):
            first = nodes[0]
            self.notes.append(
                f"{self._source} puts CPU {format_cpu_list(missing)} into no NUMA node: NUMA node {first.id}"
                " counts as theirs"
            )
            nodes = [replace(first, cpus=first.cpus | missing), *nodes[1:]]
        if len(nodes) == 1:
            (node,) = nodes
            return (replace(node, distances=node.distances or {node.id: _LOCAL_DISTANCE}),)
        self._look_at_distances(nodes)
        return tuple(nodes)

    def _look_at_distances(self, nodes: Sequence[NumaNode]) -> None:
        rows: Mapping[NumaId, Mapping[NumaId, int]] = {node.id: node.distances for node in nodes}
        partial = [number for number, row in rows.items() if any(other not in row for other in rows)]
        if len(partial) == len(rows) and not any(rows.values()):
            self.notes.append(
                f"{self._source} does not describe distances between NUMA nodes: each counts as 20"
            )
        elif partial:
            self.notes.append(
                f"{self._source} gives NUMA node {_some(partial)} no distance to some nodes: the way back"
                " counts, or else 20"
            )
        asymmetric = [
            f"{a}-{b}"
            for a, row in rows.items()
            for b, value in row.items()
            if a < b and rows.get(b, {}).get(a, value) != value
        ]
        if asymmetric:
            self.notes.append(
                f"the distances between NUMA nodes {_some(asymmetric)} differ by direction: the larger counts"
            )


def _dealt(nodes: Sequence[NumaNode], twice: CpuMask, cores: Sequence[CpuMask]) -> list[NumaNode]:
    """Deal CPUs of several nodes out to these: to the node of their siblings, or the one with the fewest."""
    cpus = [node.cpus & ~twice for node in nodes]
    for core in cores:
        part = core & twice
        whole = any(not part & ~node.cpus for node in nodes)
        for dealt in [part] if whole and part else [mask_of([cpu]) for cpu in cpus_of(part)]:
            holders = [index for index, node in enumerate(nodes) if not dealt & ~node.cpus]
            home = min(holders, key=lambda index: (not cpus[index] & core, cpus[index].bit_count()))
            cpus[home] |= dealt
    return [replace(node, cpus=mask) for node, mask in zip(nodes, cpus, strict=True)]


def _twice(sets: Iterable[CpuMask]) -> CpuMask:
    seen, twice = NO_CPUS, NO_CPUS
    for cpus in sets:
        twice |= seen & cpus
        seen |= cpus
    return twice


def _common_id(id_of: Callable[[CpuId], int | None], cpus: CpuMask) -> PackageId | None:
    found = {id_of(cpu) for cpu in cpus_of(cpus)}
    number = found.pop() if len(found) == 1 else None
    return PackageId(number) if number is not None and 0 <= number <= MAX_PACKAGE_ID else None


def _some(things: Sequence[object]) -> str:
    named = ", ".join(map(str, things[:_SOME]))
    return named if len(things) <= _SOME else f"{named} and {len(things) - _SOME} more"
