"""The cluster of a plan: a cluster document, or an example."""

from __future__ import annotations

from pathlib import Path

from kvplace.core.cluster.cluster_node import ClusterNode
from kvplace.documents.cluster import EXAMPLE, ClusterDocument
from kvplace.documents.model import read_model
from kvplace.documents.reading import read_document
from kvplace.machines.cluster import load_cluster, nodes_of


def read_plan_cluster(path: str | None) -> tuple[ClusterNode, ...]:
    """Read the nodes of a cluster, None for the example; raises BadBody that names file and key."""
    if path is not None:
        return load_cluster(Path(path))
    what = "the example cluster"
    return nodes_of(read_model(ClusterDocument, read_document(EXAMPLE, what), what), Path())
