"""The refusals of many nodes for one VM, grouped by reason.

kube-scheduler counts nodes with equal texts ("412 no NUMA node with 8 free CPUs, best 6 on worker-17
numa 1"), so all nodes that refuse for one reason get one text, which names the best of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from kvplace.core.quantity import counted
from kvplace.core.refusal import THE_MACHINE, Reason, Refusal
from kvplace.core.scalars import NodeName


@dataclass(frozen=True, slots=True)
class RefusalGroup:
    """Nodes that refuse for one reason."""

    nodes: tuple[NodeName, ...]
    best: NodeName
    """The node where least is missing."""
    refusal: Refusal
    """The refusal of that node."""

    @property
    def text(self) -> str:
        """The refusal with the name of the node in it."""
        where = self.refusal.shortfall.get("where")
        if not isinstance(where, str):
            return self.refusal.message
        place = self.best if where == THE_MACHINE else f"{self.best} {where}"
        return self.refusal.message.replace(f" on {where}", f" on {place}")


@dataclass(frozen=True, slots=True)
class GroupedRefusals:
    """All groups, the largest first."""

    groups: tuple[RefusalGroup, ...]

    @property
    def failed(self) -> dict[NodeName, str]:
        """The texts by node, of nodes where the VM may fit later."""
        return {node: text for node, text, never in self._texts() if not never}

    @property
    def unresolvable(self) -> dict[NodeName, str]:
        """The texts by node, of nodes where the VM does not fit even when they are empty."""
        return {node: text for node, text, never in self._texts() if never}

    @property
    def summary(self) -> str:
        """All groups in one sentence."""
        return "; ".join(f"{counted(len(group.nodes), 'node')}: {group.text}" for group in self.groups)

    def _texts(self) -> list[tuple[NodeName, str, bool]]:
        return [
            (node, text, group.refusal.never)
            for group in self.groups
            for text in [group.text]
            for node in group.nodes
        ]


def grouped(refusals: Mapping[NodeName, Refusal]) -> GroupedRefusals:
    """Group nodes by what they refuse for."""
    nodes_by_key: dict[tuple[Reason, bool, str], list[NodeName]] = {}
    for node, refusal in refusals.items():
        message = "" if "where" in refusal.shortfall else refusal.message
        nodes_by_key.setdefault((refusal.reason, refusal.never, message), []).append(node)
    groups = []
    for nodes in nodes_by_key.values():
        best = min(nodes, key=lambda node: (_missing(refusals[node]), node))
        groups.append(RefusalGroup(tuple(nodes), best, refusals[best]))
    return GroupedRefusals(tuple(sorted(groups, key=lambda group: (-len(group.nodes), group.text))))


def _missing(refusal: Refusal) -> int:
    missing = refusal.shortfall.get("missing", 0)
    return missing if isinstance(missing, int) else 0
