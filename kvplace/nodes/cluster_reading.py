"""A view of the cluster, read once: the lists of its four kinds, page by page and at the same time."""

from __future__ import annotations

from dataclasses import replace

from kvplace.core.scalars import NodeName
from kvplace.kube.concurrency import together
from kvplace.kube.object_records import NodeRecord
from kvplace.kube.watches import (
    EVERYTHING,
    LEDGERS,
    NAME_FIELD,
    NODE_FIELD,
    NODES,
    PLACED_PODS,
    PODS,
    TOPOLOGIES,
    Kind,
    ListClient,
    Selector,
)
from kvplace.nodes.cluster_view import ClusterView, cluster_view


async def read_cluster(
    cluster: ListClient,
    *,
    nodes: Selector = EVERYTHING,
    pods: Selector | None = PLACED_PODS,
    kind: Kind[NodeName, NodeRecord] = NODES,
) -> ClusterView:
    """Read the selected nodes, and the selected VMs of all nodes; None for no VMs.

    With `kind` NODE_STATUSES nodes have their status.

    Needs rights on the whole cluster. VMs are most of what is read, and ledgers name them, too.
    """
    found, topologies, ledgers, vms = await together(
        cluster.read_all(kind, nodes),
        cluster.read_all(TOPOLOGIES),
        cluster.read_all(LEDGERS),
        _nothing() if pods is None else cluster.read_all(PODS, pods),
    )
    if nodes != EVERYTHING:
        names = {node.name for node in found}
        topologies = tuple(each for each in topologies if each.node in names)
        ledgers = tuple(each for each in ledgers if each.node in names)
    return cluster_view(found, topologies, ledgers, vms)


async def read_node(
    cluster: ListClient,
    name: NodeName,
    *,
    pods: bool = True,
    kind: Kind[NodeName, NodeRecord] = NODES,
) -> ClusterView:
    """Read one node and the VMs on it; the view is empty where nothing of it is left."""
    selector = Selector(fields={NAME_FIELD: name})
    nodes, topologies, ledgers, vms = await together(
        cluster.read_all(kind, selector),
        cluster.read_all(TOPOLOGIES, selector),
        cluster.read_all(LEDGERS, selector),
        cluster.read_all(PODS, replace(PLACED_PODS, fields={NODE_FIELD: name})) if pods else _nothing(),
    )
    return cluster_view(nodes, topologies, ledgers, vms)


async def _nothing() -> tuple[()]:
    return ()
