"""One VM, all the way: from a VirtualMachine with `cpu-set: one-socket` to pinned XML, and back."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import yaml
from lxml import etree

from harness.control_plane.cluster import MERGE_PATCH, ControlPlane
from harness.control_plane.hollow_node import NodesInBackground
from harness.control_plane.kubevirt_parts import KubeVirt
from harness.control_plane.launcher_side import LauncherSide
from harness.control_plane.pod_status import container_runs
from harness.control_plane.watching import is_ready, wait_for
from harness.kvplace_cluster.installation import Installation, described_nodes
from harness.kvplace_cluster.machines import node_shape
from harness.kvplace_cluster.vms import VMIS, VMS, vm_manifest, vmi_manifest
from harness.waiting import PATIENCE_S
from kvplace.core.cpuset import cpus_of, format_cpu_list, parse_cpu_list
from kvplace.core.placement import PodPlacement
from kvplace.core.topology import Topology
from kvplace.core.well_known_names import PLACEMENT


def test_a_vm_made_from_a_template_that_asks_for_one_socket_starts_pinned_to_one_and_gives_its_cores_back(
    cluster: ControlPlane,
    virt: KubeVirt,
    kvplace: Installation,
    nodes: NodesInBackground,
    machine: Topology,
    vm_namespace: str,
    templates: Path,
    launcher_side: LauncherSide,
) -> None:
    vm = yaml.safe_load((templates / "web-server.yaml").read_text())
    template = vm["spec"]["template"]
    assert template["metadata"]["annotations"] == {"cpu-set": "one-socket"}
    name, vcpus = vm["metadata"]["name"], template["spec"]["domain"]["cpu"]["cores"]
    nodes.do(nodes.nodes.add(node_shape("first", machine)))
    with described_nodes(kvplace, {"first": machine}):
        virt.create(VMS, vm_namespace, vm)
        pod = virt.launcher_pod(vm_namespace, name)
        pods = f"/api/v1/namespaces/{vm_namespace}/pods"
        pod = wait_for(cluster, pods, pod["metadata"]["name"], lambda pod: bool(pod["spec"].get("nodeName")))
        annotations = pod["metadata"]["annotations"]
        bound = PodPlacement.from_json(annotations[PLACEMENT])
        placement = bound.placement

        assert pod["spec"]["nodeName"] == "first"
        assert bound.pod_uid == pod["metadata"]["uid"]
        assert len(placement.vcpus) == vcpus
        assert len(machine.packages_of(placement.cpus)) == 1
        (socket,) = json.loads(annotations["cpu-map"])
        assert json.loads(annotations["cpu-map"]) == {socket: [str(cpu) for cpu in placement.vcpus]}

        uid = pod["metadata"]["uid"]
        ledger = kvplace.ledger("first")
        assert ledger["owners"] == {str(cpu): uid for cpu in cpus_of(placement.cpus)}
        assert parse_cpu_list(ledger["claims"][uid]["cpus"]) == placement.cpus

        wait_for(cluster, pods, pod["metadata"]["name"], is_ready)
        vmi = virt.vmi_in_phase(vm_namespace, name, "Scheduled")

        sockets = (
            nodes.nodes.find(vm_namespace, pod["metadata"]["name"]).volumes.folder / "hook-sidecar-sockets"
        )
        report = launcher_side.call_hook(vmi, sockets, calls=3, shutdown=False)
        assert report.errors == ()
        domain = etree.fromstring(report.defined)
        pins = {int(pin.get("vcpu", "-1")): pin.get("cpuset") for pin in domain.iterfind("cputune/vcpupin")}
        assert [pins[vcpu] for vcpu in range(vcpus)] == [str(cpu) for cpu in placement.vcpus]
        (emulator,) = domain.iterfind("cputune/emulatorpin")
        assert emulator.get("cpuset") == format_cpu_list(placement.emulator_cpus)

        cluster.request("DELETE", f"/apis/kubevirt.io/v1/namespaces/{vm_namespace}/{VMS}/{name}")
        virt.gone(VMS, vm_namespace, name)
        ledgers = "/apis/kvplace.io/v1alpha1/nodeledgers"
        freed = wait_for(cluster, ledgers, "first", lambda ledger: not ledger["spec"]["owners"])
        assert freed["spec"]["claims"] == {}


def test_the_gate_holds_a_vm_that_was_bound_without_a_map_until_the_map_is_there(
    cluster: ControlPlane,
    virt: KubeVirt,
    kvplace: Installation,
    nodes: NodesInBackground,
    machine: Topology,
    vm_namespace: str,
    launcher_side: LauncherSide,
) -> None:
    nodes.do(nodes.nodes.add(node_shape("gate", machine)))
    virt.create(VMIS, vm_namespace, vmi_manifest("gate", cores=2, schedulerName="somebody-else"))
    pod = virt.launcher_pod(vm_namespace, "gate")
    name = pod["metadata"]["name"]
    pods = f"/api/v1/namespaces/{vm_namespace}/pods"
    cluster.request(
        "POST",
        f"{pods}/{name}/binding",
        {"metadata": {"name": name}, "target": {"kind": "Node", "name": "gate"}},
    )

    held = wait_for(cluster, pods, name, _sidecar_runs)
    assert not container_runs(held, "compute")
    assert nodes.do(_exit_code_for_want_of_a_map(nodes, vm_namespace, name)) == 1

    cluster.request(
        "PATCH",
        f"{pods}/{name}",
        {"metadata": {"annotations": {"cpu-map": json.dumps({"socket0": ["2", "18"]})}}},
        content_type=MERGE_PATCH,
    )
    wait_for(cluster, pods, name, is_ready)
    vmi = virt.vmi_in_phase(vm_namespace, "gate", "Scheduled")
    sockets = nodes.nodes.find(vm_namespace, name).volumes.folder / "hook-sidecar-sockets"
    report = launcher_side.call_hook(vmi, sockets, calls=2, shutdown=False)
    domain = etree.fromstring(report.defined)
    assert [pin.get("cpuset") for pin in domain.iterfind("cputune/vcpupin")][:2] == ["2", "18"]


def test_a_vm_that_does_not_ask_is_not_even_shown_to_kvplace(
    cluster: ControlPlane, virt: KubeVirt, kvplace: Installation, vm_namespace: str
) -> None:
    asked_before = _calls(cluster)

    virt.create(VMS, vm_namespace, vm_manifest("plain", annotations={"example.org/note": "mine"}))
    pod = virt.launcher_pod(vm_namespace, "plain")
    vmi = cluster.request("GET", f"/apis/kubevirt.io/v1/namespaces/{vm_namespace}/{VMIS}/plain")

    assert _calls(cluster) == asked_before
    assert "kvplace" not in json.dumps([pod, vmi])
    assert pod["spec"]["schedulerName"] == "default-scheduler"
    assert "hooks.kubevirt.io/hookSidecars" not in vmi["metadata"]["annotations"]


def _sidecar_runs(pod: dict[str, Any]) -> bool:
    return container_runs(pod, "hook-sidecar-0")


async def _exit_code_for_want_of_a_map(nodes: NodesInBackground, namespace: str, name: str) -> int:
    """Run the sidecar's own probe, as the kubelet does, until it answers about the map."""
    container = nodes.nodes.find(namespace, name).containers.named("hook-sidecar-0")
    assert container.running is not None
    command = [*container.spec["startupProbe"]["exec"]["command"], "--once"]
    async with asyncio.timeout(PATIENCE_S):
        while True:
            code, said = await container.running.run(command, 30)
            if "neither the annotation kvplace.io/placement nor cpu-map yet" in said or code == 0:
                return code


def _calls(cluster: ControlPlane) -> list[str]:
    """How often the API server has called our webhooks, as it counts it itself."""
    return [
        line
        for line in cluster.fetch_text(cluster.url, "/metrics").splitlines()
        if line.startswith("apiserver_admission_webhook_request_total") and "kvplace" in line
    ]
