"""The node's own objects become one state."""

from __future__ import annotations

from dataclasses import replace

from kvplace.agent.node_objects import NodeObjects
from kvplace.agent.node_plan import PodRevisions
from kvplace.core.cpuset import mask_of
from kvplace.core.ledger import Ledger, LedgerChange, claim_of
from kvplace.core.placement import Placement, PodPlacement
from kvplace.core.request import OnFailure, Policy
from kvplace.core.scalars import CpuId, NodeName, PodUid
from kvplace.kube.object_records import LedgerRecord, PodRecord
from kvplace.kube.watches import Apply, Delete
from tests.nodes.machines import EIGHT

NODE = NodeName("worker-1")
UID = PodUid("0b7a5f5e-0000-4000-8000-000000000001")
CPUS = mask_of([CpuId(2), CpuId(3)])
PLACEMENT = PodPlacement(
    UID, NODE, "", OnFailure.WAIT, Placement(Policy.EXCLUSIVE, (CpuId(2), CpuId(3)), CPUS, owned=CPUS)
)
POD = PodRecord("vms", "virt-launcher-a", UID, node=NODE, phase="Running", placement=PLACEMENT.to_json())


def test_a_pod_counts_from_its_placement_until_it_has_ended() -> None:
    own = NodeObjects(NODE, EIGHT)
    own.pods.apply(Apply(POD))
    assert own.state.pods == {UID: PodRevisions(PLACEMENT)}
    own.pods.apply(Apply(replace(POD, phase="Failed")))
    assert own.state.pods == {}
    own.pods.apply(Delete(POD))
    assert own.state.pods == {}


def test_a_pod_that_was_deleted_by_force_counts_as_long_as_its_containers_are_here() -> None:
    own = NodeObjects(NODE, EIGHT)
    calls = []
    own.subscribe(lambda: calls.append(own.state.pods))
    own.pods.apply(Apply(POD))
    own.revisions.succeeded(UID, PLACEMENT)
    own.pods.apply(Delete(POD))
    own.revisions.forget_deleted([UID])
    assert own.state.pods == {UID: PodRevisions(PLACEMENT, 1, PLACEMENT)}
    own.revisions.forget_deleted([])
    assert own.state.pods == {}
    assert calls[-1] == {}
    own.pods.apply(Apply(POD))
    own.revisions.forget_deleted([])
    assert own.state.pods == {UID: PodRevisions(PLACEMENT)}


def test_a_placement_of_another_pod_or_node_or_that_cannot_be_read_does_not_count() -> None:
    own = NodeObjects(NODE, EIGHT)
    for text in (
        replace(PLACEMENT, pod_uid=PodUid("other")).to_json(),
        replace(PLACEMENT, node=NodeName("other")).to_json(),
        "{",
        "",
    ):
        own.pods.apply(Apply(replace(POD, placement=text)))
        assert own.state.pods == {}


def test_listeners_are_called_for_changes_of_the_state_only() -> None:
    own = NodeObjects(NODE, EIGHT)
    calls = []
    own.subscribe(lambda: calls.append(own.state))
    own.pods.apply(Apply(POD))
    assert len(calls) == 1
    own.pods.apply(Apply(replace(POD, resource_version="2")))
    own.machine_changed(EIGHT, own.state.kubelet_cpus, observes_only=False)
    assert len(calls) == 1
    own.machine_changed(EIGHT, mask_of([CpuId(1)]), observes_only=True)
    assert len(calls) == 2
    assert calls[-1].observes_only
    ledger = Ledger().after(LedgerChange(claims=(claim_of(UID, PLACEMENT.placement),)))
    own.ledgers.apply(Apply(LedgerRecord(NODE, ledger, "1")))
    assert len(calls) == 3
    assert calls[-1].ledger.owned == CPUS


def test_the_confirmed_revision_of_a_pod_counts_until_the_pod_has_ended() -> None:
    own = NodeObjects(NODE, EIGHT)
    calls = []
    own.pods.apply(Apply(POD))
    own.subscribe(lambda: calls.append(own.state.pods[UID].confirmed))
    own.revisions.succeeded(UID, PLACEMENT)
    own.revisions.succeeded(UID, PLACEMENT)
    own.revisions.succeeded(UID, replace(PLACEMENT, revision=2))
    assert calls == [1, 2]
    own.pods.apply(Apply(replace(POD, placement=replace(PLACEMENT, revision=3).to_json())))
    assert own.state.pods[UID].confirmed == 2
