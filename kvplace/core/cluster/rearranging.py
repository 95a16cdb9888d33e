"""Assigning VMs in other ways, where the way at hand leaves some of them without a node.

For a bounded piece of a cluster: the nodes of one plan and its VMs, all of which own their CPUs. It is worth
its time only where a cluster is nearly full.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TypeAlias

from kvplace.core.cluster.bin_packing import FillOrder, pack
from kvplace.core.cluster.cluster_node import ClusterNode
from kvplace.core.cluster.draft import Draft, DraftNode, PlacementCache, Shape, shapes_of
from kvplace.core.cluster.greedy import as_many_as_can_fit, assign_all, hardest_first, tightest
from kvplace.core.cluster.local_search import exchange
from kvplace.core.free import Free
from kvplace.core.placement import Placement
from kvplace.core.request import Request
from kvplace.core.scalars import NodeName
from kvplace.core.topology import Topology

Arrangement: TypeAlias = Mapping[int, tuple[NodeName, Placement]]
"""Node and placement of each VM that has one, by the number of the VM."""


def better_arrangements(
    nodes: Mapping[NodeName, tuple[Topology, Free]],
    requests: Sequence[Request],
    known: Arrangement,
    *,
    first: int | None,
) -> Iterator[Arrangement | None]:
    """Try several ways; yield after each one what it found, or None if that is no better than all before.

    `nodes` says what is free without the VMs. Better is more VMs, then more vCPUs. The VM `first` keeps a
    place, if it has one.
    """
    shapes = shapes_of(requests)
    cache = PlacementCache()
    empty = Draft(
        [
            DraftNode(ClusterNode(name, topology), cache, (), {}, free)
            for name, (topology, free) in nodes.items()
        ],
        {},
    )
    index = {name: number for number, name in enumerate(nodes)}
    best = empty.copy()
    for vm, (name, placement) in known.items():
        best.assign(vm, index[name], placement)
    for way in _ways(empty, shapes):
        draft = best.copy() if way is None else empty.copy()
        if way is None:
            exchange(draft, shapes)
        else:
            way(draft)
        keeps_first = first is None or first in draft.node_of or first not in best.node_of
        if keeps_first and _size(draft, shapes) > _size(best, shapes):
            best = draft
            yield {
                vm: (draft.nodes[number].node.name, draft.placement_of(vm))
                for vm, number in draft.node_of.items()
            }
        else:
            yield None
        if len(best.node_of) == len(shapes):
            return


def _ways(empty: Draft, shapes: Sequence[Shape]) -> Iterator[Callable[[Draft], None] | None]:
    """Return the ways to assign VMs to an empty draft, and None for repairing the best one."""
    hardest = hardest_first(empty, shapes)
    many = as_many_as_can_fit(empty, shapes)
    yield lambda draft: assign_all(draft, hardest, shapes, tightest)
    yield lambda draft: assign_all(draft, many, shapes, tightest)
    yield lambda draft: pack(draft, hardest, shapes, FillOrder.LARGE)
    yield lambda draft: pack(draft, many, shapes, FillOrder.COMMON)
    yield None


def _size(draft: Draft, shapes: Sequence[Shape]) -> tuple[int, int]:
    return (len(draft.node_of), sum(shapes[vm].vcpus for vm in draft.node_of))
