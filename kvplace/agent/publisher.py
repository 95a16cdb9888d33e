"""Publishes the node: NodeTopology, its status, the node's cpu-map and the NodeResourceTopology.

Every check compares the objects with the report and writes only differences. The first change is
written at once; later changes are gathered for a second.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any, Protocol

from kvplace.agent import metrics
from kvplace.agent.conditions import described, devices_known, kubelet_state, ready
from kvplace.agent.node_objects import NodeObjects
from kvplace.agent.node_report import (
    Description,
    NodeReport,
    cpu_map_text,
    cpu_usage,
    describe,
    resource_topology_document,
)
from kvplace.agent.this_machine import MachineWatch, ThisMachine
from kvplace.core.errors import Conflict, KvplaceError, Refused
from kvplace.core.free_resources import NOTHING_IN_USE
from kvplace.core.node_devices import DeviceReport
from kvplace.core.node_topology import Enforcement
from kvplace.core.scalars import NodeName
from kvplace.core.topology import Topology
from kvplace.core.well_known_names import CPU_MAP
from kvplace.kube.api_errors import Backoff
from kvplace.kube.list_watch import is_newer
from kvplace.kube.object_records import (
    NodeRecord,
    PodReport,
    ResourceTopologyRecord,
    TopologyRecord,
    TopologyStatus,
    transition_times,
)

log = logging.getLogger(__name__)

PERIOD_S = 1.0
"""Time between two checks."""
USAGE_S = 10.0
"""A status with no other change than its usage is written after so long."""
ANOTHER_KIND_S = 600.0
"""A cluster without NodeResourceTopologies is asked again after so long."""


class PublisherClient(Protocol):
    """The cluster calls of the publisher."""

    async def write_topology(
        self, node: NodeRecord, topology: Topology, before: TopologyRecord | None
    ) -> str:
        """Create or replace the spec of a NodeTopology; returns its new resource version.

        Raises Conflict when it is not as `before` states.
        """
        ...

    async def write_topology_status(self, node: NodeName, status: TopologyStatus, version: str) -> str:
        """Replace the status of a NodeTopology that still has this resource version; returns the new one.

        Raises Conflict when it has changed, and Refused when it is gone.
        """
        ...

    async def read_resource_topology(self, node: NodeName) -> ResourceTopologyRecord | None:
        """Read the writer of a NodeResourceTopology; None where there is none."""
        ...

    async def write_resource_topology(
        self, node: NodeRecord, document: Mapping[str, Any], before: ResourceTopologyRecord | None
    ) -> ResourceTopologyRecord:
        """Create or replace a NodeResourceTopology.

        Raises Conflict when it differs from `before`, Refused when the cluster has no such kind.
        """
        ...

    async def annotate_node(self, node: NodeName, annotations: Mapping[str, str | None]) -> None:
        """Set annotations of a node, None removes one."""
        ...


@dataclass(slots=True)
class _ResourceTopologyState:
    """The known state of the NodeResourceTopology."""

    record: ResourceTopologyRecord | None = None
    """As it was found, or written; None until then, and where there is none."""
    document: Mapping[str, Any] | None = None
    """As this process has written it."""
    no_kind_until: float = 0.0
    """Not asked for before this moment of the loop's clock."""

    @property
    def by_hand(self) -> bool:
        """Whether a person has written it; what this process has written counts as the agent's."""
        return self.record is not None and self.document is None and not self.record.by_agent


class Publisher:
    """Keeps the objects of this node up to date."""

    def __init__(
        self,
        cluster: PublisherClient,
        own: NodeObjects,
        machine: MachineWatch,
        report: NodeReport,
        *,
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
        period_s: float = PERIOD_S,
    ) -> None:
        self._cluster = cluster
        self._own = own
        self._machine = machine
        self._report = report
        self._now = now
        self._period_s = period_s
        self._status: TopologyStatus | None = None
        """As this process has written it last."""
        self._version = ""
        """The resource version of the NodeTopology with that status; empty while the outcome is unknown."""
        self._resources = _ResourceTopologyState()
        self._usage_changed_at: float | None = None
        self._changed = asyncio.Event()
        for source in (own, machine, report):
            source.subscribe(self._changed.set)
        for store in own.stores:
            store.subscribe(lambda _before, _after: self._changed.set())

    async def run(self) -> None:
        """Publish whenever something has changed, until cancelled."""
        for store in self._own.stores:
            await store.wait_until_synced()
        backoff, failures = Backoff(), 0
        self._changed.set()
        while True:
            await self._changed.wait()
            self._changed.clear()
            pause = self._period_s
            try:
                await self._publish()
                failures = 0
            except Conflict as error:
                log.debug("another client has changed the object; writing again: %s", error)
                self._changed.set()
            except KvplaceError as error:
                pause = max(pause, backoff.pause(failures, error))
                failures += 1
                log.warning("publishing failed, trying again in %.1f s: %s", pause, error)
                self._changed.set()
            await asyncio.sleep(pause)

    async def _publish(self) -> None:
        node = self._own.nodes.get(self._own.node)
        if node is None:
            log.warning("node %s is not known to the API server: nothing is published", self._own.node)
            return
        machine = self._machine.machine
        stored = self._own.topology_record()
        description = describe(machine, None if stored is None or stored.by_agent else stored)
        generation, version = await self._write_topology(node, description, stored)
        cpu_map_by_hand = await self._write_cpu_map(node, cpu_map_text(machine, description))
        trouble: KvplaceError | None = None
        try:
            await self._write_resources(node, machine, description)
        except KvplaceError as error:
            trouble = error  # the status, which kvplace itself needs, does not wait for it
        await self._write_status(node, machine, description, stored, cpu_map_by_hand, generation, version)
        if trouble is not None:
            raise trouble

    async def _write_status(
        self,
        node: NodeRecord,
        machine: ThisMachine,
        description: Description,
        stored: TopologyRecord | None,
        cpu_map_by_hand: bool,
        generation: int,
        version: str,
    ) -> None:
        """Write the status unless it is as this process has written it.

        A write may take effect after this process has given it up, or after its end. It must not replace a
        newer status: a pod that is missing there has ended, and one that is there still uses its CPUs. So a
        status is written to the version that is known, and again where another write has come between.
        """
        enforcement, pods = self._enforcement_and_pods(stored)
        conditions = (
            described(
                machine,
                description,
                cpu_map_by_hand=cpu_map_by_hand,
                resources_by_hand=self._resources.by_hand,
            ),
            kubelet_state(machine.kubelet_cpus),
            *self._report.conditions.values(),
        )
        metrics.FAILED_CONDITIONS.update(
            {(one.type, one.reason): 1 for one in conditions if one.status is not True}
        )
        conditions = (
            ready(conditions, enforcement, machine.kubelet_cpus),
            *conditions,
            devices_known(self._devices(stored), self._report.devices_unknown or ""),
        )
        before = None if stored is None else self._status
        status = TopologyStatus(
            observed_generation=generation,
            enforcement=enforcement,
            kubelet_cpus=machine.kubelet_cpus.held,
            usage=cpu_usage(
                machine,
                description,
                self._own.ledger,
                enforcement,
                node.cpu_map if cpu_map_by_hand else "",
            ),
            in_use=self._report.in_use or (NOTHING_IN_USE if stored is None else stored.in_use),
            devices=self._devices(stored),
            pods=tuple(sorted(pods, key=lambda pod: pod.uid)),
            conditions=conditions,
            changed=transition_times(before, conditions, self._now()),
        )
        is_overtaken = version != self._version
        if is_overtaken or (status != before and not self._waits_for_more(status, before)):
            self._version = ""
            self._version = await self._cluster.write_topology_status(node.name, status, version)
            metrics.WRITES.labels("status").inc()
            self._status = status

    def _devices(self, stored: TopologyRecord | None) -> DeviceReport | None:
        """Return the devices; until they have been read, the list of the former agent."""
        if self._report.devices_unknown is None:
            return None if stored is None else stored.devices
        return self._report.devices

    def _waits_for_more(self, status: TopologyStatus, before: TopologyStatus | None) -> bool:
        """Whether nothing but the usage has changed, and not long ago: it then goes with the next write."""
        if before is None or replace(status, usage=before.usage) != before:
            self._usage_changed_at = None
            return False
        loop = asyncio.get_running_loop()
        if self._usage_changed_at is None:
            self._usage_changed_at = loop.time()
            loop.call_later(USAGE_S, self._changed.set)
            return True
        if loop.time() < self._usage_changed_at + USAGE_S:
            return True
        self._usage_changed_at = None
        return False

    def _enforcement_and_pods(
        self, stored: TopologyRecord | None
    ) -> tuple[Enforcement, Collection[PodReport]]:
        """Return the reports of the components; until they are complete, the reports of the former agent."""
        enforcement = self._report.enforcement
        if self._report.is_complete and enforcement is not None:
            return enforcement, self._report.pods.values()
        if stored is None:
            return Enforcement.NONE, ()
        return stored.enforcement, stored.pods.values()

    async def _write_topology(
        self, node: NodeRecord, description: Description, stored: TopologyRecord | None
    ) -> tuple[int, str]:
        """Write the spec unless it is there already, or a person has written it.

        Returns its generation, and the newest known version of the NodeTopology.
        """
        topology = description.topology
        if stored is not None and (description.by_hand or stored.topology == topology):
            is_seen = is_newer(stored.resource_version, self._version)
            return stored.generation, stored.resource_version if is_seen else self._version
        version = await self._cluster.write_topology(node, topology, stored)
        metrics.WRITES.labels("topology").inc()
        log.info("published the machine: %d CPUs, %s", topology.cpus.bit_count(), topology.fingerprint)
        return (1 if stored is None else stored.generation + 1), version

    async def _write_cpu_map(self, node: NodeRecord, text: str | None) -> bool:
        """Write the node's cpu-map unless a person has written it; returns whether one has."""
        there = node.cpu_map or None
        if there is not None and not node.cpu_map_by_agent:
            return True
        if there != text:
            await self._cluster.annotate_node(node.name, {CPU_MAP: text})
            metrics.WRITES.labels("cpu-map").inc()
        return False

    async def _write_resources(
        self, node: NodeRecord, machine: ThisMachine, description: Description
    ) -> None:
        """Write the NodeResourceTopology unless another component does, or the cluster has no such kind."""
        known, loop = self._resources, asyncio.get_running_loop()
        if loop.time() < known.no_kind_until:
            return
        if known.record is None:
            known.record = await self._cluster.read_resource_topology(node.name)
        if known.by_hand:
            return
        running = (
            (pod.namespace, pod.name) for pod in self._own.pods.records.values() if pod.phase == "Running"
        )
        document = resource_topology_document(
            machine, description, self._own.ledger, running, self._report.devices
        )
        if known.record is not None and document == known.document:
            return
        try:
            record = await self._cluster.write_resource_topology(node, document, known.record)
        except Conflict:
            # Another client has written or deleted it: read its writer again.
            self._resources = _ResourceTopologyState()
            raise
        except Refused:
            if known.record is None:
                log.info("the cluster has no NodeResourceTopologies: none is written")
            self._resources = _ResourceTopologyState(
                no_kind_until=loop.time() + ANOTHER_KIND_S if known.record is None else 0.0
            )
            return
        metrics.WRITES.labels("resources").inc()
        self._resources = _ResourceTopologyState(record, document)
