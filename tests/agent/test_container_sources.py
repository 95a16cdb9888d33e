"""The way in which cpusets are set follows from what the operator asks for and what the node offers."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
from prometheus_client import REGISTRY

from kvplace.agent.cgroup_source import CgroupSource
from kvplace.agent.conditions import TopologyCondition
from kvplace.agent.container_sources import keeper_of
from kvplace.agent.node_objects import NodeObjects
from kvplace.agent.node_report import NodeReport
from kvplace.agent.nri_source import NriSource
from kvplace.core.node_topology import Enforcement
from kvplace.service.process import in_background
from tests.agent.hosts import NODE, Host
from tests.nodes.machines import EIGHT


async def test_without_nri_cgroups_are_written(host: Host) -> None:
    host.write("sys/fs/cgroup/cgroup.controllers", "cpuset cpu")
    assert isinstance(keeper_of(host.settings(), NodeObjects(NODE, EIGHT), NodeReport())[1], CgroupSource)


@pytest.mark.parametrize(
    ("asked", "found"),
    [
        (None, NriSource),
        (Enforcement.NRI, NriSource),
        (Enforcement.CGROUP, CgroupSource),
        (Enforcement.NONE, CgroupSource),
    ],
)
async def test_with_nri_the_runtime_sets_them_unless_the_operator_asks_for_something_else(
    host: Host, asked: Enforcement | None, found: type
) -> None:
    host.write("sys/fs/cgroup/cgroup.controllers", "cpuset cpu")
    host.write("var/run/nri/nri.sock", "")
    settings = replace(host.settings(), enforcement=asked)
    assert isinstance(keeper_of(settings, NodeObjects(NODE, EIGHT), NodeReport())[1], found)


async def test_a_host_without_cpusets_is_reported_and_the_agent_goes_on(host: Host) -> None:
    report = NodeReport()
    keeper, source = keeper_of(host.settings(), NodeObjects(NODE, EIGHT), report)
    condition = report.conditions[TopologyCondition.CPUSETS_ENFORCED]
    assert (condition.status, condition.reason) == (False, "NoCpusets")
    assert condition.message.startswith("no cgroup hierarchy with the cpuset controller is mounted below")
    async with in_background(keeper.run(source)):
        await asyncio.sleep(0)
    assert (keeper.containers(), keeper.plan.containers, report.enforcement) == ([], {}, Enforcement.NONE)
    assert report.conditions[TopologyCondition.CPUSETS_ENFORCED] == condition


def test_whether_an_agent_enforces_is_a_metric_by_which_agents_are_counted() -> None:
    report = NodeReport()
    seen = []
    for how in (Enforcement.NRI, Enforcement.NONE, Enforcement.CGROUP):
        report.enforce(how)
        seen.append(REGISTRY.get_sample_value("kvplace_agent_enforces"))
    assert seen == [1, 0, 1]
