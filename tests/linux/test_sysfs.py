"""A machine is read from its own sets, whatever its ids are, and anything else is refused in a sentence."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvplace.core.cpuset import cpus_of, mask_of
from kvplace.core.errors import BadTopology
from kvplace.core.scalars import NO_CPUS, CpuId, CpuMask, NumaId, PackageId
from kvplace.core.topology import Topology
from kvplace.linux.sysfs import discover
from kvplace.machines.server_types import machine_names, read_machine
from tests.linux.written_tree import WrittenTree, hexadecimal, sysfs_of

CPU = "sys/devices/system/cpu"
NODE = "sys/devices/system/node"
SMALL = read_machine("epyc-7502p")
SMALL_UNRESERVED = replace(SMALL, reserved=NO_CPUS)
TWO_SOCKETS = read_machine("2x-epyc-9354-nps2")


@pytest.mark.parametrize("name", machine_names())
@pytest.mark.parametrize("masks", [False, True], ids=["lists", "masks"])
def test_the_sysfs_files_of_a_machine_give_that_machine_again(name: str, masks: bool) -> None:
    machine = read_machine(name)
    found = discover(sysfs_of(machine, masks=masks))
    assert replace(found.topology, reserved=machine.reserved) == machine
    assert found.notes == ()


@st.composite
def machines(draw: st.DrawFn) -> Topology:
    """Any partition at every level, with ids in no order: levels need not nest."""
    cpus = draw(st.lists(st.integers(0, 90), min_size=1, max_size=12, unique=True))
    base = replace(
        TWO_SOCKETS,
        cores=tuple(map(CpuMask, _cut(draw, cpus))),
        l3_groups=tuple(map(CpuMask, _cut(draw, cpus))),
        packages=tuple(
            replace(TWO_SOCKETS.packages[0], id=PackageId(number), cpus=CpuMask(part))
            for number, part in zip(draw(_ids), _cut(draw, cpus), strict=False)
        ),
        numa_nodes=tuple(
            replace(TWO_SOCKETS.numa_nodes[0], id=NumaId(number), cpus=CpuMask(part), distances={})
            for number, part in zip(sorted(draw(_ids)), _cut(draw, cpus), strict=False)
        ),
        reserved=NO_CPUS,
        isolated=mask_of(draw(st.sets(st.sampled_from(cpus)))),
    )
    distances = {node.id: draw(st.integers(1, 254)) for node in base.numa_nodes}
    return replace(base, numa_nodes=tuple(replace(node, distances=distances) for node in base.numa_nodes))


_ids = st.lists(st.integers(0, 300), min_size=12, max_size=12, unique=True)


def _cut(draw: st.DrawFn, cpus: list[int]) -> tuple[int, ...]:
    shuffled = draw(st.permutations(cpus))
    ends = sorted(draw(st.sets(st.integers(1, len(cpus) - 1)))) if len(cpus) > 1 else []
    parts = [mask_of(shuffled[a:b]) for a, b in zip([0, *ends], [*ends, len(cpus)], strict=True)]
    return tuple(sorted(parts, key=lambda part: part & -part))


def _levels(machine: Topology) -> object:
    return (
        set(machine.cores),
        set(machine.l3_groups),
        {package.cpus: package.id for package in machine.packages},
        {node.id: (node.cpus, node.memory) for node in machine.numa_nodes},
        machine.isolated,
    )


@given(machines())
def test_any_machine_is_read_back_even_where_levels_do_not_nest(machine: Topology) -> None:
    assert _levels(discover(sysfs_of(machine)).topology) == _levels(machine)


_JUNK = st.sampled_from(
    ["", "\n", "\0", "-1\n", "zzz\n", "3-1\n", "0-99999999\n", "ffffffff,zz\n", "0,1,2\n", "0\n\0"]
)


@given(st.data())
def test_a_damaged_tree_is_read_or_refused_in_one_sentence_and_never_anything_else(
    data: st.DataObject,
) -> None:
    tree = sysfs_of(data.draw(machines()), masks=data.draw(st.booleans()))
    for path in data.draw(st.lists(st.sampled_from(sorted(tree.files)), max_size=6, unique=True)):
        if data.draw(st.booleans()):
            del tree.files[path]
        else:
            tree.files[path] = data.draw(_JUNK)
    answer: object
    try:
        answer = discover(tree).topology.cpus
    except BadTopology as error:
        answer = str(error)
    assert answer
    assert not isinstance(answer, str) or (answer.startswith("written machine: ") and "\n" not in answer)


def test_a_cpu_that_is_offline_appears_nowhere_whatever_the_other_files_still_state() -> None:
    tree = sysfs_of(SMALL)
    tree.files[f"{CPU}/online"] = "0-4,6-63\n"
    for cpu in (7, 8):
        tree.files[f"{CPU}/cpu{cpu}/online"] = "0\n"
    for path in [path for path in tree.files if path.startswith(f"{CPU}/cpu9/")]:
        del tree.files[path]
    gone = mask_of((5, 7, 8, 9))
    machine = discover(tree).topology
    assert machine.cpus == SMALL.cpus & ~gone
    assert machine.core_of[CpuId(37)] == 1 << 37
    assert machine.numa_nodes[0].cpus == SMALL.cpus & ~gone


def test_without_l3_information_the_numa_node_stands_in_and_a_note_reports_it() -> None:
    tree = sysfs_of(TWO_SOCKETS)
    for path in [path for path in tree.files if "/cache/" in path]:
        del tree.files[path]
    found = discover(tree)
    assert found.topology.l3_groups == tuple(node.cpus for node in TWO_SOCKETS.numa_nodes)
    assert found.notes == ("the kernel does not describe the L3 caches: the NUMA node stands in for them",)


def test_without_numa_nodes_the_machine_is_one_node_with_all_its_memory() -> None:
    tree = sysfs_of(TWO_SOCKETS)
    for path in [path for path in tree.files if path.startswith(NODE)]:
        del tree.files[path]
    tree.files["proc/meminfo"] = "MemTotal:       1048576 kB\nMemFree:  1 kB\n"
    tree.files["sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages"] = "64\n"
    (node,) = discover(tree).topology.numa_nodes
    assert (node.id, node.cpus, node.memory) == (0, TWO_SOCKETS.cpus, 1 << 30)
    assert dict(node.huge_pages) == {2 << 20: 64}


def test_memory_of_the_machine_that_differs_from_its_numa_nodes_is_noted_and_does_not_count() -> None:
    tree = sysfs_of(TWO_SOCKETS)
    in_nodes = sum(node.memory for node in TWO_SOCKETS.numa_nodes) // 1024
    tree.files["proc/meminfo"] = f"MemTotal:       {in_nodes} kB\n"
    assert discover(tree).notes == ()
    tree.files["proc/meminfo"] = f"MemTotal:       {in_nodes * 3} kB\n"
    found = discover(tree)
    assert found.topology.numa_nodes == TWO_SOCKETS.numa_nodes
    (note,) = found.notes
    assert "that of the NUMA nodes counts" in note
    assert "2.21Ti of memory and its NUMA nodes 756Gi together" in note
    tree.files["proc/meminfo"] = f"MemTotal:       {in_nodes // 3} kB\n"
    (note,) = discover(tree).notes
    assert "252Gi of memory and its NUMA nodes 756Gi together" in note
    assert note.endswith("VMs may get more than the machine has")


def test_a_cpu_in_two_numa_nodes_or_in_none_gets_one_and_memory_stays_where_it_is() -> None:
    for cpus, words in (("0-16,64-79", "CPU 16 into several"), ("0-14,64-79", "CPU 15 into no")):
        tree = sysfs_of(TWO_SOCKETS)
        tree.files[f"{NODE}/node0/cpulist"] = cpus
        found = discover(tree)
        assert words in found.notes[0]
        assert found.topology.numa_nodes == TWO_SOCKETS.numa_nodes


def test_a_list_that_lacks_its_own_cpu_yields_to_the_mask_that_has_it() -> None:
    tree = sysfs_of(SMALL)
    for cpu in (5, 37):
        folder = f"{CPU}/cpu{cpu}/cache/index3"
        tree.files[f"{folder}/shared_cpu_map"] = hexadecimal(SMALL.l3_groups[1], 64) + "\n"
        tree.files[f"{folder}/shared_cpu_list"] = "0-3\n"
    found = discover(tree)
    assert found.topology == SMALL_UNRESERVED
    assert found.notes == (
        "the kernel leaves CPU 5,37 out of a list of its own siblings: the file that names it counts",
    )


def test_siblings_that_contradict_each_other_count_as_one_core_beside_those_who_agree() -> None:
    tree = sysfs_of(SMALL)
    tree.files[f"{CPU}/cpu37/topology/core_cpus_list"] = "6,37\n"
    found = discover(tree)
    assert found.topology == SMALL_UNRESERVED
    assert found.notes == (
        "the kernel contradicts itself about the sibling threads of CPU 5,37: overlapping groups are merged",
    )
    tree.files[f"{CPU}/cpu6/topology/core_cpus_list"] = "6,37-38\n"
    assert discover(tree).topology.core_of[CpuId(5)] == mask_of((5, 6, 37, 38))


def test_a_cpu_that_is_not_a_member_of_its_own_core_is_reported_and_a_core_by_itself() -> None:
    tree = sysfs_of(SMALL)
    for cpu in (5, 37):
        tree.files[f"{CPU}/cpu{cpu}/topology/core_cpus_list"] = "6\n"
    found = discover(tree)
    assert {found.topology.core_of[CpuId(5)], found.topology.core_of[CpuId(37)]} == {1 << 5, 1 << 37}
    assert "contradicts itself about the sibling threads of CPU 5,37" in found.notes[0]


def test_sockets_without_ids_of_their_own_are_numbered_from_zero() -> None:
    for number in ("-1", "7", "4294967295"):
        tree = sysfs_of(TWO_SOCKETS)
        for cpu in cpus_of(TWO_SOCKETS.cpus):
            tree.files[f"{CPU}/cpu{cpu}/topology/physical_package_id"] = f"{number}\n"
        found = discover(tree)
        assert [package.id for package in found.topology.packages] == [0, 1]
        assert [package.cpus for package in found.topology.packages] == [p.cpus for p in TWO_SOCKETS.packages]
        assert "numbered from 0" in found.notes[0]


def test_a_distance_row_that_stops_early_or_holds_zeros_leaves_those_distances_unknown() -> None:
    tree = sysfs_of(TWO_SOCKETS)
    tree.files[f"{NODE}/node0/distance"] = "10 0\n"
    assert dict(discover(tree).topology.numa_nodes[0].distances) == {0: 10}


def test_memory_only_nodes_stay_with_their_distances_counted_by_order_and_not_by_id() -> None:
    tree = sysfs_of(SMALL)
    tree.files |= {
        f"{NODE}/node250/cpulist": "\n",
        f"{NODE}/node250/meminfo": "Node 250 MemTotal: 1024 kB\n",
        f"{NODE}/node250/distance": "40 10\n",
        f"{NODE}/node0/distance": "10 40\n",
        f"{NODE}/online": "0,250\n\0",
    }
    near, far = discover(tree).topology.numa_nodes
    assert (far.id, far.cpus, far.memory) == (250, 0, 1 << 20)
    assert dict(near.distances) == {0: 10, 250: 40}


@pytest.mark.parametrize(
    ("path", "content", "words"),
    [
        (f"{CPU}/online", "0-x\n", "'0-x' is neither a number nor a range"),
        (f"{CPU}/online", "170\n", "is on-line and has a topology folder"),
        (f"{NODE}/node0/distance", "ten\n", "holds 'ten', not distances"),
        (f"{CPU}/cpu0/topology/core_cpus_list", "0-99999\n", "above the highest id"),
    ],
)
def test_a_file_that_holds_junk_is_named(path: str, content: str, words: str) -> None:
    tree = sysfs_of(TWO_SOCKETS)
    tree.files[path] = content
    with pytest.raises(BadTopology, match=words) as raised:
        discover(tree)
    assert "written machine" in str(raised.value)


def test_a_mask_that_is_not_hexadecimal_is_named() -> None:
    tree = sysfs_of(SMALL, masks=True)
    tree.files[f"{CPU}/cpu3/topology/thread_siblings"] = "00000008,0x08"
    with pytest.raises(BadTopology, match="cpu3/topology/thread_siblings holds '00000008,0x08'"):
        discover(tree)


@given(st.sets(st.integers(0, 200), min_size=1))
def test_a_mask_of_many_words_means_the_cpus_that_its_list_means(cpus: set[int]) -> None:
    tree = WrittenTree(
        {f"{CPU}/cpu{cpu}/topology/thread_siblings": hexadecimal(mask_of(cpus), 224) for cpu in cpus}
    )
    assert discover(tree).topology.cores == (mask_of(cpus),)


def test_a_machine_without_cpus_is_refused() -> None:
    with pytest.raises(BadTopology, match=r"no CPU below .*; a sandbox .* read the sysfs of the host itself"):
        discover(WrittenTree({}))
