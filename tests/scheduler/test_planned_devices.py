"""A plan sends VMs with devices where Filter and Bind send them one after the other.

kube-scheduler counts devices before it calls Filter, so Filter is asked about the nodes with enough of them.
"""

from __future__ import annotations

import asyncio
from random import Random

import pytest

from kvplace.core.cluster.assignment_heuristics import assign_all, by_strategy
from kvplace.core.cluster.draft import Draft, shapes_of
from kvplace.core.cluster.node_choice import Strategy
from kvplace.core.device_locality import too_few_devices
from kvplace.core.node_devices import DeviceReport, NodeDevices, TopologyPolicy
from kvplace.core.occupant import ClusterNode
from kvplace.core.placement import Placement, PodPlacement
from kvplace.core.request import DeviceNuma, PinningOptions, Request, Scope
from kvplace.core.scalars import NodeName, NumaId, ResourceName
from kvplace.nodes.node_machine import NodeSnapshot
from tests.controller.replicas import Replica, asking_pod, replica
from tests.nodes.machines import TWO, TWO_QUADS
from tests.scheduler.counting import Counting

RESOURCES = (ResourceName("intel.com/vf"), ResourceName("example.com/gpu"))


def nodes_with_devices(random: Random) -> list[ClusterNode]:
    found = []
    for number in range(3):
        stated = [
            (resource, NumaId(numa), random.randint(0, 3)) for resource in RESOURCES for numa in (-1, 0, 1)
        ]
        policy = TopologyPolicy(random.choice(["none", "best-effort", "restricted", "single-numa-node"]))
        chosen = random.sample(stated, random.randint(1, len(stated)))
        devices = NodeDevices.all_free(chosen, policy) if random.random() < 0.9 else None
        found.append(ClusterNode(NodeName(f"n{number}"), random.choice([TWO, TWO_QUADS]), devices=devices))
    return found


def requests(random: Random) -> list[Request]:
    return [
        Request(
            random.randint(1, 3),
            PinningOptions(
                scope=random.choice([Scope.ONE_NUMA, Scope.ONE_SOCKET, Scope.ANY]),
                device_numa=random.choice(list(DeviceNuma)),
            ),
            devices={one: count for one in RESOURCES if (count := random.choice([0, 0, 1, 1, 2]))},
        )
        for _ in range(12)
    ]


def planned(nodes: list[ClusterNode], wanted: list[Request]) -> list[tuple[str, Placement] | None]:
    """Plan VMs one by one in their order, as the first attempt of every plan does."""
    draft, shapes = Draft.empty(nodes), shapes_of(wanted)
    assign_all(draft, range(len(shapes)), shapes, by_strategy(Strategy.PACK))
    return [
        (nodes[draft.node_of[vm]].name, draft.planned(vm).placement) if vm in draft.node_of else None
        for vm in range(len(shapes))
    ]


def has_devices(one: Replica, node: NodeName, request: Request) -> bool:
    snapshot = one.cache.snapshot(node)
    assert isinstance(snapshot, NodeSnapshot)
    return too_few_devices(snapshot.free.devices, request.devices) is None


async def scheduled(nodes: list[ClusterNode], wanted: list[Request]) -> list[tuple[str, Placement] | None]:
    """Ask Filter and Bind in the same order; no agent reports which devices the pods have got."""
    cluster = Counting()
    for node in nodes:
        cluster.create_node(node.name)
        report = None if node.devices is None else DeviceReport(node.devices)
        cluster.put_topology(node.name, node.topology, devices=report)
    found: list[tuple[str, Placement] | None] = []
    async with replica(cluster, controller=False) as one:
        for number, request in enumerate(wanted):
            options = {name: getattr(request.options, name) for name in ("scope", "device_numa")}
            pod = asking_pod(cluster, f"vm-{number:02}", request.vcpus, devices=request.devices, **options)
            await asyncio.sleep(1)  # the date of its claim
            enough = [node.name for node in nodes if has_devices(one, node.name, request)]
            names = ((await one.filter(pod, *enough)).names if enough else ()) or ()
            found.append(None)
            for name in names:
                assert await one.bind(pod, name) == ""
                bound = PodPlacement.from_json(cluster._pods.records[pod.namespace, pod.name].placement)
                found[-1] = (name, bound.placement)
    return found


@pytest.mark.parametrize("seed", range(25))
async def test_a_plan_answers_as_filter_and_bind_do(seed: int) -> None:
    random = Random(seed)
    nodes, wanted = nodes_with_devices(random), requests(random)
    answers = planned(nodes, wanted)
    assert answers == await scheduled(nodes, wanted)
    assert any(answers)


@pytest.mark.parametrize("near", [DeviceNuma.REQUIRED, DeviceNuma.PREFERRED])
async def test_where_a_device_vanishes_between_filter_and_bind_the_other_one_counts(near: DeviceNuma) -> None:
    cluster, vf = Counting(), RESOURCES[0]

    def report(*numa_nodes: int) -> DeviceReport:
        stated = [(vf, NumaId(numa), 1) for numa in numa_nodes]
        return DeviceReport(NodeDevices.all_free(stated, TopologyPolicy("best-effort")))

    cluster.create_node("a", topology=TWO)
    cluster.put_topology("a", TWO, devices=report(0, 1))
    async with replica(cluster, controller=False) as one:
        pod = asking_pod(cluster, "vm", 2, devices={vf: 1}, scope=Scope.ONE_NUMA, device_numa=near)
        await asyncio.sleep(1)
        assert (await one.filter(pod, "a")).names == ["a"]
        held = one.extender.pending.hold_of(pod.uid)
        assert held is not None
        assert held.placement.numa_nodes == (0,)
        cluster.put_topology("a", TWO, devices=report(1))
        await asyncio.sleep(1)
        assert await one.bind(pod, "a") == ""
        assert cluster.placement("vm").placement.numa_nodes == (1,)
