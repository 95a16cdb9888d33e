"""A replica whose view of the cluster is old does not undo or repeat what another one has relocated."""

from __future__ import annotations

import asyncio

from kvplace.core.placement import PodPlacement
from kvplace.core.request import Policy
from tests.controller.relocations import (
    EXCLUSIVE,
    NODE,
    NONE,
    SHARE,
    LaggingView,
    NodeAgent,
    bound,
    edit,
    until_written,
)
from tests.controller.replicas import replica
from tests.kube.faulty_cluster import FaultyCluster


async def test_a_replica_that_lags_behind_does_not_relocate_a_vm_that_another_one_has_relocated(
    cluster: FaultyCluster, agent: NodeAgent
) -> None:
    lagging = LaggingView(cluster)
    async with replica(cluster) as one:
        pod = await bound(one, agent, "vm")
        await one.until(lambda: one.cache.pods.records[pod.uid].placement)
        async with replica(lagging) as late:
            lagging.lag()
            edit(cluster, pod, SHARE)
            after = await until_written(one, agent, pod, 2)
            agent.carry_out(pod)
            await one.until(lambda: agent.ledger.claims[pod.uid].relocation is None)
            await asyncio.sleep(120)
            assert PodPlacement.from_json(late.cache.pods.records[pod.uid].placement).revision == 1
            lagging.catch_up()
            await asyncio.sleep(120)
    assert agent.stored(pod) == after
    claim = agent.ledger.claims[pod.uid]
    assert (claim.cpus, claim.policy, claim.relocation) == (after.placement.cpus, Policy.SHARE, None)


async def test_a_replica_that_lags_behind_does_not_end_a_relocation_that_has_begun_since(
    cluster: FaultyCluster, agent: NodeAgent
) -> None:
    lagging = LaggingView(cluster)
    async with replica(cluster) as one, replica(lagging) as late:
        pod = await bound(one, agent, "vm")
        edit(cluster, pod, SHARE)
        await until_written(one, agent, pod, 2)
        await late.until(lambda: "revision" in late.cache.pods.records[pod.uid].placement)
        for kind in ("pods", "nodeledgers", "nodetopologies"):
            lagging.lag(kind)
        agent.carry_out(pod)
        await one.until(lambda: agent.ledger.claims[pod.uid].relocation is None)
        edit(cluster, pod, EXCLUSIVE)
        await until_written(one, agent, pod, 3)
        under_way = agent.ledger.claims[pod.uid]
        lagging.catch_up("nodetopologies")
        await late.until(lambda: late.cache.topologies.records[NODE].pods[pod.uid].revision == 2)
        await asyncio.sleep(120)
        assert agent.ledger.claims[pod.uid] == under_way
        lagging.catch_up()
        agent.carry_out(pod)
        await one.until(lambda: agent.ledger.claims[pod.uid].relocation is None)


async def test_a_replica_with_a_pod_older_than_its_claim_does_not_begin_a_failed_relocation_again(
    cluster: FaultyCluster, agent: NodeAgent
) -> None:
    lagging = LaggingView(cluster)
    async with replica(cluster) as one, replica(lagging) as late:
        pod = await bound(one, agent, "vm")
        edit(cluster, pod, NONE)
        await until_written(one, agent, pod, 2)
        await late.until(lambda: "revision" in late.cache.pods.records[pod.uid].placement)
        lagging.lag("pods")
        agent.fail(pod)
        await late.until(lambda: late.cache.topologies.records[NODE].pods[pod.uid].failed_revision == 2)
        lagging.lag("nodetopologies")
        await until_written(one, agent, pod, 3)
        agent.carry_out(pod)
        await one.until(lambda: agent.ledger.claims[pod.uid].relocation is None)
        settled = cluster._ledgers.get(NODE)
        await asyncio.sleep(120)
        assert PodPlacement.from_json(late.cache.pods.records[pod.uid].placement).revision == 2
        assert cluster._ledgers.get(NODE) == settled
