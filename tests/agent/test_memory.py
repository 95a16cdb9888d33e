"""The memory that others use is the memory in use on the node less that of the cgroups of claims."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvplace.agent.memory import MemoryWatch
from kvplace.agent.node_plan import ClaimContainer, NodePlan
from kvplace.agent.node_report import NodeReport
from kvplace.core.free_resources import MemoryInUse
from kvplace.core.ledger import Ledger
from kvplace.core.scalars import Bytes, NumaId, PodUid
from tests.core.example_ledgers import claim
from tests.core.machines import GIB

N0, N1 = NumaId(0), NumaId(1)
UID = PodUid("vm")
TWO_MIB = Bytes(2 << 20)


class Node:
    """Two NUMA nodes of 64 GiB, and the container of a VM, in a folder like / of a host."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.cgroup = root / "sys/fs/cgroup/pod/compute"
        self.write("sys/fs/cgroup/pod/compute/cgroup.controllers", "memory hugetlb")
        self.write("sys/fs/cgroup/pod/compute/cgroup.procs", "7\n")
        self.write("proc/7/cgroup", "0::/pod/compute\n")
        held = replace(claim("vm", 1), memory={N0: Bytes(20 * GIB)})
        own: Any = SimpleNamespace(ledger=Ledger({}, {UID: held}), topology_record=lambda: None)
        pod: Any = SimpleNamespace(uid=UID, containers=(ClaimContainer("compute", self.cgroup),))
        plan = NodePlan(pods={UID: pod}, is_complete=True)
        self.report = NodeReport()
        self.watch = MemoryWatch(own, lambda: plan, self.report, host=root)
        self.uses(0, 0)

    def write(self, path: str, text: str) -> None:
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)

    def uses(self, gibibytes: int, pages: int) -> None:
        """Let the node use so much of NUMA node 0, and pages of 2 MiB of 1,024 there."""
        folder = "sys/devices/system/node/node{}"
        total = (64 << 20) + 2048 * 1024
        for node in (0, 1):
            free = total - (gibibytes << 20 if node == 0 else 0) - 2048 * 1024
            meminfo = f"Node {node} MemTotal: {total} kB\nNode {node} MemFree: {free} kB\n"
            self.write(f"{folder.format(node)}/meminfo", meminfo)
            for name, count in (("nr", 1024), ("free", 1024 - pages if node == 0 else 1024)):
                self.write(f"{folder.format(node)}/hugepages/hugepages-2048kB/{name}_hugepages", str(count))

    def vm_uses(self, gibibytes: int, pages: int) -> None:
        """Let the VM use so much of NUMA node 0."""
        folder = "sys/fs/cgroup/pod/compute"
        self.write(f"{folder}/memory.numa_stat", f"anon N0={gibibytes * GIB} N1=0\nfile N0={9 * GIB} N1=0\n")
        self.write(f"{folder}/hugetlb.2MB.numa_stat", f"total=0 N0={pages * TWO_MIB} N1=0\n")

    async def measured(self) -> MemoryInUse:
        await self.watch.measure()
        assert self.report.in_use is not None
        return self.report.in_use


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path)


async def test_memory_that_a_vm_uses_is_not_counted_a_second_time(node: Node) -> None:
    node.uses(30, 300)
    node.vm_uses(20, 200)
    found = await node.measured()
    assert found == MemoryInUse({N0: Bytes(10 * GIB), N1: Bytes(2 * GIB)}, {N0: {TWO_MIB: 112}})


async def test_a_claimed_vm_that_has_taken_nothing_yet_makes_others_no_smaller(node: Node) -> None:
    node.uses(10, 100)
    node.vm_uses(0, 0)
    assert (await node.measured()).memory[N0] == 10 * GIB


async def test_where_cgroups_do_not_count_the_claim_does(node: Node) -> None:
    node.uses(30, 0)
    assert (await node.measured()).memory[N0] == 10 * GIB


async def test_of_two_measurements_the_smaller_one_counts(node: Node) -> None:
    """The kernel counts what a VM takes some seconds later."""
    node.vm_uses(0, 0)
    node.uses(4, 0)
    assert (await node.measured()).memory[N0] == 4 * GIB
    node.uses(24, 0)  # the VM's, and not yet counted
    assert (await node.measured()).memory[N0] == 4 * GIB
    node.vm_uses(20, 0)
    assert (await node.measured()).memory[N0] == 4 * GIB
    node.uses(34, 0)
    assert (await node.measured()).memory[N0] == 4 * GIB
    assert (await node.measured()).memory[N0] == 14 * GIB


async def test_a_container_that_ends_meanwhile_is_left_out(node: Node) -> None:
    node.uses(30, 0)
    (node.cgroup / "cgroup.procs").unlink()
    assert (await node.measured()).memory[N0] == 30 * GIB
