"""The parts of `serve` together: after the end of a hold, refused pods are tried again."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from dataclasses import replace

import aiohttp

from harness.certificates import Certificates
from harness.waiting import PATIENCE_S
from kvplace.core.scalars import NodeName
from kvplace.core.well_known_names import PLACED_LABEL, RELEASED_AT, REQUEST
from kvplace.kube.object_records import PodRecord
from kvplace.scheduler.extender import ExtenderSettings
from kvplace.serve.process import serving
from tests.controller.replicas import asking_pod
from tests.kube.faulty_cluster import FaultyCluster
from tests.nodes.machines import EIGHT
from tests.serve.served import settings_for


class _WokenCluster(FaultyCluster):
    def __init__(self) -> None:
        super().__init__()
        self.woken = asyncio.Event()

    async def annotate_node(self, node: NodeName, annotations: Mapping[str, str | None]) -> None:
        await super().annotate_node(node, annotations)
        if RELEASED_AT in annotations:
            self.woken.set()


async def test_a_hold_that_expires_wakes_who_was_refused(certificates: Certificates) -> None:
    cluster = _WokenCluster()
    cluster.create_node("a", topology=EIGHT)
    settings = replace(settings_for(certificates), extender=ExtenderSettings(hold_seconds=0.2))
    async with (
        serving(settings, cluster) as addresses,
        aiohttp.ClientSession() as session,
    ):

        async def filtered(pod: PodRecord) -> list[str]:
            metadata = {
                "name": pod.name,
                "namespace": "default",
                "uid": pod.uid,
                "annotations": {REQUEST: pod.request},
                "labels": {PLACED_LABEL: "true"},
            }
            async with session.post(
                f"https://{addresses['extender']}/v1/filter",
                data=json.dumps({"Pod": {"metadata": metadata, "spec": {}}, "NodeNames": ["a"]}),
                ssl=certificates.as_client(certificates.client),
            ) as answer:
                names: list[str] = (await answer.json())["NodeNames"]
                return names

        assert await filtered(asking_pod(cluster, "first", 8)) == ["a"]
        asking_pod(cluster, "refused")
        cluster.change_pod("default", "refused", was_tried=True)
        async with asyncio.timeout(PATIENCE_S):
            await cluster.woken.wait()
