"""A cluster of one node as `explain` reads it, and the questions that tests ask about it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec

from kvplace.admission.stated_request import stated_request
from kvplace.core.cluster.node_choice import Strategy
from kvplace.core.request_json import PodRequest
from kvplace.core.scalars import NodeName
from kvplace.explain.explanation import Explanation
from kvplace.explain.reading import explain_document, explain_target, read_target
from kvplace.explain.report import explanation_document
from kvplace.kube.object_client import Document, ObjectClient
from kvplace.kube.watches import ApiKind
from tests.kube.faulty_cluster import FaultyCluster

T = TypeVar("T")
WORKER = NodeName("worker")
READY = {"conditions": [{"type": "Ready", "status": "True"}]}
LABELS = {"kubevirt.io/schedulable": "true"}


def node(name: str = "worker", **spec: Any) -> dict[str, Any]:
    return {"metadata": {"name": name, "labels": LABELS}, "spec": spec, "status": READY}


class Objects(ObjectClient):
    """The objects of a cluster that only `explain` checks."""

    def __init__(self) -> None:
        self.stored: dict[tuple[str, str], Document] = {}
        self.nodes: list[Document] = [node()]
        self.events: list[Document] = []
        self.elsewhere: list[Document] = []
        """Objects of other namespaces."""

    def put(self, resource: str, document: Document) -> None:
        self.stored[resource, document["metadata"]["name"]] = document

    async def read(self, kind: ApiKind, name: str, *, namespace: str = "") -> Document | None:
        assert namespace == "default"
        return self.stored.get((kind.resource, name))

    async def read_list(
        self, kind: ApiKind, *, namespace: str = "", labels: str = "", fields: str = ""
    ) -> tuple[Document, ...]:
        if kind.resource != "events":
            assert namespace == ""
            return tuple(
                one for one in self.elsewhere if fields == f"metadata.name={one['metadata']['name']}"
            )
        return tuple(
            event
            for event in self.events
            if f"involvedObject.kind={event['involvedObject']['kind']},"
            f"involvedObject.name={event['involvedObject']['name']}" == fields
        )

    async def read_list_as(
        self, form: type[T], kind: ApiKind, *, namespace: str = "", labels: str = "", fields: str = ""
    ) -> tuple[T, ...]:
        assert kind.resource == "nodes"
        return tuple(msgspec.convert(one, form) for one in self.nodes)


def stated(document: Document, namespace: str) -> PodRequest | None:
    return stated_request(document, namespace=namespace)


async def explained(objects: Objects, cluster: FaultyCluster, target: str) -> Explanation:
    found = await explain_target(objects, cluster, read_target(target, "default"), stated, Strategy.PACK)
    assert explanation_document(found)["name"] == found.name
    return found


async def written(objects: Objects, cluster: FaultyCluster, document: Document) -> Explanation:
    return await explain_document(objects, cluster, document, "default", stated, Strategy.PACK)


def pod_document(name: str, uid: str, **status: Any) -> dict[str, Any]:
    return {
        "kind": "Pod",
        "metadata": {"name": name, "namespace": "default", "uid": uid},
        "spec": {"schedulerName": "kvplace-scheduler"},
        "status": status,
    }


def event(kind: str, name: str, when: str, message: str, **other: Any) -> Mapping[str, Any]:
    return {
        "metadata": {"name": f"{name}.{when}"},
        "involvedObject": {"kind": kind, "name": name},
        "lastTimestamp": when,
        "reason": "Tested",
        "message": message,
        **other,
    }
