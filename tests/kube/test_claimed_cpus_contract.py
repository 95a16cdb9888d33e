"""A cluster takes writes of the CPUs of ResourceClaims alike in memory and on a real API server."""

from __future__ import annotations

import pytest

from kvplace.core.errors import Conflict, Misconfigured
from kvplace.core.scalars import CpuMask, PodUid
from kvplace.kube.claimed_cpus import CLEARED, allocated_cpus, with_cpus
from tests.kube.worlds import ApiWorld, Json, MemoryWorld, World

ALLOCATED: Json = {
    "reservedFor": [{"resource": "pods", "name": "vm", "uid": "u-1"}],
    "allocation": {
        "allocationTimestamp": "2026-01-01T00:00:00Z",
        "devices": {
            "results": [
                {
                    "request": "cpus",
                    "driver": "dra.cpu",
                    "pool": "n",
                    "device": "cpus",
                    "shareID": "5b6c0a0e-0000-4000-8000-000000000001",
                    "consumedCapacity": {"dra.cpu/cpu": "2"},
                }
            ]
        },
    },
}
"""The status of a ResourceClaim that kube-scheduler has allocated CPUs to."""


class Contract:
    """The rules that hold on either side; the subclasses choose the side."""

    async def test_an_allocation_changes_only_after_it_was_cleared_and_a_late_writer_gets_a_conflict(
        self, world: World
    ) -> None:
        world.allocate_cpus("cpus", ALLOCATED)
        claim = await world.cluster.read_resource_claim(world.namespace, "cpus")
        assert claim is not None
        assert (claim.allocated, allocated_cpus(claim, PodUid("u-1"))) == ((("dra.cpu", "n", "cpus"),), 2)
        chosen = with_cpus(claim, CpuMask(0b110), "2030-01-01T00:00:00Z")
        assert chosen is not None
        with pytest.raises(Misconfigured, match="immutable"):
            await world.cluster.write_claim_status(claim, chosen)
        version = await world.cluster.write_claim_status(claim, CLEARED)
        cleared = await world.cluster.read_resource_claim(world.namespace, "cpus")
        assert cleared is not None
        assert (cleared.allocated, cleared.resource_version) == (None, version)
        with pytest.raises(Conflict):
            await world.cluster.write_claim_status(claim, chosen)
        await world.cluster.write_claim_status(cleared, chosen)
        written = await world.cluster.read_resource_claim(world.namespace, "cpus")
        assert written is not None
        assert written.status == chosen
        assert with_cpus(written, CpuMask(0b110), "2031-01-01T00:00:00Z") is None


class TestMemoryCluster(Contract):
    @pytest.fixture
    def world(self, memory_world: MemoryWorld) -> World:
        return memory_world


class TestApiCluster(Contract):
    @pytest.fixture
    def world(self, api_world: ApiWorld) -> World:
        return api_world
