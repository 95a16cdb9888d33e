"""Filter and Bind on nodes where dra-driver-cpu sets the cpusets: the driver gets the CPUs of the ledger."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from kvplace.core.cpuset import format_cpu_list
from kvplace.core.errors import Forbidden, Unavailable
from kvplace.core.ledger import Ledger
from kvplace.core.node_topology import Enforcement
from kvplace.core.request import EmulatorThreads, OnFailure, Policy, Smt
from kvplace.core.scalars import CpuMask, NodeName
from kvplace.core.topology import Topology
from kvplace.kube.memory_objects import with_status
from kvplace.kube.object_records import CPU_DRIVER, DeviceRequest, PodRecord, ResourceClaimRecord
from kvplace.nodes.movable_vms import MovableVms
from tests.controller.replicas import asking_pod, replica
from tests.kube.faults import Moment, Operation
from tests.nodes.machines import EIGHT, TWO
from tests.scheduler.counting import Counting

EMPTY = {"allocation": None, "reservedFor": None}
SHARE_ID = "5b6c0a0e-0000-4000-8000-000000000001"


RESERVED = replace(EIGHT, reserved=CpuMask(1))
THREADS = replace(TWO, reserved=CpuMask(0x101))
HYBRID = replace(EIGHT, cores=tuple(map(CpuMask, (0x3, 0xC, 0x10, 0x20, 0x40, 0x80))))


def two_nodes(cluster: Counting) -> Counting:
    """Make node a, where the driver sets the cpusets, and node b, where the agent does."""
    node_of_the_driver(cluster, RESERVED)
    put_node(cluster, "b", RESERVED, Enforcement.NRI)
    return cluster


def node_of_the_driver(cluster: Counting, machine: Topology) -> None:
    put_node(cluster, "a", machine, Enforcement.DRA)


def put_node(cluster: Counting, name: str, machine: Topology, how: Enforcement) -> None:
    cluster.create_node(name, topology=machine)
    cluster.put_topology(name, machine, enforcement=how, by_agent=True)
    cluster.put_ledger(name, Ledger())


@pytest.fixture
def cluster() -> Counting:
    return two_nodes(Counting())


def pod_with(
    cluster: Counting,
    name: str,
    vcpus: int = 3,
    claims: int = 1,
    requests: Sequence[DeviceRequest] = (DeviceRequest(CPU_DRIVER),),
    **options: Any,
) -> PodRecord:
    """Create a pod with so many ResourceClaims. All its threads run on its own CPUs.

    By default these state no number of CPUs, so that Bind alone knows it.
    """
    asked = {"emulator_threads": EmulatorThreads.WITH_VCPUS, **options}
    names = tuple(f"{name}-cpus{number or ''}" for number in range(claims))
    for one in names:
        cluster.put_resource_claim(ResourceClaimRecord("default", one, tuple(requests)))
    return cluster._put_pod(replace(asking_pod(cluster, name, vcpus, **asked), resource_claims=names))


def result(cpus: int = 3, **other: Any) -> dict[str, Any]:
    return {
        "request": "cpus",
        "driver": CPU_DRIVER,
        "pool": "a",
        "device": "cpudevmachine",
        "shareID": SHARE_ID,
        "consumedCapacity": {"dra.cpu/cpu": str(cpus)},
        **other,
    }


def stored(cluster: Counting, name: str) -> ResourceClaimRecord:
    return cluster._resource_claims.records["default", name]


def allocate(cluster: Counting, pod: PodRecord, *results: dict[str, Any], users: Any = None) -> None:
    """Allocate devices to each resource claim of a pod, as kube-scheduler does; none: one with three CPUs.

    What is allocated already stays, as for kube-scheduler.
    """
    for name in pod.resource_claims:
        known = stored(cluster, name)
        reserved = users or [{"resource": "pods", "name": pod.name, "uid": pod.uid}]
        allocation = known.status.get("allocation") or {
            "allocationTimestamp": "2025-12-31T00:00:00Z",
            "nodeSelector": {"nodeSelectorTerms": [{"matchFields": [{"key": "metadata.name"}]}]},
            "devices": {"results": list(results or [result()])},
        }
        status = {"allocation": allocation, "reservedFor": reserved}
        cluster.put_resource_claim(with_status(known, status))


def given(cluster: Counting, pod: PodRecord) -> str:
    """Return the cpuset in the allocation of a pod, as the driver reads it; empty where there is none."""
    devices = stored(cluster, pod.resource_claims[0]).status["allocation"]["devices"]
    config = [one for one in devices.get("config", []) if one["opaque"]["driver"] == CPU_DRIVER]
    if not config:
        return ""
    (one,) = config
    assert (one["source"], one["requests"]) == ("FromClaim", ["cpus"])
    assert one["opaque"]["parameters"]["apiVersion"] == "v1alpha1"
    return str(one["opaque"]["parameters"]["cpuConfig"]["cpuset"])


def owned(cluster: Counting, pod: PodRecord) -> str:
    return format_cpu_list(cluster.ledger("a").claims[pod.uid].owned)


async def test_bind_writes_the_owned_cpus_into_the_allocation_and_keeps_all_else_of_it(
    cluster: Counting,
) -> None:
    async with replica(cluster) as one:
        pod = pod_with(cluster, "vm")
        assert (await one.filter(pod, "a")).names == ["a"]
        other = {"source": "FromClass", "opaque": {"driver": "other.example.com", "parameters": {}}}
        old = {"source": "FromClass", "opaque": {"driver": CPU_DRIVER, "parameters": {}}}
        allocate(cluster, pod)
        before = stored(cluster, "vm-cpus")
        before.status["allocation"]["devices"]["config"] = [other, old]
        assert await one.bind(pod, "a") == ""

        after = stored(cluster, "vm-cpus")
        placed = cluster.placement("vm")
        assert given(cluster, pod) == owned(cluster, pod) == format_cpu_list(placed.placement.owned)
        allocation = after.status["allocation"]
        assert allocation["devices"]["results"] == [result()]
        assert allocation["devices"]["config"][0] == other
        assert allocation["nodeSelector"] == before.status["allocation"]["nodeSelector"]
        assert allocation["allocationTimestamp"] > before.status["allocation"]["allocationTimestamp"]
        assert after.status["reservedFor"] == before.status["reservedFor"]
        assert placed.enforced


async def test_a_bind_that_is_repeated_writes_nothing_again(cluster: Counting) -> None:
    async with replica(cluster) as one:
        pod = pod_with(cluster, "vm")
        allocate(cluster, pod)
        cluster.faults.fail(Operation.BIND, Unavailable("no answer"), moment=Moment.AFTER)
        assert await one.bind(pod, "a") == ""
        written = stored(cluster, "vm-cpus")
        assert await one.bind(pod, "a") == ""
        assert stored(cluster, "vm-cpus") is written


async def test_cores_that_an_earlier_try_has_written_are_not_written_again(cluster: Counting) -> None:
    async with replica(cluster) as one:
        pod = pod_with(cluster, "vm")
        allocate(cluster, pod)
        cluster.faults.fail(Operation.BIND, Forbidden("denied create on pods/binding"))
        assert "denied" in await one.bind(pod, "a")
        written = stored(cluster, "vm-cpus")
        assert await one.bind(pod, "a") == ""
        assert stored(cluster, "vm-cpus") is written


async def test_cores_that_were_decided_anew_replace_those_of_an_earlier_try(cluster: Counting) -> None:
    async with replica(cluster) as one:
        pod = pod_with(cluster, "vm")
        allocate(cluster, pod)
        cluster.faults.fail(Operation.BIND, Forbidden("denied create on pods/binding"))
        assert "denied" in await one.bind(pod, "a")
        earlier = given(cluster, pod)
        assert pod.uid not in cluster.ledger("a").claims
        first = pod_with(cluster, "first")
        allocate(cluster, first)
        assert await one.bind(first, "a") == ""
        allocate(cluster, pod)
        assert given(cluster, first) == earlier
        answer = await one.bind(pod, "a")
        assert (answer, given(cluster, pod)) == ("", owned(cluster, pod))
        assert given(cluster, pod) != earlier


ITS_CLAIM = "ResourceClaim default/vm-cpus"
WRONG = {
    "another number": (
        [result(6)],
        f"{ITS_CLAIM} has 6 CPUs, and the pod owns 3: set dra.cpu/cpu of its request to 3",
    ),
    "another driver, too": (
        [result(), result(device="vf1", driver="nic.example.com")],
        f"{ITS_CLAIM} has devices of nic.example.com, too: request CPUs in a ResourceClaim of their own",
    ),
    "two requests": (
        [result(2), result(2, request="more")],
        f"{ITS_CLAIM} has 2 devices of dra.cpu: request one, for all CPUs",
    ),
    "another mode of the driver": (
        [{**result(), "consumedCapacity": None}],
        f"{ITS_CLAIM} has a device of dra.cpu without dra.cpu/cpu: run the driver with --group-by=machine",
    ),
}


@pytest.mark.parametrize(("results", "why"), WRONG.values(), ids=WRONG)
async def test_a_claim_that_does_not_hold_just_the_owned_cpus_is_refused_with_the_fix(
    cluster: Counting, results: list[dict[str, Any]], why: str
) -> None:
    async with replica(cluster) as one:
        pod = pod_with(cluster, "vm")
        assert (await one.filter(pod, "a")).names == ["a"]
        allocate(cluster, pod, *results)
        assert await one.bind(pod, "a") in (why, f"node a: {why}")
        assert cluster.bindings == []
        assert cluster.ledger("a").claims == {}
        assert given(cluster, pod) == ""
        assert (await one.filter(pod, "a")).unresolvable == {"a": why}


async def test_a_claim_that_another_pod_uses_is_never_written(cluster: Counting) -> None:
    async with replica(cluster) as one:
        pod = pod_with(cluster, "vm")
        allocate(cluster, pod, users=[{"uid": "running"}, {"uid": pod.uid}])
        assert "vm-cpus is in use by another pod" in await one.bind(pod, "a")
        assert given(cluster, pod) == ""


async def test_a_pod_with_two_claims_for_cpus_is_refused(cluster: Counting) -> None:
    async with replica(cluster) as one:
        pod = pod_with(cluster, "vm", claims=2)
        allocate(cluster, pod)
        refused = await one.bind(pod, "a")
        assert refused == (
            "node a: ResourceClaim default/vm-cpus, ResourceClaim default/vm-cpus1 all have CPUs: "
            "request the CPUs of a pod in one ResourceClaim"
        )


@pytest.mark.parametrize(
    "options",
    [{"emulator_threads": EmulatorThreads.SHARED}, {"policy": Policy.SHARE}],
    ids=["shared emulator threads", "policy share"],
)
async def test_a_pod_whose_threads_use_cpus_that_it_does_not_own_is_refused(
    cluster: Counting, options: dict[str, Any]
) -> None:
    async with replica(cluster) as one:
        pod = pod_with(cluster, "vm", **options)
        allocate(cluster, pod)
        refused = await one.bind(pod, "a")
        assert refused.startswith("node a: dra-driver-cpu gives a pod only CPUs that it owns, and this pod")
        assert "kvplace.io/emulator-threads to isolate or with-vcpus" in refused


async def test_filter_refuses_the_nodes_of_the_driver_to_a_pod_without_a_claim(cluster: Counting) -> None:
    async with replica(cluster) as one:
        pod = asking_pod(cluster, "vm", 4)
        answer = await one.filter(pod)
        assert answer.names == ["b"]
        assert "the pod has no ResourceClaim with dra.cpu/cpu" in answer.unresolvable[NodeName("a")]
        assert await one.bind(pod, "b") == ""
        cluster.put_topology("a", EIGHT, enforcement=Enforcement.NRI, by_agent=True)
        await one.until(lambda: not one.cache.dra_nodes)
        assert (await one.filter(asking_pod(cluster, "next", 4), "a")).names == ["a"]


async def filtered(
    cluster: Counting, requests: Sequence[DeviceRequest], claims: int = 1, **options: Any
) -> str:
    """Return why Filter refuses node a to a pod with these ResourceClaims; empty if it does not."""
    async with replica(cluster) as one:
        pod = pod_with(cluster, "vm", claims=claims, requests=requests, **options)
        names = [("default", name) for name in pod.resource_claims]
        await one.until(lambda: all(one.cache.dra.claims.get(name) for name in names))
        answer = await one.filter(pod, "a")
        why = answer.unresolvable.get(NodeName("a"), "")
        assert answer.names == ([] if why else ["a"])
        return why


def of_cpus(count: int, devices: int = 1) -> DeviceRequest:
    return DeviceRequest(CPU_DRIVER, devices, count)


async def test_filter_refuses_a_wrong_number_of_cpus_in_the_words_of_bind(cluster: Counting) -> None:
    wrong = f"{ITS_CLAIM} has 6 CPUs, and the pod owns 3: set dra.cpu/cpu of its request to 3"
    assert await filtered(cluster, [of_cpus(6)]) == wrong


async def test_filter_offers_these_nodes_to_a_pod_with_the_right_number(
    cluster: Counting,
) -> None:
    assert await filtered(cluster, [of_cpus(3)]) == ""


async def test_filter_leaves_a_number_that_it_does_not_know_to_bind(cluster: Counting) -> None:
    assert await filtered(cluster, [DeviceRequest(CPU_DRIVER)]) == ""


@pytest.mark.parametrize(
    ("options", "owns"),
    [
        ({"emulator_threads": EmulatorThreads.ISOLATE}, 4),
        ({"smt": Smt.REQUIRE}, 4),
        ({"smt": Smt.ISOLATE}, 6),
    ],
    ids=["isolated emulator threads", "whole cores", "one thread per core"],
)
async def test_filter_counts_the_cpus_that_options_add(options: dict[str, Any], owns: int) -> None:
    cluster = Counting()
    node_of_the_driver(cluster, THREADS)
    wrong = await filtered(cluster, [of_cpus(3)], **options)
    assert wrong.endswith(f"has 3 CPUs, and the pod owns {owns}: set dra.cpu/cpu of its request to {owns}")


async def test_filter_leaves_the_number_to_bind_where_cores_have_different_numbers_of_threads() -> None:
    cluster = Counting()
    node_of_the_driver(cluster, HYBRID)
    assert await filtered(cluster, [of_cpus(3)], smt=Smt.ISOLATE) == ""


async def test_filter_refuses_several_devices_or_claims_for_cpus(cluster: Counting) -> None:
    several = f"{ITS_CLAIM} has 2 devices of dra.cpu: request one, for all CPUs"
    assert await filtered(cluster, [of_cpus(2), of_cpus(1)]) == several


async def test_filter_refuses_two_claims_for_cpus(cluster: Counting) -> None:
    assert (await filtered(cluster, [of_cpus(3)], claims=2)).endswith(
        "default/vm-cpus1 all have CPUs: request the CPUs of a pod in one ResourceClaim"
    )


async def test_other_nodes_are_offered_whatever_the_number_of_cpus(cluster: Counting) -> None:
    async with replica(cluster) as one:
        pod = pod_with(cluster, "vm", requests=[of_cpus(6)])
        await one.until(lambda: one.cache.dra.claims.get(("default", "vm-cpus")))
        assert (await one.filter(pod)).names == ["b"]


async def test_a_pod_that_may_float_does_so_without_a_claim_and_never_with_one(cluster: Counting) -> None:
    async with replica(cluster) as one:
        floating = asking_pod(cluster, "floats", 4, on_failure=OnFailure.FLOAT)
        assert (await one.filter(floating, "a")).names == ["a"]
        assert await one.bind(floating, "a") == ""
        assert cluster.placement("floats").placement.floats
        pod = pod_with(cluster, "vm", on_failure=OnFailure.FLOAT)
        allocate(cluster, pod, result(6))
        assert "has 6 CPUs" in await one.bind(pod, "a")
        assert cluster.pod("vm").node == ""


async def test_pods_of_the_driver_get_no_other_cores_while_they_run(cluster: Counting) -> None:
    async with replica(cluster) as one:
        pod, node = pod_with(cluster, "vm", movable=True), NodeName("a")
        allocate(cluster, pod)
        assert await one.bind(pod, node) == ""
        await one.until(lambda: one.cache.pods.records[pod.uid].node)
        assert not MovableVms(one.cache).may_be_on(node)
        cluster.put_topology(node, RESERVED, enforcement=Enforcement.NRI, by_agent=True)
        await one.until(lambda: MovableVms(one.cache).may_be_on(node))


async def test_without_the_rights_the_answer_names_the_component(cluster: Counting) -> None:
    async with replica(cluster) as one:
        pod = pod_with(cluster, "vm")
        allocate(cluster, pod)
        cluster.faults.fail(Operation.WRITE_CLAIM_STATUS, Forbidden("denied patch on resourceclaims/status"))
        assert await one.bind(pod, "a") == (
            "denied patch on resourceclaims/status; enforcement dra needs the component dra-driver-cpu"
        )
        assert cluster.bindings == []


@pytest.mark.parametrize("moment", Moment)
@pytest.mark.parametrize("nth", [1, 2], ids=["cleared", "written"])
async def test_a_write_of_cores_that_fails_is_completed_by_the_next_try(
    cluster: Counting, nth: int, moment: Moment
) -> None:
    async with replica(cluster) as one:
        pod = pod_with(cluster, "vm")
        allocate(cluster, pod)
        cluster.faults.fail(Operation.WRITE_CLAIM_STATUS, Unavailable("no answer"), nth=nth, moment=moment)
        assert await one.bind(pod, "a") != ""
        assert cluster.bindings == []
        allocate(cluster, pod)
        assert await one.bind(pod, "a") == ""
        assert given(cluster, pod) == owned(cluster, pod)
