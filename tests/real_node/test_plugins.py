"""VMs that KubeVirt's Plugins pin, with the feature gate Plugins and without Sidecar."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from pathlib import Path

import pytest

from harness.control_plane.pod_status import container_statuses
from harness.control_plane.watching import wait_for
from harness.node_programs.programs import NodePrograms
from harness.real_node.cluster import RealCluster
from harness.real_node.images import node_image_archives
from harness.real_node.kvplace_pods import install_kvplace
from tests.real_node.vms import LEDGERS, SMALL_DOMAIN, VIRSH, Vms, migrate

OWN_CPU = {"n1": 1, "n2": 0}
"""The CPU that each node has to give: the other one is reserved."""
GATES = ("Plugins", "CPUManager", "NUMA")
FOREIGN = {
    "apiVersion": "plugin.kubevirt.io/v1alpha1",
    "kind": "Plugin",
    "metadata": {"name": "later-than-kvplace"},
    "spec": {
        "domainHooks": [
            {
                "cel": {
                    "expression": "Domain{Title: 'changed', CPUTune: DomainCPUTune{"
                    "VCPUPin: [DomainCPUTuneVCPUPin{VCPU: 0u, CPUSet: '0-1'}]}}"
                }
            }
        ]
    },
}
"""KubeVirt calls Plugins by name: this one pins the vCPU anew after kvplace has."""


@pytest.fixture
def vms(
    sandbox_machine: None,
    node_programs: NodePrograms,
    kubernetes_programs: Path,
    kubevirt_programs: Path,
    tmp_path: Path,
) -> Iterator[Vms]:
    """Two nodes of a cluster with Plugins, and kvplace with the component for them."""
    kubelets = {"n1": {"reservedSystemCPUs": "0"}, "n2": {"reservedSystemCPUs": "1"}}
    images = node_image_archives()
    with RealCluster(
        node_programs, kubevirt_programs, images, tmp_path, kubelets=kubelets, feature_gates=GATES
    ) as cluster:
        install_kvplace(cluster.plane, cluster.nodes["n1"].sandbox.service_subnet, components=["plugin"])
        made = Vms(cluster, cluster.plane.create_namespace(f"vms-{secrets.token_hex(4)}"))
        yield made
        made.remove_all()


@pytest.mark.timeout(900)
def test_a_vm_starts_migrates_and_ends_through_the_plugin_and_a_vm_without_options_beside_it(
    vms: Vms,
) -> None:
    vm = vms.start("pinned")
    source = vm.node.name
    assert vm.pinned() == f"revision 1: all threads run on CPU {OWN_CPU[source]} as placed"
    assert "hooks.kubevirt.io/hookSidecars" not in vm.pod()["metadata"]["annotations"]
    assert {thread.cpus for thread in vm.threads().threads} == {1 << OWN_CPU[source]}

    migrate(vms, vm)
    moved = vms.running("pinned")
    target = moved.node.name
    assert target != source
    assert moved.pinned() == f"revision 1: all threads run on CPU {OWN_CPU[target]} as placed"

    modest = {"limits": {"cpu": "1"}, "requests": {"cpu": "100m"}}
    other = vms.start("other", annotations={}, node=source, domain={**SMALL_DOMAIN, "resources": modest})
    containers = [*other.pod()["spec"]["containers"], *other.pod()["spec"].get("initContainers", [])]
    assert "kvplace-hook" not in {each["name"] for each in containers}

    plane = vms.cluster.plane
    name = moved.pod()["metadata"]["name"]
    virsh = ("exec", "--namespace", vms.namespace, name, "-c", "compute", "--", *VIRSH)
    plane.kubectl(*virsh, "destroy", "--domain", f"{vms.namespace}_pinned")
    ended = wait_for(plane, vms.pods, name, lambda pod: pod["status"]["phase"] in ("Succeeded", "Failed"))
    (hook,) = [one for one in container_statuses(ended) if one["name"] == "kvplace-hook"]
    assert hook["state"]["terminated"]["exitCode"] == 0
    wait_for(plane, LEDGERS, target, lambda seen: not seen["spec"].get("claims"))
    assert vms.running("other").pod_uid == other.pod_uid

    plane.request("POST", "/apis/plugin.kubevirt.io/v1alpha1/plugins", FOREIGN)
    changed = vms.start("changed", node=target)
    assert changed.pinned() == f"revision 1: all threads run on CPU {OWN_CPU[target]} as placed"
    assert {thread.cpus for thread in changed.threads().threads} == {1 << OWN_CPU[target]}
    domain = ("exec", "--namespace", vms.namespace, changed.pod()["metadata"]["name"], "-c", "compute", "--")
    xml = plane.kubectl(*domain, *VIRSH, "dumpxml", f"{vms.namespace}_changed")
    assert "<title>changed</title>" in xml
