"""The allocator's choices for mirroring guests, as real libvirt takes them and real QEMU shows them.

The hosts are larger than the machine that runs the tests. So libvirt is given the domain as it is, and
QEMU runs it with its threads on the CPUs that there are, and its memory unbound.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from harness.libvirt_session.daemon import LibvirtSession, RunningDomain
from harness.libvirt_session.documents import minimal_domain
from kvplace.core.allocator.allocate import place
from kvplace.core.cpuset import cpus_of, mask_of, parse_cpu_list
from kvplace.core.free_resources import free_of
from kvplace.core.ledger import Ledger
from kvplace.core.placement import Placement
from kvplace.core.request import GuestNuma, NumaMemory, Policy, Request, Scope, Smt
from kvplace.core.scalars import Bytes, CpuMask, NumaId
from kvplace.core.topology import Topology
from kvplace.domainxml import rewrite
from kvplace.machines.server_types import read_machine
from tests.core.machines import make_numa_node, make_package, make_topology
from tests.core.requests import request_with

pytestmark = pytest.mark.libvirt_session

MIB = Bytes(1 << 20)
GIB = Bytes(1 << 30)


def host(*nodes: tuple[int, str], cores: str, memory: int = 64 * GIB, far: int = 21) -> Topology:
    """One socket; nodes are (id, CPU list), cores are CPU lists with blanks between them."""
    ids = [number for number, _ in nodes]
    return make_topology(
        packages=(
            make_package(0, mask_of(cpu for _, text in nodes for cpu in cpus_of(parse_cpu_list(text)))),
        ),
        numa_nodes=tuple(
            make_numa_node(
                number,
                parse_cpu_list(text),
                memory,
                {2 * MIB: 64},
                {other: 10 if other == number else far for other in ids},
            )
            for number, text in nodes
        ),
        l3_groups=tuple(parse_cpu_list(text) for _, text in nodes if text),
        cores=tuple(parse_cpu_list(core) for core in cores.split()),
    )


LARGE = read_machine("2x-epyc-7763-nps4")
SPARSE = host((0, "0-7"), (2, "8-11"), (8, "12-15"), cores="0-1 2-3 4-5 6-7 8-9 10-11 12-13 14-15")
HYBRID = host((0, "0-6"), cores="0-1 2-3 4 5 6")
FOUR_THREADS = host((0, "0-7"), (1, "8-15"), cores="0-3 4-7 8-11 12-15", far=40)
POOR = host((0, "0-3"), (1, "4-7"), cores="0-1 2-3 4-5 6-7", memory=168 * MIB)


def mirrored(vcpus: int, **wish: Any) -> Request:
    words: dict[str, Any] = {"scope": Scope.ANY, "numa_memory": NumaMemory.STRICT, "memory": 64 * MIB} | wish
    return request_with(vcpus, guest_numa=GuestNuma.MIRROR, **words)


@dataclass(frozen=True)
class Case:
    """A VM on a host, and what its guest must see."""

    on: Topology
    request: Request
    cells: tuple[int, ...]
    """vCPUs of each."""
    threads: int
    pluggable: int = 0
    backing: str = ""


HUGE = "<memoryBacking><hugepages><page size='2' unit='MiB'/></hugepages></memoryBacking>"
CASES = {
    "halves of whole cores": Case(LARGE, mirrored(36, scope=Scope.SPREAD_NUMA, smt=Smt.REQUIRE), (18, 18), 2),
    "odd count in equal shares": Case(LARGE, mirrored(33, scope=Scope.SPREAD_NUMA), (17, 16), 1),
    "a core for each vCPU": Case(LARGE, mirrored(20, smt=Smt.ISOLATE), (15, 5), 1),
    "one node only": Case(LARGE, mirrored(8), (8,), 2),
    "one vCPU": Case(LARGE, mirrored(1), (1,), 1),
    "nodes of unequal size and sparse ids": Case(SPARSE, mirrored(12), (8, 4), 2),
    "all of three nodes": Case(SPARSE, mirrored(16), (8, 4, 4), 2),
    "shared CPUs": Case(SPARSE, mirrored(12, policy=Policy.SHARE), (8, 4), 2),
    "cores of one and two threads": Case(HYBRID, mirrored(7), (7,), 1),
    "four threads": Case(FOUR_THREADS, mirrored(16, scope=Scope.SPREAD_NUMA), (8, 8), 4),
    "a node that gives memory alone": Case(POOR, mirrored(1, memory=64 * MIB), (1, 0), 1),
    "huge pages": Case(
        SPARSE, mirrored(16, huge_pages={2 * MIB: 32}, memory=64 * MIB), (8, 4, 4), 2, backing=HUGE
    ),
    "vCPUs that are plugged in later": Case(
        FOUR_THREADS, mirrored(16, scope=Scope.SPREAD_NUMA), (8, 8), 4, pluggable=16
    ),
    "an odd number of vCPUs plugged in later": Case(
        SPARSE, mirrored(13, scope=Scope.SPREAD_NUMA), (5, 4, 4), 1, pluggable=2
    ),
}


def placed(case: Case) -> Placement:
    answer = place(case.on, free_of(case.on, Ledger()), case.request)
    assert isinstance(answer, Placement), answer
    return answer


def here(session: LibvirtSession, placement: Placement) -> Placement:
    """The same VM with its threads on two CPUs of this machine, vCPUs of a cell on the same."""
    first, second = list(cpus_of(CpuMask(session.group.effective())))[:2]
    homes = {vcpu: cell.id for cell in placement.guest_cells for vcpu in cell.vcpus}
    return replace(
        placement,
        vcpus=tuple((first, second)[homes[vcpu] % 2] for vcpu in range(len(placement.vcpus))),
        cpus=mask_of((first, second)),
        emulator_cpus=mask_of([first]),
        numa_nodes=(NumaId(0),),
        numa_memory=NumaMemory.OFF,
    )


def seen_by_guest(domain: RunningDomain) -> dict[int, tuple[int, tuple[int, int, int]]]:
    """Cell, and socket, core and thread, of every vCPU that may be there, in the order of their numbers."""
    import libvirt_qemu

    answer = libvirt_qemu.qemuMonitorCommand(
        domain.handle, json.dumps({"execute": "query-hotpluggable-cpus"}), 0
    )
    found = []
    for entry in json.loads(answer)["return"]:
        at = entry["props"]
        found.append(((at["socket-id"], at["core-id"], at["thread-id"]), at.get("node-id", 0)))
    return {vcpu: (node, place) for vcpu, (place, node) in enumerate(sorted(found))}


def distances(domain: RunningDomain) -> dict[tuple[int, int], int]:
    command = Path(f"/proc/{domain.pid}/cmdline").read_text().replace("\0", " ")
    return {
        (int(a), int(b)): int(value)
        for a, b, value in re.findall(r"dist,src=(\d+),dst=(\d+),val=(\d+)", command)
    }


@pytest.mark.parametrize("name", CASES)
def test_the_guest_sees_the_cores_nodes_and_distances_that_it_was_given(
    name: str, libvirt_session: LibvirtSession
) -> None:
    case = CASES[name]
    choice = placed(case)
    most = case.request.vcpus + case.pluggable
    enabled = "".join(
        f"<vcpu id='{vcpu}' enabled='{'yes' if vcpu < case.request.vcpus else 'no'}' "
        f"hotpluggable='{'yes' if vcpu else 'no'}'/>"
        for vcpu in range(most)
    )
    document = minimal_domain("mirrored", vcpus=most, inside=f"<vcpus>{enabled}</vcpus>")
    backed = document.replace("</domain>", f"{case.backing}</domain>").encode()
    libvirt_session.connection.defineXML(rewrite(backed, choice).decode()).undefine()

    runs = rewrite(document.encode(), here(libvirt_session, choice))
    with libvirt_session.running(runs) as domain:
        guest, far, affinities = seen_by_guest(domain), distances(domain), domain.affinities()
    on_host = [case.on.nodes_of(CpuMask(1 << cpu))[0] for cpu in choice.vcpus]
    cells = {cell.id: cell for cell in choice.guest_cells}
    assert tuple(sum(guest[v][0] == number for v in range(len(on_host))) for number in cells) == case.cells
    assert [cells[guest[vcpu][0]].node for vcpu in range(len(on_host))] == on_host
    cores: dict[tuple[int, int], list[int]] = {}
    for vcpu, (_, (socket, core, _)) in guest.items():
        cores.setdefault((socket, core), []).append(vcpu)
    assert {len(siblings) for siblings in cores.values()} == {case.threads}
    for siblings in cores.values():
        assert len({guest[vcpu][0] for vcpu in siblings}) == 1
        given = {case.on.core_of[choice.vcpus[vcpu]] for vcpu in siblings if vcpu < len(on_host)}
        assert len(given) <= 1
    for a, b in far:
        nodes = cells[a].node, cells[b].node
        assert far[a, b] == (10 if a == b else case.on.distance(*nodes))
    assert len(far) == (len(cells) ** 2 if len(cells) > 1 else len(far))
    wanted = here(libvirt_session, choice)
    assert affinities.vcpus() == {vcpu: 1 << cpu for vcpu, cpu in enumerate(wanted.vcpus)}
