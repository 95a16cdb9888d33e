"""An agent with the rights and policies of the manifests, and no others, publishes its node."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from harness.control_plane.cluster import ControlPlane
from harness.waiting import PATIENCE_S
from kvplace.agent.node_objects import NodeObjects
from kvplace.agent.node_report import NodeReport
from kvplace.agent.publisher import Publisher
from kvplace.agent.this_machine import MachineWatch
from kvplace.core.node_topology import Enforcement
from kvplace.core.scalars import NodeName
from kvplace.kube.api_cluster import ApiCluster
from kvplace.kube.credentials import CredentialOptions
from kvplace.kube.object_records import TopologyRecord
from kvplace.kube.session import open_session
from kvplace.service.process import in_background
from tests.agent.hosts import Host
from tests.manifests.agents import Agent


async def test_an_agent_with_its_own_rights_publishes_everything(
    cluster: ControlPlane,
    agent: Agent,
    resource_topologies: None,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    machine = MachineWatch(Host(tmp_path / "host").settings())
    own, report = NodeObjects(NodeName(agent.node), machine.machine.topology), NodeReport()
    credentials = CredentialOptions(kubeconfig=str(cluster.kubeconfig), token=agent.token)
    client = ApiCluster(await open_session(credentials), component="agent")
    publisher = Publisher(client, own, machine, report)
    published = asyncio.Event()

    def seen(_before: TopologyRecord | None, after: TopologyRecord | None) -> None:
        if after is not None and after.enforcement is Enforcement.NRI:
            published.set()

    own.topologies.subscribe(seen)
    try:
        async with in_background(*(store.run(client) for store in own.stores), publisher.run()):
            report.enforce(Enforcement.NRI)
            report.complete()
            async with asyncio.timeout(PATIENCE_S):
                await published.wait()
    finally:
        await client.close()
    assert "denies us" not in caplog.text
    node = cluster.request("GET", f"/api/v1/nodes/{agent.node}")
    assert node["metadata"]["annotations"]["cpu-map"] == '{"socket0":["1","5"],"socket1":["2","3","6","7"]}'
    topology = cluster.request("GET", f"/apis/kvplace.io/v1alpha1/nodetopologies/{agent.node}")
    conditions = {entry["type"]: entry["status"] for entry in topology["status"]["conditions"]}
    known = {"Ready": "True", "Described": "True", "KubeletState": "True", "DevicesKnown": "False"}
    assert conditions == known
    assert topology["status"]["observedGeneration"] == topology["metadata"]["generation"]
    (owner,) = topology["metadata"]["ownerReferences"]
    assert (owner["kind"], owner["uid"]) == ("Node", node["metadata"]["uid"])
    path = f"/apis/topology.node.k8s.io/v1alpha2/noderesourcetopologies/{agent.node}"
    zones = cluster.request("GET", path)["zones"]
    assert [zone["name"] for zone in zones] == ["node-0", "node-1"]
