"""The condition of a pod."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvplace.agent.conditions import PinnedReason
from kvplace.agent.node_plan import ClaimRefusal
from kvplace.agent.verification import (
    Difference,
    Measurement,
    PodFinding,
    QemuThread,
)
from kvplace.core.cpuset import parse_cpu_list
from kvplace.core.placement import Placement
from kvplace.core.request import Policy
from kvplace.core.scalars import NO_CPUS
from kvplace.core.well_known_names import PINNED
from kvplace.kube.object_records import Condition
from kvplace.linux.threads import Tid, classify
from tests.agent.nodes_in_use import VM, placed, placed_otherwise, planned

VCPU = QemuThread(Tid(7), classify("CPU 1/KVM"), parse_cpu_list("0-3"))
MOVED = Difference(PinnedReason.THREADS_ELSEWHERE, thread=VCPU, should=parse_cpu_list("2"))
BOUND = placed(VM, "2", revision=3)
PLAN = replace(
    planned(BOUND.placement, cpuset=BOUND.placement.cpus, online=parse_cpu_list("0-9")), bound=BOUND
)
GOOD = PodFinding(PLAN, Measurement((replace(VCPU, cpus=parse_cpu_list("2")),)))


def test_a_pod_in_order_is_pinned_and_the_message_begins_with_the_revision() -> None:
    assert GOOD.condition == Condition(
        PINNED, True, "AsPlaced", "revision 3: all threads run on CPU 2 as placed"
    )


def test_vcpus_io_threads_and_emulator_threads_on_other_cpus_are_named_apart() -> None:
    threads = (
        QemuThread(Tid(7), classify("CPU 0/KVM"), parse_cpu_list("2")),
        QemuThread(Tid(8), classify("CPU 1/KVM"), parse_cpu_list("3")),
        QemuThread(Tid(9), classify("qemu-system-x86"), parse_cpu_list("0")),
        QemuThread(Tid(10), classify("vhost-7"), parse_cpu_list("0-1")),
    )
    finding = replace(GOOD, measured=Measurement(threads))
    said = "vCPUs run on CPU 2-3, emulator threads run on CPU 0-1 as placed"
    assert finding.condition.message == f"revision 3: {said}"
    io_thread = QemuThread(Tid(11), classify("IO iothread1"), parse_cpu_list("5"))
    more = replace(GOOD, measured=Measurement((*threads, io_thread)))
    assert (
        "2-3, I/O threads run on CPU 5, emulator threads run on CPU 0-1 as placed" in more.condition.message
    )


def test_a_vm_that_floats_is_as_placed_and_not_pinned() -> None:
    floating = replace(GOOD, plan=placed_otherwise(PLAN, Placement(Policy.NONE, (), NO_CPUS)))
    assert floating.as_placed
    assert floating.condition == Condition(PINNED, False, "Floats", "revision 3: the VM floats on CPU 2")


@pytest.mark.parametrize(
    ("difference", "reason"),
    [
        (MOVED, "ThreadsElsewhere"),
        (Difference(PinnedReason.CPUS_OFFLINE, thread=VCPU, should=parse_cpu_list("9")), "CpusOffline"),
        (Difference(PinnedReason.VCPU_MISSING, "vCPU 4 has no thread"), "VcpuMissing"),
        (
            Difference(PinnedReason.CPUSET_DIFFERS, "the cpuset of compute is wider"),
            "CpusetDiffers",
        ),
        (Difference(PinnedReason.MEMORY_ELSEWHERE, "1024 MiB are on NUMA node 1"), "MemoryElsewhere"),
    ],
)
def test_each_difference_has_a_reason_and_its_sentence(difference: Difference, reason: str) -> None:
    condition = replace(GOOD, differences=(difference,)).condition
    assert (condition.status, condition.reason) == (False, reason)
    assert condition.message == f"revision 3: {difference}"


def test_of_many_differences_three_are_named() -> None:
    many = tuple(Difference(PinnedReason.VCPU_MISSING, f"vCPU {vcpu} has no thread") for vcpu in range(9))
    message = replace(GOOD, differences=many).condition.message
    assert message == (
        "revision 3: vCPU 0 has no thread, vCPU 1 has no thread, vCPU 2 has no thread and 6 more"
    )


def test_repairs_that_were_given_up_are_reported_only_while_something_differs() -> None:
    condition = replace(GOOD, differences=(MOVED,), given_up=True).condition
    assert condition.reason == "RepairsUndone"
    assert "something else undid 5 repairs within 60 s" in condition.message
    assert replace(GOOD, given_up=True).condition.status is True


def test_a_refusal_and_a_problem_come_before_differences() -> None:
    refusal = ClaimRefusal(PinnedReason.CPUS_IN_USE, "CPU 2 is in use.")
    refused = replace(GOOD, plan=replace(PLAN, refusal=refusal), differences=(MOVED,))
    assert (refused.condition.reason, refused.as_placed) == ("CpusInUse", False)
    assert refused.explanation == "CPU 2 is in use."
    unread = replace(GOOD, problem="/proc/7/task may not be read")
    assert (unread.condition.reason, unread.condition.status) == ("NotMeasured", False)
    assert unread.explanation == "/proc/7/task may not be read"
