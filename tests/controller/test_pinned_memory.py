"""A running VM with devices of the host keeps its NUMA nodes: they access its memory."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from kvplace.core.scalars import ResourceName
from kvplace.kube.object_records import ResourceClaimRecord
from tests.controller.relocations import NodeAgent, condition, edit, until_written, wide
from tests.controller.replicas import replica
from tests.kube.faulty_cluster import FaultyCluster


async def test_a_vm_with_devices_of_the_host_keeps_its_numa_nodes_because_its_memory_cannot_move(
    cluster: FaultyCluster, agent: NodeAgent
) -> None:
    async with replica(cluster) as one:
        pod = await wide(one, agent, memory=1 << 30, devices={ResourceName("intel.com/vf"): 1})
        owned = agent.ledger.claims[pod.uid].owned
        edit(cluster, pod, {"cpu-set": "one-numa"})
        await one.until(lambda: condition(cluster, pod))
        found = condition(cluster, pod)
        assert found is not None
        assert found.status is False
        assert "devices of the host access its memory, which stays on NUMA nodes 0, 1" in found.message
        assert agent.ledger.claims[pod.uid].owned == owned

        edit(cluster, pod, {"cpu-set": "any", "kvplace.io/cpu-policy": "share"})
        after = await until_written(one, agent, pod, 2)
        assert set(after.placement.numa_nodes) <= {0, 1}
        agent.carry_out(pod)
        await one.until(lambda: agent.ledger.claims[pod.uid].relocation is None)


@pytest.mark.parametrize("driver", ["gpu.example.com", "dra.cpu"])
async def test_a_vm_with_devices_of_resource_claims_keeps_its_numa_nodes(
    cluster: FaultyCluster, agent: NodeAgent, driver: str
) -> None:
    """Unless the claims are for CPUs."""
    async with replica(cluster) as one:
        pod = await wide(one, agent, memory=1 << 30)
        claimed = ResourceClaimRecord("default", "io", (), ((driver, "n1", "device"),))
        cluster.put_resource_claim(claimed)
        cluster._put_pod(replace(agent.live(pod), resource_claims=("io",)))
        await asyncio.sleep(1)
        edit(cluster, pod, {"cpu-set": "one-numa"})
        if driver == "dra.cpu":
            assert len((await until_written(one, agent, pod, 2)).placement.numa_nodes) == 1
            return
        await one.until(lambda: condition(cluster, pod))
        found = condition(cluster, pod)
        assert found is not None
        assert "devices of the host access its memory, which stays on NUMA nodes 0, 1" in found.message
