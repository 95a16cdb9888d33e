"""Failed writes, late replicas and disobedient threads leave no relocation open and no condition wrong."""

from __future__ import annotations

import asyncio
import contextlib

import pytest

from kvplace.core.errors import KvplaceError, Misconfigured, Unavailable
from kvplace.core.ledger import LedgerChange
from kvplace.core.node_topology import Enforcement
from kvplace.core.scalars import CpuMask, NodeName, PodUid
from kvplace.kube.object_records import Condition, LedgerRecord, PodRecord, PodReport
from tests.controller.relocations import (
    EXCLUSIVE,
    SHARE,
    LaggingView,
    NodeAgent,
    bound,
    condition,
    edit,
    until_written,
    wide,
)
from tests.controller.replicas import replica
from tests.kube.faults import Moment, Operation
from tests.kube.faulty_cluster import FaultyCluster
from tests.nodes.machines import TWO


async def test_a_way_back_ends_as_soon_as_no_thread_may_run_on_the_cores_it_leaves(
    cluster: FaultyCluster, agent: NodeAgent
) -> None:
    """Else a VM that sets its threads anew again and again would keep its relocation open."""
    async with replica(cluster) as one:
        pod = await wide(one, agent)
        edit(cluster, pod, EXCLUSIVE)
        left = (await until_written(one, agent, pod, 2)).placement.cpus
        agent.fail(pod)
        back = await until_written(one, agent, pod, 3)
        left = CpuMask(left & ~back.placement.cpus)
        not_measured, follows = CpuMask(0), back.placement.cpus
        for cpus, ends in ((not_measured, False), (follows | left, False), (follows, True)):
            report = PodReport(pod.uid, revision=3, running=True, cpus=CpuMask(cpus), drift="vCPU 0 left")
            cluster.put_topology("n1", TWO, enforcement=Enforcement.NRI, pods=[report])
            await asyncio.sleep(60)
            assert (agent.ledger.claims[pod.uid].relocation is None) is ends
        assert not agent.ledger.claims[pod.uid].cpus & left
        found = condition(cluster, pod)
        assert found is not None
        assert not found.status


async def test_a_refused_write_for_one_pod_stops_neither_claims_nor_relocations_of_the_others(
    cluster: FaultyCluster, agent: NodeAgent
) -> None:
    refused: set[PodUid] = set()
    write = cluster.write_ledger

    async def write_unless_refused(before: LedgerRecord, change: LedgerChange) -> LedgerRecord:
        if any(claim.uid in refused for claim in change.claims):
            raise Misconfigured("spec.claims: vmi of a claim has more than 253 characters")
        return await write(before, change)

    cluster.write_ledger = write_unless_refused  # type: ignore[method-assign]
    async with replica(cluster) as one:
        bad, good, edited = [await bound(one, agent, name) for name in ("bad", "good", "edited")]
        refused.add(bad.uid)
        await one.cache.ledgers.change(
            NodeName("n1"), lambda _: (LedgerChange(releases=(bad.uid, good.uid)), None)
        )
        edit(cluster, edited, SHARE)
        await until_written(one, agent, edited, 2)
        await one.until(lambda: good.uid in agent.ledger.claims)
        assert bad.uid not in agent.ledger.claims


@pytest.mark.parametrize("refused", ["a", "b"])
async def test_a_condition_that_cannot_be_written_for_one_pod_does_not_stop_the_edit_of_another(
    cluster: FaultyCluster, agent: NodeAgent, refused: str
) -> None:
    set_condition = cluster.set_pod_condition

    async def set_unless_refused(pod: PodRecord, condition: Condition) -> None:
        if pod.name == refused:
            raise Unavailable("scripted")
        await set_condition(pod, condition)

    cluster.set_pod_condition = set_unless_refused  # type: ignore[method-assign]
    async with replica(cluster) as one:
        pods = {name: await bound(one, agent, name) for name in ("a", "b")}
        for name, pod in pods.items():
            edit(cluster, pod, {"cpu-set": "no-such"} if name == refused else SHARE)
        (other,) = (pod for name, pod in pods.items() if name != refused)
        await until_written(one, agent, other, 2)


@pytest.mark.parametrize("moment", Moment)
@pytest.mark.parametrize("operation", [Operation.SET_POD_CONDITION, Operation.WRITE_LEDGER])
@pytest.mark.parametrize("fails", [False, True])
async def test_one_failed_write_at_the_end_of_a_relocation_leaves_its_condition_true_to_the_state(
    cluster: FaultyCluster, agent: NodeAgent, moment: Moment, operation: Operation, *, fails: bool
) -> None:
    async with replica(cluster) as one:
        pod = await bound(one, agent, "vm")
        edit(cluster, pod, SHARE)
        await until_written(one, agent, pod, 2)
        cluster.faults.fail(operation, Unavailable("scripted"), moment=moment)
        if fails:
            agent.fail(pod)
            await until_written(one, agent, pod, 3)
        agent.carry_out(pod)
        await one.until(lambda: agent.ledger.claims[pod.uid].relocation is None)
        await asyncio.sleep(120)
        assert not cluster.faults.pending
        found = condition(cluster, pod)
        assert found is not None
        assert (found.status, "revision 2" in found.message) == (not fails, True)


async def test_a_lagging_replica_does_not_take_a_later_answer_back(
    cluster: FaultyCluster, agent: NodeAgent
) -> None:
    late = LaggingView(cluster)
    async with replica(cluster) as one, replica(late) as other:
        pod = await bound(one, agent, "vm")
        edit(cluster, pod, SHARE)
        await until_written(one, agent, pod, 2)
        await asyncio.sleep(1)
        late.lag("pods")
        late.lag("nodeledgers")
        agent.carry_out(pod)
        edit(cluster, pod, {**SHARE, "kvplace.io/numa-memory": "off"})
        await until_written(one, agent, pod, 3)
        agent.carry_out(pod)
        await one.until(lambda: (found := condition(cluster, pod)) is not None and "3" in found.message)
        with contextlib.suppress(KvplaceError):
            await other.controller.relocator.relocate(NodeName("n1"))
        found = condition(cluster, pod)
        assert found is not None
        assert "revision 3" in found.message
