"""The way in which cpusets are set follows from what the operator asks for and what the node offers."""

from __future__ import annotations

import pytest

from kvplace.agent.cgroup_enforcement import CgroupEnforcement
from kvplace.agent.enforced_containers import CPUSETS_ENFORCED
from kvplace.agent.enforcing import enforcer_of
from kvplace.agent.node_report import NodeReport
from kvplace.agent.own_node import OwnNode
from kvplace.core.scalars import ContainerId
from kvplace.linux.kernel_files import Gone
from tests.agent.hosts import NODE, Host
from tests.nodes.machines import EIGHT


async def test_without_nri_cgroups_are_written(host: Host) -> None:
    host.write("sys/fs/cgroup/cgroup.controllers", "cpuset cpu")
    assert isinstance(enforcer_of(host.settings(), OwnNode(NODE, EIGHT), NodeReport()), CgroupEnforcement)


async def test_a_host_without_cpusets_is_reported_and_the_agent_goes_on(host: Host) -> None:
    report = NodeReport()
    enforcer = enforcer_of(host.settings(), OwnNode(NODE, EIGHT), report)
    condition = report.conditions[CPUSETS_ENFORCED]
    assert (condition.status, condition.reason) == (False, "NoCpusets")
    assert condition.message.startswith("no cgroup hierarchy with the cpuset controller is mounted below")
    assert (list(enforcer.containers()), enforcer.cpusets().settings) == ([], {})
    with pytest.raises(Gone):
        enforcer.cgroup_of(ContainerId("a"))
