"""How long claims have been as they are, by this process's own clock.

The clocks of two machines differ, and jump. So the date in a claim distinguishes attempts, and nothing more;
what counts is how long this process has seen it unchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable

from kvplace.core.ledger import Claim
from kvplace.core.scalars import NodeName, PodUid


class ClaimAges:
    """When each claim was first seen with its present date."""

    def __init__(self, clock: Callable[[], float]) -> None:
        """`clock` returns seconds and never jumps."""
        self._clock = clock
        self._seen: dict[NodeName, dict[PodUid, tuple[str, float]]] = {}

    def look(self, node: NodeName, claims: Iterable[Claim]) -> None:
        """Take in the claims of a node that may end by age; all others are forgotten."""
        now, before = self._clock(), self._seen.pop(node, {})
        seen = {claim.uid: _since(claim, before.get(claim.uid), now) for claim in claims}
        if seen:
            self._seen[node] = seen

    def keep(self, nodes: Container[NodeName]) -> None:
        """Forget all other nodes."""
        self._seen = {node: claims for node, claims in self._seen.items() if node in nodes}

    def forget(self, node: NodeName, uid: PodUid) -> None:
        """Forget a claim that is gone."""
        seen = self._seen.get(node, {})
        seen.pop(uid, None)
        if not seen:
            self._seen.pop(node, None)

    def age_s(self, node: NodeName, claim: Claim) -> float:
        """Return how long a claim has been seen as it is; 0 for one that `look` has not met."""
        now = self._clock()
        return now - _since(claim, self._seen.get(node, {}).get(claim.uid), now)[1]


def _since(claim: Claim, known: tuple[str, float] | None, now: float) -> tuple[str, float]:
    date = claim.since
    if claim.reserved is not None:
        date = f"{claim.reserved.until} {claim.owned}"  # it is renewed, and grows
    return known if known is not None and known[0] == date else (date, now)
