"""The CPU requests of running pods that `kvplace serve` may change."""

from __future__ import annotations

import secrets

import pytest

from harness.control_plane.cluster import (
    MERGE_PATCH,
    STRATEGIC_MERGE_PATCH,
    ControlPlane,
    Json,
    RequestRefused,
)
from tests.manifests.policies import refused


def test_serve_raises_the_requests_of_a_pod_and_never_lowers_them(cluster: ControlPlane) -> None:
    serve = cluster.service_account_token("kvplace-system", "kvplace-serve")
    namespace = cluster.create_namespace(f"test-{secrets.token_hex(4)}")
    node = f"worker-{secrets.token_hex(4)}"
    # The API server resizes no pod that is larger than its node.
    cluster.request("POST", "/api/v1/nodes", {"metadata": {"name": node}})
    size = {"status": {"allocatable": {"cpu": "8", "memory": "8Gi"}, "capacity": {"cpu": "8"}}}
    cluster.request("PATCH", f"/api/v1/nodes/{node}/status", size, content_type=MERGE_PATCH)
    resources = {"requests": {"cpu": "400m", "memory": "1Gi"}}
    pod = {
        "metadata": {"name": "vm", "labels": {"kvplace.io/placed": "true"}},
        "spec": {
            "nodeName": node,
            "containers": [{"name": "compute", "image": "example.test/a", "resources": resources}],
        },
    }
    path = f"/api/v1/namespaces/{namespace}/pods"
    uid = cluster.request("POST", path, pod)["metadata"]["uid"]

    def resize(cpu: str, query: str = "") -> Json:
        requests = {"resources": {"requests": {"cpu": cpu}}}
        change = {"metadata": {"uid": uid}, "spec": {"containers": [{"name": "compute", **requests}]}}
        where = f"{path}/vm/resize{query}"
        return cluster.request("PATCH", where, change, content_type=STRATEGIC_MERGE_PATCH, token=serve)

    try:
        assert resize("4000m")["spec"]["containers"][0]["resources"]["requests"]["cpu"] == "4"
        refused(lambda: resize("3", "?dryRun=All"))
        with pytest.raises(RequestRefused, match="cannot be lowered"):
            resize("3")
    finally:
        cluster.request("DELETE", f"/api/v1/nodes/{node}")
