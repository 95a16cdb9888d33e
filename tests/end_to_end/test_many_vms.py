"""Many VMs at once, two replicas of kvplace, two kube-schedulers that race each other for every pod."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest

from harness.control_plane.cluster import ControlPlane
from harness.control_plane.hollow_node import nodes_in_background
from harness.control_plane.kubevirt_parts import KubeVirt
from harness.control_plane.watching import wait_for, watch
from harness.kvplace_cluster.installation import Installation, described_nodes
from harness.kvplace_cluster.machines import node_shape, two_socket_machine
from harness.kvplace_cluster.vms import VMIS, vmi_manifest
from harness.waiting import wait_until
from kvplace.core.cpuset import cpus_of, format_cpu_list, parse_cpu_list
from kvplace.core.placement import PodPlacement
from kvplace.core.topology import Topology
from kvplace.core.well_known_names import PLACEMENT

COUNT = 50
LEDGERS = "/apis/kvplace.io/v1alpha1/nodeledgers"


@pytest.fixture
def machines() -> dict[str, Topology]:
    """Name four machines of 30 CPUs to give out: enough for fifty VMs of two, with little to spare."""
    return {f"many-{number}": two_socket_machine() for number in range(4)}


def test_fifty_vms_at_once_never_share_a_core_and_give_all_of_them_back(
    cluster: ControlPlane,
    virt: KubeVirt,
    kvplace: Installation,
    machines: dict[str, Topology],
    vm_namespace: str,
    record_property: Callable[[str, object], None],
) -> None:
    shapes = [node_shape(name, machine) for name, machine in machines.items()]
    with nodes_in_background(cluster, shapes), described_nodes(kvplace, machines):
        started = time.monotonic()
        _create_all(virt, vm_namespace, [f"vm-{number}" for number in range(COUNT)])
        pods = _all_bound(cluster, vm_namespace)
        record_property("seconds_from_first_vmi_to_last_bound", round(time.monotonic() - started, 2))

        # The scheduler that lost the race for a pod may have claimed cores on another node for a moment.
        bound = {pod["metadata"]["uid"]: pod["spec"]["nodeName"] for pod in pods}
        wait_until(
            lambda: {uid: node for node in machines for uid in kvplace.ledger(node)["claims"]} == bound,
            lambda: "the ledgers hold other claims than those of the bound pods",
        )
        _assert_no_core_has_two_owners(kvplace, pods, machines)
        for number in range(COUNT):
            virt.vmi_in_phase(vm_namespace, f"vm-{number}", "Scheduled")

        cluster.request("DELETE", f"/apis/kubevirt.io/v1/namespaces/{vm_namespace}/{VMIS}")
        for name in machines:
            wait_for(cluster, LEDGERS, name, lambda ledger: not ledger["spec"]["claims"])
            assert kvplace.ledger(name) == {"owners": {}, "claims": {}}


def test_a_vm_that_waits_for_cores_gets_them_when_another_one_ends(
    cluster: ControlPlane, virt: KubeVirt, kvplace: Installation, vm_namespace: str
) -> None:
    machine = two_socket_machine(cores_per_socket=2)
    # kube-scheduler must see room enough, so that the refusal is kvplace's.
    roomy = replace(node_shape("full", machine), reserved_cpus=0)
    with (
        nodes_in_background(cluster, [roomy]),
        described_nodes(kvplace, {"full": machine}),
    ):
        virt.create(VMIS, vm_namespace, vmi_manifest("first", cores=3))
        _bound(cluster, virt, vm_namespace, "first")
        virt.create(VMIS, vm_namespace, vmi_manifest("second", cores=3))
        waiting = virt.launcher_pod(vm_namespace, "second")["metadata"]["name"]
        pods = f"/api/v1/namespaces/{vm_namespace}/pods"
        told = wait_for(cluster, pods, waiting, lambda pod: bool(_why_not(pod)))
        assert "no socket with 3 free CPUs, best 2 on full socket 0" in _why_not(told)

        cluster.request("DELETE", f"/apis/kubevirt.io/v1/namespaces/{vm_namespace}/{VMIS}/first")

        _bound(cluster, virt, vm_namespace, "second")


def test_vms_own_the_last_core_of_a_node_although_their_pods_have_other_containers(
    cluster: ControlPlane, virt: KubeVirt, kvplace: Installation, vm_namespace: str
) -> None:
    machine = two_socket_machine(cores_per_socket=3)
    shape = node_shape("brim", machine)
    count = machine.allocatable.bit_count()
    assert shape.cpus - shape.reserved_cpus == count
    with nodes_in_background(cluster, [shape]), described_nodes(kvplace, {"brim": machine}):
        for number in range(count):
            virt.create(VMIS, vm_namespace, vmi_manifest(f"vm-{number}", cores=1))
            pod = _bound(cluster, virt, vm_namespace, f"vm-{number}")
            assert pod["spec"]["initContainers"], "other containers that request CPUs"
        assert len(kvplace.ledger("brim")["owners"]) == count
        cluster.request("DELETE", f"/apis/kubevirt.io/v1/namespaces/{vm_namespace}/{VMIS}")
        wait_for(cluster, LEDGERS, "brim", lambda ledger: not ledger["spec"]["claims"])


def _create_all(virt: KubeVirt, namespace: str, names: list[str]) -> None:
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda name: virt.create(VMIS, namespace, vmi_manifest(name, cores=2)), names))


def _bound(cluster: ControlPlane, virt: KubeVirt, namespace: str, vmi: str) -> dict[str, Any]:
    name = virt.launcher_pod(namespace, vmi)["metadata"]["name"]
    pods = f"/api/v1/namespaces/{namespace}/pods"
    return wait_for(cluster, pods, name, lambda pod: bool(pod["spec"].get("nodeName")))


def _all_bound(cluster: ControlPlane, namespace: str) -> list[dict[str, Any]]:
    """Follow the namespace's pods until all are bound."""
    path = f"/api/v1/namespaces/{namespace}/pods"
    bound: dict[str, dict[str, Any]] = {}
    with watch(cluster, path) as events, suppress(TimeoutError):
        for event in events:
            pod = event["object"]
            if pod["spec"].get("nodeName"):
                bound[pod["metadata"]["uid"]] = pod
            if len(bound) == COUNT:
                return list(bound.values())
    pods = cluster.request("GET", path)["items"]
    reasons = {_why_not(pod) for pod in pods if not pod["spec"].get("nodeName")}
    raise AssertionError(f"only {len(bound)} of {COUNT} pods were bound, of {len(pods)}: {reasons}")


def _assert_no_core_has_two_owners(
    kvplace: Installation, pods: list[dict[str, Any]], machines: dict[str, Topology]
) -> None:
    taken: dict[tuple[str, int], str] = {}
    for pod in pods:
        uid, node = pod["metadata"]["uid"], pod["spec"]["nodeName"]
        bound = PodPlacement.from_json(pod["metadata"]["annotations"][PLACEMENT])
        assert (bound.pod_uid, bound.node) == (uid, node)
        assert len(machines[node].packages_of(bound.placement.cpus)) == 1
        for cpu in cpus_of(bound.placement.cpus):
            assert taken.setdefault((node, cpu), uid) == uid, f"CPU {cpu} of {node} was given away twice"
    for name in machines:
        ledger = kvplace.ledger(name)
        assert ledger["owners"] == {str(cpu): uid for (node, cpu), uid in taken.items() if node == name}
        for uid, claim in ledger["claims"].items():
            owned = {cpu for (node, cpu), owner in taken.items() if owner == uid and node == name}
            assert parse_cpu_list(claim["owned"]) == sum(1 << cpu for cpu in owned), format_cpu_list(
                sum(1 << cpu for cpu in owned)
            )


def _why_not(pod: dict[str, Any]) -> str:
    conditions = pod.get("status", {}).get("conditions", [])
    return next(
        (str(entry.get("message", "")) for entry in conditions if entry.get("reason") == "Unschedulable"), ""
    )
