"""The claim and the reserved room of a waiting pod are its own: they do not count against it."""

from __future__ import annotations

from typing import TypeVar

import msgspec
import pytest

from kvplace.core.claim_changes import reserve
from kvplace.core.cluster.node_choice import Strategy
from kvplace.core.request_json import PodRequest, write_request
from kvplace.core.scalars import NO_CPUS, NodeName
from kvplace.explain.reading import explain_target, read_target
from kvplace.kube.object_client import Document, ObjectClient
from kvplace.kube.watches import ApiKind
from tests.core.requests import request_with
from tests.kube.example_claims import claim, taking
from tests.kube.faulty_cluster import FaultyCluster
from tests.nodes.machines import TWO

T = TypeVar("T")
NODE = {"metadata": {"name": "worker"}, "status": {"conditions": [{"type": "Ready", "status": "True"}]}}


class OneNode(ObjectClient):
    """A node, and nothing else."""

    def __init__(self) -> None:
        """It asks no API server."""

    async def read(self, kind: ApiKind, name: str, *, namespace: str = "") -> Document | None:
        return None

    async def read_list(
        self, kind: ApiKind, *, namespace: str = "", labels: str = "", fields: str = ""
    ) -> tuple[Document, ...]:
        return ()

    async def read_list_as(
        self, form: type[T], kind: ApiKind, *, namespace: str = "", labels: str = "", fields: str = ""
    ) -> tuple[T, ...]:
        return (msgspec.convert(NODE, form),)


@pytest.mark.parametrize("reserved", [False, True])
async def test_cores_claimed_or_reserved_for_a_waiting_pod_do_not_keep_it_away(*, reserved: bool) -> None:
    cluster = FaultyCluster()
    cluster.create_node("worker", topology=TWO)
    pod = cluster.create_pod("solver", request=write_request(PodRequest(request_with(4))))
    own = claim(pod.uid, 0, 1, 8, 9)
    full = taking(own, claim("db", *(cpu for cpu in range(16) if cpu not in (0, 1, 8, 9)), memory={}))
    stored = await cluster.write_ledger(await cluster.create_ledger(NodeName("worker")), full)
    if reserved:
        kept = reserve(stored.ledger, own, but=NO_CPUS, until="2026-01-02T03:05:00Z")
        await cluster.write_ledger(stored, taking(kept))
    target = read_target("pod/solver", "default")
    found = await explain_target(OneNode(), cluster, target, lambda *_: None, Strategy.PACK)
    assert found.fitting is not None
    assert [one.node for one in found.fitting.candidates] == ["worker"]
    assert not found.fits_nowhere
