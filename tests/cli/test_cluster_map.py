"""The map of a cluster: a line for each node."""

from __future__ import annotations

import io

from hypothesis import given

from kvplace.cli.output import Output
from kvplace.cli.view_tables import MAP_KEY, draw_cluster, strip
from kvplace.core.cpuset import parse_cpu_list
from kvplace.core.scalars import NO_CPUS, CpuMask, NodeName
from kvplace.core.topology import Topology
from kvplace.kube.object_records import NodeRecord, TopologyRecord
from kvplace.machines.server_types import read_machine
from kvplace.nodes.cluster_view import cluster_view
from tests.core.machines import topologies
from tests.nodes.machines import TWO


def test_a_mark_for_each_core_states_whether_its_threads_are_free() -> None:
    free = CpuMask(TWO.cpus & ~parse_cpu_list("0,8,4"))
    assert strip(TWO, free) == "#...|:..."


def test_on_a_large_machine_a_mark_stands_for_several_cores_of_one_cache() -> None:
    large = read_machine("2x-epyc-9354-nps2")
    assert len(strip(large, large.allocatable).replace("|", "").replace(" ", "")) <= 64
    assert strip(large, NO_CPUS).count("#") == len(strip(large, NO_CPUS).replace("|", "").replace(" ", ""))


@given(topologies())
def test_every_machine_can_be_drawn(topology: Topology) -> None:
    drawn = strip(topology, topology.allocatable)
    assert drawn.count("|") == len(topology.packages) - 1
    assert set(drawn) <= set(".:#| ")


def test_a_node_that_cannot_be_used_states_why() -> None:
    here, bare = NodeName("here"), NodeName("bare")
    records = [NodeRecord(here, "a"), NodeRecord(bare, "b")]
    view = cluster_view(records, [TopologyRecord(here, TWO)], [], [])
    drawn = io.StringIO()
    draw_cluster(view, Output.TABLE, drawn)
    head, first, second, _, key = drawn.getvalue().splitlines()
    assert head.split() == ["NODE", "VMS", "FREE", "LARGEST-NUMA", "CORES"]
    assert "neither a NodeTopology object nor a cpu-map annotation describes the node" in first
    assert second.split() == ["here", "0", "16", "8", "....|...."]
    assert key == MAP_KEY
