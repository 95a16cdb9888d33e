"""Who has which CPUs, node by node, as placements, moves and releases tell it.

Books that contradict themselves are kept all the same: the map is where one sees it.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from kvplace.core.cpuset import cpus_of, parse_cpu_list
from kvplace.core.drawing.occupancy import printable
from kvplace.core.errors import BadBody
from kvplace.core.ledger import Claim, Ledger
from kvplace.core.quantity import counted


@dataclass(frozen=True, slots=True)
class Book:
    """Who has what, and what the reader should know about how it was read."""

    ledger: Ledger
    notes: tuple[str, ...] = ()

    def claim_of(self, name: str) -> Claim:
        """Find a VM by its id, pod or VMI, with or without its namespace; raises BadBody."""
        called: dict[str, list[Claim]] = {}
        for claim in self.ledger.claims.values():
            names = {claim.uid, claim.pod, claim.vmi}
            for known in names | {f"{claim.namespace}/{known}" for known in names}:
                called.setdefault(known, []).append(claim)
        claims = called.get(name, []) if name else []
        if len(claims) == 1:
            return claims[0]
        if claims:
            uids = ", ".join(claim.uid for claim in claims)
            raise BadBody(f"{printable(name)!r} is the name of several; name one of them by its UID: {uids}")
        near = difflib.get_close_matches(name, called, n=1)
        hint = f"; did you mean {printable(near[0])!r}?" if near else ""
        raise BadBody(f"{printable(name)[:60]!r} has no CPUs in --placements{hint}")


@dataclass(slots=True)
class _Node:
    claims: dict[str, Claim] = field(default_factory=dict)
    owners: dict[int, str] = field(default_factory=dict)
    elsewhere: int = 0
    """How many placements were made for a machine with another fingerprint."""

    def put(self, claim: Claim) -> None:
        self.claims[claim.uid] = claim
        for cpu in cpus_of(claim.owned):
            self.owners.setdefault(cpu, claim.uid)

    def drop(self, uid: str) -> None:
        del self.claims[uid]
        self.owners = {cpu: owner for cpu, owner in self.owners.items() if owner != uid}
        for claim in self.claims.values():
            for cpu in cpus_of(claim.owned):
                self.owners.setdefault(cpu, claim.uid)


class NodeBooks:
    """The books of all nodes that one text tells of; a node without a name is any machine.

    `where` is the place in the text that a note names; empty for the text as a whole.
    """

    def __init__(self, what: str) -> None:
        self._what = what
        self._nodes: dict[str, _Node] = {}
        self._notes: list[str] = []

    def note(self, where: str, sentence: str) -> None:
        """Keep what the reader should know."""
        self._notes.append(f"{where}: {sentence}" if where else sentence)

    def add(self, name: str, ledger: Ledger) -> None:
        """Take over the ledger of a node."""
        node = self._nodes.setdefault(name, _Node())
        node.claims |= ledger.claims
        node.owners |= ledger.owners

    def take(self, name: str, claim: Claim, where: str, *, elsewhere: bool) -> None:
        """Seat a VM on a node; `elsewhere` when that was decided for another machine."""
        node = self._nodes.setdefault(name, _Node())
        node.elsewhere += elsewhere
        if claim.uid in node.claims:
            self.note(where, f"{printable(claim.uid)!r} is placed again without a release; both are drawn")
            claim = replace(claim, uid=f"{claim.uid} ({where})", pod=f"{claim.pod} ({where})")
        node.put(claim)

    def claim_of(self, uid: str) -> Claim | None:
        """What a VM has, on whichever node."""
        return next((node.claims[uid] for node in self._with(uid)), None)

    def move(self, after: Claim) -> None:
        """Let a VM that sits somewhere have something else there."""
        node = self._with(after.uid)[0]
        node.drop(after.uid)
        node.put(after)

    def release(self, uid: str, where: str) -> None:
        """Take from a VM all that it has."""
        nodes = self._with(uid)
        if not nodes:
            self.note(where, f"{printable(uid)!r} is released and had nothing")
        for node in nodes:
            node.drop(uid)

    def book(self, machine: str, wanted: str | None) -> Book:
        """Give the book of the wanted node, else of the one with the machine's name; raises BadBody."""
        chosen = self._chosen(machine) if wanted is None else self._named(wanted)
        nodes = [self._nodes[name] for name in dict.fromkeys((chosen, "")) if name in self._nodes]
        elsewhere = sum(node.elsewhere for node in nodes)
        if elsewhere:
            self._notes.append(
                f"{self._what} holds {counted(elsewhere, 'placement')} made for a machine with another "
                "fingerprint than this one"
            )
        claims: dict[str, Claim] = {}
        owners: dict[int, str] = {}
        for node in nodes:
            claims |= node.claims
            owners |= node.owners
        return Book(Ledger(owners, claims), tuple(self._notes))

    def _with(self, uid: str) -> list[_Node]:
        return [node for node in self._nodes.values() if uid in node.claims]

    def _chosen(self, machine: str) -> str:
        named = sorted(filter(None, self._nodes))
        chosen = machine if machine in named or not named else named[0]
        if chosen != machine and len(named) > 1:
            raise BadBody(
                f"{self._what} is about the nodes {_few(named)}, none of them called {machine}; "
                "say with --node which one to draw"
            )
        if chosen != machine:
            self._notes.append(f"{self._what} is about node {printable(chosen)}, drawn on {machine}")
        if len(named) > 1:
            others = counted(len(named) - 1, "other node")
            self._notes.append(f"{self._what} is also about {others}, not drawn here")
        return chosen

    def _named(self, name: str) -> str:
        named = sorted(filter(None, self._nodes))
        if name in named:
            return name
        near = difflib.get_close_matches(name, named, n=1)
        if near:
            hint = f"did you mean {printable(near[0])!r}?"
        else:
            hint = f"it is about {_few(named)}" if named else "it names no node; leave out --node"
        raise BadBody(f"{self._what} tells of no VM on a node {printable(name)[:60]!r}; {hint}")


def _few(names: Sequence[str]) -> str:
    return ", ".join(map(printable, names[:5])) + (" and others" if len(names) > 5 else "")


def read_found(texts: Iterable[str], book: Book) -> dict[str, int]:
    """Read `--found VM=CPUS`, once for each VM, by the UID of its claim; raises BadBody."""
    found: dict[str, int] = {}
    for text in texts:
        name, equals, cpus = text.rpartition("=")
        if not equals:
            raise BadBody(f"--found {printable(text)[:60]!r} is not of the form VM=CPUS, for instance db=4-7")
        try:
            claim = book.claim_of(name)
            found[claim.uid] = found.get(claim.uid, 0) | parse_cpu_list(cpus, what="CPUs")
        except (BadBody, ValueError) as error:
            raise BadBody(f"--found: {error}") from None
    return found
