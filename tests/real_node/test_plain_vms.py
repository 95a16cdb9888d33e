"""The real nodes without kvplace: the ground that the other tests of this folder stand on."""

from __future__ import annotations

from harness.control_plane.watching import is_ready, wait_for
from harness.kvplace_cluster.vms import VMIS, vmi_manifest
from harness.real_node.cluster import RealCluster
from tests.real_node.vms import SMALL_DOMAIN

MIGRATIONS = "virtualmachineinstancemigrations"
_DOMAIN = {**SMALL_DOMAIN, "resources": {**SMALL_DOMAIN["resources"], "requests": {"cpu": "100m"}}}


def test_a_pod_runs_where_the_scheduler_puts_it(cluster: RealCluster, vm_namespace: str) -> None:
    pods = f"/api/v1/namespaces/{vm_namespace}/pods"
    container = {"name": "main", "image": "busybox:1", "command": ["sleep", "inf"]}
    cluster.plane.request(
        "POST",
        pods,
        {
            "metadata": {"name": "plain"},
            "spec": {"terminationGracePeriodSeconds": 0, "containers": [container]},
        },
    )
    pod = wait_for(cluster.plane, pods, "plain", is_ready)

    node = pod["spec"]["nodeName"]
    said = cluster.plane.kubectl("exec", "--namespace", vm_namespace, "plain", "--", "cat", "/etc/hostname")
    assert said == "plain\n"
    assert pod["status"]["hostIP"] == cluster.nodes[node].sandbox.address


def test_a_vm_runs_and_moves_to_the_other_node_and_is_gone(cluster: RealCluster, vm_namespace: str) -> None:
    virt = cluster.kubevirt
    manifest = vmi_manifest("plain", cores=1, annotations={}, domain=_DOMAIN)
    virt.create(VMIS, vm_namespace, manifest)
    source = virt.vmi_in_phase(vm_namespace, "plain", "Running")["status"]["nodeName"]

    virt.create(
        MIGRATIONS,
        vm_namespace,
        {
            "kind": "VirtualMachineInstanceMigration",
            "metadata": {"name": "away"},
            "spec": {"vmiName": "plain"},
        },
    )
    migrations = f"/apis/kubevirt.io/v1/namespaces/{vm_namespace}/{MIGRATIONS}"
    wait_for(
        cluster.plane, migrations, "away", lambda seen: seen.get("status", {}).get("phase") == "Succeeded"
    )
    vmis = f"/apis/kubevirt.io/v1/namespaces/{vm_namespace}/{VMIS}"
    assert cluster.plane.request("GET", f"{vmis}/plain")["status"]["nodeName"] != source

    cluster.plane.request("DELETE", f"{vmis}/plain")
    virt.gone(VMIS, vm_namespace, "plain")
