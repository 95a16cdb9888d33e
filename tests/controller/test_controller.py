"""Cores are released when QEMU is gone, not earlier, and always; what was lost comes back."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from itertools import pairwise

import pytest

from kvplace.controller.controller import ControllerSettings
from kvplace.controller.reconciler import OVERLAPS
from kvplace.core.cpuset import cpus_of, mask_of
from kvplace.core.errors import Forbidden, Unavailable
from kvplace.core.ledger import Ledger, LedgerChange
from kvplace.core.node_topology import Enforcement
from kvplace.core.placement import Placement, PodPlacement
from kvplace.core.request import NumaMemory, OnFailure, Policy
from kvplace.core.request_json import PodRequest, write_request
from kvplace.core.scalars import NO_CPUS, NodeName, NumaId, PodUid
from kvplace.core.well_known_names import PLACEMENT
from kvplace.kube.events import EventReason, pod_reference
from kvplace.kube.object_records import PodRecord
from kvplace.kube.watches import PODS
from tests.controller.replicas import asking_pod, bound_vm, replica, report_running
from tests.core.requests import request_with
from tests.kube.faults import FaultScript, Operation
from tests.kube.faulty_cluster import FaultyCluster
from tests.nodes.machines import EIGHT


async def test_a_pod_that_is_bound_as_claimed_costs_one_ledger_write(cluster: FaultyCluster) -> None:
    async with replica(cluster) as one:
        assert await one.bind(asking_pod(cluster, "vm"), "n1") == ""
        cluster.change_pod("default", "vm", phase="Running")
        await asyncio.sleep(100.0)
        assert one.cache.ledgers.writes == 1


@pytest.mark.parametrize("phase", ["Succeeded", "Failed"])
async def test_the_cores_of_a_pod_that_has_ended_are_released(
    cluster: FaultyCluster, phase: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with bound_vm(cluster) as (one, _pod):
        cluster.change_pod("default", "vm", phase=phase)
        await one.until(lambda: not one.claims())
        assert "the claim of a pod that was never bound is released" not in caplog.messages


async def test_cores_are_released_at_once_on_a_node_that_is_checked_later(cluster: FaultyCluster) -> None:
    patient = ControllerSettings(compare_s=3600.0, round_s=3600.0)
    async with replica(cluster, settings=patient) as one:
        ends, stays = asking_pod(cluster, "ends"), asking_pod(cluster, "stays")
        for pod in (ends, stays):
            assert await one.bind(pod, "n1") == ""
        cluster.change_pod("default", "ends", phase="Succeeded")
        async with asyncio.timeout(1.0):
            await one.until(lambda: set(one.claims()) == {stays.uid})


async def test_a_pod_that_ends_before_its_claim_is_compared_is_released_at_once(
    cluster: FaultyCluster,
) -> None:
    patient = ControllerSettings(compare_s=3600.0, round_s=3600.0)
    async with bound_vm(cluster, settings=patient) as (one, pod):
        await one.until(lambda: one.cache.pods.records[pod.uid].node)
        await one.controller.reconciler.reconcile(NodeName("n1"))
        cluster.delete_pod("default", "vm", force=True)
        async with asyncio.timeout(1.0):
            await one.until(lambda: not one.claims())


async def test_cores_stay_while_a_deleted_pods_qemu_still_runs_and_are_released_when_it_ends(
    cluster: FaultyCluster,
) -> None:
    async with bound_vm(cluster) as (one, pod):
        cluster.change_pod("default", "vm", phase="Running")
        cluster.delete_pod("default", "vm")
        await one.until(lambda: one.cache.pods.records[pod.uid].deleting)
        await one.controller.reconciler.reconcile(NodeName("n1"))
        assert pod.uid in one.claims()

        cluster.change_pod("default", "vm", compute_terminated=True)
        await one.until(lambda: not one.claims())


async def test_the_cores_of_a_pod_that_is_gone_are_released_at_once(cluster: FaultyCluster) -> None:
    async with bound_vm(cluster) as (one, _pod):
        cluster.delete_pod("default", "vm", force=True)
        await one.until(lambda: not one.claims())


async def test_the_cores_of_a_pod_deleted_by_force_are_released_when_the_agent_no_longer_sees_its_container(
    cluster: FaultyCluster,
) -> None:
    async with bound_vm(cluster) as (one, pod):
        report_running(cluster, pod)
        cluster.delete_pod("default", "vm", force=True)
        await asyncio.sleep(120)
        assert pod.uid in one.claims()
        cluster.put_topology("n1", EIGHT, enforcement=Enforcement.NRI, pods=[])
        async with asyncio.timeout(1.0):
            await one.until(lambda: not one.claims())


async def test_the_cores_of_a_pod_deleted_by_force_stay_while_it_runs_on_a_machine_that_cannot_be_read(
    cluster: FaultyCluster,
) -> None:
    """A person has written its NodeTopology; after it is fixed its cores must not be another VM's."""
    async with bound_vm(cluster) as (one, pod):
        report_running(cluster, pod)
        cluster.put_topology_document("n1", {"cores": "x"})
        cluster.delete_pod("default", "vm", force=True)
        await asyncio.sleep(120)
        assert pod.uid in one.claims()


@pytest.mark.parametrize(("is_heard", "seconds"), [(True, 20), (False, 30)])
async def test_a_pod_that_is_gone_before_its_agent_reported_it_keeps_its_cores_longer_if_the_agent_is_quiet(
    cluster: FaultyCluster, is_heard: bool, seconds: float
) -> None:
    async with replica(cluster) as one:
        cluster.put_topology("n1", EIGHT, enforcement=Enforcement.NRI)
        pod = asking_pod(cluster, "vm")
        await one.bind(pod, "n1")
        cluster.delete_pod("default", "vm", force=True)
        await asyncio.sleep(5)
        if is_heard:
            cluster.put_topology("n1", EIGHT, enforcement=Enforcement.NRI)
        await asyncio.sleep(seconds - 6)
        assert pod.uid in one.claims()
        await asyncio.sleep(3)
        assert not one.claims()


async def test_the_cores_of_a_node_that_is_gone_are_released_with_the_last_report_of_its_agent(
    cluster: FaultyCluster,
) -> None:
    """Until its NodeTopology is collected the machine may register again, with its containers."""
    async with bound_vm(cluster) as (one, pod):
        report_running(cluster, pod)
        cluster.delete_pod("default", "vm", force=True)
        cluster.delete_node("n1")
        await asyncio.sleep(40)
        assert pod.uid in one.claims()
        cluster.delete_topology("n1")
        await one.until(lambda: not one.claims())


async def test_a_pod_that_ended_while_no_client_was_there_is_released_after_the_restart(
    cluster: FaultyCluster,
) -> None:
    async with replica(cluster, controller=False) as before:
        pod = asking_pod(cluster, "vm")
        await before.bind(pod, "n1")
    cluster.delete_pod("default", "vm", force=True)

    async with replica(cluster) as after:
        await after.until(lambda: not after.claims())


async def test_a_pod_that_ended_just_before_a_restart_is_released_long_before_the_next_round(
    cluster: FaultyCluster,
) -> None:
    async with replica(cluster, controller=False) as before:
        await before.bind(asking_pod(cluster, "vm"), "n1")
    cluster.delete_pod("default", "vm", force=True)

    async with replica(cluster, settings=ControllerSettings(round_s=3600.0)) as after:
        assert after.claims()
        await after.until(lambda: not after.claims())


async def test_a_claim_without_a_binding_is_kept_while_its_bind_may_still_come(
    cluster: FaultyCluster,
) -> None:
    async with replica(cluster) as one:
        pod = asking_pod(cluster, "vm")
        cluster.faults.fail(Operation.BIND, Unavailable("no answer"), times=50)
        assert "no answer" in await one.bind(pod, "n1")
        cluster.faults.fail(Operation.READ_POD, Unavailable("the pod need not be read yet"))
        await one.controller.reconciler.reconcile(NodeName("n1"))
        assert pod.uid in one.claims()


async def test_a_claim_without_a_binding_is_released_when_the_pod_is_read_and_unbound(
    cluster: FaultyCluster,
) -> None:
    async with replica(cluster, controller=False) as before:
        pod = asking_pod(cluster, "vm")
        cluster.faults.fail(Operation.BIND, Unavailable("no answer"), times=50)
        await before.bind(pod, "n1")
        assert pod.uid in before.claims()
    cluster.faults = FaultScript()

    async with replica(cluster) as after:
        await after.until(lambda: not after.claims())


async def test_a_stale_cache_never_releases_the_cores_of_a_bound_pod(
    cluster: FaultyCluster,
) -> None:
    async with (
        replica(cluster, controller=False) as watcher,
        replica(cluster, controller=False) as binder,
    ):
        cluster.pause_watches(PODS)
        pod = asking_pod(cluster, "vm")
        assert await binder.bind(pod, "n1") == ""
        assert watcher.cache.pods.get(pod.uid) is None
        await watcher.until(lambda: watcher.cache.ledgers.current(NodeName("n1")))
        await watcher.controller.reconciler.reconcile(NodeName("n1"))
        await asyncio.sleep(61)
        await watcher.controller.reconciler.reconcile(NodeName("n1"))
        assert cluster.faults.calls[Operation.READ_POD]
        assert pod.uid in watcher.claims()
        cluster.resume_watches(PODS)


async def test_a_lost_ledger_is_rebuilt_from_the_pods_that_are_bound(cluster: FaultyCluster) -> None:
    async with replica(cluster, controller=False) as before:
        pods = [asking_pod(cluster, f"vm{number}") for number in range(3)]
        for pod in pods:
            await before.bind(pod, "n1")
        told = {uid: claim.owned for uid, claim in before.cache.ledger(NodeName("n1")).claims.items()}
    cluster._ledgers.remove("n1")

    async with replica(cluster) as after:
        await after.until(lambda: len(after.claims()) == 3)
        ledger = after.cache.ledger(NodeName("n1"))
        ledger.check()
        assert {uid: claim.owned for uid, claim in ledger.claims.items()} == told


@pytest.mark.parametrize("goes", ["the claim", "the ledger"])
async def test_a_claim_that_a_user_takes_away_from_a_running_pod_is_restored_at_once(
    cluster: FaultyCluster, goes: str
) -> None:
    """No other event reports this: the pod does not change, and the next round is far away."""
    async with replica(cluster, settings=ControllerSettings(round_s=3600.0)) as one:
        await one.bind(asking_pod(cluster, "vm"), "n1")
        await asyncio.sleep(60.0)
        claimed = one.claims()
        if goes == "the claim":
            cluster.put_ledger("n1", Ledger())
        else:
            cluster._ledgers.remove(NodeName("n1"))
        await one.until(lambda: not one.claims())
        await one.until(lambda: one.claims().keys() == claimed.keys())
        assert one.cache.ledger(NodeName("n1")).owned == mask_of(
            cpu for claim in claimed.values() for cpu in cpus_of(claim.owned)
        )


async def test_a_claim_that_a_user_writes_for_a_pod_that_does_not_exist_is_released_before_the_next_round(
    cluster: FaultyCluster,
) -> None:
    async with replica(cluster, settings=ControllerSettings(round_s=3600.0)) as one:
        await one.bind(asking_pod(cluster, "vm"), "n1")
        claims = one.claims()
        await asyncio.sleep(60.0)
        (ours,) = claims.values()
        nobody = replace(ours, uid=PodUid("nobody"), pod="nobody", cpus=NO_CPUS, owned=NO_CPUS)
        stored = one.cache.ledger(NodeName("n1"))
        cluster.put_ledger("n1", stored.after(LedgerChange((nobody,))))
        await one.until(lambda: "nobody" in one.claims())
        await one.until(lambda: "nobody" not in one.claims())
        assert one.claims().keys() == claims.keys()


async def test_a_claim_that_came_back_while_it_was_being_restored_is_left_as_it_is(
    cluster: FaultyCluster,
) -> None:
    async with bound_vm(cluster, controller=False) as (one, pod):
        claims = dict(one.claims())
        await one.until(lambda: one.cache.pods.records[pod.uid].node)
        cluster._ledgers.remove("n1")
        await one.until(lambda: one.cache.ledgers.current(NodeName("n1")) is None)
        reading = cluster.faults.hold(Operation.READ_POD)
        restoring = asyncio.create_task(one.controller.reconciler.reconcile(NodeName("n1")))
        await reading.reached.wait()
        cluster.put_ledger("n1", Ledger().after(LedgerChange(tuple(claims.values()))))
        reading.release()
        await restoring
        assert one.claims() == claims


async def test_two_running_pods_on_one_core_are_reported_and_nothing_is_changed(
    cluster: FaultyCluster,
) -> None:
    async with replica(cluster) as one:
        owner = asking_pod(cluster, "owner")
        await one.bind(owner, "n1")
        create_intruder(cluster, owner)
        await one.until(lambda: any(event.reason is EventReason.CORES_OVERLAP for event in cluster.events))
        (event, *_) = [event for event in cluster.events if event.reason is EventReason.CORES_OVERLAP]
        assert (
            event.note
            == f"pod default/intruder runs on CPUs 0-1 of n1, which belong to {owner.uid} in the ledger"
        )
        assert event.regarding == pod_reference("default", "intruder", PodUid("intruder-uid"))
        assert set(one.claims()) == {owner.uid}


async def test_an_overlap_is_counted_once_until_it_ends(
    cluster: FaultyCluster, caplog: pytest.LogCaptureFixture
) -> None:
    async with replica(cluster, controller=False) as one:
        owner = asking_pod(cluster, "owner")
        await one.bind(owner, "n1")
        with_owner = cluster._ledgers.records["n1"].ledger
        intruder = create_intruder(cluster, owner)
        await one.until(lambda: intruder.uid in one.cache.pods.records)

        async def reconciled(ledger: Ledger) -> None:
            for stored in (Ledger(), ledger):
                cluster.put_ledger("n1", stored)
            await one.until(lambda: one.cache.ledger(NodeName("n1")) == ledger)
            await one.controller.reconciler.reconcile(NodeName("n1"))

        before = OVERLAPS._value.get()
        for _ in range(2):
            await reconciled(with_owner)
        assert OVERLAPS._value.get() == before + 1
        cluster.delete_pod("default", "owner", force=True)
        await one.until(lambda: owner.uid not in one.cache.pods.records)
        await reconciled(Ledger())
        assert set(one.claims()) == {intruder.uid}
        await reconciled(with_owner)
        assert OVERLAPS._value.get() == before + 2
        errors = [record for record in caplog.records if record.levelname == "ERROR"]
        assert [(record.__dict__["node"], record.__dict__["uid"]) for record in errors] == [
            ("n1", intruder.uid)
        ] * 2


async def test_cpus_that_the_kubelet_takes_although_a_pod_owns_them_are_reported_until_it_gives_them_back(
    cluster: FaultyCluster,
) -> None:
    async with replica(cluster) as one:
        owner = asking_pod(cluster, "owner")
        await one.bind(owner, "n1")
        counted = OVERLAPS._value.get()
        cluster.put_topology("n1", EIGHT, kubelet_cpus=0b10)
        await one.until(lambda: any(event.reason is EventReason.CORES_OVERLAP for event in cluster.events))
        (event,) = [event for event in cluster.events if event.reason is EventReason.CORES_OVERLAP]
        assert event.note == "the kubelet of n1 has allocated CPUs 1, which pod default/owner owns"
        assert event.regarding == pod_reference("default", "owner", owner.uid)
        assert set(one.claims()) == {owner.uid}
        assert OVERLAPS._value.get() == counted + 1

        cluster.put_topology("n1", EIGHT)
        await one.until(lambda: owner.uid not in one.controller.reconciler._lasting)
        cluster.put_topology("n1", EIGHT, kubelet_cpus=0b10)
        await one.until(lambda: OVERLAPS._value.get() == counted + 2)


async def test_two_replicas_that_reconcile_one_node_leave_it_empty(cluster: FaultyCluster) -> None:
    async with replica(cluster) as one, replica(cluster) as other:
        pods = [asking_pod(cluster, f"vm{number}") for number in range(4)]
        for pod, binder in zip(pods, (one, other, one, other), strict=True):
            assert await binder.bind(pod, "n1") == ""
        assert one.cache.ledger(NodeName("n1")).owned | other.cache.ledger(NodeName("n1")).owned == mask_of(
            range(8)
        )
        for pod in pods:
            cluster.delete_pod("default", pod.name, force=True)
        await one.until(lambda: not one.claims())
        record = cluster._ledgers.records["n1"]
        assert record.ledger == Ledger({}, {})


async def test_the_releases_of_a_node_go_together_in_few_writes(cluster: FaultyCluster) -> None:
    async with replica(cluster) as one:
        pods = [asking_pod(cluster, f"vm{number}", vcpus=1) for number in range(8)]
        for pod in pods:
            await one.bind(pod, "n1")
        before = one.cache.ledgers.writes
        for pod in pods:
            cluster.delete_pod("default", pod.name, force=True)
        await one.until(lambda: not one.claims())
        assert one.cache.ledgers.writes - before <= 2


async def test_a_ledger_write_without_an_answer_is_repeated(cluster: FaultyCluster) -> None:
    async with bound_vm(cluster) as (one, _pod):
        cluster.faults.fail(Operation.WRITE_LEDGER, Unavailable("away"), times=3)
        cluster.delete_pod("default", "vm", force=True)
        await one.until(lambda: not one.claims())


async def test_a_node_that_waits_for_the_api_server_holds_up_no_other(cluster: FaultyCluster) -> None:
    cluster.create_node("n2", topology=EIGHT)
    async with replica(cluster, settings=ControllerSettings(round_s=3600.0)) as one:
        slow, quick = asking_pod(cluster, "slow"), asking_pod(cluster, "quick")
        assert await one.bind(slow, "n1") == ""
        assert await one.bind(quick, "n2") == ""
        await asyncio.sleep(10.0)
        hold = cluster.faults.hold(Operation.READ_POD)
        cluster.delete_pod("default", "slow", force=True)
        await hold.reached.wait()
        cluster.delete_pod("default", "quick", force=True)
        await one.until(lambda: not one.claims("n2"))
        assert set(one.claims("n1")) == {slow.uid}
        hold.release()
        await one.until(lambda: not one.claims("n1"))


async def test_a_round_after_the_first_checks_one_node_after_the_other(cluster: FaultyCluster) -> None:
    for number in range(2, 11):
        cluster.create_node(f"n{number}", topology=EIGHT)
    async with replica(cluster, settings=ControllerSettings(round_s=100.0, spread_s=0.0)) as one:
        for number in range(1, 11):
            assert await one.bind(asking_pod(cluster, f"vm{number}"), f"n{number}") == ""
        await asyncio.sleep(30.0)
        moments: list[float] = []
        look = one.controller.reconciler.reconcile

        async def looked(name: NodeName) -> None:
            moments.append(asyncio.get_running_loop().time())
            await look(name)

        one.controller.reconciler.reconcile = looked  # type: ignore[method-assign]
        await asyncio.sleep(162.0)
        assert len(moments) == 10
        assert all(9.0 < after - before < 11.0 for before, after in pairwise(moments))


async def test_a_reconciliation_that_failed_is_tried_again_after_a_second_and_before_the_next_round(
    cluster: FaultyCluster, caplog: pytest.LogCaptureFixture
) -> None:
    denied = Forbidden("the API server denies us update on nodeledgers (no)")
    async with bound_vm(cluster, settings=ControllerSettings(round_s=3600.0)) as (one, pod):
        await asyncio.sleep(10.0)
        cluster.faults.fail(Operation.WRITE_LEDGER, denied, times=3)
        cluster.delete_pod("default", "vm", force=True)
        await asyncio.sleep(2.5)
        assert pod.uid in one.claims()
        await asyncio.sleep(1.5)
        assert one.claims() == {}
    assert caplog.messages.count(f"node n1 is reconciled later: {denied}") == 3


def create_intruder(cluster: FaultyCluster, owner: PodRecord) -> PodRecord:
    """Create a pod that is bound to n1 with the cores of another one."""
    placed = PodPlacement.from_json(cluster.pod_annotations("default", "owner")[PLACEMENT])
    intruder = PodPlacement(
        pod_uid=PodUid("intruder-uid"),
        node=NodeName("n1"),
        topology="",
        on_failure=OnFailure.WAIT,
        placement=Placement(
            policy=Policy.EXCLUSIVE,
            vcpus=placed.placement.vcpus,
            cpus=placed.placement.cpus,
            emulator_cpus=NO_CPUS,
            io_thread_cpus=(),
            numa_nodes=(NumaId(0),),
            numa_memory=NumaMemory.OFF,
            memory={},
            owned=placed.placement.cpus,
        ),
    )
    return cluster.create_pod(
        "intruder",
        uid="intruder-uid",
        request=owner.request,
        node="n1",
        annotations={PLACEMENT: intruder.to_json()},
    )


async def test_the_claim_of_a_pod_that_another_scheduler_bound_to_its_node_is_released(
    cluster: FaultyCluster,
) -> None:
    """It has a node and no placement: a bind of ours, which writes both at once, has not come and cannot."""
    async with replica(cluster) as one:
        bound, pod = asking_pod(cluster, "bound"), asking_pod(cluster, "vm")
        assert await one.bind(bound, "n1") == ""
        claim = replace(one.claims()[bound.uid], uid=pod.uid, pod="vm")
        cluster.delete_pod("default", "bound", force=True)
        await one.until(lambda: not one.claims())
        await one.cache.ledgers.change(NodeName("n1"), lambda _: (LedgerChange(claims=(claim,)), None))
        await cluster.bind("default", "vm", pod.uid, NodeName("n1"), {})
        await one.until(lambda: not one.claims())


async def test_a_plain_pod_whose_container_compute_has_ended_does_not_leave(cluster: FaultyCluster) -> None:
    """Its claim stays as long as it runs, so only its eviction gives its cores to others."""
    async with replica(cluster) as one:
        request = write_request(PodRequest(request_with(2)))
        pod = cluster.create_pod("plain", request=request)
        assert await one.bind(pod, "n1") == ""
        cluster.change_pod("default", "plain", phase="Running", compute_terminated=True)
        await one.until(lambda: one.cache.pods.records[pod.uid].compute_terminated)
        await asyncio.sleep(120)
        assert pod.uid in one.claims()
        assert not one.cache.is_leaving(pod.uid)
