"""A hold lasts until the bind, the pod's end, or a while later."""

from __future__ import annotations

import asyncio

from hypothesis import given
from hypothesis import strategies as st

from kvplace.core.scalars import NodeName, PodUid
from kvplace.scheduler.holds import Holds
from tests.kube.claims import claim
from tests.scheduler.holding import hold

steps = st.lists(
    st.tuples(st.sampled_from(["hold", "drop", "wait"]), st.sampled_from("abc"), st.sampled_from(["n", "m"])),
    max_size=30,
)


@given(steps)
def test_a_pod_holds_at_most_once_and_no_longer_than_its_time(walk: list[tuple[str, str, str]]) -> None:
    moment = [0.0]
    changed: list[str] = []
    holds = Holds(seconds=3.0, clock=lambda: moment[0], changed=changed.append)
    expected: dict[str, tuple[str, float]] = {}
    for what, uid, node in walk:
        if what == "hold":
            holds.add(hold(node, uid, 0))
            expected[uid] = (node, moment[0] + 3.0)
            assert changed[-1] == node
        elif what == "drop":
            holds.drop(PodUid(uid))
            expected.pop(uid, None)
        else:
            moment[0] += 1.0
        holds.drop_expired()
        expected = {uid: (at, until) for uid, (at, until) in expected.items() if until > moment[0]}
        for name in (NodeName("n"), NodeName("m")):
            held = {claim.uid for claim in holds.on_node(name)}
            assert held == {uid for uid, (at, _) in expected.items() if at == name}
            assert {claim.uid for claim in holds.on_node(name, but=PodUid("a"))} == held - {"a"}
        for uid, (at, _) in expected.items():
            found = holds.of_pod(PodUid(uid), NodeName(at))
            assert found is not None
            assert found.claim == claim(uid, 0)
            assert holds.of_pod(PodUid(uid), NodeName("elsewhere")) is None


def test_a_new_hold_of_a_pod_replaces_its_old_one_and_both_nodes_hear_of_it() -> None:
    changed: list[str] = []
    holds = Holds(seconds=3.0, clock=lambda: 0.0, changed=changed.append)
    holds.add(hold("n", "a", 0))
    holds.add(hold("m", "a", 1))
    assert changed == ["n", "n", "m"]
    assert list(holds.on_node(NodeName("n"))) == []
    assert list(holds.on_node(NodeName("m"))) == [claim("a", 1)]
    holds.drop(PodUid("a"))
    assert (holds._holds, holds._on_node) == ({}, {})


def test_cores_that_are_left_are_announced_only_where_no_pod_takes_them() -> None:
    moment, left = [0.0], list[str]()
    holds = Holds(seconds=3.0, clock=lambda: moment[0], changed=lambda _node: None)
    holds.subscribe(left.append)
    for number, uid in enumerate("abc"):
        holds.add(hold(f"n{number}", uid, number))
    holds.drop(PodUid("a"))
    assert left == []
    holds.leave(PodUid("b"))
    holds.leave(PodUid("b"))
    assert left == ["n1"]
    moment[0] = 3.0
    holds.drop_expired()
    assert left == ["n1", "n2"]


async def test_holds_end_on_time_although_nothing_asks() -> None:
    loop = asyncio.get_running_loop()
    ended: list[tuple[str, float]] = []
    holds = Holds(seconds=3.0, clock=loop.time, changed=lambda _node: None)
    holds.subscribe(lambda node: ended.append((node, loop.time())))
    running = loop.create_task(holds.run())
    await asyncio.sleep(1.0)
    holds.add(hold("n", "a", 0))
    await asyncio.sleep(1.0)
    holds.add(hold("m", "b", 0))
    await asyncio.sleep(10.0)
    running.cancel()
    assert ended == [("n", 4.0), ("m", 5.0)]
