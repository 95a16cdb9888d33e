"""The distances between the NUMA nodes of a core map, in as few words as they need.

On most machines one number states how far the nodes of a socket are from each other, and another one how far
sockets are. Where it is not as simple, each node has a phrase of its own. Nothing is reported of what the
machine does not report.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import permutations

from kvplace.core.cpuset import format_cpu_list, mask_of
from kvplace.core.drawing.core_map import CoreMap
from kvplace.core.scalars import NumaId, PackageId

TITLE = "NUMA distances:"
_INSIDE, _BETWEEN, _WITHOUT = "inside a socket", "between sockets", "to nodes without CPUs"


def distance_phrases(drawing: CoreMap) -> tuple[str, ...]:
    """Give phrases to be read behind TITLE; none where there is one node or no distance is known."""
    distances = {
        node.id: node.distances
        for nodes in (*(package.nodes for package in drawing.packages), drawing.memory_only)
        for node in nodes
    }
    sockets: dict[NumaId, set[PackageId]] = {number: set() for number in distances}
    for package in drawing.packages:
        for node in package.nodes:
            sockets[node.id].add(package.id)
    found: dict[str, set[int | None]] = {}
    for one, other in permutations(distances, 2):
        relation = _relation(sockets[one], sockets[other])
        found.setdefault(relation, set()).add(distances[one].get(other))
    values = {relation: next(iter(each)) for relation, each in found.items() if len(each) == 1}
    if len(values) == len(found) and None not in values.values():
        return tuple(
            f"{values[relation]} {relation}"
            for relation in (_INSIDE, _BETWEEN, _WITHOUT)
            if relation in values
        )
    return tuple(_by_node(distances))


def _relation(one: set[PackageId], other: set[PackageId]) -> str:
    if not one or not other:
        return _WITHOUT
    return _INSIDE if one & other else _BETWEEN


def _by_node(distances: Mapping[NumaId, Mapping[NumaId, int]]) -> Iterator[str]:
    for one in sorted(distances):
        others = {other: value for other, value in distances[one].items() if other in distances}
        others.pop(one, None)
        nodes = {
            value: format_cpu_list(mask_of(other for other in others if others[other] == value))
            for value in sorted(set(others.values()))
        }
        if nodes:
            yield f"from {one}: {'; '.join(f'{value} to {ids}' for value, ids in nodes.items())}"
