"""The nodes that kube-scheduler has offered last, by the shape of the pod it asked about.

Its plugins accept the same nodes for pods of one shape, but for what pods request and what has changed since.
So pods that follow within a few seconds are planned over these nodes, without a look of kube-scheduler at all
nodes of the cluster. Where that is wrong for a pod, kube-scheduler refuses the node nominated for it, looks
at all nodes, and so offers new ones.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict

from kvplace.core.scalars import NodeName

OFFER_S = 5.0
"""How long an offer is used: a node that is new, or free again, is not considered before."""
_SHAPES = 64
"""Shapes whose offers are remembered, the last ones."""


class OfferedNodes:
    """The last offer for each shape."""

    def __init__(self) -> None:
        self._offers: OrderedDict[bytes, tuple[float, frozenset[NodeName]]] = OrderedDict()

    def remember(self, shape: bytes, names: frozenset[NodeName]) -> None:
        """Keep what kube-scheduler offers now."""
        self._offers[shape] = (asyncio.get_running_loop().time(), names)
        self._offers.move_to_end(shape)
        while len(self._offers) > _SHAPES:
            self._offers.popitem(last=False)

    def of_shape(self, shape: bytes) -> frozenset[NodeName] | None:
        """Return what was offered for a shape, if it was only a moment ago."""
        offered_at, names = self._offers.get(shape, (float("-inf"), frozenset[NodeName]()))
        return names if asyncio.get_running_loop().time() - offered_at < OFFER_S else None
