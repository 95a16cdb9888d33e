"""Well-known server types as Linux reports them, each in the few numbers that decide its topology.

Tests compare them with the output of `lscpu` and `numactl` on real servers. Points to watch:

* CPU numbers: firmware lists the first threads of all cores before the second threads, so the sibling of
  CPU c is c + (number of cores of the machine). Sockets follow each other, except that Dell's default
  ("round robin") numbers the cores of the sockets alternately: all even CPUs are on socket 0.
* L3: on EPYC one per core complex: four cores on Zen 2, up to eight on Zen 3 and 4, where smaller
  models have fewer cores per complex, not fewer complexes (9354: eight of four cores, 256 MB). On Xeon
  one per socket, and sub-NUMA clustering does not change sysfs (the kernel's resctrl code
  finds out about it by an L3 with more CPUs than a NUMA node).
* Ampere's system level cache is in no firmware table: Linux knows no L3 there, so the NUMA node stands
  in for it.
* Memory is the size of the DIMMs less Linux's page map, 64 bytes for every 4 KiB page.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from functools import cache, reduce
from operator import or_

from kvplace.core.cpuset import mask_of
from kvplace.core.errors import BadTopology
from kvplace.core.scalars import NO_CPUS, Bytes, CpuId, CpuMask, NumaId, PackageId
from kvplace.core.strict_json import did_you_mean
from kvplace.core.topology import NumaNode, Package, Topology

GIB = Bytes(1 << 30)


class Numbering(Enum):
    """The order of cores in firmware tables."""

    SOCKET_BY_SOCKET = "socket by socket"
    ROUND_ROBIN = "round robin"


@dataclass(frozen=True, slots=True)
class ServerType:
    """One server model with its firmware settings, in the numbers of its data sheet."""

    name: str
    sockets: int
    cores: int
    """Cores per socket."""
    threads: int
    nodes: int
    """NUMA nodes per socket."""
    l3_cores: int
    """Cores that share an L3."""
    far: int
    """Distance between NUMA nodes of different sockets."""
    dimms: int
    """GiB of memory per socket."""
    near: int = 12
    """Distance between NUMA nodes of one socket."""
    numbering: Numbering = Numbering.SOCKET_BY_SOCKET
    huge_pages: tuple[tuple[Bytes, int], ...] = ()
    """Pages set aside per NUMA node, as (page size in bytes, count)."""


SERVER_TYPES: tuple[ServerType, ...] = (
    ServerType(  # 1x AMD EPYC 7502P, NPS1
        "epyc-7502p",
        sockets=1,
        cores=32,
        threads=2,
        nodes=1,
        l3_cores=4,
        far=32,
        dimms=256,
    ),
    ServerType(  # 1x AMD EPYC 9654P, NPS1
        "epyc-9654p",
        sockets=1,
        cores=96,
        threads=2,
        nodes=1,
        l3_cores=8,
        far=32,
        dimms=768,
    ),
    ServerType(  # 1x Ampere Altra Max M128-30, monolithic
        "altra-max-m128-30",
        sockets=1,
        cores=128,
        threads=1,
        nodes=1,
        l3_cores=128,
        far=20,
        dimms=512,
    ),
    ServerType(  # 2x AMD EPYC 7763, NPS4
        "2x-epyc-7763-nps4",
        sockets=2,
        cores=64,
        threads=2,
        nodes=4,
        l3_cores=8,
        far=32,
        dimms=512,
        huge_pages=((GIB, 48),),
    ),
    ServerType(  # 2x AMD EPYC 9354, NPS1
        "2x-epyc-9354",
        sockets=2,
        cores=32,
        threads=2,
        nodes=1,
        l3_cores=4,
        far=32,
        dimms=384,
        huge_pages=((Bytes(2 << 20), 32768), (GIB, 128)),
    ),
    ServerType(  # 2x AMD EPYC 9354, NPS2
        "2x-epyc-9354-nps2",
        sockets=2,
        cores=32,
        threads=2,
        nodes=2,
        l3_cores=4,
        far=32,
        dimms=384,
    ),
    ServerType(  # 2x Intel Xeon Gold 6338 (Dell, CPUs dealt round robin)
        "2x-xeon-6338",
        sockets=2,
        cores=32,
        threads=2,
        nodes=1,
        l3_cores=32,
        far=20,
        dimms=256,
        numbering=Numbering.ROUND_ROBIN,
        huge_pages=((GIB, 128),),
    ),
    ServerType(  # 2x Intel Xeon Platinum 8480+, SNC off
        "2x-xeon-8480plus",
        sockets=2,
        cores=56,
        threads=2,
        nodes=1,
        l3_cores=56,
        far=21,
        dimms=512,
        huge_pages=((GIB, 192),),
    ),
    ServerType(  # 2x Intel Xeon Platinum 8480+, SNC4
        "2x-xeon-8480plus-snc4",
        sockets=2,
        cores=56,
        threads=2,
        nodes=4,
        l3_cores=56,
        far=21,
        dimms=512,
        huge_pages=((GIB, 64),),
    ),
    ServerType(  # 4x Intel Xeon Platinum 8280
        "4x-xeon-8280",
        sockets=4,
        cores=28,
        threads=2,
        nodes=1,
        l3_cores=28,
        far=21,
        dimms=384,
    ),
)


def topology_of(server: ServerType) -> Topology:
    """Build the topology of a server type.

    The first core of every NUMA node is reserved for the host, and at least two of every socket, so that each
    VM has CPUs for QEMU's own threads near its memory.
    """
    nodes: list[NumaNode] = []
    packages: list[Package] = []
    l3_groups: list[CpuMask] = []
    cores: dict[CpuId, CpuMask] = {}
    reserved = NO_CPUS
    for socket in range(server.sockets):
        own = [_siblings(server, socket, core) for core in range(server.cores)]
        cores |= {_first_cpu(server, socket, core): siblings for core, siblings in enumerate(own)}
        packages.append(Package(PackageId(socket), _union(own)))
        l3_groups += [_union(part) for part in _parts(own, server.l3_cores)]
        for part in _parts(own, server.cores // server.nodes):
            nodes.append(_numa_node(server, len(nodes), _union(part)))
            reserved |= _union(part[: max(1, 2 // server.nodes)])
    return Topology(
        packages=tuple(packages),
        numa_nodes=tuple(nodes),
        l3_groups=tuple(l3_groups),
        cores=tuple(cores[first] for first in sorted(cores)),
        reserved=reserved,
    )


def _first_cpu(server: ServerType, socket: int, core: int) -> CpuId:
    match server.numbering:
        case Numbering.SOCKET_BY_SOCKET:
            return CpuId(socket * server.cores + core)
        case Numbering.ROUND_ROBIN:
            return CpuId(core * server.sockets + socket)


def _siblings(server: ServerType, socket: int, core: int) -> CpuMask:
    first = _first_cpu(server, socket, core)
    return mask_of(first + thread * server.sockets * server.cores for thread in range(server.threads))


def _numa_node(server: ServerType, number: int, cpus: CpuMask) -> NumaNode:
    distances = {
        NumaId(other): 10
        if other == number
        else server.near
        if other // server.nodes == number // server.nodes
        else server.far
        for other in range(server.sockets * server.nodes)
    }
    return NumaNode(
        id=NumaId(number),
        cpus=cpus,
        memory=Bytes(server.dimms * GIB // server.nodes // 64 * 63),
        huge_pages=dict(server.huge_pages),
        distances=distances,
    )


def _parts(cores: list[CpuMask], size: int) -> list[list[CpuMask]]:
    return [cores[start : start + size] for start in range(0, len(cores), size)]


def _union(masks: list[CpuMask]) -> CpuMask:
    return reduce(or_, masks, NO_CPUS)


def machine_names() -> tuple[str, ...]:
    """List the machines that come with kvplace, in the order of their names."""
    return tuple(sorted(server.name for server in SERVER_TYPES))


@cache
def read_machine(name: str) -> Topology:
    """Give the machine of a name; raises BadTopology for an unknown one."""
    for server in SERVER_TYPES:
        if server.name == name:
            return topology_of(server)
    hint = did_you_mean(name, machine_names()) or f"; there are: {', '.join(machine_names())}"
    raise BadTopology(f"no server type is called {name!r}{hint}")
