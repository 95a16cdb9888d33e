"""The rules of a right placement, by any allocator: the contract's hard constraints, one assertion each.

Written from the contract alone, so that the allocator is not its own judge.
"""

from __future__ import annotations

from collections import Counter

from kvplace.core.cpuset import cpus_of, mask_of
from kvplace.core.free_resources import Free
from kvplace.core.placement import Placement
from kvplace.core.request import EmulatorThreads, GuestNuma, NumaMemory, Policy, Request, Scope, Smt
from kvplace.core.scalars import NO_CPUS, CpuMask
from kvplace.core.topology import Topology
from tests.core.allocator.exhaustive import Key, domains, key_of, mask_of_nodes, sockets

SPREADS = (Scope.SPREAD_SOCKETS, Scope.SPREAD_NUMA)


def key_of_valid(machine: Topology, free: Free, request: Request, placement: Placement) -> Key:
    """The key of a placement, after every rule for it has been checked."""
    check_cpus(machine, free, request, placement)
    check_domains(machine, free, request, placement)
    check_emulator(machine, request, placement)
    check_memory(machine, free, request, placement)
    touched = placement.cpus | placement.owned
    (domain,) = (domain for domain in domains(machine, request.options.scope) if not touched & ~domain)
    nodes = [machine.node_by_id[node] for node in placement.numa_nodes]
    return key_of(machine, free, request, touched, nodes, domain)


def check_cpus(machine: Topology, free: Free, request: Request, placement: Placement) -> None:
    """The VM has as many CPUs as requested, all of them free for it, and owns the required ones."""
    cpus, owned, vcpus = placement.cpus, placement.owned, mask_of(placement.vcpus)
    assert placement.policy is request.options.policy
    assert placement.numa_memory is (request.options.numa_memory if free.memory else NumaMemory.OFF)
    assert not cpus & ~(free.cpus if request.owns_cpus else free.pool)
    assert not owned & ~free.cpus
    assert not vcpus & ~cpus
    assert not cpus & machine.reserved
    if request.options.policy is Policy.NUMA:
        assert placement.vcpus == ()
        assert owned == 0
        assert cpus.bit_count() >= request.vcpus
        return
    assert len(placement.vcpus) == request.vcpus == vcpus.bit_count()
    need = request.vcpus + (request.options.emulator_threads is EmulatorThreads.ISOLATE)
    cores = [core for core in machine.cores if core & cpus]
    if request.options.smt is not Smt.PREFER:
        available = free.cpus if request.owns_cpus else free.pool
        assert not any(core & ~available for core in cores)
        assert all(core in machine.undivided_cores for core in cores)
    whole = mask_of(cpu for core in cores for cpu in cpus_of(core))
    match request.options.smt:
        case Smt.PREFER:
            assert cpus.bit_count() == need
        case Smt.REQUIRE:
            assert cpus == whole
            assert cpus.bit_count() >= need
            assert sum(1 for core in cores if not core & vcpus) <= need - request.vcpus
        case Smt.ISOLATE:
            assert cpus.bit_count() == need == len(cores)
    if not request.owns_cpus:
        assert owned == 0
    else:
        assert owned == (cpus if request.options.smt is Smt.PREFER else whole)


def check_domains(machine: Topology, free: Free, request: Request, placement: Placement) -> None:
    """The scope holds, shares are equal, and the placement names the domains that it uses, all of them."""
    touched = placement.cpus | placement.owned
    inside = [domain for domain in domains(machine, request.options.scope) if not touched & ~domain]
    assert inside
    assert placement.packages == machine.packages_of(touched)
    assert placement.l3_groups == tuple(n for n, l3 in enumerate(machine.l3_groups) if l3 & touched)
    nodes = [machine.node_by_id[node] for node in placement.numa_nodes]
    assert [node for node in machine.numa_nodes if node in nodes] == nodes
    giving = {node.id for node in nodes if node.cpus & touched}
    assert giving == set(machine.nodes_of(touched))
    for node in nodes:
        if node.id not in giving:
            assert node.cpus & inside[0]
            assert placement.memory.get(node.id) or placement.huge_pages.get(node.id)
    if request.options.policy is Policy.NUMA:
        pool = mask_of_nodes(nodes) & free.pool
        assert any(placement.cpus == pool & domain for domain in inside)
    elif request.options.scope in SPREADS:
        check_shares(machine, request, placement)


def check_shares(machine: Topology, request: Request, placement: Placement) -> None:
    """No socket or NUMA node carries two threads more than another that carries any."""
    parts = (
        [package.cpus for package in sockets(machine)]
        if request.options.scope is Scope.SPREAD_SOCKETS
        else [node.cpus for node in machine.numa_nodes]
    )
    vcpus = mask_of(placement.vcpus)
    used = [part for part in parts if part & placement.cpus]
    shares = [(part & vcpus).bit_count() for part in used]
    if request.options.emulator_threads is not EmulatorThreads.ISOLATE:
        assert max(shares) - min(shares) <= 1
        return
    # One unit more is the emulator's; of left-over threads any may be it.
    emulator = placement.emulator_cpus & placement.cpus & ~vcpus
    assert any(
        max(counts) - min(counts) <= 1
        for part in used
        if part & emulator
        for counts in [[share + (other is part) for share, other in zip(shares, used, strict=True)]]
    )


def check_emulator(machine: Topology, request: Request, placement: Placement) -> None:
    """QEMU's own threads run where they were asked to, and never on a CPU that another VM may own."""
    vcpus, emulator = mask_of(placement.vcpus), placement.emulator_cpus
    spare = placement.cpus & ~vcpus
    assert emulator
    assert not emulator & ~(machine.reserved | placement.cpus)
    if request.options.policy is Policy.NUMA:
        assert emulator == placement.cpus
    elif request.options.emulator_threads is EmulatorThreads.ISOLATE:
        assert emulator == spare
    elif spare:  # the odd thread of a core that is owned whole
        assert request.options.smt is Smt.REQUIRE
        assert emulator == spare
    elif request.options.emulator_threads is EmulatorThreads.WITH_VCPUS:
        assert emulator == vcpus
    else:
        check_shared_emulator(machine, placement)
    check_io_threads(request, placement)


def check_shared_emulator(machine: Topology, placement: Placement) -> None:
    """The emulator has reserved CPUs of the VM's sockets, the nearest ones, or else the CPUs of the vCPUs."""
    vcpus = mask_of(placement.vcpus)
    reserved = NO_CPUS
    for socket in machine.sockets:
        reserved |= socket.cpus & machine.reserved if socket.cpus & vcpus else NO_CPUS
    own = [node for node in machine.numa_nodes if node.cpus & placement.cpus]
    if near := mask_of_nodes(own) & reserved:
        assert placement.emulator_cpus == near
        return
    others: dict[int, CpuMask] = {}
    for node in machine.numa_nodes:
        if here := node.cpus & reserved:
            distance = min(machine.distance(one.id, node.id) for one in own)
            others[distance] = others.get(distance, NO_CPUS) | here
    assert placement.emulator_cpus == (others[min(others)] if others else vcpus)


def check_io_threads(request: Request, placement: Placement) -> None:
    """Each I/O thread has one of the emulator's CPUs where no vCPU or other VM runs on these, else all."""
    emulator, cpus = placement.emulator_cpus, placement.io_thread_cpus
    assert len(cpus) == request.io_threads
    own = placement.vcpus and not emulator & ~(placement.cpus & ~mask_of(placement.vcpus))
    if not own:
        assert set(cpus) <= {emulator}
        return
    assert not mask_of(cpu for one in cpus for cpu in cpus_of(one)) & ~emulator
    shares = Counter(cpus)
    assert all(one.bit_count() == 1 for one in shares)
    assert not cpus or max(shares.values()) - min(shares[mask_of([cpu])] for cpu in cpus_of(emulator)) <= 1
    if emulator.bit_count() > 1 and request.io_threads < emulator.bit_count():
        assert emulator & -emulator not in shares  # the main loop has the first one for itself


def check_memory(machine: Topology, free: Free, request: Request, placement: Placement) -> None:
    """Memory and pages are on the VM's nodes, all there: the nodes of its CPUs first, where Linux does so."""
    nodes = placement.numa_nodes
    near = [bool(machine.node_by_id[node].cpus & placement.cpus) for node in nodes]
    evenly = [True] * len(nodes)
    pages = {(node, size): n for node, sizes in placement.huge_pages.items() for size, n in sizes.items()}
    assert {node for node, _ in pages} <= set(nodes)
    for size, count in request.huge_pages.items():
        room = [max(0, free.pages_by_node.get((node, size), 0)) for node in nodes]
        mirrors = request.options.guest_numa is GuestNuma.MIRROR
        check_split(
            [pages.get((node, size), 0) for node in nodes], room, near if mirrors else evenly, count, 1
        )
    assert {size for _, size in pages} <= set(request.huge_pages)
    if not free.memory or not request.memory or request.options.numa_memory is NumaMemory.OFF:
        assert placement.memory == {}
        return
    assert set(placement.memory) <= set(nodes)
    assert all(placement.memory.values())
    paged = {node: sum(size * n for (where, size), n in pages.items() if where == node) for node in nodes}
    plain = max(0, request.memory - sum(size * n for size, n in request.huge_pages.items()))
    room = [max(0, dict(free.memory)[node]) for node in nodes]
    interleaved = request.options.numa_memory is NumaMemory.INTERLEAVE
    check_split(
        [placement.memory.get(node, 0) - paged[node] for node in nodes],
        room,
        evenly if interleaved else near,
        plain,
        len(nodes),
    )


def check_split(shares: list[int], room: list[int], first: list[bool], amount: int, slack: int) -> None:
    """A share is smaller than another, by more than `slack`, only where there is no more room.

    The other nodes give something only where all of the `first` have given everything.
    """
    assert sum(shares) == amount
    assert all(0 <= share <= most for share, most in zip(shares, room, strict=True))
    if any(share for share, near in zip(shares, first, strict=True) if not near):
        assert all(share == most for share, most, near in zip(shares, room, first, strict=True) if near)
    for kind in (True, False):
        alike = [(share, most) for share, most, near in zip(shares, room, first, strict=True) if near is kind]
        largest = max([share for share, _ in alike], default=0)
        assert all(share == most or share >= largest - slack for share, most in alike)


def whole_cores(machine: Topology, free: Free, request: Request) -> int:
    """The CPUs that may carry a thread of the VM."""
    available = free.cpus if request.owns_cpus else free.pool
    if request.options.smt is Smt.PREFER:
        return available
    return mask_of(cpu for core in machine.undivided_cores if not core & ~available for cpu in cpus_of(core))
