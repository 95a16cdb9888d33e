"""Plans on a live cluster know what kube-scheduler's own filters state, and which VMs wait already."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from kvplace.core.allocator.allocate import place
from kvplace.core.cluster.planning import VmRequest, plan
from kvplace.core.cpuset import cpus_of, mask_of
from kvplace.core.free_resources import free_of
from kvplace.core.ledger import Claim, Ledger, Relocation, claim_of
from kvplace.core.node_topology import Enforcement
from kvplace.core.placement import Placement, PodPlacement, Reason
from kvplace.core.request import OnFailure, PinningOptions, Policy, Request, Scope
from kvplace.core.request_json import PodRequest, write_request
from kvplace.core.scalars import CpuMask, NodeName, PodUid
from kvplace.kube.node_filters import PodDemands, RunningVmi, SchedulableNode, demands_of
from kvplace.kube.object_records import LedgerRecord, NodeRecord, PodRecord, TopologyRecord
from kvplace.nodes.cluster_view import ClusterView, cluster_view
from kvplace.nodes.node_machine import NodeSnapshot
from kvplace.nodes.planning_cluster import (
    DemandingPod,
    Evacuation,
    PlanningCluster,
    evacuation,
    planning_cluster,
    planning_nodes,
)
from kvplace.plan.plan_documents import refused_vms, vm_requests_of
from tests.nodes.machines import EIGHT, TWO, scheduled

OPEN, CORDONED, TAINTED, BARE = (NodeName(name) for name in ("open", "cordoned", "tainted", "bare"))
TOLERATING: dict[str, Any] = {"tolerations": [{"key": "dedicated", "value": "db"}]}


OBJECTS = (
    scheduled(OPEN),
    scheduled(CORDONED, unschedulable=True),
    scheduled(TAINTED, taints=[{"key": "dedicated", "value": "db", "effect": "NoSchedule"}]),
    scheduled(BARE),
)


def waiting(uid: str, vcpus: int, priority: int = 0, **spec: Any) -> tuple[PodRecord, DemandingPod]:
    request = write_request(PodRequest(Request(vcpus)))
    record = PodRecord("shop", uid, PodUid(uid), request=request, priority=priority)
    return record, msgspec.convert({"metadata": {"uid": uid}, "spec": spec}, DemandingPod)


def cluster(
    *pods: tuple[PodRecord, DemandingPod],
    ledgers: tuple[LedgerRecord, ...] = (),
    objects: tuple[SchedulableNode, ...] = OBJECTS,
) -> PlanningCluster:
    view = cluster_view(
        [NodeRecord(NodeName(one.metadata.name), one.metadata.name) for one in objects],
        [TopologyRecord(name, EIGHT) for name in (OPEN, CORDONED, TAINTED)],
        ledgers,
        [record for record, _ in pods],
    )
    return planning_cluster(view, objects, [pod for _, pod in pods])


def test_a_refusal_counts_the_nodes_that_each_filter_excludes_in_the_words_of_explain() -> None:
    planned_on = cluster()
    closed = planned_on.closed_to(PodDemands())
    found = plan(planned_on.nodes, [VmRequest("a", Request(9), closed)])
    (group,) = refused_vms(found)
    summary = sorted(group.reasons.summary.split("; "))
    assert summary.pop(1).endswith("best 8 on open socket 0")
    assert summary == [
        "1 node: neither a NodeTopology object nor a cpu-map annotation describes the node",
        "1 node: the node is cordoned (spec.unschedulable)",
        "1 node: the taint dedicated=db:NoSchedule is not tolerated",
    ]


def test_vms_go_only_where_their_template_lets_them() -> None:
    planned_on = cluster()
    tolerating = planned_on.closed_to(demands_of(TOLERATING, "spec"))
    assert set(tolerating) == {CORDONED, BARE}
    selecting = planned_on.closed_to(demands_of({"nodeSelector": {"host": "tainted"}, **TOLERATING}, "spec"))
    assert selecting[OPEN].message == "the node does not have the label host=tainted"
    assert selecting[OPEN].reason is Reason.NODE_FILTERED
    vms = [
        VmRequest("any", Request(8), planned_on.closed_to(PodDemands())),
        VmRequest("db", Request(8), selecting),
    ]
    found = plan(planned_on.nodes, vms)
    assert {vm.id: vm.node for vm in found.planned} == {"any": OPEN, "db": TAINTED}


def test_requests_go_where_their_demands_let_them() -> None:
    planned_on = cluster()
    affinity = {"key": "host", "operator": "In", "values": ["open"]}
    terms = [{"matchExpressions": [affinity]}]
    required = {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": terms}}
    asked = [
        {"id": "db", "vcpus": 8, "nodeSelector": {"host": "tainted"}}
        | {"tolerations": [{"key": "dedicated", "operator": "Exists"}]},
        {"id": "web", "vcpus": 2, "count": 4, "affinity": {"nodeAffinity": required}},
        {"id": "moon", "vcpus": 1, "nodeSelector": {"host": "moon"}},
    ]
    lines = "\n".join(map(json.dumps, asked))
    vms = vm_requests_of(lines, "vms.jsonl", closed_to=planned_on.closed_to)
    found = plan(planned_on.nodes, vms)
    places = {vm.id: vm.node for vm in found.planned}
    assert places == {"db": TAINTED, **dict.fromkeys(("web-01", "web-02", "web-03", "web-04"), OPEN)}
    (refused,) = refused_vms(found)
    assert "2 nodes: the node does not have the label host=moon" in refused.reasons.summary.replace(
        "1 nodes", ""
    )


def test_vms_that_wait_already_come_first_where_they_may_go() -> None:
    planned_on = cluster(
        waiting("early", 6), waiting("db", 8, **TOLERATING, nodeSelector={"host": "tainted"})
    )
    assert planned_on.waiting == 2
    assert planned_on.notes == ("2 VMs that wait already came first",)
    free = {node.name: node.free.cpus.bit_count() for node in planned_on.nodes}
    assert free == {OPEN: 2, CORDONED: 8, TAINTED: 0}


def test_of_the_vms_that_wait_those_of_higher_priority_come_first() -> None:
    planned_on = cluster(waiting("early", 4), waiting("wide", 4), waiting("urgent", 8, priority=1000))
    (taken,) = (node for node in planned_on.nodes if node.name == OPEN)
    assert [vm.id for vm in taken.running] == ["shop/urgent (waiting)"]
    assert planned_on.waiting == 1


def test_a_vm_that_waits_and_fits_nowhere_takes_nothing() -> None:
    planned_on = cluster(waiting("large", 9), waiting("elsewhere", 1, nodeSelector={"host": "mars"}))
    assert (planned_on.waiting, planned_on.notes) == (0, ())


def test_a_vm_that_is_being_bound_is_counted_once() -> None:
    uid = PodUid("bound")
    placement = place(EIGHT, free_of(EIGHT, Ledger(), []), Request(6))
    assert isinstance(placement, Placement)
    claim = claim_of(uid, placement)
    ledger = LedgerRecord(OPEN, Ledger(dict.fromkeys(cpus_of(claim.owned), uid), {uid: claim}), "1")
    planned_on = cluster(waiting("bound", 6), ledgers=(ledger,))
    assert planned_on.waiting == 0
    assert {node.name: node.free.cpus.bit_count() for node in planned_on.nodes}[OPEN] == 2


def test_the_remains_of_a_deleted_node_are_not_planned_on() -> None:
    planned_on = cluster(objects=OBJECTS[1:])
    assert OPEN not in {node.name for node in planned_on.nodes}
    assert OPEN not in planned_on.closed_to(PodDemands())


def leaving(uid: str, vcpus: int, *, vmi: str = "", **spec: Any) -> tuple[PodRecord, DemandingPod]:
    record, pod = waiting(uid, vcpus, **spec)
    return replace(record, node=OPEN, vmi=vmi, phase="Running"), pod


def evacuated(*pods: tuple[PodRecord, DemandingPod], vmis: tuple[RunningVmi, ...] = ()) -> Evacuation:
    objects = (*OBJECTS[:1], scheduled(CORDONED), *OBJECTS[2:])
    view = cluster_view(
        [NodeRecord(NodeName(one.metadata.name), one.metadata.name) for one in objects],
        [TopologyRecord(name, EIGHT) for name in (OPEN, CORDONED, TAINTED)],
        (),
        [record for record, _ in pods],
    )
    waits = [pod for record, pod in pods if not record.node]
    return evacuation(view, OPEN, objects, waits, [pod for record, pod in pods if record.node], vmis)


def test_the_vms_of_a_node_are_planned_on_the_other_nodes_that_their_pods_may_use() -> None:
    found = evacuated(leaving("a", 6), leaving("b", 8, **TOLERATING), leaving("c", 6))
    planned = plan(found.elsewhere.nodes, found.vms)
    assert {vm.id: vm.node for vm in planned.planned} == {"shop/a": CORDONED, "shop/b": TAINTED}
    (refused,) = planned.refused
    assert refused.id == "shop/c"
    assert OPEN not in refused.refusals


def test_a_vm_that_waits_already_takes_its_room_before_an_evacuation() -> None:
    found = evacuated(waiting("early", 6), leaving("a", 6))
    assert found.elsewhere.waiting == 1
    assert [vm.id for vm in found.vms] == ["shop/a"]
    assert not plan(found.elsewhere.nodes, found.vms).planned


def test_vms_that_cannot_migrate_and_pods_are_named_with_the_reason() -> None:
    condition = {"type": "LiveMigratable", "status": "False", "reason": "DisksNotLiveMigratable"}
    stays = {"metadata": {"name": "db", "namespace": "shop"}, "status": {"conditions": [condition]}}
    moves = {"metadata": {"name": "web", "namespace": "shop"}, "status": {}}
    vmis = tuple(msgspec.convert(one, RunningVmi) for one in (stays, moves))
    found = evacuated(leaving("a", 1, vmi="db"), leaving("b", 1, vmi="web"), leaving("c", 1), vmis=vmis)
    assert found.restarting == {"shop/db": "DisksNotLiveMigratable", "shop/c": "a pod does not migrate"}


def test_a_pod_that_has_ended_needs_no_other_node() -> None:
    record, pod = leaving("a", 1)
    assert not evacuated((replace(record, phase="Succeeded"), pod)).vms


NODE = NodeName("worker")
REQUESTS = st.builds(
    Request,
    st.integers(1, 4),
    st.builds(
        PinningOptions,
        scope=st.sampled_from(Scope),
        policy=st.sampled_from([Policy.EXCLUSIVE, Policy.SHARE, Policy.NUMA, Policy.IMMOVABLE]),
    ),
    memory=st.sampled_from([0, 1 << 30]),
)


def seen(
    requests: list[Request], *, kubelet_cpus: CpuMask, enforcement: Enforcement, pods_are_read: bool
) -> ClusterView:
    """Place VMs one after the other, as `serve` does, and return what is then seen of the cluster."""
    record = TopologyRecord(NODE, TWO, kubelet_cpus=kubelet_cpus, enforcement=enforcement)
    claims: dict[PodUid, Claim] = {}
    pods: list[PodRecord] = []

    def view() -> ClusterView:
        owners = {cpu: uid for uid, claim in claims.items() for cpu in cpus_of(claim.owned)}
        ledger = LedgerRecord(NODE, Ledger(owners, claims), "1")
        return cluster_view([NodeRecord(NODE, "n")], [record], [ledger], pods if pods_are_read else [])

    for number, request in enumerate(requests):
        snapshot = view().nodes[NODE].snapshot
        assert isinstance(snapshot, NodeSnapshot)
        placement = place(snapshot.machine.topology, snapshot.free, request)
        if not isinstance(placement, Placement):
            continue
        uid = PodUid(f"uid-{number}")
        claims[uid] = claim_of(uid, placement, namespace="shop", pod=f"launcher-{number}", vmi=f"vm-{number}")
        bound = PodPlacement(uid, NODE, TWO.fingerprint, OnFailure.WAIT, placement)
        asked = write_request(PodRequest(request))
        pods.append(
            PodRecord("shop", f"launcher-{number}", uid, NODE, request=asked, placement=bound.to_json())
        )
    return view()


@given(
    st.lists(REQUESTS, max_size=5),
    st.sampled_from([0, 0b11, 0b11 << 8]),
    st.sampled_from(Enforcement),
    st.booleans(),
)
def test_a_plan_finds_the_same_cpus_free_as_the_scheduler(
    requests: list[Request], kubelet_cpus: int, enforcement: Enforcement, pods_are_read: bool
) -> None:
    view = seen(
        requests,
        kubelet_cpus=CpuMask(kubelet_cpus),
        enforcement=enforcement,
        pods_are_read=pods_are_read,
    )
    (node,) = planning_nodes(view)
    snapshot = view.nodes[NODE].snapshot
    assert isinstance(snapshot, NodeSnapshot)
    assert (node.free, node.topology) == (snapshot.free, snapshot.machine.topology)


def test_running_vms_keep_their_requests_and_are_named_by_namespace_and_name() -> None:
    request = Request(2, PinningOptions(scope=Scope.ONE_NUMA))
    view = seen([request], kubelet_cpus=CpuMask(0), enforcement=Enforcement.NONE, pods_are_read=True)
    (running,) = planning_nodes(view)[0].running
    assert (running.id, running.request) == ("shop/vm-0", request)


def test_a_vm_that_is_getting_other_cores_is_not_moved_by_a_plan() -> None:
    view = seen([Request(2)], kubelet_cpus=CpuMask(0), enforcement=Enforcement.NONE, pods_are_read=True)
    node, (vm,) = view.nodes[NODE], tuple(view.vms.values())
    assert vm.placement is not None
    assert vm.claim is not None
    assert node.ledger_record is not None
    both = replace(
        vm.claim,
        cpus=CpuMask(vm.claim.cpus | mask_of([7])),
        owned=CpuMask(vm.claim.owned | mask_of([7])),
        relocation=Relocation(vm.placement),
    )
    owners = dict.fromkeys(cpus_of(both.owned), both.uid)
    changed = replace(
        node, ledger_record=replace(node.ledger_record, ledger=Ledger(owners, {both.uid: both}))
    )
    (running,) = planning_nodes(ClusterView({NODE: changed}, view.vms))[0].running
    assert running.request.options.policy is Policy.IMMOVABLE
    assert running.placement.owned == both.owned


def test_nodes_that_cannot_be_used_are_left_out() -> None:
    assert planning_nodes(cluster_view([NodeRecord(NODE, "n")], [], [], [])) == ()
