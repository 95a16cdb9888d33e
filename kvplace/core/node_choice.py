"""Which node a VM goes to, given what each node could give it.

Every replica and every offline command ranks with the same key, so equal states give equal nodes.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from itertools import combinations
from operator import attrgetter

from kvplace.core.placement import Placement
from kvplace.core.topology import Topology

MAX_SCORE = 10
"""Highest score an extender may give (MaxExtenderPriority in k8s.io/kube-scheduler)."""


class Strategy(Enum):
    """What the operator wants of many nodes (`serve --strategy`)."""

    PACK = "pack"
    SPREAD = "spread"


@dataclass(frozen=True)
class Candidate:
    """A node that can hold the VM: where it would sit and how full the node is already."""

    node: str
    topology: Topology
    placement: Placement
    free_cpus: int
    """CPUs free for exclusive use before this VM."""

    def rank(self, strategy: Strategy) -> tuple[int, int, int, int, int, str]:
        """Smaller is better: how well the VM sits, then how full the node is, then its name."""
        return self.packed if strategy is Strategy.PACK else self.spread

    # A candidate lives until its node changes, and is compared for every VM that comes meanwhile.

    @cached_property
    def packed(self) -> tuple[int, int, int, int, int, str]:
        """The rank where VMs fill nodes up."""
        return (*quality(self.topology, self.placement), self.free_cpus, self.node)

    @cached_property
    def spread(self) -> tuple[int, int, int, int, int, str]:
        """The rank where VMs spread over nodes."""
        return (*quality(self.topology, self.placement), -self.free_cpus, self.node)


def quality(topology: Topology, placement: Placement) -> tuple[int, int, int, int]:
    """How a VM sits: sockets, NUMA nodes, largest distance between them, L3 groups; smaller is better."""
    distances = [topology.distance(a, b) for a, b in combinations(placement.numa_nodes, 2)]
    return (
        len(placement.packages),
        len(placement.numa_nodes),
        max(distances, default=0),
        len(placement.l3_groups),
    )


def best_candidate(candidates: Iterable[Candidate], strategy: Strategy) -> Candidate | None:
    """Choose the node for a VM; None when there is no candidate."""
    # attrgetter, since this is asked of every node for every pod.
    rank = attrgetter("packed" if strategy is Strategy.PACK else "spread")
    return min(candidates, key=rank, default=None)


def scores(candidates: Iterable[Candidate], strategy: Strategy) -> dict[str, int]:
    """Score nodes from 0 to 10 by their order: the best gets 10, equal ranks get equal scores."""
    ranked = sorted((candidate.rank(strategy)[:-1], candidate.node) for candidate in candidates)
    places = {rank: place for place, rank in enumerate(dict.fromkeys(rank for rank, _ in ranked))}
    steps = max(1, len(places) - 1)
    return {node: MAX_SCORE - (places[rank] * MAX_SCORE) // steps for rank, node in ranked}
