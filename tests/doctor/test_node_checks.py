"""Checks of nodes: descriptions, agents, kubelets, devices; each fault is named once, with its fix."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from kvplace.core.ledger import Ledger
from kvplace.core.node_devices import (
    NO_NUMA,
    DeviceCount,
    DeviceReport,
    NodeDevices,
    PodDevice,
    TopologyPolicy,
)
from kvplace.core.scalars import NO_CPUS, CpuMask, NumaId, PodUid, ResourceName
from kvplace.doctor.claim_checks import check_ledgers
from kvplace.doctor.installation import Installation
from kvplace.doctor.node_checks import (
    check_agents,
    check_conditions,
    check_descriptions,
    check_devices,
    check_kubelets,
    check_reserved,
)
from kvplace.kube.node_filters import NodeStatus, NodeSystem, SchedulableNode
from kvplace.kube.object_parts import ConditionObject, Metadata
from kvplace.kube.object_records import Condition, LedgerRecord, NodeRecord, TopologyRecord
from kvplace.nodes.cluster_view import ClusterView, cluster_view
from tests.doctor.examples import NOW, WORKER, named, problems, view
from tests.nodes.machines import EIGHT, TWO


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


def test_problems_that_the_agent_reports_about_its_node_are_passed_on() -> None:
    said = Condition("Ready", False, "StateUnreadable", "damaged")
    (found,) = problems(check_conditions, **view(conditions=(said,)))
    assert found == "wrong: NodeTopology worker: its agent reports StateUnreadable: damaged"
    (found,) = problems(check_conditions, **view(generation=2, observed_generation=1))
    assert "has not read the newest description" in found


def seen(view: ClusterView) -> Installation:
    return Installation(NOW, "0.1.0", {}, (SchedulableNode(metadata=Metadata("worker")),), view)


@pytest.mark.parametrize(
    ("cpu_map", "topology", "look_at"),
    [
        ('{"socket0": "0"}', None, "annotation cpu-map: `kubectl get node worker -o yaml`"),
        ("{}", TopologyRecord(WORKER, topology=TWO), "annotation cpu-map: `kubectl get node worker -o yaml`"),
        ("", TopologyRecord(WORKER, topology=None, problem="no cores"), "get nodetopology worker -o yaml"),
    ],
)
def test_the_fix_of_a_badly_described_node_names_the_source_of_its_description(
    cpu_map: str, topology: TopologyRecord | None, look_at: str
) -> None:
    described = [] if topology is None else [topology]
    nodes = cluster_view([NodeRecord(WORKER, "uid", cpu_map=cpu_map)], described, [], [])
    (found,) = check_descriptions(seen(nodes))
    assert look_at in found.fix


def test_a_ledger_that_cannot_be_read_is_named_once() -> None:
    broken = LedgerRecord(WORKER, Ledger(), "1", problem="owners is a list")
    nodes = cluster_view([NodeRecord(WORKER, "uid")], [TopologyRecord(WORKER, topology=TWO)], [broken], [])
    assert list(check_descriptions(seen(nodes))) == []
    (found,) = check_ledgers(seen(nodes))
    assert (found.about, found.problem) == ("NodeLedger worker", "it cannot be read: owners is a list")


VF = ResourceName("intel.com/vf")
PCI = {"0000:01": NumaId(0), "0000:c1": NumaId(1)}


def report(*nodes: int, policy: str = "best-effort") -> DeviceReport:
    counts = [DeviceCount(VF, NumaId(node), 4, 4) for node in nodes]
    return DeviceReport(NodeDevices.of(counts, TopologyPolicy(policy)), {}, PCI)


def found(devices: DeviceReport) -> list[str]:
    return problems(check_devices, **view(devices=devices))


def test_a_kubelet_that_aligns_devices_is_fine() -> None:
    assert found(report(0, 1)) == []
    assert found(report(1, policy="none")) == []
    assert found(report(1, policy="restricted")) == []
    assert problems(check_devices, **view()) == []


def test_a_kubelet_that_takes_any_device_makes_required_impossible() -> None:
    (one,) = found(report(0, 1, policy="none"))
    assert "intel.com/vf has devices on several NUMA nodes" in one
    assert "topologyManagerPolicy none" in one


def test_a_kubelet_that_fails_pods_is_named() -> None:
    for policy in ("restricted", "single-numa-node"):
        (one,) = found(report(0, 1, policy=policy))
        assert "fails the pod of a VM" in one


def test_devices_without_a_numa_node_are_named_on_machines_with_several() -> None:
    (one,) = found(report(NO_NUMA))
    assert "intel.com/vf has devices without a NUMA node" in one
    assert problems(check_devices, **view(devices=report(NO_NUMA), topology=EIGHT)) == []


def test_a_plugin_that_sends_0_for_a_device_elsewhere_is_named() -> None:
    given = {PodUid("u1"): (PodDevice(VF, NumaId(0), "0000:c1:00.1"),)}
    (one,) = found(replace(report(0), pods=given))
    assert "sends NUMA node 0, which sysfs does not confirm" in one
    assert found(replace(report(0), pods={PodUid("u1"): (PodDevice(VF, NumaId(0), "0000:01:00.1"),)})) == []


def test_a_plugin_that_sends_0_where_the_firmware_states_nothing_is_named() -> None:
    (one,) = found(replace(report(0), pci={}))
    assert "sends NUMA node 0" in one


def test_nodes_with_enforcement_dra_are_named_and_need_the_component() -> None:
    (missing,) = problems(check_conditions, **view(enforcement="dra"))
    assert "kvplace may not hand cores over" in missing
    policies = {"validatingadmissionpolicies": ({"metadata": {"name": "resource-claims.kvplace.io"}},)}
    (mode,) = problems(check_conditions, **view(enforcement="dra"), objects=policies)
    assert "dra-driver-cpu sets the cpusets there (enforcement dra, experimental)" in mode


def test_two_agents_for_the_same_nodes_are_wrong_and_one_for_the_nodes_of_dra_driver_cpu_is_not() -> None:
    def agent(name: str, **instance: str) -> dict[str, Any]:
        labels = {"component": "agent", **instance}
        found = {f"app.kubernetes.io/{key}": value for key, value in labels.items()}
        return {"metadata": {"name": name, "namespace": "kvplace-agent", "labels": found}}

    usual, other = agent("kvplace-agent"), agent("kvplace-agent-2")
    of_driver = agent("kvplace-agent-dra-driver-cpu", instance="dra-driver-cpu")

    def several(*daemonsets: dict[str, Any]) -> bool:
        found = problems(check_agents, **{**view(), "objects": {"daemonsets": daemonsets}})
        return any("there are several" in problem for problem in found)

    assert several(usual, other)
    assert several(usual, other, of_driver)
    assert not several(usual, of_driver)
