"""An agent's publisher with the parts around it, on a played cluster."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from typing import Any

from harness.waiting import PATIENCE_S
from kvplace.agent.node_objects import NodeObjects
from kvplace.agent.node_report import NodeReport
from kvplace.agent.publisher import Publisher
from kvplace.agent.this_machine import MachineWatch
from kvplace.core.node_topology import Enforcement
from kvplace.kube.object_records import Condition, TopologyRecord, TopologyStatus
from kvplace.service.process import in_background
from tests.agent.hosts import NODE, Host
from tests.kube.faulty_cluster import FaultyCluster

PERIOD_S = 0.01


@dataclass
class Agent:
    """The parts around a publisher."""

    cluster: FaultyCluster
    own: NodeObjects
    machine: MachineWatch
    report: NodeReport

    @property
    def topology(self) -> TopologyRecord:
        found = self.own.topology_record()
        assert found is not None
        return found

    @property
    def status(self) -> TopologyStatus:
        return self.cluster.topology_statuses[NODE]

    def condition(self, kind: str) -> Condition:
        return next(found for found in self.status.conditions if found.type == kind)

    def zones(self) -> Mapping[str, Mapping[str, tuple[str, str, str]]]:
        document = self.cluster.resource_topology(NODE)
        assert document is not None
        return {
            zone["name"]: {
                found["name"]: (found["capacity"], found["allocatable"], found["available"])
                for found in zone["resources"]
            }
            for zone in document["zones"]
        }

    async def until(self, what: Callable[[], Any]) -> None:
        """Wait until something is so; what is not there yet counts as no."""
        async with asyncio.timeout(PATIENCE_S):
            while True:
                with contextlib.suppress(KeyError, StopIteration, AssertionError):
                    if what():
                        return
                await asyncio.sleep(PERIOD_S)  # as often as the publisher checks


@contextlib.asynccontextmanager
async def publishing(host: Host, cluster: FaultyCluster, *, complete: bool = True) -> AsyncIterator[Agent]:
    """Publish what is reported; unless `complete`, nothing is known of containers and pods yet."""
    machine = MachineWatch(host.settings())
    own = NodeObjects(NODE, machine.machine.topology)
    report = NodeReport()
    if complete:
        report.enforce(Enforcement.NONE)
        report.complete()
    publisher = Publisher(cluster, own, machine, report, period_s=PERIOD_S)
    work = (*(store.run(cluster) for store in own.stores), machine.run(), publisher.run())
    async with in_background(*work):
        yield Agent(cluster, own, machine, report)
