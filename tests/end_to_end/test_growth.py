"""A VM that owns its cores grows by KubeVirt's live migration, and its new pod owns cores for every vCPU."""

from __future__ import annotations

from typing import Any

from harness.control_plane.cluster import MERGE_PATCH, ControlPlane
from harness.control_plane.hollow_node import NodesInBackground
from harness.control_plane.kubevirt_parts import KubeVirt
from harness.control_plane.watching import condition, is_ready, wait_for
from harness.kvplace_cluster.installation import Installation, described_nodes
from harness.kvplace_cluster.machines import node_shape, two_socket_machine
from harness.kvplace_cluster.vms import VMIS, VMS, vm_manifest
from kvplace.core.cpuset import cpus_of, parse_cpu_list
from kvplace.core.placement import PodPlacement
from kvplace.core.topology import Topology
from kvplace.core.well_known_names import PLACEMENT
from tests.end_to_end.played_virt_handler import report_running

MIGRATIONS = "virtualmachineinstancemigrations"
Json = dict[str, Any]


class GrowingVm:
    """A VM of 4 sockets that may have 16; virt-handler is played by writes into its VMI's status."""

    def __init__(self, cluster: ControlPlane, virt: KubeVirt, namespace: str) -> None:
        self.cluster = cluster
        self.virt = virt
        self.namespace = namespace
        self.pods = f"/api/v1/namespaces/{namespace}/pods"
        self.kinds = f"/apis/kubevirt.io/v1/namespaces/{namespace}"
        cpu = {"sockets": 4, "cores": 1, "threads": 1, "maxSockets": 16}
        manifest = vm_manifest("db", domain={"cpu": cpu})
        virt.create(VMS, namespace, manifest)
        self.first = self._bound(virt.launcher_pod(namespace, "db"))

    def runs(self) -> None:
        """Report what virt-handler reports of a guest that runs and can migrate."""
        wait_for(self.cluster, self.pods, self.first["metadata"]["name"], is_ready)
        running = {"sockets": 4, "cores": 1, "threads": 1}
        report_running(self.cluster, self.virt, self.namespace, "db", currentCPUTopology=running)

    def ask_for(self, sockets: int) -> None:
        """Change the size in the template as a user does, and wait until KubeVirt wants to plug vCPUs in."""
        self.resize({"sockets": sockets})
        wait_for(self.cluster, f"{self.kinds}/{VMIS}", "db", _is_growing)

    def resize(self, cpu: Json) -> None:
        """Change the size in the template as a user does."""
        grown = {"spec": {"template": {"spec": {"domain": {"cpu": cpu}}}}}
        self.cluster.request("PATCH", f"{self.kinds}/{VMS}/db", grown, content_type=MERGE_PATCH)

    def migrate(self) -> Json:
        """Create the migration and return the target's pod as virt-controller made it."""
        migration = {
            "kind": "VirtualMachineInstanceMigration",
            "metadata": {"name": "grow"},
            "spec": {"vmiName": "db"},
        }
        self.virt.create(MIGRATIONS, self.namespace, migration)
        return self.virt.launcher_pod(self.namespace, "db", other_than=self.first["metadata"]["uid"])

    def bound(self, pod: Json) -> Json:
        """Wait until a pod has a node."""
        return self._bound(pod)

    def _bound(self, pod: Json) -> Json:
        name = pod["metadata"]["name"]
        return wait_for(self.cluster, self.pods, name, lambda seen: bool(seen["spec"].get("nodeName")))


def _is_growing(vmi: Json) -> bool:
    conditions = vmi["status"].get("conditions", [])
    return any(one["type"] == "HotVCPUChange" and one["status"] == "True" for one in conditions)


def test_the_pod_of_the_new_size_owns_a_core_for_each_of_8_vcpus_before_the_guest_arrives(
    cluster: ControlPlane,
    virt: KubeVirt,
    kvplace: Installation,
    nodes: NodesInBackground,
    machine: Topology,
    vm_namespace: str,
) -> None:
    names = ("grow-a", "grow-b")
    for name in names:
        nodes.do(nodes.nodes.add(node_shape(name, machine)))
    with described_nodes(kvplace, dict.fromkeys(names, machine)):
        vm = GrowingVm(cluster, virt, vm_namespace)
        vm.runs()
        vm.ask_for(8)
        target = vm.bound(vm.migrate())

        first, second = vm.first["spec"]["nodeName"], target["spec"]["nodeName"]
        assert {first, second} == set(names)
        for pod, vcpus in ((vm.first, 4), (target, 8)):
            placement = PodPlacement.from_json(pod["metadata"]["annotations"][PLACEMENT]).placement
            uid, ledger = pod["metadata"]["uid"], kvplace.ledger(pod["spec"]["nodeName"])
            assert len(set(placement.vcpus)) == vcpus
            assert len(machine.packages_of(placement.cpus)) == 1
            assert ledger["owners"] == {str(cpu): uid for cpu in cpus_of(placement.cpus)}
            assert parse_cpu_list(ledger["claims"][uid]["cpus"]) == placement.cpus


def test_a_size_beyond_the_most_sockets_of_the_running_vm_waits_for_a_restart_and_the_vm_keeps_its_cores(
    cluster: ControlPlane,
    virt: KubeVirt,
    kvplace: Installation,
    nodes: NodesInBackground,
    machine: Topology,
    vm_namespace: str,
) -> None:
    nodes.do(nodes.nodes.add(node_shape("grow-alone", machine)))
    with described_nodes(kvplace, {"grow-alone": machine}):
        vm = GrowingVm(cluster, virt, vm_namespace)
        vm.runs()
        before = kvplace.ledger("grow-alone")
        vm.resize({"sockets": 17, "maxSockets": 32})
        wait_for(
            cluster, f"{vm.kinds}/{VMS}", "db", lambda seen: condition(seen, "RestartRequired") == "True"
        )
        vmi = cluster.request("GET", f"{vm.kinds}/{VMIS}/db")
        assert vmi["spec"]["domain"]["cpu"]["sockets"] == 4
        assert not _is_growing(vmi)
        pods = cluster.request("GET", vm.pods)["items"]
        assert [pod["metadata"]["uid"] for pod in pods] == [vm.first["metadata"]["uid"]]
        assert kvplace.ledger("grow-alone") == before


def test_growth_that_fits_on_no_other_node_is_an_event_with_numbers_and_the_vm_keeps_its_cores(
    cluster: ControlPlane,
    virt: KubeVirt,
    kvplace: Installation,
    nodes: NodesInBackground,
    machine: Topology,
    vm_namespace: str,
) -> None:
    small = two_socket_machine(3)
    nodes.do(nodes.nodes.add(node_shape("grow-large", machine)))
    with described_nodes(kvplace, {"grow-large": machine, "grow-small": small}):
        vm = GrowingVm(cluster, virt, vm_namespace)
        nodes.do(nodes.nodes.add(node_shape("grow-small", small)))
        vm.runs()
        vm.ask_for(8)
        before = kvplace.ledger("grow-large")
        target = vm.migrate()

        events = f"/api/v1/namespaces/{vm_namespace}/events"
        selected = "fieldSelector=involvedObject.kind=VirtualMachineInstance,involvedObject.name=db"
        event = virt.first(f"{events}?{selected}", lambda event: event["reason"] == "DoesNotFit")
        assert "no socket with 8 free CPUs, best 6 on grow-small" in event["message"]
        pod = cluster.request("GET", f"{vm.pods}/{target['metadata']['name']}")
        assert not pod["spec"].get("nodeName")
        assert kvplace.ledger("grow-large") == before
