"""The VMs that run on one machine: the resources that are free when some of them move, and their neighbours.

Neighbours can slow each other down. Two VMs on one core compete for its execution units, in one L3 cache for
its space, on one NUMA node for memory bandwidth. The smallest domain that two VMs share includes the others.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property
from itertools import combinations
from types import MappingProxyType

from kvplace.core.cpuset import cpus_of, union
from kvplace.core.free_resources import Free, free_of
from kvplace.core.ledger import Claim, Ledger, claim_of
from kvplace.core.node_devices import HeldDevices, NodeDevices
from kvplace.core.placement import Placement
from kvplace.core.request import NumaMemory, PinningOptions, Policy, Request
from kvplace.core.scalars import Bytes, CpuMask, NodeName, NumaId, PodUid
from kvplace.core.topology import Topology


@dataclass(frozen=True, slots=True)
class Occupant:
    """A VM that runs on a machine."""

    id: str
    request: Request
    placement: Placement
    movable: bool = True
    """Whether it may move at all; one of policy `immovable` never does."""
    devices: HeldDevices = field(default_factory=lambda: MappingProxyType({}))
    """Devices that it has and that are counted as free without it."""


def occupant_of_claim(name: str, claim: Claim, topology: Topology | None) -> Occupant:
    """Make a VM from its claim alone: it holds the resources of the claim and stays there."""
    cpus = CpuMask(claim.cpus | claim.still_in_use)
    held = Placement(
        claim.policy,
        (),
        cpus,
        CpuMask(claim.owned | claim.still_in_use),
        numa_nodes=tuple(topology.nodes_of(cpus)) if topology is not None else (),
        memory=claim.memory,
        huge_pages=claim.huge_pages,
    )
    options = PinningOptions(policy=Policy.IMMOVABLE)
    return Occupant(name, Request(max(1, cpus.bit_count()), options), held, movable=False)


@dataclass(frozen=True)
class ClusterNode:
    """One node: its machine and its running VMs."""

    name: NodeName
    topology: Topology
    running: tuple[Occupant, ...] = ()
    pools_shrink: bool = False
    """Whether an agent can take CPUs out of the pools of `numa` VMs."""
    devices: NodeDevices | None = None
    """Free devices, together with devices of the running VMs; None where nothing is known of them."""

    @cached_property
    def free(self) -> Free:
        """CPUs, memory and devices that the running VMs leave free."""
        claims = [claim_of(PodUid(vm.id), vm.placement) for vm in self.running]
        devices = devices_beside(self.devices, self.running)
        return free_of(self.topology, Ledger(), claims, pools_shrink=self.pools_shrink, devices=devices)


class RunningVms:
    """The VMs on one node and their placements."""

    def __init__(self, node: ClusterNode) -> None:
        self.topology = node.topology
        self.occupants = {occupant.id: occupant for occupant in node.running}
        self._devices = node.free.devices
        self._pools_shrink = node.pools_shrink
        self._claims = {
            PodUid(uid): claim_of(PodUid(uid), one.placement) for uid, one in self.occupants.items()
        }
        self._without: dict[frozenset[str], Ledger] = {}

    def free(self, elsewhere: Mapping[str, Placement | None]) -> Free:
        """Compute the free resources when these VMs have other placements, or (None) are gone."""
        gone = frozenset(elsewhere)
        ledger = self._without.get(gone)
        if ledger is None:
            claims = {uid: claim for uid, claim in self._claims.items() if uid not in gone}
            owners = {cpu: uid for uid, claim in claims.items() for cpu in cpus_of(claim.owned)}
            ledger = self._without[gone] = Ledger(owners, claims)
        holds = [
            claim_of(PodUid(f"{uid}/new"), placed) for uid, placed in elsewhere.items() if placed is not None
        ]
        return free_of(self.topology, ledger, holds, pools_shrink=self._pools_shrink, devices=self._devices)


def devices_beside(devices: NodeDevices | None, vms: Iterable[Occupant]) -> NodeDevices | None:
    """Count the devices that VMs have as taken."""
    for vm in vms:
        devices = devices.without(vm.devices) if devices is not None else None
    return devices


def locality_of(topology: Topology, placement: Placement) -> tuple[int, int, int, int]:
    """Rate a placement: sockets, NUMA nodes, largest and summed distance between them; smaller is better."""
    distances = [topology.distance(a, b) for a, b in combinations(placement.numa_nodes, 2)]
    return (
        sum(1 for socket in topology.sockets if socket.cpus & placement.cpus),
        len(placement.numa_nodes),
        max(distances, default=0),
        sum(distances),
    )


def memory_of(request: Request, placement: Placement) -> Mapping[NumaId, Bytes]:
    """The bytes of a VM by NUMA node, also where the machine does not report its memory."""
    if placement.memory or not request.memory or request.options.numa_memory is NumaMemory.OFF:
        return placement.memory
    share, rest = divmod(request.memory, len(placement.numa_nodes))
    return {node: Bytes(share + (number < rest)) for number, node in enumerate(placement.numa_nodes)}


def keeps_memory(request: Request, before: Placement, after: Placement) -> bool:
    """Whether the memory of a VM stays where it is when the VM moves."""
    return set(after.numa_nodes) <= set(before.numa_nodes) and not bytes_moved(request, before, after)


def bytes_moved(request: Request, before: Placement, after: Placement) -> Bytes:
    """Count the bytes that go to another NUMA node when a VM moves; 0 when its memory is not bound."""
    there = memory_of(request, before)
    arrived = (max(0, count - there.get(node, 0)) for node, count in memory_of(request, after).items())
    return Bytes(sum(arrived))


class Nearness(Enum):
    """The smallest thing that two VMs share, the nearest first."""

    CPU = "the same CPUs"
    CORE = "siblings of the same cores"
    L3 = "the same L3 cache"
    NUMA = "the same NUMA node"
    SOCKET = "the same socket"


@dataclass(frozen=True, slots=True)
class Neighbour:
    """Another VM or pod on the machine."""

    claim: Claim
    nearness: Nearness
    shared: CpuMask
    """Its CPUs inside the shared domain."""


def neighbours_of(uid: PodUid, cpus: CpuMask, topology: Topology, ledger: Ledger) -> tuple[Neighbour, ...]:
    """Find the VMs that use the same CPUs, cores, L3 caches, NUMA nodes and sockets as a VM, nearest first.

    Each neighbour is listed once, with the nearest that it shares. A VM elsewhere on the machine is none.
    """
    reaches = (
        (Nearness.CPU, cpus),
        (Nearness.CORE, _reach(topology.cores, cpus)),
        (Nearness.L3, _reach(topology.l3_groups, cpus)),
        (Nearness.NUMA, _reach((node.cpus for node in topology.numa_nodes), cpus)),
        (Nearness.SOCKET, _reach((package.cpus for package in topology.packages), cpus)),
    )
    found = []
    for claim in ledger.claims.values():
        if claim.uid == uid:
            continue
        for nearness, reach in reaches:
            if shared := CpuMask((claim.cpus | claim.owned) & reach):
                found.append(Neighbour(claim, nearness, shared))
                break
    order = list(Nearness)
    return tuple(
        sorted(found, key=lambda one: (order.index(one.nearness), one.claim.namespace, one.claim.pod))
    )


def _reach(sets: Iterable[CpuMask], cpus: CpuMask) -> CpuMask:
    """Unite the sets where a VM has CPUs."""
    return union(one for one in sets if one & cpus)
