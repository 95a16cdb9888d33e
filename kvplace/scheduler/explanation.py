"""The sentence that says why a node was chosen, for pods that ask to keep it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kvplace.core.cluster.grouped_refusals import grouped
from kvplace.core.cluster.node_choice import Candidate, Strategy, best_candidate, why
from kvplace.core.refusal import Refusal
from kvplace.core.scalars import NodeName

_NAMED = 10
"""Nodes that are named at most; all are counted."""
_LONGEST = 4000


def explain_choice(
    best: Candidate, candidates: Sequence[Candidate], refusals: Mapping[NodeName, Refusal], strategy: Strategy
) -> str:
    """Write what the best node had before the next best, and why the others cannot hold the VM."""
    others = [candidate for candidate in candidates if candidate is not best]
    next_best = best_candidate(others, strategy)
    text = f"{best.node} of {len(candidates)} that fit"
    if next_best is not None:
        text += f" (also {', '.join(sorted(one.node for one in others)[:_NAMED])})"
        text += f"; before {next_best.node}: {why(best, next_best, strategy)}"
    summary = grouped(refusals).summary
    return (f"{text}; {summary}" if summary else text)[:_LONGEST]
