"""On a node where dra-driver-cpu sets the cpusets the agent sets none, and compares them with the claims."""

from __future__ import annotations

from dataclasses import replace

from kvplace.agent.planner import plan_node
from kvplace.core.cpuset import parse_cpu_list
from kvplace.core.node_topology import Enforcement
from kvplace.nri.values import Cpuset
from tests.agent.nodes_in_use import PLAIN, VM, container, node_with, placed
from tests.agent.nri_node import ONE_VM, Node


def test_where_dra_driver_cpu_sets_the_cpusets_a_container_is_to_have_the_cpus_that_its_pod_owns() -> None:
    state = replace(node_with(placed(VM, "2-3")), observes_only=True, follows_claims=True)
    plan = plan_node(state, [container(VM, cpus="2-3"), container(PLAIN, "app", in_vm_pod=False)])
    assert (plan.pods[VM].sets_threads, plan.pods[VM].cpuset) == (False, parse_cpu_list("2-3"))
    assert plan.containers == {}


def test_where_dra_driver_cpu_sets_the_cpusets_the_agent_sets_none_and_reports_the_mode() -> None:
    node = Node(ONE_VM, observed=Enforcement.DRA)
    compute = node.runtime.create(node.runtime.run_pod(VM), "compute", cpuset("2-3"))
    node.runtime.start(compute)
    node.runtime.update(compute, cpuset("5"))
    assert (node.cgroup(compute), node.runtime.cgroups.writes) == ("5", [])
    assert node.report.enforcement is Enforcement.DRA
    assert node.keeper.plan.pods[VM].cpuset == parse_cpu_list("2-3")
    assert node.report.conditions == {}


def test_the_kubelets_static_policy_counts_before_the_mode_of_the_operator() -> None:
    node = Node(replace(ONE_VM, observes_only=True), observed=Enforcement.DRA)
    node.runtime.start(node.runtime.create(node.runtime.run_pod(VM), "compute", cpuset("5")))
    assert node.report.enforcement is Enforcement.NONE
    assert node.keeper.plan.pods[VM].cpuset == 0


def cpuset(cpus: str) -> Cpuset:
    return Cpuset(parse_cpu_list(cpus))
