"""Cores of evicted VMs are reserved in the ledger for the VM that needed them, on every replica."""

from __future__ import annotations

import asyncio

import pytest

from kvplace.core.cpuset import parse_cpu_list
from kvplace.core.errors import Conflict
from kvplace.core.request import Policy
from kvplace.core.scalars import NodeName
from kvplace.kube.object_records import PodRecord
from kvplace.kube.watches import PODS
from kvplace.scheduler.extender_protocol import NodeVictims, PreemptionArgs
from tests.controller.replicas import Replica, asking_pod, replica
from tests.kube.faults import Operation
from tests.kube.faulty_cluster import FaultyCluster
from tests.nodes.machines import EIGHT

HIGH = 1000
N1 = NodeName("n1")


@pytest.fixture
def cluster() -> FaultyCluster:
    """A cluster of one node with eight CPUs and without an agent."""
    made = FaultyCluster()
    made.create_node("n1", topology=EIGHT)
    return made


async def halves(one: Replica) -> list[PodRecord]:
    """Run two VMs on four CPUs each."""
    return [await running(one, f"low-{number}", 4, priority=number) for number in range(2)]


async def running(one: Replica, name: str, vcpus: int, **asked: object) -> PodRecord:
    pod = asking_pod(one.cluster, name, vcpus, **asked)  # type: ignore[arg-type]
    assert (await one.filter(pod)).names == [N1]
    assert await one.bind(pod, N1) == ""
    await one.until(lambda: one.cache.pods.records[pod.uid].node == N1)
    return one.cache.pods.records[pod.uid]


async def victims(one: Replica, pod: PodRecord, sent: list[PodRecord]) -> list[str]:
    """Ask as kube-scheduler does; returns the names of the victims."""
    found = {N1: NodeVictims(tuple(victim.uid for victim in sent), 0)}
    answer = await one.extender.preempt(PreemptionArgs(pod, pod.resources, False, False, found))
    names = {uid: record.name for uid, record in one.cache.pods.records.items()}
    return [names[uid] for found in answer.values() for uid in found.uids]


async def end(one: Replica, name: str) -> None:
    """End a VM at once, and wait until its claim is released."""
    uid = next(pod.uid for pod in one.cache.pods.records.values() if pod.name == name)
    one.cluster.delete_pod("default", name, force=True)
    await one.until(lambda: uid not in one.cache.ledger(N1).claims)


async def test_two_vms_never_evict_for_the_same_cores_whichever_replica_they_ask(
    cluster: FaultyCluster,
) -> None:
    async with replica(cluster) as one, replica(cluster) as two:
        low = await halves(one)
        await two.until(lambda: all(two.cache.pods.records[pod.uid].node for pod in low))
        pods = [asking_pod(cluster, f"high-{number}", 4, priority=HIGH) for number in range(2)]
        for each in (one, two):
            await each.until(lambda each=each: all(pod.uid in each.cache.pods.records for pod in pods))
        first, second = await asyncio.gather(victims(one, pods[0], low), victims(two, pods[1], low))
        assert sorted(first + second) == ["low-0", "low-1"]


async def test_no_replica_gives_it_to_any_other_client_and_each_binds_the_vm_there(
    cluster: FaultyCluster,
) -> None:
    async with replica(cluster) as two:
        async with replica(cluster) as one:
            low = await halves(one)
            high = asking_pod(cluster, "high", 4, priority=HIGH)
            assert await victims(one, high, low) == ["low-0"]
        await two.until(lambda: high.uid in two.cache.ledger(N1).claims)
        again = asking_pod(cluster, "low-0-again", 4)
        await end(two, "low-0")
        assert (await two.filter(again)).names == []
        assert "free" in await two.bind(again, N1)
        assert await victims(two, high, low[1:]) == []
        assert (await two.filter(high)).names == [N1]
        assert await two.bind(high, N1) == ""
        assert two.claims()[high.uid].reserved is None


async def test_it_stays_while_a_victim_ends_and_is_over_soon_after_that(cluster: FaultyCluster) -> None:
    async with replica(cluster) as one:
        low = await halves(one)
        high = asking_pod(cluster, "high", 4, priority=HIGH)
        assert await victims(one, high, low) == ["low-0"]
        cluster.delete_pod("default", "low-0")
        await asyncio.sleep(600)
        assert one.claims()[high.uid].still_in_use != 0
        await end(one, "low-0")
        await one.until(lambda: not one.claims()[high.uid].still_in_use)
        await asyncio.sleep(29)
        assert high.uid in one.claims()
        await asyncio.sleep(5)
        assert high.uid not in one.claims()


async def test_one_that_never_ends_keeps_it_for_a_quarter_of_an_hour(cluster: FaultyCluster) -> None:
    async with replica(cluster) as one:
        low = await halves(one)
        high = asking_pod(cluster, "high", 4, priority=HIGH)
        assert await victims(one, high, low) == ["low-0"]
        cluster.delete_pod("default", "low-0")
        await asyncio.sleep(890)
        assert high.uid in one.claims()
        await asyncio.sleep(20)
        assert high.uid not in one.claims()


async def test_a_vm_that_shares_cpus_finds_those_that_were_freed_for_it(cluster: FaultyCluster) -> None:
    async with replica(cluster) as one:
        low = await halves(one)
        sharing = asking_pod(cluster, "sharing", 4, priority=HIGH, policy=Policy.SHARE)
        assert await victims(one, sharing, low) == ["low-0"]
        await end(one, "low-0")
        await one.until(lambda: not one.claims()[sharing.uid].still_in_use)
        assert (await one.filter(asking_pod(cluster, "low-0-again", 4))).names == []
        assert (await one.filter(sharing)).names == [N1]
        assert await one.bind(sharing, N1) == ""
        claim = one.claims()[sharing.uid]
        assert (claim.policy, claim.owned, claim.cpus) == (Policy.SHARE, 0, parse_cpu_list("0-3"))


async def test_a_vm_of_higher_priority_gets_it_by_the_write_that_takes_it_from_the_other_one(
    cluster: FaultyCluster,
) -> None:
    async with replica(cluster) as one:
        low = await halves(one)
        high = asking_pod(cluster, "high", 4, priority=HIGH)
        assert await victims(one, high, low) == ["low-0"]
        await end(one, "low-0")
        assert (await one.filter(asking_pod(cluster, "equal", 4, priority=HIGH))).names == []
        higher = asking_pod(cluster, "higher", 4, priority=HIGH + 1)
        assert (await one.filter(higher)).names == [N1]
        assert high.uid not in one.claims()
        assert one.claims()[higher.uid].reserved is not None
        assert await one.bind(higher, N1) == ""


async def test_no_pod_has_to_go_where_nothing_could_be_reserved(cluster: FaultyCluster) -> None:
    async with replica(cluster) as one:
        low = await halves(one)
        high = asking_pod(cluster, "high", 4, priority=HIGH)
        cluster.faults.fail(Operation.WRITE_LEDGER, Conflict("conflict with another writer"), times=100)
        with pytest.raises(Conflict):
            await victims(one, high, low)
        assert high.uid not in one.claims()


async def test_a_reservation_that_is_seen_before_its_pod_is_kept(cluster: FaultyCluster) -> None:
    async with replica(cluster) as one, replica(cluster) as two:
        low = await halves(one)
        await two.until(lambda: all(two.cache.pods.records[pod.uid].node for pod in low))
        second = asking_pod(cluster, "second", 8, priority=HIGH)
        await two.until(lambda: second.uid in two.cache.pods.records)
        first = asking_pod(cluster, "first", 4, priority=HIGH)
        cluster.pause_watches(PODS)
        assert await victims(one, first, low) == ["low-0"]
        await two.until(lambda: first.uid in two.cache.ledger(N1).claims)
        assert await victims(two, second, low) == []
        cluster.resume_watches(PODS)
