"""Cores follow the device of a container: from its environment through NRI, agent and `serve` to its pod.

Kubelet, containerd, agent, `serve`, kube-scheduler, virt-controller and the containers of its pod are real.
The device is not: no QEMU could open it, and there is no virt-handler to ask for one.

The VM owns no CPU, because the CPUs that are left for other containers would include one that this machine
lacks. A kernel with one NUMA node refuses the memory nodes of both revisions, so the cpuset of the container
stays: `test_relocation` proves that cpusets follow a revision.
"""

from __future__ import annotations

import json
import os
import secrets
import sys
import time
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from harness.control_plane.cluster import MERGE_PATCH, ControlPlane
from harness.control_plane.kubevirt_parts import FEATURE_GATES, KubeVirt
from harness.control_plane.watching import wait_for
from harness.kvplace_cluster.installation import Installation
from harness.kvplace_cluster.vms import VMIS, vmi_manifest
from harness.node_programs.image import archive
from harness.node_programs.kvplace_images import hook_image
from harness.node_programs.launcher_image import launcher
from harness.node_programs.programs import NodePrograms
from harness.real_node.kubelet import Kubelet
from harness.real_node.node_access import NodeAccess, apiserver_flags
from harness.real_node.runtime import NRI_SOCKET, ContainerRuntime
from harness.real_node.sandbox import Sandbox, SandboxedServer
from harness.waiting import wait_until
from kvplace.admission.sidecar import VOLUME
from kvplace.core.node_devices import DeviceReport, PodDevice, read_device_report
from kvplace.core.placement import PodPlacement
from kvplace.core.scalars import NumaId, PciAddress, PodUid, ResourceName
from kvplace.core.well_known_names import PLACEMENT
from tests.real_node.shown_machine import CPUS, show_two_numa_nodes
from tests.real_node.vms import SMALL_DOMAIN, TOPOLOGIES

Json = dict[str, Any]

VF = ResourceName("kvplace.test/vf")
ADDRESS = PciAddress("0000:c1:00.1")
_PROJECT = {"PYTHONPATH": str(Path(__file__).resolve().parents[2])}
_PASSED_THROUGH = {"pciVendorSelector": "15b3:1018", "resourceName": VF, "externalResourceProvider": True}
_KUBEVIRT = {
    "developerConfiguration": {"useEmulation": True},
    "permittedHostDevices": {"pciHostDevices": [_PASSED_THROUGH]},
    "imagePullPolicy": "IfNotPresent",
}
_SCHEDULABLE = {"kubevirt.io/schedulable": "true", "machine-type.node.kubevirt.io/q35": "true"}
"""The labels of virt-handler."""


class CorrectingNode:
    """A node with a kubelet that calls the device local to NUMA node 0, and a sysfs that states node 1."""

    def __init__(self, plane: ControlPlane, runtime: ContainerRuntime, kubevirt: KubeVirt) -> None:
        self.plane = plane
        self.runtime = runtime
        self.kubevirt = kubevirt
        self.sandbox = runtime.sandbox
        self.name = self.sandbox.name
        show_two_numa_nodes(self.sandbox, {ADDRESS: 1})
        access = NodeAccess(plane, self.sandbox)
        settings = {"topologyManagerPolicy": "best-effort"}
        Kubelet(plane, access, runtime, configuration=settings).wait_until_ready()
        labels = {"metadata": {"labels": _SCHEDULABLE}}
        plane.request("PATCH", f"/api/v1/nodes/{self.name}", labels, content_type=MERGE_PATCH)
        plugin = json.dumps({"resource": VF, "devices": {ADDRESS: [0]}})
        self._start("plugin", "-m", "harness.device_plugin", plugin)
        admin = access.kubeconfig(plane.kubeconfig_for(plane.admin.token, name=f"agent-{self.name}"))
        self.sandbox.write("/etc/kubernetes/admin.kubeconfig", admin, mode=0o600)
        self._start(
            "agent",
            *("-m", "kvplace", "agent", f"--node-name={self.name}", "--reserved-cpus=2"),
            *(f"--nri-socket={NRI_SOCKET}", "--health-address=127.0.0.1:8091"),
            "--kubeconfig=/etc/kubernetes/admin.kubeconfig",
        )
        wait_for(plane, TOPOLOGIES, self.name, offers_the_device)

    def _start(self, name: str, *arguments: str) -> SandboxedServer:
        return self.sandbox.start(name, sys.executable, *arguments, environment=_PROJECT)

    def container(self, pod: str, name: str) -> Json:
        """Wait until a container of a pod exists; returns what containerd states of it."""
        found: list[str] = []

        def exists() -> bool:
            labels = {"io.kubernetes.pod.uid": pod, "io.kubernetes.container.name": name}
            asked = [word for key, value in labels.items() for word in ("--label", f"{key}={value}")]
            found[:] = self.runtime.crictl("ps", "--all", "--quiet", *asked).split()
            return bool(found)

        wait_until(exists, lambda: f"pod {pod} has no container {name}")
        described: Json = json.loads(self.runtime.crictl("inspect", found[0]))
        return described


def report_of(topology: Json) -> DeviceReport:
    """Read what the agent has reported of devices."""
    report = read_device_report(topology["status"]["devices"], "status.devices")
    assert report is not None
    return report


def offers_the_device(topology: Json) -> bool:
    """Whether the agent is connected to NRI and reports the device as free, where the kubelet lists it."""
    status = topology.get("status", {})
    if status.get("enforcement") != "nri" or "devices" not in status:
        return False
    return [(one.resource, one.node, one.free) for one in report_of(topology).devices.counts] == [(VF, 0, 1)]


def placement_of(pod: Json) -> PodPlacement:
    return PodPlacement.from_json(pod["metadata"]["annotations"][PLACEMENT])


@pytest.fixture(scope="module")
def node(
    sandbox_machine: None,
    node_programs: NodePrograms,
    kubernetes_programs: Path,
    kubevirt_programs: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[CorrectingNode]:
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("a VM needs a CPU of each NUMA node")
    kept = os.environ.get("KVPLACE_REAL_NODE_LOGS")
    logs = Path(kept) if kept else tmp_path_factory.mktemp("correcting-node")
    hook = hook_image()
    with Sandbox("correcting", logs) as sandbox:
        runtime = ContainerRuntime(sandbox, node_programs)
        for image in (hook, launcher()):
            runtime.import_image(archive(image))
        with (
            ControlPlane(apiserver_flags=apiserver_flags(sandbox), logs=logs) as plane,
            KubeVirt(
                plane,
                kubevirt_programs,
                feature_gates=(*FEATURE_GATES, "HostDevices"),
                configuration=_KUBEVIRT,
            ) as kubevirt,
            Installation(plane, flags=[f"--sidecar-image={hook.reference}"]) as installation,
        ):
            installation.add_scheduler(installation.replicas[0])
            yield CorrectingNode(plane, runtime, kubevirt)
            assert installation.replicas[0].denials() == []


@pytest.fixture
def namespace(node: CorrectingNode) -> Iterator[str]:
    name = node.plane.create_namespace(f"vms-{secrets.token_hex(4)}")
    yield name
    node.plane.request("DELETE", f"/apis/kubevirt.io/v1/namespaces/{name}/{VMIS}")
    node.plane.remove_namespace(name)


def test_the_cores_follow_the_device_in_the_environment_of_the_container_before_a_qemu_exists(
    node: CorrectingNode, namespace: str
) -> None:
    annotations = {
        "cpu-set": "one-numa",
        "kvplace.io/device-numa": "required",
        "kvplace.io/cpu-policy": "share",
        "kvplace.io/emulator-threads": "with-vcpus",
    }
    devices = {"autoattachPodInterface": False, "hostDevices": [{"name": "vf", "deviceName": VF}]}
    domain = {**SMALL_DOMAIN, "devices": {**SMALL_DOMAIN["devices"], **devices}}
    vmi = vmi_manifest("vm", cores=1, annotations=annotations, domain=domain)
    node.kubevirt.create(VMIS, namespace, vmi)
    pods = f"/api/v1/namespaces/{namespace}/pods"
    created = node.kubevirt.launcher_pod(namespace, "vm")
    name, uid = created["metadata"]["name"], created["metadata"]["uid"]

    bound = placement_of(wait_for(node.plane, pods, name, lambda pod: bool(pod["spec"].get("nodeName"))))
    assert (bound.revision, bound.placement.numa_nodes, bound.placement.vcpus) == (1, (0,), (0,))

    corrected = wait_for(node.plane, pods, name, lambda pod: placement_of(pod).revision > 1)
    seen_at = time.time()
    after = placement_of(corrected)
    assert (after.revision, after.placement.numa_nodes, after.placement.vcpus) == (2, (1,), CPUS[1])

    compute = node.container(uid, "compute")
    environment = compute["info"]["runtimeSpec"]["process"]["env"]
    assert f"PCIDEVICE_KVPLACE_TEST_VF={ADDRESS}" in environment
    topology = node.plane.request("GET", f"{TOPOLOGIES}/{node.name}")
    assert report_of(topology).pods[PodUid(uid)] == (PodDevice(VF, NumaId(1), ADDRESS),)
    assert not any(one["pinned"] or one.get("cpus") for one in topology["status"].get("pods", ()))

    volume = f"/var/lib/kubelet/pods/{uid}/volumes/kubernetes.io~downward-api/{VOLUME}"
    file = node.sandbox.path(f"{volume}/placement")
    wait_until(lambda: PodPlacement.from_json(file.read_text()).revision > 1, file.read_text)
    read_at = time.time()
    began = datetime.fromisoformat(compute["status"]["createdAt"]).timestamp()
    print(
        f"seconds from the creation of the container: {seen_at - began:.2f} to revision 2 on its pod, "
        f"{read_at - began:.2f} to revision 2 in the hook's file"
    )
