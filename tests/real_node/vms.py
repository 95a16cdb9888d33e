"""VMs and pods small enough for a node that is this machine, and what cluster and kernel report of them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from harness.control_plane.cluster import MERGE_PATCH, RequestRefused
from harness.control_plane.pod_status import container_statuses
from harness.control_plane.watching import condition, is_ready, wait_for
from harness.kvplace_cluster.vms import VMIS, vmi_manifest
from harness.libvirt_session.threads import Affinities
from harness.real_node.cluster import RealCluster
from harness.real_node.kernel_view import ContainerInKernel
from harness.real_node.node import RealNode
from harness.waiting import wait_until
from kvplace.core.placement import PodPlacement
from kvplace.core.well_known_names import PLACEMENT

Json = dict[str, Any]

SMALL_DOMAIN: Json = {
    "memory": {"guest": "64Mi"},
    "devices": {"autoattachGraphicsDevice": False},
    # QEMU 7.2 cannot migrate through several connections at once, which KubeVirt chooses without this limit.
    "resources": {"limits": {"cpu": "1"}},
}
ON_ITS_OWN = {"cpu-set": "any", "kvplace.io/emulator-threads": "with-vcpus"}
"""One CPU for a VM of one vCPU, QEMU's other threads included."""

MIGRATIONS = "virtualmachineinstancemigrations"
VIRSH = ("virsh", "--connect", "qemu+unix:///session?socket=/var/run/libvirt/virtqemud-sock")
"""In the container compute."""
LEDGERS = "/apis/kvplace.io/v1alpha1/nodeledgers"
TOPOLOGIES = "/apis/kvplace.io/v1alpha1/nodetopologies"
PINNED = "kvplace.io/Pinned"
HOOK = "hook-sidecar-0"
"""The container of the hook."""
_HOSTNAME = "kubernetes.io/hostname"


class Vms:
    """The VMs and pods of one test, in a namespace of their own."""

    def __init__(self, cluster: RealCluster, namespace: str) -> None:
        self.cluster = cluster
        self.namespace = namespace
        self.pods = f"/api/v1/namespaces/{namespace}/pods"

    def start(
        self,
        name: str,
        *,
        annotations: Mapping[str, str] = ON_ITS_OWN,
        node: str | None = None,
        domain: Json = SMALL_DOMAIN,
    ) -> Vm:
        """Make a VM of one vCPU and wait until its guest runs."""
        self.create(name, annotations=annotations, node=node, domain=domain)
        return self.running(name)

    def create(
        self,
        name: str,
        *,
        annotations: Mapping[str, str] = ON_ITS_OWN,
        node: str | None = None,
        domain: Json = SMALL_DOMAIN,
    ) -> None:
        """Make a VM of one vCPU, which may have to wait."""
        selector = {"nodeSelector": {_HOSTNAME: node}} if node else {}
        manifest = vmi_manifest(name, cores=1, annotations=annotations, domain=domain, **selector)
        self.cluster.kubevirt.create(VMIS, self.namespace, manifest)

    def running(self, name: str) -> Vm:
        """Wait until the guest of a VM runs."""
        vmi = self.cluster.kubevirt.vmi_in_phase(self.namespace, name, "Running")
        pods = self.cluster.plane.request("GET", self.pods)["items"]
        running = {pod["metadata"]["uid"] for pod in pods if pod["status"]["phase"] == "Running"}
        active = vmi["status"]["activePods"].items()
        (uid,) = [uid for uid, node in active if node == vmi["status"]["nodeName"] and uid in running]
        return Vm(self, name, uid)

    def remove(self, name: str) -> None:
        """Delete a VM and wait until it is gone."""
        path = f"/apis/kubevirt.io/v1/namespaces/{self.namespace}/{VMIS}/{name}"
        self.cluster.plane.request("DELETE", path)
        self.cluster.kubevirt.gone(VMIS, self.namespace, name)

    def busy_pod(self, name: str, node: str) -> ContainerInKernel:
        """Run a container that first prints its CPUs and then uses all it gets."""
        script = "grep Cpus_allowed_list /proc/self/status; while :; do :; done"
        container = {"name": "busy", "image": "busybox:1", "command": ["sh", "-c", script]}
        spec = {
            "nodeSelector": {_HOSTNAME: node},
            "terminationGracePeriodSeconds": 0,
            "containers": [container],
        }
        self.cluster.plane.request("POST", self.pods, {"metadata": {"name": name}, "spec": spec})
        pod = wait_for(self.cluster.plane, self.pods, name, is_ready)
        return ContainerInKernel.of_pod(self.cluster.nodes[node].sandbox, pod, "busy")

    def remove_all(self) -> None:
        """Delete VMs and pods and wait until nothing of them runs or owns a CPU."""
        plane = self.cluster.plane
        vmis = f"/apis/kubevirt.io/v1/namespaces/{self.namespace}"
        for collection in (f"{vmis}/virtualmachines", f"{vmis}/{VMIS}", self.pods):
            plane.request("DELETE", collection)
        for kind in ("virtualmachines", VMIS):
            for left in plane.request("GET", f"{vmis}/{kind}")["items"]:
                self.cluster.kubevirt.gone(kind, self.namespace, left["metadata"]["name"])
        for ledger in plane.request("GET", LEDGERS)["items"]:
            wait_for(plane, LEDGERS, ledger["metadata"]["name"], lambda seen: not seen["spec"].get("claims"))


@dataclass(frozen=True, slots=True)
class Vm:
    """One VM in one pod: a migration makes another one of it."""

    vms: Vms
    name: str
    pod_uid: str

    def pod(self) -> Json:
        """Read its pod as it is now."""
        listed = self.vms.cluster.plane.request("GET", self.vms.pods)["items"]
        return next(pod for pod in listed if pod["metadata"]["uid"] == self.pod_uid)

    @property
    def node(self) -> RealNode:
        """Where it runs."""
        return self.vms.cluster.nodes[self.pod()["spec"]["nodeName"]]

    @property
    def compute(self) -> ContainerInKernel:
        """The container of its QEMU."""
        return ContainerInKernel.of_pod(self.node.sandbox, self.pod(), "compute")

    def threads(self) -> Affinities:
        """Every thread of its QEMU with the CPUs that the kernel lets it use."""
        return self.compute.qemu_threads()

    def bound(self) -> PodPlacement:
        """Read its newest placement."""
        return PodPlacement.from_json(self.pod()["metadata"]["annotations"][PLACEMENT])

    def cpu_map(self) -> dict[str, list[str]]:
        """Read its annotation cpu-map."""
        read: dict[str, list[str]] = json.loads(self.pod()["metadata"]["annotations"]["cpu-map"])
        return read

    def pinned(self, revision: int = 1) -> str:
        """Wait until the agent calls this revision pinned, and return the message of its condition."""

        def says_so(pod: Json) -> bool:
            return condition(pod, PINNED) == "True" and _message(pod).startswith(f"revision {revision}:")

        name = self.pod()["metadata"]["name"]
        return _message(wait_for(self.vms.cluster.plane, self.vms.pods, name, says_so))

    def ask(self, annotations: Mapping[str, str | None]) -> None:
        """Edit the asking annotations of the running VMI."""
        path = f"/apis/kubevirt.io/v1/namespaces/{self.vms.namespace}/{VMIS}/{self.name}"
        patch = {"metadata": {"annotations": dict(annotations)}}
        self.vms.cluster.plane.request("PATCH", path, patch, content_type=MERGE_PATCH)

    def claim(self) -> Json | None:
        """Read its claim in the ledger of its node."""
        claim: Json | None = ledger(self.vms.cluster, self.node.name)["claims"].get(self.pod_uid)
        return claim


def migrate(vms: Vms, vm: Vm) -> None:
    """Move it away and wait until KubeVirt calls that done."""
    begin_to_migrate(vms, vm, "away")
    outcome = end_of_migration(vms, vm, "away")
    path = f"/apis/kubevirt.io/v1/namespaces/{vms.namespace}/{VMIS}/{vm.name}"
    assert outcome == "Succeeded", vms.cluster.plane.request("GET", path)["status"].get("migrationState")


def begin_to_migrate(vms: Vms, vm: Vm, where: str) -> None:
    """Ask KubeVirt to move it."""
    migration = {
        "kind": "VirtualMachineInstanceMigration",
        "metadata": {"name": f"{vm.name}-{where}"},
        "spec": {"vmiName": vm.name},
    }
    vms.cluster.kubevirt.create(MIGRATIONS, vms.namespace, migration)


def end_of_migration(vms: Vms, vm: Vm, where: str) -> str:
    """Wait until KubeVirt calls a migration done, and return what it calls it."""
    done = wait_for(
        vms.cluster.plane,
        f"/apis/kubevirt.io/v1/namespaces/{vms.namespace}/{MIGRATIONS}",
        f"{vm.name}-{where}",
        lambda seen: seen.get("status", {}).get("phase") in {"Succeeded", "Failed"},
    )
    return str(done["status"]["phase"])


def end_of_pod(vms: Vms, vm: Vm) -> Json:
    """Wait until its pod has ended, and return it."""
    name = vm.pod()["metadata"]["name"]
    return wait_for(
        vms.cluster.plane, vms.pods, name, lambda seen: seen["status"]["phase"] in {"Succeeded", "Failed"}
    )


def uid_of_target(vms: Vms, vm: Vm) -> str:
    """Wait until the pod that a VM migrates to has a node."""
    pod = vms.cluster.kubevirt.launcher_pod(vms.namespace, vm.name, other_than=vm.pod_uid)
    name = pod["metadata"]["name"]
    bound = wait_for(vms.cluster.plane, vms.pods, name, lambda seen: bool(seen["spec"].get("nodeName")))
    return str(bound["metadata"]["uid"])


def compute_with_qemu(vm: Vm) -> ContainerInKernel:
    """Wait until the QEMU of a pod is there, which no object of the API shows."""

    def has_qemu() -> bool:
        with suppress(LookupError):
            return bool(vm.compute.qemu())
        return False

    wait_until(has_qemu, lambda: f"{vm.name} has no QEMU")
    return vm.compute


def status_of(pod: Json, container: str) -> Json:
    (found,) = [status for status in container_statuses(pod) if status["name"] == container]
    return found


def ledger(cluster: RealCluster, node: str) -> Json:
    """Read a node's ledger; empty when it has none yet."""
    try:
        stored = cluster.plane.request("GET", f"{LEDGERS}/{node}")
    except RequestRefused as refused:
        if refused.status != 404:
            raise
        return {"owners": {}, "claims": {}}
    return {"owners": {}, "claims": {}, **stored["spec"]}


def _message(pod: Json) -> str:
    conditions = pod.get("status", {}).get("conditions", [])
    return next((str(entry["message"]) for entry in conditions if entry["type"] == PINNED), "")
