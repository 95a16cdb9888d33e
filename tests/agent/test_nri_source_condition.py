"""The condition CpusetsEnforced reports the cgroups as they are, not as decided."""

from __future__ import annotations

import asyncio

import pytest

from harness.waiting import PATIENCE_S
from kvplace.agent import cpuset_keeper
from kvplace.agent.back_off import MOST_REPAIRS
from kvplace.agent.conditions import TopologyCondition
from kvplace.core.cpuset import parse_cpu_list
from kvplace.core.errors import Unavailable
from kvplace.service.process import in_background
from tests.agent.nodes_in_use import PLAIN, VM
from tests.agent.nri_node import EMPTY, ONE_VM, Node
from tests.agent.played_runtime import PlayedContainer


def node_with_one_stuck() -> tuple[Node, PlayedContainer]:
    """A node where one container keeps the CPUs of a VM."""
    node = Node(EMPTY)
    stuck = node.started(PLAIN, "stuck")
    node.runtime.cgroups.refused.add(node.runtime.cgroups.root / stuck.id)
    node.change(ONE_VM)
    assert node.cgroup(stuck) == "0-7"
    return node, stuck


def test_a_container_that_cannot_be_set_twice_is_named() -> None:
    node, stuck = node_with_one_stuck()
    assert node.report.conditions[TopologyCondition.CPUSETS_ENFORCED].status
    node.keeper.set_again()
    condition = node.report.conditions[TopologyCondition.CPUSETS_ENFORCED]
    assert (condition.status, condition.reason) == (False, "CgroupsNotSet")
    assert condition.message == f"1 container: {node.runtime.cgroups.root / stuck.id} cannot be set."
    node.runtime.cgroups.refused.clear()
    node.keeper.set_again()
    assert node.cgroup(stuck) == "0-1,4-7"
    assert node.report.conditions[TopologyCondition.CPUSETS_ENFORCED].status


def test_a_container_that_cannot_be_set_is_not_repaired_and_not_given_up() -> None:
    node, stuck = node_with_one_stuck()
    for _ in range(2 * MOST_REPAIRS):
        node.check(stuck)
    assert node.keeper.repairs == 0
    node.runtime.cgroups.refused.clear()
    node.check(stuck)
    assert (node.cgroup(stuck), node.keeper.repairs) == ("0-1,4-7", 0)


def test_a_container_whose_cgroup_has_gone_is_not_a_problem() -> None:
    node, _ = node_with_one_stuck()
    node.keeper.set_again()
    node.runtime.cgroups.cpus.clear()
    node.keeper.set_again()
    assert node.report.conditions[TopologyCondition.CPUSETS_ENFORCED].status


def test_a_container_that_may_not_use_its_cpus_is_named() -> None:
    """With version 2 it then uses the CPUs of the cgroup above it, which may be a VM's."""
    node = Node(ONE_VM)
    other = node.started(PLAIN, "app")
    node.runtime.cgroups.usable = parse_cpu_list("2-3")
    node.check(other)
    condition = node.report.conditions[TopologyCondition.CPUSETS_ENFORCED]
    assert (condition.status, condition.reason) == (False, "CgroupsNotSet")
    assert condition.message == f"1 container: {node.runtime.cgroups.root / other.id} is limited."
    node.runtime.cgroups.usable = None
    node.check(other)
    assert node.report.conditions[TopologyCondition.CPUSETS_ENFORCED].status


async def test_a_cpuset_that_cannot_be_set_is_tried_again_without_an_event(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cpuset_keeper, "SET_AGAIN_S", 0.0)
    node, stuck = node_with_one_stuck()
    said = asyncio.Event()
    node.report.subscribe(said.set)
    async with asyncio.timeout(PATIENCE_S), in_background(node.keeper.run(node.source)):
        while node.report.conditions[TopologyCondition.CPUSETS_ENFORCED].status:
            said.clear()
            await said.wait()
        node.runtime.cgroups.refused.clear()
        while not node.report.conditions[TopologyCondition.CPUSETS_ENFORCED].status:
            said.clear()
            await said.wait()
        assert node.cgroup(stuck) == "0-1,4-7"


async def test_a_container_that_has_ended_is_not_named_any_more() -> None:
    node = Node(ONE_VM)
    compute = node.started(VM, "compute")
    for _ in range(MOST_REPAIRS + 1):
        node.runtime.write_cgroup(compute, parse_cpu_list("0-7"))
        node.check(compute)
    assert not node.report.conditions[TopologyCondition.CPUSETS_ENFORCED].status
    node.runtime.stop(compute)
    assert node.report.conditions[TopologyCondition.CPUSETS_ENFORCED].status


async def test_a_runtime_that_is_down_stays_stated_whatever_becomes_of_cgroups() -> None:
    node = Node(ONE_VM)
    compute = node.started(VM, "compute")
    node.source.disconnected(Unavailable("the NRI runtime closed the connection"))
    for _ in range(MOST_REPAIRS + 1):
        node.runtime.write_cgroup(compute, parse_cpu_list("0-7"))
        node.check(compute)
    assert node.report.conditions[TopologyCondition.CPUSETS_ENFORCED].reason == "RuntimeUnavailable"
    node.runtime.connect(node.source)
    assert node.report.conditions[TopologyCondition.CPUSETS_ENFORCED].status
