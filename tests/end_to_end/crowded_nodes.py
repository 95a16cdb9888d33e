"""Two crowded nodes: a VM that waits fits only where a running one leaves."""

from __future__ import annotations

from typing import Any

from harness.control_plane.cluster import ControlPlane
from harness.control_plane.hollow_node import NodesInBackground
from harness.control_plane.kubevirt_parts import KubeVirt
from harness.control_plane.watching import is_ready, wait_for
from harness.kvplace_cluster.installation import Installation
from harness.kvplace_cluster.machines import node_shape
from harness.kvplace_cluster.vms import ONE_SOCKET, VMIS, vmi_manifest
from tests.end_to_end.played_virt_handler import report_running
from tests.end_to_end.pods_that_ask import MACHINE, agent_reports

MIGRATIONS = "virtualmachineinstancemigrations"
NODES = ("move-a", "move-b")
Json = dict[str, Any]


class Crowded:
    """Two nodes with one VM of seven vCPUs and one of four each, and a VM of seven that waits."""

    def __init__(
        self,
        cluster: ControlPlane,
        virt: KubeVirt,
        kvplace: Installation,
        nodes: NodesInBackground,
        namespace: str,
    ) -> None:
        self.cluster = cluster
        self.virt = virt
        self.kvplace = kvplace
        self.nodes = nodes
        self.namespace = namespace
        self.pods = f"/api/v1/namespaces/{namespace}/pods"
        self.migrations = f"/apis/kubevirt.io/v1/namespaces/{namespace}/{MIGRATIONS}"
        virt.migrations_ended()
        nodes.do(nodes.nodes.add(node_shape(NODES[0], MACHINE)))
        self.started = started = {
            NODES[0]: [self._start("large-a", 7), self._start("moves", 4, movable="nodes")]
        }
        nodes.do(nodes.nodes.add(node_shape(NODES[1], MACHINE)))
        there: Json = {"nodeSelector": {"kubernetes.io/hostname": NODES[1]}}
        stays = self._start("stays", 4, movable="true", **there)
        started[NODES[1]] = [self._start("large-b", 7, **there), stays]
        self.source = started[NODES[0]][1]
        for pods in started.values():
            for pod in pods:
                wait_for(cluster, self.pods, pod["metadata"]["name"], is_ready)
                report_running(cluster, virt, namespace, pod["metadata"]["labels"]["vm.kubevirt.io/name"])

    def agents_report(self) -> None:
        """Report, as the agents do, that all VMs are pinned: from now on they may move."""
        for node, pods in self.started.items():
            agent_reports(self.cluster, node, {pod["metadata"]["uid"]: 1 for pod in pods})

    def _start(self, name: str, vcpus: int, *, movable: str = "false", **spec: Any) -> Json:
        annotations = {**ONE_SOCKET, "kvplace.io/movable": movable}
        self.virt.create(
            VMIS, self.namespace, vmi_manifest(name, cores=vcpus, annotations=annotations, **spec)
        )
        return self.bound(self.virt.launcher_pod(self.namespace, name))

    def wait_for_room(self) -> Json:
        """Create the VM that fits nowhere; return its pod."""
        self.virt.create(VMIS, self.namespace, vmi_manifest("waits", cores=7))
        return self.virt.launcher_pod(self.namespace, "waits")

    def migration(self) -> Json:
        """Wait for the migration that kvplace creates."""
        return self.virt.first(f"{self.migrations}?labelSelector=kvplace.io/move=true", lambda _: True)

    def bound(self, pod: Json) -> Json:
        """Wait until a pod has a node."""
        name = pod["metadata"]["name"]
        return wait_for(self.cluster, self.pods, name, lambda seen: bool(seen["spec"].get("nodeName")))

    def reservations(self) -> list[str]:
        """The keys of all reservations."""
        claims = [self.kvplace.ledger(node)["claims"] for node in NODES]
        return [uid for of_node in claims for uid, claim in of_node.items() if "reserved" in claim]

    def event(self, vmi: str, reason: str) -> Json:
        events = f"/api/v1/namespaces/{self.namespace}/events"
        selected = f"fieldSelector=involvedObject.kind=VirtualMachineInstance,involvedObject.name={vmi}"
        return self.virt.first(f"{events}?{selected}", lambda event: event["reason"] == reason)
