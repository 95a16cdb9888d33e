"""Cores come free when QEMU is gone, not earlier, and always; what was lost comes back."""

from __future__ import annotations

import asyncio
from datetime import timedelta

import pytest

from kvplace.controller.controller import ControllerSettings
from kvplace.controller.metrics import OVERLAPS
from kvplace.core.cpuset import mask_of
from kvplace.core.enforcement import Enforcement
from kvplace.core.errors import Forbidden, Unavailable
from kvplace.core.ledger import ClaimState, Ledger, LedgerChange
from kvplace.core.marks import RELEASED_AT
from kvplace.core.placement import PLACEMENT, Placement, PodPlacement
from kvplace.core.request import NumaMemory, OnFailure, Policy
from kvplace.core.scalars import NO_CPUS, NodeName, NumaId, PodUid
from kvplace.kube.events import EventReason, pod_reference
from kvplace.kube.records import PodRecord, PodReport
from kvplace.kube.watches import PODS
from tests.controller.replicas import EPOCH, asking_pod, replica
from tests.kube.faults import FaultScript, Operation
from tests.kube.faulty_cluster import FaultyCluster
from tests.nodes.machines import EIGHT


@pytest.fixture
def cluster() -> FaultyCluster:
    """A cluster of one node."""
    made = FaultyCluster()
    made.create_node("n1", topology=EIGHT)
    return made


async def test_a_claim_is_confirmed_once_its_pod_is_seen_bound(cluster: FaultyCluster) -> None:
    async with replica(cluster) as one:
        pod = asking_pod(cluster, "vm")
        assert await one.bind(pod, "n1") == ""
        await asyncio.sleep(4.5)
        assert one.claims()[pod.uid].state is ClaimState.CLAIMED  # nobody waits for it
        await asyncio.sleep(1.5)
        assert one.claims()[pod.uid].state is ClaimState.BOUND


@pytest.mark.parametrize("phase", ["Succeeded", "Failed"])
async def test_the_cores_of_a_pod_that_has_ended_come_free(
    cluster: FaultyCluster, phase: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with replica(cluster) as one:
        pod = asking_pod(cluster, "vm")
        await one.bind(pod, "n1")
        cluster.change_pod("default", "vm", phase=phase)
        await one.until(lambda: not one.claims())
        assert "the claim of a pod that was never bound is released" not in caplog.messages


async def test_cores_come_free_at_once_while_confirmations_wait(cluster: FaultyCluster) -> None:
    patient = ControllerSettings(confirm_s=3600.0, round_s=3600.0)
    async with replica(cluster, settings=patient) as one:
        ends, stays = asking_pod(cluster, "ends"), asking_pod(cluster, "stays")
        for pod in (ends, stays):
            assert await one.bind(pod, "n1") == ""
        cluster.change_pod("default", "ends", phase="Succeeded")
        async with asyncio.timeout(1.0):
            await one.until(lambda: set(one.claims()) == {stays.uid})


async def test_a_pod_that_ends_before_its_claim_is_confirmed_is_released_at_once(
    cluster: FaultyCluster,
) -> None:
    patient = ControllerSettings(confirm_s=3600.0, round_s=3600.0)
    async with replica(cluster, settings=patient) as one:
        pod = asking_pod(cluster, "vm")
        assert await one.bind(pod, "n1") == ""
        await one.until(lambda: one.cache.pods.records[pod.uid].node)
        await one.controller.reconciler.reconcile(NodeName("n1"))
        cluster.delete_pod("default", "vm", force=True)
        async with asyncio.timeout(1.0):
            await one.until(lambda: not one.claims())


async def test_cores_stay_while_a_deleted_pods_qemu_still_runs_and_come_free_when_it_ends(
    cluster: FaultyCluster,
) -> None:
    async with replica(cluster) as one:
        pod = asking_pod(cluster, "vm")
        await one.bind(pod, "n1")
        cluster.change_pod("default", "vm", phase="Running")
        cluster.delete_pod("default", "vm")
        await one.until(lambda: one.cache.pods.records[pod.uid].deleting)
        await one.controller.reconciler.reconcile(NodeName("n1"))
        assert pod.uid in one.claims()

        cluster.change_pod("default", "vm", compute_terminated=True)
        await one.until(lambda: not one.claims())


async def test_the_cores_of_a_pod_that_is_gone_come_free_at_once(cluster: FaultyCluster) -> None:
    async with replica(cluster) as one:
        pod = asking_pod(cluster, "vm")
        await one.bind(pod, "n1")
        cluster.delete_pod("default", "vm", force=True)
        await one.until(lambda: not one.claims())


async def test_the_cores_of_a_pod_deleted_by_force_come_free_when_the_agent_no_longer_sees_its_container(
    cluster: FaultyCluster,
) -> None:
    async with replica(cluster) as one:
        pod = asking_pod(cluster, "vm")
        await one.bind(pod, "n1")
        running = PodReport(pod.uid, revision=1, pinned=True, running=True)
        cluster.put_topology("n1", EIGHT, enforcement=Enforcement.NRI, pods=[running])
        cluster.delete_pod("default", "vm", force=True)
        await asyncio.sleep(120)
        assert pod.uid in one.claims()
        cluster.put_topology("n1", EIGHT, enforcement=Enforcement.NRI, pods=[])
        async with asyncio.timeout(1.0):
            await one.until(lambda: not one.claims())


async def test_the_cores_of_a_node_that_is_gone_come_free_whatever_its_agent_reported_last(
    cluster: FaultyCluster,
) -> None:
    async with replica(cluster) as one:
        pod = asking_pod(cluster, "vm")
        await one.bind(pod, "n1")
        running = PodReport(pod.uid, revision=1, pinned=True, running=True)
        cluster.put_topology("n1", EIGHT, enforcement=Enforcement.NRI, pods=[running])
        cluster.delete_pod("default", "vm", force=True)
        await asyncio.sleep(40)
        cluster.delete_node("n1")
        await one.until(lambda: not one.claims())


async def test_a_pod_that_ended_while_nobody_was_there_is_released_after_the_restart(
    cluster: FaultyCluster,
) -> None:
    long_ago = EPOCH - timedelta(hours=1)
    async with replica(cluster, controller=False, now=long_ago) as before:
        pod = asking_pod(cluster, "vm")
        await before.bind(pod, "n1")
    cluster.delete_pod("default", "vm", force=True)

    async with replica(cluster) as after:
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
    long_ago = EPOCH - timedelta(hours=1)
    async with replica(cluster, controller=False, now=long_ago) as before:
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
    long_ago = EPOCH - timedelta(hours=1)
    async with (
        replica(cluster, controller=False) as watcher,
        replica(cluster, controller=False, now=long_ago) as binder,
    ):
        cluster.pause_watches(PODS)
        pod = asking_pod(cluster, "vm")
        assert await binder.bind(pod, "n1") == ""
        assert watcher.cache.pods.get(pod.uid) is None
        await watcher.until(lambda: watcher.cache.ledgers.current(NodeName("n1")))
        await watcher.controller.reconciler.reconcile(NodeName("n1"))
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


async def test_a_claim_that_came_back_while_it_was_being_restored_is_left_as_it_is(
    cluster: FaultyCluster,
) -> None:
    async with replica(cluster, controller=False) as one:
        pod = asking_pod(cluster, "vm")
        assert await one.bind(pod, "n1") == ""
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


async def test_the_ledger_of_a_node_that_is_gone_goes_when_its_last_claim_does(
    cluster: FaultyCluster,
) -> None:
    async with replica(cluster) as one:
        pod = asking_pod(cluster, "vm")
        await one.bind(pod, "n1")
        cluster.delete_node("n1")
        await one.until(lambda: "n1" not in one.cache.nodes.records)
        await one.controller.reconciler.reconcile(NodeName("n1"))
        assert pod.uid in one.claims()
        cluster.delete_pod("default", "vm", force=True)
        await one.until(lambda: cluster._ledgers.records.get("n1") is None)


async def test_the_empty_ledger_of_a_node_goes_with_the_node_and_not_only_in_the_next_round(
    cluster: FaultyCluster,
) -> None:
    async with replica(cluster, settings=ControllerSettings(round_s=3600.0)) as one:
        await one.bind(asking_pod(cluster, "vm"), "n1")
        cluster.delete_pod("default", "vm", force=True)
        await asyncio.sleep(5.0)
        assert cluster._ledgers.records
        cluster.delete_node("n1")
        await asyncio.sleep(5.0)
        assert not cluster._ledgers.records


async def test_a_gone_node_keeps_its_ledger_while_a_vm_that_shares_cpus_runs_there(
    cluster: FaultyCluster,
) -> None:
    async with replica(cluster) as one:
        pod = asking_pod(cluster, "vm", policy=Policy.SHARE)
        assert await one.bind(pod, "n1") == ""
        cluster.delete_node("n1")
        await asyncio.sleep(60.0)
        assert set(one.claims()) == {pod.uid}


async def test_a_start_wakes_nobody(cluster: FaultyCluster) -> None:
    asking_pod(cluster, "waiting", vcpus=6)
    async with replica(cluster):
        await asyncio.sleep(10.0)
        assert RELEASED_AT not in cluster.node_annotations("n1")


async def test_many_releases_at_once_wake_the_waiting_pods_once(cluster: FaultyCluster) -> None:
    async with replica(cluster, settings=ControllerSettings(wake_pause_s=60.0)) as one:
        pods = [asking_pod(cluster, f"vm{number}") for number in range(4)]
        for pod in pods:
            await one.bind(pod, "n1")
        waiting = asking_pod(cluster, "waiting", vcpus=8)
        assert (await one.filter(waiting)).names == []
        seen = len(one.cache.nodes.records[NodeName("n1")].resource_version)
        versions = set()
        one.cache.nodes.subscribe(lambda _, node: versions.add(node.resource_version if node else seen))
        for pod in pods:
            cluster.delete_pod("default", pod.name, force=True)
        await one.until(lambda: not one.claims() and RELEASED_AT in cluster.node_annotations("n1"))
        await asyncio.sleep(200.0)
        assert len(versions) == 2  # as it was, and woken once
        assert (await one.filter(waiting)).names == ["n1"]


async def test_nobody_is_woken_when_nobody_waits(cluster: FaultyCluster) -> None:
    async with replica(cluster) as one:
        pod = asking_pod(cluster, "vm")
        await one.bind(pod, "n1")
        await one.until(lambda: one.cache.pods.records[pod.uid].node == "n1")
        cluster.delete_pod("default", "vm", force=True)
        await one.until(lambda: not one.claims())
        assert RELEASED_AT not in cluster.node_annotations("n1")


async def test_a_machine_that_is_described_late_or_anew_wakes_the_waiting_pods(
    cluster: FaultyCluster,
) -> None:
    cluster.create_node("late")
    async with replica(cluster) as one:
        waiting = asking_pod(cluster, "waiting", vcpus=6)
        assert (await one.filter(waiting, "late")).names == []
        woken: list[str] = []
        one.cache.nodes.subscribe(lambda _, node: woken.append(node.name if node else ""))
        woken.clear()  # of what is known already
        for times, (held, names) in enumerate(((0b111, []), (0, ["late"]), (0b11, ["late"])), 1):
            cluster.put_topology("late", EIGHT, kubelet_cpus=held)
            await one.until(lambda times=times: len(woken) >= times)
            assert woken == ["late"] * times
            assert (await one.filter(waiting, "late")).names == names
            cluster.put_topology("late", EIGHT, kubelet_cpus=held)  # a report that says nothing new


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
    async with replica(cluster) as one:
        pod = asking_pod(cluster, "vm")
        await one.bind(pod, "n1")
        cluster.faults.fail(Operation.WRITE_LEDGER, Unavailable("away"), times=3)
        cluster.delete_pod("default", "vm", force=True)
        await one.until(lambda: not one.claims())


async def test_a_round_finds_bound_pods_whose_node_has_no_ledger(cluster: FaultyCluster) -> None:
    """No event says so: the ledger went while everybody was watching, and the pod does not change."""
    settings = ControllerSettings(round_s=30.0)
    async with replica(cluster, settings=settings) as one:
        pod = asking_pod(cluster, "vm")
        assert await one.bind(pod, "n1") == ""
        await asyncio.sleep(10.0)
        cluster._ledgers.remove(NodeName("n1"))
        await asyncio.sleep(10.0)
        assert one.claims() == {}
        await asyncio.sleep(15.0)
        assert set(one.claims()) == {pod.uid}


async def test_a_reconciliation_that_failed_is_tried_again_after_a_second_and_before_the_next_round(
    cluster: FaultyCluster, caplog: pytest.LogCaptureFixture
) -> None:
    denied = Forbidden("the API server denies us patch on nodeledgers (no); check the role in manifests/")
    async with replica(cluster, settings=ControllerSettings(round_s=3600.0)) as one:
        pod = asking_pod(cluster, "vm")
        assert await one.bind(pod, "n1") == ""
        await asyncio.sleep(10.0)
        cluster.faults.fail(Operation.WRITE_LEDGER, denied, times=3)
        cluster.delete_pod("default", "vm", force=True)
        await asyncio.sleep(2.5)
        assert pod.uid in one.claims()
        await asyncio.sleep(1.5)
        assert one.claims() == {}
    assert caplog.messages.count(f"node n1 is reconciled later: {denied}") == 3


async def test_a_ledger_in_which_somebody_claims_while_it_is_deleted_stays(cluster: FaultyCluster) -> None:
    async with replica(cluster, controller=False) as one, replica(cluster, controller=False) as other:
        pod = asking_pod(cluster, "vm")
        assert await one.bind(pod, "n1") == ""
        cluster.delete_pod("default", "vm", force=True)
        await asyncio.sleep(15.0)
        await one.controller.reconciler.reconcile(NodeName("n1"))
        assert one.claims() == {}
        cluster.delete_node("n1")
        await one.until(lambda: "n1" not in one.cache.nodes.records)
        deleting = cluster.faults.hold(Operation.DELETE_LEDGER)
        reconciling = asyncio.create_task(one.controller.reconciler.reconcile(NodeName("n1")))
        await deleting.reached.wait()
        cluster.create_node("n1", topology=EIGHT)
        await other.until(lambda: "n1" in other.cache.nodes.records)
        again = asking_pod(cluster, "again")
        assert await other.bind(again, "n1") == ""
        deleting.release()
        await reconciling
        assert set(one.claims()) == {again.uid}


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
