"""A running VM that is edited may get cores that Filter holds for a pod: then the pod's bind still ends well.

Holds are of one replica, and any replica may give the running VM its cores. So the ledger decides.
"""

from __future__ import annotations

from kvplace.core.request import Scope
from kvplace.core.well_known_names import RELEASED_AT
from kvplace.kube.object_records import PodRecord
from tests.controller.relocations import (
    EXCLUSIVE,
    NONE,
    NodeAgent,
    bound,
    edit,
    until_written,
)
from tests.controller.replicas import Replica, asking_pod, replica
from tests.kube.faulty_cluster import FaultyCluster
from tests.nodes.machines import TWO


async def unpinned(one: Replica, agent: NodeAgent) -> PodRecord:
    """Run a VM that has given up its cores."""
    pod = await bound(one, agent, "vm")
    edit(one.cluster, pod, NONE)
    await until_written(one, agent, pod, 2)
    agent.carry_out(pod)
    await one.until(lambda: pod.uid not in agent.ledger.claims)
    return pod


async def test_the_pod_gets_other_cores_of_its_node(cluster: FaultyCluster, agent: NodeAgent) -> None:
    async with replica(cluster) as one:
        vm = await unpinned(one, agent)
        pod = asking_pod(cluster, "asking")
        assert (await one.filter(pod)).names == ["n1"]
        edit(cluster, vm, EXCLUSIVE)
        theirs = (await until_written(one, agent, vm, 3)).placement.owned
        (held,) = one.extender.pending.held_on(agent.node)
        assert held.owned & theirs
        assert await one.bind(pod, "n1") == ""
        agent.carry_out(vm)
        agent.carry_out(pod)


async def test_a_pod_that_fits_there_no_longer_goes_to_another_node(
    cluster: FaultyCluster, agent: NodeAgent
) -> None:
    cluster.create_node("n2", topology=TWO)
    async with replica(cluster) as one:
        vm = await unpinned(one, agent)
        pod = asking_pod(cluster, "asking", 16, scope=Scope.ANY)
        assert (await one.filter(pod, "n1")).names == ["n1"]
        edit(cluster, vm, EXCLUSIVE)
        await until_written(one, agent, vm, 3)
        assert "n1" in await one.bind(pod, "n1")
        assert (await one.filter(pod)).names == ["n2"]
        assert await one.bind(pod, "n2") == ""
        assert agent.ledger.claims.keys() == {vm.uid}


async def test_a_pod_that_fits_nowhere_any_more_is_woken_when_it_fits_again(
    cluster: FaultyCluster, agent: NodeAgent
) -> None:
    async with replica(cluster) as one:
        vm = await unpinned(one, agent)
        pod = asking_pod(cluster, "asking", 16, scope=Scope.ANY)
        assert (await one.filter(pod)).names == ["n1"]
        edit(cluster, vm, EXCLUSIVE)
        await until_written(one, agent, vm, 3)
        assert "n1" in await one.bind(pod, "n1")
        assert (await one.filter(pod)).names == []
        agent.carry_out(vm)
        await one.until(lambda: agent.ledger.claims[vm.uid].relocation is None)
        woken = cluster.node_annotations("n1").get(RELEASED_AT)
        edit(cluster, vm, NONE)
        await until_written(one, agent, vm, 4)
        agent.carry_out(vm)
        await one.until(lambda: cluster.node_annotations("n1").get(RELEASED_AT) != woken)
        await one.until(lambda: vm.uid not in agent.ledger.claims)
        assert (await one.filter(pod)).names == ["n1"]
        assert await one.bind(pod, "n1") == ""
