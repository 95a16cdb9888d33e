"""A node whose free CPUs are scattered, and VMs on it that may move."""

from __future__ import annotations

from typing import Any

from kvplace.core.scalars import NodeName
from kvplace.kube.events import EventReason
from kvplace.kube.object_records import PodRecord
from kvplace.scheduler.extender_protocol import NodeVictims, PreemptionArgs
from tests.controller.relocations import NodeAgent, bound
from tests.controller.replicas import Replica
from tests.kube.faulty_cluster import FaultyCluster

N1 = NodeName("n1")


async def running(one: Replica, agent: NodeAgent, name: str, vcpus: int, **options: Any) -> PodRecord:
    return agent.live(await bound(one, agent, name, vcpus, **options))


async def ended(one: Replica, agent: NodeAgent, pod: PodRecord) -> None:
    one.cluster.delete_pod(pod.namespace, pod.name, force=True)
    agent.in_force.pop(pod.uid, None)
    agent.report()
    await one.until(lambda: pod.uid not in agent.ledger.claims)


async def halved(one: Replica, agent: NodeAgent, vcpus: int = 4, **of_left: Any) -> tuple[PodRecord, ...]:
    """Leave four CPUs free on each socket, beside VMs of so many vCPUs that use the other four."""
    vms = [await running(one, agent, f"vm-{number}", vcpus, **of_left) for number in range(16 // vcpus)]
    sockets = {vm.uid: agent.in_force[vm.uid].placement.packages for vm in vms}
    on_each = [[vm for vm in vms if sockets[vm.uid] == (socket,)] for socket in (0, 1)]
    left = tuple(vm for here in on_each for vm in here[: 4 // vcpus])
    for vm in vms:
        if vm not in left:
            await ended(one, agent, vm)
    return left


def moved(agent: NodeAgent) -> list[PodRecord]:
    """The VMs with a later revision that is written and not in effect."""
    pods = [pod for pod in agent.cluster._pods.records.values() if pod.uid in agent.in_force]
    return [pod for pod in pods if agent.stored(pod) != agent.in_force[pod.uid]]


async def moved_and_bound(one: Replica, agent: NodeAgent, waiting: PodRecord) -> PodRecord:
    """Carry out the one move that makes room for a pod, and bind that pod; return the VM that moved."""
    (mover,) = moved(agent)
    agent.carry_out(mover)
    await one.until(lambda: agent.ledger.claims[mover.uid].relocation is None)
    assert (await one.filter(waiting)).names == [N1]
    assert await one.bind(waiting, N1) == ""
    return mover


def notes(cluster: FaultyCluster, name: str, reason: EventReason) -> list[str]:
    return [one.note for one in cluster.events if (one.regarding.name, one.reason) == (name, reason)]


async def victims(one: Replica, pod: PodRecord, *uids: str) -> list[str]:
    """Whom kvplace names when kube-scheduler offers these."""
    sent = {N1: NodeVictims(tuple(map(type(pod.uid), uids)), 0)} if uids else {}
    result = await one.extender.preempt(PreemptionArgs(pod, pod.resources, False, False, sent))
    return [uid for node in result.values() for uid in node.uids]
