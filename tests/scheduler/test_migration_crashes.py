"""A replica may die at every write of a migration that makes room: the VM runs on, and no core is lost."""

from __future__ import annotations

import asyncio

import pytest

from kvplace.core.scalars import PodUid
from kvplace.kube.migrations import START_S, UNSCHEDULABLE_S, MigrationRecord
from kvplace.kube.object_records import PodRecord
from kvplace.scheduler.extender import ExtenderSettings
from kvplace.scheduler.limits import SEARCH_S
from kvplace.scheduler.room_maker import MakeRoom
from tests.controller.relocations import NodeAgent
from tests.controller.replicas import Replica, asking_pod, replica
from tests.kube.faults import Moment, Operation
from tests.scheduler.counting import Counting, Network
from tests.scheduler.two_nodes import VirtController, nodes, reservations, two_crowded

NODES = ExtenderSettings(make_room=MakeRoom.NODES)
STEPS = [
    (Operation.WRITE_LEDGER, 1),  # the target is reserved
    (Operation.WRITE_LEDGER, 2),  # what the VM leaves is reserved
    (Operation.CREATE_MIGRATION, 1),  # the dry run
    (Operation.CREATE_MIGRATION, 2),
    (Operation.WRITE_LEDGER, 3),  # the first renewals
    (Operation.WRITE_LEDGER, 4),
    (Operation.WRITE_LEDGER, 5),
]


@pytest.mark.parametrize("late", [False, True], ids=["lost", "late"])
@pytest.mark.parametrize("kubevirt", ["goes on", "is slow", "fails", "is down"])
@pytest.mark.parametrize("moment", Moment, ids=lambda moment: moment.value)
@pytest.mark.parametrize(("operation", "nth"), STEPS, ids=[f"{op.value} {nth}" for op, nth in STEPS])
async def test_whatever_write_a_replica_dies_at_the_vm_runs_on_and_the_waiting_one_is_bound(
    operation: Operation, nth: int, moment: Moment, kubevirt: str, *, late: bool
) -> None:
    cluster = Network() if late else Counting()
    agents = nodes(cluster, "a", "b")
    async with replica(cluster, extending=NODES) as survivor:
        virt = VirtController(survivor, agents)
        cheap, _ = await two_crowded(survivor, agents)
        big = asking_pod(cluster, "big", 8)
        hold = cluster.faults.hold(operation, nth=nth, moment=moment)
        async with replica(cluster, extending=NODES, controller=False) as victim:
            assert not (await victim.filter(big)).names
            async with asyncio.timeout(60):
                await hold.reached.wait()
        if late:
            hold.release()
            await asyncio.sleep(1)
        for migration in virt.created:
            await go_on(virt, migration, kubevirt)
        check(cluster, agents)
        hold.release()
        await asyncio.sleep(35)
        check(cluster, agents)
        assert reservations(cluster) == [] or virt.created

        # Later everything is tried again.
        for _ in range(12):
            if cluster.pod("big").node:
                break
            offered = (await survivor.filter(big)).names
            if offered:
                assert await survivor.bind(big, offered[0]) == ""
                break
            await asyncio.sleep(SEARCH_S)
            for migration in virt.created:
                if not migration.has_ended and not migration.phase:
                    await go_on(virt, migration, "goes on")
        assert cluster.pod("big").node
        await asyncio.sleep(35)
        assert reservations(cluster) == []
        check(cluster, agents)
        assert cheap.vmi in {pod.vmi for pod in living(cluster)}


async def go_on(virt: VirtController, migration: MigrationRecord, kubevirt: str) -> None:
    """Let KubeVirt carry a migration out, as far as it can by then."""
    if kubevirt == "is down":
        await asyncio.sleep(START_S)
        return
    if kubevirt == "is slow":
        await asyncio.sleep(40)
    if migration.name not in {one.name for one in virt.created}:
        return
    if migration.name not in virt.targets:
        virt.make_target(migration)
    if await virt.schedule(migration) != "":
        await asyncio.sleep(UNSCHEDULABLE_S)
        virt.fail(migration)
    elif kubevirt == "fails":
        virt.fail(migration)
    else:
        virt.run(migration)
        await asyncio.sleep(40)
        virt.succeed(migration)


def living(cluster: Counting) -> list[PodRecord]:
    return [pod for pod in cluster._pods.records.values() if pod.node and not pod.has_ended]


def check(cluster: Counting, agents: dict[str, NodeAgent]) -> None:
    """Every VM has one running pod at least, and every core of it is its own."""
    for record in cluster._ledgers.records.values():
        record.ledger.check()
    for agent in agents.values():
        for uid, bound in agent.in_force.items():
            agent.check(PodUid(uid), bound.placement.owned)
    running = {uid for agent in agents.values() for uid in agent.in_force}
    for pod in living(cluster):
        if pod.vmi != "big":
            assert any(one.vmi == pod.vmi and one.uid in running for one in living(cluster))


async def test_a_migration_that_a_dead_replica_has_left_unstarted_is_deleted_by_the_next_one() -> None:
    cluster = Counting()
    agents = nodes(cluster, "a", "b")
    async with replica(cluster, extending=NODES) as first:
        virt = VirtController(first, agents)
        await two_crowded(first, agents)
        big = asking_pod(cluster, "big", 8)
        assert not (await first.filter(big)).names
        migration = await virt.until_created()
    await asyncio.sleep(START_S + 1)
    async with replica(cluster, extending=NODES) as second:
        await second.until(
            lambda: not reservations(cluster) or asyncio.get_running_loop().time() > START_S + 40
        )
        assert [one.name for one in VirtController(second, agents).created] == [migration.name]
        await asked_until(
            second, big, lambda: cluster.migrations.get((migration.namespace, migration.name)) is None
        )


async def asked_until(one: Replica, pod: PodRecord, holds: object) -> None:
    assert callable(holds)
    for _ in range(10):
        if holds():
            return
        await one.filter(pod)
        await asyncio.sleep(SEARCH_S)
    assert holds()
