"""A running VM that is to be placed again gets better cores, once, if there are some and its owner agrees."""

from __future__ import annotations

import asyncio

from kvplace.core.annotations import place_again_of
from kvplace.core.request import Scope
from kvplace.core.well_known_names import MOVABLE, PLACE_AGAIN
from kvplace.kube.object_records import PodRecord
from kvplace.nodes.node_cache import PEACE_S
from tests.controller.relocations import NodeAgent, bound, condition, edit, until_written, wide
from tests.controller.replicas import replica
from tests.kube.faulty_cluster import FaultyCluster


def again(pod: PodRecord, revision: int = 1, *, movable: str = "true", scope: str = "any") -> dict[str, str]:
    """The annotations of a VM that `defragment` has marked."""
    return {"cpu-set": scope, MOVABLE: movable, PLACE_AGAIN: place_again_of(pod.uid, revision)}


async def refusal(cluster: FaultyCluster, pod: PodRecord) -> str:
    """Wait for the reason why a VM keeps its cores."""
    while (found := condition(cluster, pod)) is None:  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    assert found.status is False
    return found.message


async def test_a_vm_over_two_sockets_comes_together_on_one(cluster: FaultyCluster, agent: NodeAgent) -> None:
    async with replica(cluster) as one:
        pod = await wide(one, agent)
        before = agent.ledger.owned
        edit(cluster, pod, again(pod))
        after = await until_written(one, agent, pod, 2)
        assert len(after.placement.packages) == 1
        assert agent.ledger.owned == before | after.placement.owned
        agent.carry_out(pod)
        await one.until(lambda: agent.ledger.claims[pod.uid].owned == after.placement.owned)
        await asyncio.sleep(2 * PEACE_S)
        assert agent.stored(pod).revision == 2


async def test_a_vm_with_the_best_cores_keeps_them_and_gets_the_reason(
    cluster: FaultyCluster, agent: NodeAgent
) -> None:
    async with replica(cluster) as one:
        pod = await bound(one, agent, "vm", 4, scope=Scope.ANY)
        claim = agent.ledger.claims[pod.uid]
        edit(cluster, pod, again(pod))
        assert "there are no better cores" in await refusal(cluster, pod)
        assert agent.ledger.claims[pod.uid] == claim
        assert agent.stored(pod).revision == 1


async def test_a_vm_does_not_move_without_the_consent_of_its_owner(
    cluster: FaultyCluster, agent: NodeAgent
) -> None:
    async with replica(cluster) as one:
        pod = await wide(one, agent)
        edit(cluster, pod, again(pod, movable="false"))
        assert MOVABLE in await refusal(cluster, pod)
        assert agent.stored(pod).revision == 1
        edit(cluster, pod, again(pod))
        await until_written(one, agent, pod, 2)


async def test_an_annotation_for_another_pod_or_revision_moves_nothing(
    cluster: FaultyCluster, agent: NodeAgent
) -> None:
    async with replica(cluster) as one:
        pod = await wide(one, agent)
        for value in ("another-pod/1", f"{pod.uid}/2", f"{pod.uid}", "1", ""):
            edit(cluster, pod, {**again(pod), PLACE_AGAIN: value})
            await asyncio.sleep(30)
        assert agent.stored(pod).revision == 1
        assert condition(cluster, pod) is None


async def test_a_vm_that_is_not_pinned_waits_until_it_is(cluster: FaultyCluster, agent: NodeAgent) -> None:
    async with replica(cluster) as one:
        pod = await wide(one, agent)
        in_force = agent.in_force.pop(pod.uid)
        agent.report()
        edit(cluster, pod, again(pod))
        await asyncio.sleep(60)
        assert agent.stored(pod).revision == 1
        agent.in_force[pod.uid] = in_force
        agent.report()
        await until_written(one, agent, pod, 2)


async def test_a_vm_that_has_just_moved_is_left_in_peace_first(
    cluster: FaultyCluster, agent: NodeAgent
) -> None:
    async with replica(cluster) as one:
        pod = await wide(one, agent)
        edit(cluster, pod, {"cpu-set": "any", "kvplace.io/cpu-policy": "share", MOVABLE: "true"})
        await until_written(one, agent, pod, 2)
        agent.carry_out(pod)
        edit(cluster, pod, {"cpu-set": "any", MOVABLE: "true"})
        await until_written(one, agent, pod, 3)
        agent.carry_out(pod)
        await one.until(lambda: agent.ledger.claims[pod.uid].relocation is None)
        assert len(agent.stored(pod).placement.packages) == 2
        moved = asyncio.get_running_loop().time()
        edit(cluster, pod, again(pod, 3))
        while agent.stored(pod).revision < 4:  # noqa: ASYNC110
            await asyncio.sleep(1)
        assert asyncio.get_running_loop().time() - moved > PEACE_S - 30


async def test_an_edit_of_the_options_counts_before_the_request_to_be_placed_again(
    cluster: FaultyCluster, agent: NodeAgent
) -> None:
    async with replica(cluster) as one:
        pod = await bound(one, agent, "vm", 2)
        edit(cluster, pod, {**again(pod, scope="one-socket"), "kvplace.io/cpu-policy": "share"})
        after = await until_written(one, agent, pod, 2)
        assert after.options is not None
        assert after.options.policy.value == "share"
