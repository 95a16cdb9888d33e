"""Confirmations may wait; releases do not."""

from __future__ import annotations

from dataclasses import replace

from kvplace.kube.memory_cluster import MemoryCluster
from tests.controller.replicas import QUICK, asking_pod, replica
from tests.nodes.machines import EIGHT


async def test_cores_come_free_at_once_while_confirmations_wait() -> None:
    cluster = MemoryCluster()
    cluster.create_node("n1")
    cluster.put_topology("n1", EIGHT)
    patient = replace(QUICK, confirm_s=3600.0, round_s=3600.0)
    async with replica(cluster, settings=patient) as one:
        ends, stays = asking_pod(cluster, "ends"), asking_pod(cluster, "stays")
        for pod in (ends, stays):
            assert await one.bind(pod, "n1") == ""
        cluster.set_pod_phase("default", "ends", "Succeeded")
        await one.until(lambda: set(one.claims()) == {stays.uid})
