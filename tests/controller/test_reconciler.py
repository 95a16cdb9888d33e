"""Work that one check of a node has begun ends before the next check, and with the controller."""

from __future__ import annotations

import asyncio

import pytest

from kvplace.core.errors import Unavailable
from kvplace.core.ledger import Ledger
from kvplace.kube.object_records import PodRecord
from tests.controller.replicas import replica
from tests.kube.example_claims import claim, taking
from tests.kube.faulty_cluster import FaultyCluster
from tests.nodes.machines import EIGHT


class _HalfBroken(FaultyCluster):
    """Reading one pod fails at once, reading another one takes a minute."""

    def __init__(self) -> None:
        super().__init__()
        self.asked = asyncio.Event()
        self.reading = 0
        self.at_most = 0
        self.failed = 0

    async def read_pod(self, namespace: str, name: str) -> PodRecord | None:
        if name == "broken":
            self.failed += 1
            raise Unavailable("no answer")
        self.asked.set()
        self.reading += 1
        self.at_most = max(self.at_most, self.reading)
        try:
            await asyncio.sleep(60.0)
        finally:
            self.reading -= 1
        return await super().read_pod(namespace, name)


@pytest.fixture
def cluster() -> _HalfBroken:
    """A node with the claims of two pods that are gone."""
    made = _HalfBroken()
    made.create_node("n1", topology=EIGHT)
    claims = (claim("broken", 0, pod="broken"), claim("slow", 2, pod="slow"))
    made.put_ledger("n1", Ledger().after(taking(*claims)))
    return made


async def test_a_node_is_not_checked_again_while_a_read_of_the_last_check_is_under_way(
    cluster: _HalfBroken,
) -> None:
    async with replica(cluster) as one:
        await one.until(lambda: one.claims().keys() == {"broken"})
        assert cluster.at_most == 1
        assert cluster.failed > 1


async def test_no_read_of_a_check_that_has_failed_outlives_the_controller(cluster: _HalfBroken) -> None:
    async with replica(cluster):
        await cluster.asked.wait()
        await asyncio.sleep(0.5)
        assert (cluster.reading, cluster.failed) == (1, 1)
    assert cluster.reading == 0
