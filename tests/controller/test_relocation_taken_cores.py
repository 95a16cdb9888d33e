"""A VM goes back to its present cores when others have taken its next ones."""

from __future__ import annotations

import asyncio

from kvplace.core.ledger import LedgerChange, claim_of
from kvplace.core.request import Policy
from tests.controller.relocations import (
    EXCLUSIVE,
    NONE,
    NodeAgent,
    bound,
    condition,
    edit,
    until_written,
)
from tests.controller.replicas import asking_pod, replica
from tests.kube.faulty_cluster import FaultyCluster


async def test_a_vm_whose_next_cores_were_given_away_goes_back_to_its_present_placement(
    cluster: FaultyCluster, agent: NodeAgent
) -> None:
    async with replica(cluster) as one:
        pod = await bound(one, agent, "vm")
        edit(cluster, pod, NONE)
        unpinned = await until_written(one, agent, pod, 2)
        agent.carry_out(pod)
        await one.until(lambda: pod.uid not in agent.ledger.claims)
        edit(cluster, pod, EXCLUSIVE)
        following = await until_written(one, agent, pod, 3)
        other = asking_pod(cluster, "other", 2)
        taken = claim_of(other.uid, following.placement, namespace="default", pod="other", vmi=other.vmi)
        cluster.put_ledger("n1", agent.ledger.after(LedgerChange((), (pod.uid,))))
        cluster.put_ledger("n1", agent.ledger.after(LedgerChange((taken,))))
        agent.fail(pod)
        back = await until_written(one, agent, pod, 4)
        assert back.placement == unpinned.placement
        agent.carry_out(pod)
        await one.until(lambda: agent.ledger.claims.keys() == {other.uid})
        assert "belong to others by now" in str(condition(cluster, pod))
        await asyncio.sleep(120)
        assert agent.stored(pod).revision == 4


async def test_when_others_share_its_next_cores_it_keeps_them_until_it_has_gone_back(
    cluster: FaultyCluster, agent: NodeAgent
) -> None:
    async with replica(cluster) as one:
        pod = asking_pod(cluster, "vm", 2, policy=Policy.SHARE)
        assert await one.bind(pod, "n1") == ""
        first = agent.stored(pod)
        agent.in_force[pod.uid] = first
        agent.report()
        edit(cluster, pod, EXCLUSIVE)
        following = await until_written(one, agent, pod, 2)
        other = asking_pod(cluster, "other", 2, policy=Policy.SHARE)
        sharing = claim_of(other.uid, first.placement, namespace="default", pod="other", vmi=other.vmi)
        cluster.put_ledger("n1", agent.ledger.after(LedgerChange((), (pod.uid,))))
        cluster.put_ledger("n1", agent.ledger.after(LedgerChange((sharing,))))
        await one.until(lambda: pod.uid in agent.ledger.claims)
        agent.fail(pod)
        back = await until_written(one, agent, pod, 3)
        assert back.placement == first.placement
        assert agent.ledger.claims[pod.uid].owned == following.placement.owned
        agent.in_force[pod.uid] = back
        agent.report()
        await one.until(lambda: not agent.ledger.owned)
