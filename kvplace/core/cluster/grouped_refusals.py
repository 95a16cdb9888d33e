"""The refusals of many nodes for one VM, grouped by reason.

kube-scheduler counts nodes with equal texts ("412 no NUMA node with 8 free CPUs, best 6 on worker-17
numa 1"), so all nodes that refuse for one reason get one text, which names the best of them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol, TypeVar

from kvplace.core.placement import THE_MACHINE, Refusal
from kvplace.core.quantity import counted
from kvplace.core.scalars import NodeName


class Grouped(Protocol):
    """The key that groups refusals."""

    @property
    def group(self) -> tuple[str, bool, str]:
        """Equal for refusals for one reason."""
        ...

    @property
    def missing(self) -> int:
        """How much is missing; the best node is the one with the least."""
        ...


R = TypeVar("R", bound=Grouped)


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
    def texts(self) -> dict[NodeName, str]:
        """The texts by node."""
        found: dict[NodeName, str] = {}
        for group in self.groups:
            found |= dict.fromkeys(group.nodes, group.text)
        return found

    @property
    def curable(self) -> list[NodeName]:
        """The nodes where the VM would fit if others left."""
        return [node for group in self.groups if not group.refusal.never for node in group.nodes]

    @property
    def summary(self) -> str:
        """All groups in one sentence."""
        return "; ".join(f"{counted(len(group.nodes), 'node')}: {group.text}" for group in self.groups)


def grouped(refusals: Mapping[NodeName, Refusal]) -> GroupedRefusals:
    """Group nodes by the reason of their refusal."""
    return grouped_by(refusals, lambda refusal: refusal)


def grouped_by(refusals: Mapping[NodeName, R], in_full: Callable[[R], Refusal]) -> GroupedRefusals:
    """Group nodes by the reason of refusal; only the best node of each group is needed in full."""
    by_reason: defaultdict[tuple[str, bool, str], list[tuple[int, NodeName]]] = defaultdict(list)
    for node, refusal in refusals.items():
        by_reason[refusal.group].append((refusal.missing, node))
    groups = []
    for entries in by_reason.values():
        _, best = min(entries)
        groups.append(RefusalGroup(tuple([node for _, node in entries]), best, in_full(refusals[best])))
    return GroupedRefusals(tuple(sorted(groups, key=lambda group: (-len(group.nodes), group.text))))
