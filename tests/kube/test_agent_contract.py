"""The contract of what an agent writes, run against the in-memory cluster and a real API server."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime

import pytest

from kvplace.core.cpuset import parse_cpu_list
from kvplace.core.errors import Conflict, Refused
from kvplace.core.free_resources import MemoryInUse, free_of
from kvplace.core.ledger import Ledger
from kvplace.core.node_devices import TopologyPolicy
from kvplace.core.node_topology import Enforcement, read_topology, resource_topology
from kvplace.core.scalars import Bytes, NumaId, PodUid
from kvplace.kube.object_records import Condition, NodeRecord, PodReport, TopologyStatus
from kvplace.kube.watches import (
    NAME_FIELD,
    NODES,
    TOPOLOGIES,
    Selector,
)
from tests.kube.worlds import MACHINE, ApiWorld, MemoryWorld, World, watching

PINNED = Condition("kvplace.io/Pinned", True, "AffinitiesRead", "revision 1: every thread is in its place")
DRIFTED = Condition("kvplace.io/Pinned", False, "Drift", "revision 1: a thread has left its CPU")
REPORT = PodReport(
    PodUid("uid-1"),
    namespace="vms",
    pod="virt-launcher-a",
    revision=2,
    pinned=True,
    running=True,
    failed_revision=3,
    restored_placement='{"version": 1}',
    cpus=parse_cpu_list("1,3"),
    drift="revision 3: no memory",
)
STATUS = TopologyStatus(
    observed_generation=1,
    enforcement=Enforcement.NRI,
    kubelet_cpus=parse_cpu_list("3"),
    in_use=MemoryInUse({NumaId(0): Bytes(3 << 30)}, {NumaId(0): {Bytes(2 << 20): 7}}),
    pods=(REPORT, PodReport(PodUid("uid-2"))),
    conditions=(Condition("Ready", True, "Enforcing", "all is well"),),
    changed={"Ready": datetime(2026, 11, 22, tzinfo=UTC)},
)


MACHINE_READ = read_topology(MACHINE)
RESOURCES = resource_topology(
    MACHINE_READ,
    free_of(MACHINE_READ, Ledger()),
    "pfp0v0012a26bda2bb6ffa42",
    TopologyPolicy("restricted", "pod"),
)


class Contract:
    """The rules that hold on either side; the subclasses choose the side."""

    async def test_a_condition_is_set_beside_those_of_others(self, world: World) -> None:
        uid = world.create_pod("vm")
        world.set_pod_status("vm", phase="Running")
        for condition in (PINNED, Condition("kvplace.io/Other", None, "Unread", "not read yet"), DRIFTED):
            pod = await world.cluster.read_pod(world.namespace, "vm")
            assert pod is not None
            await world.cluster.set_pod_condition(pod, condition)
        pod = await world.cluster.read_pod(world.namespace, "vm")
        assert pod is not None
        assert (pod.uid, pod.phase) == (uid, "Running")
        assert pod.condition("kvplace.io/Pinned") == DRIFTED
        assert pod.condition("kvplace.io/Other") == Condition(
            "kvplace.io/Other", None, "Unread", "not read yet"
        )

    async def test_a_condition_is_not_set_on_another_pod_of_the_same_name(self, world: World) -> None:
        world.create_pod("vm")
        pod = await world.cluster.read_pod(world.namespace, "vm")
        assert pod is not None
        with pytest.raises(Refused):
            await world.cluster.set_pod_condition(replace(pod, uid=PodUid("another")), PINNED)
        world.delete_pod("vm", force=True)
        with pytest.raises(Refused):
            await world.cluster.set_pod_condition(pod, PINNED)

    async def test_an_agent_creates_its_topology_and_replaces_the_one_that_it_has_seen(
        self, world: World
    ) -> None:
        node = await a_node(world)
        agent = await world.agent()
        machine = read_topology(MACHINE)
        smaller = replace(machine, reserved=parse_cpu_list("0,2"))
        async with watching(world.cluster, TOPOLOGIES, Selector(fields={NAME_FIELD: node.name})) as seen:
            await agent.write_topology(node, machine, None)
            first = (await seen.until(lambda event: event.record.topology == machine)).record
            with pytest.raises(Conflict):
                await agent.write_topology(node, smaller, None)
            await agent.write_topology(node, smaller, first)
            second = (await seen.until(lambda event: event.record.topology == smaller)).record
            with pytest.raises(Conflict):
                await agent.write_topology(node, machine, first)
        assert (first.by_agent, second.by_agent) == (True, True)
        assert second.generation == first.generation + 1

    async def test_a_topology_that_a_person_has_written_is_distinguished(self, world: World) -> None:
        node = await a_node(world)
        agent = await world.agent()
        async with watching(world.cluster, TOPOLOGIES, Selector(fields={NAME_FIELD: node.name})) as seen:
            await agent.write_topology(node, read_topology(MACHINE), None)
            await seen.until(lambda event: event.record.by_agent)
            world.put_topology(node.name, {**MACHINE, "reserved": "0,2"})
            by_hand = (await seen.until(lambda event: not event.record.by_agent)).record
            await agent.write_topology_status(node.name, STATUS, by_hand.resource_version)
            observed = (await seen.until(lambda event: event.record.pods)).record
        assert by_hand.topology.reserved == parse_cpu_list("0,2")
        assert (observed.by_agent, observed.topology) == (False, by_hand.topology)

    async def test_measurements_of_an_agent_stay_known_where_a_person_writes_an_invalid_machine(
        self, world: World
    ) -> None:
        node = await a_node(world)
        agent = await world.agent()
        version = await agent.write_topology(node, MACHINE_READ, None)
        async with watching(world.cluster, TOPOLOGIES, Selector(fields={NAME_FIELD: node.name})) as seen:
            await agent.write_topology_status(node.name, STATUS, version)
            before = (await seen.until(lambda event: event.record.pods)).record
            world.put_topology(node.name, {**MACHINE, "cores": ["0,2", "1,2,3"]})
            found = (await seen.until(lambda event: event.record.problem)).record
            await agent.write_topology_status(node.name, TopologyStatus(), found.resource_version)
            after = (await seen.until(lambda event: event.record.problem and not event.record.pods)).record
        assert (found.topology, after.topology) == (None, None)
        assert (found.enforcement, found.kubelet_cpus) == (STATUS.enforcement, STATUS.kubelet_cpus)
        assert found.in_use == STATUS.in_use
        assert (found.pods, found.conditions) == (before.pods, STATUS.conditions)
        assert after.problem == found.problem

    async def test_a_status_replaces_all_of_the_one_before(self, world: World) -> None:
        node = await a_node(world)
        agent = await world.agent()
        version = await agent.write_topology(node, read_topology(MACHINE), None)
        async with watching(world.cluster, TOPOLOGIES, Selector(fields={NAME_FIELD: node.name})) as seen:
            version = await agent.write_topology_status(node.name, STATUS, version)
            full = (await seen.until(lambda event: event.record.pods)).record
            assert full.resource_version == version
            await agent.write_topology_status(node.name, TopologyStatus(), version)
            empty = (await seen.until(lambda event: not event.record.kubelet_cpus)).record
        assert (full.enforcement, full.kubelet_cpus, full.pods) == (
            Enforcement.NRI,
            parse_cpu_list("3"),
            {report.uid: report for report in STATUS.pods},
        )
        assert (empty.enforcement, empty.pods) == (Enforcement.NONE, {})
        assert empty.generation == full.generation

    async def test_a_status_replaces_no_newer_one(self, world: World) -> None:
        node = await a_node(world)
        agent = await world.agent()
        first = await agent.write_topology(node, read_topology(MACHINE), None)
        second = await agent.write_topology_status(node.name, STATUS, first)
        with pytest.raises(Conflict):
            await agent.write_topology_status(node.name, TopologyStatus(), first)
        assert await agent.write_topology_status(node.name, TopologyStatus(), second) != second

    async def test_a_status_needs_its_topology(self, world: World) -> None:
        with pytest.raises(Refused):
            await world.cluster.write_topology_status(world.named("nobody"), TopologyStatus(), "1")

    async def test_a_cpu_map_reports_whether_the_agent_has_written_it(self, world: World) -> None:
        node = await a_node(world)
        agent = await world.agent()
        async with watching(world.cluster, NODES, Selector(fields={NAME_FIELD: node.name})) as seen:
            await agent.annotate_node(node.name, {"cpu-map": '{"socket0":["1"]}'})
            ours = (await seen.until(lambda event: event.record.cpu_map)).record
            world.annotate_node(node.name, {"cpu-map": '{"socket0":["2"]}'})
            theirs = (await seen.until(lambda event: "2" in event.record.cpu_map)).record
        assert (ours.cpu_map_by_agent, theirs.cpu_map_by_agent) == (True, False)

    async def test_a_resource_topology_is_created_and_replaced_by_who_has_seen_it(self, world: World) -> None:
        node = await a_node(world)
        agent = await world.agent()
        assert await agent.read_resource_topology(node.name) is None
        first = await agent.write_resource_topology(node, RESOURCES, None)
        second = await agent.write_resource_topology(node, RESOURCES | {"zones": []}, first)
        assert (first.node, first.by_agent, second.by_agent) == (node.name, True, True)
        with pytest.raises(Conflict):
            await agent.write_resource_topology(node, RESOURCES, first)
        with pytest.raises(Conflict):
            await agent.write_resource_topology(node, RESOURCES, None)
        assert world.resource_topology(node.name)["zones"] == []
        await agent.write_resource_topology(node, RESOURCES, second)
        stored = world.resource_topology(node.name)
        assert {key: stored[key] for key in ("zones", "attributes", "topologyPolicies")} == {
            key: RESOURCES[key] for key in ("zones", "attributes", "topologyPolicies")
        }

    async def test_a_resource_topology_of_another_component_is_distinguished(self, world: World) -> None:
        node = await a_node(world)
        agent = await world.agent()
        await agent.write_resource_topology(node, RESOURCES, None)
        world.put_resource_topology(node.name, {**RESOURCES, "zones": []})
        found = await agent.read_resource_topology(node.name)
        assert found is not None
        assert found.by_agent is False


class TestMemoryCluster(Contract):
    @pytest.fixture
    def world(self, memory_world: MemoryWorld) -> World:
        return memory_world


class TestApiCluster(Contract):
    @pytest.fixture
    def world(self, api_world: ApiWorld) -> World:
        return api_world


async def a_node(world: World) -> NodeRecord:
    """Create a node and return its record."""
    name = world.named("worker")
    world.create_node(name)
    async with watching(world.cluster, NODES, Selector(fields={NAME_FIELD: name})) as seen:
        found = (await seen.until(lambda event: event.record.name == name)).record
    assert isinstance(found, NodeRecord)
    return found
