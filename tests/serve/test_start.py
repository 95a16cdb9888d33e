"""The work of `serve` before it is ready, so that its first answers do not wait for it."""

from __future__ import annotations

import gc

import pytest

from harness.certificates import Certificates
from kvplace.nodes.node_cache import NodeCache
from kvplace.serve.process import serving
from tests.kube.faulty_cluster import FaultyCluster
from tests.nodes.machines import EIGHT
from tests.serve.served import settings_for


async def test_every_node_is_described_before_the_objects_read_are_hidden_from_the_garbage_collector(
    certificates: Certificates, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the first plan makes thousands of objects, and a full collection walks them while others wait."""
    happened: list[str] = []
    snapshot = NodeCache.snapshot

    def described(*args: object) -> object:
        happened.append(f"{args[1]} described")
        return snapshot(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(NodeCache, "snapshot", described)
    monkeypatch.setattr(gc, "freeze", lambda: happened.append("kept"))
    cluster = FaultyCluster()
    for name in ("a", "b"):
        cluster.create_node(name, topology=EIGHT)
    async with serving(settings_for(certificates), cluster):
        assert sorted(happened[: happened.index("kept")]) == ["a described", "b described"]
