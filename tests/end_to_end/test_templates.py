"""Every VM template passes KubeVirt's own admission together with kvplace's, and its VM starts pinned."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from lxml import etree

from harness.control_plane.cluster import MERGE_PATCH, ControlPlane, RequestRefused
from harness.control_plane.hollow_node import NodesInBackground
from harness.control_plane.kubevirt_parts import KubeVirt
from harness.control_plane.launcher_side import LauncherSide
from harness.control_plane.watching import is_ready, wait_for
from harness.kvplace_cluster.installation import Installation, described_nodes
from harness.kvplace_cluster.machines import GIB, node_shape, two_socket_machine
from harness.kvplace_cluster.vms import VMIS, VMS
from kvplace.core.annotations import read_options
from kvplace.core.cpuset import format_cpu_list, mask_of, parse_cpu_list
from kvplace.core.node_devices import DeviceCount, DeviceReport, NodeDevices, TopologyPolicy
from kvplace.core.placement import PodPlacement
from kvplace.core.request import NumaMemory, Policy
from kvplace.core.scalars import NumaId, ResourceName
from kvplace.core.topology import Topology
from kvplace.core.well_known_names import PLACEMENT
from kvplace.simulate.demo_vms import read_templates

Json = dict[str, Any]

FOLDER = Path(__file__).resolve().parents[2] / "vm-templates"
TEMPLATES = read_templates()
OFFERED = ("instancetypes", "preferences")
SIZED = {path.stem for path in (FOLDER / "instancetypes").iterdir()} - set(OFFERED)
"""Templates whose size and words come from an instancetype."""
FAR_NODE = NumaId(1)
"""The NUMA node of all devices; without them the VMs would get cores of node 0.

Here only `gpu-inference` gets one: KubeVirt leaves SR-IOV devices to the network resources injector.
"""
DEVICES = {"nvidia.com/GA100": "2"}
"""The devices that plugins offer on each amd64 node."""
NEED_GATES = {"gpu-training"}
"""Templates that KubeVirt refuses without the feature gates that their comments name."""
HYPERV = {
    "frequencies",
    "ipi",
    "reset",
    "runtime",
    "synic",
    "synictimer",
    "synictimer2",
    "tlbflush",
    "vpindex",
}
LARGE = two_socket_machine(64, memory_gib=1024, huge_pages={GIB: 256})
MACHINES = {"amd64-0": LARGE, "amd64-1": LARGE, "arm64-0": two_socket_machine(64, threads=1, memory_gib=256)}
NODES_OF_THIS_KERNEL = parse_cpu_list(Path("/sys/devices/system/node/online").read_text())
VOLUME = """
apiVersion: v1
kind: PersistentVolume
metadata: {name: windows-server}
spec:
  capacity: {storage: 60Gi}
  accessModes: [ReadWriteOnce]
  hostPath: {path: /nowhere}
  claimRef: {namespace: NAMESPACE, name: windows-server}
  storageClassName: ""
---
apiVersion: v1
kind: PersistentVolumeClaim
metadata:
  name: windows-server
  namespace: NAMESPACE
  annotations: {pv.kubernetes.io/bind-completed: "yes"}
spec:
  accessModes: [ReadWriteOnce]
  resources: {requests: {storage: 60Gi}}
  volumeName: windows-server
  storageClassName: ""
"""


@pytest.fixture
def machine() -> Topology:
    """Describe what all sidecars see: the machine whose CPUs the other one has, too."""
    return LARGE


@pytest.fixture(scope="module")
def offered(cluster: ControlPlane, virt: KubeVirt) -> Iterator[None]:
    """Create the instancetypes and preferences, as an operator does."""
    assert virt.servers
    files = [f"--filename={FOLDER}/instancetypes/{name}.yaml" for name in OFFERED]
    cluster.kubectl("apply", *files)
    yield
    cluster.kubectl("delete", *files)


@pytest.fixture
def windows_disk(cluster: ControlPlane, vm_namespace: str) -> Iterator[None]:
    """Provide the bound PersistentVolumeClaim that the Windows templates name."""
    objects = VOLUME.replace("NAMESPACE", vm_namespace)
    cluster.kubectl("apply", "--filename=-", stdin=objects)
    for scope in ("persistentvolumes", f"namespaces/{vm_namespace}/persistentvolumeclaims"):
        path = f"/api/v1/{scope}/windows-server/status"
        cluster.request("PATCH", path, {"status": {"phase": "Bound"}}, content_type=MERGE_PATCH)
    yield
    cluster.kubectl("delete", "persistentvolume", "windows-server", "--wait=false")


@pytest.mark.parametrize("name", sorted(TEMPLATES.keys() - NEED_GATES))
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
    stored = cluster.request("POST", f"{collection}/{VMS}?dryRun=All&fieldValidation=Strict", vm)
    wanted = vm["spec"]["template"]["metadata"]["annotations"]
    assert stored["spec"]["template"]["metadata"]["annotations"].items() >= wanted.items()

    admitted = cluster.request("POST", f"{collection}/{VMIS}?dryRun=All", vmi)
    annotations = admitted["metadata"]["annotations"]
    assert annotations.items() >= wanted.items()
    assert "hooks.kubevirt.io/hookSidecars" in annotations
    assert admitted["spec"]["domain"]["cpu"].items() >= vmi["spec"]["domain"]["cpu"].items()


@pytest.mark.usefixtures("virt")
@pytest.mark.parametrize("name", sorted(NEED_GATES))
def test_a_template_with_claims_is_refused_for_the_missing_gate_alone(
    name: str, cluster: ControlPlane, vm_namespace: str
) -> None:
    path = f"/apis/kubevirt.io/v1/namespaces/{vm_namespace}/{VMS}?dryRun=All&fieldValidation=Strict"
    with pytest.raises(RequestRefused, match="feature gate is not enabled"):
        cluster.request("POST", path, TEMPLATES[name])


def _vm(name: str, folder: Path) -> Json:
    vm: Json = yaml.safe_load((folder / f"{name}.yaml").read_text())
    return vm


def _report_devices(cluster: ControlPlane, node: str) -> None:
    """Report the devices of a node, as its agent would."""
    counts = [
        DeviceCount(ResourceName(name), FAR_NODE, int(count), int(count)) for name, count in DEVICES.items()
    ]
    report = DeviceReport(NodeDevices.of(counts, TopologyPolicy()))
    path = f"/apis/kvplace.io/v1alpha1/nodetopologies/{node}/status"
    cluster.request("PATCH", path, {"status": {"devices": report.document()}}, content_type=MERGE_PATCH)


@pytest.mark.usefixtures("offered", "windows_disk")
def test_the_vms_of_all_templates_start_with_their_vcpus_on_the_cores_that_they_were_given(
    cluster: ControlPlane,
    virt: KubeVirt,
    kvplace: Installation,
    nodes: NodesInBackground,
    vm_namespace: str,
    launcher_side: LauncherSide,
) -> None:
    labels = {f"hyperv.node.kubevirt.io/{feature}": "true" for feature in HYPERV}
    labels["machine-type.node.kubevirt.io/virt"] = "true"  # what KubeVirt asks of arm64 nodes
    for name, machine in MACHINES.items():
        labels["kubernetes.io/arch"] = name.partition("-")[0]
        shape = replace(node_shape(name, machine), labels=dict(labels), resources=DEVICES)
        nodes.do(nodes.nodes.add(shape))
    vms = {name: _vm(name, FOLDER) for name in sorted(TEMPLATES.keys() - NEED_GATES)}
    for name in SIZED:
        vm = _vm(name, FOLDER / "instancetypes")
        vms[f"sized-{name}"] = {**vm, "metadata": {"name": f"sized-{name}"}}
    pods = f"/api/v1/namespaces/{vm_namespace}/pods"
    with described_nodes(kvplace, MACHINES):
        for name in MACHINES:
            _report_devices(cluster, name)
        for vm in vms.values():
            virt.create(VMS, vm_namespace, vm)
        for name in vms:
            pod_name = virt.launcher_pod(vm_namespace, name)["metadata"]["name"]
            pod = wait_for(cluster, pods, pod_name, is_ready)
            vmi = virt.vmi_in_phase(vm_namespace, name, "Scheduled")
            asked = read_options(vmi["metadata"]["annotations"])
            assert asked is not None, name
            if asked.policy in {Policy.NUMA, Policy.NONE}:
                continue
            placement = PodPlacement.from_json(pod["metadata"]["annotations"][PLACEMENT]).placement
            if name == "gpu-inference":
                assert placement.numa_nodes == (FAR_NODE,)
            sockets = nodes.nodes.find(vm_namespace, pod_name).volumes.folder / "hook-sidecar-sockets"
            report = launcher_side.call_hook(vmi, sockets, calls=3, shutdown=False)
            if asked.numa_memory is NumaMemory.STRICT and (
                mask_of(placement.numa_nodes) & ~NODES_OF_THIS_KERNEL
            ):
                # The sidecar asks the kernel that it really runs on.
                assert "the kernel refuses NUMA node" in report.errors[0]
                continue
            assert report.errors == (), name
            pinned = etree.fromstring(report.defined).iterfind("cputune/vcpupin")
            pins = {int(pin.get("vcpu", "-1")): pin.get("cpuset") for pin in pinned}
            present = {vcpu: str(cpu) for vcpu, cpu in enumerate(placement.vcpus)}
            # vCPUs that may be hot-plugged have no cores of their own.
            pluggable = {vcpu: format_cpu_list(placement.cpus) for vcpu in pins.keys() - present.keys()}
            assert pins == present | pluggable, name
        for name in vms:
            path = f"/apis/kubevirt.io/v1/namespaces/{vm_namespace}/{VMS}/{name}"
            cluster.request("DELETE", path)
        for name in vms:
            virt.gone(VMS, vm_namespace, name)


@pytest.mark.usefixtures("offered", "kvplace")
def test_a_vm_that_repeats_a_word_of_its_instancetype_with_another_value_is_refused_by_kubevirt(
    cluster: ControlPlane, vm_namespace: str
) -> None:
    vm = _vm("database", FOLDER / "instancetypes")
    vm["spec"]["template"]["metadata"]["annotations"] = {"cpu-set": "one-socket"}
    path = f"/apis/kubevirt.io/v1/namespaces/{vm_namespace}/{VMS}?dryRun=All"
    with pytest.raises(RequestRefused, match=r"annotations\.cpu-set"):
        cluster.request("POST", path, vm)
