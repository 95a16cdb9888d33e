"""The controller beside binds, other replicas and failures: nothing is freed too early or twice."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import replace
from datetime import datetime, timedelta
from random import Random

import pytest

from kvplace.controller.controller import ControllerSettings
from kvplace.controller.reconciler import RELEASES
from kvplace.core.cpuset import mask_of
from kvplace.core.errors import Forbidden, Unavailable
from kvplace.core.ledger import Ledger, LedgerChange
from kvplace.core.placement import PodPlacement
from kvplace.core.scalars import CpuMask, NodeName, PodUid
from kvplace.core.well_known_names import PLACEMENT, RELEASED_AT
from kvplace.kube.events import EventReason
from kvplace.kube.object_records import PodRecord
from kvplace.kube.watches import LEDGERS, PODS
from kvplace.machines.server_types import read_machine
from tests.controller.replicas import EPOCH, Replica, asking_pod, bound_vm, replica
from tests.kube.example_claims import claim, taking
from tests.kube.faults import FaultScript, Moment, Operation
from tests.kube.faulty_cluster import FaultyCluster
from tests.nodes.machines import EIGHT

STILL = ControllerSettings(round_s=3600.0)


@pytest.fixture
def cluster() -> FaultyCluster:
    """Two nodes of eight CPUs."""
    made = FaultyCluster()
    for name in ("n1", "n2"):
        made.create_node(name, topology=EIGHT)
    return made


async def unanswered_bind(cluster: FaultyCluster, one: Replica, pod: PodRecord, node: str = "n1") -> None:
    """Claim cores for a pod whose binding then fails to come about."""
    cluster.faults.fail(Operation.BIND, Unavailable("no answer"), times=50)
    assert "no answer" in await one.bind(pod, node)
    cluster.faults = FaultScript()


async def test_a_claim_whose_pod_the_cache_has_not_got_yet_is_kept_for_its_bind(
    cluster: FaultyCluster,
) -> None:
    async with replica(cluster, controller=False) as one:
        cluster.pause_watches(PODS)
        pod = asking_pod(cluster, "vm")
        await unanswered_bind(cluster, one, pod)
        await one.controller.reconciler.reconcile(NodeName("n1"))
        await asyncio.sleep(40)
        await one.controller.reconciler.reconcile(NodeName("n1"))
        assert pod.uid in one.claims()
        await asyncio.sleep(21)
        await one.controller.reconciler.reconcile(NodeName("n1"))
        assert one.claims() == {}
        cluster.resume_watches(PODS)


async def test_a_bind_that_takes_over_an_old_claim_while_it_is_being_released_keeps_it(
    cluster: FaultyCluster,
) -> None:
    async with (
        replica(cluster, controller=False) as one,
        replica(cluster, controller=False) as other,
    ):
        pod = asking_pod(cluster, "vm")
        await unanswered_bind(cluster, one, pod)
        await other.until(lambda: other.cache.ledger(NodeName("n1")).claims)
        await other.controller.reconciler.reconcile(NodeName("n1"))
        await asyncio.sleep(61)
        cluster.pause_watches(LEDGERS)
        looking = cluster.faults.hold(Operation.READ_POD, moment=Moment.AFTER)
        fixing = asyncio.create_task(other.controller.reconciler.reconcile(NodeName("n1")))
        await looking.reached.wait()  # it has seen the pod unbound
        binding = cluster.faults.hold(Operation.BIND)
        bound = asyncio.create_task(one.bind(pod, "n1"))
        await binding.reached.wait()
        looking.release()
        released = RELEASES._value.get()
        await fixing
        assert pod.uid in one.claims()
        assert RELEASES._value.get() == released
        binding.release()
        assert await bound == ""
        cluster.resume_watches(LEDGERS)


async def test_a_bind_after_its_claim_was_released_claims_again(cluster: FaultyCluster) -> None:
    async with replica(cluster, controller=False) as one:
        pod, other = asking_pod(cluster, "vm", 5), asking_pod(cluster, "other", 5)
        await unanswered_bind(cluster, one, pod)
        await one.controller.reconciler.reconcile(NodeName("n1"))
        await asyncio.sleep(61)
        await one.controller.reconciler.reconcile(NodeName("n1"))
        assert await one.bind(other, "n1") == ""
        assert "best 3 on socket 0" in await one.bind(pod, "n1")
        assert await one.bind(pod, "n2") == ""


@pytest.mark.parametrize("off", [timedelta(days=-3), timedelta(seconds=70), timedelta(days=3)], ids=str)
async def test_a_replica_with_another_clock_leaves_a_claim_its_time_and_releases_it_then(
    cluster: FaultyCluster, off: timedelta
) -> None:
    def elsewhere() -> datetime:
        return EPOCH + off + timedelta(seconds=asyncio.get_running_loop().time())

    async with (
        replica(cluster, controller=False) as one,
        replica(cluster, controller=False, now=elsewhere) as other,
    ):
        pod = asking_pod(cluster, "vm")
        await unanswered_bind(cluster, one, pod)
        await other.until(lambda: other.cache.ledger(NodeName("n1")).claims)
        for _ in range(2):
            await other.controller.reconciler.reconcile(NodeName("n1"))
            assert pod.uid in one.claims()
            await asyncio.sleep(31)
        await other.controller.reconciler.reconcile(NodeName("n1"))
        assert one.claims() == {}


async def test_the_claim_of_an_earlier_attempt_goes_only_once_the_pod_is_bound_elsewhere(
    cluster: FaultyCluster,
) -> None:
    async with replica(cluster, settings=STILL) as one:
        pod = asking_pod(cluster, "vm")
        await unanswered_bind(cluster, one, pod)
        hold = cluster.faults.hold(Operation.BIND)
        binding = asyncio.create_task(one.bind(pod, "n2"))
        await hold.reached.wait()
        await one.controller.reconciler.reconcile(NodeName("n1"))
        assert pod.uid in one.claims("n1")
        assert pod.uid in one.claims("n2")
        hold.release()
        assert await binding == ""
        await one.until(lambda: not one.claims("n1"))
        assert pod.uid in one.claims("n2")


async def test_a_claim_that_differs_from_the_placement_of_its_pod_is_corrected(
    cluster: FaultyCluster,
) -> None:
    async with replica(cluster, controller=False) as before:
        pod = asking_pod(cluster, "vm", 3)
        assert await before.bind(pod, "n1") == ""
        stored = before.cache.ledger(NodeName("n1"))
        elsewhere = replace(stored.claims[pod.uid], cpus=CpuMask(0b111000), owned=CpuMask(0b111000))
        cluster.put_ledger("n1", stored.after(LedgerChange((elsewhere,))))
    async with replica(cluster) as one:
        await one.until(lambda: one.cache.ledger(NodeName("n1")).owned == 0b111)
        one.cache.ledger(NodeName("n1")).check()


async def test_a_pod_that_ended_meanwhile_is_not_claimed_back_from_a_stale_cache(
    cluster: FaultyCluster,
) -> None:
    async with replica(cluster, controller=False) as one, replica(cluster, controller=False) as stale:
        pod = asking_pod(cluster, "vm")
        assert await one.bind(pod, "n1") == ""
        await stale.until(lambda: stale.cache.pods.records[pod.uid].node)
        cluster.pause_watches(PODS)
        cluster._ledgers.remove("n1")
        cluster.change_pod("default", "vm", phase="Succeeded")
        await stale.until(lambda: stale.cache.ledgers.current(NodeName("n1")) is None)
        await stale.controller.reconciler.reconcile(NodeName("n1"))
        assert stale.claims() == {}
        cluster.resume_watches(PODS)


async def test_a_claim_that_was_released_after_its_pod_was_read_is_not_restored(
    cluster: FaultyCluster,
) -> None:
    async with replica(cluster, controller=False) as one, replica(cluster, controller=False) as late:
        cluster.pause_watches(LEDGERS)
        pod = asking_pod(cluster, "vm")
        assert await one.bind(pod, "n1") == ""
        await late.until(lambda: late.cache.pods.records[pod.uid].node)
        reading = cluster.faults.hold(Operation.READ_POD, moment=Moment.AFTER)
        fixing = asyncio.create_task(late.controller.reconciler.reconcile(NodeName("n1")))
        await reading.reached.wait()  # it knows no claim of the pod, and has read that it runs
        cluster.change_pod("default", "vm", phase="Succeeded")
        await one.until(lambda: one.cache.pods.records[pod.uid].phase == "Succeeded")
        await one.controller.reconciler.reconcile(NodeName("n1"))
        assert one.claims() == {}
        reading.release()
        await fixing
        assert one.claims() == {}


async def test_all_claims_of_a_ledger_that_was_deleted_come_back_in_one_round(
    cluster: FaultyCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    chance, reads, read = Random(1), Counter[str](), cluster.read_pod

    async def read_slowly(namespace: str, name: str) -> PodRecord | None:
        reads[name] += 1
        await asyncio.sleep(chance.uniform(0.001, 0.02))
        return await read(namespace, name)

    node = NodeName("large")
    cluster.create_node(node, topology=read_machine("2x-xeon-6338"))
    async with replica(cluster, controller=False) as one:
        pods = [asking_pod(cluster, f"vm-{number}", 2) for number in range(30)]
        for pod in pods:
            assert await one.bind(pod, node) == ""
        await one.until(lambda: all(one.cache.pods.records[pod.uid].node for pod in pods))
        cluster._ledgers.remove(node)
        await one.until(lambda: one.cache.ledgers.current(node) is None)
        monkeypatch.setattr(cluster, "read_pod", read_slowly)
        await one.controller.reconciler.reconcile(node)
        assert set(one.claims(node)) == {pod.uid for pod in pods}
        assert max(reads.values()) <= 2


async def test_a_pod_of_the_same_name_on_another_node_is_not_claimed_for_on_the_old_one(
    cluster: FaultyCluster,
) -> None:
    async with replica(cluster, controller=False) as one, replica(cluster, controller=False) as stale:
        assert await one.bind(asking_pod(cluster, "vm"), "n1") == ""
        await asyncio.sleep(1.0)
        cluster.pause_watches(PODS)
        cluster.delete_pod("default", "vm", force=True)
        cluster._ledgers.remove(NodeName("n1"))
        assert await one.bind(asking_pod(cluster, "vm"), "n2") == ""
        await asyncio.sleep(1.0)
        await stale.controller.reconciler.reconcile(NodeName("n1"))
        assert stale.claims("n1") == {}
        cluster.resume_watches(PODS)


async def test_an_overlap_is_reported_once_and_other_claims_are_restored(
    cluster: FaultyCluster, caplog: pytest.LogCaptureFixture
) -> None:
    async with replica(cluster, controller=False) as one:
        pods = [asking_pod(cluster, f"vm-{number}") for number in range(3)]
        for pod in pods:
            assert await one.bind(pod, "n1") == ""
        placed = PodPlacement.from_json(cluster.pod_annotations("default", "vm-0")[PLACEMENT])
        cluster._ledgers.remove("n1")
        intruder = replace(placed, pod_uid=PodUid("a-first"))
        cluster.create_pod(
            "intruder",
            uid="a-first",
            request=pods[0].request,
            node="n1",
            annotations={PLACEMENT: intruder.to_json()},
        )
        await one.until(
            lambda: "a-first" in one.cache.pods.records and not one.cache.ledgers.current(NodeName("n1"))
        )
        cluster.faults.fail(Operation.RECORD_EVENT, Unavailable("busy"))
        for _ in range(3):
            await one.controller.reconciler.reconcile(NodeName("n1"))
            await one.events.finish()
        claimed = set(one.claims())
        assert len(claimed) == 3
        assert {pods[1].uid, pods[2].uid} < claimed
        assert [record.levelname for record in caplog.records].count("ERROR") == 1
        overlaps = [event for event in cluster.events if event.reason is EventReason.CORES_OVERLAP]
        assert len(overlaps) == 1


async def test_a_release_whose_answer_is_lost_still_wakes_who_waits(cluster: FaultyCluster) -> None:
    async with bound_vm(cluster, settings=STILL) as (one, _pod):
        asking_pod(cluster, "waiting", 8)
        await one.until(lambda: len(one.cache.pods.records) == 2)
        cluster.faults.fail(Operation.WRITE_LEDGER, Unavailable("timeout"), moment=Moment.AFTER)
        cluster.delete_pod("default", "vm", force=True)
        await one.until(lambda: RELEASED_AT in cluster.node_annotations("n1"))


async def test_waking_is_tried_again_when_the_api_server_is_down_and_on_a_node_that_is_still_there(
    cluster: FaultyCluster,
) -> None:
    async with replica(cluster, settings=STILL) as one:
        pods = [asking_pod(cluster, f"vm-{node}") for node in ("n1", "n2")]
        for pod, node in zip(pods, ("n1", "n2"), strict=True):
            assert await one.bind(pod, node) == ""
        asking_pod(cluster, "waiting", 8)
        await one.until(lambda: len(one.cache.pods.records) == 3)
        cluster.faults.fail(Operation.ANNOTATE_NODE, Unavailable("busy"))
        hold = cluster.faults.hold(Operation.ANNOTATE_NODE)
        for pod in pods:
            cluster.delete_pod("default", pod.name, force=True)
        await hold.reached.wait()
        cluster.delete_node("n1")
        hold.release()
        await one.until(lambda: RELEASED_AT in cluster.node_annotations("n2"))


async def test_a_right_to_wake_that_is_missing_is_logged_and_keeps_nothing_else_from_working(
    cluster: FaultyCluster,
) -> None:
    async with bound_vm(cluster, settings=STILL) as (one, _pod):
        asking_pod(cluster, "waiting", 8)
        await one.until(lambda: len(one.cache.pods.records) == 2)
        cluster.faults.fail(Operation.ANNOTATE_NODE, Forbidden("no right"))
        cluster.delete_pod("default", "vm", force=True)
        await one.until(lambda: not one.claims() and not cluster.faults.pending)
        again = asking_pod(cluster, "again")
        assert await one.bind(again, "n1") == ""
        cluster.delete_pod("default", "again", force=True)
        await one.until(lambda: RELEASED_AT in cluster.node_annotations("n1"))


async def test_replicas_that_see_the_cluster_differently_free_everything_in_the_end(
    cluster: FaultyCluster,
) -> None:
    async with replica(cluster) as one, replica(cluster) as other:
        pods = [asking_pod(cluster, f"vm-{number}", 1) for number in range(8)]
        for number, pod in enumerate(pods):
            assert await (one, other)[number % 2].bind(pod, "n1") == ""
        cluster.pause_watches(PODS)
        for pod in pods[:4]:
            cluster.change_pod("default", pod.name, phase="Failed")
        for pod in pods[4:]:
            cluster.delete_pod("default", pod.name, force=True)
        cluster.drop_watches(LEDGERS)
        cluster.resume_watches(PODS)
        await one.until(lambda: not one.claims())
        await one.until(
            lambda: all(replica.cache.ledger(NodeName("n1")).owned == 0 for replica in (one, other))
        )


async def test_ages_of_claims_are_forgotten_once_the_claims_of_pods_that_are_gone_are_released(
    cluster: FaultyCluster,
) -> None:
    gone = [claim(f"gone-{cpu}", cpu) for cpu in range(8)]
    cluster.put_ledger("n1", Ledger().after(taking(*gone)))
    async with replica(cluster) as one:
        ages = one.controller.reconciler._ages
        await one.until(lambda: len(ages._seen) == len(gone))
        await one.until(lambda: not one.claims())
        await one.until(lambda: not ages._seen)


async def test_deleted_pods_are_forgotten_once_they_have_no_claim(cluster: FaultyCluster) -> None:
    async with replica(cluster) as one, replica(cluster, controller=False) as watcher:
        pods = [asking_pod(cluster, f"vm-{number}") for number in range(4)]
        for pod in pods:
            assert await one.bind(pod, "n1") == ""
        await watcher.until(lambda: watcher.cache.ledger(NodeName("n1")).owned == mask_of(range(8)))
        for pod in pods:
            cluster.delete_pod("default", pod.name, force=True)
        await watcher.until(lambda: not watcher.cache.ledger(NodeName("n1")).owned)
        await watcher.until(lambda: not watcher.cache.pods.records)
        rounds = asyncio.create_task(watcher.controller.run())
        await watcher.until(lambda: not watcher.controller.reconciler._deleted)
        rounds.cancel()
