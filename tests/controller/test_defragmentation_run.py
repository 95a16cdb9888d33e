"""The moves of a defragmentation, carried out by `serve` and an agent one after the other."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence

import pytest

from kvplace.core.cluster.defragmentation import Defragmentation, DefragmentingMove, defragment
from kvplace.core.cluster.draft import OPEN
from kvplace.core.occupant import ClusterNode, Occupant
from kvplace.core.request import PinningOptions, Request, Scope
from kvplace.core.scalars import NO_BYTES, NodeName
from kvplace.core.well_known_names import MOVABLE, PLACE_AGAIN
from kvplace.kube.migrations import START_S
from kvplace.kube.object_records import PodRecord
from kvplace.plan.defragmentation_run import BEGIN_S, MoveResult, carry_out
from tests.controller.relocations import NODE, NodeAgent, bound, edit
from tests.controller.replicas import Replica, replica
from tests.kube.faulty_cluster import FaultyCluster
from tests.nodes.machines import TWO

AGREES = {"cpu-set": "any", MOVABLE: "true"}


async def split_vms(one: Replica, agent: NodeAgent) -> list[PodRecord]:
    """Bind two VMs over both sockets; then there is room for each on one socket."""
    fillers = [await bound(one, agent, f"filler-{number}", 6) for number in range(2)]
    wide = [await bound(one, agent, "wide", 4, scope=Scope.ANY)]
    one.cluster.delete_pod("default", fillers[0].name, force=True)
    del agent.in_force[fillers[0].uid]
    agent.report()
    await one.until(lambda: fillers[0].uid not in agent.ledger.claims)
    for pod in wide:
        edit(one.cluster, pod, AGREES)
    return wide


def found(agent: NodeAgent, pods: Sequence[PodRecord], *, between: bool = False) -> Defragmentation:
    """Search moves of these VMs, with an empty second node."""
    request = Request(4, PinningOptions(Scope.ANY), memory=NO_BYTES)
    running = tuple(Occupant(pod.name, request, agent.stored(pod).placement) for pod in pods)
    others = tuple(
        Occupant(uid, Request(6), placed.placement)
        for uid, placed in agent.in_force.items()
        if uid not in {pod.uid for pod in pods}
    )
    nodes = [ClusterNode(NODE, TWO, (*running, *others)), ClusterNode(NodeName("n2"), TWO)]
    names = [pod.name for pod in pods]
    return defragment(nodes, () if between else names, dict.fromkeys(names, OPEN) if between else {})


async def run(
    cluster: FaultyCluster,
    moves: Sequence[DefragmentingMove],
    pods: Sequence[PodRecord],
    may_continue: Callable[[], bool] = lambda: True,
) -> list[MoveResult]:
    by_name = {pod.name: pod for pod in pods}
    return [one async for one in carry_out(cluster, moves, by_name, may_continue=may_continue)]


@contextlib.asynccontextmanager
async def carrying_out(
    agent: NodeAgent, pods: Sequence[PodRecord], *, fails: bool = False
) -> AsyncIterator[None]:
    """Let the agent carry out, or undo, every new revision."""

    async def work() -> None:
        while True:
            await asyncio.sleep(0.5)
            for pod in pods:
                newest = agent.stored(pod).revision
                if agent.in_force[pod.uid].revision < newest and agent.failed.get(pod.uid) != newest:
                    if fails and newest == 2:
                        agent.fail(pod)
                    else:
                        agent.carry_out(pod)

    task = asyncio.create_task(work())
    try:
        yield
    finally:
        task.cancel()


async def test_a_move_inside_a_node_ends_when_its_old_cores_are_released(
    cluster: FaultyCluster, agent: NodeAgent
) -> None:
    async with replica(cluster) as one:
        pods = await split_vms(one, agent)
        plan = found(agent, pods)
        assert [move.comes_together for move in plan.moves] == [True]
        async with carrying_out(agent, pods):
            results = await run(cluster, plan.moves, pods)
        assert [result.error for result in results] == [""]
        placed = agent.stored(pods[0])
        assert placed.placement.cpus == plan.moves[0].after.cpus  # as predicted
        assert agent.ledger.claims[pods[0].uid].owned == placed.placement.owned
        assert PLACE_AGAIN not in cluster._edited_vmis.records["default", pods[0].vmi].asking


async def test_a_move_that_the_agent_undoes_is_reported_with_its_reason(
    cluster: FaultyCluster, agent: NodeAgent
) -> None:
    async with replica(cluster) as one:
        pods = await split_vms(one, agent)
        before = agent.stored(pods[0]).placement
        async with carrying_out(agent, pods, fails=True):
            (result,) = await run(cluster, found(agent, pods).moves, pods)
        assert "no free huge pages" in result.error
        assert agent.stored(pods[0]).placement == before
        assert PLACE_AGAIN not in cluster._edited_vmis.records["default", pods[0].vmi].asking


async def test_a_vm_stays_when_its_owner_does_not_agree_any_more(
    cluster: FaultyCluster, agent: NodeAgent
) -> None:
    async with replica(cluster) as one:
        pods = await split_vms(one, agent)
        edit(cluster, pods[0], {"cpu-set": "any"})
        (result,) = await run(cluster, found(agent, pods).moves, pods)
        assert MOVABLE in result.error
        assert agent.stored(pods[0]).revision == 1


async def test_a_vm_that_has_ended_or_moved_meanwhile_ends_the_run(
    cluster: FaultyCluster, agent: NodeAgent
) -> None:
    async with replica(cluster) as one:
        pods = await split_vms(one, agent)
        moves = found(agent, pods).moves
        async with carrying_out(agent, pods):
            await run(cluster, moves, pods)
            (again,) = await run(cluster, moves, pods)
        assert "other cores since the moves were found" in again.error
        cluster.delete_pod("default", pods[0].name, force=True)
        results = await run(cluster, [*moves, *moves], pods)
        assert [result.error for result in results] == ["the VM does not run on this node any more"]


async def test_without_serve_the_move_is_given_up(cluster: FaultyCluster, agent: NodeAgent) -> None:
    async with replica(cluster) as one:
        pods = await split_vms(one, agent)
    began = asyncio.get_running_loop().time()
    (result,) = await run(cluster, found(agent, pods).moves, pods)
    assert "serve has not begun the move" in result.error
    assert asyncio.get_running_loop().time() - began < BEGIN_S + 10
    assert PLACE_AGAIN not in cluster._edited_vmis.records["default", pods[0].vmi].asking


async def test_an_interrupted_run_completes_its_move_and_a_second_run_may_continue_from_there(
    cluster: FaultyCluster, agent: NodeAgent
) -> None:
    async with replica(cluster) as one:
        pods = await split_vms(one, agent)
        moves = found(agent, pods).moves
        asked = iter((True, False))
        async with carrying_out(agent, pods):
            results = await run(cluster, [*moves, *moves], pods, lambda: next(asked))
        assert [result.error for result in results] == [""]
        assert found(agent, pods).moves == ()


@pytest.mark.parametrize(
    ("phases", "error"),
    [
        (("Scheduling", "Running", "Succeeded"), ""),
        (("Scheduling", "Failed"), "failed"),
        (("Pending",), f"has not started within {START_S:.0f} s"),
        (("Running", None), "was deleted"),
    ],
)
async def test_a_migration_goes_to_the_planned_node_and_is_followed_to_its_end(
    cluster: FaultyCluster, agent: NodeAgent, phases: tuple[str | None, ...], error: str
) -> None:
    async with replica(cluster) as one:
        pods = await split_vms(one, agent)
        plan = found(agent, pods, between=True)
        assert [(move.id, move.target) for move in plan.moves] == [(pods[0].name, "n2")]

        async def virt_controller() -> None:
            while not cluster.migrates_to:  # noqa: ASYNC110
                await asyncio.sleep(0.1)
            (created,) = cluster.migrates_to.values()
            assert (created.vmi, created.target) == (pods[0].vmi, "n2")
            for phase in phases:
                await asyncio.sleep(5)
                if phase is None:
                    await cluster.delete_migration(created.namespace, created.name)
                else:
                    cluster.put_migration(created.namespace, created.name, created.vmi, phase)
            if phases[-1] == "Succeeded":
                cluster.delete_pod("default", pods[0].name, force=True)
                del agent.in_force[pods[0].uid]
                agent.report()

        playing = asyncio.create_task(virt_controller())
        (result,) = await run(cluster, plan.moves, pods)
        await playing
        assert error in result.error
        assert bool(error) == bool(result.error)
        if not error:
            assert pods[0].uid not in agent.ledger.claims
        if "not started" in error:
            assert not cluster.migrations.records
