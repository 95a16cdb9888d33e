"""Lines of the log about VMs that move, are evicted or are planned are found by the UID of a pod, too."""

from __future__ import annotations

import pytest

from kvplace.core.errors import Unavailable
from kvplace.kube.object_records import PodRecord
from kvplace.scheduler.extender import ExtenderSettings
from kvplace.scheduler.room_maker import MakeRoom
from tests.controller.relocations import NodeAgent
from tests.controller.replicas import asking_pod, replica
from tests.kube.faults import Operation
from tests.kube.faulty_cluster import FaultyCluster
from tests.scheduler.crowded_node import N1, halved, moved, moved_and_bound, victims


def lines_about(log: pytest.LogCaptureFixture, pod: PodRecord) -> list[str]:
    """The texts that carry the UID of a pod, in their order."""
    return [record.getMessage() for record in log.records if getattr(record, "uid", "") == pod.uid]


async def test_making_room_is_reported_on_the_vm_that_waits_and_on_the_one_that_moves(
    cluster: FaultyCluster, agent: NodeAgent, caplog: pytest.LogCaptureFixture
) -> None:
    async with replica(cluster, extending=ExtenderSettings(make_room=MakeRoom.AUTOMATIC)) as one:
        await halved(one, agent, movable=True)
        caplog.set_level("INFO", "kvplace")
        big = asking_pod(cluster, "big", 8)
        assert not (await one.filter(big)).names
        await one.until(lambda: moved(agent))
        mover = await moved_and_bound(one, agent, big)
        await one.until(lambda: lines_about(caplog, mover))
    told = lines_about(caplog, big)
    assert told[0].startswith("does not fit: ")
    assert told[1] == "room is made by 1 move"
    assert f"default/{mover.vmi} moves from CPUs" in told[2]
    assert told[-1].startswith("bound to CPUs ")
    assert lines_about(caplog, mover)[-1].startswith("relocated to CPUs ")


async def test_an_eviction_is_reported_on_the_vm_that_causes_it(
    cluster: FaultyCluster, agent: NodeAgent, caplog: pytest.LogCaptureFixture
) -> None:
    async with replica(cluster) as one:
        left = await halved(one, agent, movable=False)
        caplog.set_level("INFO", "kvplace")
        big = asking_pod(cluster, "big", 8, priority=10)
        assert not (await one.filter(big)).names
        (victim,) = await victims(one, big, left[0].uid)
    (line,) = [record for record in caplog.records if record.getMessage().startswith("preempts 1 pods")]
    assert (line.uid, line.victims) == (big.uid, [victim])  # type: ignore[attr-defined]


async def test_a_nomination_that_fails_is_reported_on_the_pod_that_is_not_nominated(
    cluster: FaultyCluster, caplog: pytest.LogCaptureFixture
) -> None:
    asked, planned = [asking_pod(cluster, name, shape=b"of one kind") for name in ("asked", "planned")]
    cluster.faults.fail(Operation.NOMINATE_NODE, Unavailable("connection refused"))
    async with replica(cluster, extending=ExtenderSettings(nominate_from_nodes=1)) as one:
        await one.until(lambda: planned.uid in one.cache.pods.records)
        caplog.set_level("INFO", "kvplace")
        assert (await one.filter(asked)).names == [N1]
    assert lines_about(caplog, planned) == ["node n1 is not nominated: connection refused"]
