"""The objects that the agent publishes, when it does, and the fields that it leaves to people."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

import pytest

from kvplace.agent import publisher
from kvplace.agent.node_report import cpu_usage, describe
from kvplace.agent.this_machine import MachineWatch
from kvplace.core.cpuset import cpus_of, parse_cpu_list
from kvplace.core.errors import Conflict, Misconfigured, Unavailable
from kvplace.core.ledger import Ledger, LedgerChange, claim_of
from kvplace.core.node_topology import Enforcement
from kvplace.core.placement import Placement
from kvplace.core.request import Policy
from kvplace.core.scalars import NO_CPUS, Bytes, CpuId, NodeName, NumaId, PodUid
from kvplace.core.topology import Topology
from kvplace.kube.list_watch import is_newer
from kvplace.kube.object_records import Condition, NodeRecord, PodReport, TopologyRecord, TopologyStatus
from kvplace.nodes.node_machine import NodeMachine, machine_of_node
from tests.agent.hosts import NODE, Host
from tests.agent.publishing_agent import PERIOD_S, Agent, publishing
from tests.kube.example_claims import claim, taking
from tests.kube.faults import Operation
from tests.kube.faulty_cluster import FaultyCluster

CPU_MAP = '{"socket0":["1","5"],"socket1":["2","3","6","7"]}'
GIB = 1 << 30


@pytest.fixture
def cluster() -> FaultyCluster:
    made = FaultyCluster()
    made.create_node(NODE)
    return made


def writes(cluster: FaultyCluster) -> int:
    """Count the calls that have changed something."""
    return sum(
        cluster.faults.calls[operation]
        for operation in (
            Operation.WRITE_TOPOLOGY,
            Operation.WRITE_TOPOLOGY_STATUS,
            Operation.ANNOTATE_NODE,
            Operation.WRITE_RESOURCE_TOPOLOGY,
        )
    )


async def test_a_new_node_gets_everything(host: Host, cluster: FaultyCluster) -> None:
    async with publishing(host, cluster) as agent:
        await agent.until(lambda: agent.status)
        assert agent.topology.topology == agent.machine.machine.topology
        assert agent.topology.by_agent
        assert cluster.node_annotations(NODE)["cpu-map"] == CPU_MAP
        assert agent.status.observed_generation == agent.topology.generation
        assert agent.condition("Described").reason == "Discovered"
        assert (
            "CPU 0,4 is reserved: the core of the lowest online CPU" in agent.condition("Described").message
        )
        assert agent.zones() == {
            "node-0": {"cpu": ("4", "2", "2"), "memory": ("16Gi", "16Gi", "16Gi")},
            "node-1": {"cpu": ("4", "4", "4"), "memory": ("16Gi", "16Gi", "16Gi")},
        }


async def test_an_agent_that_starts_again_writes_no_spec_and_no_cpu_map(
    host: Host, cluster: FaultyCluster
) -> None:
    async with publishing(host, cluster) as agent:
        await agent.until(lambda: agent.status)
        first = agent.topology
    before = cluster.faults.calls[Operation.WRITE_TOPOLOGY], cluster.faults.calls[Operation.ANNOTATE_NODE]
    del cluster.topology_statuses[NODE]
    async with publishing(host, cluster) as agent:
        await agent.until(lambda: agent.status)
        assert agent.topology.generation == first.generation
    assert before == (
        cluster.faults.calls[Operation.WRITE_TOPOLOGY],
        cluster.faults.calls[Operation.ANNOTATE_NODE],
    )


async def test_a_cpu_that_goes_offline_leaves_spec_map_and_zones(host: Host, cluster: FaultyCluster) -> None:
    async with publishing(host, cluster) as agent:
        await agent.until(lambda: agent.status)
        host.online({0, 1, 2, 3, 4, 5, 6})
        await agent.until(lambda: "7" not in cluster.node_annotations(NODE)["cpu-map"])
        await agent.until(lambda: agent.zones()["node-1"]["cpu"] == ("3", "3", "3"))
        assert agent.topology.topology == agent.machine.machine.topology


async def test_claims_make_cpus_memory_and_pages_unavailable(host: Host, cluster: FaultyCluster) -> None:
    host.huge_pages(1, 4)
    cpus = parse_cpu_list("2,6")
    placement = Placement(
        Policy.EXCLUSIVE,
        (CpuId(2), CpuId(6)),
        cpus,
        owned=cpus,
        memory={NumaId(1): Bytes(3 * GIB)},
        huge_pages={NumaId(1): {Bytes(GIB): 2}},
    )
    async with publishing(host, cluster) as agent:
        await agent.until(lambda: agent.status)
        ledger = await cluster.create_ledger(NODE)
        await cluster.write_ledger(ledger, LedgerChange(claims=(claim_of(PodUid("uid"), placement),)))
        await agent.until(
            lambda: (
                agent.zones()["node-1"]
                == {
                    "cpu": ("4", "4", "2"),
                    "memory": ("16Gi", "12Gi", "11Gi"),
                    "hugepages-1Gi": ("4Gi", "4Gi", "2Gi"),
                }
            )
        )


async def test_the_fingerprint_follows_the_running_pods(host: Host, cluster: FaultyCluster) -> None:
    def fingerprint() -> str:
        document = cluster.resource_topology(NODE)
        assert document is not None
        attributes = {entry["name"]: entry["value"] for entry in document["attributes"]}
        written: str = document["metadata"]["annotations"]["topology.node.k8s.io/fingerprint"]
        assert attributes["nodeTopologyPodsFingerprint"] == written
        assert attributes["nodeTopologyPodsFingerprintMethod"] == "all"
        return written

    async with publishing(host, cluster) as agent:
        await agent.until(lambda: fingerprint() == "pfp0v001ef46db3751d8e999")  # no pods
        pod = cluster.create_pod("virt-launcher-vm1-abcde", node=NODE)
        cluster.change_pod(pod.namespace, pod.name, phase="Running")
        await agent.until(lambda: fingerprint() == "pfp0v001eb2dc6239a6499da")


async def test_the_reports_of_all_components_form_the_status(host: Host, cluster: FaultyCluster) -> None:
    report = PodReport(PodUid("uid"), "vms", "a", revision=1, pinned=True, running=True)
    async with publishing(host, cluster) as agent:
        await agent.until(lambda: agent.condition("Ready").reason == "NotEnforced")
        agent.report.enforce(Enforcement.NRI)
        agent.report.put_pod(report)
        await agent.until(lambda: agent.condition("Ready").status)
        assert (agent.status.enforcement, agent.status.pods) == (Enforcement.NRI, (report,))
        agent.report.put_condition(Condition("Libvirt", False, "NotAnswering", "libvirt does not answer"))
        await agent.until(lambda: agent.condition("Ready").reason == "NotAnswering")
        assert "Libvirt: libvirt does not answer" in agent.condition("Ready").message
        agent.report.drop_condition("Libvirt")
        agent.report.drop_pod(report.uid)
        await agent.until(lambda: agent.condition("Ready").status and not agent.status.pods)


async def test_after_a_start_pods_and_enforcement_stay_published_until_the_new_ones_are_known(
    host: Host, cluster: FaultyCluster
) -> None:
    """Else `serve` would take running pods for ended ones and give their CPUs to others."""
    stays, ended = PodReport(PodUid("stays"), running=True), PodReport(PodUid("ended"), running=True)
    async with publishing(host, cluster) as agent:
        agent.report.enforce(Enforcement.NRI)
        agent.report.put_pod(stays)
        agent.report.put_pod(ended)
        await agent.until(lambda: len(agent.status.pods) == 2 and agent.status.enforcement is Enforcement.NRI)
    async with publishing(host, cluster, complete=False) as agent:
        del cluster.topology_statuses[NODE]
        await agent.until(lambda: agent.condition("Ready").status)
        assert (agent.status.enforcement, agent.status.pods) == (Enforcement.NRI, (ended, stays))
        agent.report.enforce(Enforcement.CGROUP)
        agent.report.put_pod(stays)
        agent.report.complete()
        await agent.until(lambda: agent.status.pods == (stays,))
        assert agent.status.enforcement is Enforcement.CGROUP


async def test_a_transition_time_moves_with_the_status_and_not_with_the_message(
    host: Host, cluster: FaultyCluster
) -> None:
    def put(status: bool, message: str) -> None:
        agent.report.put_condition(Condition("Libvirt", status, "Reason", message))

    async with publishing(host, cluster) as agent:
        put(True, "one")
        await agent.until(lambda: agent.condition("Libvirt").message == "one")
        first = agent.status.changed["Libvirt"]
        put(True, "two")
        await agent.until(lambda: agent.condition("Libvirt").message == "two")
        assert agent.status.changed["Libvirt"] == first
        put(False, "three")
        await agent.until(lambda: agent.condition("Libvirt").message == "three")
        assert agent.status.changed["Libvirt"] > first


async def test_many_changes_are_one_write(host: Host, cluster: FaultyCluster) -> None:
    async with publishing(host, cluster) as agent:
        await agent.until(lambda: agent.status)
        before = cluster.faults.calls[Operation.WRITE_TOPOLOGY_STATUS]
        for number in range(100):
            agent.report.put_pod(PodReport(PodUid(f"uid-{number}")))
        await agent.until(lambda: len(agent.status.pods) == 100)
        assert cluster.faults.calls[Operation.WRITE_TOPOLOGY_STATUS] <= before + 2


async def test_without_a_change_nothing_is_written(host: Host, cluster: FaultyCluster) -> None:
    async with publishing(host, cluster) as agent:
        await agent.until(lambda: agent.status)
        pod = cluster.create_pod("idle", node=NODE)
        await agent.until(lambda: pod.uid in agent.own.pods.records)
        before = writes(cluster)
        for number in range(20):
            cluster.label_pod(pod.namespace, pod.name, {"somebody/else": str(number)})
        marker = PodReport(PodUid("marker"))
        agent.report.put_pod(marker)
        await agent.until(lambda: agent.status.pods == (marker,))
        assert writes(cluster) == before + 1


# Written by hand


async def test_a_topology_written_by_hand_stays_and_the_agent_reports_it(
    host: Host, cluster: FaultyCluster, by_hand: Topology
) -> None:
    cluster.put_topology(NODE, by_hand)
    async with publishing(host, cluster) as agent:
        await agent.until(lambda: agent.condition("Described").reason == "WrittenByHand")
        assert (
            "the NodeTopology was written by another than the agent" in agent.condition("Described").message
        )
        assert agent.topology.topology == by_hand
        assert cluster.faults.calls[Operation.WRITE_TOPOLOGY] == 0
        assert cluster.node_annotations(NODE)["cpu-map"] == '{"socket0":["1"],"socket1":["2","3","6","7"]}'


async def test_a_topology_by_hand_that_gives_out_an_offline_cpu_is_not_described(
    host: Host, cluster: FaultyCluster, by_hand: Topology
) -> None:
    host.online({0, 1, 2, 3, 4, 5, 6})
    cluster.put_topology(NODE, by_hand)
    async with publishing(host, cluster) as agent:
        await agent.until(lambda: agent.condition("Described").status is False)
        assert "it gives out CPU 7, which is not online" in agent.condition("Described").message
        assert "7" not in cluster.node_annotations(NODE)["cpu-map"]


async def test_a_topology_that_is_deleted_is_the_agents_again(
    host: Host, cluster: FaultyCluster, by_hand: Topology
) -> None:
    cluster.put_topology(NODE, by_hand)
    async with publishing(host, cluster) as agent:
        await agent.until(lambda: agent.status)
        cluster.delete_topology(NODE)
        await agent.until(lambda: agent.condition("Described").reason == "Discovered")
        assert agent.topology.topology == agent.machine.machine.topology


async def test_a_cpu_map_written_by_hand_stays(host: Host, cluster: FaultyCluster) -> None:
    cluster.create_node(NODE, cpu_map='{"socket1":["3"]}')
    async with publishing(host, cluster) as agent:
        await agent.until(lambda: agent.condition("Described").reason == "WrittenByHand")
        assert "the node's cpu-map was written" in agent.condition("Described").message
        assert cluster.node_annotations(NODE)["cpu-map"] == '{"socket1":["3"]}'


async def test_a_resource_topology_of_another_component_stays(host: Host, cluster: FaultyCluster) -> None:
    document: dict[str, Any] = {"zones": []}
    cluster.put_resource_topology(NODE, document)
    async with publishing(host, cluster) as agent:
        await agent.until(lambda: agent.condition("Described").reason == "WrittenByHand")
        assert cluster.resource_topology(NODE) == document


async def test_another_component_that_takes_the_resource_topology_over_gets_it(
    host: Host, cluster: FaultyCluster
) -> None:
    async with publishing(host, cluster) as agent:
        await agent.until(agent.zones)
        cluster.put_resource_topology(NODE, {"zones": []})
        cluster.create_pod("starts", node=NODE)
        cluster.change_pod("default", "starts", phase="Running")
        await agent.until(lambda: agent.condition("Described").reason == "WrittenByHand")
        assert cluster.resource_topology(NODE) == {"zones": []}


async def test_a_cluster_without_resource_topologies_is_asked_once(
    host: Host, cluster: FaultyCluster
) -> None:
    cluster.serves_resource_topologies = False
    async with publishing(host, cluster) as agent:
        await agent.until(lambda: agent.status)
        for number in range(5):
            agent.report.put_pod(PodReport(PodUid(f"uid-{number}")))
            await agent.until(partial(_has_pods, agent, number + 1))
    assert cluster.faults.calls[Operation.WRITE_RESOURCE_TOPOLOGY] == 1


# Failures


@pytest.mark.parametrize(
    "operation",
    [
        Operation.WRITE_TOPOLOGY,
        Operation.WRITE_TOPOLOGY_STATUS,
        Operation.ANNOTATE_NODE,
        Operation.READ_RESOURCE_TOPOLOGY,
        Operation.WRITE_RESOURCE_TOPOLOGY,
    ],
)
async def test_a_failed_write_is_tried_again(
    host: Host, cluster: FaultyCluster, operation: Operation
) -> None:
    cluster.faults.fail(operation, Unavailable("the API server is away"), times=2)
    async with publishing(host, cluster) as agent:
        await agent.until(lambda: agent.status.conditions and agent.zones())
        assert cluster.node_annotations(NODE)["cpu-map"] == CPU_MAP


async def test_a_status_that_arrives_late_does_not_replace_a_newer_one(
    host: Host, cluster: FaultyCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = cluster.write_topology_status
    late: list[Callable[[], Awaitable[str]]] = []

    async def without_an_answer(node: NodeName, status: TopologyStatus, version: str) -> str:
        monkeypatch.undo()
        late.append(partial(write, node, status, version))
        raise Unavailable("no answer yet")

    async with publishing(host, cluster) as agent:
        await agent.until(lambda: agent.status)
        monkeypatch.setattr(cluster, "write_topology_status", without_an_answer)
        agent.report.put_pod(PodReport(PodUid("ends"), running=True))
        await agent.until(lambda: late)
        agent.report.drop_pod(PodUid("ends"))
        agent.report.put_pod(PodReport(PodUid("begins"), running=True))
        await agent.until(lambda: agent.topology.pods.keys() == {"begins"})
        with pytest.raises(Conflict):
            await late[0]()


async def test_a_status_of_an_earlier_agent_that_arrives_late_is_replaced(
    host: Host, cluster: FaultyCluster
) -> None:
    async with publishing(host, cluster) as agent:
        await agent.until(lambda: agent.topology.conditions)
        earlier, present = TopologyStatus(pods=(PodReport(PodUid("ended")),)), agent.topology
        late = await cluster.write_topology_status(NODE, earlier, present.resource_version)
        await agent.until(lambda: is_newer(agent.topology.resource_version, late))
        assert (agent.topology.pods, agent.topology.conditions) == ({}, present.conditions)


async def test_the_status_does_not_wait_for_a_resource_topology_that_is_refused(
    host: Host, cluster: FaultyCluster
) -> None:
    refusal = Misconfigured("spec.zones: invalid")
    cluster.faults.fail(Operation.WRITE_RESOURCE_TOPOLOGY, refusal, times=1000)
    async with publishing(host, cluster) as agent:
        await agent.until(lambda: agent.status.conditions)
        assert cluster.resource_topology(NODE) is None


async def test_a_node_that_is_not_there_yet_gets_nothing_until_it_is(host: Host) -> None:
    cluster = FaultyCluster()
    async with publishing(host, cluster) as agent:
        await agent.own.nodes.wait_until_synced()
        cluster.create_node(NODE)
        await agent.until(lambda: agent.status)


def _has_pods(agent: Agent, count: int) -> bool:
    return len(agent.status.pods) == count


@pytest.fixture
def by_hand(host: Host) -> Topology:
    return replace(MachineWatch(host.settings()).machine.topology, reserved=parse_cpu_list("0,4,5"))


def owned(agent: Agent) -> int:
    """The owned CPUs that the status states."""
    usage = agent.status.usage
    assert usage is not None
    return usage.owned


async def own_one_more(agent: Agent, cluster: FaultyCluster) -> None:
    """Let a pod own one CPU more, and wait until the publisher has seen it."""
    before = cluster.faults.calls[Operation.WRITE_RESOURCE_TOPOLOGY]
    ledger = await cluster.create_ledger(NODE)
    cpu = min(cpus_of(agent.machine.machine.topology.allocatable & ~ledger.ledger.owned))
    await cluster.write_ledger(ledger, taking(claim(f"pod-{cpu}", cpu)))
    await agent.until(lambda: cluster.faults.calls[Operation.WRITE_RESOURCE_TOPOLOGY] > before)


async def test_how_many_cpus_are_used_goes_with_the_next_write_of_the_status(
    host: Host, cluster: FaultyCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(publisher, "USAGE_S", 3600.0)
    written: list[TopologyStatus] = []
    write = cluster.write_topology_status

    async def noting(node: NodeName, status: TopologyStatus, version: str) -> str:
        written.append(status)
        return await write(node, status, version)

    monkeypatch.setattr(cluster, "write_topology_status", noting)
    async with publishing(host, cluster) as agent:
        await agent.until(lambda: agent.status)
        empty = agent.status.usage
        assert empty is not None
        assert (empty.owned, empty.pods) == (0, 0)
        assert empty.cpus == agent.machine.machine.topology.cpus.bit_count()
        await own_one_more(agent, cluster)
        await own_one_more(agent, cluster)  # and so the check of the first one is over
        agent.report.put_pod(PodReport(PodUid("db"), pinned=True))
        await agent.until(lambda: owned(agent) == 2)
        full = agent.status.usage
        assert full is not None
        assert (full.pods, full.free) == (2, empty.free - 2)
    assert all(
        replace(one, usage=None) != replace(next_one, usage=None) for one, next_one in pairwise(written)
    )


@pytest.mark.parametrize("enforcement", list(Enforcement))
def test_free_cpus_are_counted_as_the_scheduler_counts_them(host: Host, enforcement: Enforcement) -> None:
    machine = MachineWatch(host.settings()).machine
    pool = Placement(Policy.NUMA, (), machine.topology.allocatable, NO_CPUS)
    ledger = Ledger().after(LedgerChange(claims=(claim_of(PodUid("pool"), pool),)))
    usage = cpu_usage(machine, describe(machine, None), ledger, enforcement, "")
    node = machine_of_node(
        NodeRecord(NODE, "1"), TopologyRecord(NODE, machine.topology, enforcement=enforcement)
    )
    assert usage is not None
    assert isinstance(node, NodeMachine)
    assert usage.free == node.free(ledger).cpus.bit_count()
    assert (usage.free == 0) is (enforcement is Enforcement.NONE)


async def test_how_many_cpus_are_used_is_written_by_itself_after_some_seconds(
    host: Host, cluster: FaultyCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(publisher, "USAGE_S", 5 * PERIOD_S)
    async with publishing(host, cluster) as agent:
        await agent.until(lambda: agent.status)
        await own_one_more(agent, cluster)
        await agent.until(lambda: owned(agent) == 1)
