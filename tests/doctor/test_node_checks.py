"""The checks of nodes: kubelet, description, agent and reserved CPUs."""

from __future__ import annotations

from dataclasses import replace

from kvplace.core.scalars import NO_CPUS, CpuMask
from kvplace.doctor.node_checks import (
    check_agents,
    check_conditions,
    check_descriptions,
    check_kubelets,
    check_reserved,
)
from kvplace.kube.node_filters import NodeStatus, NodeSystem, SchedulableNode
from kvplace.kube.object_parts import ConditionObject, Metadata
from kvplace.kube.object_records import Condition
from tests.doctor.examples import named, problems, view
from tests.nodes.machines import TWO


def test_nodes_need_a_description_an_agent_and_its_enforcement() -> None:
    assert problems(check_conditions, **view()) == []
    assert "enforcement none" in problems(check_conditions, **view(enforcement="none"))[0]
    (static,) = problems(check_conditions, **view(kubelet_cpus=4))
    assert "kubelet's static policy holds worker: CPUs 2;" in static
    unreadable = view(topology=None, problem="no cores")
    assert "its NodeTopology cannot be read: no cores" in problems(check_descriptions, **unreadable)[0]
    missing, orphan = problems(check_agents, **view())
    assert "it is missing" in missing
    assert "their agent is gone" in orphan


def test_kubelets_that_reject_the_hook_are_named() -> None:
    versions = {"a": "v1.28.15", "b": "v1.29.0", "c": "v1.27.4-gke.2", "d": "?", "e": "v1.36.3"}
    nodes = tuple(
        SchedulableNode(Metadata(name), status=NodeStatus(node_info=NodeSystem(version)))
        for name, version in versions.items()
    )
    (old,) = problems(check_kubelets, nodes=nodes)
    assert old.startswith("wrong: 2 nodes (a, c): the kubelet (v1.27.4-gke.2, v1.28.15) rejects the pods")

    rejected = {"phase": "Failed", "reason": "InitContainerRestartPolicyForbidden"}
    failed = (
        *(named(f"pod-{node}", spec={"nodeName": node}, status=rejected) for node in "ab"),
        named("other", spec={"nodeName": "e"}, status={"phase": "Failed", "reason": "OutOfcpu"}),
    )
    _, off = problems(check_kubelets, nodes=nodes, objects={"failed pods": failed})
    assert off.startswith("wrong: node b: the kubelet rejects the pods of VMs that opted in")
    assert problems(check_kubelets, nodes=nodes[1:2]) == []


def test_each_numa_node_of_several_cores_needs_a_reserved_cpu() -> None:
    (both,) = problems(check_reserved, **view(topology=replace(TWO, reserved=NO_CPUS)))
    assert "no CPU is reserved on worker: NUMA node 0, 1; QEMU's own threads" in both
    first, second = (CpuMask(node.cpus & -node.cpus) for node in TWO.numa_nodes)
    (one,) = problems(check_reserved, **view(topology=replace(TWO, reserved=first)))
    assert "worker: NUMA node 1; QEMU's" in one
    assert problems(check_reserved, **view(topology=replace(TWO, reserved=CpuMask(first | second)))) == []
    assert problems(check_reserved, **view(topology=None, problem="no cores")) == []


def test_of_nodes_without_a_ready_agent_those_are_named_for_which_one_is_meant() -> None:
    ready = NodeStatus((ConditionObject("Ready", "True"),))
    nodes = tuple(
        SchedulableNode(Metadata(name, labels={"vms": runs_vms}), status=ready)
        for name, runs_vms in (("control", "no"), ("worker-1", "yes"), ("worker-2", "yes"))
    )
    agents = named(
        "kvplace-agent",
        component="agent",
        spec={"template": {"spec": {"nodeSelector": {"vms": "yes"}}}},
        status={"desiredNumberScheduled": 2, "numberReady": 1},
    )
    conditions = [{"type": "Ready", "status": "True"}]
    running = named(
        "agent-1", component="agent", spec={"nodeName": "worker-1"}, status={"conditions": conditions}
    )
    objects = {"daemonsets": (agents,), "pods": (running,)}
    (found,) = problems(check_agents, **{**view(), "nodes": nodes, "objects": objects})
    assert "1 of 2 agents ready: worker-2; VMs" in found


def test_what_the_agent_reports_about_its_node_is_passed_on() -> None:
    said = Condition("Ready", False, "StateUnreadable", "damaged")
    (found,) = problems(check_conditions, **view(conditions=(said,)))
    assert found == "wrong: NodeTopology worker: its agent reports StateUnreadable: damaged"
    (found,) = problems(check_conditions, **view(generation=2, observed_generation=1))
    assert "has not read the newest description" in found
