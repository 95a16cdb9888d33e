"""The cluster of a plan: a cluster document, or a small example."""

from __future__ import annotations

from pathlib import Path

from kvplace.core.cluster.cluster_node import ClusterNode
from kvplace.core.errors import BadBody
from kvplace.documents.cluster import ClusterDocument
from kvplace.documents.model import read_model
from kvplace.documents.reading import read_document, source_name
from kvplace.machines.cluster import load_cluster, nodes_of

SMALL_CLUSTER = """\
nodes:
- {name: worker, count: 4, machine: 2x-epyc-9354-nps2}
- {name: edge, count: 2, machine: epyc-7502p}
"""


def read_plan_cluster(path: str | None) -> tuple[ClusterNode, ...]:
    """Read the nodes of a cluster, None for the example; raises BadBody that names file and key."""
    if path is None:
        what = "the small cluster"
        cluster = nodes_of(read_model(ClusterDocument, read_document(SMALL_CLUSTER, what), what), Path())
    else:
        cluster = load_cluster(Path(path))
    seen: dict[str, str] = {}
    for node in cluster:
        for vm in node.running:
            if vm.id in seen:
                where = f"on {seen[vm.id]} and on {node.name}"
                raise BadBody(f"{source_name(path or '')}: duplicate VM id {vm.id!r} {where}")
            seen[vm.id] = node.name
    return cluster
