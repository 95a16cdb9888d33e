"""Plans on a live cluster know what kube-scheduler's own filters state, and which VMs wait already."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import msgspec

from kvplace.core.allocator.allocate import place
from kvplace.core.cluster.planning import VmRequest, plan
from kvplace.core.cpuset import cpus_of
from kvplace.core.free_resources import free_of
from kvplace.core.ledger import Ledger, claim_of
from kvplace.core.placement import Placement
from kvplace.core.refusal import Reason
from kvplace.core.request import Request
from kvplace.core.request_document import PodRequest, write_request
from kvplace.core.scalars import NodeName, PodUid
from kvplace.kube.node_filters import PodDemands, SchedulableNode, demands_of
from kvplace.kube.object_records import LedgerRecord, NodeRecord, PodRecord, TopologyRecord
from kvplace.nodes.cluster_view import cluster_view
from kvplace.nodes.planning_cluster import (
    DemandingPod,
    Evacuation,
    MigratingVmi,
    PlanningCluster,
    evacuation,
    planning_cluster,
)
from kvplace.plan.plan_input import vm_requests_of
from kvplace.plan.plan_report import refused_vms
from tests.nodes.machines import EIGHT

OPEN, CORDONED, TAINTED, BARE = (NodeName(name) for name in ("open", "cordoned", "tainted", "bare"))
TOLERATING: dict[str, Any] = {"tolerations": [{"key": "dedicated", "value": "db"}]}


def scheduled(name: NodeName, **spec: Any) -> SchedulableNode:
    status = {"conditions": [{"type": "Ready", "status": "True"}]}
    document = {"metadata": {"name": name, "labels": {"host": name}}, "spec": spec, "status": status}
    return msgspec.convert(document, SchedulableNode)


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


def test_what_is_left_of_a_deleted_node_is_not_planned_on() -> None:
    planned_on = cluster(objects=OBJECTS[1:])
    assert OPEN not in {node.name for node in planned_on.nodes}
    assert OPEN not in planned_on.closed_to(PodDemands())


def leaving(uid: str, vcpus: int, *, vmi: str = "", **spec: Any) -> tuple[PodRecord, DemandingPod]:
    record, pod = waiting(uid, vcpus, **spec)
    return replace(record, node=OPEN, vmi=vmi, phase="Running"), pod


def evacuated(*pods: tuple[PodRecord, DemandingPod], vmis: tuple[MigratingVmi, ...] = ()) -> Evacuation:
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
    vmis = tuple(msgspec.convert(one, MigratingVmi) for one in (stays, moves))
    found = evacuated(leaving("a", 1, vmi="db"), leaving("b", 1, vmi="web"), leaving("c", 1), vmis=vmis)
    assert found.restarting == {"shop/db": "DisksNotLiveMigratable", "shop/c": "a pod does not migrate"}


def test_a_pod_that_has_ended_needs_no_other_node() -> None:
    record, pod = leaving("a", 1)
    assert not evacuated((replace(record, phase="Succeeded"), pod)).vms
