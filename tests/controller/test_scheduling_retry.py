"""Pods that wait are tried again when cores are released, and not for nothing."""

from __future__ import annotations

import asyncio
import json

from kvplace.controller.controller import ControllerSettings
from kvplace.core.errors import Unavailable
from kvplace.core.scalars import NodeName
from kvplace.core.well_known_names import CPU_MAP, RELEASED_AT
from kvplace.kube.watches import Alive, Interrupted
from tests.controller.replicas import asking_pod, bound_vm, replica
from tests.kube.faulty_cluster import FaultyCluster
from tests.nodes.machines import EIGHT


async def test_a_start_wakes_those_that_wait_since_whoever_freed_cores_before_may_not_have_come_to_it(
    cluster: FaultyCluster,
) -> None:
    async with replica(cluster):
        await asyncio.sleep(10.0)
        assert RELEASED_AT not in cluster.node_annotations("n1")
    asking_pod(cluster, "waiting", vcpus=6)
    async with replica(cluster) as one:
        await one.until(lambda: RELEASED_AT in cluster.node_annotations("n1"))


async def test_many_releases_at_once_wake_the_waiting_pods_once(cluster: FaultyCluster) -> None:
    async with replica(cluster, settings=ControllerSettings(wake_pause_s=60.0)) as one:
        pods = [asking_pod(cluster, f"vm{number}") for number in range(4)]
        for pod in pods:
            await one.bind(pod, "n1")
        waiting = asking_pod(cluster, "waiting", vcpus=8)
        assert (await one.filter(waiting)).names == []
        seen = len(one.cache.nodes.records[NodeName("n1")].resource_version)
        versions = set()
        one.cache.nodes.subscribe(lambda _, node: versions.add(node.resource_version if node else seen))
        for pod in pods:
            cluster.delete_pod("default", pod.name, force=True)
        await one.until(lambda: not one.claims() and RELEASED_AT in cluster.node_annotations("n1"))
        await asyncio.sleep(200.0)
        assert len(versions) == 2  # as it was, and woken once
        assert (await one.filter(waiting)).names == ["n1"]


async def test_no_pod_is_woken_when_no_vm_waits(cluster: FaultyCluster) -> None:
    async with bound_vm(cluster) as (one, pod):
        await one.until(lambda: one.cache.pods.records[pod.uid].node == "n1")
        cluster.delete_pod("default", "vm", force=True)
        await one.until(lambda: not one.claims())
        assert RELEASED_AT not in cluster.node_annotations("n1")


async def test_nodes_that_are_gone_are_forgotten_although_no_client_was_woken_for_them(
    cluster: FaultyCluster,
) -> None:
    cluster.create_node("n2", topology=EIGHT)
    async with bound_vm(cluster) as (one, _pod):
        cluster.delete_node("n1")
        cluster.delete_pod("default", "vm", force=True)
        await one.until(lambda: not one.claims())
        await asyncio.sleep(1.0)
        assert set(one.controller._scheduling_retry._freed) <= {"n2"}


async def test_a_pod_that_was_refused_before_any_client_here_knew_of_it_is_woken_once_for_an_earlier_release(
    cluster: FaultyCluster,
) -> None:
    async with replica(cluster) as one:
        for name in ("first", "second"):
            pod = asking_pod(cluster, name)
            await one.bind(pod, "n1")
            await one.until(lambda pod=pod: one.cache.pods.records[pod.uid].node)
            cluster.delete_pod("default", name, force=True)
            await one.until(lambda: not one.claims())
        await asyncio.sleep(10.0)
        asking_pod(cluster, "waiting")
        await asyncio.sleep(10.0)
        assert RELEASED_AT not in cluster.node_annotations("n1")  # it has not been refused
        cluster.change_pod("default", "waiting", was_tried=True)
        await one.until(lambda: RELEASED_AT in cluster.node_annotations("n1"))
        woken = cluster.node_annotations("n1")
        asking_pod(cluster, "another")
        cluster.change_pod("default", "another", was_tried=True)
        await asyncio.sleep(10.0)
        assert cluster.node_annotations("n1") == woken


async def test_a_machine_that_is_described_late_or_anew_wakes_the_waiting_pods(
    cluster: FaultyCluster,
) -> None:
    cluster.create_node("late")
    async with replica(cluster) as one:
        waiting = asking_pod(cluster, "waiting", vcpus=6)
        assert (await one.filter(waiting, "late")).names == []
        woken: list[str] = []
        one.cache.nodes.subscribe(lambda _, node: woken.append(node.name if node else ""))
        woken.clear()  # of what is known already
        for times, (held, names) in enumerate(((0b111, []), (0, ["late"]), (0b11, ["late"])), 1):
            cluster.put_topology("late", EIGHT, kubelet_cpus=held)
            await one.until(lambda times=times: len(woken) >= times)
            assert woken == ["late"] * times
            assert (await one.filter(waiting, "late")).names == names
            cluster.put_topology("late", EIGHT, kubelet_cpus=held)  # a report without news


async def test_a_node_that_is_known_later_than_its_description_wakes_the_waiting_pods(
    cluster: FaultyCluster,
) -> None:
    cluster.put_topology("late", EIGHT)
    async with replica(cluster) as one:
        waiting = asking_pod(cluster, "waiting", vcpus=6)
        assert (await one.filter(waiting, "late")).names == []
        cluster.create_node("late")
        await one.until(lambda: RELEASED_AT in cluster.node_annotations("late"))
        assert (await one.filter(waiting, "late")).names == ["late"]


async def test_a_cpu_map_that_is_written_or_widened_wakes_the_waiting_pods(cluster: FaultyCluster) -> None:
    """kube-scheduler retries them by itself then, and may ask before our watch has shown the cpu-map."""
    cluster.create_node("late")
    async with replica(cluster) as one:
        waiting = asking_pod(cluster, "waiting", vcpus=6)
        assert (await one.filter(waiting, "late")).names == []
        woken = cluster.node_annotations("late").get(RELEASED_AT)
        for count, names in ((4, []), (8, ["late"])):
            cpus = [str(cpu) for cpu in range(count)]
            await cluster.annotate_node(NodeName("late"), {CPU_MAP: json.dumps({"socket0": cpus})})
            await one.until(lambda woken=woken: cluster.node_annotations("late").get(RELEASED_AT) != woken)
            woken = cluster.node_annotations("late")[RELEASED_AT]
            assert (await one.filter(waiting, "late")).names == names
        await asyncio.sleep(10.0)
        assert cluster.node_annotations("late")[RELEASED_AT] == woken


async def test_who_could_not_follow_the_ledgers_wakes_those_that_it_may_have_refused_wrongly(
    cluster: FaultyCluster,
) -> None:
    """Another replica has released the cores and woken the pods while this one still took them for owned."""
    async with replica(cluster) as one:
        asking_pod(cluster, "waiting", vcpus=6)
        one.cache.ledger_store.apply(Interrupted(Unavailable("the connection broke")))
        await asyncio.sleep(100.0)
        assert RELEASED_AT not in cluster.node_annotations("n1")
        one.cache.ledger_store.apply(Alive())
        await one.until(lambda: RELEASED_AT in cluster.node_annotations("n1"))
        woken = cluster.node_annotations("n1")
        await asyncio.sleep(100.0)
        assert cluster.node_annotations("n1") == woken
