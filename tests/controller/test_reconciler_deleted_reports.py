"""The reports of a node's agent do not end with the object that carried them."""

from __future__ import annotations

import asyncio
from functools import partial

import pytest

from kvplace.controller.controller import ControllerSettings
from kvplace.controller.reconciler import SILENCE_S
from kvplace.core.errors import Unavailable
from kvplace.core.node_topology import Enforcement
from kvplace.core.scalars import NodeName
from tests.controller.relocations import LaggingView
from tests.controller.replicas import Replica, asking_pod, bound_vm, replica, report_running
from tests.kube.faults import Operation
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


async def test_the_cores_of_a_pod_deleted_by_force_are_released_where_a_deleted_report_is_not_written_again(
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


async def comes_free_when_nothing_is_reported(late: Replica) -> None:
    """See that a replica releases the claim some time after the agent has reported without the pod."""
    late.cluster.put_topology("n1", EIGHT, enforcement=Enforcement.NRI)
    for _ in range(2):
        await late.controller.reconciler.reconcile(NodeName("n1"))
        await asyncio.sleep(SILENCE_S + 1)
    assert not late.claims()


async def test_a_replica_that_has_not_been_informed_of_a_report_reads_it_before_it_gives_cores_away(
    cluster: FaultyCluster,
) -> None:
    cluster.delete_topology("n1")
    lagging = LaggingView(cluster)
    async with replica(cluster, controller=False) as one, replica(lagging, controller=False) as late:
        lagging.lag("nodetopologies")
        cluster.put_topology("n1", EIGHT, enforcement=Enforcement.NRI)
        await one.until(lambda: one.topology("n1") is not None)
        pod = asking_pod(cluster, "vm")
        assert await one.bind(pod, "n1") == ""
        report_running(cluster, pod)
        cluster.delete_pod("default", "vm", force=True)
        await asyncio.sleep(120)
        assert late.topology("n1") is None
        cluster.faults.fail(Operation.READ_ALL, Unavailable("busy"))
        with pytest.raises(Unavailable):
            await late.controller.reconciler.reconcile(NodeName("n1"))
        await late.controller.reconciler.reconcile(NodeName("n1"))
        assert pod.uid in one.claims()
        await comes_free_when_nothing_is_reported(late)
        lagging.catch_up()


async def test_a_report_that_a_late_watch_has_not_shown_counts_when_silence_would(
    cluster: FaultyCluster,
) -> None:
    cluster.put_topology("n1", EIGHT, enforcement=Enforcement.NRI)
    lagging = LaggingView(cluster)
    async with replica(cluster, controller=False) as one, replica(lagging, controller=False) as late:
        pod = asking_pod(cluster, "vm")
        assert await one.bind(pod, "n1") == ""
        lagging.lag("nodetopologies")
        report_running(cluster, pod)
        cluster.delete_pod("default", "vm", force=True)
        for _ in range(20):
            await asyncio.sleep(10)
            await late.controller.reconciler.reconcile(NodeName("n1"))
        assert pod.uid in one.claims()
        await comes_free_when_nothing_is_reported(late)
        lagging.catch_up()


async def test_the_cores_of_a_pod_that_ended_before_its_agent_saw_it_are_released_at_once(
    cluster: FaultyCluster,
) -> None:
    """Its kubelet reports the end of all containers, and then deletes the pod."""
    cluster.put_topology("n1", EIGHT, enforcement=Enforcement.NRI)
    async with bound_vm(cluster) as (one, _):
        cluster.change_pod("default", "vm", phase="Failed")
        cluster.delete_pod("default", "vm", force=True)
        async with asyncio.timeout(1.0):
            await one.until(lambda: not one.claims())


async def test_the_cores_of_a_vm_stay_while_its_agent_reports_it_running_whatever_its_status_states(
    cluster: FaultyCluster,
) -> None:
    async with bound_vm(cluster) as (one, pod):
        report_running(cluster, pod)
        cluster.change_pod("default", "vm", phase="Running", compute_terminated=True)
        await asyncio.sleep(120)
        assert pod.uid in one.claims()
        cluster.put_topology("n1", EIGHT, enforcement=Enforcement.NRI, pods=[])
        async with asyncio.timeout(1.0):
            await one.until(lambda: not one.claims())
