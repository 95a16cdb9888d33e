"""Pods that wait with one shape are planned together and claimed together; no pod loses by it."""

from __future__ import annotations

import asyncio
from functools import partial
from itertools import pairwise
from typing import Any

import pytest

from kvplace.core.errors import Conflict, Unavailable
from kvplace.core.scalars import NodeName, PodUid
from kvplace.kube.object_records import PodRecord
from kvplace.kube.watches import PODS
from kvplace.scheduler.extender import ExtenderSettings, Mode
from kvplace.scheduler.joint_plan import TOGETHER
from tests.controller.replicas import Replica, asking_pod
from tests.controller.replicas import replica as any_replica
from tests.kube.faults import FaultScript, Operation
from tests.nodes.machines import EIGHT
from tests.scheduler.counting import Counting

SHAPE = b"of one kind"
PLANNING = ExtenderSettings(nominate_from_nodes=1)
replica = partial(any_replica, extending=PLANNING)
"""A replica that plans however small the cluster is."""


@pytest.fixture
def cluster() -> Counting:
    """Three nodes of eight CPUs."""
    made = Counting()
    for name in ("a", "b", "c"):
        made.create_node(name, topology=EIGHT)
    return made


def waiting(cluster: Counting, name: str, vcpus: int = 2, *, priority: int = 0, **asked: Any) -> PodRecord:
    return asking_pod(cluster, name, vcpus, shape=SHAPE, priority=priority, **asked)


def several(cluster: Counting, count: int, vcpus: int = 2) -> list[PodRecord]:
    return [waiting(cluster, f"vm-{number}", vcpus) for number in range(count)]


async def seen(one: Replica, count: int) -> None:
    """Wait until a replica has seen so many pods."""
    await one.until(lambda: len(one.cache.pods.records) >= count)


def planned(one: Replica) -> dict[str, str]:
    """The node of every planned pod, by name."""
    pending = one.extender.pending
    return {
        one.cache.pods.records[uid].name: node
        for node in pending.planned_nodes
        for uid in pending.planned_on(node)
    }


async def test_pods_that_wait_beside_one_are_planned_with_it_and_answered_from_the_plan(
    cluster: Counting,
) -> None:
    pods = several(cluster, 6)
    async with replica(cluster) as one:
        await seen(one, 6)
        assert (await one.filter(pods[0])).names == ["a"]
        assert planned(one) == {"vm-1": "a", "vm-2": "a", "vm-3": "a", "vm-4": "b", "vm-5": "b"}
        assert [(await one.filter(pod)).names for pod in pods[1:]] == [["a"]] * 3 + [["b"]] * 2
        assert planned(one) == {}
        assert one.held() == 6


async def test_the_first_bind_on_a_node_claims_for_all_that_are_planned_there(cluster: Counting) -> None:
    pods = several(cluster, 8)
    async with replica(cluster) as one:
        await seen(one, 8)
        for pod in pods:
            (node,) = (await one.filter(pod)).names or [NodeName("")]
            assert await one.bind(pod, node) == ""
        assert one.cache.ledgers.writes == 2
        assert cluster.claimed_on(pods[3].uid) == ["a"]
        given = [cluster.placement(pod.name).placement.cpus for pod in pods]
        assert given == [0x03, 0x0C, 0x30, 0xC0] * 2
        assert one.held() == 0


async def test_a_pod_that_is_claimed_along_is_sent_to_its_claim_by_every_replica(cluster: Counting) -> None:
    first, second = several(cluster, 2)
    async with replica(cluster) as one, replica(cluster) as other:
        await seen(one, 2)
        await one.filter(first)
        assert await one.bind(first, "a") == ""
        await other.until(lambda: other.cache.ledgers.nodes_claimed_by(second.uid))
        along = other.claims("a")[second.uid]
        assert (along.namespace, along.pod, along.vmi) == (second.namespace, second.name, second.vmi)
        assert (await other.filter(second)).names == ["a"]
        assert await other.bind(second, "a") == ""
        assert cluster.placement(second.name).placement.cpus == 0b1100
        assert other.cache.ledgers.writes == 0


async def test_no_more_than_a_bounded_number_is_planned_together(cluster: Counting) -> None:
    pods = several(cluster, TOGETHER + 5, 1)
    for number in range(40):
        cluster.create_node(f"n{number}", topology=EIGHT)
    async with replica(cluster) as one:
        await seen(one, len(pods))
        await one.filter(pods[0])
        assert one.held() == TOGETHER


async def test_others_have_their_turn_after_every_few_pods_that_are_planned(cluster: Counting) -> None:
    pods = several(cluster, TOGETHER, 1)
    for number in range(10):
        cluster.create_node(f"n{number}", topology=EIGHT)
    async with replica(cluster) as one:
        await seen(one, len(pods))
        planning = asyncio.create_task(one.filter(pods[0]))
        held = [one.held()]
        while not planning.done():
            await asyncio.sleep(0)
            held.append(one.held())
    assert held[-1] == TOGETHER
    assert max(after - before for before, after in pairwise(held)) <= 3


@pytest.mark.parametrize(
    "why_not", ["no shape", "another shape", "tried", "nominated", "unreadable", "bound"]
)
async def test_others_are_left_alone(cluster: Counting, why_not: str) -> None:
    first = waiting(cluster, "first")
    match why_not:
        case "no shape":
            asking_pod(cluster, "other")
        case "another shape":
            asking_pod(cluster, "other", shape=b"another")
        case "tried":
            waiting(cluster, "other")
            cluster.change_pod("default", "other", was_tried=True)
        case "nominated":
            waiting(cluster, "other")
            cluster.change_pod("default", "other", nominated="b")
        case "unreadable":
            cluster.create_pod("other", request="no JSON", shape=SHAPE)
        case "bound":
            other = waiting(cluster, "other")
            await cluster.bind("default", "other", other.uid, NodeName("c"), {})
    async with replica(cluster, controller=False) as one:
        await seen(one, 2)
        assert (await one.filter(first)).names == ["a"]
        assert planned(one) == {}


def explanation_of(cluster: Counting, pod: PodRecord) -> str:
    return cluster.pod_annotations(pod.namespace, pod.name)["kvplace.io/explanation"]


async def test_pods_with_an_explanation_are_planned_together_and_each_has_its_own(cluster: Counting) -> None:
    pods = [waiting(cluster, f"vm-{number}", 4, explain=True) for number in range(3)]
    async with replica(cluster) as one:
        await seen(one, 3)
        await one.filter(pods[0])
        assert planned(one) == {"vm-1": "a", "vm-2": "b"}
        for pod in pods:
            (node,) = (await one.filter(pod)).names or [NodeName("")]
            assert await one.bind(pod, node) == ""
    where = "(1 socket, 1 NUMA node, 1 L3 group); before"
    assert [explanation_of(cluster, pod) for pod in pods] == [
        f"a {where} b: first by name",
        f"a {where} b: its NUMA nodes are fuller",
        f"b {where} c: first by name",
    ]


@pytest.mark.parametrize(("taken", "node"), [(5, "a"), (6, "b")], ids=["nearly filled", "filled"])
async def test_pods_of_one_plan_stay_together_unless_one_of_them_fills_another_node(
    cluster: Counting, taken: int, node: str
) -> None:
    async with replica(cluster) as one:
        assert await one.bind(asking_pod(cluster, "other", taken), "b") == ""
        await one.until(lambda: one.claims("b"))
        first, second = waiting(cluster, "first", 4), waiting(cluster, "second", 2, explain=True)
        await seen(one, 3)
        assert (await one.filter(first)).names == ["a"]
        assert (await one.filter(second)).names == [node]
        assert await one.bind(second, node) == ""
    together = "before b: it gets other VMs that are planned together with this one"
    reason = together if node == "a" else "before a: "
    assert reason in explanation_of(cluster, second)


async def test_a_pod_that_is_not_planned_goes_to_the_fullest_node(cluster: Counting) -> None:
    async with replica(cluster) as one:
        assert await one.bind(asking_pod(cluster, "other", 5), "b") == ""
        await one.until(lambda: one.claims("b"))
        assert (await one.filter(asking_pod(cluster, "first", 4))).names == ["a"]
        assert (await one.filter(asking_pod(cluster, "second", 2))).names == ["b"]


async def test_a_pod_that_takes_planned_cores_gets_an_event(cluster: Counting) -> None:
    pods = several(cluster, 3, 8)
    async with replica(cluster) as one:
        await seen(one, 3)
        await one.filter(pods[0])
        urgent = asking_pod(cluster, "urgent", 8, explain=True)
        (node,) = (await one.filter(urgent)).names or [NodeName("")]
        assert await one.bind(urgent, node) == ""
    assert explanation_of(cluster, urgent) == (
        "b (1 socket, 1 NUMA node, 1 L3 group); "
        "no other room in the cluster, so pods planned for this node later give way"
    )


async def test_a_pod_that_is_on_its_own_is_planned_alone(cluster: Counting) -> None:
    waiting(cluster, "other")
    async with replica(cluster) as one:
        await seen(one, 1)
        assert (await one.filter(asking_pod(cluster, "alone"))).names == ["a"]
        assert planned(one) == {}


async def test_a_replica_that_only_advises_plans_nothing(cluster: Counting) -> None:
    pods = several(cluster, 3)
    async with replica(cluster, extending=ExtenderSettings(mode=Mode.ADVISE)) as one:
        await seen(one, 3)
        assert (await one.filter(pods[0])).names == ["a", "b", "c"]
        assert one.held() == 0


# Priorities.


async def test_waiting_pods_of_higher_priority_get_their_cores_first(cluster: Counting) -> None:
    low = waiting(cluster, "low", 8)
    urgent = [waiting(cluster, f"urgent-{number}", 8, priority=1) for number in range(3)]
    async with replica(cluster) as one:
        await seen(one, 4)
        assert (await one.filter(low)).names == []
        assert planned(one) == {"urgent-0": "a", "urgent-1": "b", "urgent-2": "c"}
        assert [(await one.filter(pod)).names for pod in urgent] == [["a"], ["b"], ["c"]]


async def test_a_pod_that_is_asked_about_takes_the_cores_of_pods_that_are_only_planned(
    cluster: Counting,
) -> None:
    pods = several(cluster, 3, 8)
    async with replica(cluster) as one:
        await seen(one, 3)
        await one.filter(pods[0])
        assert planned(one) == {"vm-1": "b", "vm-2": "c"}
        assert (await one.filter(asking_pod(cluster, "other", 6))).names == ["b"]
        assert planned(one) == {"vm-2": "c"}
        assert (await one.filter(asking_pod(cluster, "small", 2))).names == ["b"]
        assert (await one.filter(pods[1])).names == ["c"]
        assert (await one.filter(pods[2])).names == []


async def test_plans_of_higher_priority_do_not_give_way(cluster: Counting) -> None:
    pods = [waiting(cluster, f"urgent-{number}", 8, priority=1) for number in range(3)]
    async with replica(cluster) as one:
        await seen(one, 3)
        await one.filter(pods[0])
        assert (await one.filter(asking_pod(cluster, "other", 8))).names == []
        assert planned(one) == {"urgent-1": "b", "urgent-2": "c"}


async def test_plans_that_still_fit_beside_a_pod_that_takes_others_stay(cluster: Counting) -> None:
    cluster.delete_node("b")
    cluster.delete_node("c")
    pods = several(cluster, 4)
    async with replica(cluster) as one:
        await seen(one, 4)
        await one.filter(pods[0])
        assert (await one.filter(asking_pod(cluster, "other", 3))).names == ["a"]
        assert len(planned(one)) == 1


# Plans that do not come true.


async def test_a_plan_whose_cores_another_client_has_claimed_is_made_anew(cluster: Counting) -> None:
    first, second = several(cluster, 2, 4)
    async with replica(cluster) as one, replica(cluster) as other:
        await seen(one, 2)
        await one.filter(first)
        assert planned(one) == {"vm-1": "a"}
        assert await other.bind(asking_pod(cluster, "foreign", 8), "a") == ""
        await one.until(lambda: one.claims("a"))
        assert (await one.filter(second)).names == ["b"]


async def test_a_node_that_kube_scheduler_does_not_offer_any_more_loses_its_plans(cluster: Counting) -> None:
    pods = several(cluster, 4)
    async with replica(cluster) as one:
        await seen(one, 4)
        await one.filter(pods[0])
        assert (await one.filter(pods[1], "b", "c")).names == ["b"]
        assert planned(one) == {}


async def test_a_planned_pod_that_is_deleted_gives_its_cores_back(cluster: Counting) -> None:
    pods = several(cluster, 3, 8)
    async with replica(cluster) as one:
        await seen(one, 3)
        await one.filter(pods[0])
        cluster.delete_pod("default", "vm-1")
        await one.until(lambda: len(one.cache.pods.records) == 2)
        assert planned(one) == {"vm-2": "c"}
        assert (await one.filter(asking_pod(cluster, "other", 8))).names == ["b"]


async def test_a_pod_that_is_deleted_after_it_was_claimed_along_is_released(cluster: Counting) -> None:
    first, second = several(cluster, 2)
    async with replica(cluster) as one:
        await seen(one, 2)
        await one.filter(first)
        assert await one.bind(first, "a") == ""
        assert second.uid in one.claims("a")
        cluster.delete_pod("default", second.name)
        await one.until(lambda: second.uid not in one.claims("a"))
        assert first.uid in one.claims("a")


async def test_a_pod_that_was_deleted_before_its_claim_went_along_is_released(cluster: Counting) -> None:
    first, second = several(cluster, 2)
    async with replica(cluster) as one:
        await seen(one, 2)
        await one.filter(first)
        cluster.pause_watches(PODS)
        cluster.delete_pod("default", second.name)
        assert await one.bind(first, "a") == ""
        assert second.uid in one.claims("a")
        cluster.resume_watches(PODS)
        await one.until(lambda: second.uid not in one.claims("a"))


async def test_a_claim_that_is_never_bound_is_released_after_a_while(
    cluster: Counting,
) -> None:
    first, second = several(cluster, 2)
    async with replica(cluster) as one:
        await seen(one, 2)
        await one.filter(first)
        assert await one.bind(first, "a") == ""
        await asyncio.sleep(40)
        assert second.uid in one.claims("a")
        await one.until(lambda: second.uid not in one.claims("a"))


async def test_a_claim_of_some_age_is_dated_anew_by_its_bind(cluster: Counting) -> None:
    first, second = several(cluster, 2)
    async with replica(cluster) as one:
        await seen(one, 2)
        await one.filter(first)
        assert await one.bind(first, "a") == ""
        await asyncio.sleep(50)
        sending = cluster.faults.hold(Operation.BIND)
        bind = asyncio.create_task(one.bind(second, "a"))
        await sending.reached.wait()
        assert one.claims("a")[second.uid].since.startswith("2026-01-02T00:00:50")
        sending.release()
        assert await bind == ""


async def test_a_pod_being_bound_elsewhere_is_not_claimed_along(cluster: Counting) -> None:
    first, second = several(cluster, 2)
    async with replica(cluster) as one:
        await seen(one, 2)
        await one.filter(first)
        sending = cluster.faults.hold(Operation.CREATE_LEDGER)
        elsewhere = asyncio.create_task(one.bind(second, "c"))
        await sending.reached.wait()
        assert await one.bind(first, "a") == ""
        assert cluster.claimed_on(PodUid(second.uid)) == []
        sending.release()
        assert await elsewhere == ""
        assert cluster.claimed_on(PodUid(second.uid)) == ["c"]


async def test_a_claim_along_stays_when_a_second_bind_fails_while_the_first_may_still_arrive(
    cluster: Counting,
) -> None:
    first, second = several(cluster, 2)
    async with replica(cluster, controller=False) as one:
        await seen(one, 2)
        await one.filter(first)
        assert await one.bind(first, "a") == ""
        assert cluster.claimed_on(second.uid) == ["a"]
        cluster.faults.fail(Operation.BIND, Unavailable("no answer"), times=50)
        assert "no answer" in await one.bind(second, "a")
        cluster.faults = FaultScript()
        cluster.faults.fail(Operation.BIND, Conflict("gated"))
        assert "gated" in await one.bind(second, "a")
        assert cluster.claimed_on(second.uid) == ["a"]
