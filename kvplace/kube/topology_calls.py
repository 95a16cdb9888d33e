"""The calls on NodeTopologies and NodeResourceTopologies, as values; `ApiCluster` makes them.

A new object is owned by its node, so it is deleted together with the node. Every change names the state that
it was decided, with a resource version.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from kvplace.core.node_topology import API_VERSION, GROUP, VERSION
from kvplace.core.resource_topology import API_VERSION as RESOURCE_TOPOLOGIES
from kvplace.core.scalars import NodeName
from kvplace.kube.object_records import NodeRecord, ResourceTopologyRecord
from kvplace.kube.session import METADATA_ONLY, Call, path_of

RESOURCE = "nodetopologies"
RESOURCE_TOPOLOGY = "noderesourcetopologies"
"""The kind that other schedulers read about NUMA nodes."""
_encode = msgspec.json.encode


def create_call(node: NodeRecord, spec: Mapping[str, Any], written_by: Mapping[str, str]) -> Call:
    """Create the NodeTopology of a node."""
    return Call(
        "create",
        RESOURCE,
        _path(),
        name=node.name,
        query=written_by,
        body=_encode(
            {
                "apiVersion": API_VERSION,
                "kind": "NodeTopology",
                "metadata": _metadata_of_new(node),
                "spec": spec,
            }
        ),
        accept=METADATA_ONLY,
    )


def change_call(
    node: NodeName, version: str, change: Mapping[str, Any], written_by: Mapping[str, str], *subresource: str
) -> Call:
    """Change a NodeTopology, or a subresource of it, that still has this resource version."""
    return Call(
        "patch",
        "/".join((RESOURCE, *subresource)),
        _path(node, *subresource),
        name=node,
        query=written_by,
        body=_encode({"metadata": {"resourceVersion": version}, **change}),
        accept=METADATA_ONLY,
    )


def read_resource_topology_call(node: NodeName) -> Call:
    """Ask for the metadata of a NodeResourceTopology."""
    return Call("get", RESOURCE_TOPOLOGY, _resource_topology_path(node), name=node, accept=METADATA_ONLY)


def write_resource_topology_call(
    node: NodeRecord,
    document: Mapping[str, Any],
    before: ResourceTopologyRecord | None,
    written_by: Mapping[str, str],
) -> Call:
    """Create a NodeResourceTopology, or replace the one that is still as `before` states."""
    if before is None:
        metadata, name = _metadata_of_new(node), []
    else:
        metadata, name = {"resourceVersion": before.resource_version}, [node.name]
    return Call(
        "create" if before is None else "patch",
        RESOURCE_TOPOLOGY,
        _resource_topology_path(*name),
        name=node.name,
        query=written_by,
        body=_encode({**document, "metadata": {**document["metadata"], **metadata}}),
        accept=METADATA_ONLY,
    )


def _metadata_of_new(node: NodeRecord) -> dict[str, Any]:
    """Name a new object after a node; the API server deletes both together."""
    owner = {"apiVersion": "v1", "kind": "Node", "name": node.name, "uid": node.uid}
    return {"name": node.name, "ownerReferences": [owner]}


def _path(*segments: str) -> str:
    return path_of("apis", GROUP, VERSION, RESOURCE, *segments)


def _resource_topology_path(*segments: str) -> str:
    group, _, version = RESOURCE_TOPOLOGIES.partition("/")
    return path_of("apis", group, version, RESOURCE_TOPOLOGY, *segments)
