"""In a large cluster the nodes of planned pods are nominated, unless it is too late."""

from __future__ import annotations

import asyncio

import pytest

from kvplace.core.errors import Unavailable
from kvplace.core.request import OnFailure
from kvplace.core.scalars import NodeName
from kvplace.kube.events import EventReason
from kvplace.kube.object_records import PodRecord
from kvplace.kube.watches import PODS
from kvplace.scheduler.extender import ExtenderSettings
from kvplace.scheduler.joint_plan import GATHER_S, OFFER_S, STREAM_S, TOGETHER
from tests.controller.replicas import Replica, asking_pod, replica
from tests.kube.faults import Operation
from tests.nodes.machines import EIGHT
from tests.scheduler.counting import Counting

ALWAYS = ExtenderSettings(nominate_from_nodes=1)


@pytest.fixture
def cluster() -> Counting:
    """Three nodes of eight CPUs."""
    made = Counting()
    for name in ("a", "b", "c"):
        made.create_node(name, topology=EIGHT)
    return made


def several(cluster: Counting, count: int, vcpus: int = 4) -> list[PodRecord]:
    return [asking_pod(cluster, f"vm-{number}", vcpus, shape=b"of one kind") for number in range(count)]


async def seen(one: Replica, count: int) -> None:
    await one.until(lambda: len(one.cache.pods.records) >= count)


def nominated(cluster: Counting) -> dict[str, str]:
    return {pod.name: pod.nominated for pod in cluster._pods.records.values() if pod.nominated}


async def refused_where_nominated(one: Replica, on_failure: OnFailure) -> PodRecord:
    """Create a pod whose nominated node is full, and have it refused there once."""
    asking_pod(one.cluster, "vm", 8, on_failure=on_failure)
    pod = one.cluster.change_pod("default", "vm", nominated="a")
    assert await one.bind(asking_pod(one.cluster, "foreign", 8), "a") == ""
    assert (await one.filter(pod, "a")).names == []
    return pod


async def test_planned_pods_get_their_nodes_nominated_and_the_one_asked_about_does_not(
    cluster: Counting,
) -> None:
    pods = several(cluster, 5)
    async with replica(cluster, extending=ALWAYS) as one:
        await seen(one, 5)
        await one.filter(pods[0])
        await one.until(lambda: len(nominated(cluster)) == 4)
        assert nominated(cluster) == {"vm-1": "a", "vm-2": "b", "vm-3": "b", "vm-4": "c"}
        assert (await one.filter(cluster.pod("vm-1"), "a")).names == ["a"]
        assert await one.bind(pods[1], "a") == ""
        assert cluster.pod("vm-1").nominated == ""


@pytest.mark.parametrize("from_nodes", [0, 4])
async def test_nothing_is_nominated_in_a_small_cluster_or_when_it_is_switched_off(
    cluster: Counting, from_nodes: int
) -> None:
    pods = several(cluster, 3)
    async with replica(cluster, extending=ExtenderSettings(nominate_from_nodes=from_nodes)) as one:
        await seen(one, 3)
        await one.filter(pods[0])
        await asyncio.sleep(1)
        assert nominated(cluster) == {}


async def test_a_pod_that_was_claimed_along_is_nominated_to_its_claim(cluster: Counting) -> None:
    first, second = several(cluster, 2)
    async with replica(cluster, extending=ALWAYS) as one:
        sending = cluster.faults.hold(Operation.NOMINATE_NODE)
        await seen(one, 2)
        await one.filter(first)
        await sending.reached.wait()
        assert await one.bind(first, "a") == ""
        sending.release()
        await one.until(lambda: nominated(cluster) == {"vm-1": "a"})
        assert second.uid in one.claims("a")


async def test_a_nomination_that_fails_changes_nothing(cluster: Counting) -> None:
    pods = several(cluster, 3)
    async with replica(cluster, extending=ALWAYS) as one:
        cluster.faults.fail(Operation.NOMINATE_NODE, Unavailable("connection refused"))
        await seen(one, 3)
        await one.filter(pods[0])
        await one.until(lambda: len(nominated(cluster)) == 1)
        for pod in pods:
            names = (await one.filter(pod)).names or [NodeName("")]
            assert await one.bind(pod, names[0]) == ""


async def test_a_later_nomination_by_another_client_stays(cluster: Counting) -> None:
    first, _ = several(cluster, 2)
    async with replica(cluster, extending=ALWAYS) as one:
        await seen(one, 2)
        cluster.pause_watches(PODS)
        cluster.change_pod("default", "vm-1", nominated="c")
        await one.filter(first)
        await asyncio.sleep(1)
        assert nominated(cluster) == {"vm-1": "c"}


async def test_a_pod_that_has_changed_since_it_was_planned_is_nominated_as_it_is_now(
    cluster: Counting,
) -> None:
    """KubeVirt writes the status of a pod right after it has created it."""
    first, _ = several(cluster, 2)
    async with replica(cluster, extending=ALWAYS) as one:
        await seen(one, 2)
        cluster.pause_watches(PODS)
        cluster.label_pod("default", "vm-1", {"changed": "true"})
        answer = asyncio.create_task(one.filter(first))
        await asyncio.sleep(0.1)
        assert nominated(cluster) == {}
        cluster.resume_watches(PODS)
        await answer
        assert nominated(cluster) == {"vm-1": "a"}


async def test_a_pod_that_kube_scheduler_asks_about_meanwhile_is_not_nominated(cluster: Counting) -> None:
    pods = several(cluster, 8, 1)
    async with replica(cluster, extending=ALWAYS) as one:
        sending = cluster.faults.hold(Operation.NOMINATE_NODE)
        await seen(one, 8)
        first = asyncio.create_task(one.filter(pods[0]))
        await sending.reached.wait()
        await one.until(lambda: one.extender.pending.planned_node(pods[7].uid) is not None)
        assert (await one.filter(pods[7])).names == ["a"]
        sending.release()
        await first
        await one.until(lambda: len(nominated(cluster)) == 6)
        await asyncio.sleep(1)
        assert "vm-7" not in nominated(cluster)


async def test_a_nominated_pod_whose_cores_are_gone_is_refused_there_and_placed_elsewhere(
    cluster: Counting,
) -> None:
    pods = several(cluster, 2, 4)
    async with replica(cluster, extending=ALWAYS) as one, replica(cluster) as other:
        await seen(one, 2)
        await one.filter(pods[0])
        await one.until(lambda: nominated(cluster) == {"vm-1": "a"})
        assert await other.bind(asking_pod(cluster, "foreign", 8), "a") == ""
        await one.until(lambda: one.claims("a"))
        assert (await one.filter(cluster.pod("vm-1"), "a")).names == []
        assert (await one.filter(cluster.pod("vm-1"))).names == ["b"]


async def test_a_vm_that_may_float_does_not_float_on_its_nominated_node_while_another_has_room(
    cluster: Counting,
) -> None:
    async with replica(cluster) as one:
        floating = await refused_where_nominated(one, OnFailure.FLOAT)
        assert (await one.filter(floating)).names == ["b"]


async def test_no_event_states_that_a_vm_fits_nowhere_of_which_only_the_nominated_node_was_asked_about(
    cluster: Counting,
) -> None:
    async with replica(cluster) as one:
        waiting = await refused_where_nominated(one, OnFailure.WAIT)
        assert (await one.filter(waiting)).names == ["b"]
        await one.events.finish()
        assert not [event for event in cluster.events if event.reason is EventReason.DOES_NOT_FIT]


async def test_a_vm_that_may_float_does_so_where_kube_scheduler_accepts_only_its_nominated_node(
    cluster: Counting,
) -> None:
    async with replica(cluster) as one:
        floating = await refused_where_nominated(one, OnFailure.FLOAT)
        assert (await one.filter(floating, "a")).names == ["a"]


async def test_pods_are_not_planned_over_the_nominated_node_alone(cluster: Counting) -> None:
    pods = several(cluster, 3, 2)
    cluster.change_pod("default", "vm-0", nominated="c")
    async with replica(cluster, extending=ALWAYS) as one:
        await seen(one, 3)
        assert (await one.filter(cluster.pod("vm-0"), "c")).names == ["c"]
        assert one.held() == 1
        assert (await one.filter(pods[1])).names == ["c"]


async def test_the_answer_about_a_pod_waits_until_those_planned_beside_it_are_nominated(
    cluster: Counting,
) -> None:
    pods = several(cluster, 5)
    async with replica(cluster, extending=ALWAYS) as one:
        sending = cluster.faults.hold(Operation.NOMINATE_NODE)
        await seen(one, 5)
        answer = asyncio.create_task(one.filter(pods[0]))
        await sending.reached.wait()
        assert not answer.done()
        sending.release()
        assert (await answer).names == ["a"]
        assert len(nominated(cluster)) == 4


async def test_the_answer_waits_until_the_watch_has_brought_the_nominations(cluster: Counting) -> None:
    """kube-scheduler, which has a watch as well, then knows them too."""
    pods = several(cluster, 2)
    async with replica(cluster, extending=ALWAYS) as one:
        await seen(one, 2)
        cluster.pause_watches(PODS)
        answer = asyncio.create_task(one.filter(pods[0]))
        await asyncio.sleep(0.1)
        assert nominated(cluster) == {"vm-1": "a"}
        assert not answer.done()
        cluster.resume_watches(PODS)
        assert (await answer).names == ["a"]


async def test_the_answer_about_a_planned_pod_waits_for_nominations_that_are_under_way(
    cluster: Counting,
) -> None:
    pods = several(cluster, 3)
    async with replica(cluster, extending=ALWAYS) as one:
        sending = cluster.faults.hold(Operation.NOMINATE_NODE)
        await seen(one, 3)
        await one.filter(pods[0])
        answer = asyncio.create_task(one.filter(pods[1]))
        await asyncio.sleep(0.1)
        assert not answer.done()
        sending.release()
        await answer
        assert "vm-2" in nominated(cluster)


async def test_the_answer_does_not_wait_for_ever_when_nominations_hang(cluster: Counting) -> None:
    pods = several(cluster, 2)
    async with replica(cluster, extending=ALWAYS) as one:
        cluster.faults.hold(Operation.NOMINATE_NODE)
        await seen(one, 2)
        assert (await one.filter(pods[0])).names == ["a"]


async def test_a_pod_of_a_stream_waits_for_those_that_come_behind_it(cluster: Counting) -> None:
    """And so the ones behind it are nominated before kube-scheduler can ask about them."""
    loop = asyncio.get_running_loop()
    async with replica(cluster, extending=ALWAYS) as one:
        first = several(cluster, 1)[0]
        await seen(one, 1)
        began = loop.time()
        await one.filter(first)
        assert loop.time() - began < GATHER_S
        second = asking_pod(cluster, "second", 2, shape=b"of one kind")
        await seen(one, 2)
        asking = asyncio.create_task(one.filter(second))
        behind = asking_pod(cluster, "behind", 2, shape=b"of one kind")
        await asking
        assert nominated(cluster) == {"behind": one.extender.pending.node_of(behind.uid)}


async def test_the_last_pod_of_a_stream_waits_only_until_no_other_one_comes(cluster: Counting) -> None:
    loop = asyncio.get_running_loop()
    async with replica(cluster, extending=ALWAYS) as one:
        first = asking_pod(cluster, "first", 2, shape=b"of one kind")
        await seen(one, 1)
        await one.filter(first)
        last = asking_pod(cluster, "last", 2, shape=b"of one kind")
        await seen(one, 2)
        began = loop.time()
        await one.filter(last)
        assert loop.time() - began < GATHER_S


async def test_a_pod_that_comes_alone_waits_for_no_pod(cluster: Counting) -> None:
    loop = asyncio.get_running_loop()
    async with replica(cluster, extending=ALWAYS) as one:
        for number in range(3):
            pod = asking_pod(cluster, f"alone-{number}", 2, shape=b"of one kind")
            await seen(one, number + 1)
            began = loop.time()
            await one.filter(pod)
            assert loop.time() - began < GATHER_S
            await asyncio.sleep(STREAM_S)


async def test_a_pod_does_not_wait_when_enough_others_wait_already(cluster: Counting) -> None:
    loop = asyncio.get_running_loop()
    async with replica(cluster, extending=ALWAYS) as one:
        first = asking_pod(cluster, "first", 1, shape=b"of one kind")
        await seen(one, 1)
        await one.filter(first)
        others = several(cluster, TOGETHER, 1)
        await seen(one, TOGETHER + 1)
        began = loop.time()
        await one.filter(others[0])
        assert loop.time() - began < GATHER_S


async def test_the_last_pods_of_a_rollout_wait_for_no_pod(cluster: Counting) -> None:
    """Neither the pod that is planned with the rest, nor the last nominated pod."""
    loop = asyncio.get_running_loop()
    pods = several(cluster, TOGETHER + 2, 1)
    for number in range(TOGETHER // 8):
        cluster.create_node(f"further-{number}", topology=EIGHT)
    async with replica(cluster, extending=ALWAYS) as one:
        await seen(one, TOGETHER + 2)
        await one.filter(pods[0])
        began = loop.time()
        await one.filter(pods[TOGETHER])
        assert loop.time() - began < GATHER_S
        nodes = nominated(cluster)
        assert nodes.keys() == {f"vm-{number}" for number in range(1, TOGETHER + 2)} - {f"vm-{TOGETHER}"}
        for name, node in list(nodes.items())[:-1]:
            await one.filter(cluster.pod(name), node)
        began = loop.time()
        await one.filter(cluster.pod(f"vm-{TOGETHER + 1}"), nodes[f"vm-{TOGETHER + 1}"])
        assert loop.time() - began < GATHER_S


async def test_while_kube_scheduler_tries_the_last_nominated_pod_the_ones_behind_it_are_nominated(
    cluster: Counting,
) -> None:
    """So it need not check all nodes again as long as pods come."""
    pods = several(cluster, 3, 2)
    async with replica(cluster, extending=ALWAYS) as one:
        await seen(one, 3)
        await one.filter(pods[0])
        assert nominated(cluster) == {"vm-1": "a", "vm-2": "a"}
        asking_pod(cluster, "behind", 2, shape=b"of one kind")
        await seen(one, 4)
        assert (await one.filter(cluster.pod("vm-1"), "a")).names == ["a"]
        assert "behind" not in nominated(cluster)  # vm-2 is still left to kube-scheduler
        assert (await one.filter(cluster.pod("vm-2"), "a")).names == ["a"]
        assert nominated(cluster)["behind"] == "a"


async def test_a_nominated_pod_that_was_claimed_along_has_those_behind_it_nominated_too(
    cluster: Counting,
) -> None:
    first, _ = several(cluster, 2)
    async with replica(cluster, extending=ALWAYS) as one:
        await seen(one, 2)
        await one.filter(first)
        assert await one.bind(first, "a") == ""
        await one.until(lambda: len(one.claims("a")) == 2)
        behind = asking_pod(cluster, "behind", 2, shape=b"of one kind")
        await seen(one, 3)
        assert (await one.filter(cluster.pod("vm-1"), "a")).names == ["a"]
        assert nominated(cluster)["behind"] == one.extender.pending.node_of(behind.uid)


async def test_pods_of_another_shape_are_not_nominated_to_nodes_that_were_not_offered_for_them(
    cluster: Counting,
) -> None:
    pods = several(cluster, 2)
    async with replica(cluster, extending=ALWAYS) as one:
        await seen(one, 2)
        await one.filter(pods[0])
        asking_pod(cluster, "other", 2, shape=b"of another kind")
        await seen(one, 3)
        await one.filter(cluster.pod("vm-1"), "a")
        assert "other" not in nominated(cluster)


async def test_nodes_that_were_offered_some_time_ago_are_not_used_any_more(cluster: Counting) -> None:
    pods = several(cluster, 2)
    async with replica(cluster, extending=ALWAYS) as one:
        await seen(one, 2)
        await one.filter(pods[0])
        await asyncio.sleep(OFFER_S)
        asking_pod(cluster, "behind", 2, shape=b"of one kind")
        await seen(one, 3)
        await one.filter(cluster.pod("vm-1"), "a")
        assert "behind" not in nominated(cluster)
