"""The real API server with kvplace's own kinds and a world on it; ledgers of a process have virtual time."""

from __future__ import annotations

import asyncio
from asyncio import AbstractEventLoop
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path

import pytest

from harness.control_plane.cluster import MERGE_PATCH, ControlPlane
from tests.kube.worlds import LEDGERS_PATH, ApiWorld, MemoryWorld
from tests.manifests.policies import refused
from tests.virtual_time import JumpingLoop

MANIFESTS = Path(__file__).resolve().parents[2] / "manifests"
UID = "00000000-0000-0000-0000-000000000001"


def pytest_asyncio_loop_factories(item: pytest.Item) -> Mapping[str, Callable[[], AbstractEventLoop]]:
    """Choose the event loop of a test."""
    if item.path.name in {"test_group_commit.py", "test_ledgers.py"}:
        return {"virtual": JumpingLoop}
    return {"real": asyncio.new_event_loop}


@pytest.fixture(scope="package")
def ledger_server(control_plane: ControlPlane) -> ControlPlane:
    """Serve NodeLedger and NodeTopology, and guard the claims of ledgers, and ledgers from deletion."""
    for file in (
        "crd/nodeledgers.yaml",
        "crd/nodetopologies.yaml",
        "node-resource-topology/noderesourcetopologies.yaml",
        "policy/ledger-claims.yaml",
        "policy/ledger-deletion.yaml",
    ):
        control_plane.kubectl("apply", "--server-side", "--force-conflicts", "-f", str(MANIFESTS / file))
    control_plane.wait_for_crds(
        "nodeledgers.kvplace.io",
        "nodetopologies.kvplace.io",
        "noderesourcetopologies.topology.node.k8s.io",
    )
    wait_until_guarded(control_plane)
    return control_plane


def wait_until_guarded(plane: ControlPlane) -> None:
    """Return when both policies are in effect; the API server needs a moment for this."""
    name = "guarded"
    spec = {"owners": {"0": UID}, "claims": {UID: claim_json()}}
    plane.request("POST", LEDGERS_PATH, ledger_json(name, spec))
    path = f"{LEDGERS_PATH}/{name}"
    refused(lambda: plane.request("DELETE", f"{path}?dryRun=All"))
    gone: dict[str, object] = {"spec": {"claims": {UID: None}}}
    refused(lambda: plane.request("PATCH", f"{path}?dryRun=All", gone, content_type=MERGE_PATCH))
    released: dict[str, object] = {"spec": {"owners": {"0": None}, "claims": {UID: None}}}
    plane.request("PATCH", path, released, content_type=MERGE_PATCH)
    plane.request("DELETE", path)


def ledger_json(name: str, spec: object) -> dict[str, object]:
    return {
        "apiVersion": "kvplace.io/v1alpha1",
        "kind": "NodeLedger",
        "metadata": {"name": name},
        "spec": spec,
    }


def claim_json() -> dict[str, object]:
    return {"namespace": "default", "pod": "p", "policy": "exclusive", "cpus": "0"}


@pytest.fixture
async def memory_world() -> AsyncIterator[MemoryWorld]:
    world = MemoryWorld()
    yield world
    await world.close()


@pytest.fixture
async def api_world(ledger_server: ControlPlane, namespace: str) -> AsyncIterator[ApiWorld]:
    world = await ApiWorld.open(ledger_server, namespace)
    yield world
    await world.close()
