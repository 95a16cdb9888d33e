"""Which events filter and bind write, and on which object."""

from __future__ import annotations

import pytest

from kvplace.core.request import OnFailure
from kvplace.core.request_json import PodRequest, write_request
from tests.controller.replicas import Replica, asking_pod, replica
from tests.core.requests import request_with
from tests.kube.faulty_cluster import FaultyCluster
from tests.nodes.machines import EIGHT


@pytest.fixture
def cluster() -> FaultyCluster:
    """Two nodes of eight CPUs."""
    cluster = FaultyCluster()
    for name in ("n1", "n2"):
        cluster.create_node(name)
        cluster.put_topology(name, EIGHT)
    return cluster


async def events(one: Replica) -> list[tuple[str, str]]:
    """Wait until all events are written; answers (kind, reason) of each event."""
    await one.events.finish()
    return [(event.regarding.kind, event.reason.value) for event in one.cluster.events]


async def test_a_pod_that_gets_its_cores_reports_it_itself_and_no_event_repeats_it(
    cluster: FaultyCluster,
) -> None:
    async with replica(cluster) as one:
        pod = asking_pod(cluster, "vm")
        await one.filter(pod)
        assert await one.bind(pod, "n1") == ""
        assert await events(one) == []


async def test_a_vm_that_runs_unpinned_has_one_event_on_its_vmi(cluster: FaultyCluster) -> None:
    async with replica(cluster) as one:
        pod = asking_pod(cluster, "vm", vcpus=9, on_failure=OnFailure.FLOAT)
        assert await one.bind(pod, "n1") == ""
        assert await events(one) == [("VirtualMachineInstance", "Floating")]


async def test_a_plain_pod_that_runs_unpinned_has_the_event_itself(cluster: FaultyCluster) -> None:
    async with replica(cluster) as one:
        asked = PodRequest(request_with(9, on_failure=OnFailure.FLOAT), "")
        pod = cluster.create_pod("plain", request=write_request(asked))
        assert await one.bind(pod, "n1") == ""
        assert await events(one) == [("Pod", "Floating")]


async def test_for_a_pod_that_fits_the_refusals_of_other_nodes_are_not_written(
    cluster: FaultyCluster,
) -> None:
    async with replica(cluster) as one:
        first = asking_pod(cluster, "first", vcpus=6)
        chosen = (await one.filter(first)).names or []
        assert await one.bind(first, *chosen) == ""
        answer = await one.filter(asking_pod(cluster, "second", vcpus=6))
        assert answer.names == [name for name in ("n1", "n2") if name not in chosen]
        assert answer.unresolvable == {}
        none = await one.filter(asking_pod(cluster, "third", vcpus=6))
        assert none.names == []
        assert set(none.unresolvable) == {"n1", "n2"}
