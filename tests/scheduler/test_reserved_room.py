"""CPUs that moves release are reserved in the ledger: every replica keeps them while the VM waits."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from kvplace.core.claim_changes import RESERVED_S
from kvplace.core.cpuset import parse_cpu_list
from kvplace.core.errors import Conflict
from kvplace.core.ledger import Claim, Ledger, LedgerChange, Reserved
from kvplace.core.scalars import CpuMask, NodeName
from kvplace.core.well_known_names import RELEASED_AT
from kvplace.kube.object_records import PodRecord
from kvplace.scheduler.extender import ExtenderSettings
from kvplace.scheduler.limits import MOVES_S
from kvplace.scheduler.room_maker import MakeRoom
from tests.controller.relocations import NodeAgent
from tests.controller.replicas import Replica, asking_pod, replica
from tests.kube.faults import Operation
from tests.kube.faulty_cluster import FaultyCluster
from tests.nodes.machines import TWO
from tests.scheduler.crowded_node import N1, halved, moved, victims

AUTOMATIC = ExtenderSettings(make_room=MakeRoom.AUTOMATIC)
SOCKETS = tuple(map(parse_cpu_list, ("0-3,8-11", "4-7,12-15")))


async def begun(one: Replica, agent: NodeAgent, vcpus: int = 4) -> tuple[PodRecord, PodRecord]:
    """Begin to make room for a VM that needs a socket; returns it, and the VM that moves for it."""
    await halved(one, agent, vcpus, movable=True)
    big = asking_pod(one.cluster, "big", 8)
    assert not (await one.filter(big)).names
    await one.until(lambda: moved(agent))
    return big, moved(agent)[0]


def reservation(agent: NodeAgent, pod: PodRecord) -> Claim | None:
    """The reservation of a pod."""
    claim = agent.ledger.claims.get(pod.uid)
    return claim if claim is not None and claim.reserved is not None else None


async def test_free_cpus_are_owned_at_once_and_the_rest_when_the_moved_vm_has_left_them(
    cluster: FaultyCluster, agent: NodeAgent
) -> None:
    async with replica(cluster, extending=AUTOMATIC) as one:
        big, mover = await begun(one, agent)
        before = agent.in_force[mover.uid].placement.owned
        claim = reservation(agent, big)
        assert claim is not None
        assert claim.reserved is not None
        assert claim.reserved.owned in SOCKETS
        assert (claim.owned, claim.still_in_use) == (claim.reserved.owned & ~before, before)

        agent.carry_out(mover)
        await one.until(lambda: (found := reservation(agent, big)) is None or not found.still_in_use)
        assert agent.ledger.claims[big.uid].owned == claim.reserved.owned
        agent.ledger.check()


async def test_another_replica_binds_the_vm_there_when_the_one_that_made_room_has_ended(
    cluster: FaultyCluster, agent: NodeAgent
) -> None:
    async with replica(cluster, extending=AUTOMATIC) as two:
        async with replica(cluster, extending=AUTOMATIC) as one:
            big, mover = await begun(one, agent)
            reserved = reservation(agent, big)
        agent.carry_out(mover)
        await two.until(lambda: agent.ledger.claims[mover.uid].relocation is None)
        small = asking_pod(cluster, "small", 4)
        assert (await two.filter(small)).names == []
        assert "no socket" in await two.bind(small, "n1")
        assert (await two.filter(big)).names == [N1]
        assert await two.bind(big, "n1") == ""
        assert reserved is not None
        assert reserved.reserved is not None
        assert agent.stored(big).placement.owned == reserved.reserved.owned
        assert agent.ledger.claims[big.uid].reserved is None


@pytest.mark.parametrize("left", ["first", "second"])
async def test_a_vm_gets_its_reserved_cores_though_other_cores_have_been_released(
    cluster: FaultyCluster, agent: NodeAgent, left: str
) -> None:
    async with replica(cluster, controller=False) as one:
        others = {name: asking_pod(cluster, name, 8) for name in ("first", "second")}
        for pod in others.values():
            assert await one.bind(pod, "n1") == ""
        big = asking_pod(cluster, "big", 8)
        claim = replace(agent.ledger.claims[others[left].uid], uid=big.uid, pod=big.name)
        reserved = replace(claim, reserved=Reserved(claim.owned, "2026-01-02T00:00:00Z"))
        cluster.put_ledger("n1", Ledger())
        cluster.put_ledger("n1", Ledger().after(LedgerChange(claims=(reserved,))))
        await one.until(lambda: one.cache.ledgers.nodes_claimed_by(big.uid))
        assert await one.bind(big, "n1") == ""
        assert agent.stored(big).placement.owned == agent.ledger.claims[big.uid].owned == claim.owned
        assert agent.ledger.claims[big.uid].reserved is None


async def test_a_reservation_stays_with_its_vm_when_its_bind_is_refused(
    cluster: FaultyCluster, agent: NodeAgent
) -> None:
    """An earlier version leaves what is reserved in a claim with which it binds: it may be bound with it."""
    async with replica(cluster, extending=AUTOMATIC) as one:
        big, mover = await begun(one, agent)
        agent.carry_out(mover)
        await one.until(lambda: agent.ledger.claims[mover.uid].relocation is None)
        reserved = reservation(agent, big)
        cluster.faults.fail(Operation.BIND, Conflict("gated"))
        assert "gated" in await one.bind(big, "n1")
        assert reserved is not None
        assert reserved.reserved is not None
        assert agent.ledger.claims[big.uid].owned == reserved.reserved.owned
        assert await one.bind(big, "n1") == ""


async def test_no_other_pod_is_bound_to_reserved_cores_by_any_replica(
    cluster: FaultyCluster, agent: NodeAgent
) -> None:
    async with replica(cluster, extending=AUTOMATIC) as one, replica(cluster) as two:
        big, mover = await begun(one, agent)
        small = asking_pod(cluster, "small", 4)
        await two.until(lambda: small.uid in two.cache.pods.records)
        binds = [asyncio.create_task(two.bind(small, "n1"))]
        agent.carry_out(mover)
        while agent.ledger.claims[mover.uid].relocation is not None:
            binds.append(asyncio.create_task(two.bind(small, "n1")))
            await asyncio.sleep(0.001)
        assert all(await asyncio.gather(*binds))
        assert await one.bind(big, "n1") == ""


async def test_no_pod_is_evicted_for_a_vm_for_which_another_replica_makes_room(
    cluster: FaultyCluster, agent: NodeAgent
) -> None:
    async with replica(cluster, extending=AUTOMATIC) as one, replica(cluster, extending=AUTOMATIC) as two:
        big, mover = await begun(one, agent)
        await two.until(lambda: two.cache.ledgers.nodes_claimed_by(big.uid))
        assert await victims(two, big, mover.uid) == []
        assert not (await two.filter(big)).names
        await asyncio.sleep(1)
        assert len(moved(agent)) == 1


async def test_a_reservation_stays_while_it_is_renewed_and_ends_soon_after_its_replica(
    cluster: FaultyCluster, agent: NodeAgent
) -> None:
    async with replica(cluster) as two:
        async with replica(cluster, extending=AUTOMATIC) as one:
            big, mover = await begun(one, agent)
            await asyncio.sleep(4 * RESERVED_S)
            assert reservation(agent, big) is not None
        await asyncio.sleep(RESERVED_S / 2)
        assert reservation(agent, big) is not None
        await asyncio.sleep(RESERVED_S / 2 + 1)
        assert big.uid not in agent.ledger.claims
        agent.carry_out(mover)
        await two.until(lambda: agent.ledger.claims[mover.uid].relocation is None)
        assert await two.bind(asking_pod(cluster, "small", 4), "n1") == ""


@pytest.mark.parametrize("why", ["deleted", "being deleted", "bound elsewhere"])
async def test_a_reservation_ends_with_the_need_for_it_though_its_replica_has_ended(
    cluster: FaultyCluster, agent: NodeAgent, why: str
) -> None:
    cluster.create_node("n2")
    cluster.put_topology("n2", TWO)
    async with replica(cluster) as two:
        async with replica(cluster, extending=AUTOMATIC) as one:
            for node in ("a", "b"):
                blocker = asking_pod(cluster, node, 8)
                assert await one.bind(blocker, "n2") == ""
            big, _ = await begun(one, agent)
        match why:
            case "deleted":
                cluster.delete_pod(big.namespace, big.name, force=True)
            case "being deleted":
                cluster._put_pod(replace(agent.live(big), deleting=True))
            case _:
                await cluster.bind(big.namespace, big.name, big.uid, NodeName("n2"), {})
        await asyncio.sleep(5)
        assert big.uid not in agent.ledger.claims
        assert not two.cache.ledgers.nodes_claimed_by(big.uid)


async def test_waiting_pods_are_tried_again_when_a_reservation_is_given_up(
    cluster: FaultyCluster, agent: NodeAgent
) -> None:
    async with replica(cluster, extending=AUTOMATIC) as one:
        big, _ = await begun(one, agent)
        asking_pod(cluster, "small", 4)
        await asyncio.sleep(MOVES_S - 5)
        before = cluster.node_annotations("n1").get(RELEASED_AT)
        assert reservation(agent, big) is not None
        await one.until(lambda: big.uid not in agent.ledger.claims)
        await one.until(lambda: cluster.node_annotations("n1").get(RELEASED_AT) != before)


async def test_a_vm_that_was_bound_without_regard_to_reservations_has_an_ordinary_claim_soon(
    cluster: FaultyCluster, agent: NodeAgent
) -> None:
    async with replica(cluster, extending=AUTOMATIC) as one:
        big, mover = await begun(one, agent)
        agent.carry_out(mover)
        await one.until(lambda: agent.ledger.claims[mover.uid].relocation is None)
        assert await one.bind(big, "n1") == ""
        claim = agent.ledger.claims[big.uid]
        stale = replace(claim, reserved=Reserved(claim.owned, "2026-01-02T00:00:00Z"))
        cluster.put_ledger("n1", agent.ledger.after(LedgerChange(claims=(stale,))))
        await one.until(lambda: agent.ledger.claims[big.uid].reserved is None)
        assert agent.ledger.claims[big.uid].owned == claim.owned != CpuMask(0)
