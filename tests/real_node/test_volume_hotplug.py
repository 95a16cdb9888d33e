"""A volume that is plugged into a running VM, with KubeVirt's own attachment pod and virt-handler."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from harness.control_plane.cluster import MERGE_PATCH
from harness.control_plane.pod_status import container_statuses
from harness.control_plane.watching import is_ready, wait_for
from harness.kvplace_cluster.vms import VMIS, VMS, vm_manifest
from tests.real_node.vms import HOOK, ON_ITS_OWN, SMALL_DOMAIN, VIRSH, Vm, Vms, ledger

Json = dict[str, Any]
ADMISSION = "/apis/admissionregistration.k8s.io/v1/mutatingadmission"
VOLUMES = "/api/v1/persistentvolumes"
IMAGE_BYTES = 1 << 20
FOLDER = "/var/lib/kubelet/volume-of-the-test"
SHARES = {**ON_ITS_OWN, "kvplace.io/cpu-policy": "share"}
"""A VM that owned the only CPU of the node would leave no CPU for the request of the attachment pod."""
DOMAIN = {**SMALL_DOMAIN, "resources": {"limits": {"cpu": "1"}, "requests": {"cpu": "100m"}}}


@pytest.fixture
def claim(vms: Vms) -> str:
    """Make a volume with an empty disk image on n1, and a claim for it."""
    sandbox = vms.cluster.nodes["n1"].sandbox
    sandbox.run("mkdir", "-p", FOLDER)
    sandbox.run("truncate", "-s", str(IMAGE_BYTES), f"{FOLDER}/disk.img")
    sandbox.run("chown", "-R", "107:107", FOLDER)
    size, modes = {"storage": "1Mi"}, ["ReadWriteOnce"]
    common = {"accessModes": modes, "storageClassName": ""}
    name = f"plugged-{vms.namespace}"
    vms.cluster.plane.request(
        "POST",
        VOLUMES,
        {"metadata": {"name": name}, "spec": {**common, "capacity": size, "hostPath": {"path": FOLDER}}},
    )
    claims = f"/api/v1/namespaces/{vms.namespace}/persistentvolumeclaims"
    spec = {**common, "resources": {"requests": size}, "volumeName": name}
    vms.cluster.plane.request("POST", claims, {"metadata": {"name": "plugged"}, "spec": spec})
    wait_for(vms.cluster.plane, claims, "plugged", lambda seen: seen["status"].get("phase") == "Bound")
    return "plugged"


@pytest.fixture
def images_of_the_node(vms: Vms) -> Iterator[None]:
    """Let attachment pods use the image on the node: KubeVirt leaves their pull policy to the API server."""
    name = f"images-of-the-node-{vms.namespace}"
    expression = (
        '[JSONPatch{op: "replace", path: "/spec/containers/0/imagePullPolicy", value: "IfNotPresent"}]'
    )
    rule = {"apiGroups": [""], "apiVersions": ["v1"], "resources": ["pods"], "operations": ["CREATE"]}
    policy = {
        "failurePolicy": "Fail",
        "reinvocationPolicy": "Never",
        "matchConstraints": {
            "resourceRules": [rule],
            "objectSelector": {"matchLabels": {"kubevirt.io": "hotplug-disk"}},
        },
        "mutations": [{"patchType": "JSONPatch", "jsonPatch": {"expression": expression}}],
    }
    plane = vms.cluster.plane
    plane.request("POST", f"{ADMISSION}policies", {"metadata": {"name": name}, "spec": policy})
    plane.request(
        "POST", f"{ADMISSION}policybindings", {"metadata": {"name": name}, "spec": {"policyName": name}}
    )
    yield
    plane.request("DELETE", f"{ADMISSION}policybindings/{name}")
    plane.request("DELETE", f"{ADMISSION}policies/{name}")


@pytest.mark.usefixtures("images_of_the_node")
def test_a_volume_is_plugged_into_a_pinned_vm_and_out_again_beside_its_sidecar(vms: Vms, claim: str) -> None:
    cluster = vms.cluster
    selector = {"nodeSelector": {"kubernetes.io/hostname": "n1"}}
    manifest = vm_manifest("keeps", cores=1, annotations=SHARES, domain=DOMAIN, **selector)
    cluster.kubevirt.create(VMS, vms.namespace, manifest)
    vm = vms.running("keeps")
    vm.pinned()
    qemu, threads = vm.compute.qemu(), {thread.cpus for thread in vm.threads().threads}
    assert threads == {0b10}

    disk = {"name": "plugged", "disk": {"bus": "scsi"}}
    volume = {"name": "plugged", "persistentVolumeClaim": {"claimName": claim, "hotpluggable": True}}
    edit_template(vms, [volume], [disk])
    attached = f"{vms.pods}?labelSelector=kubevirt.io=hotplug-disk"
    attachment = cluster.kubevirt.first(attached, is_ready)
    assert vm.pod_uid in {owner["uid"] for owner in attachment["metadata"]["ownerReferences"]}
    wait_for(cluster.plane, vmis(vms), "keeps", lambda seen: phases(seen) == {"plugged": "Ready"})
    (target,) = [line for line in block_devices(vms, vm) if "plugged" in line]
    assert "/hotplug-disks/plugged" in target
    assert_runs_on_as_before(vms, vm, qemu)

    edit_template(vms, [], [])
    wait_for(cluster.plane, vmis(vms), "keeps", lambda seen: phases(seen) == {})
    assert not [line for line in block_devices(vms, vm) if "plugged" in line]
    assert_runs_on_as_before(vms, vm, qemu)


def assert_runs_on_as_before(vms: Vms, vm: Vm, qemu: int) -> None:
    """Check that neither QEMU nor the sidecar has started again, and that the VM is on its CPU."""
    assert vm.compute.qemu() == qemu
    assert {thread.cpus for thread in vm.threads().threads} == {0b10}
    assert {status["name"]: status["restartCount"] for status in container_statuses(vm.pod())}[HOOK] == 0
    assert vm.pinned() == "revision 1: all threads run on CPU 1 as placed"
    assert ledger(vms.cluster, "n1")["claims"].keys() == {vm.pod_uid}


def edit_template(vms: Vms, volumes: list[Json], disks: list[Json]) -> None:
    spec = {"volumes": volumes, "domain": {"devices": {"disks": disks}}}
    path = f"/apis/kubevirt.io/v1/namespaces/{vms.namespace}/{VMS}/keeps"
    patch = {"spec": {"template": {"spec": spec}}}
    vms.cluster.plane.request("PATCH", path, patch, content_type=MERGE_PATCH)


def vmis(vms: Vms) -> str:
    return f"/apis/kubevirt.io/v1/namespaces/{vms.namespace}/{VMIS}"


def phases(vmi: Json) -> dict[str, str]:
    return {one["name"]: one.get("phase", "") for one in vmi["status"].get("volumeStatus", [])}


def block_devices(vms: Vms, vm: Vm) -> list[str]:
    """List the disks of the VM as its libvirt does."""
    name = vm.pod()["metadata"]["name"]
    command = ("exec", "--namespace", vms.namespace, name, "-c", "compute", "--", *VIRSH)
    return vms.cluster.plane.kubectl(
        *command, "domblklist", "--domain", f"{vms.namespace}_keeps"
    ).splitlines()
