"""Claims collected node by node, and the choice of the node that `kvplace map` draws.

Claims that contradict each other are kept: the map is where one sees them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from kvplace.core.cpuset import cpus_of
from kvplace.core.drawing.occupancy import printable
from kvplace.core.errors import BadBody
from kvplace.core.ledger import Claim, Ledger
from kvplace.core.near_words import did_you_mean
from kvplace.core.placement import Placement
from kvplace.core.quantity import counted
from kvplace.core.scalars import CpuId, PodUid


@dataclass(frozen=True, slots=True)
class NodeClaims:
    """The claims on one node, and notes for the reader."""

    ledger: Ledger
    notes: tuple[str, ...] = ()
    placements: Mapping[PodUid, Placement] = field(default_factory=lambda: MappingProxyType({}))
    """By the UIDs of the claims that were made from placements, which state more than a ledger."""

    def find(self, name: str) -> Claim:
        """Find a claim by id, pod, VMI or UID, with or without the namespace; raises BadBody."""
        by_name: dict[str, list[Claim]] = {}
        for claim in self.ledger.claims.values():
            names = {claim.uid, claim.pod, claim.vmi}
            for each in names | {f"{claim.namespace}/{each}" for each in names}:
                by_name.setdefault(each, []).append(claim)
        claims = by_name.get(name, []) if name else []
        if len(claims) == 1:
            return claims[0]
        if claims:
            uids = ", ".join(claim.uid for claim in claims)
            raise BadBody(f"{printable(name)!r} is the name of several VMs; give one of the UIDs {uids}")
        raise BadBody(f"no VM {printable(name)[:60]!r} in --placements{_suggestion(name, by_name)}")


@dataclass(frozen=True, slots=True)
class PlacedClaim:
    """A claim, and the placement that it was made from."""

    claim: Claim
    placement: Placement


@dataclass(slots=True)
class _Node:
    stored: Ledger = field(default_factory=Ledger)
    """From a NodeLedger."""
    placed: dict[PodUid, PlacedClaim] = field(default_factory=dict)
    """From placements, by UID."""
    other_machine: int = 0
    """How many placements were made for a machine with another fingerprint."""


class ClaimsByNode:
    """The claims that one document describes. Claims without a node count for any machine.

    `what` is the document's name. `where` is a position in it, for notes; empty for the whole.
    """

    def __init__(self, what: str) -> None:
        self._what = what
        self._nodes: dict[str, _Node] = {}
        self._notes: list[str] = []

    def note(self, where: str, sentence: str) -> None:
        """Keep something that the reader should know."""
        self._notes.append(f"{where}: {sentence}" if where else sentence)

    def add_ledger(self, name: str, ledger: Ledger) -> None:
        """Add the ledger of a node."""
        self._nodes.setdefault(name, _Node()).stored = ledger

    def add(self, name: str, placed: PlacedClaim, where: str, *, other_machine: bool) -> None:
        """Add the claim of a VM; `other_machine` when it was placed on a machine of another fingerprint."""
        claim = placed.claim
        node = self._nodes.setdefault(name, _Node())
        node.other_machine += other_machine
        if claim.uid in node.placed:
            self.note(where, f"{printable(claim.uid)!r} is placed again without a release; both are drawn")
            claim = replace(claim, uid=PodUid(f"{claim.uid} ({where})"), pod=f"{claim.pod} ({where})")
        node.placed[claim.uid] = replace(placed, claim=claim)

    def move(self, placed: PlacedClaim, where: str) -> None:
        """Replace the claim of a VM."""
        for node in self._holding(placed.claim.uid, where, "moved")[:1]:
            node.placed[placed.claim.uid] = placed

    def release(self, uid: PodUid, where: str) -> None:
        """Remove all claims of a VM."""
        for node in self._holding(uid, where, "released"):
            del node.placed[uid]

    @property
    def nodes(self) -> tuple[str, ...]:
        """The names of the nodes that are described."""
        return tuple(sorted(filter(None, self._nodes)))

    def on_node(self, machine: str, wanted: str | None) -> NodeClaims:
        """Return the claims on the wanted node, else on the one with the machine's name; raises BadBody."""
        name = self._chosen(machine) if wanted is None else self._checked(wanted)
        owners: dict[CpuId, PodUid] = {}
        claims: dict[PodUid, Claim] = {}
        placements: dict[PodUid, Placement] = {}
        other_machine = 0
        for node in (self._nodes[each] for each in dict.fromkeys((name, "")) if each in self._nodes):
            claims |= node.stored.claims
            owners |= node.stored.owners
            for uid, placed in node.placed.items():
                claims[uid] = placed.claim
                placements[uid] = placed.placement
                owners = dict.fromkeys(cpus_of(placed.claim.owned), uid) | owners
            other_machine += node.other_machine
        if other_machine:
            others = counted(other_machine, "placement")
            self.note("", f"{self._what} contains {others} made for a machine with another fingerprint")
        if not claims and not owners:
            self.note("", f"{self._what} contains no VM on this machine")
        return NodeClaims(Ledger(owners, claims), tuple(self._notes), placements)

    def _holding(self, uid: PodUid, where: str, verb: str) -> list[_Node]:
        nodes = [node for node in self._nodes.values() if uid in node.placed]
        if not nodes:
            self.note(where, f"{printable(uid)!r} is {verb} but was not placed")
        return nodes

    def _chosen(self, machine: str) -> str:
        names = self.nodes
        if not names or machine in names:
            chosen = machine
        elif len(names) == 1:
            (chosen,) = names
            self.note("", f"{self._what} describes node {printable(chosen)}, drawn on {machine}")
        else:
            raise BadBody(
                f"{self._what} describes the nodes {_few(names)}, none of them named {machine}; "
                "choose one with --node"
            )
        if len(names) > 1:
            self.note("", f"{self._what} also describes {counted(len(names) - 1, 'other node')}, not drawn")
        return chosen

    def _checked(self, name: str) -> str:
        names = self.nodes
        if name in names:
            return name
        suggestion = _suggestion(name, names)
        if not suggestion:
            suggestion = f"; it describes {_few(names)}" if names else "; it names no node, leave out --node"
        raise BadBody(f"{self._what} contains no VM on node {printable(name)[:60]!r}{suggestion}")


def _suggestion(name: str, known: Iterable[str]) -> str:
    return did_you_mean(name, map(printable, known))


def _few(names: Sequence[str]) -> str:
    return ", ".join(map(printable, names[:5])) + (" and others" if len(names) > 5 else "")
