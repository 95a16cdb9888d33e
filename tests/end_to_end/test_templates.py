"""Every VM template passes KubeVirt's own admission together with kvplace's, as VM and as VMI."""

from __future__ import annotations

import pytest

from harness.control_plane.cluster import ControlPlane
from harness.control_plane.kubevirt_parts import KubeVirt
from harness.kvplace_cluster.installation import Installation
from harness.kvplace_cluster.vms import VMIS, VMS
from kvplace.simulate.vm_templates import read_templates

TEMPLATES = read_templates()


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_template_is_admitted_by_kubevirt_and_its_vmi_gets_the_sidecar(
    name: str, cluster: ControlPlane, virt: KubeVirt, kvplace: Installation, vm_namespace: str
) -> None:
    vm = TEMPLATES[name]
    vmi = {
        "apiVersion": vm["apiVersion"],
        "kind": "VirtualMachineInstance",
        "metadata": {"name": name, **vm["spec"]["template"]["metadata"]},
        "spec": vm["spec"]["template"]["spec"],
    }
    collection = f"/apis/kubevirt.io/v1/namespaces/{vm_namespace}"
    stored = cluster.request("POST", f"{collection}/{VMS}?dryRun=All", vm)
    wanted = vm["spec"]["template"]["metadata"]["annotations"]
    assert stored["spec"]["template"]["metadata"]["annotations"].items() >= wanted.items()

    admitted = cluster.request("POST", f"{collection}/{VMIS}?dryRun=All", vmi)
    annotations = admitted["metadata"]["annotations"]
    assert annotations.items() >= wanted.items()
    assert "hooks.kubevirt.io/hookSidecars" in annotations
    assert admitted["spec"]["domain"]["cpu"].items() >= vmi["spec"]["domain"]["cpu"].items()
