"""Free CPUs and memory of one machine: its topology less the claims in its ledger.

`Free` is hashable and holds nothing else, so that an answer for one (machine, free, request) serves every
node in the same state.

A free block is the free part of one socket, NUMA node or L3 group. Blocks are only counted: whether a certain
VM fits, with its memory and its threads, is the allocator's answer.

Other programs use memory, too: the host, pods without a claim, OVS-DPDK, SPDK. The agent publishes it in
`status.inUse` of the NodeTopology, and every decision treats it as a claim without CPUs. It is not part of
the machine's fingerprint, because it changes while VMs run.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from kvplace.core.cpuset import cpus_of, union
from kvplace.core.json_fields import Fields
from kvplace.core.ledger import Claim, Ledger
from kvplace.core.node_devices import NodeDevices
from kvplace.core.quantity import (
    bytes_in_pages,
    format_bytes,
    write_page_counts,
)
from kvplace.core.request import Level, Policy
from kvplace.core.scalars import NO_BYTES, NO_CPUS, Bytes, CpuId, CpuMask, NumaId, PodUid
from kvplace.core.strict_json import Json
from kvplace.core.topology import Topology


@dataclass(frozen=True, slots=True)
class Free:
    """CPUs, memory and huge pages that a new VM may take."""

    cpus: CpuMask
    """CPUs that an exclusive VM may take: no VM owns them, names them, or needs them in its pool."""
    pool: CpuMask
    """CPUs without an owner: a sharing VM may name them. A superset of `cpus`."""
    uses: tuple[tuple[CpuId, int], ...] = ()
    """How many sharing VMs name each CPU of the pool, ascending by CPU; unnamed ones are absent."""
    memory: tuple[tuple[NumaId, Bytes], ...] = ()
    """Bytes outside huge pages by NUMA node; empty when the machine does not report its memory."""
    huge_pages: tuple[tuple[NumaId, Bytes, int], ...] = ()
    """(NUMA node, page size in bytes, pages)."""
    devices: NodeDevices | None = None
    """Free devices; None where nothing is known of them."""

    @property
    def pages_by_node(self) -> Mapping[tuple[NumaId, Bytes], int]:
        """Free pages by (NUMA node, page size)."""
        return {(node, size): count for node, size, count in self.huge_pages}

    def within(self, cpus: CpuMask) -> Free:
        """Restrict the free resources to a set of CPUs; memory and devices stay as they are."""
        return replace(
            self,
            cpus=self.cpus & cpus,
            pool=self.pool & cpus,
            uses=tuple((cpu, count) for cpu, count in self.uses if cpus >> cpu & 1),
        )

    def can_give(self, claim: Claim) -> bool:
        """Whether all that a claim takes is free."""
        memory, pages = dict(self.memory), self.pages_by_node
        return (
            not claim.owned & ~self.cpus
            and not claim.cpus & ~self.pool
            and all(not memory or count <= memory.get(node, 0) for node, count in claim.plain_memory.items())
            and all(
                count <= pages.get((node, size), 0)
                for node, sizes in claim.huge_pages.items()
                for size, count in sizes.items()
            )
        )


def free_of(
    topology: Topology,
    ledger: Ledger,
    holds: Iterable[Claim] = (),
    *,
    pools_shrink: bool = False,
    devices: NodeDevices | None = None,
) -> Free:
    """Compute the free resources of a machine after the ledger's claims and the tentative `holds`.

    A hold of a pod with a claim counts once. `pools_shrink`: an agent takes CPUs out of the pools of `numa`
    VMs when exclusive VMs get them; each pool keeps one core of each of its NUMA nodes. Without an agent
    exclusive VMs get no CPU of such a pool.
    """
    owned = ledger.owned | ledger.still_in_use
    named = ledger.named
    pools = list(ledger.numa_pools)
    uses = dict(ledger.shared_use)
    memory = dict(ledger.plain_memory)
    pages = dict(ledger.huge_pages)
    for hold in holds:
        if hold.uid in ledger.claims:
            continue
        owned |= hold.owned
        if hold.policy is Policy.NUMA:
            pools.append(hold.cpus)
        else:
            named |= hold.cpus & ~hold.owned
        for cpu in cpus_of(hold.cpus & ~hold.owned):
            uses[cpu] = uses.get(cpu, 0) + 1
        for node, count in hold.plain_memory.items():
            memory[node] = memory.get(node, 0) + count
        for node, sizes in hold.huge_pages.items():
            for size, number in sizes.items():
                pages[node, size] = pages.get((node, size), 0) + number
    pool = topology.allocatable & ~owned
    kept = union(_last_cores(topology, cpus & ~owned) if pools_shrink else cpus for cpus in pools)
    return Free(
        cpus=pool & ~named & ~kept,
        pool=pool,
        uses=tuple(sorted((cpu, count) for cpu, count in uses.items() if pool >> cpu & 1)),
        memory=tuple(
            (node, Bytes(outside - memory.get(node, 0))) for node, outside in topology.plain_memory.items()
        )
        if any(node.memory for node in topology.numa_nodes)
        else (),
        huge_pages=tuple(
            (node.id, size, count - pages.get((node.id, size), 0))
            for node in topology.numa_nodes
            for size, count in sorted(node.huge_pages.items())
        ),
        devices=devices,
    )


def _last_cores(topology: Topology, pool: CpuMask) -> CpuMask:
    """The core with the highest ids in each NUMA node of a pool."""
    cores = NO_CPUS
    for node in topology.numa_nodes:
        here = pool & node.cpus
        if here:
            cores |= topology.core_of[CpuId(here.bit_length() - 1)] & here
    return cores


def crowd(uses: Sequence[int], vcpus: int) -> int:
    """VCPUs without a CPU of their own, per 1,000 CPUs of a pool, once a VM of so many joins it.

    `uses` counts the VMs that name each of its CPUs. VMs that use all of it count with the size of this VM.
    So pools fill up before they take more CPUs away from exclusive VMs.
    """
    size, using_all = len(uses), min(uses)
    wanted = (using_all + 1) * vcpus + sum(uses) - using_all * size
    return max(0, wanted - size) * 1000 // size


BLOCK_LEVELS = (Level.SOCKET, Level.NUMA, Level.L3)
"""The levels of free blocks."""
BLOCK_SIZES = (1, 2, 4, 8, 16, 32, 64, 128)
"""Sizes of VMs, in CPUs, for counting the nodes with room."""


@dataclass(frozen=True, slots=True)
class FreeBlock:
    """The largest free block of one level."""

    cpus: int
    cores: int
    """The most whole free cores in one block; perhaps not the block with most CPUs."""
    possible: int
    """CPUs of the largest block that the free CPUs could form on this machine."""

    @property
    def fragmentation(self) -> float:
        """How much of that is missing, from 0 to 1; 0 where nothing is free."""
        return 1 - self.cpus / self.possible if self.possible else 0.0


@dataclass(frozen=True, slots=True)
class FreeBlocks:
    """The number of free CPUs of one machine, and its largest free blocks."""

    allocatable: int
    free: int
    largest: Mapping[Level, FreeBlock]


def free_blocks_of(topology: Topology, free: CpuMask) -> FreeBlocks:
    """Count free CPUs, and the largest free block of every level."""
    whole_cores = NO_CPUS  # each by one of its CPUs
    for core in topology.cores:
        if core & free == core:
            whole_cores |= CpuMask(core & -core)
    allocatable, count = topology.allocatable, free.bit_count()
    return FreeBlocks(
        allocatable.bit_count(),
        count,
        {
            level: _largest(sets, allocatable, free, whole_cores, count)
            for level, sets in (
                (Level.SOCKET, [socket.cpus for socket in topology.sockets]),
                (Level.NUMA, [node.cpus for node in topology.numa_nodes]),
                (Level.L3, topology.l3_groups),
            )
        },
    )


def _largest(
    sets: Iterable[CpuMask], allocatable: CpuMask, free: CpuMask, whole_cores: CpuMask, count: int
) -> FreeBlock:
    cpus = cores = size = 0
    for of_domain in sets:
        cpus = max(cpus, (of_domain & free).bit_count())
        cores = max(cores, (of_domain & whole_cores).bit_count())
        size = max(size, (of_domain & allocatable).bit_count())
    return FreeBlock(cpus, cores, min(count, size))


@dataclass(frozen=True, slots=True)
class CpuUsage:
    """Counts of CPUs, and of the pods that have claims."""

    cpus: int
    """All CPUs of the machine."""
    owned: int
    """CPUs that one pod has for itself."""
    shared: int
    """CPUs without an owner that claims name."""
    free: int
    """CPUs that an exclusive pod could get."""
    largest_numa: int
    """The most free CPUs inside one NUMA node."""
    pods: int

    def document(self) -> dict[str, int]:
        """Write it as JSON: `status.usage` of a NodeTopology."""
        return {
            "cpus": self.cpus,
            "owned": self.owned,
            "shared": self.shared,
            "free": self.free,
            "largestNuma": self.largest_numa,
            "pods": self.pods,
        }


def usage_of(topology: Topology, ledger: Ledger, free: CpuMask) -> CpuUsage:
    """Count the resources of a machine that a ledger uses, and the free ones."""
    free_blocks = free_blocks_of(topology, free)
    return CpuUsage(
        topology.cpus.bit_count(),
        ledger.owned.bit_count(),
        ledger.shared.bit_count(),
        free_blocks.free,
        free_blocks.largest[Level.NUMA].cpus,
        len(ledger.claims),
    )


OTHERS = PodUid("other programs")
"""The UID of the claim; no pod has one with a space."""


@dataclass(frozen=True, slots=True)
class MemoryInUse:
    """Memory that others use, by NUMA node."""

    memory: Mapping[NumaId, Bytes] = field(default_factory=dict)
    """Bytes outside huge pages."""
    huge_pages: Mapping[NumaId, Mapping[Bytes, int]] = field(default_factory=dict)
    """Pages by page size in bytes."""

    def claim(self) -> Claim:
        """Write it as a claim, which decisions then treat as the claim of a VM."""
        nodes = self.memory.keys() | self.huge_pages.keys()
        memory = {
            node: Bytes(self.memory.get(node, NO_BYTES) + bytes_in_pages(self.huge_pages.get(node, {})))
            for node in sorted(nodes)
        }
        return Claim(
            uid=OTHERS,
            namespace="",
            pod=OTHERS,
            vmi="",
            policy=Policy.SHARE,
            cpus=NO_CPUS,
            owned=NO_CPUS,
            memory=memory,
            huge_pages=self.huge_pages,
            since="",
        )

    def document(self) -> Json:
        """Write it as JSON: quantities by the id of the NUMA node."""
        nodes = sorted(self.memory.keys() | self.huge_pages.keys())
        return {
            str(node): {
                "memory": format_bytes(self.memory.get(node, NO_BYTES)),
                "hugePages": write_page_counts(self.huge_pages.get(node, {})),
            }
            for node in nodes
        }


def read_memory_in_use(status: Fields, key: str) -> MemoryInUse:
    """Read the JSON form in a field of a status; raises ValueError that names the entry."""
    memory: dict[NumaId, Bytes] = {}
    pages: dict[NumaId, Mapping[Bytes, int]] = {}
    for node, fields, own in status.by_node(key):
        used = fields.fields(own)
        memory[node] = used.bytes("memory", 0)
        pages[node] = used.page_counts("hugePages")
    return MemoryInUse(memory, pages)


NOTHING_IN_USE = MemoryInUse()


@dataclass(frozen=True, slots=True)
class Used:
    """Memory of one NUMA node as it was measured at one moment."""

    memory: Bytes
    """All of the node outside huge pages."""
    taken: Bytes
    """The part of it that is in use; once the pods with claims are taken off, by others."""
    pages: Mapping[Bytes, tuple[int, int]] = field(default_factory=dict)
    """By size: all huge pages, and those in use, counted in the same way."""


_PARTS, _PARTS_OF_PAGES = 32, 64
"""The memory of others is rounded to parts of the node's memory. So small changes cause no write, and nodes
of one type mostly stay in equal states. At least one part is kept for the host."""


def in_use(measured: Mapping[NumaId, Used], before: MemoryInUse) -> MemoryInUse:
    """Round up the memory of others, or keep the value `before` while it is not two parts too large."""
    memory: dict[NumaId, Bytes] = {}
    pages: dict[NumaId, dict[Bytes, int]] = {}
    for node, used in measured.items():
        published = before.memory.get(node, NO_BYTES)
        memory[node] = Bytes(min(used.memory, _rounded(used.taken, used.memory // _PARTS, published)))
        for size, (total, taken) in sorted(used.pages.items()):
            if taken:  # of huge pages none is kept: an administrator decides how many there are
                known = before.huge_pages.get(node, {}).get(size, 0)
                count = min(total, _rounded(taken, total // _PARTS_OF_PAGES, known))
                pages.setdefault(node, {})[size] = count
    return MemoryInUse(memory, pages)


def _rounded(taken: int, part: int, before: int) -> int:
    part = max(1, part)
    if taken <= before < taken + 2 * part and before % part == 0 and before:
        return before
    return max(1, -(-taken // part)) * part
