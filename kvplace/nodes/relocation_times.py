"""When pods were last relocated, as this process has seen it in the ledgers.

A relocation costs its VM a moment and moves its memory. So a VM that has just moved is left in peace for a
while: shortly after an edit of its own owner, longer before it moves for others. A process that has just
started knows of no relocation before, which allows one too many.
"""

from __future__ import annotations

import asyncio
import math

from kvplace.core.scalars import NodeName, PodUid
from kvplace.kube.ledgers import Ledgers

PAUSE_AFTER_EDIT_S = 10.0
"""A VM whose owner edits it again and again gets other cores this often at most."""
PEACE_S = 600.0
"""A VM that got other cores is not moved for others for so long."""


class RelocationTimes:
    """Follows the ledgers; forgets a pod with its claim, and after the longest of the times above."""

    def __init__(self, ledgers: Ledgers) -> None:
        self._ledgers = ledgers
        self._seen: dict[NodeName, dict[PodUid, float]] = {}
        """When each pod was last seen to be relocating."""
        ledgers.subscribe(self._ledger_seen)

    def rest_s(self, node: NodeName, pod: PodUid, peace_s: float) -> float:
        """Return for how long a pod is still to be left in peace, given how long that lasts."""
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
