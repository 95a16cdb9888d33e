"""A running pod gets no CPUs that quotas and kube-scheduler do not count, whatever its annotations become."""

from __future__ import annotations

import asyncio

import pytest

from kvplace.core.request import Policy
from kvplace.core.request_json import PodRequest, write_request
from kvplace.core.scalars import NodeName
from kvplace.kube.object_records import PodRecord
from tests.controller.relocations import EXCLUSIVE, SHARE, NodeAgent, bound, condition, edit
from tests.controller.replicas import Replica, asking_pod, replica
from tests.core.requests import request_with
from tests.kube.faulty_cluster import FaultyCluster


async def running(one: Replica, policy: Policy, millicores: int) -> PodRecord:
    """Run a VM of two vCPUs that no exclusive policy has made request them."""
    pod = asking_pod(one.cluster, "vm", policy=policy)
    await one.cluster.request_cpus(pod, millicores)
    if policy is Policy.NONE:
        await one.cluster.bind("default", "vm", pod.uid, NodeName("n1"), {})
    else:
        assert await one.bind(pod, "n1") == ""
    return pod


@pytest.mark.parametrize("policy", [Policy.NONE, Policy.SHARE, Policy.NUMA])
async def test_a_vm_that_becomes_exclusive_requests_the_cpus_that_it_will_own(
    cluster: FaultyCluster, agent: NodeAgent, policy: Policy
) -> None:
    async with replica(cluster) as one:
        pod = await running(one, policy, 200)
        if policy is not Policy.NONE:
            agent.carry_out(pod)
        edit(cluster, pod, EXCLUSIVE)
        await one.until(lambda: agent.ledger.owned.bit_count() == 2)
        assert agent.live(pod).resources["cpu"] == 2000


async def test_a_vm_that_becomes_sharing_requests_a_tenth_of_its_cpus(
    cluster: FaultyCluster, agent: NodeAgent
) -> None:
    async with replica(cluster) as one:
        pod = await running(one, Policy.NONE, 1)
        edit(cluster, pod, SHARE)
        await one.until(lambda: pod.uid in agent.ledger.claims)
        assert agent.live(pod).resources["cpu"] == 200


async def test_a_vm_whose_quota_is_used_up_owns_no_cpus_and_is_informed_why(
    cluster: FaultyCluster, agent: NodeAgent
) -> None:
    cluster.quota = 10
    async with replica(cluster) as one:
        pod = await running(one, Policy.NONE, 1)
        edit(cluster, pod, EXCLUSIVE)
        await one.until(lambda: condition(cluster, pod))
        found = condition(cluster, pod)
        assert found is not None
        assert found.message == (
            "the pod requests 1m CPU, and needs 2000m, which the API server refuses: "
            "exceeded quota, limited: requests.cpu=10m"
        )
        assert not agent.ledger.claims


async def test_a_plain_pod_that_requests_too_little_owns_no_cpus_until_its_requests_are_raised(
    cluster: FaultyCluster, agent: NodeAgent
) -> None:
    async with replica(cluster) as one:
        asked = write_request(PodRequest(request_with(2, policy=Policy.NONE)))
        made = cluster.create_pod("web", request=asked, resources={"cpu": 1})
        await cluster.bind("default", "web", made.uid, NodeName("n1"), {})
        cluster.edit_pod("default", "web", EXCLUSIVE)
        await one.until(lambda: condition(cluster, made))
        found = condition(cluster, made)
        assert found is not None
        assert found.message == (
            "the pod requests 1m CPU, and needs 2000m: raise the requests of its containers"
        )
        assert not agent.ledger.claims
        await cluster.request_cpus(made, 2000)
        await one.until(lambda: agent.ledger.owned.bit_count() == 2)


async def test_a_vm_for_which_there_is_no_room_requests_no_more_than_before(
    cluster: FaultyCluster, agent: NodeAgent
) -> None:
    async with replica(cluster) as one:
        await bound(one, agent, "first", 6)
        await bound(one, agent, "second", 6)
        await bound(one, agent, "third", 2)
        await bound(one, agent, "fourth", 1)
        pod = await running(one, Policy.NONE, 200)
        edit(cluster, pod, EXCLUSIVE)
        await one.until(lambda: condition(cluster, pod))
        await asyncio.sleep(60)
        assert agent.live(pod).resources["cpu"] == 200
