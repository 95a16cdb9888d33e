"""Tentative holds: cores that filter has chosen for pods whose bind has not come yet.

They exist in this process only: they keep pods that are being scheduled from choosing the same cores. What
counts is the claim in the ledger. A hold ends with its pod's bind, with the pod, or after a while.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from kvplace.core.ledger import Claim
from kvplace.core.scalars import NodeName, PodUid


@dataclass(frozen=True, slots=True)
class _Hold:
    node: NodeName
    until: float


class Holds:
    """Holds by pod UID and by node."""

    def __init__(
        self, *, seconds: float, clock: Callable[[], float], changed: Callable[[NodeName], None]
    ) -> None:
        """Hold for `seconds` of `clock`; `changed` is called with the node whenever its holds change."""
        self._seconds = seconds
        self._clock = clock
        self._changed = changed
        self._holds: dict[PodUid, _Hold] = {}
        self._on_node: dict[NodeName, dict[PodUid, Claim]] = {}

    def hold(self, node: NodeName, claim: Claim) -> None:
        """Hold what a pod would claim on a node; replaces its earlier hold."""
        uid = claim.uid
        self.drop(uid)
        self._holds[uid] = _Hold(node, self._clock() + self._seconds)
        self._on_node.setdefault(node, {})[uid] = claim
        self._changed(node)

    def drop(self, uid: PodUid) -> None:
        """End the hold of a pod, if it has one."""
        hold = self._holds.pop(uid, None)
        if hold is not None:
            held = self._on_node[hold.node]
            del held[uid]
            if not held:
                del self._on_node[hold.node]
            self._changed(hold.node)

    def drop_expired(self) -> None:
        """End the holds whose time is over; the oldest come first."""
        now = self._clock()
        for uid, hold in list(self._holds.items()):
            if hold.until > now:
                break
            self.drop(uid)

    def of_pod(self, uid: PodUid, node: NodeName) -> Claim | None:
        """Return what a pod holds on a node."""
        return self._on_node.get(node, {}).get(uid)

    def on_node(self, node: NodeName, *, but: PodUid | None = None) -> Iterator[Claim]:
        """Return what pods hold on a node, except the pod `but`."""
        return (claim for uid, claim in self._on_node.get(node, {}).items() if uid != but)
