"""Tentative holds: cores that filter promised to pods whose bind has not come yet.

They live in this process only and promise nothing to anybody: they keep pods in flight from running into
each other. What counts is the claim in the ledger. A hold ends with its pod's bind, with the pod, or
after a while.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from kvplace.core.ledger import Claim


@dataclass(frozen=True, slots=True)
class _Hold:
    node: str
    claim: Claim
    until: float


class Holds:
    """Holds by pod UID and by node."""

    def __init__(self, *, seconds: float, clock: Callable[[], float], changed: Callable[[str], None]) -> None:
        """Hold for `seconds` of `clock`; `changed` is told the node whenever its holds change."""
        self._seconds = seconds
        self._clock = clock
        self._changed = changed
        self._holds: dict[str, _Hold] = {}
        self._on_node: dict[str, dict[str, Claim]] = {}

    def hold(self, node: str, claim: Claim) -> None:
        """Hold for a pod what it would claim; replaces its earlier hold."""
        self.drop(claim.uid)
        self._holds[claim.uid] = _Hold(node, claim, self._clock() + self._seconds)
        self._on_node.setdefault(node, {})[claim.uid] = claim
        self._changed(node)

    def drop(self, uid: str) -> None:
        """End the hold of a pod, if it has one."""
        hold = self._holds.pop(uid, None)
        if hold is not None:
            del self._on_node[hold.node][uid]
            self._changed(hold.node)

    def drop_expired(self) -> None:
        """End the holds whose time is over; they are in order of their time."""
        now = self._clock()
        for uid, hold in list(self._holds.items()):
            if hold.until > now:
                break
            self.drop(uid)

    def of_pod(self, uid: str, node: str) -> Claim | None:
        """What a pod holds on a node."""
        hold = self._holds.get(uid)
        return hold.claim if hold is not None and hold.node == node else None

    def on_node(self, node: str, *, but: str = "") -> Iterator[Claim]:
        """What pods hold on a node, without the pod `but`."""
        return (claim for uid, claim in self._on_node.get(node, {}).items() if uid != but)

    def __len__(self) -> int:
        return len(self._holds)
