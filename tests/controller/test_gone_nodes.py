"""The ledger of a node that is gone goes with its last claim."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from kvplace.controller.controller import ControllerSettings
from kvplace.core.ledger import Ledger
from kvplace.core.request import Policy
from kvplace.core.scalars import NodeName
from tests.controller.replicas import asking_pod, bound_vm, replica
from tests.kube.faults import Operation
from tests.kube.faulty_cluster import FaultyCluster
from tests.nodes.machines import EIGHT


async def test_the_ledger_of_a_node_that_is_gone_goes_when_its_last_claim_does(
    cluster: FaultyCluster,
) -> None:
    async with bound_vm(cluster) as (one, pod):
        cluster.delete_node("n1")
        await one.until(lambda: "n1" not in one.cache.nodes.records)
        await one.controller.reconciler.reconcile(NodeName("n1"))
        assert pod.uid in one.claims()
        cluster.delete_pod("default", "vm", force=True)
        await one.until(lambda: cluster._ledgers.records.get("n1") is None)


async def test_the_empty_ledger_of_a_node_goes_with_the_node_and_not_only_in_the_next_round(
    cluster: FaultyCluster,
) -> None:
    async with replica(cluster, settings=ControllerSettings(round_s=3600.0)) as one:
        await one.bind(asking_pod(cluster, "vm"), "n1")
        cluster.delete_pod("default", "vm", force=True)
        await asyncio.sleep(5.0)
        assert cluster._ledgers.records
        cluster.delete_node("n1")
        await asyncio.sleep(5.0)
        assert not cluster._ledgers.records


async def test_a_gone_node_keeps_its_ledger_while_a_vm_that_shares_cpus_runs_there(
    cluster: FaultyCluster,
) -> None:
    async with replica(cluster) as one:
        pod = asking_pod(cluster, "vm", policy=Policy.SHARE)
        assert await one.bind(pod, "n1") == ""
        cluster.delete_node("n1")
        await asyncio.sleep(60.0)
        assert set(one.claims()) == {pod.uid}


async def test_a_ledger_in_which_a_user_claims_while_it_is_deleted_stays(cluster: FaultyCluster) -> None:
    async with replica(cluster, controller=False) as one, replica(cluster, controller=False) as other:
        pod = asking_pod(cluster, "vm")
        assert await one.bind(pod, "n1") == ""
        cluster.delete_pod("default", "vm", force=True)
        await asyncio.sleep(15.0)
        await one.controller.reconciler.reconcile(NodeName("n1"))
        assert one.claims() == {}
        cluster.delete_node("n1")
        await one.until(lambda: "n1" not in one.cache.nodes.records)
        deleting = cluster.faults.hold(Operation.DELETE_LEDGER)
        reconciling = asyncio.create_task(one.controller.reconciler.reconcile(NodeName("n1")))
        await deleting.reached.wait()
        cluster.create_node("n1", topology=EIGHT)
        await other.until(lambda: "n1" in other.cache.nodes.records)
        again = asking_pod(cluster, "again")
        assert await other.bind(again, "n1") == ""
        deleting.release()
        await reconciling
        assert set(one.claims()) == {again.uid}


async def test_a_ledger_that_cannot_be_read_stays_when_its_node_is_gone(cluster: FaultyCluster) -> None:
    async with replica(cluster) as one:
        pod = asking_pod(cluster, "vm", policy=Policy.SHARE)
        assert await one.bind(pod, "n1") == ""
        stored = cluster._ledgers.records[NodeName("n1")]
        cluster._ledgers.put(
            NodeName("n1"),
            replace(stored, ledger=Ledger(), problem="nonsense", resource_version=cluster._next_version()),
        )
        cluster.delete_node("n1")
        cluster.delete_pod("default", "vm", force=True)
        await asyncio.sleep(60.0)
        assert cluster._ledgers.records[NodeName("n1")].problem == "nonsense"
