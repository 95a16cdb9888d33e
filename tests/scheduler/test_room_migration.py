"""A VM that fits nowhere gets what a running VM leaves that migrates, and no other VM gets it meanwhile."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from kvplace.core.errors import Unavailable
from kvplace.core.ledger import LedgerChange
from kvplace.core.request import Policy
from kvplace.kube.events import EventReason
from kvplace.kube.migrations import PEACE_AFTER_MIGRATION_S, START_S, MigrationRecord
from kvplace.kube.object_records import PodRecord
from kvplace.scheduler.extender import ExtenderSettings
from kvplace.scheduler.limits import (
    BOUND_AFTER_MIGRATION_S,
    EVACUATION_S,
    MOST_PER_HOUR,
    POLL_S,
    SEARCH_S,
)
from kvplace.scheduler.room_maker import MakeRoom
from tests.controller.relocations import NodeAgent
from tests.controller.replicas import Replica, asking_pod, replica
from tests.kube.faults import Moment, Operation
from tests.kube.faulty_cluster import FaultyCluster
from tests.scheduler.crowded_node import notes
from tests.scheduler.two_nodes import (
    VirtController,
    nodes,
    reservations,
    reserved_for_migrations,
    running,
    two_crowded,
)

NODES = ExtenderSettings(make_room=MakeRoom.NODES)


@pytest.fixture
def cluster() -> FaultyCluster:
    return FaultyCluster()


@pytest.fixture
def agents(cluster: FaultyCluster) -> dict[str, NodeAgent]:
    return nodes(cluster, "a", "b")


async def asked(one: Replica, name: str = "big", vcpus: int = 8) -> PodRecord:
    """Let kube-scheduler ask about a pod that fits nowhere."""
    pod = asking_pod(one.cluster, name, vcpus)
    assert not (await one.filter(pod)).names
    return pod


async def test_the_cheapest_vm_that_agreed_migrates_and_the_waiting_one_gets_its_cores(
    cluster: FaultyCluster, agents: dict[str, NodeAgent]
) -> None:
    async with replica(cluster, extending=NODES) as one:
        virt = VirtController(one, agents)
        cheap, _ = await two_crowded(one, agents)
        big = await asked(one)
        migration = await virt.until_created()
        planned = cluster.migrates_to[migration.name]
        assert (planned.vmi, planned.target) == (cheap.vmi, "b")
        ((node, kept),) = reserved_for_migrations(cluster)
        assert (node, kept.uid, kept.owned) == ("b", cheap.vmi_uid, 0)
        assert kept.reserved is not None
        awaited = one.claims("a")[big.uid]
        assert awaited.owned | awaited.still_in_use == one.claims("a")[cheap.uid].owned | awaited.owned
        assert not (await one.filter(asking_pod(cluster, "small", 4))).names

        target = virt.make_target(migration)
        assert await virt.schedule(migration) == ""
        assert reserved_for_migrations(cluster) == []
        assert one.claims("b")[target.uid].owned == kept.reserved.owned
        virt.run(migration)
        await asyncio.sleep(200)  # longer than a reservation stays without being renewed, or a start may take
        assert not (await one.filter(big)).names
        virt.succeed(migration)
        await one.until(lambda: cheap.uid not in one.claims("a"))
        assert (await one.filter(big)).names == ["a"]
        assert await one.bind(big, "a") == ""
        await one.until(lambda: not reservations(cluster))
        assert one.claims("a")[big.uid].owned.bit_count() == 8
        assert notes(cluster, "big", EventReason.MAKING_ROOM)[0].startswith(
            f"default/{cheap.vmi} migrates from a to CPUs"
        )
        assert "make room for default/big" in notes(cluster, cheap.vmi, EventReason.MAKING_ROOM)[0]
        assert notes(cluster, "big", EventReason.ROOM_NOT_MADE) == []


async def test_the_waiting_vm_has_a_minute_to_be_bound_after_the_migration(
    cluster: FaultyCluster, agents: dict[str, NodeAgent]
) -> None:
    async with replica(cluster, extending=NODES) as one:
        virt = VirtController(one, agents)
        await two_crowded(one, agents)
        big = await asked(one)
        await virt.whole(await virt.until_created())
        await asyncio.sleep(BOUND_AFTER_MIGRATION_S - 2 * POLL_S)
        assert reservations(cluster) == [("a", big.uid)]
        await asyncio.sleep(4 * POLL_S)
        assert reservations(cluster) == []
        assert "was not bound in time" in notes(cluster, "big", EventReason.ROOM_NOT_MADE)[0]


async def test_the_target_is_offered_to_the_pod_of_the_migration_alone_and_no_other_node_is(
    cluster: FaultyCluster,
) -> None:
    agents = nodes(cluster, "a", "b", "c")
    async with replica(cluster, extending=NODES) as one:
        virt = VirtController(one, agents)
        await running(one, agents["c"], "full", 8)
        await running(one, agents["c"], "full-2", 6)
        await two_crowded(one, {name: agents[name] for name in "ab"})
        await asked(one)
        migration = await virt.until_created()
        target = virt.make_target(migration)
        source = virt.source(migration)
        other = cluster.create_pod(
            "other", request=source.request, vmi=source.vmi, vmi_uid=source.vmi_uid, migration="another"
        )
        foreign = cluster.create_pod(
            "foreign",
            namespace="foreign",
            request=source.request,
            vmi=source.vmi,
            vmi_uid=source.vmi_uid,
            migration=migration.name,
        )
        for pod in (other, foreign):
            assert not (await one.filter(pod, "b")).names
            assert "no socket with 4 free CPUs" in await one.bind(pod, "b")
        assert (await one.filter(target, "a", "b", "c")).names == ["b"]
        refused = await one.filter(target, "a", "c")
        assert not refused.names
        assert "goes to node b" in refused.refusal


@pytest.mark.parametrize(
    "why",
    [
        "automatic",
        "has not agreed",
        "not migratable",
        "is changing",
        "other node",
        "cordoned",
    ],
)
async def test_no_vm_migrates_that_must_not(
    cluster: FaultyCluster, agents: dict[str, NodeAgent], why: str
) -> None:
    settings = ExtenderSettings(make_room=MakeRoom.AUTOMATIC) if why == "automatic" else NODES
    async with replica(cluster, extending=settings) as one:
        virt = VirtController(one, agents)
        agreed = {"movable": True, "may_migrate": why != "has not agreed"}
        for vm in await two_crowded(one, agents, **agreed):
            written: dict[str, dict[str, Any]] = {
                "not migratable": {"status": {"conditions": [{"type": "LiveMigratable", "status": "False"}]}},
                "is changing": {
                    "status": {
                        "conditions": [
                            {"type": "LiveMigratable", "status": "True"},
                            {"type": "HotVCPUChange", "status": "True"},
                        ]
                    }
                },
                "other node": {"spec": {"nodeSelector": {"rack": "1"}}},
            }
            cluster.put_running_vmi(vm.vmi, vm.vmi_uid, **written.get(why, {}))
        if why == "cordoned":
            for name in agents:
                cluster.put_schedulable_node(name, unschedulable=True)
        big = await asked(one)
        await asyncio.sleep(2 * SEARCH_S)
        assert not (await one.filter(big)).names
        await asyncio.sleep(SEARCH_S)
        assert virt.created == []
        assert reservations(cluster) == []


async def test_a_vm_migrates_for_one_that_no_node_has_enough_cpus_for_in_number(
    cluster: FaultyCluster, agents: dict[str, NodeAgent]
) -> None:
    """kube-scheduler refuses such a pod before it asks an extender."""
    async with replica(cluster, extending=NODES) as one:
        virt = VirtController(one, agents)
        await two_crowded(one, agents)
        big = asking_pod(cluster, "big", 8)
        cluster.put_running_vmi(big.vmi, big.vmi_uid, status={"phase": "Pending"})
        await asyncio.sleep(2 * SEARCH_S)
        cluster.change_pod("default", "big", was_tried=True, unschedulable="unbound PersistentVolumeClaims")
        await asyncio.sleep(2 * SEARCH_S)
        assert virt.created == []
        cluster.change_pod("default", "big", was_tried=True, unschedulable="2 Insufficient cpu")
        migration = await virt.until_created()
        await virt.whole(migration)
        await one.until(lambda: one.claims("a")[big.uid].owned.bit_count() == 8)
        assert (await one.filter(big)).names == ["a"]
        assert await one.bind(big, "a") == ""


@pytest.mark.parametrize("why", ["label of the waiting VM", "memory of the target", "CPUs of the source"])
async def test_no_vm_migrates_in_vain_where_kube_scheduler_would_refuse_one_of_both(
    cluster: FaultyCluster, agents: dict[str, NodeAgent], why: str
) -> None:
    async with replica(cluster, extending=NODES) as one:
        virt = VirtController(one, agents)
        await two_crowded(one, agents)
        big = asking_pod(cluster, "big", 8)
        spec = {"nodeSelector": {"rack": "1"}} if why == "label of the waiting VM" else {}
        cluster.put_running_vmi(big.vmi, big.vmi_uid, status={"phase": "Pending"}, spec=spec)
        allocatable = {"cpu": "15" if why == "CPUs of the source" else "16"}
        for name in agents:
            cluster.put_schedulable_node(name, allocatable=allocatable)
        if why == "memory of the target":
            for pod in cluster._pods.records.values():
                cluster._put_pod(replace(pod, resources={**pod.resources, "memory": 3000}))
            for name in agents:
                cluster.put_schedulable_node(name, allocatable={**allocatable, "memory": "8"})
        cluster.change_pod("default", "big", was_tried=True, unschedulable="2 Insufficient cpu")
        await asyncio.sleep(3 * SEARCH_S)
        assert virt.created == []
        cluster.put_running_vmi(big.vmi, big.vmi_uid, status={"phase": "Pending"})
        for name in agents:
            cluster.put_schedulable_node(name, allocatable={"cpu": "16", "memory": "16"})
        await virt.until_created()


async def test_a_target_that_kube_scheduler_would_refuse_is_passed_over(cluster: FaultyCluster) -> None:
    agents = nodes(cluster, "a", "b", "c")
    async with replica(cluster, extending=NODES) as one:
        virt = VirtController(one, agents)
        await two_crowded(one, {name: agents[name] for name in "ab"})
        await running(one, agents["c"], "full", 8)
        await running(one, agents["c"], "rest", 4)
        cluster.put_schedulable_node("b", unschedulable=True)
        await asked(one)
        migration = await virt.until_created()
        assert cluster.migrates_to[migration.name].target == "c"


async def test_one_vm_migrates_at_a_time_and_only_so_many_within_an_hour(
    cluster: FaultyCluster, agents: dict[str, NodeAgent]
) -> None:
    async with replica(cluster, extending=NODES) as one:
        virt = VirtController(one, agents)
        await two_crowded(one, agents)
        for number in range(MOST_PER_HOUR):
            key = ("other", f"kvplace-{number}")
            ours = MigrationRecord(*key, "vm", "Succeeded", cluster.time(), is_ours=True)
            cluster.migrations.put(key, ours)
        big = await asked(one)
        await asyncio.sleep(3000)
        assert not (await one.filter(big)).names
        assert len(virt.created) == MOST_PER_HOUR
        await asyncio.sleep(700)
        assert not (await one.filter(big)).names
        await one.until(lambda: len(virt.created) > MOST_PER_HOUR)
        other = await asked(one, "other", 7)
        await asyncio.sleep(2 * SEARCH_S)
        assert not (await one.filter(other)).names
        await asyncio.sleep(5)
        assert len(virt.created) == MOST_PER_HOUR + 1


@pytest.mark.parametrize("how", ["unfinished", "a moment ago", "node name"])
async def test_no_vm_migrates_while_a_node_is_evacuated(
    cluster: FaultyCluster, agents: dict[str, NodeAgent], how: str
) -> None:
    async with replica(cluster, extending=NODES) as one:
        virt = VirtController(one, agents)
        await two_crowded(one, agents)
        if how == "node name":
            cluster.put_running_vmi("plain", "plain", status={"evacuationNodeName": "c"})
        else:
            phase = "Failed" if how == "a moment ago" else "Pending"
            cluster.put_migration("other", "kubevirt-evacuation-x", "plain", phase)
        big = await asked(one)
        await asyncio.sleep(EVACUATION_S - 60)
        assert not (await one.filter(big)).names
        await asyncio.sleep(5)
        assert virt.created == []
        if how == "node name":
            cluster.put_running_vmi("plain", "plain")
        elif how == "unfinished":
            cluster.put_migration("other", "kubevirt-evacuation-x", "plain", "Succeeded")
        await asyncio.sleep(2 * SEARCH_S)
        assert not (await one.filter(big)).names
        await virt.until_created()


@pytest.mark.parametrize(
    "how", ["fails", "deleted by hand", "never starts", "refused", "target unschedulable"]
)
async def test_a_migration_that_comes_to_nothing_leaves_the_vm_running_and_nothing_reserved(
    cluster: FaultyCluster, agents: dict[str, NodeAgent], how: str
) -> None:
    async with replica(cluster, extending=NODES) as one:
        virt = VirtController(one, agents)
        cheap, dear = await two_crowded(one, agents)
        if how == "refused":
            cluster.refuses_migrations = "virt-api: LiveMigration is not possible"
        before = one.claims("a")[cheap.uid]
        big = await asked(one)
        if how != "refused":
            migration = await virt.until_created()
            match how:
                case "fails":
                    virt.make_target(migration)
                    assert await virt.schedule(migration) == ""
                    virt.run(migration)
                    await asyncio.sleep(60)
                    virt.fail(migration)
                case "deleted by hand":
                    cluster.migrations.remove((migration.namespace, migration.name))
                case "never starts":
                    await asyncio.sleep(START_S + 10)
                    assert virt.created == []
                case "target unschedulable":
                    virt.make_target(migration)
                    await asyncio.sleep(30)
                    virt.fail(migration)
        await one.until(lambda: notes(cluster, "big", EventReason.ROOM_NOT_MADE))
        await one.until(lambda: not reservations(cluster))
        await one.until(lambda: set(one.claims("b")) == {pod.uid for pod in agents_pods(cluster, "b")})
        assert one.claims("a")[cheap.uid] == before
        assert big.uid not in one.claims("a")
        if how != "refused":
            assert notes(cluster, cheap.vmi, EventReason.ROOM_NOT_MADE)

        # It is not tried again with this VM, but with the other one.
        cluster.refuses_migrations = ""
        await asyncio.sleep(2 * SEARCH_S)
        assert not (await one.filter(big)).names
        await one.until(lambda: [move for move in virt.created if move.vmi == dear.vmi])
        assert len([move for move in virt.created if not move.has_ended]) == 1


def agents_pods(cluster: FaultyCluster, node: str) -> list[PodRecord]:
    pods = cluster._pods.records.values()
    return [pod for pod in pods if pod.node == node and not pod.has_ended]


async def test_a_vm_is_left_alone_for_a_while_after_any_migration(
    cluster: FaultyCluster, agents: dict[str, NodeAgent]
) -> None:
    async with replica(cluster, extending=NODES) as one:
        virt = VirtController(one, agents)
        for vm in await two_crowded(one, agents):
            cluster.put_migration("default", f"by-hand-{vm.vmi}", vm.vmi, "Succeeded")
        big = await asked(one)
        await asyncio.sleep(PEACE_AFTER_MIGRATION_S - 100)
        assert not (await one.filter(big)).names
        await asyncio.sleep(5)
        assert virt.created == []
        await asyncio.sleep(100)
        assert not (await one.filter(big)).names
        await virt.until_created()


@pytest.mark.parametrize("started", [False, True])
async def test_a_migration_is_withdrawn_for_a_vm_that_waits_no_longer_unless_the_guest_is_on_its_way(
    cluster: FaultyCluster, agents: dict[str, NodeAgent], *, started: bool
) -> None:
    async with replica(cluster, extending=NODES) as one:
        virt = VirtController(one, agents)
        await two_crowded(one, agents)
        big = await asked(one)
        migration = await virt.until_created()
        if started:
            virt.make_target(migration)
            assert await virt.schedule(migration) == ""
            virt.run(migration)
            await asyncio.sleep(10)
        cluster.delete_pod(big.namespace, big.name)
        await one.until(lambda: not reservations(cluster))
        await asyncio.sleep(10)
        assert [move.phase for move in virt.created] == (["Running"] if started else [])


async def test_an_answer_that_is_lost_leaves_one_migration(
    cluster: FaultyCluster, agents: dict[str, NodeAgent]
) -> None:
    async with replica(cluster, extending=NODES) as one:
        virt = VirtController(one, agents)
        await two_crowded(one, agents)
        cluster.faults.fail(Operation.CREATE_MIGRATION, Unavailable("no answer"), nth=2, moment=Moment.AFTER)
        big = await asked(one)
        await virt.whole(await virt.until_created())
        await one.until(lambda: big.uid in one.claims("a") and not one.claims("a")[big.uid].still_in_use)
        assert await one.bind(big, "a") == ""


async def test_a_policy_that_names_its_cpus_moves_too(
    cluster: FaultyCluster, agents: dict[str, NodeAgent]
) -> None:
    async with replica(cluster, extending=NODES) as one:
        virt = VirtController(one, agents)
        cheap, _ = await two_crowded(one, agents, policy=Policy.SHARE)
        big = await asked(one)
        migration = await virt.until_created()
        assert migration.vmi == cheap.vmi
        await virt.whole(migration)
        await one.until(lambda: cheap.uid not in one.claims("a"))
        assert await one.bind(big, "a") == ""


async def test_two_replicas_that_begin_at_once_begin_one_migration_at_most(
    cluster: FaultyCluster, agents: dict[str, NodeAgent]
) -> None:
    async with replica(cluster, extending=NODES) as one, replica(cluster, extending=NODES) as two:
        virt = VirtController(one, agents)
        await two_crowded(one, agents)
        big, other = asking_pod(cluster, "big", 8), asking_pod(cluster, "other", 8)
        await one.until(lambda: other.uid in one.cache.pods.records and other.uid in two.cache.pods.records)
        for _ in range(4):
            await asyncio.gather(one.filter(big), two.filter(other))
            await asyncio.sleep(SEARCH_S + 5)
            assert len([move for move in virt.created if not move.has_ended]) <= 1
            assert len(reserved_for_migrations(cluster)) <= 1


async def test_a_reservation_that_an_older_release_lets_grow_is_not_taken_and_the_move_fails(
    cluster: FaultyCluster, agents: dict[str, NodeAgent]
) -> None:
    async with replica(cluster, extending=NODES) as one:
        virt = VirtController(one, agents)
        cheap, _ = await two_crowded(one, agents)
        await asked(one)
        migration = await virt.until_created()
        ledger = cluster._ledgers.records["b"].ledger
        ((_, kept),) = reserved_for_migrations(cluster)
        assert kept.reserved is not None
        cpus = kept.reserved.owned
        cluster.put_ledger("b", ledger.after(LedgerChange(claims=(replace(kept, owned=cpus, cpus=cpus),))))
        await asyncio.sleep(1)
        virt.make_target(migration)
        assert await virt.schedule(migration) == "refused"
        virt.fail(migration)
        await one.until(lambda: not reservations(cluster))
        assert cheap.uid in one.claims("a")


async def test_an_older_release_that_takes_a_reservation_away_makes_the_move_fail(
    cluster: FaultyCluster, agents: dict[str, NodeAgent]
) -> None:
    async with replica(cluster, extending=NODES) as one:
        virt = VirtController(one, agents)
        cheap, _ = await two_crowded(one, agents)
        big = await asked(one)
        migration = await virt.until_created()
        ((_, kept),) = reserved_for_migrations(cluster)
        ledger = cluster._ledgers.records["b"].ledger
        cluster.put_ledger("b", ledger.after(LedgerChange(releases=(kept.uid,))))
        assert await one.bind(asking_pod(cluster, "faster", 4), "b") == ""
        virt.make_target(migration)
        assert await virt.schedule(migration) == "refused"
        virt.fail(migration)
        await one.until(lambda: not reservations(cluster))
        assert {cheap.uid} < set(one.claims("a"))
        assert big.uid not in one.claims("a")


@pytest.mark.parametrize("bound", [False, True])
async def test_a_migration_that_is_deleted_is_not_tried_again_by_another_replica_either(
    cluster: FaultyCluster, agents: dict[str, NodeAgent], *, bound: bool
) -> None:
    async with replica(cluster, extending=NODES) as one, replica(cluster, extending=NODES) as other:
        virt = VirtController(one, agents)
        await two_crowded(one, agents)
        big = await asked(one)
        first = await virt.until_created()
        if bound:
            target = virt.make_target(first)
            assert await virt.schedule(first) == ""
            cluster.migrations.remove((first.namespace, first.name))
            cluster.delete_pod(target.namespace, target.name, force=True)
        else:
            await asyncio.sleep(25)
            cluster.migrations.remove((first.namespace, first.name))
        await one.until(lambda: not reservations(cluster))
        for _ in range(3):
            await asyncio.sleep(SEARCH_S)
            await other.filter(big)
            await asyncio.sleep(5)
            assert {move.vmi for move in virt.created} <= {"small-b"}
        assert virt.created
