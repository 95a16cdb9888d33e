"""Admission registered with the API server of the tests."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Iterator

import pytest

from harness.control_plane.cluster import ControlPlane
from tests.admission.registered import Server, registered
from tests.admission.reviewed_objects import plain_pod
from tests.admission.stored_pods import create, forged_pod
from tests.admission.webhooks import Webhooks
from tests.manifests.policies import refused

Admission = tuple[Server, str]
"""The server, and the namespace whose objects are sent to it."""


@pytest.fixture(scope="module")
def admission(control_plane: ControlPlane) -> Iterator[Admission]:
    """Serve admission for one namespace, and for kube-system, which the manifests exclude."""
    name = f"admission-{secrets.token_hex(4)}"
    control_plane.create_namespace(name)
    server = Server(control_plane)
    try:
        with (
            registered(
                control_plane,
                "admission/mutating-webhooks.yaml",
                [name, "kube-system"],
                name=name,
                url=server.url,
            ),
            registered(
                control_plane,
                "admission/validating-webhooks.yaml",
                [name, "kube-system"],
                name=name,
                url=server.url,
            ),
        ):
            misspelt = plain_pod({"cpu-set": "?"})
            path = f"/api/v1/namespaces/{name}/pods?dryRun=All"
            refused(lambda: control_plane.request("POST", path, misspelt))
            yield server, name
    finally:
        server.stop()
        control_plane.remove_namespace(name)


@pytest.fixture(scope="module")
def frozen(control_plane: ControlPlane) -> Iterator[str]:
    """Put the policy in effect in one namespace, without webhooks."""
    name = f"frozen-{secrets.token_hex(4)}"
    control_plane.create_namespace(name)
    with registered(control_plane, "policy/pod-results.yaml", [name], name=name):
        refused(lambda: create(control_plane, name, forged_pod(), dry_run=True))
        yield name
    control_plane.remove_namespace(name)


@pytest.fixture(scope="module")
def running() -> Iterator[Webhooks]:
    with asyncio.Runner() as runner:
        webhooks = Webhooks(runner)
        yield webhooks
        webhooks.close()


@pytest.fixture
def webhooks(running: Webhooks) -> Webhooks:
    running.vmis.stored.clear()
    running.vmis.away = False
    running.largest = None
    return running
