"""Without NRI: containers that a real containerd and runc make, while cgroups are written beside them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

from harness.node_programs.small_images import busybox
from harness.pod_cgroups import pod_uid
from harness.real_node.runtime import Container, ContainerRuntime, Pod
from kvplace.agent.cgroup_source import CgroupSource
from kvplace.agent.conditions import TopologyCondition
from kvplace.agent.cpuset_keeper import CpusetKeeper
from kvplace.agent.node_objects import NodeObjects
from kvplace.agent.node_report import NodeReport
from kvplace.core.ledger import Ledger, LedgerChange, claim_of
from kvplace.core.scalars import PodUid
from kvplace.kube.object_records import LedgerRecord
from kvplace.kube.watches import Init, InitApply, InitDone
from kvplace.linux.cgroups import CgroupVersion, CpusetHierarchy
from tests.agent.nodes_in_use import NODE, machine_of, placed

VM = pod_uid(1)
CPUS_OF_FIRST_INSTRUCTION = ["sh", "-c", "grep Cpus_allowed_list /proc/self/status; exec sleep inf"]
CONTAINERS = 10


@contextlib.asynccontextmanager
async def enforced(runtime: ContainerRuntime) -> AsyncIterator[tuple[CpusetKeeper, NodeReport]]:
    """Run the enforcement in the sandbox's cgroups; a VM owns CPU 1, the pool is CPU 0."""
    own, report = NodeObjects(NODE, machine_of([0, 1])), NodeReport()
    ledger = Ledger().after(LedgerChange((claim_of(VM, placed(VM, "1").placement),)))
    for store in own.stores:
        store.apply(Init())
    own.ledgers.apply(InitApply(LedgerRecord(NODE, ledger, "1")))
    for store in own.stores:
        store.apply(InitDone())
    hierarchy = CpusetHierarchy(runtime.sandbox.groups.cpuset, CgroupVersion.V1)
    keeper = CpusetKeeper(own, report, hierarchy)
    task = asyncio.create_task(keeper.run(CgroupSource(keeper, own, hierarchy.root)))
    try:
        yield keeper, report
        assert not task.done()
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


async def run_pod(runtime: ContainerRuntime, uid: PodUid) -> Pod:
    parent = f"/kubepods/besteffort/pod{uid}"
    return await asyncio.to_thread(lambda: runtime.run_pod(f"app-{uid[-1]}", cgroup_parent=parent))


async def run_container(pod: Pod, number: int) -> Container:
    return await asyncio.to_thread(
        lambda: pod.run_container(f"c{number}", CPUS_OF_FIRST_INSTRUCTION, image=busybox().reference)
    )


async def first_line(container: Container) -> str:
    """Wait for what the program of a container reports first."""
    for _ in range(1000):
        if said := await asyncio.to_thread(container.runtime.crictl, "logs", container.id):
            return said
        await asyncio.sleep(0.01)
    raise AssertionError(f"{container.id} states nothing")


async def becomes(container: Container, cpus: str) -> None:
    for _ in range(1000):
        if await asyncio.to_thread(container.cpuset) == cpus:
            return
        await asyncio.sleep(0.01)
    assert await asyncio.to_thread(container.cpuset) == cpus


async def test_programs_of_new_containers_begin_on_the_shared_pool_but_where_runc_was_faster(
    container_runtime: ContainerRuntime,
) -> None:
    async with enforced(container_runtime) as (keeper, report):
        pod = await run_pod(container_runtime, pod_uid(2))
        made = [await run_container(pod, number) for number in range(CONTAINERS)]
        for container in made:
            await becomes(container, "0")
        logs = [await first_line(each) for each in made]
        first = [log.split()[-1] for log in logs]
        assert set(first) <= {"0", "0-1"}
        # Only NRI guarantees it: on a busy machine runc may start a program before the agent has its turn.
        assert first.count("0") > CONTAINERS / 2
        condition = report.conditions[TopologyCondition.CPUSETS_ENFORCED]
        assert (condition.status, keeper.repairs) == (True, 0), condition.message
        await asyncio.to_thread(pod.remove)


async def test_a_cpuset_that_the_runtime_is_asked_to_write_is_undone(
    container_runtime: ContainerRuntime,
) -> None:
    async with enforced(container_runtime):
        pod = await run_pod(container_runtime, pod_uid(3))
        container = await run_container(pod, 0)
        await becomes(container, "0")
        await asyncio.to_thread(container.update, "--cpuset-cpus=0-1")
        await becomes(container, "0")
        await asyncio.to_thread(pod.remove)
