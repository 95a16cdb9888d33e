"""Refusals of many nodes, told so that kube-scheduler can count them.

kube-scheduler groups nodes with equal texts ("412 no NUMA node with 8 free CPUs, best 6 on worker-17
numa 1"), so all nodes that fail for one reason get one text, with the best of them named.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from kvplace.core.quantity import counted
from kvplace.core.refusal import THE_MACHINE, Reason, Refusal


@dataclass(frozen=True, slots=True)
class GroupedRefusals:
    """Texts by node: those that time may mend and those that no departing pod can."""

    failed: Mapping[str, str]
    unresolvable: Mapping[str, str]
    summary: str
    """All groups in one sentence, largest first."""


def grouped(refusals: Mapping[str, Refusal]) -> GroupedRefusals:
    """Give every node the text of its group."""
    groups: dict[tuple[Reason, bool, str], list[str]] = {}
    for node, refusal in refusals.items():
        plain = "" if "where" in refusal.shortfall else refusal.message
        groups.setdefault((refusal.reason, refusal.never, plain), []).append(node)
    failed: dict[str, str] = {}
    unresolvable: dict[str, str] = {}
    told: list[tuple[int, str]] = []
    for (_, never, _), nodes in groups.items():
        text = _text(nodes, refusals)
        told.append((len(nodes), text))
        (unresolvable if never else failed).update(dict.fromkeys(nodes, text))
    told.sort(key=lambda pair: (-pair[0], pair[1]))
    summary = "; ".join(f"{counted(count, 'node')}: {text}" for count, text in told)
    return GroupedRefusals(failed, unresolvable, summary)


def _text(nodes: list[str], refusals: Mapping[str, Refusal]) -> str:
    best = min(nodes, key=lambda node: (_missing(refusals[node]), node))
    message = refusals[best].message
    where = refusals[best].shortfall.get("where")
    if not isinstance(where, str):
        return message
    return message.replace(f" on {where}", f" on {best}" if where == THE_MACHINE else f" on {best} {where}")


def _missing(refusal: Refusal) -> int:
    missing = refusal.shortfall.get("missing", 0)
    return missing if isinstance(missing, int) else 0
