"""The kernel's rules when a cpuset changes: those that the agent relies on, and where versions differ."""

from __future__ import annotations

from harness.emulated_machine.fixtures import on_machines
from harness.emulated_machine.kernels import Kernel
from harness.emulated_machine.machine import EmulatedMachine
from harness.emulated_machine.shape import FOUR_NODES, TWO_SOCKETS
from kvplace.core.cpuset import cpus_of, parse_cpu_list
from tests.emulated_machine import kernel_rules as inside

PAGES_PER_MEGABYTE = 256
KERNELS = (TWO_SOCKETS, (FOUR_NODES, Kernel.V6_12))


@on_machines(*KERNELS)
def test_a_pin_survives_a_cpuset_that_passes_it_by_on_newer_kernels_only(machine: EmulatedMachine) -> None:
    seen = machine.call(inside.pinned_while_the_cpuset_passes_it_by)
    assert (seen.before, seen.meanwhile) == (1 << 1, 1 << 0)
    assert seen.after == (0b1111 if machine.kernel is Kernel.V6_1 else 1 << 1)


@on_machines(*KERNELS)
def test_a_pin_survives_a_cpuset_that_grows_and_shrinks_around_it(machine: EmulatedMachine) -> None:
    seen = machine.call(inside.pinned_while_the_cpuset_grows_and_shrinks_around_it)
    assert seen.before == 1 << 1
    if machine.kernel is Kernel.V6_12:
        assert (seen.meanwhile, seen.after) == (1 << 1, 1 << 1)
    else:
        assert (seen.meanwhile, seen.after) == (0b1111_1111, 0b11)


@on_machines(*KERNELS)
def test_a_pin_to_a_cpu_that_goes_offline_spreads_and_comes_back_on_newer_kernels_only(
    machine: EmulatedMachine,
) -> None:
    seen = machine.call(inside.pinned_while_its_cpu_is_offline)
    assert (seen.before, seen.meanwhile) == (1 << 3, 1 << 2)
    assert seen.after == (0b1100 if machine.kernel is Kernel.V6_1 else 1 << 3)


@on_machines(*KERNELS)
def test_impossible_writes_are_refused_by_name_and_change_nothing(machine: EmulatedMachine) -> None:
    assert machine.call(inside.errors_of_writes) == {
        "affinity outside": "EINVAL",
        "cpus beyond the machine": "ERANGE",
        "cpus that are no list": "EINVAL",
        "mems beyond the machine": "ERANGE",
        "after the errors": "0-3",
        "affinity partly outside": "none",
        "is then": "3",
    }


@on_machines(*KERNELS)
def test_a_container_is_never_without_cpus(machine: EmulatedMachine) -> None:
    assert machine.call(inside.effective_cpus_of_containers) == {
        "empty": "0-3",
        "inside": "1-2",
        "partly outside": "3",
        "outside": "0-3",
        # What was once set cannot be taken back while a process is there: "no space left on device".
        "emptying it": "ENOSPC",
        "is then": "8-9",
    }
    seen = machine.call(inside.cpus_of_a_container_whose_only_cpu_goes_offline)
    assert seen == {"before": "3", "meanwhile": "0-2,4-7", "after": "3", "written": "3"}


@on_machines(*KERNELS)
def test_memory_follows_a_cpuset_to_other_nodes_and_stays_where_more_are_named(
    machine: EmulatedMachine,
) -> None:
    moved = machine.call(inside.memory_of_a_cpuset_that_changes_nodes, 0, 1)
    assert moved.before.keys() == {0}
    assert moved.after.keys() == {1}
    assert moved.after[1] >= inside.MEGABYTES * PAGES_PER_MEGABYTE
    stayed = machine.call(inside.memory_of_a_cpuset_that_grows, 1, f"0-{len(machine.shape.nodes) - 1}")
    assert stayed.before.keys() == stayed.after.keys() == {1}


@on_machines(*KERNELS)
def test_a_container_with_a_cgroup_namespace_sees_others_beside_it_and_may_not_write_its_own_cpuset(
    machine: EmulatedMachine,
) -> None:
    assert machine.call(inside.seen_from_a_cgroup_namespace) == {
        "own": "none",
        "other": "none",
        "path of other": "0::/../other",
        "own with nsdelegate": "EPERM",
    }


@on_machines(*KERNELS)
def test_huge_pages_come_from_the_node_of_who_touches_them_unless_they_are_interleaved(
    machine: EmulatedMachine,
) -> None:
    for number, node in enumerate(machine.shape.nodes[:2]):
        cpu = next(cpus_of(parse_cpu_list(node.cpus)))
        for mode in (inside.PREFERRED_MANY, inside.BIND):
            assert machine.call(inside.huge_pages_of_two_nodes, mode, cpu) == {number: 8}
        assert machine.call(inside.huge_pages_of_two_nodes, inside.INTERLEAVE, cpu) == {0: 4, 1: 4}
