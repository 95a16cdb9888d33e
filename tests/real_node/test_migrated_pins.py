"""A VM that migrates between two nodes with other CPUs to give out, with KubeVirt's own programs on both.

There is no agent here: what is right on the target is right before anybody could repair it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import pytest

from harness.control_plane.cluster import MERGE_PATCH
from harness.control_plane.watching import wait_for
from harness.kvplace_cluster.installation import SIDECAR_IMAGE, Installation
from harness.kvplace_cluster.vms import VMIS, vmi_manifest
from harness.libvirt_session.threads import Affinities
from harness.node_programs.image import archive
from harness.node_programs.kvplace_images import hook_image
from harness.real_node.cluster import RealCluster
from kvplace.core.cpuset import cpus_of, mask_of, parse_cpu_list
from kvplace.core.scalars import CpuId
from tests.real_node.vms import SMALL_DOMAIN

MIGRATIONS = "virtualmachineinstancemigrations"


@pytest.fixture
def own_cpu(cluster: RealCluster) -> Iterator[dict[str, CpuId]]:
    """The one CPU of each node that VMs may get; kvplace is installed and its image is on the nodes."""
    cpus = list(cpus_of(parse_cpu_list(Path("/sys/devices/system/cpu/online").read_text())))
    if len(cpus) < 2:
        pytest.skip("two nodes with other CPUs need two CPUs")
    given = dict(zip(cluster.nodes, cpus, strict=False))
    image = archive(hook_image(f"{SIDECAR_IMAGE}:latest"))
    for name, cpu in given.items():
        cluster.nodes[name].runtime.import_image(image)
        annotate(cluster, name, json.dumps({"socket0": [str(cpu)]}))
    with Installation(cluster.plane) as installation:
        installation.add_scheduler(installation.replicas[0])
        yield given
    for name in given:
        annotate(cluster, name, None)


def annotate(cluster: RealCluster, node: str, cpu_map: str | None) -> None:
    patch = {"metadata": {"annotations": {"cpu-map": cpu_map}}}
    cluster.plane.request("PATCH", f"/api/v1/nodes/{node}", patch, content_type=MERGE_PATCH)


def threads_of(name: str) -> Affinities:
    """The threads of a VM's QEMU, found by its arguments among all processes of this machine."""
    (pid,) = [
        int(process.name)
        for process in Path("/proc").glob("[0-9]*")
        if f"guest={name},".encode() in _command_line(process)
    ]
    return Affinities.of_process(pid)


def _command_line(process: Path) -> bytes:
    try:
        return (process / "cmdline").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return b""


def domain_of(cluster: RealCluster, namespace: str, vmi: dict[str, Any]) -> ET.Element:
    """What libvirt in the VM's pod believes."""
    pods = cluster.plane.request("GET", f"/api/v1/namespaces/{namespace}/pods")["items"]
    (pod,) = [pod for pod in pods if pod["spec"].get("nodeName") == vmi["status"]["nodeName"]]
    virsh = (
        "virsh",
        "-c",
        "qemu+unix:///session?socket=/var/run/libvirt/virtqemud-sock",
        "dumpxml",
        "--domain",
    )
    name = f"{namespace}_{vmi['metadata']['name']}"
    text = cluster.plane.kubectl(
        *("exec", "--namespace", namespace, pod["metadata"]["name"], "-c", "compute", "--", *virsh, name)
    )
    return ET.fromstring(re.sub(r"^[^<]*", "", text))


def test_a_vm_is_on_the_cpu_of_its_target_although_kubevirt_sends_the_number_of_its_source(
    cluster: RealCluster, own_cpu: dict[str, CpuId], vm_namespace: str
) -> None:
    virt = cluster.kubevirt
    asking = {"cpu-set": "any", "kvplace.io/emulator-threads": "with-vcpus"}
    manifest = vmi_manifest("moves", cores=1, annotations=asking, domain=SMALL_DOMAIN)
    virt.create(VMIS, vm_namespace, manifest)
    source = virt.vmi_in_phase(vm_namespace, "moves", "Running")["status"]["nodeName"]
    before = threads_of(f"{vm_namespace}_moves")
    assert {thread.cpus for thread in before.threads} == {mask_of([own_cpu[source]])}

    migration = {
        "kind": "VirtualMachineInstanceMigration",
        "metadata": {"name": "away"},
        "spec": {"vmiName": "moves"},
    }
    virt.create(MIGRATIONS, vm_namespace, migration)
    migrations = f"/apis/kubevirt.io/v1/namespaces/{vm_namespace}/{MIGRATIONS}"
    wait_for(
        cluster.plane, migrations, "away", lambda seen: seen.get("status", {}).get("phase") == "Succeeded"
    )
    vmis = f"/apis/kubevirt.io/v1/namespaces/{vm_namespace}/{VMIS}"
    vmi = cluster.plane.request("GET", f"{vmis}/moves")
    target = vmi["status"]["nodeName"]
    assert target != source
    after = threads_of(f"{vm_namespace}_moves")
    assert {thread.name: thread.cpus for thread in after.threads} == {
        thread.name: mask_of([own_cpu[target]]) for thread in after.threads
    }
    (pin,) = domain_of(cluster, vm_namespace, vmi).iterfind("cputune/vcpupin[@vcpu='0']")
    assert pin.get("cpuset") == str(own_cpu[target])

    cluster.plane.request("DELETE", f"{vmis}/moves")
    virt.gone(VMIS, vm_namespace, "moves")
