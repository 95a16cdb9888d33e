"""A replica may die at every step of a bind, and its last request land late: no core is lost or shared."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from kvplace.core.scalars import CpuMask, NodeName, PodUid
from tests.controller.replicas import Replica, asking_pod, replica
from tests.kube.faults import Moment, Operation
from tests.nodes.machines import EIGHT
from tests.scheduler.counting import Counting, Network

STEPS = [
    (operation, moment)
    for operation in (Operation.CREATE_LEDGER, Operation.WRITE_LEDGER, Operation.BIND)
    for moment in Moment
]


@pytest.mark.parametrize("late", [False, True], ids=["lost", "late"])
@pytest.mark.parametrize("aftermath", ["same node", "other node", "pod deleted", "silence"])
@pytest.mark.parametrize(
    ("operation", "moment"), STEPS, ids=[f"{moment.value} {op.value}" for op, moment in STEPS]
)
async def test_whatever_step_a_replica_dies_at_the_others_bring_pod_and_ledger_together(
    operation: Operation, moment: Moment, aftermath: str, *, late: bool
) -> None:
    cluster = Network() if late else Counting()
    for node in ("a", "b"):
        cluster.create_node(node, topology=EIGHT)
    async with replica(cluster) as survivor:
        pod = asking_pod(cluster, "vm", 5)
        hold = cluster.faults.hold(operation, moment=moment)
        async with replica(cluster, controller=False) as victim:
            binding = asyncio.create_task(victim.bind(pod, "a"))
            await hold.reached.wait()
        binding.cancel()

        match aftermath:
            case "same node":
                assert await survivor.bind(pod, "a") == ""
            case "other node":
                answer = await survivor.bind(pod, "b")
                assert (answer == "") == (cluster.pod("vm").node == "b")
            case "pod deleted":
                cluster.delete_pod("default", "vm", force=True)
            case "silence":
                await asyncio.sleep(61)
        hold.release()
        if isinstance(cluster, Network):
            await cluster.all_arrived()

        await asyncio.sleep(61)
        await settle(survivor, cluster)
        if aftermath == "silence" and not cluster.pod("vm").node:
            (node,) = (await survivor.filter(pod)).names or [NodeName("")]
            assert await survivor.bind(pod, node) == ""
            await settle(survivor, cluster)
        assert await survivor.bind(asking_pod(cluster, "next", 5), "b") in (
            "",
            "node b: no socket with 5 free CPUs, best 3 on socket 0",
        )
        for name in ("vm", "next"):
            if ("default", name) in cluster._pods.records:
                cluster.delete_pod("default", name, force=True)
        await settle(survivor, cluster)
        assert all(not record.ledger.owners for record in cluster._ledgers.records.values())


async def settle(one: Replica, cluster: Counting) -> None:
    """Wait until each living bound pod has just its claim, and no other client has one."""

    def agrees() -> bool:
        bound = {pod.uid: pod for pod in cluster._pods.records.values() if pod.node}
        claims = {
            (uid, record.node): claim
            for record in cluster._ledgers.records.values()
            for uid, claim in record.ledger.claims.items()
        }
        return claims.keys() == {(uid, pod.node) for uid, pod in bound.items()} and all(
            claim.cpus == cluster.placement(bound[PodUid(uid)].name).placement.cpus
            for (uid, _), claim in claims.items()
        )

    await one.until(agrees)
    for record in cluster._ledgers.records.values():
        record.ledger.check()


async def test_a_replica_that_starts_anew_knows_every_claim_before_it_answers() -> None:
    cluster = Counting()
    cluster.create_node("a", topology=EIGHT)
    async with replica(cluster, controller=False) as before:
        assert await before.bind(asking_pod(cluster, "vm", 5), "a") == ""
    async with replica(cluster, controller=False) as after:
        assert (await after.filter(asking_pod(cluster, "big", 4))).names == []
        assert (await after.filter(asking_pod(cluster, "small", 3))).names == ["a"]


async def test_a_node_that_is_made_again_under_its_name_starts_with_its_running_pods() -> None:
    cluster = Counting()
    cluster.create_node("a", topology=EIGHT)
    async with replica(cluster) as one:
        pod = asking_pod(cluster, "vm", 5)
        assert await one.bind(pod, "a") == ""
        cluster.delete_node("a")
        cluster.create_node("a", topology=replace(EIGHT, reserved=CpuMask(1)))
        await one.until(lambda: one.topology("a") == replace(EIGHT, reserved=CpuMask(1)))
        assert "best 3 on socket 0" in await one.bind(asking_pod(cluster, "next", 4), "a")
        assert cluster.claimed_on(pod.uid) == ["a"]
