"""The map of a whole cluster: a line for each node, a mark for each core or for a few of them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TextIO

from kvplace.cli.output import Column, Output, console, document_text, rows_of, table_lines
from kvplace.cli.view_tables import NOTHING
from kvplace.core.cpuset import union
from kvplace.core.drawing.core_map_json import KIND, core_map_document
from kvplace.core.free_resources import Domain
from kvplace.core.node_topology import API_VERSION
from kvplace.core.scalars import CpuMask
from kvplace.core.topology import Topology
from kvplace.nodes.cluster_view import ClusterView, NodeView
from kvplace.nodes.drawn_node import draw_node
from kvplace.nodes.node_machine import Unusable

KEY = "# nothing free   : partly free   . all free   | between sockets, blanks between NUMA nodes"
_MOST_MARKS = 48
_WIDTH = 100
"""Columns of core maps in a file or pipe."""
_FREE, _PARTLY, _FULL = ".:#"


def draw_cluster(view: ClusterView, form: str, file: TextIO) -> None:
    """Draw all nodes: in `table` a line for each, the other forms a core map for each."""
    if form == "table":
        rows = rows_of(COLUMNS, view.nodes.values())
        file.write("\n".join(table_lines(rows)) + f"\n\n{KEY}\n")
        return
    drawings = [drawing for node in view.nodes.values() if (drawing := draw_node(node, ())) is not None]
    if form in ("json", "yaml"):
        maps = [core_map_document(drawing) for drawing in drawings]
        document = {"apiVersion": API_VERSION, "kind": f"{KIND}List", "items": maps}
        file.write(document_text(document, Output(form)))
        return
    from kvplace.cli.terminal_map import print_map

    for drawing in drawings:
        print_map(console(file, _WIDTH), drawing)
        file.write("\n")


def strip(topology: Topology, free: CpuMask) -> str:
    """Draw the cores of a machine in one line, in the order of sockets, NUMA nodes and L3 caches.

    On large machines a mark stands for several cores of one L3 cache.
    """
    each = -(-len(topology.cores) // _MOST_MARKS)
    return "|".join(
        " ".join(filter(None, _numa_strips(topology, package.cpus, free, each)))
        for package in topology.packages
    )


def _numa_strips(topology: Topology, cpus: CpuMask, free: CpuMask, each: int) -> Iterator[str]:
    for node in topology.numa_nodes:
        marks = ""
        for l3 in topology.l3_groups:
            cores = [CpuMask(core & cpus) for core in topology.cores_in(CpuMask(l3 & node.cpus & cpus))]
            for start in range(0, len(cores), each):
                marks += _mark(union(cores[start : start + each]), free)
        yield marks


def _mark(cpus: CpuMask, free: CpuMask) -> str:
    if not cpus & free:
        return _FULL
    return _FREE if cpus & free == cpus else _PARTLY


def _cores(node: NodeView) -> str:
    """Draw the cores of a node, or state why nothing can be placed there."""
    if isinstance(node.snapshot, Unusable):
        return node.problem
    return strip(node.snapshot.machine.topology, node.free)


COLUMNS: tuple[Column[NodeView], ...] = (
    Column("NODE", lambda node: node.name),
    Column("VMS", lambda node: str(len(node.ledger.claims))),
    Column("FREE", lambda node: NOTHING if node.problem else str(node.free.bit_count())),
    Column(
        "LARGEST-NUMA",
        lambda node: NOTHING if node.free_blocks is None else str(node.free_blocks.largest[Domain.NUMA].cpus),
    ),
    Column("CORES", _cores),
)
