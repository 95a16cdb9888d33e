"""The machine shapes that allocators are compared on, with every CPU to give out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from kvplace.core.cpuset import cpus_of, mask_of
from kvplace.core.scalars import NO_CPUS, Bytes, CpuMask, NumaId, PackageId
from kvplace.core.topology import NumaNode, Package, Topology
from kvplace.machines.server_types import ServerType, topology_of


def _servers(
    name: str, *, sockets: int, cores: int, nodes: int = 1, l3_cores: int, threads: int = 2, far: int = 32
) -> Topology:
    server = ServerType(name, sockets, cores, threads, nodes, l3_cores, far, dimms=512)
    return replace(topology_of(server), reserved=NO_CPUS)


def _hybrid() -> Topology:
    """Eight cores of two threads and sixteen of one under one L3, as on a Core i9-13900."""
    cores = [mask_of((cpu, cpu + 1)) for cpu in range(0, 16, 2)] + [1 << cpu for cpu in range(16, 32)]
    cpus = mask_of(cpu for core in cores for cpu in cpus_of(CpuMask(core)))
    return Topology(
        (Package(PackageId(0), cpus),),
        (NumaNode(NumaId(0), cpus, memory=Bytes(64 << 30)),),
        (cpus,),
        tuple(map(CpuMask, cores)),
    )


SHAPES: Mapping[str, Topology] = {
    "Rome NPS4": _servers("rome-nps4", sockets=2, cores=64, nodes=4, l3_cores=4),
    "Genoa NPS1": _servers("genoa-nps1", sockets=2, cores=96, l3_cores=8),
    "Genoa NPS4": _servers("genoa-nps4", sockets=2, cores=96, nodes=4, l3_cores=8),
    "SPR SNC2": _servers("spr-snc2", sockets=2, cores=28, nodes=2, l3_cores=28, far=21),
    "SPR SNC4": _servers("spr-snc4", sockets=2, cores=56, nodes=4, l3_cores=56, far=21),
    "4 x 24 cores": _servers("4x24", sockets=4, cores=24, l3_cores=24, far=21),
    "Graviton-like": _servers("graviton", sockets=1, cores=64, l3_cores=64, threads=1),
    "hybrid": _hybrid(),
}
"""By name. CPUs / NUMA nodes / L3 groups: 256/8/32, 384/2/24, 384/8/24, 112/4/2, 224/8/2, 192/4/4, 64/1/1,
32/1/1."""

FORESEEN = _servers("one socket of four nodes", sockets=1, cores=48, nodes=4, l3_cores=12)
"""Small enough to solve a load on it exactly: 4 NUMA nodes of 12 cores."""
