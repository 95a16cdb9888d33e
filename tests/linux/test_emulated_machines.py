"""Shapes of machines that real kernels showed under emulation, and what hot-unplugging leaves of them."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest

from kvplace.core.allocator.allocate import place
from kvplace.core.cpuset import cpus_of, format_cpu_list, mask_of, parse_cpu_list
from kvplace.core.free_resources import free_of
from kvplace.core.ledger import Ledger
from kvplace.core.placement import Placement, Refusal
from kvplace.core.request import PinningOptions, Request, Scope
from kvplace.core.scalars import Bytes, CpuMask, NumaId
from kvplace.core.topology import Topology
from kvplace.linux.sysfs import discover
from tests.core.machines import make_numa_node, make_package, make_topology
from tests.linux.written_tree import WrittenTree, sysfs_of

CPU = "sys/devices/system/cpu"


@dataclass(frozen=True)
class Shape:
    """Equal sockets, with siblings adjacent as QEMU numbers them."""

    packages: int
    nodes: int
    l3_groups: int
    cores: int
    threads: int
    distances: tuple[tuple[int, ...], ...]

    def machine(self) -> Topology:
        """Cut the CPUs at each level into equal runs."""
        count = self.cores * self.threads

        def cut(parts: int) -> tuple[int, ...]:
            size = count // parts
            return tuple(mask_of(range(at, at + size)) for at in range(0, count, size))

        return make_topology(
            packages=tuple(make_package(number, cpus) for number, cpus in enumerate(cut(self.packages))),
            numa_nodes=tuple(
                make_numa_node(number, cpus, 1 << 30, {}, dict(enumerate(self.distances[number])))
                for number, cpus in enumerate(cut(self.nodes))
            ),
            l3_groups=cut(self.l3_groups),
            cores=cut(self.cores),
        )


def near_and_far(nodes: int, near: int, far: int, sockets: int) -> tuple[tuple[int, ...], ...]:
    """10 to itself, `near` within a socket, `far` to others."""
    per_socket = nodes // sockets
    return tuple(
        tuple(10 if a == b else near if a // per_socket == b // per_socket else far for b in range(nodes))
        for a in range(nodes)
    )


UNEVEN = ((10, 16, 22, 28), (16, 10, 28, 22), (22, 28, 10, 16), (28, 22, 16, 10))
SHAPES = {
    "2 sockets with SMT": Shape(2, 2, 2, 4, 2, near_and_far(2, 0, 21, 2)),
    "1 socket, NPS4": Shape(1, 4, 4, 8, 2, near_and_far(4, 12, 12, 1)),
    "4 sockets, uneven distances": Shape(4, 4, 4, 8, 2, UNEVEN),
    "3 threads per core": Shape(2, 2, 2, 4, 3, near_and_far(2, 0, 20, 2)),
    "128 CPUs": Shape(2, 2, 2, 64, 2, near_and_far(2, 0, 21, 2)),
    "2 sockets, SNC2": Shape(2, 4, 4, 16, 2, near_and_far(4, 12, 21, 2)),
    "2 sockets, NPS4": Shape(2, 8, 8, 32, 2, near_and_far(8, 12, 32, 2)),
    "8 threads per core": Shape(2, 2, 8, 8, 8, near_and_far(2, 0, 40, 2)),
    "1 socket without SMT": Shape(1, 1, 1, 4, 1, ((10,),)),
}
SMT = SHAPES["2 sockets with SMT"].machine()


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("masks", [False, True], ids=["lists", "masks"])
def test_an_emulated_machine_is_read_as_it_was_made(name: str, masks: bool) -> None:
    machine = SHAPES[name].machine()
    found = discover(sysfs_of(machine, masks=masks))
    assert found.topology == machine
    assert found.notes == ()


def unplug(tree: WrittenTree, machine: Topology, gone: int) -> WrittenTree:
    """Switch CPUs off as the kernel does: no topology, no caches, and no set that still names them."""
    tree.files[f"{CPU}/online"] = format_cpu_list(machine.cpus & ~gone) + "\n"
    for path, text in list(tree.files.items()):
        if any(path.startswith(f"{CPU}/cpu{cpu}/") for cpu in cpus_of(CpuMask(gone))):
            del tree.files[path]
        elif path.endswith("list"):
            tree.files[path] = format_cpu_list(parse_cpu_list(text) & ~gone) + "\n"
    for cpu in cpus_of(CpuMask(gone)):
        tree.files[f"{CPU}/cpu{cpu}/online"] = "0\n"
    return tree


@pytest.mark.parametrize(
    ("offline", "cores", "l3_groups", "nodes"),
    [
        ("3,6", ["0-1", "2", "4-5", "7"], ["0-2", "4-5,7"], ["0-2", "4-5,7"]),
        ("1,3,5,7", ["0", "2", "4", "6"], ["0,2", "4,6"], ["0,2", "4,6"]),  # nosmt
        ("6-7", ["0-1", "2-3", "4-5"], ["0-3", "4-5"], ["0-3", "4-5"]),  # maxcpus=6
        ("0", ["1", "2-3", "4-5", "6-7"], ["1-3", "4-7"], ["1-3", "4-7"]),
        ("4-7", ["0-1", "2-3"], ["0-3"], ["0-3", ""]),
    ],
)
def test_offline_cpus_leave_smaller_cores_and_nodes(
    offline: str, cores: list[str], l3_groups: list[str], nodes: list[str]
) -> None:
    found = discover(unplug(sysfs_of(SMT), SMT, parse_cpu_list(offline)))
    machine = found.topology
    assert [format_cpu_list(core) for core in machine.cores] == cores
    assert [format_cpu_list(group) for group in machine.l3_groups] == l3_groups
    assert [format_cpu_list(node.cpus) for node in machine.numa_nodes] == nodes
    assert found.notes == ()


def test_isolated_cpus_are_those_that_are_on_line() -> None:
    tree = unplug(sysfs_of(SMT), SMT, parse_cpu_list("3,6"))
    tree.files[f"{CPU}/isolated"] = "2-3,7\n"
    assert format_cpu_list(discover(tree).topology.isolated) == "2,7"


def test_a_node_of_memory_alone_is_kept_with_its_distances() -> None:
    rows = ({0: 10, 1: 21, 2: 24}, {0: 21, 1: 10, 2: 34}, {0: 24, 1: 34, 2: 10})
    cpus = (0b1111, 0b11110000, 0)
    nodes = tuple(make_numa_node(number, cpus[number], 1 << 30, {}, rows[number]) for number in range(3))
    machine = replace(SMT, numa_nodes=nodes)
    found = discover(sysfs_of(machine))
    assert found.topology == machine
    assert (found.topology.distance(NumaId(0), NumaId(2)), found.topology.distance(NumaId(1), NumaId(2))) == (
        24,
        34,
    )


def numa_fake(machine: Topology, parts: int) -> WrittenTree:
    """Split each NUMA node into so many emulated ones, as `numa=fake` does: each lists all its CPUs."""
    emulated = [
        make_numa_node(parts * node.id + part, node.cpus, node.memory // parts)
        for node in machine.numa_nodes
        for part in range(parts)
    ]
    tree = sysfs_of(machine)
    for node in emulated:
        folder = f"sys/devices/system/node/node{node.id}"
        tree.files[f"{folder}/cpulist"] = format_cpu_list(node.cpus) + "\n"
        tree.files[f"{folder}/meminfo"] = f"Node {node.id} MemTotal: {node.memory // 1024} kB\n"
        near = {other.id: 10 if other.cpus == node.cpus else 21 for other in emulated}
        tree.files[f"{folder}/distance"] = " ".join(map(str, near.values())) + "\n"
    return tree


@pytest.mark.parametrize("parts", [2, 4])
def test_emulated_nodes_share_their_cpus_so_that_memory_is_bound_where_it_is(parts: int) -> None:
    found = discover(numa_fake(SMT, parts))
    machine = found.topology
    assert [node.memory for node in machine.numa_nodes] == [(1 << 30) // parts] * 2 * parts
    assert [node.cpus.bit_count() for node in machine.numa_nodes] == [2, 2, 0, 0][:parts] * 2  # whole cores
    for node in machine.numa_nodes:
        assert not node.cpus & ~SMT.numa_nodes[node.id // parts].cpus
    assert replace(machine, numa_nodes=SMT.numa_nodes) == SMT
    assert "puts CPU 0-7 into several NUMA nodes" in found.notes[0]


def test_a_vm_on_emulated_nodes_uses_memory_of_all_of_them() -> None:
    machine = discover(numa_fake(SMT, 2)).topology
    free = free_of(machine, Ledger())
    placement = place(machine, free, Request(4, PinningOptions(Scope.ONE_SOCKET), memory=Bytes(1 << 30)))
    assert isinstance(placement, Placement)
    assert placement.memory == {0: 1 << 29, 1: 1 << 29}
    assert isinstance(
        place(machine, free, Request(1, PinningOptions(Scope.ONE_NUMA), memory=Bytes(1 << 30))), Refusal
    )


def test_nodes_numbered_across_sockets_lie_in_both() -> None:
    """As with QEMU's interleaved numbering: the kernel gives up SMT, and nodes span packages."""
    machine = replace(
        SMT,
        cores=tuple(CpuMask(1 << cpu) for cpu in range(8)),
        numa_nodes=tuple(
            replace(node, cpus=CpuMask(cpus)) for node, cpus in zip(SMT.numa_nodes, (0x55, 0xAA), strict=True)
        ),
    )
    found = discover(sysfs_of(machine))
    assert found.topology == machine
    assert [machine.packages_of(node.cpus) for node in machine.numa_nodes] == [(0, 1), (0, 1)]
    assert machine.l3_in(CpuMask(0x55)) == (0x05, 0x50)


def test_huge_ids_are_read_and_only_those_that_no_kernel_has_are_refused() -> None:
    cpus = [0, 4095, 8191]
    tree = WrittenTree(
        {f"{CPU}/cpu{cpu}/topology/thread_siblings_list": f"{cpu}\n" for cpu in cpus}
        | {f"{CPU}/cpu{cpu}/topology/physical_package_id": f"{cpu}\n" for cpu in cpus}
        | {f"{CPU}/cpu{cpu}/topology/core_siblings_list": f"{cpu}\n" for cpu in cpus}
    )
    assert [package.id for package in discover(tree).topology.packages] == cpus
