"""Filter and Bind of pods with devices of Dynamic Resource Allocation."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from kvplace.core.errors import Unavailable
from kvplace.core.ledger import Ledger
from kvplace.core.request import DeviceNuma, OnFailure, PinningOptions, Request, Scope
from kvplace.core.request_json import PodRequest, write_request
from kvplace.core.scalars import NodeName, NumaId, PodUid, ResourceName
from kvplace.kube.object_records import (
    DeviceClassRecord,
    DeviceRequest,
    PodRecord,
    ResourceClaimRecord,
    SliceDevice,
    SliceRecord,
)
from tests.controller.replicas import Replica, asking_pod, replica
from tests.kube.example_claims import claim, taking
from tests.kube.faults import Operation
from tests.nodes.machines import TWO
from tests.scheduler.counting import Counting

DRIVER = "gpu.example.com"
REQUIRED = DeviceNuma.REQUIRED


@pytest.fixture
def cluster() -> Counting:
    """Two nodes with two NUMA nodes of eight CPUs and one GPU each."""
    made = Counting()
    for name in ("a", "b"):
        made.create_node(name, topology=TWO)
        gpus = tuple(SliceDevice(f"gpu{number}", NumaId(number)) for number in range(2))
        made.put_slice(SliceRecord(f"{name}-gpus", DRIVER, name, 1, NodeName(name), gpus))
    made.put_device_class(DeviceClassRecord("gpu", DRIVER, ResourceName("example.com/gpu")))
    return made


def pod_with(
    cluster: Counting,
    name: str,
    vcpus: int = 4,
    near: DeviceNuma = REQUIRED,
    on_failure: OnFailure = OnFailure.WAIT,
) -> PodRecord:
    """Create a pod with a resource claim for one GPU."""
    cluster.put_resource_claim(ResourceClaimRecord("default", f"{name}-io", (DeviceRequest("gpu"),)))
    pod = asking_pod(cluster, name, vcpus, scope=Scope.ONE_NUMA, device_numa=near, on_failure=on_failure)
    return cluster._put_pod(replace(pod, resource_claims=(f"{name}-io",)))


def allocate(cluster: Counting, pod: PodRecord, node: str, *devices: str) -> None:
    """Allocate devices to the resource claim of a pod, as kube-scheduler does; none: free them."""
    keys = tuple((DRIVER, node, device) for device in devices)
    (name,) = pod.resource_claims
    cluster.put_resource_claim(ResourceClaimRecord("default", name, (DeviceRequest("gpu"),), keys or None))


def fill(cluster: Counting, node: str, *cpus: int) -> None:
    """Let another VM own CPUs of a node."""
    taken = claim(PodUid(f"other-{node}"), *cpus)
    cluster.put_ledger(node, Ledger().after(taking(taken)))


async def known(one: Replica) -> None:
    """Wait until the devices have been read."""
    await one.until(lambda: one.cache.dra.classes.has_synced and one.cache.dra.claims.has_synced)


@pytest.mark.parametrize("near", [DeviceNuma.REQUIRED, DeviceNuma.PREFERRED])
@pytest.mark.parametrize("number", [0, 1])
async def test_bind_places_beside_the_allocated_device_and_not_where_filter_held_cores(
    cluster: Counting, near: DeviceNuma, number: int
) -> None:
    async with replica(cluster) as one:
        await known(one)
        pod = pod_with(cluster, "vm", near=near)
        (node,) = (await one.filter(pod)).names or [NodeName("")]
        allocate(cluster, pod, node, f"gpu{number}")
        assert await one.bind(pod, node) == ""
        assert cluster.placement("vm").placement.numa_nodes == (number,)


async def test_a_refused_bind_names_the_shortfall_and_filter_refuses_that_node_until_its_ledger_changes(
    cluster: Counting,
) -> None:
    fill(cluster, "a", *range(1, 4))  # two cores are left on NUMA node 0, with the hyper-threads five CPUs
    async with replica(cluster) as one:
        await known(one)
        pod = pod_with(cluster, "vm", 6)
        assert (await one.filter(pod, "a")).names == ["a"]  # it may get the GPU of NUMA node 1
        allocate(cluster, pod, "a", "gpu0")
        refused = await one.bind(pod, "a")
        missing = "no 6 free CPUs on NUMA node 0, the NUMA node of its devices; best 5"
        assert refused == f"node a: {missing}"
        assert cluster.bindings == []
        again = await one.filter(pod, "a")
        assert again.names == []
        assert again.unresolvable == {"a": missing}

        allocate(cluster, pod, "a")  # kube-scheduler has freed it, and offers all nodes
        answer = await one.filter(pod, "a", "b")
        assert answer.names == ["b"]
        assert list(answer.unresolvable) == ["a"]

        cluster.put_ledger("a", Ledger())
        await asyncio.sleep(1)
        allocate(cluster, pod, "a", "gpu0")
        assert (await one.filter(pod, "a")).names == ["a"]
        assert await one.bind(pod, "a") == ""
        assert cluster.placement("vm").placement.numa_nodes == (0,)


async def test_filter_refuses_nodes_without_room_beside_a_free_device_and_counts_them(
    cluster: Counting,
) -> None:
    fill(cluster, "a", *range(4, 8), *range(12, 16))
    async with replica(cluster) as one:
        other = pod_with(cluster, "other")
        allocate(cluster, other, "a", "gpu0")
        await known(one)
        pod = pod_with(cluster, "vm", 8)
        await asyncio.sleep(1)
        answer = await one.filter(pod)
        assert answer.names == ["b"]
        assert answer.unresolvable == {
            "a": f"no room beside a free device of {DRIVER}: "
            "no 8 free CPUs on NUMA node 1, the NUMA node of its devices; best 0"
        }


@pytest.mark.parametrize("near", [DeviceNuma.PREFERRED, DeviceNuma.OFF])
async def test_filter_refuses_no_node_to_a_pod_whose_devices_need_not_be_local(
    cluster: Counting, near: DeviceNuma
) -> None:
    for node in ("a", "b"):
        fill(cluster, node, *range(4), *range(8, 12))
    async with replica(cluster) as one:
        await known(one)
        pod = pod_with(cluster, "vm", 8, near)
        (node,) = (await one.filter(pod)).names or [NodeName("")]
        allocate(cluster, pod, node, "gpu0")
        assert await one.bind(pod, node) == ""
        assert cluster.placement("vm").placement.numa_nodes == (1,)


async def test_filter_prefers_a_node_with_room_beside_the_first_free_device(cluster: Counting) -> None:
    fill(cluster, "a", *range(4), *range(8, 12))  # strategy pack prefers node a
    async with replica(cluster) as one:
        await known(one)
        assert (await one.filter(pod_with(cluster, "off", near=DeviceNuma.OFF))).names == ["a"]
        pod = pod_with(cluster, "vm", near=DeviceNuma.PREFERRED)
        await asyncio.sleep(1)
        assert (await one.filter(pod)).names == ["b"]
        assert (await one.filter(pod, "a")).names == ["a"]
        allocate(cluster, pod_with(cluster, "other"), "a", "gpu0")
        await asyncio.sleep(1)
        assert (await one.filter(pod)).names == ["a"]  # gpu1 is the first free device there


async def test_a_vm_is_not_spread_to_be_beside_its_device(cluster: Counting) -> None:
    fill(cluster, "a", *range(4), *range(8, 12))
    fill(cluster, "b", 1, 2, 9, 10, 5, 6, 13, 14)  # four CPUs on each NUMA node
    async with replica(cluster) as one:
        await known(one)
        options = PinningOptions(Scope.ANY, device_numa=DeviceNuma.PREFERRED)
        cluster.put_resource_claim(ResourceClaimRecord("default", "vm-io", (DeviceRequest("gpu"),)))
        pod = cluster.create_pod("vm", request=write_request(PodRequest(Request(6, options))))
        pod = cluster._put_pod(replace(pod, resource_claims=("vm-io",)))
        await asyncio.sleep(1)
        assert (await one.filter(pod)).names == ["a"]


async def test_the_reason_for_a_node_names_the_devices(cluster: Counting) -> None:
    fill(cluster, "a", *range(4), *range(8, 12))
    async with replica(cluster) as one:
        await known(one)
        options = PinningOptions(Scope.ONE_NUMA, device_numa=DeviceNuma.PREFERRED)
        asked = PodRequest(Request(4, options), explain=True)
        cluster.put_resource_claim(ResourceClaimRecord("default", "vm-io", (DeviceRequest("gpu"),)))
        pod = cluster.create_pod("vm", request=write_request(asked))
        pod = cluster._put_pod(replace(pod, resource_claims=("vm-io",)))
        await asyncio.sleep(1)
        assert (await one.filter(pod)).names == ["b"]
        explanation = one.extender.pending.record(pod.uid).explanation
        assert explanation.startswith("b (1 socket, 1 NUMA node, ")
        assert explanation.endswith("before a: beside more of its devices")


async def test_a_pod_that_may_float_runs_unpinned_where_nothing_is_beside_its_device(
    cluster: Counting,
) -> None:
    for node in ("a", "b"):
        fill(cluster, node, *range(4), *range(8, 12))
    async with replica(cluster) as one:
        await known(one)
        pod = pod_with(cluster, "vm", 8, on_failure=OnFailure.FLOAT)
        (node,) = (await one.filter(pod)).names or [NodeName("")]
        allocate(cluster, pod, node, "gpu0")
        assert await one.bind(pod, node) != ""
        assert (await one.filter(pod, node)).names == [node]
        assert await one.bind(pod, node) == ""
        assert cluster.placement("vm").placement.floats


async def test_the_claim_made_for_extended_resources_is_read_at_bind(cluster: Counting) -> None:
    async with replica(cluster) as one:
        await known(one)
        options = PinningOptions(Scope.ONE_NUMA, device_numa=REQUIRED)
        asked = Request(4, options, devices={ResourceName("example.com/gpu"): 1})
        pod = cluster.create_pod("vm", request=write_request(PodRequest(asked)))
        (node,) = (await one.filter(pod)).names or [NodeName("")]
        cluster.put_resource_claim(ResourceClaimRecord("default", "made", (), ((DRIVER, node, "gpu1"),)))
        cluster._put_pod(replace(pod, resource_claims=("made",)))
        assert await one.bind(pod, node) == ""
        assert cluster.placement("vm").placement.numa_nodes == (1,)


async def test_the_cores_of_a_pod_with_devices_are_not_claimed_along_with_another_one(
    cluster: Counting,
) -> None:
    async with replica(cluster) as one:
        await known(one)
        waiting, first = pod_with(cluster, "vm"), asking_pod(cluster, "first", 2)
        await asyncio.sleep(1)
        assert (await one.filter(waiting, "a")).names == ["a"]
        assert (await one.filter(first, "a")).names == ["a"]
        assert await one.bind(first, "a") == ""
        assert list(cluster.ledger("a").claims) == [first.uid]
        allocate(cluster, waiting, "a", "gpu1")
        assert await one.bind(waiting, "a") == ""
        assert cluster.placement("vm").placement.numa_nodes == (1,)


async def test_a_pod_without_devices_costs_no_read(cluster: Counting) -> None:
    async with replica(cluster) as one:
        await known(one)
        pod = asking_pod(cluster, "vm", 2)
        (node,) = (await one.filter(pod)).names or [NodeName("")]
        reads: list[str] = []
        cluster.read_resource_claim = lambda *args: reads.append("claim")  # type: ignore[method-assign,assignment]
        assert await one.bind(pod, node) == ""
        assert reads == []


async def test_a_device_of_an_unknown_numa_node_constrains_nothing(cluster: Counting) -> None:
    cluster.put_slice(SliceRecord("b-gpus", DRIVER, "b", 1, NodeName("b"), (SliceDevice("gpu0"),)))
    fill(cluster, "b", *range(4), *range(8, 12))
    async with replica(cluster) as one:
        await known(one)
        pod = pod_with(cluster, "vm", 8)
        assert (await one.filter(pod, "b")).names == ["b"]
        allocate(cluster, pod, "b", "gpu0")
        assert await one.bind(pod, "b") == ""
        assert cluster.placement("vm").placement.numa_nodes == (1,)


async def test_a_claim_made_beside_another_device_is_released_before_the_pod_is_bound(
    cluster: Counting,
) -> None:
    """A Bind ended between claim and binding; then kube-scheduler allocated another device."""
    async with replica(cluster) as one:
        await known(one)
        pod = pod_with(cluster, "vm")
        allocate(cluster, pod, "a", "gpu1")
        cluster.faults.fail(Operation.BIND, Unavailable("no answer"), times=100)
        assert await one.bind(pod, "a") == "no answer"
        cluster.faults.clear()

        allocate(cluster, pod, "a", "gpu0")
        refused = await one.bind(pod, "a")
        assert (
            refused == "node a or the pod's devices have changed since its cores were claimed; "
            "they are released soon"
        )
        await one.until(lambda: not cluster.claimed_on(pod.uid))
        assert await one.bind(pod, "a") == ""
        assert cluster.placement("vm").placement.numa_nodes == (0,)


async def test_a_node_that_was_refused_is_offered_when_it_has_room_beside_a_device_again(
    cluster: Counting,
) -> None:
    fill(cluster, "a", *range(1, 8))
    async with replica(cluster) as one:
        await known(one)
        pod = pod_with(cluster, "vm", 8)
        await one.until(lambda: one.cache.dra.claims.get(("default", "vm-io")) is not None)
        assert (await one.filter(pod, "a")).names == []
        assert "no room beside a free device" in (await one.filter(pod, "a")).unresolvable[NodeName("a")]
        cluster.put_ledger("a", Ledger())
        await one.until(lambda: not one.cache.ledger(NodeName("a")).owners)
        assert (await one.filter(pod, "a")).names == ["a"]


async def test_a_node_is_refused_as_soon_as_the_devices_with_room_are_taken(cluster: Counting) -> None:
    fill(cluster, "a", *range(1, 4))
    async with replica(cluster) as one:
        await known(one)
        pod, other = pod_with(cluster, "vm", 8), pod_with(cluster, "other")
        assert (await one.filter(pod, "a")).names == ["a"]
        allocate(cluster, other, "a", "gpu1")
        await one.until(
            lambda: (found := one.cache.dra.claims.get(("default", "other-io"))) and found.allocated
        )
        answer = await one.filter(pod, "a")
        assert "no room beside a free device" in answer.unresolvable[NodeName("a")]
