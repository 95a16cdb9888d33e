"""The owner of a running VM edits its annotations; all is real but the node's agent, whose part is played."""

from __future__ import annotations

from typing import Any

import pytest

from harness.control_plane.cluster import MERGE_PATCH, ControlPlane, RequestRefused
from harness.control_plane.hollow_node import NodesInBackground
from harness.control_plane.kubevirt_parts import KubeVirt
from harness.control_plane.watching import wait_for
from harness.kvplace_cluster.installation import Installation, described_nodes
from harness.kvplace_cluster.machines import node_shape
from harness.kvplace_cluster.vms import VMIS, vmi_manifest
from kvplace.core.cpuset import cpus_of
from kvplace.core.placement import PodPlacement
from kvplace.core.request import Policy
from kvplace.core.topology import Topology
from kvplace.core.well_known_names import PLACEMENT

NODE = "edited"
LEDGERS = "/apis/kvplace.io/v1alpha1/nodeledgers"
TOPOLOGY = f"/apis/kvplace.io/v1alpha1/nodetopologies/{NODE}/status"


class EditedVm:
    """A VM that is bound to a node, its owner, and the agent of that node."""

    def __init__(
        self, cluster: ControlPlane, virt: KubeVirt, namespace: str, annotations: dict[str, str]
    ) -> None:
        self._cluster = cluster
        self._vmi = f"/apis/kubevirt.io/v1/namespaces/{namespace}/{VMIS}/vm"
        self._pods = f"/api/v1/namespaces/{namespace}/pods"
        virt.create(VMIS, namespace, vmi_manifest("vm", cores=2, annotations=annotations))
        self._name = virt.launcher_pod(namespace, "vm")["metadata"]["name"]
        self._virt, self._namespace = virt, namespace

    def bound(self) -> dict[str, Any]:
        return wait_for(self._cluster, self._pods, self._name, lambda pod: bool(pod["spec"].get("nodeName")))

    def bind(self) -> None:
        """Bind the pod as the cluster's own scheduler does."""
        target = {"metadata": {"name": self._name}, "target": {"kind": "Node", "name": NODE}}
        self._cluster.request("POST", f"{self._pods}/{self._name}/binding", target)

    def delete(self) -> None:
        self._cluster.request("DELETE", self._vmi)
        self._virt.gone(VMIS, self._namespace, "vm")

    @property
    def uid(self) -> str:
        return str(self.bound()["metadata"]["uid"])

    def edit(self, annotations: dict[str, str | None]) -> dict[str, Any]:
        change = {"metadata": {"annotations": annotations}}
        return self._cluster.request("PATCH", self._vmi, change, content_type=MERGE_PATCH)

    def at_revision(self, number: int) -> PodPlacement:
        """Wait for a revision of the placement."""
        pod = wait_for(
            self._cluster,
            self._pods,
            self._name,
            lambda pod: (
                PLACEMENT in pod["metadata"]["annotations"]
                and PodPlacement.from_json(pod["metadata"]["annotations"][PLACEMENT]).revision == number
            ),
        )
        return PodPlacement.from_json(pod["metadata"]["annotations"][PLACEMENT])

    def agent_reports(self, **report: Any) -> None:
        """Write the node's status as its agent does."""
        pods = [{"uid": self.uid, "running": True, **report}] if report else []
        status = {"status": {"enforcement": "nri", "pods": pods}}
        self._cluster.request("PATCH", TOPOLOGY, status, content_type=MERGE_PATCH)

    def says(self, status: str) -> str:
        """Wait for the condition Relocated and return its message."""
        pod = wait_for(
            self._cluster, self._pods, self._name, lambda pod: _relocated(pod).get("status") == status
        )
        return str(_relocated(pod)["message"])


def _relocated(pod: dict[str, Any]) -> dict[str, Any]:
    conditions = pod.get("status", {}).get("conditions", [])
    return next((one for one in conditions if one["type"] == "kvplace.io/Relocated"), {})


def test_a_running_vm_goes_from_exclusive_to_share_to_none_and_back(
    cluster: ControlPlane,
    virt: KubeVirt,
    kvplace: Installation,
    nodes: NodesInBackground,
    machine: Topology,
    vm_namespace: str,
) -> None:
    nodes.do(nodes.nodes.add(node_shape(NODE, machine)))
    with described_nodes(kvplace, {NODE: machine}):
        vm = EditedVm(cluster, virt, vm_namespace, {"cpu-set": "one-socket"})
        first = vm.at_revision(1).placement
        vm.edit({"kvplace.io/cpu-policy": "share"})
        assert "agent" in vm.says("False")

        vm.agent_reports(revision=1, pinned=True)
        second = vm.at_revision(2).placement
        assert (second.policy, second.cpus) == (Policy.SHARE, first.cpus)
        assert kvplace.ledger(NODE)["owners"] == {str(cpu): vm.uid for cpu in cpus_of(first.owned)}
        vm.agent_reports(revision=2, pinned=True)
        wait_for(cluster, LEDGERS, NODE, lambda ledger: not ledger["spec"]["owners"])
        assert "revision 2" in vm.says("True")

        vm.edit({"kvplace.io/cpu-policy": "none"})
        assert vm.at_revision(3).placement.floats
        vm.agent_reports(revision=3, pinned=True)
        wait_for(cluster, LEDGERS, NODE, lambda ledger: not ledger["spec"]["claims"])

        vm.edit({"kvplace.io/cpu-policy": "exclusive", "cpu-set": "one-numa"})
        fourth = vm.at_revision(4).placement
        vm.agent_reports(revision=4, pinned=True)
        settled = wait_for(
            cluster,
            LEDGERS,
            NODE,
            lambda ledger: "next" not in ledger["spec"]["claims"].get(vm.uid, {"next": {}}),
        )
        assert settled["spec"]["owners"] == {str(cpu): vm.uid for cpu in cpus_of(fourth.owned)}

        with pytest.raises(RequestRefused, match="did you mean 'one-socket'"):
            vm.edit({"cpu-set": "one-sockt"})
        vm.delete()


def test_a_vm_that_asked_to_run_unpinned_gets_cores_while_it_runs(
    cluster: ControlPlane,
    virt: KubeVirt,
    kvplace: Installation,
    nodes: NodesInBackground,
    machine: Topology,
    vm_namespace: str,
) -> None:
    nodes.do(nodes.nodes.add(node_shape(NODE, machine)))
    with described_nodes(kvplace, {NODE: machine}):
        vm = EditedVm(cluster, virt, vm_namespace, {"kvplace.io/cpu-policy": "none"})
        vm.bind()
        assert PLACEMENT not in vm.bound()["metadata"]["annotations"]
        vm.agent_reports(revision=0, pinned=False)
        vm.edit({"kvplace.io/cpu-policy": "exclusive", "cpu-set": "one-numa"})
        placement = vm.at_revision(1).placement
        assert (placement.owned.bit_count(), len(placement.numa_nodes)) == (2, 1)
        compute = vm.bound()["spec"]["containers"][0]
        assert (compute["name"], compute["resources"]["requests"]["cpu"]) == ("compute", "2")
        vm.agent_reports(revision=1, pinned=True)
        assert "revision 1" in vm.says("True")
        vm.delete()
