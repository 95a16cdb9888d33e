"""Cores that follow devices which the kubelet has chosen elsewhere, while the VM's QEMU has not started."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from kvplace.core.node_devices import (
    NO_NUMA,
    DeviceCount,
    DeviceReport,
    NodeDevices,
    PodDevice,
    TopologyPolicy,
)
from kvplace.core.request import DeviceNuma, Policy, Scope
from kvplace.core.scalars import ContainerId, NumaId, PodUid, ResourceName
from kvplace.kube.object_records import PodRecord
from kvplace.kube.watches import PODS
from tests.controller.relocations import SHARE, NodeAgent, bound, condition, edit, until_written
from tests.controller.replicas import Replica, asking_pod, replica
from tests.kube.faulty_cluster import FaultyCluster

VF = ResourceName("intel.com/vf")


def devices(**given: PodDevice) -> DeviceReport:
    """Two devices on each NUMA node, and the devices of pods by UID."""
    counts = [DeviceCount(VF, NumaId(node), 2, 2) for node in (0, 1)]
    pods = {PodUid(uid): (device,) for uid, device in given.items()}
    return DeviceReport(NodeDevices.of(counts, TopologyPolicy("best-effort")), pods)


async def free_devices(one: Replica, agent: NodeAgent) -> None:
    """Let the agent report that all devices are free."""
    agent.devices = devices()
    agent.report()
    await one.until(lambda: (seen := one.cache.topologies.get(agent.node)) and seen.devices)


def give(agent: NodeAgent, pod: PodRecord, node: int) -> None:
    """Let the agent report that a pod has got a device of a NUMA node."""
    agent.devices = devices(**{pod.uid: PodDevice(VF, NumaId(node))})
    agent.report()


async def starting(one: Replica, agent: NodeAgent, **options: Any) -> PodRecord:
    """Bind a VM with a device beside NUMA node 0, as predicted; nothing of it runs yet."""
    await free_devices(one, agent)
    pod = asking_pod(one.cluster, "vm", 2, devices={VF: 1}, **options)
    assert await one.bind(pod, "n1") == ""
    assert agent.stored(pod).placement.numa_nodes == (0,)
    return pod


async def test_cores_follow_a_device_that_the_kubelet_has_chosen_elsewhere(
    cluster: FaultyCluster, agent: NodeAgent
) -> None:
    async with replica(cluster) as one:
        pod = await starting(one, agent)
        first = agent.stored(pod)
        give(agent, pod, 1)
        after = await until_written(one, agent, pod, 2)
        assert after.placement.numa_nodes == (1,)
        assert agent.ledger.owned == first.placement.owned | after.placement.owned
        agent.carry_out(pod)
        await one.until(lambda: agent.ledger.claims[pod.uid].owned == after.placement.owned)
        assert agent.ledger.owned == after.placement.owned


@pytest.mark.parametrize("mode", [DeviceNuma.OFF, DeviceNuma.PREFERRED, DeviceNuma.REQUIRED])
async def test_cores_that_are_local_or_need_not_be_stay(
    cluster: FaultyCluster, agent: NodeAgent, mode: DeviceNuma
) -> None:
    async with replica(cluster) as one:
        pod = await starting(one, agent, device_numa=mode)
        give(agent, pod, 1 if mode is DeviceNuma.OFF else 0)
        other = await bound(one, agent, "later", 2)
        await one.until(lambda: other.uid in agent.ledger.claims)
        assert agent.stored(pod).revision == 1
        give(agent, pod, NO_NUMA)
        await bound(one, agent, "last", 2)
        assert agent.stored(pod).revision == 1


async def test_without_room_beside_the_device_the_cores_stay_and_the_pod_states_why(
    cluster: FaultyCluster, agent: NodeAgent
) -> None:
    async with replica(cluster) as one:
        pod = await starting(one, agent)
        await bound(one, agent, "full", 8)
        owned = agent.ledger.claims[pod.uid].owned
        give(agent, pod, 1)
        await one.until(lambda: condition(cluster, pod))
        found = condition(cluster, pod)
        assert found is not None
        assert found.status is False
        assert "its devices are on NUMA node 1; node n1:" in found.message
        assert agent.ledger.claims[pod.uid].owned == owned
        assert agent.stored(pod).revision == 1


async def test_the_cores_of_a_vm_that_has_started_do_not_follow(
    cluster: FaultyCluster, agent: NodeAgent
) -> None:
    async with replica(cluster) as one:
        pod = await starting(one, agent)
        cluster._put_pod(replace(agent.live(pod), compute_container=ContainerId("c1")))
        give(agent, pod, 1)
        await bound(one, agent, "later", 2)
        assert agent.stored(pod).revision == 1
        assert condition(cluster, pod) is None


async def test_the_cores_of_a_vm_follow_while_its_hook_refuses_to_start_qemu_apart_from_the_device(
    cluster: FaultyCluster, agent: NodeAgent
) -> None:
    async with replica(cluster) as one:
        pod = await starting(one, agent, device_numa=DeviceNuma.REQUIRED)
        cluster._put_pod(replace(agent.live(pod), compute_container=ContainerId("c1")))
        give(agent, pod, 1)
        assert (await until_written(one, agent, pod, 2)).placement.numa_nodes == (1,)


async def test_the_cores_of_a_vm_with_a_qemu_do_not_follow_whatever_its_hook_should_have_refused(
    cluster: FaultyCluster, agent: NodeAgent
) -> None:
    async with replica(cluster) as one:
        pod = await starting(one, agent, device_numa=DeviceNuma.REQUIRED)
        cluster._put_pod(replace(agent.live(pod), compute_container=ContainerId("c1")))
        agent.carry_out(pod)
        give(agent, pod, 1)
        await bound(one, agent, "later", 2)
        assert agent.stored(pod).revision == 1


async def test_a_replica_that_has_not_seen_the_start_of_a_vm_does_not_move_its_cores(
    cluster: FaultyCluster, agent: NodeAgent
) -> None:
    async with replica(cluster) as one:
        pod = await starting(one, agent)
        cluster.pause_watches(PODS)
        cluster._put_pod(replace(agent.live(pod), compute_container=ContainerId("c1")))
        give(agent, pod, 1)
        await asyncio.sleep(1)  # nothing comes true
        assert agent.ledger.claims[pod.uid].relocation is None
        assert agent.stored(pod).revision == 1


async def test_an_edit_waits_until_a_vm_with_devices_has_a_qemu(
    cluster: FaultyCluster, agent: NodeAgent
) -> None:
    """Until then its cores may have to follow the devices, which another revision would prevent."""
    async with replica(cluster) as one:
        pod = await starting(one, agent, device_numa=DeviceNuma.REQUIRED)
        edit(cluster, pod, {**SHARE, "kvplace.io/device-numa": "required"})
        await bound(one, agent, "later", 2)
        await asyncio.sleep(1)
        assert agent.ledger.claims[pod.uid].relocation is None
        agent.carry_out(pod)
        assert (await until_written(one, agent, pod, 2)).placement.policy is Policy.SHARE


async def test_devices_that_are_not_all_reported_yet_move_nothing(
    cluster: FaultyCluster, agent: NodeAgent
) -> None:
    async with replica(cluster) as one:
        await free_devices(one, agent)
        pod = asking_pod(cluster, "vm", 2, devices={VF: 2}, scope=Scope.ONE_NUMA)
        assert await one.bind(pod, "n1") == ""
        give(agent, pod, 1)
        await bound(one, agent, "later", 2)
        assert agent.stored(pod).revision == 1
