"""A reservation is stored in the same stages by the API server and by the cluster in memory."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvplace.core.claim_changes import grown, reserve
from kvplace.core.ledger import Ledger, LedgerChange
from kvplace.core.scalars import NO_CPUS, PodUid
from tests.kube.example_claims import claim, taking
from tests.kube.worlds import ApiWorld, MemoryWorld, World

A, B = map(PodUid, ("pod-a", "pod-b"))


class Contract:
    async def test_it_waits_for_owned_cpus_gets_them_after_their_release_and_becomes_a_claim(
        self, world: World
    ) -> None:
        record = await world.cluster.create_ledger(world.named("worker"))
        record = await world.cluster.write_ledger(record, taking(claim(A, 1)))
        whole = claim(B, 1, 2)
        kept = reserve(record.ledger, whole, but=NO_CPUS, until="2026-01-02T03:05:00Z")
        record = await world.cluster.write_ledger(record, taking(kept))
        assert record.ledger.claims[B] == kept
        assert record.ledger.owners == {1: A, 2: B}
        record = await world.cluster.write_ledger(record, LedgerChange(releases=(A,)))
        record = await world.cluster.write_ledger(record, taking(*grown(record.ledger)))
        assert record.ledger.claims == {B: replace(whole, reserved=kept.reserved)}
        record = await world.cluster.write_ledger(record, taking(whole))
        assert record.ledger == Ledger().after(taking(whole))


class TestMemoryCluster(Contract):
    @pytest.fixture
    def world(self, memory_world: MemoryWorld) -> World:
        return memory_world


class TestApiCluster(Contract):
    @pytest.fixture
    def world(self, api_world: ApiWorld) -> World:
        return api_world
