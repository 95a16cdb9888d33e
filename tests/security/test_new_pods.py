"""A new pod brings no cores with it that its author has not asked for, whether the webhooks answer or not."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from harness.control_plane.cluster import ControlPlane, Json, RequestRefused
from harness.kvplace_cluster.installation import Installation
from tests.security.conftest import (
    LABEL,
    MARKER,
    MINE,
    NODE,
    REQUEST,
    RESULTS,
    Tenant,
    everything_is_free,
    owners,
    pod,
    tried,
)


@pytest.fixture(params=["up", "down"], scope="module")
def webhooks(request: pytest.FixtureRequest, kvplace: Installation) -> Iterator[str]:
    """Let the webhooks answer, or not."""
    (replica,) = kvplace.replicas
    if request.param == "down":
        replica.process.kill()
    yield request.param
    if request.param == "down":
        replica.start()
        replica.wait_until_ready()


def marked(pod_: Json) -> Json:
    """Let kube-scheduler ask kvplace about a pod, as admission would."""
    pod_["spec"]["containers"][0]["resources"] = MARKER
    return pod_


def attempts(name: str) -> dict[str, Json]:
    """Describe pods by which a tenant might get cores without asking for them."""
    return {
        "forged results": marked(pod(name, {"annotations": RESULTS, "labels": LABEL}, MINE)),
        "forged results, bound by hand": pod(
            name, {"annotations": RESULTS, "labels": LABEL}, {"nodeName": NODE}
        ),
        "forged results and the label of a VM that asks": marked(
            pod(name, {"annotations": RESULTS, "labels": {**LABEL, "kvplace.io/opted-in": "true"}}, MINE)
        ),
        "label and marker without a request": marked(pod(name, {"labels": LABEL}, MINE)),
        "label alone, bound by hand": pod(name, {"labels": LABEL}, {"nodeName": NODE}),
        "asks and is bound by hand": pod(name, {"annotations": {"cpu-set": "any"}}, {"nodeName": NODE}),
        "pretends to be virt-launcher": marked(
            pod(
                name,
                {
                    "labels": {"kubevirt.io": "virt-launcher", **LABEL, "kvplace.io/opted-in": "true"},
                    "annotations": {"cpu-set": "any", "kvplace.io/vm-size": REQUEST},
                    "ownerReferences": [
                        {
                            "apiVersion": "kubevirt.io/v1",
                            "kind": "VirtualMachineInstance",
                            "name": "somebody-elses",
                            "uid": "u",
                            "controller": True,
                        }
                    ],
                },
                MINE,
            )
        ),
        "results without the label": marked(
            pod(name, {"annotations": {"cpu-map": RESULTS["cpu-map"]}}, MINE)
        ),
        "a huge annotation": pod(name, {"annotations": {"cpu-set": "one-socket" + "x" * 200_000}}),
    }


@pytest.mark.parametrize("attempt", attempts(""))
def test_a_new_pod_brings_no_cores_with_it(
    cluster: ControlPlane, tenant: Tenant, webhooks: str, name: str, attempt: str
) -> None:
    made = tried(lambda: tenant.ask("POST", tenant.pods, attempts(name)[attempt]))
    if isinstance(made, RequestRefused):
        assert made.status in (400, 403, 409, 422, 500), made
        return
    annotations = made["metadata"].get("annotations", {})
    assert "kvplace.io/placement" not in annotations
    assert "kvplace.io/request" not in annotations
    if webhooks == "up":
        everything_is_free(cluster, tenant)
    assert made["metadata"]["uid"] not in owners(cluster).values()
