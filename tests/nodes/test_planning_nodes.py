"""Plans on a live cluster see free exactly what the scheduler sees."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from kvplace.core.allocator.allocate import place
from kvplace.core.cpuset import cpus_of, mask_of
from kvplace.core.enforcement import Enforcement
from kvplace.core.ledger import Claim, Ledger, Relocation, claim_of
from kvplace.core.placement import Placement, PodPlacement
from kvplace.core.request import OnFailure, PinningOptions, Policy, Request, Scope
from kvplace.core.request_document import PodRequest, write_request
from kvplace.core.scalars import CpuMask, NodeName, PodUid
from kvplace.kube.object_records import LedgerRecord, NodeRecord, PodRecord, TopologyRecord
from kvplace.nodes.cluster_view import ClusterView, cluster_view
from kvplace.nodes.node_machine import NodeSnapshot
from kvplace.nodes.planning_nodes import planning_nodes
from tests.nodes.machines import TWO

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
def test_a_plan_finds_free_what_the_scheduler_finds_free(
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
    assert (node.free, node.topology.allocatable) == (snapshot.free, snapshot.machine.allocatable)


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
