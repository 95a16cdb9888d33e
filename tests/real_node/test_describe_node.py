"""`describe-node` on a real node: its pod sees the same machine as the agent, and is gone afterwards."""

from __future__ import annotations

import json

from harness.real_node.cluster import RealCluster
from kvplace.core.errors import ExitCode
from tests.cli.calls import call_process


def test_the_pod_sees_the_machine_that_the_agent_sees(kvplace: RealCluster) -> None:
    plane = kvplace.plane
    agents = plane.request("GET", "/apis/kvplace.io/v1alpha1/nodetopologies/n1")["spec"]
    called = call_process(
        "describe-node", "n1", "--reserved", agents["reserved"], "--kubeconfig", str(plane.kubeconfig)
    )
    assert called.code == ExitCode.DONE, called.err
    described = json.loads(called.out)
    assert described["metadata"]["name"] == "n1"
    for level in ("packages", "l3Groups", "cores", "reserved"):
        assert described["spec"][level] == agents[level]
    labels = "app.kubernetes.io/component=describe-node"
    assert plane.request("GET", f"/api/v1/pods?labelSelector={labels}")["items"] == []
