"""A record about a pod goes with it, also when the end of the pod was seen before the question.

A hold lasts until the bind, the pod's end, or a while later.
"""

from __future__ import annotations

import asyncio

from hypothesis import given
from hypothesis import strategies as st

from kvplace.core.scalars import NodeName, PodUid
from kvplace.core.well_known_names import PLACED_LABEL
from kvplace.nodes.node_cache import running_node_cache
from tests.controller.replicas import asking_pod
from tests.kube.example_claims import claim
from tests.kube.faulty_cluster import FaultyCluster
from tests.scheduler.holding import hold, pending_pods


async def test_records_of_pods_that_are_gone_are_dropped_and_those_of_waiting_pods_are_kept(
    cluster: FaultyCluster,
) -> None:
    waiting = {asking_pod(cluster, f"waiting-{number}").uid for number in range(50)}
    async with running_node_cache(cluster) as cache:
        pending = pending_pods(cache)
        for uid in waiting:
            pending.begin(uid)
        for number in range(5_000):
            pending.begin(PodUid(f"gone-{number}"))
        assert pending._records.keys() > waiting
        assert len(pending._records) < 400


async def test_records_of_pods_that_were_asked_about_after_their_bind_was_seen_are_dropped(
    cluster: FaultyCluster,
) -> None:
    bound = [asking_pod(cluster, f"bound-{number}") for number in range(50)]
    for pod in bound:
        await cluster.bind("default", pod.name, pod.uid, NodeName("n"), {})
    async with running_node_cache(cluster) as cache:
        pending = pending_pods(cache)
        for pod in bound:
            pending.begin(pod.uid)
        for number in range(1_000):
            pending.begin(PodUid(f"new-{number}"))
        assert pending._records.keys().isdisjoint(pod.uid for pod in bound)


async def test_records_of_pods_that_the_watch_has_not_shown_yet_are_kept(cluster: FaultyCluster) -> None:
    async with running_node_cache(cluster) as cache:
        pending = pending_pods(cache)
        for number in range(200):
            pending.begin(PodUid(f"new-{number}"))
        assert len(pending._records) == 200


async def test_a_pod_has_one_record_from_its_first_question_on(cluster: FaultyCluster) -> None:
    moment = [1.0]
    async with running_node_cache(cluster) as cache:
        pending = pending_pods(cache, clock=lambda: moment[0])
        record = pending.begin(PodUid("one"))
        moment[0] = 2.0
        assert pending.begin(PodUid("one")) is record
        assert (record.attempts, record.since) == (2, 1.0)


def test_a_value_that_is_written_into_a_record_is_kept_whichever_question_comes_first() -> None:
    pending = pending_pods()
    pending.record(PodUid("one")).no_room_before = 7.0
    assert pending.begin(PodUid("one")).no_room_before == 7.0


async def test_a_pod_that_ends_gives_up_its_hold_and_one_that_is_bound_there_has_taken_it(
    cluster: FaultyCluster,
) -> None:
    left: list[str] = []
    async with running_node_cache(cluster) as cache:
        pending = pending_pods(cache)
        pending.subscribe(left.append)
        ends, bound, elsewhere = (asking_pod(cluster, name) for name in ("ends", "bound", "elsewhere"))
        for number, pod in enumerate((ends, bound, elsewhere)):
            pending.hold(hold(f"n{number}", pod.uid, number))
        cluster.delete_pod("default", "ends")
        await cluster.bind("default", "bound", bound.uid, NodeName("n1"), {})
        await cluster.bind("default", "elsewhere", elsewhere.uid, NodeName("n7"), {})
        await asyncio.sleep(0.1)
        assert (left, pending.number_held, len(pending._records)) == (["n0", "n2"], 0, 0)


async def test_a_record_with_a_hold_is_kept_while_the_watch_is_late(cluster: FaultyCluster) -> None:
    async with running_node_cache(cluster) as cache:
        pending = pending_pods(cache)
        pending.hold(hold("n", "late", 0))
        for number in range(1_000):
            pending.begin(PodUid(f"new-{number}"))
        assert pending.node_of(PodUid("late")) == "n"


steps = st.lists(
    st.tuples(st.sampled_from(["hold", "drop", "wait"]), st.sampled_from("abc"), st.sampled_from(["n", "m"])),
    max_size=30,
)


@given(steps)
def test_a_pod_holds_at_most_once_and_no_longer_than_its_time(walk: list[tuple[str, str, str]]) -> None:
    moment = [0.0]
    changed: list[str] = []
    pending = pending_pods(clock=lambda: moment[0], changed=changed.append)
    expected: dict[str, tuple[str, float]] = {}
    for what, uid, node in walk:
        if what == "hold":
            pending.hold(hold(node, uid, 0))
            expected[uid] = (node, moment[0] + 3.0)
            assert changed[-1] == node
        elif what == "drop":
            pending.end_hold(PodUid(uid))
            expected.pop(uid, None)
        else:
            moment[0] += 1.0
        pending.drop_expired()
        expected = {uid: (at, until) for uid, (at, until) in expected.items() if until > moment[0]}
        for name in (NodeName("n"), NodeName("m")):
            held = {claim.uid for claim in pending.held_on(name)}
            assert held == {uid for uid, (at, _) in expected.items() if at == name}
            assert {claim.uid for claim in pending.held_on(name, but=PodUid("a"))} == held - {"a"}
        for uid, (at, _) in expected.items():
            found = pending.hold_of(PodUid(uid), NodeName(at))
            assert found is not None
            assert found.claim == claim(uid, 0)
            assert pending.hold_of(PodUid(uid), NodeName("elsewhere")) is None


def test_a_new_hold_of_a_pod_replaces_its_old_one_and_both_nodes_hear_of_it() -> None:
    changed: list[str] = []
    pending = pending_pods(changed=changed.append)
    pending.hold(hold("n", "a", 0))
    pending.hold(hold("m", "a", 1))
    assert changed == ["n", "n", "m"]
    assert list(pending.held_on(NodeName("n"))) == []
    assert list(pending.held_on(NodeName("m"))) == [claim("a", 1)]
    pending.end_hold(PodUid("a"))
    assert (pending._holding, pending._on_node) == ({}, {})


def test_cores_that_are_left_are_announced_only_where_no_pod_takes_them() -> None:
    moment, left = [0.0], list[str]()
    pending = pending_pods(clock=lambda: moment[0])
    pending.subscribe(left.append)
    for number, uid in enumerate("abc"):
        pending.hold(hold(f"n{number}", uid, number))
    pending.end_hold(PodUid("a"))
    assert left == []
    pending.leave(PodUid("b"))
    pending.leave(PodUid("b"))
    assert left == ["n1"]
    moment[0] = 3.0
    pending.drop_expired()
    assert left == ["n1", "n2"]


async def test_holds_end_on_time_although_nothing_asks() -> None:
    loop = asyncio.get_running_loop()
    ended: list[tuple[str, float]] = []
    pending = pending_pods(clock=loop.time)
    pending.subscribe(lambda node: ended.append((node, loop.time())))
    running = loop.create_task(pending.run())
    await asyncio.sleep(1.0)
    pending.hold(hold("n", "a", 0))
    await asyncio.sleep(1.0)
    pending.hold(hold("m", "b", 0))
    await asyncio.sleep(10.0)
    running.cancel()
    assert ended == [("n", 4.0), ("m", 5.0)]


async def test_pods_that_wait_for_their_first_try_come_by_priority_and_then_by_age(
    cluster: FaultyCluster,
) -> None:
    async with running_node_cache(cluster) as cache:
        pending = pending_pods(cache)
        for number, priority in enumerate((0, 5, 0, 9)):
            asking_pod(cluster, f"vm-{number}", priority=priority, shape=b"one")
        await asyncio.sleep(1)
        waiting = [pod.name for pod in pending.waiting.of_shape(b"one")]
        assert waiting == ["vm-3", "vm-1", "vm-0", "vm-2"]


async def test_pods_without_a_request_are_not_planned_with_others(cluster: FaultyCluster) -> None:
    async with running_node_cache(cluster) as cache:
        pending = pending_pods(cache)
        asking_pod(cluster, "vm", shape=b"one")
        cluster.create_pod("other", labels={PLACED_LABEL: "true"}, shape=b"one")
        await asyncio.sleep(1)
        assert [pod.name for pod in pending.waiting.of_shape(b"one")] == ["vm"]


def test_a_planned_hold_lasts_its_whole_time_from_the_question() -> None:
    now = [0.0]
    pending = pending_pods(clock=lambda: now[0])
    pending.hold(hold("n", "pod", 0), planned=True)
    now[0] = 2.0
    pending.asked(PodUid("pod"))
    now[0] = 4.9
    pending.drop_expired()
    assert len(pending.held_on(NodeName("n"))) == 1
    now[0] = 5.1
    pending.drop_expired()
    assert not pending.held_on(NodeName("n"))


def test_the_second_of_two_refusals_of_the_nominated_node_counts() -> None:
    now = [0.0]
    pending = pending_pods(clock=lambda: now[0])
    record = pending.record(PodUid("pod"))
    assert [pending.nominated_refused_twice(record) for _ in range(4)] == [False, True, False, True]
    pending.nominated_refused_twice(record)
    now[0] = 60.0
    assert not pending.nominated_refused_twice(record)


def test_nodes_with_plans_are_those_of_planned_holds_until_kube_scheduler_has_asked() -> None:
    pending = pending_pods()
    pending.hold(hold("asked", "a", 0))
    pending.hold(hold("planned", "b", 1), planned=True)
    assert pending.planned_nodes == {"planned"}
    pending.asked(PodUid("b"))
    assert pending.planned_nodes == set()
