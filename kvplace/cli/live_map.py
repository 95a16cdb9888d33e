"""Core maps of the nodes of a live cluster, from their ledgers and what their agents have measured."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvplace.core.errors import Absent, KvplaceError

if TYPE_CHECKING:
    from kvplace.cli.cluster_flags import ClusterFlags
    from kvplace.core.drawing.core_map import CoreMap
    from kvplace.nodes.cluster_view import ClusterView


def names_a_node(machine: str) -> bool:
    """Whether the name is that of a node: it is neither a file nor a server type, and there is a kubeconfig.

    Without a kubeconfig a likely typo of a server type names no node; raises Absent for any other name.
    """
    from pathlib import Path

    from kvplace.core.near_words import near_word
    from kvplace.kube.kubeconfig import kubeconfig_files
    from kvplace.machines.server_types import machine_names

    if not machine or machine == "-" or "/" in machine or machine in machine_names():
        return False
    try:
        if Path(machine).exists():
            return False
    except OSError:
        return False
    if kubeconfig_files(None) is None:
        if near_word(machine, machine_names()):
            return False
        raise Absent(
            f"{machine!r} is neither a file nor a server type, and no kubeconfig names a cluster with nodes: "
            "set KUBECONFIG or give --kubeconfig, or choose a type that `kvplace topology --help` lists"
        )
    return True


def drawn_node(flags: ClusterFlags, name: str) -> CoreMap:
    """Read one node and draw it; raises KvplaceError with the reason why there is nothing to draw."""
    from kvplace.cli.live_cluster import LiveCluster, run_with_cluster
    from kvplace.core.near_words import did_you_mean
    from kvplace.core.scalars import NodeName
    from kvplace.kube.watches import NODES
    from kvplace.machines.server_types import machine_names
    from kvplace.nodes.cluster_reading import read_node
    from kvplace.nodes.drawn_node import draw_node

    node = NodeName(name)

    async def read(live: LiveCluster) -> CoreMap:
        view = await read_node(live.api, node)
        if node not in view.nodes:
            known = [record.name for record in await live.api.read_all(NODES)]
            raise Absent(
                f"{live.session.server} has no node {name!r}{did_you_mean(name, [*known, *machine_names()])}"
            )
        drawing = draw_node(view.nodes[node], view.by_node.get(node, ()))
        if drawing is None:
            raise KvplaceError(f"node {name} cannot be drawn: {view.nodes[node].problem}")
        return drawing

    return run_with_cluster(flags, read)


def whole_cluster(flags: ClusterFlags) -> ClusterView:
    """Read all nodes, without their VMs: the ledgers name those."""
    from kvplace.cli.live_cluster import run_with_cluster
    from kvplace.nodes.cluster_reading import read_cluster

    return run_with_cluster(flags, lambda live: read_cluster(live.api, pods=None))
