"""KubeVirt in stories where VMs migrate to make room: it carries migrations out, slowly, and some fail."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from random import Random

from kvplace.core.request_json import read_pod_request
from kvplace.core.scalars import NodeName
from kvplace.kube.migrations import MigrationRecord
from kvplace.kube.object_records import PodRecord
from kvplace.scheduler import limits, migration_history
from tests.kube.faulty_cluster import FaultyCluster
from tests.protocol.network import Network
from tests.protocol.node import SimulatedNode
from tests.protocol.promises import Promises
from tests.protocol.run_counts import Diary

_UNSCHEDULABLE_S = 30.0
_ARRIVAL_S = 30.0
"""How long the target's QEMU may take to run."""


@contextmanager
def busy_moves() -> Iterator[None]:
    """Let VMs migrate more often than in a cluster, where stories would be too short for it."""
    quick = {
        (limits, "SEARCH_S"): 2.0,
        (migration_history, "PEACE_AFTER_MIGRATION_S"): 5.0,
        (limits, "MOST_PER_HOUR"): 1000,
        (limits, "PAUSE_S"): 4.0,
    }
    before = {(module, name): getattr(module, name) for module, name in quick}
    for (module, name), value in quick.items():
        setattr(module, name, value)
    try:
        yield
    finally:
        for (module, name), value in before.items():
            setattr(module, name, value)


class KubeVirt:
    """virt-controller and virt-handler, as far as migrations need them."""

    def __init__(
        self,
        cluster: FaultyCluster,
        nodes: Mapping[NodeName, SimulatedNode],
        promises: Promises,
        network: Network,
        random: Random,
        diary: Diary,
    ) -> None:
        self._cluster = cluster
        self._nodes = nodes
        self._promises = promises
        self._network = network
        self._random = random
        self._diary = diary
        self._known: set[str] = set()

    async def run(self) -> None:
        """Take up each migration of kvplace once, until cancelled."""
        async with asyncio.TaskGroup() as group:
            while True:
                await asyncio.sleep(0.5)
                ours = [one for one in self._cluster.migrations.records.values() if one.is_ours]
                unfinished = [one.name for one in ours if not one.has_ended]
                if len(unfinished) > 1:
                    self._promises.break_one(f"M: {' and '.join(unfinished)} migrate at the same time")
                for migration in ours:
                    if migration.name not in self._known:
                        self._known.add(migration.name)
                        group.create_task(self._migrate(migration))

    async def _migrate(self, migration: MigrationRecord) -> None:
        source = self._source(migration)
        await self._network.take_time()
        if source is None or not self._is_there(migration):
            self._end(migration, None)
            return
        if not (read_pod_request(source.request).may_migrate or source.vmi_uid in self._promises.edited):
            self._promises.break_one(f"7: {source.name} migrates, and no client had asked for it")
        self._diary.note("migration", f"{migration.name} of {source.name}")
        target = self._cluster.create_pod(
            migration.name,
            request=source.request,
            vmi=source.vmi,
            vmi_uid=source.vmi_uid,
            migration=migration.name,
            resources=source.resources,
        )
        self._phase(migration, "Scheduling")
        if not await self._until(lambda: bool(self._node(target)), _UNSCHEDULABLE_S, migration, target):
            self._end(migration, target)
            return
        node = self._nodes[self._node(target)]

        def runs() -> bool:
            running = node.containers.get(target.uid)
            return running is not None and running.in_force is not None

        if not await self._until(runs, _ARRIVAL_S, migration, target):
            self._end(migration, target)
            return
        self._phase(migration, "Running")
        await asyncio.sleep(self._random.uniform(1, 15))
        if self._random.random() < 0.2 or not runs() or not self._is_there(migration):
            self._end(migration, target)
            return
        self._diary.note("migration succeeded", migration.name)
        self._phase(migration, "Succeeded")
        if self._live(source) is not None:
            self._cluster.delete_pod(source.namespace, source.name)

    def _source(self, migration: MigrationRecord) -> PodRecord | None:
        pods = [pod for pod in self._promises.pods() if pod.vmi == migration.vmi and pod.node]
        return next((pod for pod in pods if not pod.deleting and not pod.has_ended), None)

    def _live(self, pod: PodRecord) -> PodRecord | None:
        live = self._cluster._pods.get((pod.namespace, pod.name))
        return live if live is not None and live.uid == pod.uid else None

    def _node(self, pod: PodRecord) -> NodeName:
        live = self._live(pod)
        return NodeName("") if live is None else live.node

    def _is_there(self, migration: MigrationRecord) -> bool:
        return self._cluster.migrations.get((migration.namespace, migration.name)) is not None

    async def _until(
        self, holds: Callable[[], bool], seconds: float, migration: MigrationRecord, target: PodRecord
    ) -> bool:
        """Wait until something comes true; returns False if it does not in time, or the migration is gone."""
        ends = self._diary.clock() + seconds
        while not holds():
            gone = self._live(target) is None or not self._is_there(migration)
            if gone or self._diary.clock() > ends:
                return False
            await asyncio.sleep(0.5)
        return True

    def _end(self, migration: MigrationRecord, target: PodRecord | None) -> None:
        """Let a migration fail; its target pod goes."""
        self._diary.note("migration failed", migration.name)
        if self._is_there(migration):
            self._phase(migration, "Failed")
        if target is not None and self._live(target) is not None:
            self._cluster.delete_pod(target.namespace, target.name)

    def _phase(self, migration: MigrationRecord, phase: str) -> None:
        if self._is_there(migration):
            self._cluster.put_migration(migration.namespace, migration.name, migration.vmi, phase)
