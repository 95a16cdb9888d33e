"""Plans on a live cluster count the devices that agents report, and the devices that pods will get."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import msgspec
import pytest

from kvplace.core.allocator.allocate import place
from kvplace.core.cluster.planning import VmRequest, plan
from kvplace.core.cpuset import cpus_of
from kvplace.core.free_resources import free_of
from kvplace.core.ledger import Ledger, claim_of
from kvplace.core.node_devices import DeviceReport, NodeDevices, PodDevice, TopologyPolicy
from kvplace.core.placement import Placement, PodPlacement, Reason
from kvplace.core.request import DeviceNuma, OnFailure, PinningOptions, Request, Scope
from kvplace.core.request_json import PodRequest, write_request
from kvplace.core.scalars import NodeName, NumaId, PodUid, ResourceName
from kvplace.kube.object_records import NO_NODE, LedgerRecord, NodeRecord, PodRecord, TopologyRecord
from kvplace.nodes.cluster_view import ClusterView, cluster_view
from kvplace.nodes.planning_cluster import DemandingPod, PlanningCluster, evacuation, planning_cluster
from tests.nodes.machines import TWO, scheduled

VF, BY_DRA = ResourceName("intel.com/vf"), ResourceName("example.com/gpu")
A, B = NodeName("a"), NodeName("b")


def report(*free: int, **pods: int) -> DeviceReport:
    """So many free virtual functions on each NUMA node, and the NUMA node of the one that each pod has."""
    stated = [(VF, NumaId(node), count) for node, count in enumerate(free) if count]
    given = {PodUid(uid): (PodDevice(VF, NumaId(node)),) for uid, node in pods.items()}
    return DeviceReport(NodeDevices.all_free(stated, TopologyPolicy("best-effort")), given)


def request(mode: DeviceNuma = DeviceNuma.REQUIRED, resource: ResourceName = VF) -> Request:
    return Request(2, PinningOptions(scope=Scope.ONE_NUMA, device_numa=mode), devices={resource: 1})


def pod(uid: str, node: NodeName = NO_NODE) -> PodRecord:
    asked = write_request(PodRequest(request()))
    return PodRecord("shop", uid, PodUid(uid), node, request=asked, phase="Running" if node else "Pending")


def view(reports: Mapping[NodeName, DeviceReport | None], *pods: PodRecord) -> ClusterView:
    """Two nodes; a pod that is bound to one has a claim there."""
    answer = place(TWO, free_of(TWO, Ledger()), Request(2))
    assert isinstance(answer, Placement)
    ledgers = []
    for node in reports:
        claims = {one.uid: claim_of(one.uid, answer, pod=one.name) for one in pods if one.node == node}
        owners = {cpu: uid for uid, claim in claims.items() for cpu in cpus_of(claim.owned)}
        ledgers.append(LedgerRecord(node, Ledger(owners, claims), "1"))
    return cluster_view(
        [NodeRecord(node, node) for node in reports],
        [TopologyRecord(node, TWO, devices=one) for node, one in reports.items()],
        ledgers,
        pods,
    )


def planning(seen: ClusterView) -> PlanningCluster:
    demands = [_demands(vm.pod) for vm in seen.vms.values() if not vm.node]
    return planning_cluster(seen, [scheduled(name) for name in seen.nodes], demands)


def _demands(one: PodRecord) -> DemandingPod:
    return msgspec.convert({"metadata": {"uid": one.uid}, "spec": {}}, DemandingPod)


def places(cluster: PlanningCluster, *requests: Request) -> list[tuple[str, tuple[int, ...]]]:
    vms = [VmRequest(f"vm-{number}", one) for number, one in enumerate(requests)]
    return [
        (one.node, one.placement.numa_nodes) for one in plan(cluster.nodes, cluster.counting(vms)).planned
    ]


def test_the_vm_goes_beside_the_only_device_and_the_next_one_fits_nowhere() -> None:
    cluster = planning(view({A: report(0, 0), B: report(0, 1)}))
    assert places(cluster, request(), request()) == [(B, (1,))]


def test_a_pod_that_is_bound_and_has_no_reported_device_takes_one() -> None:
    assert places(planning(view({A: report(0, 1)}, pod("bound", A))), request()) == []
    assert places(planning(view({A: report(0, 1, bound=0)}, pod("bound", A))), request()) == [(A, (1,))]


def test_a_pod_that_waits_takes_its_device_first() -> None:
    cluster = planning(view({A: report(0, 1)}, pod("early")))
    assert cluster.waiting == 1
    assert places(cluster, request()) == []


@pytest.mark.parametrize("mode", DeviceNuma)
def test_devices_that_no_agent_reports_are_allocated_by_kube_scheduler_and_not_counted(
    mode: DeviceNuma,
) -> None:
    cluster = planning(view({A: report(0, 1)}))
    assert len(places(cluster, request(mode, BY_DRA), request(mode, BY_DRA))) == 2


def test_without_any_report_a_vm_that_must_be_beside_its_devices_is_refused_as_in_filter() -> None:
    cluster = planning(view({A: None}))
    assert places(cluster, request(), request(DeviceNuma.PREFERRED)) == [(A, (0,))]


def test_the_vms_of_an_evacuated_node_find_devices_elsewhere_or_none() -> None:
    pods = [pod("one", A), replace(pod("two", A))]
    seen = view({A: report(0, 0, one=0, two=0), B: report(0, 1)}, *pods[:1])
    seen = ClusterView(seen.nodes, {one.uid: replace(seen.vms[pods[0].uid], pod=one) for one in pods})
    nodes = [scheduled(name) for name in (A, B)]
    found = evacuation(seen, A, nodes, [], [_demands(one) for one in pods], [])
    planned = plan(found.elsewhere.nodes, found.vms)
    assert [(one.node, one.placement.numa_nodes) for one in planned.planned] == [(B, (1,))]
    (refused,) = planned.refused
    assert refused.refusals[B].reason is Reason.NOT_ENOUGH_DEVICES


def test_a_running_vm_with_resource_claims_stays_on_its_numa_nodes() -> None:
    answer = place(TWO, free_of(TWO, Ledger()), Request(2))
    assert isinstance(answer, Placement)
    bound = PodPlacement(PodUid("vm"), A, TWO.fingerprint, OnFailure.WAIT, answer)
    asked = write_request(PodRequest(Request(2)))
    vm = PodRecord("shop", "vm", PodUid("vm"), A, request=asked, placement=bound.to_json(), phase="Running")
    claims: tuple[str, ...]
    for claims in ((), ("gpu",)):
        (node,) = planning(view({A: None}, replace(vm, resource_claims=claims))).nodes
        (occupant,) = node.running
        assert occupant.request.pins_memory == bool(claims)
