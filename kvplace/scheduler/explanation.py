"""The sentence with the reason for a node, for pods with `kvplace.io/explain: true`.

It compares the chosen node with the next best node only. The ranking finds that one with one or a few
placements more, so an explained pod is planned like any other. `kvplace explain` gives the reasons of all
nodes.
"""

from __future__ import annotations

from kvplace.core.cluster.node_choice import Candidate, Strategy, why
from kvplace.core.placement import Placement
from kvplace.core.quantity import counted
from kvplace.core.scalars import NodeName

TAKEN = "no other room in the cluster, so pods planned for this node later give way"


def explain_choice(best: Candidate, next_best: Candidate | None, strategy: Strategy) -> str:
    """Write how local the pod is on the best node, and the advantage of this node over the next best."""
    reason = "no other node fits"
    if next_best is not None:
        reason = f"before {next_best.node}: {why(best, next_best, strategy)}"
    return explain_placement(best.node, best.placement, reason)


def explain_placement(node: NodeName, placement: Placement, reason: str) -> str:
    """Write how local the pod is on a node, and the reason for this node."""
    counts = (
        counted(len(placement.packages), "socket"),
        counted(len(placement.numa_nodes), "NUMA node"),
        counted(len(placement.l3_groups), "L3 group"),
    )
    return f"{node} ({', '.join(counts)}); {reason}"
