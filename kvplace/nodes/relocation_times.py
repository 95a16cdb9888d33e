"""When pods were last relocated, as this process has seen it in the ledgers.

A relocation pauses its VM for a moment and moves its memory. So a VM that has just moved stays where it is
for a time: a short one before an edit moves it again, a longer one before it moves for others. A process
that has just started knows of no earlier relocation, so it may allow one too early.
"""

from __future__ import annotations

import asyncio
import math

from kvplace.core.scalars import NodeName, PodUid
from kvplace.kube.ledgers import Ledgers

PAUSE_AFTER_EDIT_S = 10.0
"""The least time between two relocations of a VM by edits of its options."""
PEACE_S = 600.0
"""How long a VM that got other cores stays before it may move for others."""


class RelocationTimes:
    """Follows the ledgers; forgets a pod with its claim, and after the longest of the times above."""

    def __init__(self, ledgers: Ledgers) -> None:
        self._ledgers = ledgers
        self._seen: dict[NodeName, dict[PodUid, float]] = {}
        """When each pod was last seen to be relocating."""
        ledgers.subscribe(self._ledger_seen)

    def rest_s(self, node: NodeName, pod: PodUid, peace_s: float) -> float:
        """Return how many seconds remain until `peace_s` has passed since the last relocation of a pod."""
        last = self._seen.get(node, {}).get(pod)
        return 0.0 if last is None else max(0.0, last + peace_s - asyncio.get_running_loop().time())

    def _ledger_seen(self, node: NodeName) -> None:
        record, before = self._ledgers.current(node), self._seen.get(node, {})
        claims = {} if record is None else record.ledger.claims
        if not before and all(claim.relocation is None for claim in claims.values()):
            return
        now = asyncio.get_running_loop().time()
        seen = {
            uid: now if claim.relocation is not None else before[uid]
            for uid, claim in claims.items()
            if claim.relocation is not None or before.get(uid, -math.inf) > now - PEACE_S
        }
        if seen:
            self._seen[node] = seen
        else:
            self._seen.pop(node, None)
