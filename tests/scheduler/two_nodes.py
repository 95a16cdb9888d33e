"""Nodes with scattered free CPUs, VMs on them that may migrate, and a virt-controller that carries it out."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from kvplace.core.claim_changes import is_for_migration
from kvplace.core.ledger import Claim
from kvplace.core.node_topology import Enforcement
from kvplace.core.scalars import NodeName
from kvplace.kube.migrations import MigrationRecord
from kvplace.kube.object_records import PodRecord
from tests.controller.relocations import NodeAgent
from tests.controller.replicas import Replica, asking_pod
from tests.kube.faulty_cluster import FaultyCluster
from tests.nodes.machines import TWO

GIB = 1 << 30


def nodes(cluster: FaultyCluster, *names: str) -> dict[str, NodeAgent]:
    """Add nodes of two sockets of eight CPUs, each with an agent."""
    agents = {}
    for name in names:
        cluster.create_node(name)
        cluster.put_topology(name, TWO, enforcement=Enforcement.NRI)
        cluster.put_schedulable_node(name, labels={"kubernetes.io/hostname": name})
        agents[name] = NodeAgent(cluster, TWO, NodeName(name))
    return agents


async def running(
    one: Replica, agent: NodeAgent, name: str, vcpus: int, *, memory: int = GIB, **options: Any
) -> PodRecord:
    """Start a VM on the node of an agent."""
    pod = asking_pod(one.cluster, name, vcpus, memory=memory, **options)
    assert await one.bind(pod, agent.node) == ""
    agent.carry_out(pod)
    one.cluster.put_running_vmi(pod.vmi, pod.vmi_uid)
    await asyncio.sleep(0.1)
    return agent.live(pod)


async def two_crowded(
    one: Replica, agents: Mapping[str, NodeAgent], **of_small: Any
) -> tuple[PodRecord, PodRecord]:
    """Leave four CPUs free on each of two nodes, where one socket is full; return the VMs on the other."""
    small = []
    for number, agent in enumerate(agents.values()):
        await running(one, agent, f"large-{agent.node}", 8)
        options = {"may_migrate": True, "memory": (number + 1) * GIB, **of_small}
        small.append(await running(one, agent, f"small-{agent.node}", 4, **options))
    return small[0], small[1]


def reserved_for_migrations(cluster: FaultyCluster) -> list[tuple[str, Claim]]:
    """Return what is reserved for target pods, with the nodes."""
    found = (
        (record.node, claim)
        for record in cluster._ledgers.records.values()
        for claim in record.ledger.claims.values()
    )
    return [(node, claim) for node, claim in found if is_for_migration(claim)]


def reservations(cluster: FaultyCluster) -> list[tuple[str, str]]:
    """Return all reservations: node and key."""
    ledgers = cluster._ledgers.records.values()
    return [
        (record.node, claim.uid)
        for record in ledgers
        for claim in record.ledger.claims.values()
        if claim.reserved is not None
    ]


@dataclass
class VirtController:
    """Carries out migrations step by step, as virt-controller, kube-scheduler and virt-handler do."""

    one: Replica
    agents: Mapping[str, NodeAgent]
    targets: dict[str, PodRecord] = field(default_factory=dict)

    @property
    def cluster(self) -> FaultyCluster:
        return self.one.cluster

    @property
    def created(self) -> list[MigrationRecord]:
        """The migrations that kvplace has created."""
        return [one for one in self.cluster.migrations.records.values() if one.is_ours]

    async def until_created(self) -> MigrationRecord:
        """Wait for the one migration."""
        await self.one.until(lambda: self.created)
        (migration,) = self.created
        return migration

    def source(self, migration: MigrationRecord) -> PodRecord:
        """Return the running pod of the VM."""
        pods = self.cluster._pods.records.values()
        (pod,) = [pod for pod in pods if pod.vmi == migration.vmi and not pod.migration and not pod.has_ended]
        return pod

    def make_target(self, migration: MigrationRecord) -> PodRecord:
        """Create the target pod."""
        source = self.source(migration)
        self.phase(migration, "Scheduling")
        pod = self.cluster.create_pod(
            f"{source.name}-target",
            request=source.request,
            vmi=source.vmi,
            vmi_uid=source.vmi_uid,
            migration=migration.name,
            resources=source.resources,
        )
        self.targets[migration.name] = pod
        return pod

    async def schedule(self, migration: MigrationRecord, one: Replica | None = None) -> str:
        """Let kube-scheduler bind the target pod to the node that the migration names."""
        one = one or self.one
        pod = self.targets[migration.name]
        node = self.cluster.migrates_to[migration.name].target
        if (await one.filter(pod, node)).names != [node]:
            return "refused"
        return await one.bind(pod, node)

    def run(self, migration: MigrationRecord) -> None:
        """Start the guest's way: the target's agent has pinned the new QEMU."""
        node = self.cluster.migrates_to[migration.name].target
        self.agents[node].carry_out(self.targets[migration.name])
        self.phase(migration, "Running")

    def succeed(self, migration: MigrationRecord) -> None:
        """End the source, whose guest has gone."""
        source = self.source(migration)
        self.phase(migration, "Succeeded")
        self.end(source)

    def fail(self, migration: MigrationRecord) -> None:
        """Let the migration fail: the target pod ends, and the source runs on."""
        self.phase(migration, "Failed")
        target = self.targets.get(migration.name)
        if target is not None:
            self.end(target)

    def end(self, pod: PodRecord) -> None:
        """End a pod and its QEMU."""
        for agent in self.agents.values():
            if agent.in_force.pop(pod.uid, None) is not None:
                agent.report()
        live = self.cluster._pod(pod.namespace, pod.name)
        self.cluster._put_pod(replace(live, phase="Succeeded", compute_terminated=True))

    def phase(self, migration: MigrationRecord, phase: str) -> None:
        self.cluster.put_migration(migration.namespace, migration.name, migration.vmi, phase)

    async def whole(self, migration: MigrationRecord) -> None:
        """Carry out a migration from its beginning to its end."""
        self.make_target(migration)
        assert await self.schedule(migration) == ""
        self.run(migration)
        await asyncio.sleep(20)
        self.succeed(migration)
