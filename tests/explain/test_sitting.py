"""Who sits beside a VM: everybody once, with the nearest that both share."""

from __future__ import annotations

from kvplace.core.cpuset import cpus_of, mask_of, parse_cpu_list
from kvplace.core.ledger import Ledger
from kvplace.core.placement import Placement
from kvplace.core.request import Policy
from kvplace.core.scalars import CpuId, NumaId, PodUid
from kvplace.core.topology import Topology
from kvplace.explain.sitting import Nearness, neighbours
from tests.core.machines import make_numa_node, make_package, make_topology
from tests.kube.claims import claim, taking

# One socket of two NUMA nodes, each with two L3 groups of two cores; CPU n+8 is the sibling of CPU n.
MACHINE: Topology = make_topology(
    packages=(make_package(0, mask_of(range(16))),),
    numa_nodes=(
        make_numa_node(0, parse_cpu_list("0-3,8-11")),
        make_numa_node(1, parse_cpu_list("4-7,12-15")),
    ),
    l3_groups=tuple(parse_cpu_list(f"{low}-{low + 1},{low + 8}-{low + 9}") for low in (0, 2, 4, 6)),
    cores=tuple(1 << core | 1 << core + 8 for core in range(8)),
)


def placement(cpus: str) -> Placement:
    mask = parse_cpu_list(cpus)
    return Placement(
        Policy.SHARE, tuple(map(CpuId, cpus_of(mask))), mask, numa_nodes=(NumaId(0),), packages=()
    )


def near(cpus: str, **others: str) -> dict[str, tuple[Nearness, str]]:
    ledger = Ledger().after(taking(claim("me", *cpus_of(parse_cpu_list(cpus)), owned=parse_cpu_list(""))))
    for name, theirs in others.items():
        mask = parse_cpu_list(theirs)
        ledger = ledger.after(taking(claim(name, *cpus_of(mask), owned=parse_cpu_list(""))))
    found = neighbours(MACHINE, placement(cpus), PodUid("me"), ledger)
    return {one.claim.uid: (one.nearness, ",".join(map(str, cpus_of(one.shared)))) for one in found}


def test_the_nearest_that_is_shared_is_named_with_the_neighbours_cpus_in_it() -> None:
    assert near("0", same="0,4", sibling="8,5", cache="1,6", node="2,7", socket="4") == {
        "same": (Nearness.CPU, "0"),
        "sibling": (Nearness.CORE, "8"),
        "cache": (Nearness.L3, "1"),
        "node": (Nearness.NUMA, "2"),
        "socket": (Nearness.SOCKET, "4"),
    }


def test_a_vm_is_not_its_own_neighbour_and_the_nearest_come_first() -> None:
    assert list(near("0", z="0", a="3")) == ["z", "a"]
    assert near("0") == {}


def test_a_vm_on_another_socket_is_no_neighbour() -> None:
    from tests.nodes.machines import TWO

    ledger = Ledger().after(taking(claim("other", 4, 12)))
    assert neighbours(TWO, placement("0,8"), PodUid("me"), ledger) == ()
