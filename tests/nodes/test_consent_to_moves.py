"""A plan with moves states which VMs need `kvplace.io/movable` for it, in the words of `explain`."""

from __future__ import annotations

import msgspec

from kvplace.core.cluster.node_choice import Strategy
from kvplace.core.cluster.planning import VmRequest, plan
from kvplace.core.cpuset import cpus_of, mask_of
from kvplace.core.ledger import Ledger, claim_of
from kvplace.core.placement import Placement, PodPlacement
from kvplace.core.request import OnFailure, PinningOptions, Policy, Request, Scope
from kvplace.core.request_json import PodRequest, write_request
from kvplace.core.scalars import CpuId, NodeName, NumaId, PackageId, PodUid
from kvplace.kube.node_filters import PodDemands, SchedulableNode
from kvplace.kube.object_records import LedgerRecord, NodeRecord, PodRecord, TopologyRecord
from kvplace.nodes.cluster_view import agreement_needed, cluster_view
from kvplace.nodes.planning_cluster import PlanningCluster, planning_cluster
from kvplace.plan.plan_documents import plan_document, plan_summary
from tests.nodes.machines import TWO_QUADS

NODE = NodeName("worker")
READY = {"metadata": {"name": NODE}, "status": {"conditions": [{"type": "Ready", "status": "True"}]}}


def halved(*movable: str) -> PlanningCluster:
    """A node with `left` and `right` on one CPU of each of its NUMA nodes of four; these VMs may move."""
    claims, pods = {}, []
    for name, cpu in (("left", 0), ("right", 4)):
        uid = PodUid(name)
        placement = Placement(
            Policy.EXCLUSIVE,
            (CpuId(cpu),),
            mask_of([cpu]),
            mask_of([cpu]),
            numa_nodes=(NumaId(cpu // 4),),
            packages=(PackageId(0),),
        )
        claims[uid] = claim_of(uid, placement, namespace="shop", pod=name, vmi=name)
        request = PodRequest(Request(1, PinningOptions(scope=Scope.ONE_NUMA)), movable=name in movable)
        bound = PodPlacement(uid, NODE, TWO_QUADS.fingerprint, OnFailure.WAIT, placement)
        pods.append(
            PodRecord(
                "shop", name, uid, NODE, "Running",
                request=write_request(request), placement=bound.to_json(), vmi=name,
            )
        )  # fmt: skip
    owners = {cpu: uid for uid, claim in claims.items() for cpu in cpus_of(claim.owned)}
    view = cluster_view(
        [NodeRecord(NODE, "1")],
        [TopologyRecord(NODE, TWO_QUADS)],
        [LedgerRecord(NODE, Ledger(owners, claims), "1")],
        pods,
    )
    return planning_cluster(view, [msgspec.convert(READY, SchedulableNode)])


def test_a_plan_names_the_vms_whose_owners_must_agree_to_its_moves() -> None:
    for movable in ((), ("left", "right")):
        there = halved(*movable)
        wanted = [
            VmRequest("db", Request(4, PinningOptions(scope=Scope.ONE_NUMA)), there.closed_to(PodDemands()))
        ]
        found = plan(there.nodes, wanted, Strategy.PACK, make_room=True)
        (moved,) = (one.move.id for one in found.moves)
        need_movable = there.need_movable([moved])
        sentences = [sentence for _, sentence in plan_summary(found, need_movable)]
        document = plan_document(found, there.nodes, wanted, need_movable)
        if movable:
            assert (need_movable, "needMovable" in document) == ((), False)
        else:
            assert document["needMovable"] == [moved]
            assert f'for that {moved} needs kvplace.io/movable: "true"' in sentences


def test_several_vms_are_named_in_one_clause() -> None:
    assert agreement_needed([]) == ""
    assert agreement_needed(["b", "a", "b"]) == 'for that a and b need kvplace.io/movable: "true"'
    assert agreement_needed("abc") == 'for that a, b and c need kvplace.io/movable: "true"'
