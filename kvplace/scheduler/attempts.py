"""kube-scheduler's attempts at pods that are not bound yet, as this replica has been asked.

For metrics and the log: since when a pod is being placed, which attempt this is, and whether the reason of a
refusal is news. UID and attempt together name one decision. And whether kube-scheduler will still ask about
more nodes.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from kvplace.core.scalars import PodUid
from kvplace.kube.records import PodRecord
from kvplace.kube.store import Store
from kvplace.scheduler.remembered_pods import forget_gone

_SAME_ATTEMPT_S = 1.0
"""Between two questions of one attempt; the next attempt comes a second later, or after a change."""
_REMEMBERED = 10_000
"""Pods that are remembered at most; the one whose first attempt is longest ago is forgotten first."""


@dataclass(slots=True)
class _Attempts:
    since: float
    count: int = 0
    refusal: str = ""
    nominated_refused_at: float = float("-inf")


class Attempts:
    """Attempts by pod UID."""

    def __init__(self, known: Store[PodUid, PodRecord], clock: Callable[[], float]) -> None:
        """`clock` times placements."""
        self._known = known
        self._clock = clock
        self._pods: OrderedDict[PodUid, _Attempts] = OrderedDict()

    def begin(self, uid: PodUid) -> int:
        """Note that Filter is asked about a pod; returns how often it has been, this time included."""
        found = self._pods.get(uid)
        if found is None:
            found = self._pods[uid] = _Attempts(self._clock())
            forget_gone(self._pods, self._known.records)
            if len(self._pods) > _REMEMBERED:
                self._pods.popitem(last=False)
        found.count += 1
        return found.count

    def number(self, uid: PodUid) -> int:
        """Return the number of a pod's newest attempt; 0 if this replica has not been asked."""
        found = self._pods.get(uid)
        return 0 if found is None else found.count

    def is_news(self, uid: PodUid, refusal: str) -> bool:
        """Note why a pod does not fit; returns whether its last refusal had another reason."""
        found = self._pods.get(uid)
        if found is None or found.refusal == refusal:
            return found is None
        found.refusal = refusal
        return True

    def nominated_refused_twice(self, uid: PodUid) -> bool:
        """Note that a pod's nominated node alone is refused; returns whether it was a moment ago, too.

        kube-scheduler asks about this node first, and then at once about all that it accepts. The second
        question is the same as the first where it accepts no other.
        """
        found = self._pods.get(uid)
        if found is None:
            return False
        now = self._clock()
        is_second = now - found.nominated_refused_at < _SAME_ATTEMPT_S
        found.nominated_refused_at = float("-inf") if is_second else now
        return is_second

    def seconds(self, uid: PodUid) -> float | None:
        """Return how long ago the first attempt began; None if there was none here."""
        found = self._pods.get(uid)
        return None if found is None else self._clock() - found.since

    def forget(self, uid: PodUid) -> None:
        """Forget a pod that is bound or gone."""
        self._pods.pop(uid, None)
