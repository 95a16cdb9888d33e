"""What the agent of a node reported does not end with the object in which it did."""

from __future__ import annotations

import asyncio
from functools import partial

from kvplace.controller.controller import ControllerSettings
from kvplace.core.enforcement import Enforcement
from kvplace.core.scalars import NodeName
from tests.controller.replicas import bound_vm, report_running
from tests.kube.faulty_cluster import FaultyCluster
from tests.nodes.machines import EIGHT


async def test_the_cores_of_a_pod_deleted_by_force_stay_while_its_agent_writes_a_deleted_report_again(
    cluster: FaultyCluster,
) -> None:
    """The agent writes the machine first, and what runs there after it."""
    async with bound_vm(cluster) as (one, pod):
        report_running(cluster, pod)
        cluster.delete_pod("default", "vm", force=True)
        await asyncio.sleep(120)
        written = partial(cluster.put_topology, "n1", EIGHT)
        reported = partial(report_running, cluster, pod)
        for happens in (partial(cluster.delete_topology, "n1"), written, reported):
            happens()
            await asyncio.sleep(1)
            await one.controller.reconciler.reconcile(NodeName("n1"))
            assert pod.uid in one.claims()
        await asyncio.sleep(120)
        assert pod.uid in one.claims()
        cluster.put_topology("n1", EIGHT, enforcement=Enforcement.NRI)
        async with asyncio.timeout(1.0):
            await one.until(lambda: not one.claims())


async def test_the_cores_of_a_pod_deleted_by_force_come_free_where_a_deleted_report_is_not_written_again(
    cluster: FaultyCluster,
) -> None:
    async with bound_vm(cluster, settings=ControllerSettings(round_s=3600.0)) as (one, pod):
        report_running(cluster, pod)
        cluster.delete_pod("default", "vm", force=True)
        await asyncio.sleep(120)
        cluster.delete_topology("n1")
        await asyncio.sleep(1)
        await one.controller.reconciler.reconcile(NodeName("n1"))
        await asyncio.sleep(28)
        assert pod.uid in one.claims()
        await asyncio.sleep(2)
        assert not one.claims()
