"""VMs that share CPUs with each other, and find one day that another VM owns some of these."""

from __future__ import annotations

from dataclasses import replace

from kvplace.controller.reconciler import OVERLAPS
from kvplace.core.ledger import Ledger, LedgerChange
from kvplace.core.request import Policy
from kvplace.core.scalars import NodeName
from kvplace.kube.events import EventReason, pod_reference
from kvplace.kube.object_records import PodRecord
from tests.controller.relocations import LaggingView
from tests.controller.replicas import Replica, asking_pod, replica
from tests.kube.faulty_cluster import FaultyCluster
from tests.nodes.machines import EIGHT

N1 = NodeName("n1")


async def reconcile(one: Replica) -> None:
    await one.controller.reconciler.reconcile(N1)
    await one.events.finish()


async def put_ledger(one: Replica, ledger: Ledger) -> None:
    """Let a foreign client write the ledger of n1, and the replica see that."""
    one.cluster.put_ledger("n1", ledger)
    await one.until(lambda: one.cache.ledger(N1) == ledger)


async def overlapping(one: Replica) -> tuple[PodRecord, PodRecord]:
    """Bind a VM that shares CPUs, delete its claim by hand, and bind one that owns them all."""
    sharing = asking_pod(one.cluster, "sharing", policy=Policy.SHARE)
    assert await one.bind(sharing, "n1") == ""
    await put_ledger(one, Ledger())
    owner = asking_pod(one.cluster, "owner", 8)
    assert await one.bind(owner, "n1") == ""
    return sharing, owner


def overlaps(cluster: FaultyCluster) -> list[str]:
    return [event.note for event in cluster.events if event.reason is EventReason.CORES_OVERLAP]


async def test_a_sharing_vm_whose_claim_was_lost_is_reported_when_another_vm_has_got_its_cpus(
    cluster: FaultyCluster,
) -> None:
    async with replica(cluster, controller=False) as one:
        sharing, owner = await overlapping(one)
        counted = OVERLAPS._value.get()
        for _ in range(3):
            await reconcile(one)
        assert set(one.claims()) == {sharing.uid, owner.uid}
        assert OVERLAPS._value.get() == counted + 1
        assert overlaps(cluster) == [
            f"pod default/sharing runs on CPUs 0-1 of n1, which belong to {owner.uid} in the ledger"
        ]
        (event,) = [event for event in cluster.events if event.reason is EventReason.CORES_OVERLAP]
        assert event.regarding == pod_reference("default", "sharing", sharing.uid)


async def test_an_overlap_with_a_sharing_vm_counts_again_after_it_had_ended(cluster: FaultyCluster) -> None:
    async with replica(cluster, controller=False) as one:
        sharing, owner = await overlapping(one)
        counted = OVERLAPS._value.get()
        await reconcile(one)
        owned = one.claims()[owner.uid]
        cluster.delete_pod("default", "owner", force=True)
        await one.until(lambda: owner.uid not in one.cache.pods.records)
        await reconcile(one)
        assert set(one.claims()) == {sharing.uid}
        assert OVERLAPS._value.get() == counted + 1
        binding = asking_pod(cluster, "binding", 8)
        claimed = replace(owned, uid=binding.uid, pod=binding.name)
        await put_ledger(one, one.cache.ledger(N1).after(LedgerChange((claimed,))))
        await reconcile(one)
        assert OVERLAPS._value.get() == counted + 2


async def test_vms_that_share_cpus_and_vms_that_own_others_do_not_overlap(cluster: FaultyCluster) -> None:
    async with replica(cluster, controller=False) as one:
        kinds = (Policy.SHARE, Policy.SHARE, Policy.EXCLUSIVE, Policy.NUMA, Policy.IMMOVABLE)
        for number, policy in enumerate(kinds):
            assert await one.bind(asking_pod(cluster, f"vm-{number}", 1, policy=policy), "n1") == ""
        assert len(one.claims()) == len(kinds)
        await reconcile(one)
        assert overlaps(cluster) == []


async def test_a_replica_that_lags_behind_does_not_report_cores_that_have_changed_hands_since(
    cluster: FaultyCluster,
) -> None:
    lagging = LaggingView(cluster)
    async with replica(cluster, controller=False) as one, replica(lagging, controller=False) as late:
        first = asking_pod(cluster, "first", 8)
        assert await one.bind(first, "n1") == ""
        await late.until(lambda: first.uid in late.cache.ledger(N1).claims)
        lagging.lag("nodeledgers")
        cluster.delete_pod("default", "first", force=True)
        await one.until(lambda: first.uid not in one.cache.pods.records)
        await reconcile(one)
        second = asking_pod(cluster, "second", 8)
        assert await one.bind(second, "n1") == ""
        await late.until(lambda: late.cache.pods.records[second.uid].node)
        cluster.create_node("n2", topology=EIGHT)
        await late.until(lambda: "n2" in late.cache.nodes.records)
        # After a write the next changes gather: release and restoration are then decided together.
        assert await late.bind(asking_pod(cluster, "other"), "n2") == ""
        counted = OVERLAPS._value.get()
        await reconcile(late)
        assert OVERLAPS._value.get() == counted
        assert overlaps(cluster) == []
        lagging.catch_up()
