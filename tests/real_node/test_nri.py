"""The agent as a plugin of a real containerd: where containers run from their first instruction on."""

from __future__ import annotations

import asyncio
import json
from asyncio import to_thread
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from harness.node_programs.small_images import busybox
from harness.real_node.runtime import Container, ContainerRuntime
from harness.real_node.sandbox import CommandFailed
from kvplace.agent import nri_source
from kvplace.agent.conditions import TopologyCondition
from kvplace.agent.node_plan import NodeContainer as KnownContainer
from kvplace.core.scalars import ContainerId
from tests.real_node.nri_agent import ALL, OWNED, POOL, SAY_CPUS_AND_STAY, RealNode, container, until


def _folder(known: KnownContainer | None) -> Path:
    assert known is not None
    assert known.folder is not None
    return known.folder


@pytest.fixture
def node(container_runtime: ContainerRuntime) -> Iterator[RealNode]:
    yield RealNode(container_runtime)
    container_runtime.crictl("rmp", "--all", "--force")


def _has(target: Container, cpus: str) -> bool:
    return target.cpuset() == cpus


def _spec_has(target: Container, cpus: str) -> bool:
    """Whether the spec that the runtime applies with each update has these CPUs."""
    described = json.loads(target.runtime.crictl("inspect", target.id))
    return bool(described["info"]["runtimeSpec"]["linux"]["resources"]["cpu"].get("cpus") == cpus)


async def test_a_vm_has_its_cpus_from_its_first_instruction_and_others_are_moved_off_before(
    node: RealNode,
) -> None:
    async with node.agent():
        plain = await to_thread(node.runtime.run_pod, "plain")
        app = await to_thread(container, plain, "app")
        assert await to_thread(app.cpuset) == ALL

        pod, bound = await to_thread(node.vm_pod, "vm")
        compute = await to_thread(
            pod.create_container, "compute", SAY_CPUS_AND_STAY, image=busybox().reference
        )
        assert await to_thread(app.cpuset) == POOL
        await to_thread(compute.start)
        sidecar = await to_thread(container, pod, "hook-sidecar-0")
        later = await to_thread(container, plain, "later")
        await until(lambda: bool(node.first_cpus(pod, "compute") and node.first_cpus(plain, "later")))
        assert node.first_cpus(pod, "compute") == OWNED
        assert node.first_cpus(plain, "later") == POOL
        found = [await to_thread(it.cpuset) for it in (compute, sidecar, app, later)]
        assert found == [OWNED, POOL, POOL, POOL]

        node.claim(bound)
        await to_thread(pod.remove)
        node.claim()
        await until(lambda: app.cpuset() == ALL)


async def test_an_update_through_cri_does_not_undo_it(node: RealNode) -> None:
    async with node.agent():
        pod, _ = await to_thread(node.vm_pod, "vm")
        compute = await to_thread(container, pod, "compute")
        sidecar = await to_thread(container, pod, "hook-sidecar-0")
        for target, own in (compute, OWNED), (sidecar, POOL):
            await to_thread(target.update, f"--cpuset-cpus={ALL}")
            assert await to_thread(target.cpuset) == own
            await to_thread(target.update, "--cpu-share=512")
            assert await to_thread(target.cpuset) == own


async def test_containers_made_while_no_agent_ran_get_their_cpus_when_one_starts(node: RealNode) -> None:
    pod, _ = await to_thread(node.vm_pod, "vm")
    compute = await to_thread(container, pod, "compute")
    plain = await to_thread(node.runtime.run_pod, "plain")
    app = await to_thread(container, plain, "app")
    unstarted = await to_thread(
        plain.create_container, "unstarted", SAY_CPUS_AND_STAY, image=busybox().reference
    )
    assert [await to_thread(it.cpuset) for it in (compute, app)] == [ALL, ALL]
    async with node.agent():
        assert [await to_thread(it.cpuset) for it in (compute, app)] == [OWNED, POOL]
        await to_thread(unstarted.start)
        await until(lambda: bool(node.first_cpus(plain, "unstarted")))
        assert node.first_cpus(plain, "unstarted") == POOL
    assert [await to_thread(it.cpuset) for it in (compute, app)] == [OWNED, POOL]
    async with node.agent() as agent:
        assert agent.repairs == 0


async def test_a_cgroup_that_a_user_writes_is_set_again_at_once(node: RealNode) -> None:
    plain = await to_thread(node.runtime.run_pod, "plain")
    before = await to_thread(container, plain, "before")
    async with node.agent() as agent:
        pod, _ = await to_thread(node.vm_pod, "vm")
        compute = await to_thread(container, pod, "compute")
        after = await to_thread(container, plain, "after")
        for target, own in (compute, OWNED), (before, POOL), (after, POOL):
            folder = _folder(agent.container(ContainerId(target.id)))
            await until(partial(_has, target, own))
            (folder / "cpuset.cpus").write_text(ALL)
            await until(partial(_has, target, own))
        assert agent.repairs == 3


async def test_a_cgroup_of_another_pod_that_a_user_writes_is_set_again(node: RealNode) -> None:
    async with node.agent() as agent:
        pod, _ = await to_thread(node.vm_pod, "vm")
        await to_thread(container, pod, "compute")
        plain = await to_thread(node.runtime.run_pod, "plain")
        app = await to_thread(container, plain, "app")
        assert await to_thread(app.cpuset) == POOL
        (known,) = [each for each in agent.containers() if each.name == "app"]
        (_folder(known) / "cpuset.cpus").write_text(ALL)
        await until(lambda: app.cpuset() == POOL)
        assert agent.repairs == 1


async def test_it_connects_again_after_a_restart_of_the_runtime(node: RealNode) -> None:
    async with node.agent() as agent:
        pod, _ = await to_thread(node.vm_pod, "vm")
        compute = await to_thread(container, pod, "compute")
        await to_thread(node.runtime.server.kill)
        await until(lambda: not agent.is_connected)
        assert node.report.conditions[TopologyCondition.CPUSETS_ENFORCED].reason == "RuntimeUnavailable"
        await to_thread(node.runtime.start)
        await until(lambda: agent.is_connected)
        assert node.report.conditions[TopologyCondition.CPUSETS_ENFORCED].status is True
        assert await to_thread(compute.cpuset) == OWNED
        plain = await to_thread(node.runtime.run_pod, "plain")
        app = await to_thread(container, plain, "app")
        assert await to_thread(app.cpuset) == POOL


async def test_changes_of_the_ledger_beside_starting_containers_neither_block_nor_get_lost(
    node: RealNode,
) -> None:
    """An update outside of any event beside a container's cycle makes containerd before 2.4 hang."""
    _, bound = await to_thread(node.vm_pod, "vm")
    plain = await to_thread(node.runtime.run_pod, "plain")
    stays = await to_thread(container, plain, "stays")
    async with node.agent():
        changes = 0

        async def change_the_ledger() -> None:
            nonlocal changes
            while True:
                node.claim(*(() if changes % 2 else (bound,)))
                changes += 1
                await asyncio.sleep(0.05)

        changing = asyncio.create_task(change_the_ledger())
        for number in range(12):
            app = await to_thread(container, plain, f"app-{number}")
            await to_thread(app.remove)
        changing.cancel()
        assert changes > 20
        for claims, own in ((bound,), POOL), ((), ALL):
            node.claim(*claims)
            await until(partial(_has, stays, own))
        last = await to_thread(container, plain, "last")
        assert await to_thread(last.cpuset) == ALL


async def test_a_change_that_meets_a_starting_container_reaches_its_program(node: RealNode) -> None:
    """Updates that come between the making of a container's cgroup and its start change its spec alone."""
    _, bound = await to_thread(node.vm_pod, "vm")
    plain = await to_thread(node.runtime.run_pod, "plain")
    async with node.agent() as agent:
        for number in range(8):
            node.claim()
            agent.carry_out()
            app = await to_thread(
                plain.create_container, f"app-{number}", SAY_CPUS_AND_STAY, image=busybox().reference
            )
            starting = asyncio.create_task(to_thread(app.start))
            await asyncio.sleep(0.004 * number)
            node.claim(bound)
            await starting
            await until(partial(_has, app, POOL))
            await to_thread(app.remove)


async def test_two_agents_would_break_every_creation(node: RealNode) -> None:
    """Why there is a lock: containerd refuses a container whose CPUs two plugins set."""
    pod, _ = await to_thread(node.vm_pod, "vm")
    async with node.agent():
        async with node.agent():
            with pytest.raises(CommandFailed, match="both tried to set"):
                await to_thread(container, pod, "compute")
        compute = await to_thread(container, pod, "compute")
        assert await to_thread(compute.cpuset) == OWNED


async def test_an_answer_that_is_longer_than_the_runtime_reads_at_once_arrives(
    node: RealNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a frame of more than 4096 bytes containerd stops answering.

    With so few CPUs an update has 79 bytes; on a large machine 50 of them are too many for a frame.
    """
    monkeypatch.setattr(nri_source, "MAX_UPDATES", 56)
    plain = await to_thread(node.runtime.run_pod, "plain")
    starting = [to_thread(container, plain, f"app-{number}") for number in range(56)]
    others = await asyncio.gather(*starting)
    async with node.agent() as agent:
        pod, _ = await to_thread(node.vm_pod, "vm")
        await to_thread(pod.create_container, "compute", SAY_CPUS_AND_STAY, image=busybox().reference)
        folders = [found.folder for found in agent.containers() if found.name != "compute" and found.folder]
        assert {(folder / "cpuset.cpus").read_text().strip() for folder in folders} == {POOL}
        assert len(folders) == len(others)
        for other in (others[0], others[-1]):
            await until(partial(_spec_has, other, POOL))
